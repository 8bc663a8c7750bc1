# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The `te` modules: signatures, layouts, numbers against a float64 model of the same functions,
gradients, sharding."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest
from adapters import DTYPES, bits

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
from duomoe import ops
from duomoe.te import RoutingMapFormat, ScoreFunction
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_samples import mesh

pytestmark = [pytest.mark.jax, pytest.mark.torch]

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
# The largest relative error of a weight, and of a gradient relative to the row's largest.
WEIGHT_ERROR, GRADIENT_ERROR = 4e-6, 2e-5
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def te(adapter) -> Any:
    return importlib.import_module(f"{adapter.name}_frontend.te")


def topk(adapter, logits, k, **options) -> tuple[Any, ...]:
    """The dense router by keyword, in either module."""
    given = {
        "use_pre_softmax": False,
        "num_groups": None,
        "group_topk": None,
        "scaling_factor": None,
        "score_function": "softmax",
        "expert_bias": None,
        **options,
    }
    return te(adapter).fused_topk_with_score_function(logits, k, **given)


def distinct_logits(rng, *shape: int, dtype: str = "float32") -> np.ndarray:
    """No two logits of a row are equal or close, in any dtype."""
    grid = np.argsort(rng.random(shape), axis=-1) - shape[-1] / 2
    return (grid / 8).astype(DTYPES[dtype])


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


def loss_of(adapter, probs, counts, **options):
    given = {"total_num_tokens": None, "num_experts": None, "topk": 2, "coeff": 0.25, **options}
    return te(adapter).fused_moe_aux_loss(probs, counts, **given)


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


