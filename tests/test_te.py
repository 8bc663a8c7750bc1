# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The `te` functions: layouts, numbers and gradients against a float64 model of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from adapters import DTYPES, bits
from te_checks import distinct_logits, loss_of, te, topk

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
from duomoe.te import RoutingMapFormat

pytestmark = [pytest.mark.jax, pytest.mark.torch]

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
# The largest relative error of a weight, and of a gradient relative to the row's largest.
WEIGHT_ERROR, GRADIENT_ERROR = 4e-6, 2e-5
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def model(z, k, *, pre=False, groups=None, kept=None, scale=1.0, score="softmax", bias=None):
    """probs[T, E] and map[T, E] in torch float64, with torch's autograd."""
    if score == "softmax":
        s = torch.softmax(z, -1) if pre else z
    elif score == "sigmoid":
        s = torch.sigmoid(z)
    else:
        s = torch.nn.functional.softplus(z).sqrt()
    value = s.detach() + (0 if bias is None else torch.from_numpy(bias).double())
    if kept:
        by_group = value.reshape(len(z), groups, -1)
        best = by_group.topk(k // kept, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
        stays = torch.zeros(len(z), groups).scatter(1, best, 1.0)[..., None] > 0
        value = by_group.masked_fill(~stays, -torch.inf).flatten(1)
    ids = value.topk(k, dim=-1).indices
    chosen = s.gather(1, ids)
    if score == "softmax" and not pre:
        chosen = torch.softmax(chosen, -1)
    elif score != "softmax" and k > 1:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    probs = torch.zeros_like(z).scatter(1, ids, chosen * scale)
    return probs, torch.zeros_like(z).scatter(1, ids, 1.0) > 0


def against_model(adapter, rng, dtype: str, k: int, experts: int = 32, **options) -> None:
    logits = distinct_logits(rng, 17, experts, dtype=dtype)
    cotangent = rng.normal(size=logits.shape).astype(DTYPES[dtype])
    names = {"pre": "use_pre_softmax", "groups": "num_groups", "kept": "group_topk"}
    names |= {"scale": "scaling_factor", "score": "score_function", "bias": "expert_bias"}
    given = {names[n]: v for n, v in options.items()}
    if "bias" in options:
        given["expert_bias"] = adapter.array(options["bias"])
    (probs,), pull = adapter.vjp(lambda z: topk(adapter, z, k, **given)[:1], logits)
    (grad,) = pull(cotangent)
    routing_map = adapter.numpy(topk(adapter, adapter.array(logits), k, **given)[1])

    z = torch.from_numpy(logits.astype("f8")).requires_grad_()
    want, wanted_map = model(z, k, **options)
    (wanted_grad,) = torch.autograd.grad(want, z, torch.from_numpy(cotangent.astype("f8")))
    assert probs.dtype == grad.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(routing_map, wanted_map.numpy(), strict=True)
    error = WEIGHT_ERROR + ROUNDING[dtype]
    np.testing.assert_allclose(probs.astype("f8"), want.detach().numpy(), rtol=error, atol=1e-30)
    largest = np.abs(wanted_grad.numpy()).max(-1, keepdims=True)
    off = np.abs(grad.astype("f8") - wanted_grad.numpy()) / largest
    assert off.max() <= GRADIENT_ERROR + ROUNDING[dtype], off.max()
    assert np.abs(wanted_grad.numpy()).max() > 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("k", [1, 4, 9])
def test_router_against_a_float64_model(adapter, rng, score: str, k: int, dtype: str) -> None:
    bias = rng.normal(size=32).astype("f4") * np.float32(0.1)
    if k > 1:  # softmax over one selected expert is 1 and has no gradient
        against_model(adapter, rng, dtype, k, score=score, scale=2.5, bias=bias)
    if score == "softmax":
        against_model(adapter, rng, dtype, k, pre=True)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("k, kept", [(4, 2), (4, 4), (6, 2), (8, 1)])
def test_groups_are_valued_by_their_best_k_over_kept(adapter, rng, score, k, kept) -> None:
    bias = rng.normal(size=32).astype("f4") * np.float32(0.3)
    against_model(adapter, rng, "float32", k, score=score, groups=4, kept=kept, bias=bias)


def test_options_are_turned_off_by_none_and_by_nonpositive_numbers(adapter, rng) -> None:
    logits = adapter.array(distinct_logits(rng, 9, 16))
    plain = adapter.numpy(topk(adapter, logits, 3)[0])
    for groups, kept in ((-1, -1), (0, 0), (4, None), (None, -1)):
        same = topk(adapter, logits, 3, num_groups=groups, group_topk=kept, scaling_factor=1.0)
        np.testing.assert_array_equal(adapter.numpy(same[0]), plain)


@pytest.mark.parametrize("experts", [1, 7, 8, 33, 300])
def test_bit_map_is_the_packed_byte_map(adapter, rng, experts: int) -> None:
    logits = adapter.array(distinct_logits(rng, 3, 5, experts))
    k = min(3, experts)
    for layout in ("bitmap_u8", "BITMAP_U8", RoutingMapFormat.BITMAP_U8, 1):
        probs, packed = topk(adapter, logits, k, routing_map_format=layout)
        _, marks = topk(adapter, logits, k)
        want = np.packbits(adapter.numpy(marks), axis=-1, bitorder="little")
        np.testing.assert_array_equal(adapter.numpy(packed), want, strict=True)
        assert adapter.numpy(marks).shape == adapter.numpy(probs).shape == (3, 5, experts)
        assert (adapter.numpy(marks).sum(-1) == k).all()


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_dense_indices(adapter, rng, dtype: str) -> None:
    logits = distinct_logits(rng, 2, 9, 16)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :4]
    if adapter.name == "torch":
        kind = {"dtype": getattr(torch, dtype), "device": adapter.device}
        buffer = torch.full((2, 9, 4), -7, **kind)
        _, ids = topk(adapter, adapter.array(logits), 4, topk_indices=buffer)
        assert ids is buffer
    else:
        with jax.enable_x64(dtype == "int64"):
            wanted = jax.ShapeDtypeStruct((2, 9, 4), dtype)
            _, ids = topk(adapter, adapter.array(logits), 4, topk_indices=wanted)
            _, again = topk(adapter, logits, 4, topk_indices=np.zeros((2, 9, 4), dtype))
            np.testing.assert_array_equal(ids, again, strict=True)
    np.testing.assert_array_equal(adapter.numpy(ids), order.astype(dtype), strict=True)


