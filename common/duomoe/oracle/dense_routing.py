# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""A routing as [T, E] matrices, as other libraries exchange it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from duomoe.oracle.float64 import Array, Outputs, f64
from duomoe.oracle.scores import log_scores_bwd, normalized, normalized_bwd


def used_slots(indices: Array, num_experts: int) -> Iterator[tuple[int, int, int]]:
    """(token, slot, expert) for every slot of indices[T,K] whose expert exists."""
    for (t, k), e in np.ndenumerate(indices):
        if 0 <= e < num_experts:
            yield t, k, int(e)


def scatter_weights(
    *, weights: Array, indices: Array, num_experts: int, probs_dtype: str
) -> Outputs:
    """weights[T,K], indices[T,K] -> probs[T,E]."""
    weights, probs = f64(weights), np.zeros((len(indices), num_experts))
    for t, k, e in used_slots(indices, num_experts):
        probs[t, e] += weights[t, k]
    return {"probs": probs}


def scatter_weights_bwd(
    *, grad_probs: Array, indices: Array, num_experts: int, probs_dtype: str
) -> Outputs:
    """grad_probs[T,E], indices[T,K] -> grad_weights[T,K]."""
    grad_probs, grad_weights = f64(grad_probs), np.zeros(indices.shape)
    for t, k, e in used_slots(indices, num_experts):
        grad_weights[t, k] = grad_probs[t, e]
    return {"grad_weights": grad_weights}


def mark_experts(*, indices: Array, num_experts: int) -> Outputs:
    """indices[T,K] -> routing_map[T,E]."""
    routing_map = np.zeros((len(indices), num_experts), bool)
    for t, _, e in used_slots(indices, num_experts):
        routing_map[t, e] = True
    return {"routing_map": routing_map}


def mark_expert_bits(*, indices: Array, num_experts: int, num_bytes: int) -> Outputs:
    """indices[T,K] -> routing_map[T,B]."""
    routing_map = np.zeros((len(indices), num_bytes), np.uint8)
    for t, _, e in used_slots(indices, num_experts):
        routing_map[t, e // 8] |= np.uint8(1 << e % 8)
    return {"routing_map": routing_map}


@np.errstate(all="ignore")
def normalize_scores(*, logits: Array, score: str) -> Outputs:
    """logits[T,E] -> scores[T,E]."""
    scores = np.zeros(logits.shape)
    for t, z in enumerate(f64(logits)):
        scores[t] = normalized(z, score)
    return {"scores": scores}


@np.errstate(all="ignore")
def normalize_scores_bwd(*, logits: Array, grad_scores: Array, score: str) -> Outputs:
    """logits[T,E], grad_scores[T,E] -> grad_logits[T,E]."""
    grad_logits = np.zeros(logits.shape)
    for t, (z, grad) in enumerate(zip(f64(logits), f64(grad_scores), strict=True)):
        grad_logits[t] = log_scores_bwd(normalized_bwd(grad, z, score), z, score)
    return {"grad_logits": grad_logits}
