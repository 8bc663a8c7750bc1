# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the MoE modules for torch, linen and nnx check alike, so that they refuse in the same words:
when they are made, options that no call could mend.

Axis letters: E experts, D model width, F expert hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from duomoe import arguments
from duomoe.config import ExpertConfig, RouterConfig
from duomoe.dispatch import plan_options
from duomoe.ops import FLOAT_DTYPES


def check_lengths(**lengths: Any) -> None:
    """Axes of parameters: ints of at least 1."""
    for name, length in lengths.items():
        arguments.integer(name, length, 1)


def check_router(width: Any, config: Any, gate_dtype: Any) -> None:
    """The options of a Router."""
    check_lengths(width=width)
    arguments.record("config", config, RouterConfig)
    arguments.one_of("gate_dtype", gate_dtype, FLOAT_DTYPES)


def check_experts(name: str, config: Any, gated: bool) -> None:
    """The ExpertConfig of Experts, which `name` is in the caller's words, or None."""
    if config is None:
        return
    arguments.record(name, config, ExpertConfig)
    if config.needs_gate and not gated:
        raise ValueError(
            f"{name}.limit and {name}.up_offset are for gated experts, but gated is False"
        )


def check_block(
    width: Any,
    hidden: Any,
    config: Any,
    *,
    experts: Any,
    gated: bool,
    shared_hidden: Any,
    shared_router: bool,
    capacity_factor: Any,
    drop_order: Any,
    alignment: Any,
    max_rows: Any,
    gate_dtype: Any,
    load_balancing_coeff: Any,
    z_loss_coeff: Any,
    recompute: Any,
) -> None:
    """The options of an MoE; see the arguments of `moe`.

    Raises:
        ValueError, TypeError: on an option that does not fit, or contradicts another.
    """
    check_router(width, config, gate_dtype)
    check_lengths(hidden=hidden)
    check_experts("experts", experts, gated)
    arguments.integer("shared_hidden", shared_hidden, 0)
    if shared_router and not shared_hidden:
        raise ValueError("shared_router needs shared experts, got shared_hidden=0")
    if capacity_factor is not None:
        config.capacity(0, capacity_factor)
    plan_options(None, drop_order, alignment, max_rows)
    arguments.number("load_balancing_coeff", load_balancing_coeff)
    arguments.number("z_loss_coeff", z_loss_coeff)
    arguments.boolean("recompute", recompute)


def capacity(config: RouterConfig, factor: float | None, leading: Sequence[int]) -> int | None:
    """Rows per expert for x[..., D] with these leading axes; None without a factor."""
    return None if factor is None else config.capacity(math.prod(leading), factor)


def check_bias_update(expert_bias: Any, training: bool) -> None:
    """Refuse to step a selection bias that is not there, or by the loads of an evaluation.

    Raises:
        RuntimeError: without an expert_bias, and in evaluation mode.
    """
    if expert_bias is None:
        raise RuntimeError("update_expert_bias needs a module made with expert_bias=True")
    if not training:
        raise RuntimeError("update_expert_bias is for training; the module is in eval mode")
