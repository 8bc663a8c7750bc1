# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of plan, permute, combine and the losses for the GPU benchmark: ours, the peers', bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import peers
import torch
from duomoe import RouterConfig, Routing, ops
from gpu_common import Run
from gpu_router import VALUES, draw_logits

import jax_frontend
import torch_frontend
from jax_frontend import transforms

MOVES = ("permute", "permute_bwd", "combine", "combine_bwd")


@dataclasses.dataclass(frozen=True)
class DispatchCase:
    """One op on T tokens of width D to K of E experts; combine and its gradient with weights."""

    op: str
    tokens: int
    experts: int
    top_k: int
    width: int = 0  # of a plan: none
    dtype: str = "bfloat16"
    values: str = "normal"  # of the logits that chose the experts

    @property
    def shape(self) -> str:
        """T,E,K and D."""
        sizes = [self.tokens, self.experts, self.top_k, *([self.width] if self.width else [])]
        return ",".join(map(str, sizes))

    @property
    def name(self) -> str:
        """For --one."""
        parts = [self.op, *self.shape.split(",")]
        return "_".join(parts + [self.values] * (self.values != "normal"))

    @property
    def floor_bytes(self) -> int:
        """Tokens' rows once, experts' rows once (of combine_bwd read and written), the slots' maps
        (a plan: ids read, row_of_slot and slot_of_row written) and weights.
        """
        slots = self.tokens * self.top_k
        if self.op == "plan_dispatch":
            return 12 * slots
        size = 4 if self.dtype == "float32" else 2
        rows = slots * self.width * size
        moved = self.tokens * self.width * size + rows * (2 if self.op == "combine_bwd" else 1)
        weights = {"combine": 4, "combine_bwd": 8}.get(self.op, 0)
        return moved + (4 + weights) * slots

    @property
    def set_bytes(self) -> int:
        """What one input set and its outputs take."""
        return self.floor_bytes

    def inputs(self, device: str) -> tuple[Any, ...]:
        """Of a plan the ids; else what moves, then ids (of the peers' order), plan, weights."""
        chosen = draw_logits(self.tokens, self.experts, self.values, device)
        # Equal logits send all tokens to the same experts.
        ids = chosen.topk(self.top_k, dim=-1).indices.int()
        if self.values == "equal":
            ids = torch.arange(self.top_k, dtype=torch.int32, device=device)
            ids = ids.expand(self.tokens, -1).contiguous()
        if self.op == "plan_dispatch":
            return (ids,)
        plan = torch_frontend.plan_dispatch(ids, self.experts)
        dtype, slots = getattr(torch, self.dtype), self.tokens * self.top_k
        sizes = {
            "permute": [self.tokens],
            "permute_bwd": [slots],
            "combine": [slots],
            "combine_bwd": [self.tokens, slots],
        }[self.op]
        moved = [torch.randn((n, self.width), dtype=dtype, device=device) for n in sizes]
        weights = torch.rand((self.tokens, self.top_k), device=device)
        return *moved, plan.row_of_slot, plan.slot_of_row, weights

    # -- ours --------------------------------------------------------------------------------------

    def torch_ours(self, *inputs: Any) -> Run:
        """The public function, or the op that it calls."""
        op = getattr(torch.ops.duomoe, self.op).default
        if self.op == "plan_dispatch":
            (ids,) = inputs
            return lambda: torch_frontend.plan_dispatch(ids, self.experts)
        arguments = self._arguments(inputs)
        return lambda: op(*arguments)

    def jax_ours(self, *arrays: Any) -> Any:
        """The same, to be traced."""
        if self.op == "plan_dispatch":
            (ids,) = arrays
            plan = jax_frontend.plan_dispatch(ids, self.experts)
            return plan.row_of_slot, plan.slot_of_row
        return transforms.call(ops.table()[self.op], self._arguments(arrays), {})

    def _arguments(self, inputs: tuple[Any, ...]) -> list[Any]:
        *moved, row_of_slot, slot_of_row, weights = inputs
        given = {"row_of_slot": row_of_slot, "slot_of_row": slot_of_row}
        if self.op.startswith("combine"):
            given["weights"] = weights
        names = [spec.name for spec in ops.table()[self.op].inputs]
        given |= dict(zip((n for n in names if n not in given), moved, strict=False))
        return [given.get(n) for n in names]

    # -- peers -------------------------------------------------------------------------------------

    def torch_peer(self, *inputs: Any, router: Any = None) -> Run:
        """Stable sort; gather; weighted index_add: torch's own ops, eager."""
        if self.op == "plan_dispatch":
            (ids,) = inputs
            return lambda: peers.torch_plan(ids, self.experts)
        *moved, _, slot_of_row, weights = inputs
        return self._peer("torch", moved, slot_of_row.long(), weights)

    def jax_peer(self, *arrays: Any) -> tuple[Any, tuple[Any, ...]]:
        """The same in JAX: argsort, take, scatter-add."""
        if self.op == "plan_dispatch":
            return lambda ids: peers.jax_plan(ids, self.experts), arrays
        *moved, _, slot_of_row, weights = arrays
        return (
            lambda moved, order, weights: self._peer("jax", moved, order, weights)(),
            (moved, slot_of_row, weights),
        )

    def _peer(self, framework: str, moved: Any, order: Any, weights: Any) -> Run:
        f = getattr(peers, f"{framework}_{self.op}")
        last = self.top_k if self.op.startswith("permute") else weights
        return lambda: f(*moved, order, last)


