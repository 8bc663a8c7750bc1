# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the cases of all ops are drawn from, and which draws float32 decides as float64 does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from duomoe import oracle

Inputs = dict[str, Any]
Attributes = dict[str, Any]

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
SIZES = (  # T, E, K
    (0, 8, 2),
    (1, 1, 1),
    (1, 33, 33),
    (7, 2, 2),
    (7, 5, 3),
    (7, 256, 256),
    (7, 1000, 40),
    (65, 5, 1),
    (65, 8, 8),
    (65, 64, 6),
    (130, 33, 4),
    (130, 256, 8),
)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], tuple[Inputs, Attributes]]


def rng_of(*seed: Any) -> np.random.Generator:
    return np.random.default_rng(list(repr(seed).encode()))


def is_apart(values: np.ndarray, bias: np.ndarray | None) -> bool:
    """Whether finite values are equal or well apart; -inf and NaN have their places anyway."""
    ranked = values[oracle.ranking(values)]
    ranked = ranked[np.isfinite(ranked)]
    gaps = ranked[:-1] - ranked[1:]
    largest_bias = 0 if bias is None else np.abs(bias).max()
    margin = 2.0**-19 * (np.maximum(np.abs(ranked[:-1]), np.abs(ranked[1:])) + largest_bias)
    return bool(np.all((gaps == 0) | (gaps > margin)))


def is_decided(z: np.ndarray, attributes: Attributes, bias: np.ndarray | None) -> bool:
    """Whether all selection values are equal or well apart, so that float32 orders them alike."""
    score, select_on = attributes["score"], attributes["select_on"]
    plain = oracle.selection_values(z, score, select_on)
    values = oracle.selection_values(z, score, select_on, 0.0 if bias is None else bias)
    count, best = attributes["num_groups"], attributes["group_score_k"]
    groups = oracle.group_values(values, count, best)
    # Sums of other members may tie in float64 alone, as sigmoid(z) + sigmoid(-z) = 1 for any z.
    members = -np.sort(-values.reshape(count, -1), axis=1)[:, :best]
    for value in np.unique(groups[np.isfinite(groups)]):
        if len(np.unique(members[groups == value], axis=0)) > 1:
            return False
    return all(is_apart(v, bias) for v in (plain, values, groups))


def draw_row(rng: np.random.Generator, kind: str, experts: int) -> np.ndarray:
    """Logits of one token. On the grid they are exact in all dtypes, with many ties."""
    grid = rng.integers(-64, 64, experts) / 16
    # Where a row stops being moderate: one logit at a limit of math/router.h or an ulp beyond it.
    limits = np.array([30, 60], "f4")
    edge = rng.choice([-1, 1]) * rng.choice([*limits, *np.nextafter(limits, np.float32("inf"))])
    one = np.arange(experts) == rng.integers(experts)
    return {
        "grid": lambda: grid,
        "normal": lambda: 3 * rng.normal(size=experts),
        "huge": lambda: rng.choice([1e4, 9984.0, 0, -9984.0, -1e4], experts),
        "far": lambda: rng.choice([1e4, 100, 3, -3, -100, -104, -1e4], experts),
        "low": lambda: grid - 100,
        "lower": lambda: grid - 112,
        "lowest": lambda: grid - 1e4,
        "limit": lambda: np.where(one, edge, grid),
        "bottom": lambda: rng.choice([-3e38, -3.1e38], experts),
    }[kind]()
