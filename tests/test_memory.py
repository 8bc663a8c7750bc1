# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a block keeps for its backward pass and what a training step needs at most, measured in both
front ends, against duomoe.verification.memory and the formulas of docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from duomoe import ExpertConfig, MoEParams, RouterConfig
from duomoe.verification.memory import ITEM_SIZE, Block, Tensor, kept_tensors, peak_bytes
from samples import normal

T, E, K, D, F, SHARED = 210, 6, 3, 24, 40, 28
BLOCKS = {
    "gated": Block(T, E, K, D, F),
    "bfloat16": Block(T, E, K, D, F, dtype="bfloat16"),
    "bfloat16, gate too": Block(T, E, K, D, F, dtype="bfloat16", gate_dtype="bfloat16"),
    "float16, biases": Block(T, E, K, D, F, dtype="float16", biases=True),
    "wide": Block(T, E, K, 80, 16),
    "plain, biases": Block(T, E, K, D, F, gated=False, biases=True),
    "weights on the input": Block(T, E, K, D, F, dtype="bfloat16", weight_on="input"),
    "masked": Block(T, E, K, D, F, token_mask=True),
    "capacity": Block(T, E, K, D, F, capacity=30),
    "alignment": Block(T, E, K, D, F, alignment=16),
    "max_rows": Block(T, E, K, D, F, dtype="bfloat16", alignment=8, max_rows=400),
    "shared": Block(T, E, K, D, F, shared=SHARED),
    "shared with a router": Block(
        T, E, K, D, F, shared=SHARED, shared_router=True, token_mask=True
    ),
    "plain shared": Block(T, E, K, D, F, dtype="bfloat16", gated=False, shared=SHARED),
    "recomputed": Block(T, E, K, D, F, recompute=True),
    "all, recomputed": Block(
        T,
        E,
        K,
        D,
        F,
        dtype="bfloat16",
        biases=True,
        shared=SHARED,
        shared_router=True,
        token_mask=True,
        capacity=64,
        alignment=8,
        recompute=True,
    ),
}


def formula(b: Block) -> int:
    """The bytes of docs/memory.md."""
    x, g, r = ITEM_SIZE[b.dtype], ITEM_SIZE[b.gate_dtype], b.rows
    total = g * T * E + 4 * T * K * 3 + 4 * r + 4 * (2 * E + 1)
    if not b.recompute:
        total += x * r * (2 * b.width + (3 if b.gated else 2) * b.hidden)
    if b.shared:
        if not b.recompute:
            total += x * T * (3 if b.gated else 2) * b.shared
        if b.shared_router:
            total += x * T * b.width + g * T + 8 * T
    return total


