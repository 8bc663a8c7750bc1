# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs for the ops that let the selection bias follow the load."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from adapters import DTYPES
from duomoe import ops, oracle
from oracle_bounds import U, score_error
from oracle_draws import SCORES, Attributes, Case, Inputs, draw_row, is_apart, rng_of

# -- steps by the sign -----------------------------------------------------------------------------


def draw_counts(experts: int, kind: str) -> np.ndarray:
    rng = rng_of("counts", experts, kind)
    counts = {
        "spread": lambda: rng.integers(0, 4 * experts, experts),
        "equal": lambda: np.full(experts, 7),
        "none": lambda: np.zeros(experts),
        "one": lambda: np.eye(experts)[-1] * 1000,
        # Their mean is no float32, and a sum of two is no int32.
        "huge": lambda: 2**31 - 1 - rng.integers(0, 2, experts),
    }[kind]()
    return counts.astype("i4")


def stepping(experts: int, kind: str, center: str, rate: float) -> tuple[Inputs, Attributes]:
    bias = rng_of("bias", experts).normal(size=experts).astype("f4")
    inputs = {"bias": bias, "expert_counts": draw_counts(experts, kind)}
    return inputs, {"rate": rate, "center": center}


def step_cases() -> Iterator[Case]:
    kinds = ("spread", "equal", "none", "one", "huge")
    products = itertools.product((1, 2, 33, 256, 1000), kinds, ("no", "yes"))
    for options in zip(products, itertools.cycle((1e-3, 0.0, 2.5)), strict=False):
        (experts, kind, center), rate = options
        yield Case(
            f"{experts}-{kind}-{center}-{rate}",
            lambda e=experts, k=kind, c=center, r=rate: stepping(e, k, c, r),
        )


# -- bins ------------------------------------------------------------------------------------------


def is_binned(z: np.ndarray, inputs: Inputs, attributes: Attributes) -> bool:
    """Whether float32 finds the same cutoff and, for every expert, the same bin."""
    score, select_on = attributes["score"], attributes["select_on"]
    with np.errstate(all="ignore"):
        s = oracle.selection_values(z, score, select_on)
        bias = inputs["bias"]
        values = oracle.selection_values(z, score, select_on, 0.0 if bias is None else bias)
        if not is_apart(values, bias):
            return False
        at = oracle.ranking(values)[attributes["top_k"]]
        gaps = values[at] - s
        lower, upper, bins = inputs["lower"], inputs["upper"], attributes["num_bins"]
        positions = oracle.bin_positions(gaps, lower, upper, bins)
        error = score_error(z, score, select_on)
        error = error + error[at] + U * (abs(values[at]) + np.abs(gaps) + np.abs(gaps - lower))
        error = error * bins / (upper - lower) + 4 * U * np.abs(positions)
        border = np.clip(np.rint(positions), 1, bins - 1)  # beyond these, bins do not change
        apart = np.abs(positions - border) > 2 * error
    return bins == 1 or bool(np.all(apart | ~np.isfinite(positions)))


def draw_logits(rng: np.random.Generator, kind: str, experts: int, top_k: int) -> np.ndarray:
    """Logits of one token, some of them no numbers."""
    if kind in ("excluded", "few", "nan"):
        z = draw_row(rng, "normal", experts)
        share = {"excluded": 0.3, "few": 1 - 0.5 * top_k / experts, "nan": 0.3}[kind]
        z[rng.random(experts) < share] = np.nan if kind == "nan" else -np.inf
        return z
    return draw_row(rng, kind, experts)


def binning(
    tokens: int,
    experts: int,
    top_k: int,
    num_bins: int,
    *,
    kind: str = "normal",
    score: str = "sigmoid",
    select_on: str = "score",
    dtype: str = "float32",
    bias: bool = False,
    mask: bool = False,
    bounds: tuple[float, float] = (-0.3, 0.71),
) -> tuple[Inputs, Attributes]:
    """Inputs of `count_quantile_bins` whose bins do not hang on rounding.

    On the grid with `select_on="logit"`, a grid of biases and bounds whose distance is a power of
    two, all arithmetic is exact in float32, so that differences may fall on the bins' borders.
    """
    options = (kind, score, select_on, dtype, bias, mask)
    rng = rng_of("bins", tokens, experts, top_k, num_bins, options)
    attributes = {"top_k": top_k, "score": score, "select_on": select_on, "num_bins": num_bins}
    exact = kind == "grid" and select_on == "logit"
    biases = rng.integers(-16, 16, experts) / 16 if exact else rng.normal(size=experts) / 4
    inputs: Inputs = {
        "logits": np.zeros((tokens, experts), DTYPES[dtype]),
        "bias": biases.astype("f4") if bias else None,
        "token_mask": rng.random(tokens) < 0.7 if mask else None,
        "lower": np.float32(bounds[0]).reshape(()),
        "upper": np.float32(bounds[1]).reshape(()),
    }
    for t in range(tokens):
        for _ in range(200):
            row = draw_logits(rng, kind, experts, top_k).astype(DTYPES[dtype])
            if exact or is_binned(row.astype("f8"), inputs, attributes):
                break
        else:
            raise AssertionError("no row of logits with clear bins was found")
        inputs["logits"][t] = row
    if mask:  # masked tokens may hold anything
        inputs["logits"][~inputs["token_mask"]] = np.nan
    return inputs, attributes


