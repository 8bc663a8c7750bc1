# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Eager host overhead: the wall time in which the host issues a call on tiny tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
from duomoe import MoEParams, RouterConfig
from gpu_common import Budget, Clock, Run, host_time
from gpu_jax import to_jax

import jax_frontend
import torch_frontend

TOKENS, EXPERTS, TOP_K, WIDTH, HIDDEN = 16, 8, 2, 64, 32
CONFIG = RouterConfig(EXPERTS, TOP_K)
CALLS = 200  # at most
SHAPE = f"T={TOKENS} E={EXPERTS} K={TOP_K} D={WIDTH} F={HIDDEN}"


def torch_runs(device: str) -> dict[str, Run]:
    """What torch users call; `neg` is torch's own smallest call, to compare with."""
    f = torch_frontend
    z = torch.randn(TOKENS, EXPERTS, device=device)
    x = torch.randn(TOKENS, WIDTH, device=device)
    leaf_z, leaf_x = z.clone().requires_grad_(), x.clone().requires_grad_()
    shapes = {
        "router": (WIDTH, EXPERTS),
        "w_gate": (EXPERTS, WIDTH, HIDDEN),
        "w_up": (EXPERTS, WIDTH, HIDDEN),
        "w_down": (EXPERTS, HIDDEN, WIDTH),
    }
    tensors = {n: torch.randn(s, device=device) for n, s in shapes.items()}
    params = MoEParams(**tensors)
    leaves = MoEParams(**{n: t.clone().requires_grad_() for n, t in tensors.items()})
    routing = f.route(z, CONFIG)
    plan = f.plan_dispatch(routing.indices, EXPERTS)
    rows = f.permute(x, plan)

    def without(run: Run) -> Run:
        def call() -> Any:
            with torch.no_grad():
                return run()

        return call

    def with_backward(forward: Callable[[torch.Tensor], torch.Tensor]) -> Run:
        def step() -> Any:
            y = forward(leaf_z)
            return torch.autograd.grad(y, leaf_z, torch.ones_like(y))

        return step

    return {
        "torch: neg": without(lambda: torch.neg(z)),
        "torch: route": without(lambda: f.route(z, CONFIG)),
        "torch: route with autograd": lambda: f.route(leaf_z, CONFIG),
        "torch: neg and its backward": with_backward(torch.neg),
        "torch: route and its backward": with_backward(lambda z: f.route(z, CONFIG).weights),
        "torch: plan_dispatch": without(lambda: f.plan_dispatch(routing.indices, EXPERTS)),
        "torch: permute": without(lambda: f.permute(x, plan)),
        "torch: combine": without(lambda: f.combine(rows, plan, routing.weights)),
        "torch: moe": without(lambda: f.moe(x, params, CONFIG)),
        "torch: moe with autograd": lambda: f.moe(leaf_x, leaves, CONFIG),
    }


def jax_runs(device: str) -> dict[str, Run]:
    """Jitted calls; their results are not waited for."""
    f = jax_frontend
    z, x, w_gate, w_up, w_down, router = to_jax(
        tuple(
            torch.randn(s, device=device)
            for s in (
                (TOKENS, EXPERTS),
                (TOKENS, WIDTH),
                (EXPERTS, WIDTH, HIDDEN),
                (EXPERTS, WIDTH, HIDDEN),
                (EXPERTS, HIDDEN, WIDTH),
                (WIDTH, EXPERTS),
            )
        )
    )
    params = MoEParams(router, w_gate, w_up, w_down)
    route = jax.jit(lambda z: f.route(z, CONFIG))
    plan_of = jax.jit(lambda ids: f.plan_dispatch(ids, EXPERTS))
    permute, combine = jax.jit(f.permute), jax.jit(f.combine)
    moe = jax.jit(lambda x, p: f.moe(x, p, CONFIG))
    neg = jax.jit(lambda z: -z)
    routing = route(z)
    plan = plan_of(routing.indices)
    rows = permute(x, plan)
    runs = {
        "jit: neg": lambda: neg(z),
        "jit: route": lambda: route(z),
        "jit: plan_dispatch": lambda: plan_of(routing.indices),
        "jit: permute": lambda: permute(x, plan),
        "jit: combine": lambda: combine(rows, plan, routing.weights),
        "jit: moe": lambda: moe(x, params),
    }
    for run in runs.values():
        jax.block_until_ready(run())
    return runs


def measure(clock: Clock, budget: Budget) -> dict[str, dict[str, float]]:
    """{call: what host_time says}."""
    waits: list[tuple[Callable[[str], dict[str, Run]], Run]] = [
        (torch_runs, lambda _: clock.synchronize()),
        (jax_runs, jax.block_until_ready),
    ]
    calls = CALLS if clock.cuda else 3
    times = {}
    for make, wait in waits:
        runs = budget.guard(f"host: {make.__name__}", make, clock.device) or {}
        for name, run in runs.items():
            label = f"host: {name}"
            if budget.allows(label):
                took = budget.guard(label, host_time, clock, run, calls, wait)
                if took:
                    times[name] = took
    return times
