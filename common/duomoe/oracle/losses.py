# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The losses, from a routing's statistics or from a matrix of scores."""

from __future__ import annotations

import numpy as np

from duomoe.oracle.float64 import Array, Outputs, f64


def load_balancing_loss(
    *,
    sequence_counts: Array,
    score_sums: Array,
    num_tokens: Array,
    top_k: int,
    coeff: float,
) -> Outputs:
    """sequence_counts[S,E], score_sums[S,E], num_tokens[S] -> loss[]."""
    experts = sequence_counts.shape[1]
    losses = [
        experts / (top_k * float(n) ** 2) * (f64(counts) @ f64(sums))
        for counts, sums, n in zip(sequence_counts, score_sums, num_tokens, strict=True)
        if n > 0
    ]
    return {"loss": np.array(coeff * np.mean(losses) if losses else 0.0)}


def load_balancing_loss_bwd(
    *,
    sequence_counts: Array,
    num_tokens: Array,
    grad_loss: Array,
    top_k: int,
    coeff: float,
) -> Outputs:
    """sequence_counts[S,E], num_tokens[S], grad_loss[] -> grad_score_sums[S,E]."""
    experts = sequence_counts.shape[1]
    occupied = (num_tokens > 0).sum()
    grad = np.zeros(sequence_counts.shape)
    for s, n in enumerate(num_tokens):
        if n > 0:
            factor = coeff * experts / (top_k * float(n) ** 2) / occupied
            grad[s] = f64(grad_loss) * factor * f64(sequence_counts[s])
    return {"grad_score_sums": grad}


def z_loss(*, logsumexp_sq: Array, num_tokens: Array, coeff: float) -> Outputs:
    """logsumexp_sq[S], num_tokens[S] -> loss[]."""
    n = f64(num_tokens).sum()
    return {"loss": np.array(coeff * f64(logsumexp_sq).sum() / n if n > 0 else 0.0)}


def z_loss_bwd(*, num_tokens: Array, grad_loss: Array, coeff: float) -> Outputs:
    """num_tokens[S], grad_loss[] -> grad_logsumexp_sq[S]."""
    n = f64(num_tokens).sum()
    grad = f64(grad_loss) * coeff / n if n > 0 else 0.0
    return {"grad_logsumexp_sq": np.full(len(num_tokens), grad)}


def aux_factor(num_experts: int, top_k: int, num_tokens: int, live_tokens: Array | None) -> float:
    """E / (K n^2), n being `live_tokens` if given, else `num_tokens`; 0 without tokens."""
    n = float(np.float32(num_tokens if live_tokens is None else live_tokens))
    return num_experts / (top_k * n**2) if n > 0 else 0.0


def aux_loss(
    *,
    probs: Array,
    expert_loads: Array,
    live_tokens: Array | None = None,
    num_experts: int,
    top_k: int,
    num_tokens: int,
    coeff: float,
) -> Outputs:
    """probs[T,N], expert_loads[N], live_tokens[] -> loss[]."""
    factor = coeff * aux_factor(num_experts, top_k, num_tokens, live_tokens)
    loss = factor * (f64(expert_loads) @ f64(probs).sum(axis=0)) if factor else 0.0
    return {"loss": np.array(loss)}


def aux_loss_bwd(
    *,
    expert_loads: Array,
    live_tokens: Array | None = None,
    grad_loss: Array,
    num_experts: int,
    top_k: int,
    num_tokens: int,
    coeff: float,
    probs_dtype: str,
) -> Outputs:
    """expert_loads[N], live_tokens[], grad_loss[] -> grad_probs[N], the same for every token."""
    factor = coeff * aux_factor(num_experts, top_k, num_tokens, live_tokens)
    loads = f64(expert_loads)
    return {"grad_probs": f64(grad_loss) * factor * loads if factor else np.zeros(loads.shape)}
