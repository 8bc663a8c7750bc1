# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The permutation of the `te` modules: rows, maps and gradients against a float64 model of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from adapters import DTYPES, bits
from te_checks import te
from te_moves import Moves, Run, assert_near, f8, index_moves, mask_moves, normal, same_on_both

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

pytestmark = [pytest.mark.jax, pytest.mark.torch]

FLOATS = ("float32", "bfloat16", "float16")


def draw_mask(rng, tokens: int, experts: int, top_k: int) -> np.ndarray:
    """[T, E] bool, up to K of each token, a sixth of the experts without any."""
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
    mask = (ids[..., None] == np.arange(experts)).any(axis=1) & (rng.random((tokens, 1)) < 0.9)
    if experts > 5:
        mask[:, rng.permutation(experts)[: experts // 6]] = False
    return mask


SIZES = [  # T, E, K
    (0, 4, 2),
    (1, 1, 1),
    (5, 1, 1),
    (9, 6, 2),
    (17, 5, 5),
    (33, 40, 3),
    (70, 7, 4),
]


@pytest.fixture
def rng(request) -> np.random.Generator:
    """The same data for both front ends."""
    name = request.node.nodeid.replace("jax", "").replace("torch", "")
    return np.random.default_rng(list(name.encode()))


def row_map(mask: np.ndarray, moves: Moves) -> np.ndarray:
    """The map by its documentation: unpadded rows, last expert first, experts, count."""
    tokens, experts = mask.shape
    unpadded = np.full(mask.shape, -1)
    order = np.argsort(moves.rows)
    unpadded[moves.tokens[order], moves.columns[order]] = np.arange(len(order))
    want = np.full((tokens, 2 * experts + 1), -1, "i4")
    for t in range(tokens):
        ids = [e for e in range(experts - 1, -1, -1) if unpadded[t, e] >= 0]
        want[t, : len(ids)] = unpadded[t, ids]
        want[t, experts : experts + len(ids)] = ids
        want[t, -1] = len(ids)
    return want


# -- masks -----------------------------------------------------------------------------------------


PARTS = (None, 1.0, 0.6, 1.4)
SOME = [(*o, d) for o, d in zip(itertools.product(SIZES, PARTS), itertools.cycle(FLOATS))]


@pytest.mark.parametrize(("size", "part", "dtype"), SOME)
def test_permute_by_a_mask(request, adapter, rng, size, part: float | None, dtype: str) -> None:
    """Rows by expert, then token; the last ones dropped, or zeros after them; with probs too."""
    tokens, experts, _ = size
    mask = draw_mask(rng, *size)
    limit = -1 if part is None else int(mask.sum() * part)
    rows = tokens * experts if part is None else limit
    x, probs = normal(rng, tokens, 5, dtype=dtype), normal(rng, tokens, experts, dtype="bfloat16")
    probs[rng.random(probs.shape) < 0.2] = 0  # has no effect on the rows
    module, given = te(adapter), adapter.array(mask.astype(rng.choice(["i4", "?", "u1"])))

    def plain(x):
        out, maps = module.moe_permute(x, given, limit)
        return (out,), (maps,)

    def with_probs(x, p):
        out, permuted, maps = module.moe_permute_with_probs(x, p, given, limit)
        return (out, permuted), (maps,)

    def dispatched(x, p):
        out, permuted, maps, pads, counts = module.token_dispatch(x, given, rows, p)
        assert pads is None
        return (out, permuted), (maps, counts)

    runs = [
        Run(adapter, plain, (x,)),
        *(Run(adapter, f, (x, probs)) for f in (with_probs, dispatched)),
    ]
    moves = mask_moves(mask, None if part is None else limit, rows=rows)
    for run in runs:
        np.testing.assert_array_equal(run.outputs[0].astype("f8"), moves.spread(*f8(x)))
        np.testing.assert_array_equal(run.others[0], row_map(mask, moves), strict=True)
        (grad,) = f8(run.cotangents[0])
        assert_near(run.gradients[0], moves.collect(grad), moves.collect(np.abs(grad)))
    for run in runs[1:]:
        np.testing.assert_array_equal(run.outputs[1].astype("f8"), moves.pick(*f8(probs)))
        np.testing.assert_array_equal(
            run.gradients[1].astype("f8"), moves.place(*f8(run.cotangents[1]))
        )
    kept = np.bincount(moves.columns, minlength=experts).astype("i4")
    np.testing.assert_array_equal(runs[2].others[1], kept, strict=True)
    same_on_both(request, adapter, *runs)


WEIGHTED = [
    (*o, d)
    for o, d in zip(
        itertools.product(SIZES, ("float32", "bfloat16", None)),
        itertools.cycle(["bfloat16", "float32", "float32", "float16"]),
    )
]


@pytest.mark.parametrize(("size", "weighted", "dtype"), WEIGHTED)
def test_unpermute_by_a_mask(request, adapter, rng, size, weighted: str | None, dtype: str) -> None:
    """Rows that no token uses hold NaN, in the rows and in the padding."""
    tokens, experts, _ = size
    mask = draw_mask(rng, *size)
    limit = int(mask.sum() * 0.8)
    module = te(adapter)
    dispatched = module.token_dispatch(
        adapter.array(normal(rng, tokens, 6)), adapter.array(mask), limit, None, 4
    )
    _, _, maps, pads, counts = dispatched
    rows_count = dispatched[0].shape[0]
    assert rows_count == (limit + experts * 3) // 4 * 4
    moves = mask_moves(mask, limit, 4, rows_count)
    np.testing.assert_array_equal(adapter.numpy(maps), row_map(mask, moves), strict=True)
    kept = np.bincount(moves.columns, minlength=experts)
    np.testing.assert_array_equal(adapter.numpy(counts), -(-kept // 4) * 4)
    padding = -(-kept // 4) * 4 - kept
    np.testing.assert_array_equal(adapter.numpy(pads), np.cumsum(padding) - padding)

    rows = np.full((rows_count, 6), np.nan).astype(DTYPES[dtype])
    rows[moves.rows] = normal(rng, len(moves.rows), 6, dtype=dtype)
    weights = () if weighted is None else (normal(rng, tokens, experts, dtype=weighted),)
    if weighted:
        weights[0][~mask] = np.nan

    def f(r, *w):
        y = module.moe_unpermute(r, maps, *w, restore_shape=(tokens, 6), pad_offsets=pads)
        return (y,), ()

    run = Run(adapter, f, (rows, *weights))
    combined = module.token_combine(
        adapter.array(rows), maps, *map(adapter.array, weights), pad_offsets=pads
    )
    np.testing.assert_array_equal(bits(run.outputs[0]), bits(adapter.numpy(combined)))
    clean, wide = f8(np.nan_to_num(rows), *(np.nan_to_num(w) for w in weights)), None
    if weighted:
        wide = clean[1]
    want = moves.collect(clean[0], wide)
    magnitude = moves.collect(np.abs(clean[0]), None if wide is None else np.abs(wide))
    assert_near(run.outputs[0], want, magnitude)
    grad = run.cotangents[0].astype("f8")
    grad_rows, grad_weights = moves.collect_gradients(grad, clean[0], wide)
    assert_near(run.gradients[0], grad_rows)
    if weighted:
        _, size_of = moves.collect_gradients(np.abs(grad), np.abs(clean[0]), None)
        assert_near(run.gradients[1], grad_weights, size_of)
    same_on_both(request, adapter, run)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("size", SIZES)
def test_permute_and_pad(request, adapter, rng, size, align: int, known: bool) -> None:
    """The rows of the counts, or the static worst case; back again through the padding."""
    tokens, experts, _ = size
    mask = draw_mask(rng, *size)
    counts = mask.sum(axis=0, dtype="i4")
    x, probs = normal(rng, tokens, 5, dtype="bfloat16"), normal(rng, tokens, experts)
    module = te(adapter)
    total = int(counts.sum())
    options = {"num_out_tokens": total + 2} if known else {}

    def f(x, p):
        out, permuted, maps, pads, targets = module.moe_permute_and_pad_with_probs(
            x, p, adapter.array(mask), adapter.array(counts), align, **options
        )
        return (out, permuted), (maps, pads, targets)

    run = Run(adapter, f, (x, probs))
    targets = -(-counts // align) * align
    rows = (total + 2 + experts * (align - 1)) // align * align if known else int(targets.sum())
    moves = mask_moves(mask, None, align, rows)
    np.testing.assert_array_equal(run.outputs[0].astype("f8"), moves.spread(*f8(x)))
    np.testing.assert_array_equal(run.outputs[1], moves.pick(probs))
    np.testing.assert_array_equal(run.others[0], row_map(mask, moves), strict=True)
    np.testing.assert_array_equal(run.others[1], np.cumsum(targets - counts) - (targets - counts))
    np.testing.assert_array_equal(run.others[2], targets)
    grad_x, grad_p = f8(*run.cotangents)
    assert_near(run.gradients[0], moves.collect(grad_x), moves.collect(np.abs(grad_x)))
    np.testing.assert_array_equal(run.gradients[1], moves.place(grad_p))

    def back(r, p):
        maps, pads = (adapter.array(a) for a in run.others[:2])
        return (module.moe_unpermute(r, maps, p, pad_offsets=pads),), ()

    returned = Run(adapter, back, (run.outputs[0], probs))
    spread, wide = f8(run.outputs[0], probs)
    magnitude = moves.collect(np.abs(spread), np.abs(wide))
    assert_near(returned.outputs[0], moves.collect(spread, wide), magnitude)
    same_on_both(request, adapter, run, returned)


def test_what_does_not_fit_is_dropped_and_counted(adapter) -> None:
    """Four tokens all to expert 0, room for two: the first two are kept."""
    module = te(adapter)
    x = np.arange(1, 9, dtype="f4").reshape(4, 2)
    mask = np.zeros((4, 3), bool)
    mask[:, 0] = True
    for align in (None, 1, 8):

        def f(x, align=align):
            result = module.token_dispatch(x, adapter.array(mask), 2, None, align)
            return result[:1], (*result[2:3], result[4])

        run = Run(adapter, f, (x,))
        np.testing.assert_array_equal(run.outputs[0][:2], x[:2])
        assert not run.outputs[0][2:].any()
        np.testing.assert_array_equal(run.others[0][:, -1], [1, 1, 0, 0])
        np.testing.assert_array_equal(run.others[1], [{8: 8}.get(align, 2), 0, 0])
        np.testing.assert_array_equal(run.gradients[0][2:], 0)
        np.testing.assert_array_equal(run.gradients[0][:2], run.cotangents[0][:2])

    ids = adapter.array(np.zeros((4, 1), "i4"))
    out, row_ids = module.moe_permute(adapter.array(x), ids, 2, map_type="index")
    np.testing.assert_array_equal(adapter.numpy(out), x[:2])
    np.testing.assert_array_equal(adapter.numpy(row_ids), [0, 1, -1, -1])


def test_counts_that_disagree_with_the_map_stay_in_bounds(adapter, rng) -> None:
    """Fewer rows than the map asks for: the last are dropped; more: zeros."""
    module = te(adapter)
    mask = draw_mask(rng, 30, 4, 2)
    x, probs = normal(rng, 30, 3), normal(rng, 30, 4)
    for claimed in ([4, 0, 0, 5], [40, 40, 40, 40]):
        out, permuted, maps, pads, targets = (
            adapter.numpy(a)
            for a in module.moe_permute_and_pad_with_probs(
                *map(adapter.array, (x, probs, mask, np.array(claimed, "i4"))), 4
            )
        )
        rows = sum(-(-n // 4) * 4 for n in claimed)
        assert out.shape == (rows, 3) and permuted.shape == (rows,)
        assert targets.sum() <= rows
        back = module.moe_unpermute(
            *map(adapter.array, (out, maps)), pad_offsets=adapter.array(pads)
        )
        np.testing.assert_allclose(adapter.numpy(back), x * maps[:, -1:], rtol=1e-6, atol=1e-6)


def test_three_axes_and_restore_shape(adapter, rng) -> None:
    module = te(adapter)
    mask = draw_mask(rng, 12, 6, 2).reshape(3, 4, 6)
    x, probs = normal(rng, 3, 4, 5), normal(rng, 3, 4, 6)
    rows = int(mask.sum())
    given = [adapter.array(a) for a in (x, mask, probs)]
    deep = module.token_dispatch(given[0], given[1], rows, given[2])
    flat = module.token_dispatch(
        *map(adapter.array, (x.reshape(12, 5), mask.reshape(12, 6))),
        rows,
        adapter.array(probs.reshape(12, 6)),
    )
    for a, b in zip(deep, flat, strict=True):
        if a is not None:
            np.testing.assert_array_equal(adapter.numpy(a), adapter.numpy(b))
    y = module.token_combine(deep[0], deep[2], given[2])
    assert y.shape == (12, 5)
    restored = module.moe_unpermute(deep[0], deep[2], given[2], (3, 4, 5))
    np.testing.assert_array_equal(adapter.numpy(restored).reshape(12, 5), adapter.numpy(y))
    # No rows at all: still the tokens, where the original returns no rows.
    none = module.moe_unpermute(deep[0][:0], deep[2], None, (3, 4, 5))
    np.testing.assert_array_equal(adapter.numpy(none), np.zeros((3, 4, 5)))
    chunks = adapter.array(np.array([5, 7], "i4")), adapter.array(np.array([1, 0], "i8"))
    out, _ = module.sort_chunks_by_index(given[0], *chunks)
    np.testing.assert_array_equal(adapter.numpy(out), np.roll(x.reshape(12, 5), 7, axis=0))


def test_a_row_map_of_the_original(adapter) -> None:
    """The example in its sources; what it leaves undefined is not read."""
    module = te(adapter)
    r = 77
    lines = [[3, 0, r, 1, 0, r, 2], [5, 1, r, 2, 0, r, 2], [6, r, r, 2, r, r, 1]]
    lines += [[4, 2, r, 1, 0, r, 2], [r, r, r, r, r, r, 0]]
    mask = np.array([[1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]])
    x = np.arange(10, dtype="f4").reshape(5, 2)
    out, ours = module.moe_permute(adapter.array(x), adapter.array(mask), 7)
    theirs = np.array(lines, "i4")
    np.testing.assert_array_equal(adapter.numpy(ours), np.where(theirs == r, -1, theirs))
    back = module.moe_unpermute(out, adapter.array(theirs))
    np.testing.assert_array_equal(adapter.numpy(back), x * mask.sum(1, keepdims=True))


def test_nan_gradients_pass_and_padding_gets_none(adapter) -> None:
    module = te(adapter)
    mask = np.array([[1, 0], [1, 1], [0, 1]])
    x = np.ones((3, 2), "f4")
    dispatched = module.token_dispatch(adapter.array(x), adapter.array(mask), 4, None, 4)
    rows, maps, pads = adapter.numpy(dispatched[0]), dispatched[2], dispatched[3]
    (_,), pull = adapter.vjp(lambda r: (module.token_combine(r, maps, None, pads),), rows)
    grad = np.ones((3, 2), "f4")
    grad[1] = np.nan
    (got,) = pull(grad)
    want = np.zeros((8, 2))  # rows of tokens 0, 1, -, -, 1, 2, -, -
    want[[0, 5]], want[[1, 4]] = 1, np.nan
    np.testing.assert_array_equal(got, want)


# -- index maps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [None, 1.0, 0.5, 1.5])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["distinct", "unused", "large"])
def test_index_map(request, adapter, rng, kind: str, dtype: str, part: float | None) -> None:
    """By id, then token, then slot; unused slots and the last rows have none; one rounding."""
    tokens, top_k = 40, 6
    ids = np.argsort(rng.random((tokens, 9)), axis=1)[:, :top_k].astype("i8")
    if kind != "distinct":
        ids[rng.random(ids.shape) < 0.2] = -1
    if kind == "large":
        ids = np.where(ids >= 0, ids * 200_000_000, ids)
    limit = None if part is None else int(ids.size * part)
    moves = index_moves(ids, limit)
    x, weights = normal(rng, tokens, 7, dtype=dtype), normal(rng, tokens, top_k)
    module = te(adapter)

    def permute(x):
        given = adapter.array(ids.astype("i4"))
        out, maps = module.moe_permute(x, given, limit, map_type="index", max_token_num=64)
        return (out,), (maps,)

    run = Run(adapter, permute, (x,))
    rows_of = np.full((tokens, top_k), -1, "i4")
    rows_of[moves.tokens, moves.columns] = moves.rows
    np.testing.assert_array_equal(run.others[0], rows_of.T.reshape(-1), strict=True)
    np.testing.assert_array_equal(run.outputs[0].astype("f8"), moves.spread(*f8(x)))
    (grad,) = f8(run.cotangents[0])
    assert_near(run.gradients[0], moves.collect(grad), moves.collect(np.abs(grad)))
    maps = adapter.array(run.others[0])

    def weighted(r, w):
        return (module.moe_unpermute(r, maps, w, map_type="index"),), ()

    def plain(r):
        return (module.moe_unpermute(r, maps, None, (tokens, 7), "index"),), ()

    rows = normal(rng, moves.shape[0], 7, dtype=dtype)
    rows[~np.isin(np.arange(len(rows)), moves.rows)] = np.nan
    back, sums = Run(adapter, weighted, (rows, weights)), Run(adapter, plain, (rows,))
    clean, w = f8(np.nan_to_num(rows), weights)
    magnitude = moves.collect(np.abs(clean), np.abs(w))
    assert_near(back.outputs[0], moves.collect(clean, w), magnitude)
    assert_near(sums.outputs[0], moves.collect(clean), moves.collect(np.abs(clean)))
    (grad,) = f8(back.cotangents[0])
    grad_rows, grad_w = moves.collect_gradients(grad, clean, w)
    _, size = moves.collect_gradients(np.abs(grad), np.abs(clean), None)
    assert_near(back.gradients[0], grad_rows)
    assert_near(back.gradients[1], grad_w, size)
    assert not back.gradients[1][rows_of == -1].any()
    same_on_both(request, adapter, run, back, sums)


def test_index_map_with_one_slot_and_empty(adapter, rng) -> None:
    module = te(adapter)
    x = normal(rng, 8, 3)
    ids = adapter.array(rng.permutation(8).reshape(8, 1).astype("i4"))
    out, maps = module.moe_permute(adapter.array(x), ids, 0, map_type="index")  # 0: no limit
    back = module.moe_unpermute(out, maps, map_type="index")
    np.testing.assert_array_equal(adapter.numpy(back), x)
    nothing = adapter.array(np.zeros((0, 3), "f4"))
    out, maps = module.moe_permute(nothing, adapter.array(np.zeros((0, 2), "i4")), map_type="index")
    assert out.shape == (0, 3) and maps.shape == (0,)
    weights = adapter.array(np.zeros((0, 2), "f4"))
    assert module.moe_unpermute(out, maps, weights, map_type="index").shape == (0, 3)


def test_more_rows_than_a_16_bit_number_holds(adapter, rng) -> None:
    tokens, experts, top_k = 20_000, 16, 4
    x = (np.arange(tokens * 2) % 8191).astype("f4").reshape(tokens, 2)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype("i4")
    mask = (ids[..., None] == np.arange(experts)).any(axis=1)
    module = te(adapter)
    by_mask, maps = module.moe_permute(adapter.array(x), adapter.array(mask), tokens * top_k)
    by_index, places = module.moe_permute(adapter.array(x), adapter.array(ids), map_type="index")
    token = np.nonzero(mask.T)[1]
    np.testing.assert_array_equal(adapter.numpy(by_mask), x[token])
    np.testing.assert_array_equal(adapter.numpy(by_index), x[token])
    back = module.moe_unpermute(by_mask, maps)
    np.testing.assert_array_equal(adapter.numpy(back), top_k * x)
    ones = adapter.array(np.ones((tokens, top_k), "f4"))
    back = module.moe_unpermute(by_index, places, ones, map_type="index")
    np.testing.assert_array_equal(adapter.numpy(back), top_k * x)


def test_routes_of_the_te_router_come_back(adapter, rng) -> None:
    """Router map and probs -> dispatch -> combine is the sum of the weights times the token."""
    module = te(adapter)
    logits, x = normal(rng, 50, 8), normal(rng, 50, 4)
    options = (False, None, None, None, "sigmoid", None)
    names = ("use_pre_softmax", "num_groups", "group_topk", "scaling_factor", "score_function")
    probs, mask = module.fused_topk_with_score_function(
        adapter.array(logits), 2, **dict(zip(names, options[:5], strict=True)), expert_bias=None
    )
    out, permuted, maps, pads, _ = module.token_dispatch(adapter.array(x), mask, 100, probs, 16)
    assert permuted.shape == out.shape[:1]
    y = adapter.numpy(module.token_combine(out, maps, probs, pads))
    np.testing.assert_allclose(y, x * adapter.numpy(probs).sum(1, keepdims=True), rtol=1e-5)