@dataclasses.dataclass(frozen=True)
class LossCase:
    """One loss of [1, E] statistics; what it moves is next to nothing."""

    op: str
    experts: int = 256
    tokens: int = 16384
    top_k: int = 8
    dtype: str = "float32"
    values: str = "normal"
    floor_bytes: int = 0
    set_bytes: int = 4096

    @property
    def shape(self) -> str:
        """E alone."""
        return f"E={self.experts}"

    @property
    def name(self) -> str:
        """For --one."""
        return f"{self.op}_{self.experts}"

    def inputs(self, device: str) -> tuple[Any, ...]:
        """Statistics of a routing."""
        config = RouterConfig(self.experts, self.top_k)
        routing = torch_frontend.route(
            draw_logits(self.tokens, self.experts, self.values, device), config
        )
        if self.op == "load_balancing_loss":
            return routing.sequence_counts, routing.score_sums, routing.num_tokens
        return routing.logsumexp_sq, routing.num_tokens

    def _call(self, functions: Any, arrays: tuple[Any, ...]) -> Any:
        names = {
            "load_balancing_loss": ["sequence_counts", "score_sums", "num_tokens"],
            "z_loss": ["logsumexp_sq", "num_tokens"],
        }[self.op]
        routing = Routing(None, None, None, **dict(zip(names, arrays, strict=True)))
        if self.op == "load_balancing_loss":
            return functions.load_balancing_loss(routing, RouterConfig(self.experts, self.top_k))
        return functions.z_loss(routing)

    def torch_ours(self, *inputs: Any) -> Run:
        """The public function."""
        return lambda: self._call(torch_frontend, inputs)

    def jax_ours(self, *arrays: Any) -> Any:
        """The same, to be traced."""
        return self._call(jax_frontend, arrays)

    def torch_peer(self, *inputs: Any, router: Any = None) -> Run:
        """The same maths in torch."""
        if self.op == "load_balancing_loss":
            counts, sums, n = inputs
            factor = self.experts / self.top_k
            return lambda: ((counts * sums).sum(-1) / n.float().square()).mean() * factor
        squares, n = inputs
        return lambda: squares.sum() / n.sum()


# -- which -----------------------------------------------------------------------------------------

SHAPES = [(16384, 256, 8, 7168), (32768, 128, 8, 4096), (8192, 8, 2, 4096)]
PLANS = [*(s[:3] for s in SHAPES), (65536, 384, 8)]


def plan_cases() -> list[DispatchCase]:
    """Plans of random experts."""
    return [DispatchCase("plan_dispatch", *shape, dtype="int32") for shape in PLANS]


def move_cases() -> list[DispatchCase]:
    """Rows to the experts and back, and their gradients."""
    return [DispatchCase(op, *shape) for shape in SHAPES for op in MOVES]


def other_values() -> list[DispatchCase]:
    """Plans, and the moves of one shape, with skewed experts and with the same for all tokens."""
    plans = [
        DispatchCase("plan_dispatch", *shape, dtype="int32", values=v)
        for shape in PLANS
        for v in VALUES
        if v in ("zipf", "equal")
    ]
    return plans + [
        DispatchCase(op, *SHAPES[1], values=v) for op in MOVES for v in ("zipf", "equal")
    ]


def loss_cases() -> list[LossCase]:
    """Both losses."""
    return [LossCase("load_balancing_loss"), LossCase("z_loss")]
