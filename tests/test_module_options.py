# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Modules refuse bad options when they are made, in the same words in every framework."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from duomoe import ExpertConfig, RouterConfig

CONFIG = RouterConfig(8, 2)
# The options of an MoE; "width", "hidden" and "config" are its first arguments.
CASES: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "width": (TypeError, "width must be an int, got '8'", {"width": "8"}),
    "width 0": (ValueError, "width must be at least 1, got 0", {"width": 0}),
    "hidden": (ValueError, "hidden must be at least 1, got -6", {"hidden": -6}),
    "hidden float": (TypeError, "hidden must be an int, got 6.0", {"hidden": 6.0}),
    "config": (TypeError, "config must be a RouterConfig, got int", {"config": 8}),
    "experts": (TypeError, "experts must be an ExpertConfig, got str", {"experts": "silu"}),
    "gated only": (
        ValueError,
        "experts.limit and experts.up_offset are for gated experts, but gated is False",
        {"experts": ExpertConfig(limit=7.0), "gated": False},
    ),
    "shared_hidden": (ValueError, "shared_hidden must be at least 0", {"shared_hidden": -1}),
    "shared_router": (
        ValueError,
        "shared_router needs shared experts, got shared_hidden=0",
        {"shared_router": True},
    ),
    "factor": (ValueError, "factor must be above 0, got -1", {"capacity_factor": -1}),
    "factor kind": (TypeError, "factor must be a float, got 'all'", {"capacity_factor": "all"}),
    "drop_order": (
        ValueError,
        "drop_order must be one of 'position', 'weight', got 'probs'",
        {"drop_order": "probs"},
    ),
    "alignment": (ValueError, "alignment must be between 1 and", {"alignment": 0}),
    "max_rows": (
        ValueError,
        "max_rows (6) must be a multiple of alignment (4)",
        {"max_rows": 6, "alignment": 4},
    ),
    "gate_dtype": (ValueError, "gate_dtype must be one of 'float32', ", {"gate_dtype": "fp32"}),
    "balance": (
        TypeError,
        "load_balancing_coeff must be a float, got None",
        {"load_balancing_coeff": None},
    ),
    "z": (ValueError, "z_loss_coeff must be finite, got nan", {"z_loss_coeff": np.nan}),
    "recompute": (TypeError, "recompute must be a bool, got 1", {"recompute": 1}),
}


def modules(kind: str, framework: str) -> Any:
    """A class of modules, of which `functools.partial` holds what only nnx needs."""
    if framework == "torch":
        return getattr(pytest.importorskip("torch_frontend"), kind)
    pytest.importorskip("flax")
    if framework == "linen":
        import jax_frontend.linen

        return getattr(jax_frontend.linen, kind)
    import functools

    from flax import nnx

    import jax_frontend.nnx

    return functools.partial(getattr(jax_frontend.nnx, kind), rngs=nnx.Rngs(0))


FRAMEWORKS = [
    pytest.param("torch", marks=pytest.mark.torch),
    pytest.param("linen", marks=pytest.mark.jax),
    pytest.param("nnx", marks=pytest.mark.jax),
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", CASES)
def test_options_of_a_block(case: str, framework: str) -> None:
    error, words, options = CASES[case]
    first = [options.get("width", 16), options.get("hidden", 12), options.get("config", CONFIG)]
    others = {k: v for k, v in options.items() if k not in ("width", "hidden", "config")}
    make = modules("MoE", framework)
    with pytest.raises(error, match=re.escape(words)):
        make(*first, **others)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("kind", "given", "error", "words"),
    [
        ("Router", (0, CONFIG), ValueError, "width must be at least 1, got 0"),
        ("Router", (4, 8), TypeError, "config must be a RouterConfig, got int"),
        ("Experts", (4, 0, 8), ValueError, "hidden must be at least 1, got 0"),
        ("Experts", (4, 4, 0), ValueError, "num_experts must be at least 1, got 0"),
        ("Experts", (4, 4, 8, CONFIG), TypeError, "config must be an ExpertConfig, got Router"),
        ("SharedExperts", (4, 1.5), TypeError, "hidden must be an int, got 1.5"),
    ],
)
def test_options_of_the_parts(
    kind: str, given: tuple[Any, ...], error: type[Exception], words: str, framework: str
) -> None:
    """Linen makes parameters when it first runs."""
    make = modules(kind, framework)
    with pytest.raises(error, match=words):
        module = make(*given)
        import jax

        module.init(jax.random.key(0), np.zeros((2, 4), np.float32), method="parameters")


@pytest.mark.jax
def test_dtype_of_the_computation() -> None:
    make = modules("MoE", "linen")
    with pytest.raises(ValueError, match="dtype must be one of 'float32', 'bfloat16', 'float16'"):
        make(16, 12, CONFIG, dtype=np.int32)
