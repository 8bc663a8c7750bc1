# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs that several test files share."""

from __future__ import annotations

import numpy as np
from adapters import DTYPES
from duomoe import MoEParams, RouterConfig

PARAMETER_NAMES = ("router", "w_gate", "w_up", "w_down")


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(DTYPES[dtype])


def block_parameters(
    rng: np.random.Generator, experts: int, width: int, hidden: int, dtype: str = "float32"
) -> list[np.ndarray]:
    """router, w_gate, w_up, w_down with variance 1 / fan-in."""
    shapes = [
        (width, experts),
        (experts, width, hidden),
        (experts, width, hidden),
        (experts, hidden, width),
    ]
    return [
        (rng.standard_normal(s) / np.sqrt(s[-2])).astype(np.float32).astype(DTYPES[dtype])
        for s in shapes
    ]


def block(functions, config: RouterConfig, **options):
    """The block as a function of (x, *parameters) to its three float outputs."""

    def f(x, *parameters):
        out = functions.moe(x, MoEParams(*parameters), config, **options)
        return out.output, out.load_balancing_loss, out.z_loss

    return f


# A batch whose losses are easily computed by hand: every row is [2, 1, 0, -1].
CASE_LOGITS = np.tile(np.array([2, 1, 0, -1], np.float32), (4, 1))
