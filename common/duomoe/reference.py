# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The op reference in Markdown, from the op table: `python -m duomoe.reference > docs/ops.md`."""

from __future__ import annotations

from duomoe import ops

HEADER = """# Op reference

Made from the op table by `make reference`; a test compares the two.

Every op exists as `torch.ops.duomoe.<name>` and as the XLA FFI target `duomoe.<name>`. The public
functions of `jax_frontend` and `torch_frontend` call them; few users need an op itself.

Axis letters: T tokens, E experts, K experts per token, D model width, N width of a product,
F expert hidden width, R permuted rows, S sequences. `x`, `w`, `b` and `g` as dtypes stand for any
of float32, bfloat16 and float16; the same letter is the same dtype. Under `jit` an op is sharded
along the axes that it names; outputs that lack such an axis are summed over the shards, all other
axes are gathered.
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


def markdown() -> str:
    """The whole page."""
    return "\n\n".join([HEADER.rstrip(), *map(_section, ops.table().values())]) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
