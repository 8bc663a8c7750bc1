# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the MoE modules for torch, linen and nnx check alike, so that they refuse in the same words.

Axis letters: E experts, D model width, F expert hidden width, F' joint hidden width of the shared
experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from duomoe import arguments
from duomoe.config import ExpertConfig, RouterConfig


def check(
    width: Any,
    hidden: Any,
    config: Any,
    *,
    experts: Any,
    shared_hidden: Any,
    shared_router: Any,
    capacity_factor: Any,
) -> None:
    """Refuse when a module is made what no call of it could mend.

    Args:
        width: D.
        hidden: F.
        config: RouterConfig.
        experts: ExpertConfig or None.
        shared_hidden: F', or 0.
        shared_router: whether the shared experts have a factor of their own.
        capacity_factor: see RouterConfig.capacity; None for no capacity.

    Raises:
        ValueError, TypeError: on an option of another kind or range, or one that lacks another.
    """
    arguments.integer("width", width, 1)
    arguments.integer("hidden", hidden, 1)
    arguments.record("config", config, RouterConfig)
    if experts is not None:
        arguments.record("experts", experts, ExpertConfig)
    arguments.integer("shared_hidden", shared_hidden, 0)
    if shared_router and not shared_hidden:
        raise ValueError("shared_router needs shared experts, got shared_hidden=0")
    if capacity_factor is not None:
        config.capacity(0, capacity_factor)


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
