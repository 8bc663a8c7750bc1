# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk sort and the dispatch by expert ids of the `te` modules against a float64 model."""

from __future__ import annotations

import numpy as np
import pytest
from te_checks import te
from te_moves import Moves, Run, assert_near, chunk_moves, f8, normal, same_on_both

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
from duomoe.te_chunks import PureJaxPermState

pytestmark = [pytest.mark.jax, pytest.mark.torch]

FLOATS = ("float32", "bfloat16", "float16")


@pytest.fixture
def rng(request) -> np.random.Generator:
    """The same data for both front ends."""
    name = request.node.nodeid.replace("jax", "").replace("torch", "")
    return np.random.default_rng(list(name.encode()))


# -- chunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("chunks", [1, 4, 40])
def test_chunks(request, adapter, rng, chunks: int, spare: int, dtype: str) -> None:
    """Chunks in another order, empty ones among them; what lies past them is left out."""
    tokens = 30 + spare
    sizes = rng.multinomial(30, np.ones(chunks) / chunks)
    order = rng.permutation(chunks)
    moves = chunk_moves(sizes, order, tokens)
    x, probs = normal(rng, tokens, 3, dtype=dtype), normal(rng, tokens)
    x[30:], probs[30:] = np.nan, np.nan
    module, given = te(adapter), [adapter.array(a.astype("i4")) for a in (sizes, order)]

    def plain(x):
        return (module.moe_sort_chunks_by_index(x, *given),), ()

    def with_probs(x, p):
        return module.moe_sort_chunks_by_index_with_probs(x, p, *given), ()

    def with_map(x):
        out, maps = module.sort_chunks_by_index(x, *given)
        return (out,), (maps,)

    clean, flat = f8(np.nan_to_num(x), np.nan_to_num(probs))
    runs = [Run(adapter, f, (x,)) for f in (plain, with_map)]
    runs.append(Run(adapter, with_probs, (x, probs)))
    for run in runs:
        np.testing.assert_array_equal(run.outputs[0].astype("f8"), moves.spread(clean))
        (grad,) = f8(run.cotangents[0])
        np.testing.assert_array_equal(run.gradients[0].astype("f8"), moves.collect(grad))
    np.testing.assert_array_equal(runs[2].outputs[1], moves.pick(flat[:, None]))
    np.testing.assert_array_equal(
        runs[2].gradients[1], moves.place(runs[2].cotangents[1].astype("f8"))[:, 0]
    )
    want = np.full(tokens, -1, "i4")
    want[moves.tokens] = moves.rows
    np.testing.assert_array_equal(runs[1].others[0], want, strict=True)
    same_on_both(request, adapter, *runs)


# -- expert ids ------------------------------------------------------------------------------------


@pytest.mark.parametrize("roll", [None, 0, 3, -1])
@pytest.mark.parametrize("align", [0, 8])
def test_dispatch_by_ids(request, adapter, rng, align: int, roll: int | None) -> None:
    batch, length, experts, top_k = 3, 8, 6, 2
    tokens = batch * length
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
    ids[rng.random(ids.shape) < 0.1] = -1
    x, weights = normal(rng, tokens, 5), normal(rng, tokens, top_k, dtype="bfloat16")
    module = te(adapter)

    def f(x):
        given = adapter.array(ids.astype("i4").reshape(batch, length, top_k))
        out, state, sizes = module.pure_jax_token_dispatch(
            x.reshape((batch, length, 5)), given, experts, top_k, align, roll
        )
        assert state.num_real_tokens == tokens * top_k
        assert state.padding_size == out.shape[0] - tokens * top_k
        return (out,), (state.sorted_indices, sizes)

    run = Run(adapter, f, (x,))
    rolled = np.where(ids < 0, -1, (ids - (roll or 0)) % experts)
    counts = np.bincount(rolled[rolled >= 0], minlength=experts)
    sizes = -(-counts // (align or 1)) * (align or 1)
    starts, rows = np.cumsum(sizes) - sizes, tokens * top_k + max(0, align - 1) * experts
    placed = [
        (int(starts[e]) + i, int(s) // top_k, int(s) % top_k)
        for e in range(experts)
        for i, s in enumerate(np.flatnonzero(rolled.reshape(-1) == e))
    ]
    moves = Moves.of(placed, (rows, tokens, top_k))
    slots = np.full(rows, -1, "i4")
    slots[moves.rows] = moves.tokens * top_k + moves.columns
    np.testing.assert_array_equal(run.others[0], slots, strict=True)
    np.testing.assert_array_equal(run.others[1], sizes)
    np.testing.assert_array_equal(run.outputs[0], moves.spread(*f8(x)))
    (grad,) = f8(run.cotangents[0])
    assert_near(run.gradients[0], moves.collect(grad), moves.collect(np.abs(grad)))
    state = PureJaxPermState(adapter.array(run.others[0]), tokens * top_k, rows - tokens * top_k)

    def combine(r, w):
        return (module.pure_jax_token_combine(r, state, w, top_k, batch, length),), ()

    outputs = normal(rng, rows, 5, dtype="float16")
    outputs[slots < 0] = np.nan
    back = Run(adapter, combine, (outputs, weights))
    clean, w = f8(np.nan_to_num(outputs), weights)
    shape = (batch, length, 5)
    magnitude = moves.collect(np.abs(clean), np.abs(w)).reshape(shape)
    assert_near(back.outputs[0], moves.collect(clean, w).reshape(shape), magnitude)
    grad = back.cotangents[0].astype("f8").reshape(tokens, 5)
    grad_rows, grad_w = moves.collect_gradients(grad, clean, w)
    assert_near(back.gradients[0], grad_rows)
    _, size = moves.collect_gradients(np.abs(grad), np.abs(clean), None)
    assert_near(back.gradients[1], grad_w, size)
    same_on_both(request, adapter, run, back)