BAD = {
    "topk": ({"k": 17}, ValueError, "topk must be between 1 and 16, got 17"),
    "score": ({"score_function": "tanh"}, ValueError, "score_function must be one of 'sigmoid'"),
    "map": ({"routing_map_format": 2}, ValueError, "routing_map_format must be one of"),
    "groups": ({"num_groups": 3, "group_topk": 2}, ValueError, "num_groups"),
    "no groups": ({"group_topk": 2}, TypeError, "num_groups must be an int, got None"),
    "kept": ({"num_groups": 8, "group_topk": 3}, ValueError, "multiple of group_topk"),
    "scale": ({"scaling_factor": "2"}, TypeError, "scaling_factor must be a float"),
    "pre": ({"use_pre_softmax": 1}, TypeError, "use_pre_softmax must be a bool"),
    "bias": ({"expert_bias": np.zeros(15, "f4")}, ValueError, "bias must have shape"),
    "bias dtype": ({"expert_bias": np.zeros(16, "f2")}, TypeError, "bias must be float32"),
    "buffer": (
        {"topk_indices": np.zeros((5, 3), "i4")},
        ValueError,
        "topk_indices must have",
    ),
    "buffer dtype": ({"topk_indices": np.zeros((5, 4), "u1")}, TypeError, "topk_indices must be"),
    "histogram alone": (
        {"qb_histogram": np.zeros((16, 9), "i4")},
        ValueError,
        "must be given together",
    ),
    "histogram dtype": (
        {
            "qb_histogram": np.zeros((16, 9), "f4"),
            "qb_bin_bounds": np.zeros(2, "f4"),
            "qb_histogram_mode": "two_kernel",
        },
        TypeError,
        "qb_histogram must be int32",
    ),
    "histogram mode": (
        {
            "qb_histogram": np.zeros((16, 9), "i4"),
            "qb_bin_bounds": np.zeros(2, "f4"),
            "qb_histogram_mode": "slow",
        },
        ValueError,
        "qb_histogram_mode must be one of",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(adapter, name: str) -> None:
    options, error, message = BAD[name]
    given = {
        n: adapter.array(v) if isinstance(v, np.ndarray) else v
        for n, v in options.items()
        if n != "k"
    }
    with pytest.raises(error, match=message):
        topk(adapter, adapter.array(np.zeros((5, 16), "f4")), options.get("k", 4), **given)


def test_bad_input_of_the_loss(adapter) -> None:
    probs, counts = adapter.array(np.ones((5, 16), "f4")), adapter.array(np.ones(16, "i4"))
    with pytest.raises(ValueError, match=r"tokens_per_expert must have shape"):
        loss_of(adapter, probs, adapter.array(np.ones(8, "i4")))
    with pytest.raises(ValueError, match=r"multiple of num_experts \(5\)"):
        loss_of(adapter, probs, counts, num_experts=5)
    with pytest.raises(ValueError, match=r"total_num_tokens must be at least 0"):
        loss_of(adapter, probs, counts, total_num_tokens=-1)
    with pytest.raises(TypeError, match=r"total_num_tokens must be an int"):
        loss_of(adapter, probs, counts, total_num_tokens=2.5)
    with pytest.raises(TypeError, match=r"total_num_tokens must be integers, got float32"):
        loss_of(adapter, probs, counts, total_num_tokens=adapter.array(np.float32(5).reshape(())))
    with pytest.raises(TypeError, match=r"probs must be float32"):
        loss_of(adapter, counts.reshape(1, 16), counts)


# What Transformer Engine's users write: names, order, and which arguments may be left out.
SIGNATURES = {
    ("torch", "fused_topk_with_score_function"): """logits topk use_pre_softmax num_groups
        group_topk scaling_factor score_function expert_bias routing_map_format= topk_indices=
        qb_histogram= qb_bin_bounds= qb_histogram_mode=""",
    ("torch", "fused_compute_score_for_moe_aux_loss"): """logits topk score_function
        routing_map_format=""",
    ("torch", "fused_moe_aux_loss"): """probs tokens_per_expert total_num_tokens num_experts topk
        coeff""",
    ("jax", "fused_topk_with_score_function"): """logits topk use_pre_softmax= num_groups=
        group_topk= scaling_factor= score_function= expert_bias= compute_aux_scores=
        routing_map_format=""",
    ("jax", "fused_moe_aux_loss"): "probs tokens_per_expert topk coeff",
}


@pytest.mark.parametrize("framework, name", SIGNATURES)
def test_signatures(framework: str, name: str) -> None:
    module = importlib.import_module(f"{framework}_frontend.te")
    positional = [
        p.name + ("=" if p.default is not p.empty else "")
        for p in inspect.signature(getattr(module, name)).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert positional == SIGNATURES[framework, name].split()


def test_both_modules_have_the_same_options(jax_adapter, torch_adapter) -> None:
    ours, theirs = te(jax_adapter), te(torch_adapter)
    assert ours.__all__ == theirs.__all__
    for name in ours.__all__:
        options = [set(inspect.signature(getattr(m, name)).parameters) for m in (ours, theirs)]
        assert options[0] == options[1], name
    assert [ScoreFunction.SIGMOID, ScoreFunction.SOFTMAX] == [0, 1]


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


def test_torch_compiles_whole_and_takes_strided_cotangents(rng) -> None:
    from torch_frontend import te as module

    logits = torch.from_numpy(distinct_logits(rng, 24, 16)).requires_grad_()
    counts = torch.arange(16)

    def f(z):
        probs, marks = module.fused_topk_with_score_function(
            z, 2, False, None, None, None, "sigmoid", None
        )
        _, scores = module.fused_compute_score_for_moe_aux_loss(z, 2, "sigmoid")
        loss = module.fused_moe_aux_loss(scores, counts, torch.tensor(24), 16, 2, 0.1)
        return probs.sum() + loss, marks

    eager, marks = f(logits)
    compiled, compiled_marks = torch.compile(f, fullgraph=True, backend="aot_eager")(logits)
    assert torch.equal(eager, compiled) and torch.equal(marks, compiled_marks)
    (grad,) = torch.autograd.grad(eager, logits, retain_graph=True)
    (compiled_grad,) = torch.autograd.grad(compiled, logits)
    assert torch.equal(grad, compiled_grad)
    assert grad.abs().sum() > 0


@pytest.mark.multidevice
@pytest.mark.parametrize("axes", [P("a"), P(("a", "b")), P("b")])
def test_loss_of_sharded_tokens_is_the_loss(rng, axes) -> None:
    """Each shard sees its tokens only; loss and gradient are those of all of them."""
    from jax_frontend import te as module

    probs, counts = rng.random((64, 16)).astype("f4"), np.arange(16, dtype="i4")

    def loss(p):
        return module.fused_moe_aux_loss(p, counts, 2, 1.0)

    value, grad = jax.jit(jax.value_and_grad(loss))(probs)
    sharded = jax.device_put(probs, NamedSharding(mesh((2, 2), ("a", "b")), axes))
    assert not sharded.sharding.is_fully_replicated
    many_value, many_grad = jax.jit(jax.value_and_grad(loss))(sharded)
    assert many_value.shape == ()
    np.testing.assert_allclose(many_value, value, rtol=2.0**-23)
    np.testing.assert_array_equal(many_grad, grad)
    np.testing.assert_allclose(
        value, 16 / (2 * 64**2) * (probs.astype("f8") @ counts).sum(), rtol=2.0**-23
    )


@pytest.mark.multidevice
def test_router_keeps_tokens_sharded_and_gathers_experts(rng) -> None:
    from jax_frontend import te as module

    logits = distinct_logits(rng, 64, 16)
    f = jax.jit(lambda z: module.fused_topk_with_score_function(z, 2, routing_map_format=1))
    want = f(logits)
    for axes in (P("a"), P(None, "b"), P("a", "b")):
        z = jax.device_put(logits, NamedSharding(mesh((2, 2), ("a", "b")), axes))
        got = f(z)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
        assert got[0].sharding.is_equivalent_to(NamedSharding(z.sharding.mesh, P(axes[0])), 2)


def test_functions_under_vmap(rng) -> None:
    from jax_frontend import te as module

    probs, counts = rng.random((3, 10, 8)).astype("f4"), np.arange(8, dtype="i4")
    mapped = jax.vmap(lambda p: module.fused_moe_aux_loss(p, counts, 2, 1.0))(probs)
    single = [module.fused_moe_aux_loss(p, counts, 2, 1.0) for p in probs]
    np.testing.assert_array_equal(mapped, np.stack(single))
    grads = jax.vmap(jax.grad(lambda p: module.fused_moe_aux_loss(p, counts, 2, 1.0)))(probs)
    assert grads.shape == probs.shape and (grads[0] == grads[1]).all()


def test_options_that_torch_compile_makes_symbolic(rng) -> None:
    """A token count from a shape, and floats that change between calls, in one graph."""
    from torch_frontend import te as module

    def loss(p, coeff):
        return module.fused_moe_aux_loss(p, torch.ones(8), p.shape[0], 8, 2, coeff)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for tokens, coeff in ((6, 0.1), (4, 0.2), (5, 0.3), (9, 0.3)):
        p = torch.from_numpy(rng.random((tokens, 8)).astype("f4"))
        assert torch.equal(compiled(p, coeff), loss(p, coeff))
    torch._dynamo.reset()

    def route(z, scale):
        return module.fused_topk_with_score_function(
            z, 2, False, None, None, scale, "sigmoid", None
        )[0]

    compiled = torch.compile(route, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens, scale in ((6, 1.5), (4, 2.5), (5, 3.5)):
        z = torch.from_numpy(distinct_logits(rng, tokens, 8))
        assert torch.equal(compiled(z, scale), route(z, scale))


def test_torch_buffers_on_another_device_are_refused() -> None:
    from torch_frontend import te as module

    def call(**options):
        z = torch.zeros(6, 8)
        return module.fused_topk_with_score_function(
            z, 2, False, None, None, None, "sigmoid", None, **options
        )

    ids = torch.empty(6, 2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="topk_indices is on meta"):
        call(topk_indices=ids)
    with pytest.raises(ValueError, match="qb_histogram is on meta"):
        call(
            qb_histogram=torch.zeros(8, 4, dtype=torch.int32, device="meta"),
            qb_bin_bounds=torch.tensor([-1.0, 1.0]),
            qb_histogram_mode="two_kernel",
        )
    # Ids are written first: a buffer that cannot be written leaves the histogram alone.
    histogram = torch.zeros(8, 4, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        call(
            topk_indices=torch.zeros(1, 2, dtype=torch.int32).expand(6, 2),
            qb_histogram=histogram,
            qb_bin_bounds=torch.tensor([-1.0, 1.0]),
            qb_histogram_mode="two_kernel",
        )
    assert histogram.sum() == 0


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


def test_jax_exports_with_symbolic_tokens(rng) -> None:
    from jax import export

    from jax_frontend import te as module

    def f(z):
        probs, packed = module.fused_topk_with_score_function(z, 2, routing_map_format=1)
        _, scores = module.fused_compute_score_for_moe_aux_loss(z, 2)
        return probs, packed, module.fused_moe_aux_loss(scores, np.ones(8, "f4"), 2, 1.0)

    (tokens,) = export.symbolic_shape("T")
    checks = [export.DisabledSafetyCheck.custom_call(f"duomoe.{op}") for op in ops.table()]
    exported = export.export(jax.jit(f), disabled_checks=checks)(
        jax.ShapeDtypeStruct((tokens, 8), "float32")
    )
    loaded = export.deserialize(exported.serialize())
    for count in (3, 20):
        z = distinct_logits(rng, count, 8)
        for a, b in zip(loaded.call(z), f(z), strict=True):
            np.testing.assert_array_equal(a, b)


def test_jax_counts_that_change_do_not_compile_anew(rng, caplog) -> None:
    from jax_frontend import te as module

    probs = jax.numpy.asarray(rng.random((10, 8)), "float32")
    module.fused_moe_aux_loss(probs, np.ones(8, "f4"), 2, 1.0, total_num_tokens=5)
    with jax.log_compiles():
        for n in (6, 7):
            module.fused_moe_aux_loss(probs, np.ones(8, "f4"), 2, 1.0, total_num_tokens=n)
        assert not [r for r in caplog.records if "Compiling" in r.message]
        module.fused_moe_aux_loss(probs, np.ones(8, "f4"), 2, 2.0, total_num_tokens=7)
    assert [r for r in caplog.records if "Compiling" in r.message]
