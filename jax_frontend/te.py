# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Drop-in functions for users of `transformer_engine.jax`'s router and permutation; on any
device.

Axis letters: T tokens, E experts, K experts per token, B bins, S sequences, D model width,
R permuted rows, C chunks.
"""

from __future__ import annotations

import jax
from duomoe.te import QBHistogramMode, RouterFunctions, RoutingMapFormat, ScoreFunction
from duomoe.te_chunks import ChunkFunctions, PureJaxPermState

from jax_frontend.frontend import JaxFrontEnd

__all__ = [
    "PureJaxPermState",
    "QBHistogramMode",
    "RoutingMapFormat",
    "ScoreFunction",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "pure_jax_token_combine",
    "pure_jax_token_dispatch",
    "sort_chunks_by_index",
    "token_combine",
    "token_dispatch",
]

_functions = RouterFunctions(JaxFrontEnd())

fused_compute_score_for_moe_aux_loss = _functions.fused_compute_score_for_moe_aux_loss

_permutation = ChunkFunctions(JaxFrontEnd())

moe_permute = _permutation.moe_permute
moe_permute_and_pad_with_probs = _permutation.moe_permute_and_pad_with_probs
moe_permute_with_probs = _permutation.moe_permute_with_probs
moe_sort_chunks_by_index = _permutation.moe_sort_chunks_by_index
moe_sort_chunks_by_index_with_probs = _permutation.moe_sort_chunks_by_index_with_probs
moe_unpermute = _permutation.moe_unpermute
pure_jax_token_combine = _permutation.pure_jax_token_combine
pure_jax_token_dispatch = _permutation.pure_jax_token_dispatch
sort_chunks_by_index = _permutation.sort_chunks_by_index
token_combine = _permutation.token_combine
token_dispatch = _permutation.token_dispatch


def fused_topk_with_score_function(
    logits: jax.Array,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = -1,
    group_topk: int | None = -1,
    scaling_factor: float | None = 1.0,
    score_function: str | int | ScoreFunction = ScoreFunction.SOFTMAX,
    expert_bias: jax.Array | None = None,
    compute_aux_scores: bool = False,
    routing_map_format: str | int | RoutingMapFormat = RoutingMapFormat.BYTEMAP,
    *,
    topk_indices: jax.Array | jax.ShapeDtypeStruct | None = None,
    qb_histogram: jax.Array | None = None,
    qb_bin_bounds: jax.Array | None = None,
    qb_histogram_mode: str | int | QBHistogramMode | None = None,
) -> tuple[jax.Array, ...]:
    """Score, select K experts per token, weight them; weights and choice as [T, E] matrices.

    Args:
        logits: [..., E] float32, bfloat16 or float16; leading axes are tokens.
        topk: K.
        use_pre_softmax: softmax over all experts before the selection, instead of over the selected
            ones after it. Counts for the softmax only.
        num_groups: G groups of E / G neighbouring experts; None or <= 0 means none.
        group_topk: groups that stay; a group's value is the sum of its best K / group_topk
            selection values, and K must be a multiple of it. None or <= 0 means no groups.
        scaling_factor: last factor of every weight; None means 1.
        score_function: "softmax", "sigmoid", "sqrtsoftplus" or a ScoreFunction.
        expert_bias: [E] float32, for selection only, with any score.
        compute_aux_scores: return (scores, routing map) of
            `fused_compute_score_for_moe_aux_loss` instead; only topk, score_function and
            routing_map_format count then.
        routing_map_format: "bytemap", "bitmap_u8" or a RoutingMapFormat.
        topk_indices: [..., K] int16, int32 or int64; its shape and dtype say that ids of this
            dtype are returned in place of the map.
        qb_histogram: [E, B] int32, to which the bins of quantile balancing are added (the sum
            is returned); see count_quantile_bins.
        qb_bin_bounds: [2] float32, lower and upper bound of the bins; lower must be below upper.
        qb_histogram_mode: "two_kernel" or "fused_atomic"; both give the same counts here. The three
            go together and exclude groups.

    Returns:
        probs: [..., E] in logits's dtype, 0 for experts that are not selected; differentiable.
        routing map or indices: bool [..., E], uint8 [..., ceil(E / 8)], or [..., K] ids.
        histogram: [E, B] int32, only where qb_histogram is given.

    Raises:
        ValueError, TypeError: on a shape, dtype or option that does not fit.
    """
    if compute_aux_scores:
        return fused_compute_score_for_moe_aux_loss(
            logits, topk, score_function, routing_map_format
        )[::-1]
    results = _functions.route_dense(
        logits,
        topk,
        use_pre_softmax,
        num_groups,
        group_topk,
        scaling_factor,
        score_function,
        expert_bias,
        routing_map_format,
        topk_indices,
        qb_histogram,
        qb_bin_bounds,
        qb_histogram_mode,
    )
    return results[:2] if results[2] is None else results


def fused_moe_aux_loss(
    probs: jax.Array,
    tokens_per_expert: jax.Array,
    topk: int,
    coeff: float,
    *,
    total_num_tokens: int | jax.Array | None = None,
    num_experts: int | None = None,
) -> jax.Array:
    """Load-balancing loss: coeff * E / (K n^2) * sum over experts of count * (sum of probs).

    Args:
        probs: [T, E] float32, bfloat16 or float16; or [T, S * E], whose columns are the experts of
            S sequences of T tokens, for a loss per sequence.
        tokens_per_expert: [E] or [S * E], integers or floats; without a gradient.
        topk: K.
        coeff: factor of the loss, static.
        total_num_tokens: n, an int or an integer array of rank 0; None means T.
        num_experts: E; None means all columns of probs.

    Returns:
        A scalar of rank 0 in probs's dtype, summed in float32 in a fixed order; 0 for n = 0.

    Raises:
        ValueError, TypeError: on a shape, dtype or option that does not fit.
    """
    return _functions.aux_loss(probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff)
