# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The router: logits, selection, weights and statistics."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from duomoe.oracle.float64 import Array, Outputs, f64, rounded
from duomoe.oracle.scores import (
    log_scores,
    log_scores_bwd,
    logsumexp,
    normalized,
    normalized_bwd,
    ranking,
    selection_values,
)

# -- gate ------------------------------------------------------------------------------------------


def unmasked(x: Array, token_mask: Array | None) -> Array:
    """x[T,...] with the rows of masked tokens 0."""
    x = f64(x)
    return x if token_mask is None else np.where(token_mask[:, None], x, 0.0)


def gate(
    *,
    x: Array,
    router: Array,
    router_bias: Array | None = None,
    token_mask: Array | None = None,
    gate_dtype: str,
) -> Outputs:
    """x[T,D] . router[D,E] + router_bias[E] -> logits[T,E]; x, router in gate_dtype's precision."""
    logits = unmasked(rounded(x, gate_dtype), token_mask) @ rounded(router, gate_dtype)
    logits = logits if router_bias is None else logits + f64(router_bias)
    return {"logits": unmasked(logits, token_mask)}


def gate_bwd_x(
    *,
    grad_logits: Array,
    router: Array,
    token_mask: Array | None = None,
    gate_dtype: str,
    x_dtype: str,
) -> Outputs:
    """grad_logits[T,E] . router[D,E]^T -> grad_x[T,D]."""
    return {"grad_x": unmasked(grad_logits, token_mask) @ rounded(router, gate_dtype).T}


def gate_bwd_params(
    *,
    grad_logits: Array,
    x: Array,
    token_mask: Array | None = None,
    gate_dtype: str,
    router_dtype: str,
    router_bias_dtype: str,
) -> Outputs:
    """x[T,D]^T . grad_logits[T,E] -> grad_router[D,E]; sum over T -> grad_router_bias[E]."""
    g, x = unmasked(grad_logits, token_mask), unmasked(rounded(x, gate_dtype), token_mask)
    return {"grad_router": x.T @ g, "grad_router_bias": g.sum(axis=0)}


# -- route -----------------------------------------------------------------------------------------


def group_values(values: Array, num_groups: int, group_score_k: int) -> Array:
    """[G]: the sum of the best `group_score_k` of every group's values[E]."""
    grouped = values.reshape(num_groups, -1)
    return np.array([group[ranking(group)][:group_score_k].sum() for group in grouped])