def test_histogram_of_quantile_balancing(adapter, rng) -> None:
    """Bins of (K+1)-th value minus score, added to what the histogram holds."""
    logits = distinct_logits(rng, 130, 16)
    bias = (rng.integers(-8, 8, 16) / 64).astype("f4")
    bounds = np.array([-1.53, 1.49], "f4")
    scores = 1 / (1 + np.exp(-logits.astype("f8")))
    cutoff = -np.sort(-(scores + bias), axis=-1)[:, 4:5]
    bins = np.floor((cutoff - scores - bounds[0]) * 50 / (bounds[1] - bounds[0])).astype(int)
    want = np.stack([np.bincount(bins[:, e], minlength=50) for e in range(16)])
    started = rng.integers(0, 9, (16, 50)).astype("i4")
    histogram = adapter.array(started)
    results = topk(
        adapter,
        adapter.array(logits),
        4,
        score_function="sigmoid",
        expert_bias=adapter.array(bias),
        qb_histogram=histogram,
        qb_bin_bounds=adapter.array(bounds),
        qb_histogram_mode="fused_atomic",
    )
    assert len(results) == (2 if adapter.name == "torch" else 3)
    got = adapter.numpy(histogram if adapter.name == "torch" else results[2])
    # A value on the border of two bins may round to either side: at most a few do.
    assert np.abs(got - started - want).sum() <= 4
    assert (got - started).sum() == 130 * 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("score", SCORES)
