# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The two ways in which the selection bias follows the experts' load."""

from __future__ import annotations

import numpy as np

from duomoe.oracle.float64 import Array, Outputs, f64
from duomoe.oracle.scores import ranking, selection_values


def update_expert_bias(*, bias: Array, expert_counts: Array, rate: float, center: str) -> Outputs:
    """bias[E], expert_counts[E] -> updated_bias[E]."""
    counts = expert_counts.astype(np.int64)
    # sign(mean - count), times E: exact in integers.
    steps = np.sign(counts.sum() - len(counts) * counts).astype(np.float64)
    if center == "yes":
        steps -= steps.mean()
    return {"updated_bias": f64(bias) + rate * steps}


def bin_positions(gaps: Array, lower: Array, upper: Array, num_bins: int) -> Array:
    """Where gaps[...] lie, in bins counted from `lower`; beyond [0, num_bins) outside the range."""
    low, high = float(lower), float(upper)
    return (gaps - low) * num_bins / (high - low)


@np.errstate(all="ignore")
def count_quantile_bins(
    *,
    logits: Array,
    bias: Array | None = None,
    token_mask: Array | None = None,
    lower: Array,
    upper: Array,
    top_k: int,
    score: str,
    select_on: str,
    num_bins: int,
) -> Outputs:
    """logits[T,E], bias[E] -> cutoffs[T], bin_counts[E,B]."""
    logits = f64(logits)
    tokens, experts = logits.shape
    cutoffs = np.zeros(tokens)
    bin_counts = np.zeros((experts, num_bins), np.int32)
    for t, z in enumerate(logits):
        if token_mask is not None and not token_mask[t]:
            continue
        values = selection_values(z, score, select_on, 0.0 if bias is None else f64(bias))
        cutoffs[t] = values[ranking(values)[top_k]]
        gaps = cutoffs[t] - selection_values(z, score, select_on)
        positions = bin_positions(gaps, lower, upper, num_bins)
        for e in np.flatnonzero(~np.isnan(gaps)):
            bin_counts[e, int(np.clip(np.floor(positions[e]), 0, num_bins - 1))] += 1
    return {"cutoffs": cutoffs, "bin_counts": bin_counts}


def bin_quantile(counts: Array, top_k: int, experts: int) -> float | None:
    """Where in counts[B] the top_k/experts quantile lies, in bins; None without counts."""
    total, below = int(counts.sum()), 0
    for b, count in enumerate(map(int, counts)):
        # In integers: the quotient's rounding would decide which side of empty bins it falls on.
        if count > 0 and experts * (below + count) >= top_k * total:
            return b + (top_k * total / experts - below) / count
        below += count
    return None


def update_expert_bias_by_quantile(
    *, bias: Array, bin_counts: Array, lower: Array, upper: Array, top_k: int, decay: float
) -> Outputs:
    """bias[E], bin_counts[E,B] -> updated_bias[E]."""
    experts, bins = bin_counts.shape
    low, high = float(lower), float(upper)
    quantiles = f64(bias)
    for e in range(experts):
        position = bin_quantile(bin_counts[e], top_k, experts)
        if position is not None:
            quantiles[e] = low + position * (high - low) / bins
    updated = decay * f64(bias) + (1 - decay) * quantiles
    return {"updated_bias": updated - updated.mean()}