def select(
    values: Array, top_k: int, num_groups: int = 1, group_top_k: int = 1, group_score_k: int = 1
) -> Array:
    """ids[K] of the best of values[E] within the best groups."""
    kept = ranking(group_values(values, num_groups, group_score_k))[:group_top_k]
    group_size = len(values) // num_groups
    return np.array([e for e in ranking(values) if e // group_size in kept][:top_k], np.int32)


def selected_weights(
    log_s: Array, normalize: bool, eps: float, eps_mode: str
) -> tuple[Array, Array]:
    """Weights[K] from the selected log scores[K], and d log(divisor) / d log scores, [K]."""
    if not normalize or len(log_s) == 0:
        return np.exp(log_s), np.zeros(len(log_s))
    top = np.nan_to_num(log_s.max(), neginf=0.0, posinf=0.0)
    log_s, log_eps = log_s - top, np.log(eps) - top
    log_sum = np.logaddexp.reduce(log_s)
    if eps_mode == "add":
        weights = np.exp(log_s - np.logaddexp(log_sum, log_eps))
        return weights, weights
    if log_sum < log_eps:
        return np.exp(log_s - log_eps), np.zeros(len(log_s))
    weights = np.exp(log_s - log_sum)
    return weights, weights


def live_tokens(
    tokens: int,
    token_mask: Array | None,
    first_token: Array | int | None,
    total_tokens: int,
    num_sequences: int,
) -> Iterator[tuple[int, int]]:
    """(token, its sequence) for every token that is neither masked nor past the batch's end."""
    first, total = (0, tokens) if first_token is None else (int(first_token), total_tokens)
    for t in range(tokens):
        if first + t < total and (token_mask is None or token_mask[t]):
            yield t, (first + t) // (total // num_sequences)


@np.errstate(all="ignore")
def route(
    *,
    logits: Array,
    bias: Array | None = None,
    given_indices: Array | None = None,
    token_mask: Array | None = None,
    first_token: Array | int | None = None,
    top_k: int,
    score: str,
    normalize: str,
    eps: float,
    eps_mode: str,
    scale: float,
    num_sequences: int,
    total_tokens: int,
    select_on: str,
    num_groups: int,
    group_top_k: int,
    group_score_k: int,
    counts: str,
) -> Outputs:
    """logits[T,E], bias[E], given_indices[T,K] -> weights[T,K], indices[T,K], statistics[S,E]."""
    logits = f64(logits)
    tokens, experts = logits.shape
    divide = normalize == "always" or (normalize == "if_k_gt_1" and top_k > 1)
    out: Outputs = {
        "weights": np.zeros((tokens, top_k)),
        "indices": np.full((tokens, top_k), -1, np.int32),
        "expert_counts": np.zeros(experts, np.int32),
        "sequence_counts": np.zeros((num_sequences, experts), np.int32),
        "score_sums": np.zeros((num_sequences, experts)),
        "logsumexp_sq": np.zeros(num_sequences),
        "num_tokens": np.zeros(num_sequences, np.int32),
    }
    for t, s in live_tokens(tokens, token_mask, first_token, total_tokens, num_sequences):
        z = logits[t]
        log_s = log_scores(z, score)
        if given_indices is None:
            values = selection_values(z, score, select_on, 0.0 if bias is None else f64(bias))
            ids = select(values, top_k, num_groups, group_top_k, group_score_k)
        else:
            ids = np.array([e if 0 <= e < experts else -1 for e in given_indices[t]], np.int32)
        used = ids >= 0
        weights, _ = selected_weights(log_s[ids[used]], divide, eps, eps_mode)
        out["indices"][t] = ids
        out["weights"][t, used] = scale * weights
        for e in ids[used]:
            out["expert_counts"][e] += 1
        counted = ids[used]
        if counts == "unbiased":
            counted = select(selection_values(z, score, select_on), top_k)
        for e in counted:
            out["sequence_counts"][s, e] += 1
        out["score_sums"][s] += normalized(z, score)
        out["logsumexp_sq"][s] += logsumexp(z) ** 2
        out["num_tokens"][s] += 1
    return out


@np.errstate(all="ignore")
def route_bwd(
    *,
    logits: Array,
    indices: Array,
    token_mask: Array | None = None,
    first_token: Array | int | None = None,
    grad_weights: Array,
    grad_score_sums: Array,
    grad_logsumexp_sq: Array,
    top_k: int,
    score: str,
    normalize: str,
    eps: float,
    eps_mode: str,
    scale: float,
    num_sequences: int,
    total_tokens: int,
) -> Outputs:
    """grad_weights[T,K], grad_score_sums[S,E], grad_logsumexp_sq[S] -> grad_logits[T,E]."""
    logits, grad_weights = f64(logits), f64(grad_weights)
    grad_score_sums, grad_logsumexp_sq = f64(grad_score_sums), f64(grad_logsumexp_sq)
    tokens, experts = logits.shape
    divide = normalize == "always" or (normalize == "if_k_gt_1" and top_k > 1)
    grad_logits = np.zeros((tokens, experts))
    for t, s in live_tokens(tokens, token_mask, first_token, total_tokens, num_sequences):
        z = logits[t]
        log_s = log_scores(z, score)
        used = (indices[t] >= 0) & (indices[t] < experts)
        ids = indices[t, used]
        weights, divisor_grad = selected_weights(log_s[ids], divide, eps, eps_mode)
        through_weights = scale * weights * grad_weights[t, used]
        grad_log_s = np.zeros(experts)
        np.add.at(grad_log_s, ids, through_weights - divisor_grad * through_weights.sum())
        grad_log_s += normalized_bwd(grad_score_sums[s], z, score)
        softmax = np.exp(z - logsumexp(z))
        grad_logits[t] = log_scores_bwd(grad_log_s, z, score)
        grad_logits[t] += grad_logsumexp_sq[s] * 2 * logsumexp(z) * softmax
    return {"grad_logits": grad_logits}