BIN_SIZES = (  # T, E, K, B
    (0, 8, 2, 5),
    (1, 2, 1, 1),
    (1, 33, 1, 2),
    (1, 33, 32, 64),
    (7, 5, 3, 7),
    (7, 1000, 40, 100),
    (7, 256, 255, 64),
    (65, 5, 1, 1000),
    (65, 64, 6, 65),
    (130, 33, 4, 100),
    (130, 256, 8, 32),
)


def bin_options() -> Iterator[tuple[tuple[int, int, int, int], dict[str, Any]]]:
    dtype = itertools.cycle(ops.FLOAT_DTYPES)
    flags = itertools.cycle([{}, {"bias": True}, {"mask": True}, {"bias": True, "mask": True}])
    kinds = itertools.cycle(("normal", "excluded", "grid", "few", "nan"))
    for score, size in itertools.product(SCORES, BIN_SIZES):
        options = {"score": score, "kind": next(kinds), "dtype": next(dtype), **next(flags)}
        yield size, options
    for size, flag in itertools.product(BIN_SIZES, ({}, {"bias": True})):
        exact = {"select_on": "logit", "kind": "grid", "bounds": (-2, 6), "dtype": next(dtype)}
        yield (*size[:3], 128), {**exact, **flag}
    for kind, score in itertools.product(("huge", "far", "lowest", "few", "nan"), SCORES):
        bounds = {"bounds": (-1e4, 2e4)} if kind in ("huge", "far") else {}
        yield (7, 8, 3, 7), {"select_on": "logit", "kind": kind, "score": score, **bounds}
        yield (7, 8, 3, 7), {"kind": kind, "score": score, "bias": True}


def bin_cases() -> Iterator[Case]:
    for size, options in bin_options():
        name = "-".join([*map(str, size), *(f"{k}={v}" for k, v in options.items())])
        yield Case(name, lambda size=size, options=options: binning(*size, **options))


# -- quantiles of the bins -------------------------------------------------------------------------


def draw_bins(experts: int, num_bins: int, top_k: int, kind: str) -> np.ndarray:
    rng = rng_of("quantiles", experts, num_bins, top_k, kind)
    shape = (experts, num_bins)
    if kind == "none":
        return np.zeros(shape, "i4")
    if kind == "huge":  # their sums are no int32
        return rng.integers(2**30, 2**31, shape).astype("i4")
    counts = rng.integers(1, 9, shape) * (rng.random(shape) < 0.3)
    counts[rng.random(experts) < 0.2] = 0  # experts that nobody saw
    if kind == "border":
        # K of E counts, then empty bins: the quantile is the end of what was counted first.
        counts[:] = 0
        counts[:, 0], counts[:, -1] = top_k, experts - top_k
    return counts.astype("i4")


def quantile_cases() -> Iterator[Case]:
    decays = itertools.cycle((0.0, 0.9, 1.0, 0.25))
    sizes = (
        (1, 1, 1),
        (2, 1, 1),
        (5, 3, 2),
        (33, 1, 7),
        (33, 33, 100),
        (256, 8, 1000),
        (1000, 40, 100),
        (1000, 999, 7),
    )
    for (experts, top_k, bins), kind in itertools.product(sizes, ("sparse", "none", "huge")):
        yield quantile_case(experts, top_k, bins, kind, next(decays))
    for experts, top_k in ((100, 7), (3, 1), (49, 1), (256, 8), (72, 6), (160, 6), (384, 8)):
        yield quantile_case(experts, top_k, 9, "border", 0.0)


def quantile_case(experts: int, top_k: int, bins: int, kind: str, decay: float) -> Case:
    def make() -> tuple[Inputs, Attributes]:
        inputs: Inputs = {
            "bias": rng_of("bias", experts).normal(size=experts).astype("f4"),
            "bin_counts": draw_bins(experts, bins, top_k, kind),
            "lower": np.float32(-1.3).reshape(()),
            "upper": np.float32(2.9).reshape(()),
        }
        if kind == "border":  # one expert differs, or their mean would take the quantile away
            inputs["bin_counts"][0] = 0
        return inputs, {"top_k": top_k, "decay": decay}

    return Case(f"{experts}-{top_k}-{bins}-{kind}-{decay}", make)


CASES: dict[str, list[Case]] = {
    "update_expert_bias": list(step_cases()),
    "count_quantile_bins": list(bin_cases()),
    "update_expert_bias_by_quantile": list(quantile_cases()),
}