def test_scores_for_the_loss(adapter, rng, score: str, dtype: str) -> None:
    """Over all experts, without bias and scale, normalised at K = 1 too; float32 in any case."""
    logits = distinct_logits(rng, 17, 32, dtype=dtype)
    cotangent = rng.normal(size=logits.shape).astype("f4")

    def scores(z):
        return te(adapter).fused_compute_score_for_moe_aux_loss(z, 3, score)[1:]

    (got,), pull = adapter.vjp(scores, logits)
    (grad,) = pull(cotangent)
    z = torch.from_numpy(logits.astype("f8")).requires_grad_()
    want = torch.softmax(z, -1)
    if score != "softmax":
        raw = z.sigmoid() if score == "sigmoid" else torch.nn.functional.softplus(z).sqrt()
        want = raw / raw.sum(-1, keepdim=True)
    (wanted,) = torch.autograd.grad(want, z, torch.from_numpy(cotangent.astype("f8")))
    assert got.dtype == np.float32 and grad.dtype == DTYPES[dtype]
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=WEIGHT_ERROR)
    off = np.abs(grad.astype("f8") - wanted.numpy()) / np.abs(wanted.numpy()).max(-1, keepdims=True)
    assert off.max() <= GRADIENT_ERROR + ROUNDING[dtype]
    marks = te(adapter).fused_compute_score_for_moe_aux_loss(adapter.array(logits), 3, score)[0]
    order = np.argsort(-logits.astype("f8"), axis=-1, kind="stable")[:, :3]
    marked = np.nonzero(adapter.numpy(marks))[1].reshape(-1, 3)
    np.testing.assert_array_equal(np.sort(order), marked)
    # The other module's name of the same thing.
    swapped = topk(
        adapter,
        adapter.array(logits),
        3,
        score_function=score,
        compute_aux_scores=True,
        scaling_factor=9.0,
    )
    np.testing.assert_array_equal(bits(adapter.numpy(swapped[0])), bits(got))
    np.testing.assert_array_equal(adapter.numpy(swapped[1]), adapter.numpy(marks))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("counts_dtype", ["int16", "int32", "int64", "float32", "bfloat16"])
@pytest.mark.parametrize("total", ["rows", "int", "array"])
def test_aux_loss(adapter, rng, dtype: str, counts_dtype: str, total: str) -> None:
    probs = rng.random((130, 24)).astype("f4").astype(DTYPES[dtype])
    counts = rng.integers(0, 128, 24)
    as_dtype = DTYPES.get(counts_dtype, np.dtype(counts_dtype))
    n = 130 if total == "rows" else 1000
    given: Any = {"rows": None, "int": 1000}.get(total)
    if total == "array":
        given = adapter.array(np.asarray(1000, "i8" if adapter.name == "torch" else "i4"))

    def loss(p):
        loads = adapter.array(counts.astype(as_dtype))
        return (loss_of(adapter, p, loads, total_num_tokens=given),)

    (got,), pull = adapter.vjp(loss, probs)
    (grad,) = pull(np.asarray(2.0, DTYPES[dtype]))
    factor = 0.25 * 24 / (2 * n**2)
    want = factor * (probs.astype("f8") @ counts).sum()
    assert got.shape == () and got.dtype == grad.dtype == DTYPES[dtype]
    np.testing.assert_allclose(float(got), want, rtol=1e-6 + ROUNDING[dtype])
    wanted = np.broadcast_to(2 * factor * counts, grad.shape)
    smallest = 2.0**-24 if dtype == "float16" else 0.0
    np.testing.assert_allclose(
        grad.astype("f8"), wanted, rtol=1e-7 + ROUNDING[dtype], atol=smallest
    )


