# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the gradient of an op with optional inputs keeps and runs: only what is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from adapters import JaxAdapter, TorchAdapter
from duomoe import DispatchPlan, ops
from oracle_cases_experts import Dispatch
from samples import normal

Adapter = JaxAdapter | TorchAdapter
Shapes = list[tuple[int, ...]]

DISPATCH = Dispatch(6, 3, 4, capacity=5, alignment=4)
D, N = 11, 7


def plan_of(adapter: Adapter) -> DispatchPlan:
    return DispatchPlan(**{n: adapter.array(v) for n, v in DISPATCH.plan().items()})


def permute(adapter: Adapter, rng: Any, weighted: bool) -> tuple[Callable[..., Any], list[Any]]:
    plan = plan_of(adapter)
    arrays = [normal(rng, (6, D))] + [normal(rng, (6, 3))] * weighted
    return lambda x, *w: adapter.functions.permute(x, plan, *w), arrays


def grouped_matmul(
    adapter: Adapter, rng: Any, biased: bool
) -> tuple[Callable[..., Any], list[Any]]:
    plan = plan_of(adapter)
    rows = len(DISPATCH.plan()["slot_of_row"])
    arrays = [normal(rng, (rows, D)), normal(rng, (4, D, N))] + [normal(rng, (4, N))] * biased
    return lambda r, w, *b: adapter.functions.grouped_matmul(r, w, plan, *b), arrays


def kept_by_torch(f: Callable[..., Any], arrays: list[Any], ran: list[str]) -> Shapes:
    """Shapes of what torch keeps for the gradient; the backward ops that it ran go to `ran`."""
    import torch

    from torch_frontend import bind

    kept: Shapes = []

    def pack(x: Any) -> Any:
        kept.append(tuple(x.shape))
        return x

    leaves = [torch.from_numpy(a).requires_grad_() for a in arrays]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = f(*leaves)
    original = bind.call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bind, "call", lambda op, *a: ran.append(op.name) or original(op, *a))
        out.sum().backward()
    return kept


def kept_by_jax(f: Callable[..., Any], arrays: list[Any], ran: list[str]) -> Shapes:
    """The same of JAX: the leaves of the function from cotangents to gradients."""
    import jax

    out, pull = jax.vjp(f, *arrays)
    program = jax.jit(lambda g, *a: jax.vjp(f, *a)[1](g)).lower(np.ones_like(out), *arrays)
    found = set(re.findall(r"duomoe\.(\w+)", program.compile().as_text()))
    ran += sorted(name for name in found if "_bwd" in name)
    return [tuple(leaf.shape) for leaf in jax.tree.leaves(pull)]


def observe(adapter: Adapter, case: Any, rng: Any, given: bool) -> tuple[Shapes, list[str]]:
    """Shapes of the residuals that hold floats of rows, tokens or weights, and the ops run."""
    ran: list[str] = []
    kept = (kept_by_torch if adapter.name == "torch" else kept_by_jax)(
        *case(adapter, rng, given), ran
    )
    return kept, ran


def test_permute_keeps_x_only_for_weights(adapter: Adapter, rng) -> None:
    kept, ran = observe(adapter, permute, rng, False)
    assert ran == ["permute_bwd"] and kept == [(6, 3)]  # row_of_slot
    kept, ran = observe(adapter, permute, rng, True)
    assert ran == ["permute_bwd", "permute_bwd_weights"]
    assert sorted(kept) == [(6, 3), (6, 3), (6, D)]  # weights too


def test_grouped_matmul_runs_a_bias_gradient_only_for_a_bias(adapter: Adapter, rng) -> None:
    both = ["grouped_matmul_bwd_rows", "grouped_matmul_bwd_w"]
    without, ran = observe(adapter, grouped_matmul, rng, False)
    assert ran == both
    kept, ran = observe(adapter, grouped_matmul, rng, True)
    assert sorted(ran) == sorted([*both, "grouped_matmul_bwd_bias"])
    assert sorted(kept) == sorted(without)  # the bias itself is not needed
    assert (4, N) not in kept


@pytest.mark.parametrize("op", [op for op in ops.table().values() if op.backward])
def test_plan_of_a_gradient_names_what_its_steps_take(op: ops.Op) -> None:
    """Every step has a present target, every residual is some step's, none is missing."""
    optional = [i for i, s in enumerate(op.inputs) if s.optional]
    for chosen in range(2 ** len(optional)):
        absent = {i for bit, i in enumerate(optional) if chosen >> bit & 1}
        present = tuple(i not in absent for i in range(len(op.inputs)))
        plan = op.gradient_plan(present)
        targets = {t for step in op.gradient_steps for t in step.targets if present[t]}
        assert targets == {t for step in plan.steps for t in step.targets if present[t]}
        assert all(any(present[t] for t in step.targets) for step in plan.steps)
        taken = {s for step in plan.steps for s in step.sources if s[0] != "grad"}
        assert list(plan.residuals) == sorted(taken)
