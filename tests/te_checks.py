# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests of the `te` modules share."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from adapters import DTYPES


def te(adapter) -> Any:
    return importlib.import_module(f"{adapter.name}_frontend.te")


def topk(adapter, logits, k, **options) -> tuple[Any, ...]:
    """The dense router by keyword, in either module."""
    given = {
        "use_pre_softmax": False,
        "num_groups": None,
        "group_topk": None,
        "scaling_factor": None,
        "score_function": "softmax",
        "expert_bias": None,
        **options,
    }
    return te(adapter).fused_topk_with_score_function(logits, k, **given)


def distinct_logits(rng, *shape: int, dtype: str = "float32") -> np.ndarray:
    """No two logits of a row are equal or close, in any dtype."""
    grid = np.argsort(rng.random(shape), axis=-1) - shape[-1] / 2
    return (grid / 8).astype(DTYPES[dtype])


def loss_of(adapter, probs, counts, **options):
    given = {"total_num_tokens": None, "num_experts": None, "topk": 2, "coeff": 0.25, **options}
    return te(adapter).fused_moe_aux_loss(probs, counts, **given)