def test_loss_per_sequence_has_the_experts_of_all_sequences_as_columns(adapter, rng) -> None:
    """[T, S * E] with n = T is the sum of the sequences' losses."""
    probs = rng.random((20, 3, 8)).astype("f4")
    counts = rng.integers(0, 20, (3, 8)).astype("i4")
    whole = loss_of(
        adapter,
        adapter.array(probs.reshape(20, 24)),
        adapter.array(counts.reshape(24)),
        total_num_tokens=20,
        num_experts=8,
    )
    parts = [
        loss_of(adapter, adapter.array(probs[:, s].copy()), adapter.array(counts[s]))
        for s in range(3)
    ]
    np.testing.assert_allclose(float(whole), sum(map(float, parts)), rtol=1e-6)


def test_no_tokens(adapter) -> None:
    logits = adapter.array(np.zeros((0, 8), "f4"))
    probs, marks = topk(adapter, logits, 2)
    assert tuple(probs.shape) == tuple(marks.shape) == (0, 8)
    assert float(loss_of(adapter, probs, adapter.array(np.zeros(8, "i4")))) == 0
    zero = loss_of(
        adapter,
        adapter.array(np.ones((3, 8), "f4")),
        adapter.array(np.full(8, np.inf, "f4")),
        total_num_tokens=0,
    )
    assert float(zero) == 0


def test_ties_go_to_the_lower_id_and_nan_leaves_other_rows_alone(adapter) -> None:
    logits = np.zeros((3, 32), "f4")
    logits[1] = np.nan
    logits[2, :4] = [1, 2, -np.inf, 3]
    probs, marks = (adapter.numpy(x) for x in topk(adapter, adapter.array(logits), 4))
    assert np.nonzero(marks[0])[0].tolist() == [0, 1, 2, 3]
    assert marks[1].sum() == 4
    assert np.nonzero(marks[2])[0].tolist() == [0, 1, 3, 4]
    assert np.isfinite(probs[[0, 2]]).all() and np.isclose(probs[2].sum(), 1)


@pytest.mark.parametrize("score", SCORES)
def test_front_ends_agree_bit_for_bit(jax_adapter, torch_adapter, rng, score: str) -> None:
    """Router, scores and loss in one function: outputs and the gradient."""
    logits = (3 * rng.normal(size=(130, 33))).astype("f4").astype(DTYPES["bfloat16"])
    counts = rng.integers(0, 99, 33).astype("i4")
    results = []
    for adapter in (jax_adapter, torch_adapter):

        def f(z, adapter=adapter):
            module = te(adapter)
            probs = topk(adapter, z, 4, score_function=score, scaling_factor=2.5)[0]
            scores = module.fused_compute_score_for_moe_aux_loss(z, 4, score)[1]
            return probs, scores, loss_of(adapter, scores, adapter.array(counts))

        outputs, pull = adapter.vjp(f, logits)
        gradients = []
        # One output at a time: the frameworks add up the gradients of several uses themselves.
        for i, output in enumerate(outputs):
            cotangents = [np.zeros_like(o) for o in outputs]
            waves = np.cos(np.arange(output.size)).reshape(output.shape)
            cotangents[i] = waves.astype(output.dtype)
            gradients += pull(*cotangents)
        results.append([*outputs, *gradients])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_counts_beyond_int32(adapter, rng) -> None:
    """As an int, as an array, and as loads: one loss, up to the rounding to float32."""
    probs, n = rng.random((10, 8)).astype("f4"), 3_000_000_000
    counts = np.arange(8, dtype="i8") + n
    want = 0.25 * 8 / (2 * float(n) ** 2) * (probs.astype("f8") @ counts).sum()
    with jax.enable_x64(adapter.name == "jax"):
        p, loads = adapter.array(probs), adapter.array(counts)
        for total in (n, np.int64(n), adapter.array(np.asarray(n, "i8"))):
            loss = float(loss_of(adapter, p, loads, total_num_tokens=total))
            np.testing.assert_allclose(loss, want, rtol=4e-7)
