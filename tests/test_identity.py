# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""JAX = torch, bit for bit: every op and the whole block, outputs and gradients."""

from __future__ import annotations

import numpy as np
import pytest
from adapters import JaxAdapter, bits
from duomoe import MoEParams, RouterConfig
from duomoe.verification.compare import compare_all
from duomoe.verification.inputs import Options
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import block, block_parameters, normal

pytestmark = [pytest.mark.jax, pytest.mark.torch]

SHAPES = {
    "float32": Options(tokens=130, experts=16, top_k=2, width=33, hidden=65),
    "bfloat16": Options(tokens=130, experts=16, top_k=2, width=33, hidden=65, dtype="bfloat16"),
    "float16": Options(tokens=67, experts=5, top_k=5, width=8, hidden=7, dtype="float16"),
    "one of each": Options(tokens=1, experts=1, top_k=1, width=1, hidden=1),
    "many experts": Options(tokens=33, experts=300, top_k=40, width=16, hidden=4, score="sigmoid"),
    "deep sums": Options(
        tokens=600, experts=4, top_k=1, width=530, hidden=270, score="sqrtsoftplus"
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_op_and_the_block(name: str) -> None:
    result = compare_all(SHAPES[name])
    assert result.comparisons
    assert [c for c in result.comparisons if not c.identical] == []


def pair(jax_adapter, torch_adapter, f_of, primals, cotangents) -> None:
    """Outputs and gradients of f_of(functions) in JAX (eager and jitted) and torch have the same
    bits."""
    results = []
    for adapter in (jax_adapter, JaxAdapter(jit=True), torch_adapter):
        outputs, pull = adapter.vjp(f_of(adapter.functions), *primals)
        results.append([*outputs, *pull(*cotangents)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_block_options(dtype: str, jax_adapter, torch_adapter, rng) -> None:
    """Capacity, alignment, max_rows, mask, groups, sequences and a 16-bit gate at once."""
    config = RouterConfig(
        8, 2, score="sigmoid", num_groups=4, group_top_k=2, eps=1e-20, scale=2.5, counts="unbiased"
    )
    mask = rng.random((4, 12)) < 0.8

    def f_of(functions):
        def f(x, *p):
            adapter = jax_adapter if functions is jax_adapter.functions else torch_adapter
            return block(
                functions,
                config,
                token_mask=adapter.array(mask),
                num_sequences=4,
                capacity=9,
                drop_order="weight",
                alignment=4,
                max_rows=64,
                gate_dtype=dtype,
            )(x, *p)

        return f

    primals = [normal(rng, (4, 12, 10), dtype), *block_parameters(rng, 8, 10, 12, dtype)]
    cotangents = [normal(rng, (4, 12, 10), dtype), np.float32(2), np.float32(0.5)]
    pair(jax_adapter, torch_adapter, f_of, primals, cotangents)


def test_denormals_survive_in_both(jax_adapter, torch_adapter) -> None:
    """XLA's CPU threads flush denormals and torch's do not; the core keeps them on either."""
    tiny = np.array([[1e-39, 3e-38, 1.2e-38, -2e-45]], np.float32)
    ids = np.zeros((1, 1), np.int32)
    half = np.full((1, 1), 0.5, np.float32)

    def f_of(functions):
        adapter = jax_adapter if functions is jax_adapter.functions else torch_adapter

        def f(x):
            plan = functions.plan_dispatch(adapter.array(ids), 1)
            return (functions.combine(functions.permute(x, plan), plan, adapter.array(half)),)

        return f

    pair(jax_adapter, torch_adapter, f_of, [tiny], [tiny])
    (y,), _ = torch_adapter.vjp(f_of(torch_adapter.functions), tiny)
    np.testing.assert_array_equal(y, tiny / 2)


def test_denormal_gradients_of_the_block(jax_adapter, torch_adapter, rng) -> None:
    """Cotangents of a tensor that the block uses twice are added in the core, denormals too."""
    config = RouterConfig(4, 2)
    primals = [normal(rng, (12, 8)), *block_parameters(rng, 4, 8, 8)]
    cotangents = [normal(rng, (12, 8)) * np.float32(1e-38), np.float32(1e-38), np.float32(0)]
    pair(jax_adapter, torch_adapter, lambda f: block(f, config), primals, cotangents)


special = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 1e4, -1e4, np.inf, -np.inf, np.nan, 88.0, -104.0, 1e-40]
)
numbers = st.one_of(special, st.floats(-20, 20, width=32))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_route_on_any_logits(data, jax_adapter, torch_adapter) -> None:
    """Ids are distinct and in range, counts sum to the slots, finite logits give finite results."""
    experts = data.draw(st.integers(1, 12))
    top_k = data.draw(st.integers(1, experts))
    tokens = data.draw(st.integers(0, 5))
    flat = data.draw(st.lists(numbers, min_size=tokens * experts, max_size=tokens * experts))
    z = np.array(flat, np.float32).reshape(tokens, experts)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)), bool)
    bias = None
    if data.draw(st.booleans()):
        bias = np.array(
            data.draw(st.lists(st.floats(-3, 3, width=32), min_size=experts, max_size=experts)),
            "f4",
        )
    config = RouterConfig(
        experts,
        top_k,
        score=data.draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"])),
        select_on=data.draw(st.sampled_from(["score", "logit"])),
        normalize=data.draw(st.sampled_from([True, False, "if_k_gt_1"])),
        eps=data.draw(st.sampled_from([0.0, 1e-20, 1e-3])),
        eps_mode=data.draw(st.sampled_from(["add", "clamp"])),
        counts=data.draw(st.sampled_from(["actual", "unbiased"])),
    )
    results = []
    for adapter in (jax_adapter, torch_adapter):
        f = adapter.functions
        extra = dict(
            bias=None if bias is None else adapter.array(bias), token_mask=adapter.array(mask)
        )

        def floats(z, f=f, extra=extra):
            routing = f.route(z, config, **extra)
            return routing.weights, routing.score_sums, routing.logsumexp_sq

        outputs, pull = adapter.vjp(floats, z)
        grad = pull(*(np.ones(o.shape, np.float32) for o in outputs))
        routing = f.route(adapter.array(z), config, **extra)
        ints = [
            adapter.numpy(getattr(routing, n))
            for n in ("indices", "expert_counts", "sequence_counts", "num_tokens")
        ]
        results.append([*outputs, *grad, *ints])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))

    weights, _, _, grad, indices, expert_counts, sequence_counts, num_tokens = results[0]
    assert np.all((indices >= -1) & (indices < experts))
    for row, valid in zip(indices, mask, strict=True):
        assert len(set(row)) == (top_k if valid else 1)
        assert np.all(row >= 0) if valid else np.all(row == -1)
    assert expert_counts.sum() == sequence_counts.sum() == mask.sum() * top_k
    assert num_tokens.sum() == mask.sum()
    finite = np.isfinite(z).all(axis=1)
    assert np.isfinite(weights[finite]).all() and np.isfinite(grad[finite]).all()
    assert np.all(weights[~mask] == 0) and np.all(grad[~mask] == 0)


def test_cotangents_of_all_that_a_block_returns(jax_adapter, torch_adapter, rng) -> None:
    """Logits and weights are used inside the block, too: what joins their cotangents keeps
    denormals, which XLA's own additions flush."""
    x, parameters = normal(rng, (9, 8)), block_parameters(rng, 4, 8, 6)
    outputs = [np.full(shape, 1e-40, np.float32) for shape in ((9, 8), (9, 4), (9, 2))]

    def f_of(functions):
        def f(x, *p):
            out = functions.moe(x, MoEParams(*p), RouterConfig(4, 2, normalize=False))
            return out.output, out.logits, out.routing.weights

        return f

    pair(jax_adapter, torch_adapter, f_of, [x, *parameters], outputs)
    _, pull = jax_adapter.vjp(f_of(jax_adapter.functions), x, *parameters)
    assert np.abs(pull(*outputs)[1]).max() > 0
