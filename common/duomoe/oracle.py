# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every op of the table in plain NumPy float64: the specification the core is measured against.

A function has the name of its op, takes the op's inputs and attributes by keyword, and returns the
outputs by name: floats as float64 that is never rounded, integers as int32.

Axis letters: T tokens, E experts, K experts per token, D model width, N width of a product,
F expert hidden width, R permuted rows, S sequences, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

Array = np.ndarray
Outputs = dict[str, Array]


def _f64(x: Array) -> Array:
    """`x` as float64."""
    return np.asarray(x).astype(np.float64)


def _rounded(x: Array, dtype: str) -> Array:
    """`x` rounded to `dtype`, as float64."""
    return _f64(np.asarray(x).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


# -- gate ------------------------------------------------------------------------------------------


def unmasked(x: Array, token_mask: Array | None) -> Array:
    """x[T,...] with the rows of masked tokens 0."""
    x = _f64(x)
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
    logits = unmasked(_rounded(x, gate_dtype), token_mask) @ _rounded(router, gate_dtype)
    logits = logits if router_bias is None else logits + _f64(router_bias)
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
    return {"grad_x": unmasked(grad_logits, token_mask) @ _rounded(router, gate_dtype).T}


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
    g, x = unmasked(grad_logits, token_mask), unmasked(_rounded(x, gate_dtype), token_mask)
    return {"grad_router": x.T @ g, "grad_router_bias": g.sum(axis=0)}


# -- route -----------------------------------------------------------------------------------------


def logsumexp(z: Array) -> Array:
    """log(sum(e^z)) of one row z[E]."""
    peak = z.max()
    return peak + np.log(np.exp(z - peak).sum())


def log_softplus(z: Array) -> Array:
    """log(log(1 + e^z)), which tends to z as z falls."""
    return np.where(z < -40, z, np.log(np.logaddexp(0, np.maximum(z, -40))))


def log_scores(z: Array, score: str) -> Array:
    """The log of s[E], for one token's logits z[E]."""
    if score == "softmax":
        return z - logsumexp(z)
    if score == "sigmoid":
        return -np.logaddexp(0, -z)
    return log_softplus(z) / 2


def log_scores_bwd(grad: Array, z: Array, score: str) -> Array:
    """The gradient of log_scores with respect to z[E], for the cotangent grad[E]."""
    if score == "softmax":
        return grad - np.exp(z - logsumexp(z)) * grad.sum()
    log_sigmoid, log_one_minus_sigmoid = -np.logaddexp(0, -z), -np.logaddexp(0, z)
    if score == "sigmoid":
        return grad * np.exp(log_one_minus_sigmoid)
    return grad * np.where(z < -40, 1, np.exp(log_sigmoid - log_softplus(z))) / 2


def selection_values(z: Array, score: str, select_on: str, bias: Array | float = 0.0) -> Array:
    """v[E]: the score or the logit, plus bias[E]; a logit of -inf stays -inf."""
    chosen_on = z if select_on == "logit" else np.exp(log_scores(z, score))
    return np.where(z == -np.inf, -np.inf, chosen_on + bias)


def ranking(values: Array) -> Array:
    """Positions by falling value; equal values by rising position, NaN last."""
    return np.argsort(-values, kind="stable")


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
    logits = _f64(logits)
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
            values = selection_values(z, score, select_on, 0.0 if bias is None else _f64(bias))
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
        out["score_sums"][s] += np.exp(log_s - logsumexp(log_s))
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
    logits, grad_weights = _f64(logits), _f64(grad_weights)
    grad_score_sums, grad_logsumexp_sq = _f64(grad_score_sums), _f64(grad_logsumexp_sq)
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
        shares = np.exp(log_s - logsumexp(log_s))
        through_shares = shares * grad_score_sums[s]
        grad_log_s += through_shares - shares * through_shares.sum()
        softmax = np.exp(z - logsumexp(z))
        grad_logits[t] = log_scores_bwd(grad_log_s, z, score)
        grad_logits[t] += grad_logsumexp_sq[s] * 2 * logsumexp(z) * softmax
    return {"grad_logits": grad_logits}


# -- losses ----------------------------------------------------------------------------------------


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
        experts / (top_k * float(n) ** 2) * (_f64(counts) @ _f64(sums))
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
            grad[s] = _f64(grad_loss) * factor * _f64(sequence_counts[s])
    return {"grad_score_sums": grad}


def z_loss(*, logsumexp_sq: Array, num_tokens: Array, coeff: float) -> Outputs:
    """logsumexp_sq[S], num_tokens[S] -> loss[]."""
    n = _f64(num_tokens).sum()
    return {"loss": np.array(coeff * _f64(logsumexp_sq).sum() / n if n > 0 else 0.0)}


def z_loss_bwd(*, num_tokens: Array, grad_loss: Array, coeff: float) -> Outputs:
    """num_tokens[S], grad_loss[] -> grad_logsumexp_sq[S]."""
    n = _f64(num_tokens).sum()
    grad = _f64(grad_loss) * coeff / n if n > 0 else 0.0
    return {"grad_logsumexp_sq": np.full(len(num_tokens), grad)}


# -- dispatch --------------------------------------------------------------------------------------


def plan_dispatch(
    *,
    indices: Array,
    weights: Array | None = None,
    num_experts: int,
    num_rows: int,
    capacity: int,
    drop_order: str,
    alignment: int,
) -> Outputs:
    """indices[T,K], weights[T,K] -> row_of_slot[T,K], slot_of_row[R], counts[E], offsets[E+1]."""
    experts = indices.reshape(-1)
    row_of_slot = np.full(experts.shape, -1, np.int32)
    slot_of_row = np.full(num_rows, -1, np.int32)
    expert_counts = np.zeros(num_experts, np.int32)
    routed_counts = np.zeros(num_experts, np.int32)
    expert_offsets = np.zeros(num_experts + 1, np.int32)
    for e in range(num_experts):
        slots = np.flatnonzero(experts == e)
        routed_counts[e] = len(slots)
        if capacity >= 0:
            if drop_order == "weight":
                assert weights is not None
                slots = slots[ranking(_f64(weights).reshape(-1)[slots])]
            slots = np.sort(slots[:capacity])
        slots = slots[: num_rows - expert_offsets[e]]
        expert_counts[e] = len(slots)
        for row, slot in enumerate(slots, expert_offsets[e]):
            row_of_slot[slot] = row
            slot_of_row[row] = slot
        blocks = -(-len(slots) // alignment)
        expert_offsets[e + 1] = expert_offsets[e] + blocks * alignment
    return {
        "row_of_slot": row_of_slot.reshape(indices.shape),
        "slot_of_row": slot_of_row,
        "expert_counts": expert_counts,
        "routed_counts": routed_counts,
        "expert_offsets": expert_offsets,
    }


def permute(*, x: Array, row_of_slot: Array, slot_of_row: Array) -> Outputs:
    """x[T,D] -> rows[R,D]."""
    rows = np.zeros((len(slot_of_row), x.shape[1]))
    for r, slot in enumerate(slot_of_row):
        if slot >= 0:
            rows[r] = _f64(x[slot // row_of_slot.shape[1]])
    return {"rows": rows}


def permute_bwd(*, grad_rows: Array, row_of_slot: Array) -> Outputs:
    """grad_rows[R,D] -> grad_x[T,D]."""
    grad_x = np.zeros((len(row_of_slot), grad_rows.shape[1]))
    for t, k in np.argwhere(row_of_slot >= 0):
        grad_x[t] += _f64(grad_rows[row_of_slot[t, k]])
    return {"grad_x": grad_x}


def combine(
    *, rows: Array, row_of_slot: Array, slot_of_row: Array, weights: Array | None = None
) -> Outputs:
    """rows[R,D], weights[T,K] -> y[T,D]."""
    y = np.zeros((len(row_of_slot), rows.shape[1]))
    for t, k in np.argwhere(row_of_slot >= 0):
        weight = 1.0 if weights is None else float(weights[t, k])
        y[t] += weight * _f64(rows[row_of_slot[t, k]])
    return {"y": y}


def combine_bwd(
    *,
    grad_y: Array,
    rows: Array,
    row_of_slot: Array,
    slot_of_row: Array,
    weights: Array | None = None,
) -> Outputs:
    """grad_y[T,D], rows[R,D], weights[T,K] -> grad_rows[R,D], grad_weights[T,K]."""
    grad_rows, grad_weights = np.zeros(rows.shape), np.zeros(row_of_slot.shape)
    for t, k in np.argwhere(row_of_slot >= 0):
        row = row_of_slot[t, k]
        weight = 1.0 if weights is None else float(weights[t, k])
        grad_rows[row] = weight * _f64(grad_y[t])
        grad_weights[t, k] = _f64(grad_y[t]) @ _f64(rows[row])
    return {"grad_rows": grad_rows, "grad_weights": grad_weights}


# -- experts ---------------------------------------------------------------------------------------


def expert_rows(expert_offsets: Array, expert_counts: Array) -> Iterator[tuple[int, slice]]:
    """(expert, the slice of R that holds its rows)."""
    for e, count in enumerate(expert_counts):
        yield e, slice(expert_offsets[e], expert_offsets[e] + count)


def grouped_matmul(
    *, rows: Array, w: Array, expert_offsets: Array, expert_counts: Array, out_dtype: str
) -> Outputs:
    """rows[R,D], w[E,D,N] -> out[R,N]."""
    out = np.zeros((rows.shape[0], w.shape[2]))
    for e, block in expert_rows(expert_offsets, expert_counts):
        out[block] = _f64(rows[block]) @ _f64(w[e])
    return {"out": out}


def grouped_matmul_bwd_rows(
    *, grad_out: Array, w: Array, expert_offsets: Array, expert_counts: Array, rows_dtype: str
) -> Outputs:
    """grad_out[R,N], w[E,D,N] -> grad_rows[R,D]."""
    grad_rows = np.zeros((grad_out.shape[0], w.shape[1]))
    for e, block in expert_rows(expert_offsets, expert_counts):
        grad_rows[block] = _f64(grad_out[block]) @ _f64(w[e]).T
    return {"grad_rows": grad_rows}


def grouped_matmul_bwd_w(
    *, rows: Array, grad_out: Array, expert_offsets: Array, expert_counts: Array, w_dtype: str
) -> Outputs:
    """rows[R,D], grad_out[R,N] -> grad_w[E,D,N]."""
    grad_w = np.zeros((len(expert_counts), rows.shape[1], grad_out.shape[1]))
    for e, block in expert_rows(expert_offsets, expert_counts):
        grad_w[e] = _f64(rows[block]).T @ _f64(grad_out[block])
    return {"grad_w": grad_w}


def silu(x: Array) -> Array:
    """The product of x and sigmoid(x), any shape."""
    return x * np.exp(-np.logaddexp(0, -x))


def swiglu(*, gate: Array, up: Array) -> Outputs:
    """gate[R,F], up[R,F] -> out[R,F]."""
    return {"out": silu(_f64(gate)) * _f64(up)}


def swiglu_bwd(*, grad_out: Array, gate: Array, up: Array) -> Outputs:
    """grad_out[R,F], gate[R,F], up[R,F] -> grad_gate[R,F], grad_up[R,F]."""
    g, x = _f64(grad_out), _f64(gate)
    sigmoid, one_minus_sigmoid = np.exp(-np.logaddexp(0, -x)), np.exp(-np.logaddexp(0, x))
    slope = sigmoid + x * sigmoid * one_minus_sigmoid
    return {"grad_gate": g * _f64(up) * slope, "grad_up": g * silu(x)}


def add(*, a: Array, b: Array) -> Outputs:
    """a[R,D] + b[R,D] -> out[R,D]."""
    return {"out": _f64(a) + _f64(b)}
