# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions for torch; all but the process group is in duomoe.functional
and duomoe.block.
"""

from __future__ import annotations

from typing import Any, Literal

from duomoe.balance import BalanceFunctions
from duomoe.block import BlockFunctions
from duomoe.config import ExpertConfig, RouterConfig
from duomoe.results import Array, MoEOutput, MoEParams, QuantileBins, Routing

from torch_frontend.frontend import TorchFrontEnd

_functions = BlockFunctions(TorchFrontEnd())

route = _functions.route
plan_dispatch = _functions.plan_dispatch
permute = _functions.permute
combine = _functions.combine
grouped_matmul = _functions.grouped_matmul
gate = _functions.gate
activate = _functions.activate
glu = _functions.glu
scale_rows = _functions.scale_rows
count_mismatches = _functions.count_mismatches
moe_from_routing = _functions.moe_from_routing

_balance = BalanceFunctions(TorchFrontEnd())

count_quantile_bins = _balance.count_quantile_bins


def load_balancing_loss(
    routing: Routing, config: RouterConfig, *, coeff: float = 1.0, group: Any = None
) -> Array:
    """Average over sequences of E / (K n^2) * sum over experts of counts * score_sums, times coeff.

    A sequence of n = 0 tokens does not take part.

    Switch Transformers' loss (Fedus et al. 2021, eq. 4) for K experts per token: perfect balance
    gives coeff.

    Args:
        routing: what `route` returned.
        config: the same RouterConfig.
        coeff: factor of the loss.
        group: a torch.distributed process group over which the tokens are spread, or None. The
            statistics ([S, E] values) are all-reduced, and so are their cotangents: averaging
            gradients over the group, as DistributedDataParallel does, gives the gradient of the
            one global loss.

    Returns:
        A scalar of rank 0, float32; 0 without tokens.

    Raises:
        ValueError, TypeError: on a routing of other E or K than config, or a coeff that is no
            finite number.
    """
    return _functions._load_balancing_loss(routing, config, coeff, group)


def z_loss(routing: Routing, *, coeff: float = 1.0, group: Any = None) -> Array:
    """Average over tokens of logsumexp(logits)^2, times coeff (ST-MoE, Zoph et al. 2022, eq. 5).

    Args:
        routing: what `route` returned.
        coeff: factor of the loss.
        group: as in load_balancing_loss.

    Returns:
        A scalar of rank 0, float32; 0 without tokens.

    Raises:
        ValueError, TypeError: on a routing without statistics, or a coeff that is no finite number.
    """
    return _functions._z_loss(routing, coeff, group)


def update_expert_bias(
    bias: Array,
    expert_counts: Array,
    *,
    rate: float,
    center: bool = False,
    group: Any = None,
) -> Array:
    """Step the selection bias by rate * sign(mean load - load): idle experts up, busy ones down.

    Auxiliary-loss-free balancing (Wang et al. 2024, algorithm 1; DeepSeek-V3, section 2.1.2). To
    be called between steps, in training only; without a gradient.

    Args:
        bias: [E] float32.
        expert_counts: [E] int8 to int64, uint8 or uint16, slots by expert: `expert_counts` of a
            Routing or MoEOutput, or the sum over micro-batches. Of any size; loads must lie within
            2^31 of each other.
        rate: the step, float32 (1e-3 in the papers).
        center: subtract the mean step, so that the biases keep their mean.
        group: a torch.distributed process group over which the tokens are spread, or None; the
            counts are all-reduced.

    Returns:
        [E] float32; the bits of `bias` where all loads are equal.

    Raises:
        ValueError, TypeError: on a shape, dtype or option that does not fit.
    """
    return _balance._update_expert_bias(bias, expert_counts, rate, center, group)


def update_expert_bias_by_quantile(
    bias: Array,
    bins: QuantileBins,
    config: RouterConfig,
    *,
    decay: float = 0.0,
    group: Any = None,
) -> Array:
    """The bias with which every expert would have had its fair share of the counted tokens.

    decay * bias + (1 - decay) * (the K/E quantile of the expert's bins, linear within a bin), less
    the mean over the experts (quantile balancing). An expert without counts enters with its old
    bias. To be called between steps, in training only; without a gradient.

    Args:
        bias: [E] float32.
        bins: what `count_quantile_bins` returned, or one with counts summed over micro-batches.
        config: the same RouterConfig.
        decay: share of the old bias, between 0 and 1.
        group: a torch.distributed process group over which the tokens are spread, or None; the
            counts are all-reduced.

    Returns:
        [E] float32.

    Raises:
        ValueError, TypeError: on a shape, dtype or option that does not fit.
    """
    return _balance._update_expert_bias_by_quantile(bias, bins, config, decay, group)


def moe(
    x: Array,
    params: MoEParams,
    config: RouterConfig,
    *,
    token_mask: Array | None = None,
    indices: Array | None = None,
    replay_mask: Array | None = None,
    compare: bool = False,
    num_sequences: int = 1,
    experts: ExpertConfig | None = None,
    capacity: int | None = None,
    drop_order: Literal["position", "weight"] = "position",
    alignment: int = 1,
    max_rows: int | None = None,
    gate_dtype: str = "float32",
    load_balancing_coeff: float = 0.0,
    z_loss_coeff: float = 0.0,
    recompute: bool = False,
    group: Any = None,
) -> MoEOutput:
    """Gate, router, dispatch, experts and combine.

    Args:
        x: [..., D] float32, bfloat16 or float16; leading axes are tokens.
        params: MoEParams.
        config: RouterConfig.
        token_mask: [...] bool; see route.
        indices: [..., K] integers; see route.
        replay_mask: [...] bool; see route.
        compare: see route.
        num_sequences: see route.
        experts: ExpertConfig; None for its defaults, SwiGLU.
        capacity: see plan_dispatch, as drop_order, alignment and max_rows.
        drop_order: see plan_dispatch.
        alignment: see plan_dispatch.
        max_rows: see plan_dispatch.
        gate_dtype: see gate.
        load_balancing_coeff: factor of the load-balancing loss in aux_loss.
        z_loss_coeff: factor of the z loss in aux_loss.
        recompute: keep no rows in expert order for the backward pass, which permutes and runs the
            experts again.
        group: see load_balancing_loss.

    Returns:
        MoEOutput.

    Raises:
        ValueError, TypeError: on a shape, dtype or option that does not fit, before any kernel
            runs.
    """
    return _functions._moe(
        x,
        params,
        config,
        token_mask=token_mask,
        indices=indices,
        replay_mask=replay_mask,
        compare=compare,
        num_sequences=num_sequences,
        experts=experts,
        capacity=capacity,
        drop_order=drop_order,
        alignment=alignment,
        max_rows=max_rows,
        gate_dtype=gate_dtype,
        load_balancing_coeff=load_balancing_coeff,
        z_loss_coeff=z_loss_coeff,
        recompute=recompute,
        over=group,
    )