def arrays(b: Block, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    shapes = {n: t.shape for n, t in b.parameters().items()}
    x = normal(rng, (T, b.width), b.dtype)
    return x, {n: normal(rng, s, b.dtype) for n, s in shapes.items()}


def block(functions: Any, b: Block, mask: Any) -> Callable[..., Any]:
    """(x, parameters) to the output."""
    config = RouterConfig(E, K)
    names = ("gate_dtype", "capacity", "alignment", "max_rows", "recompute")
    options = {name: getattr(b, name) for name in names}

    def f(x: Any, p: dict[str, Any]) -> Any:
        params = MoEParams(**{"router": None, "w_gate": None, **p})
        experts = ExpertConfig(weight_on=b.weight_on)
        return functions.moe(x, params, config, experts=experts, token_mask=mask, **options)

    return f


def listed(tensors: Any) -> list[tuple[tuple[int, ...], str]]:
    return sorted((t.shape, t.dtype) for t in tensors)


@pytest.mark.parametrize("name", BLOCKS)
def test_formulas_of_the_docs(name: str) -> None:
    assert sum(t.bytes for t in kept_tensors(BLOCKS[name]).values()) == formula(BLOCKS[name])


# -- torch -----------------------------------------------------------------------------------------


class Torch:
    """A block in torch, run once before anything is measured."""

    def __init__(self, b: Block, rng: np.random.Generator) -> None:
        self.torch = pytest.importorskip("torch")
        import torch_frontend

        def tensor(a: np.ndarray) -> Any:
            exact = self.torch.from_numpy(a.astype(np.float32))
            return exact.to(getattr(self.torch, b.dtype)).requires_grad_()

        x, params = arrays(b, rng)
        self.x, self.params = tensor(x), {n: tensor(a) for n, a in params.items()}
        self.grad = self.torch.ones_like(self.x).detach()
        mask = self.torch.from_numpy(rng.random(T) < 0.8) if b.token_mask else None
        self.run = block(torch_frontend, b, mask)
        self.inputs = [self.x, *self.params.values()]
        self.own = {t.untyped_storage().data_ptr() for t in [*self.inputs, mask] if t is not None}
        self.step()

    def forward(self) -> Any:
        return self.run(self.x, self.params).output

    def step(self) -> Any:
        return self.torch.autograd.grad(self.forward(), self.inputs, self.grad)

    def saved(self) -> list[Tensor]:
        """What autograd saves, each memory once, without arguments."""
        found = {}

        def pack(t: Any) -> Any:
            storage = t.untyped_storage()
            if storage.data_ptr() not in self.own:
                assert t.numel() * t.element_size() == storage.nbytes()
                shape, dtype = tuple(t.shape), str(t.dtype).removeprefix("torch.")
                found[storage.data_ptr()] = Tensor(shape, dtype)
            return t

        with self.torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = self.run(self.x, self.params)
        assert out.output.requires_grad  # nothing was freed before here
        return list(found.values())

    def allocated(self, run: Callable[[], Any]) -> tuple[int, int]:
        """Bytes that `run` leaves allocated while its result lives, and the most on the way."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            result = run()
        events = record.profiler.kineto_results.events()
        memory = sorted(
            (e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]"
        )
        del result
        sums = np.cumsum([nbytes for _, _, nbytes in memory])
        return int(sums[-1]), int(sums.max())


@pytest.mark.torch
@pytest.mark.parametrize("name", BLOCKS)
def test_torch_saves_these_tensors(name: str, rng) -> None:
    b = BLOCKS[name]
    kept = dict(kept_tensors(b))
    # The losses, whose outputs live here, keep two more.
    kept["sequence_counts"], kept["num_tokens"] = Tensor((1, E), "int32"), Tensor((1,), "int32")
    if b.recompute:
        # What is computed again finds the plan in its closure, where the hooks do not see it.
        for part in ("row_of_slot", "slot_of_row", "expert_offsets", "expert_counts"):
            del kept[part]
    found = Torch(b, rng).saved()
    if b.recompute:
        assert not any(t.shape[:1] == (b.rows,) for t in found)
    assert listed(found) == listed(kept.values())


@pytest.mark.torch
@pytest.mark.parametrize("name", BLOCKS)
def test_torch_has_these_bytes_allocated(name: str, rng) -> None:
    """All memory, seen by torch's allocator: after the forward pass, and at the peak of a step."""
    b = BLOCKS[name]
    case = Torch(b, rng)
    gradients = sum(t.numel() * t.element_size() for t in case.inputs)
    output = case.x.numel() * case.x.element_size()
    expected = sum(t.bytes for t in kept_tensors(b).values())
    if b.recompute:  # the plan's routed_counts are in the closure too
        expected += 4 * E
    now, _ = case.allocated(case.forward)
    assert now - output == expected
    left, peak = case.allocated(case.step)
    assert left == gradients
    closure = 4 * E if b.recompute else 0
    assert peak - closure == peak_bytes(b)


# -- JAX -------------------------------------------------------------------------------------------


@pytest.mark.jax
@pytest.mark.parametrize("name", BLOCKS)
def test_jax_keeps_these_residuals(name: str, rng) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    import jax_frontend

    b = BLOCKS[name]
    x, params = arrays(b, rng)
    x, params = jnp.asarray(x), {n: jnp.asarray(a) for n, a in params.items()}
    mask = jnp.asarray(rng.random(T) < 0.8) if b.token_mask else None
    f = block(jax_frontend, b, mask)
    _, pull = jax.vjp(lambda x, p: f(x, p).output, x, params)
    own = {a.unsafe_buffer_pointer() for a in jax.tree.leaves((x, params, mask))}
    found = {
        a.unsafe_buffer_pointer(): Tensor(a.shape, a.dtype.name)
        for a in jax.tree.leaves(pull)
        if isinstance(a, jax.Array)
    }
    found = [t for pointer, t in found.items() if pointer not in own]
    if b.recompute:
        assert [t.dtype for t in found if t.shape[:1] == (b.rows,)] == ["int32"]
    assert listed(found) == listed(kept_tensors(b).values())
    assert sum(t.bytes for t in found) == formula(b)
