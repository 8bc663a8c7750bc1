# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The reference pages in Markdown, from the op table and the docstrings:
`python -m duomoe.reference docs` writes docs/ops.md, docs/api.md and docs/router.md.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from duomoe import (
    ExpertConfig,
    RouterConfig,
    convert,
    debug_checks,
    hf,
    hf_weights,
    ops,
    presets,
    results,
    router_page,
)
from duomoe.replay import RoutingRecord

HEADER = """# Op reference

Made from the op table by `make reference`; a test compares the two.

Every op exists as `torch.ops.duomoe.<name>` and as the XLA FFI target `duomoe.<name>`. The public
functions of `jax_frontend` and `torch_frontend` call them; few users need an op itself.

Axis letters: T tokens, E experts, K experts per token, D model width, N width of a product,
F expert hidden width, R permuted rows, S sequences, B bins or bytes, C chunks, W = 2 E + 1 columns
of a row map. `x`, `w`, `b` and `g` as dtypes stand for any of float32, bfloat16 and float16; the
same letter is the same dtype. Under `jit` an op is sharded along the axes that it names; outputs
that lack such an axis are summed over the shards, all other axes are gathered.
"""


def _tensor(spec: ops.TensorSpec) -> str:
    dtype = spec.dtype.strip("<>") if spec.dtype.startswith("<") else spec.dtype.removeprefix("@")
    shape = ", ".join(spec.axes)
    return f"`{spec.name}` [{shape}] {dtype}" + (" (optional)" if spec.optional else "")


def _attribute(spec: ops.AttributeSpec) -> str:
    text = f"`{spec.name}` "
    if spec.kind == "choice":
        text += " / ".join(spec.choices)
    else:
        text += spec.kind + (f", at least {spec.minimum}" if spec.kind == "int" else "")
    if spec.axis:
        text += f" (= {spec.axis})"
    return text + (f" (dtype of `{spec.dtype_of}`)" if spec.dtype_of else "")


def _section(op: ops.Op) -> str:
    lines = [f"## {op.name}", "", op.summary, "", "| | |", "|---|---|"]
    lines.append("| inputs | " + "<br>".join(map(_tensor, op.inputs)) + " |")
    lines.append("| outputs | " + "<br>".join(map(_tensor, op.outputs)) + " |")
    if op.attributes:
        lines.append("| attributes | " + "<br>".join(map(_attribute, op.attributes)) + " |")
    if op.backward:
        lines.append("| gradient | " + ", ".join(f"`{name}`" for name in op.backward) + " |")
    lines.append("| sharded along | " + (", ".join(op.shard_axes) or "no axis") + " |")
    return "\n".join(lines)


def ops_page() -> str:
    """docs/ops.md."""
    return "\n\n".join([HEADER.rstrip(), *map(_section, ops.table().values())]) + "\n"


API_HEADER = """# Functions

Made from the docstrings by `make reference`; a test compares the two.

`jax_frontend` and `torch_frontend` have the functions below with the same arguments, but for the
one that names where tokens are spread: `axis_name` in JAX, `group` in PyTorch. Arrays are
`jax.Array` (or NumPy arrays) or `torch.Tensor`. In the `te` modules each front end keeps the order
of arguments that its users know; see [te](te.md). The modules are torch's; those of Flax take the
same options, see [modules](modules.md). What begins with `duomoe.` needs no framework: see
[replay](replay.md), [convert](convert.md) and [hf](hf.md).
"""

MODULES = ("MoE", "Router", "Experts", "SharedExperts", "record_routing", "replay_routing")
RECORD_METHODS = (
    "from_layers",
    "from_array",
    "concatenate",
    "pad",
    "layer",
    "select_layers",
    "save",
    "load",
)
WEIGHT_FUNCTIONS = ("moe_params", "hf_state_dict")
CONVERT_FUNCTIONS = (
    "to_numpy",
    "flatten",
    "unflatten",
    "numpy_state_dict",
    "torch_state_dict",
    "jax_variables",
    "save_file",
    "load_file",
)


def _api_section(name: str, thing: Any) -> str:
    # Annotations are strings; their quotes go, those of defaults stay.
    text = str(inspect.signature(thing)).replace("duomoe.results.", "")
    signature = re.sub(r"(: |-> )(?:'([^']*)'|\"([^\"]*)\")", lambda m: m[1] + (m[2] or m[3]), text)
    heading = f"## {name}\n\n```\n{name}{signature}\n```"
    return f"{heading}\n\n```text\n{inspect.getdoc(thing)}\n```"


def _preset_section(model: presets.Model) -> str:
    # Only the options in which the model differs from RouterConfig's defaults.
    options = ", ".join(f"{name}={value!r}" for name, value in model.options.items())
    call = f"duomoe.presets.{model.name}(*, {options}, ...) -> RouterConfig"
    return f"## duomoe.presets.{model.name}\n\n```\n{call}\n```\n\n```text\n{model.facts()}\n```"


def api_page() -> str:
    """docs/api.md; needs torch, whose front end stands for both."""
    frontend = importlib.import_module("torch_frontend")
    functions = [n for n in frontend.__all__ if n.islower() and n not in MODULES]
    entries: list[tuple[str, Any]] = [(n, getattr(frontend, n)) for n in functions]
    entries += [("RouterConfig", RouterConfig), ("RouterConfig.from_hf", RouterConfig.from_hf)]
    entries += [("RouterConfig.capacity", RouterConfig.capacity)]
    entries += [("ExpertConfig", ExpertConfig), ("ExpertConfig.from_hf", ExpertConfig.from_hf)]
    entries += [(record.__name__, record) for record in results.RECORDS]
    entries += [(f"torch_frontend.{n}", getattr(frontend, n)) for n in MODULES]
    entries += [("duomoe.hf.layer_kinds", hf.layer_kinds), ("duomoe.debug_checks", debug_checks)]
    entries += [("duomoe.RoutingRecord", RoutingRecord)]
    entries += [(f"duomoe.RoutingRecord.{n}", getattr(RoutingRecord, n)) for n in RECORD_METHODS]
    entries += [(f"duomoe.convert.{n}", getattr(convert, n)) for n in CONVERT_FUNCTIONS]
    entries += [(f"duomoe.hf_weights.{n}", getattr(hf_weights, n)) for n in WEIGHT_FUNCTIONS]
    te = importlib.import_module("torch_frontend.te")
    entries += [(f"torch_frontend.te.{n}", getattr(te, n)) for n in te.__all__ if n.islower()]
    sections = [_api_section(name, thing) for name, thing in entries]
    sections += map(_preset_section, presets.MODELS.values())
    return "\n\n".join([API_HEADER.rstrip(), *sections]) + "\n"


PAGES = {"ops.md": ops_page, "api.md": api_page, "router.md": router_page.page}


if __name__ == "__main__":
    for page, make in PAGES.items():
        (Path(sys.argv[1]) / page).write_text(make())
