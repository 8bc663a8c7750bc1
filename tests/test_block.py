# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The block in all its variants: both front ends have the same bits, outputs and gradients, and
agree with plain float64 sums over experts; routing of the caller's own; what it returns.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from adapters import DTYPES, JaxAdapter, bits
from duomoe import ExpertConfig, MoEParams, RouterConfig
from oracle_bounds import U
from samples import normal

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
from jax import test_util
from plain_block import plain_block

E, K, D, F, SHARED = 6, 2, 12, 20, 16
CONFIG = RouterConfig(E, K, score="sigmoid", scale=1.5)
SHAPES = {
    "router": (D, E),
    "w_gate": (E, D, F),
    "w_up": (E, D, F),
    "w_down": (E, F, D),
    "router_bias": (E,),
    "b_gate": (E, F),
    "b_up": (E, F),
    "b_down": (E, D),
    "shared_w_gate": (D, SHARED),
    "shared_w_up": (D, SHARED),
    "shared_w_down": (SHARED, D),
    "shared_router": (D, 1),
}


SWIGLU = ExpertConfig()


@dataclasses.dataclass(frozen=True)
class Variant:
    experts: ExpertConfig = SWIGLU
    gated: bool = True
    biases: bool = False
    shared: bool = False
    shared_router: bool = False
    recompute: bool = False

    def names(self) -> list[str]:
        def wanted(name: str) -> bool:
            if name == "shared_router":
                return self.shared_router
            if (name.endswith("w_gate") or name == "b_gate") and not self.gated:
                return False
            if name.startswith("shared"):
                return self.shared
            return self.biases or not name.startswith("b_")

        return [name for name in SHAPES if wanted(name)]


VARIANTS = {
    "swiglu": Variant(),
    "geglu, biases": Variant(ExpertConfig("gelu"), biases=True),
    "geglu by tanh, shared": Variant(ExpertConfig("gelu_tanh"), shared=True),
    "clamped, biases": Variant(
        ExpertConfig(alpha=1.702, limit=0.7, up_offset=1.0), biases=True, recompute=True
    ),
    "clamped, shared": Variant(ExpertConfig(limit=0.5), shared=True, recompute=True),
    "plain relu^2, biases": Variant(ExpertConfig("relu_squared"), gated=False, biases=True),
    "plain relu, shared, recomputed": Variant(
        ExpertConfig("relu"), gated=False, shared=True, recompute=True
    ),
    "weights on the input": Variant(ExpertConfig(weight_on="input"), shared=True),
    "weights on the input, plain": Variant(
        ExpertConfig("gelu", weight_on="input"), gated=False, biases=True, recompute=True
    ),
    "shared experts with a router": Variant(shared=True, shared_router=True, recompute=True),
}


def parameters(rng: np.random.Generator, variant: Variant, dtype: str) -> dict[str, np.ndarray]:
    arrays = {}
    for name in variant.names():
        shape = SHAPES[name]
        scale = 0.3 if name == "router_bias" or name[:2] == "b_" else shape[-2] ** -0.5
        arrays[name] = (normal(rng, shape) * np.float32(scale)).astype(DTYPES[dtype])
    return arrays


def make_params(arrays: dict[str, Any], **more: Any) -> MoEParams:
    return MoEParams(**{"router": None, "w_gate": None, **arrays, **more})


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.jax
@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_both_front_ends_have_the_same_bits(
    name: str, dtype: str, jax_adapter, torch_adapter, rng
) -> None:
    variant = VARIANTS[name]
    arrays = parameters(rng, variant, dtype)
    x, mask = normal(rng, (3, 11, D), dtype), rng.random((3, 11)) < 0.8
    bias = normal(rng, (E,))
    cotangents = [normal(rng, x.shape, dtype), np.float32(3), np.float32(0.5)]
    results = []
    for adapter in (jax_adapter, JaxAdapter(jit=True), torch_adapter):

        def f(x, *ps, adapter=adapter):
            out = adapter.functions.moe(
                x,
                make_params(dict(zip(arrays, ps, strict=True)), expert_bias=adapter.array(bias)),
                CONFIG,
                experts=variant.experts,
                token_mask=adapter.array(mask),
                capacity=9,
                load_balancing_coeff=0.1,
                z_loss_coeff=0.01,
                recompute=variant.recompute,
            )
            return out.output, out.aux_loss, out.z_loss

        outputs, pull = adapter.vjp(f, x, *arrays.values())
        results.append([*outputs, *pull(*cotangents)])
    assert all(np.abs(g.astype("f4")).max() > 0 for g in results[0])
    for other in results[1:]:
        for label, a, b in zip(("y", "aux", "z", "x", *arrays), results[0], other, strict=True):
            np.testing.assert_array_equal(bits(a), bits(b), err_msg=label)


@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_recomputation_changes_no_bit(weight_on: str, adapter, rng) -> None:
    variant = Variant(ExpertConfig(weight_on=weight_on), biases=True, shared=True)
    arrays = parameters(rng, variant, "bfloat16")
    x, g = normal(rng, (13, D), "bfloat16"), normal(rng, (13, D), "bfloat16")
    results = []
    for recompute in (False, True):

        def f(x, *ps, recompute=recompute):
            params = make_params(dict(zip(arrays, ps, strict=True)))
            options = dict(experts=variant.experts, recompute=recompute)
            return (adapter.functions.moe(x, params, CONFIG, **options).output,)

        outputs, pull = adapter.vjp(f, x, *arrays.values())
        results.append([*outputs, *pull(g)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


# -- the right numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_and_gradients_are_those_of_float64(name: str, adapter, rng) -> None:
    """To 40 roundings of the largest number, about what the sums over D, F and K can have."""
    variant = VARIANTS[name]
    arrays = parameters(rng, variant, "float32")
    x, g = normal(rng, (9, D)), normal(rng, (9, D))

    def f(x, *ps):
        params = make_params(dict(zip(arrays, ps, strict=True)))
        out = adapter.functions.moe(
            x, params, CONFIG, experts=variant.experts, recompute=variant.recompute
        )
        return (out.output,)

    outputs, pull = adapter.vjp(f, x, *arrays.values())
    got = [*outputs, *pull(g)]

    leaves = {n: torch.tensor(a, dtype=torch.float64).requires_grad_() for n, a in arrays.items()}
    x64 = torch.tensor(x, dtype=torch.float64).requires_grad_()
    scores = torch.sigmoid(x64 @ leaves["router"] + leaves["router_bias"])
    top = scores.topk(K).indices
    chosen = scores.gather(1, top)
    weights = CONFIG.scale * chosen / chosen.sum(1, keepdim=True)
    y = plain_block(variant.experts, x64, top.numpy(), weights, leaves)
    grads = torch.autograd.grad(y, [x64, *leaves.values()], torch.tensor(g, dtype=torch.float64))
    for label, a, b in zip(("y", "x", *arrays), got, [y, *grads], strict=True):
        want = b.detach().numpy()
        assert np.abs(a - want).max() <= 40 * U * np.abs(want).max(), label


# -- routing of the caller's own -------------------------------------------------------------------

IDS = np.array([[3, 1], [0, 0], [5, -1], [-1, -1], [2, 5], [1, 3], [9, 4]], np.int32)  # 9: none


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["swiglu", "weights on the input, plain", "clamped, shared"])
def test_given_routing(name: str, masked: bool, adapter, rng) -> None:
    variant = VARIANTS[name]
    arrays = {k: v for k, v in parameters(rng, variant, "float32").items() if k[:6] != "router"}
    x, g, weights = normal(rng, (7, D)), normal(rng, (7, D)), normal(rng, (7, K))
    weights[3] = np.nan  # of unused slots
    mask = np.arange(7) != 5 if masked else None
    if masked:
        x[5] = np.nan
        g[5] = 1.0

    def f(x, w, *ps):
        params = make_params(dict(zip(arrays, ps, strict=True)))
        out = adapter.functions.moe_from_routing(
            x,
            adapter.array(IDS),
            w,
            params,
            experts=variant.experts,
            recompute=variant.recompute,
            token_mask=None if mask is None else adapter.array(mask),
        )
        counts = adapter.numpy(out.expert_counts) if not masked else None
        if counts is not None:
            np.testing.assert_array_equal(counts, [2, 2, 1, 2, 1, 2])
        return (out.output,)

    outputs, pull = adapter.vjp(f, x, weights, *arrays.values())
    got = [*outputs, *pull(g)]

    live = np.ones(7, bool) if mask is None else mask
    ids = np.where((IDS < E) & live[:, None], IDS, -1)
    leaves = {n: torch.tensor(a, dtype=torch.float64).requires_grad_() for n, a in arrays.items()}
    x64 = torch.tensor(x, dtype=torch.float64).requires_grad_()
    w64 = torch.tensor(weights, dtype=torch.float64).requires_grad_()
    y = plain_block(variant.experts, x64[live], ids[live], w64[live], leaves)
    g64 = torch.tensor(g[live], dtype=torch.float64)
    grads = torch.autograd.grad(y, [x64, w64, *leaves.values()], g64)
    want_y = np.zeros((7, D))
    want_y[live] = y.detach().numpy()
    for label, a, b in zip(("y", "x", "weights", *arrays), got, [want_y, *grads], strict=True):
        want = b if isinstance(b, np.ndarray) else b.numpy()
        assert np.abs(a - want).max() <= 40 * U * np.abs(want).max(), label


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_of_any_float_dtype(dtype: str, adapter, rng) -> None:
    arrays = parameters(rng, Variant(), "float32")
    weights = normal(rng, (7, K), dtype)

    def f(w):
        params = make_params({k: adapter.array(v) for k, v in arrays.items()})
        x = adapter.array(normal(np.random.default_rng(1), (7, D)))
        return (adapter.functions.moe_from_routing(x, adapter.array(IDS), w, params).output,)

    (out,), pull = adapter.vjp(f, weights)
    (same,), _ = adapter.vjp(f, weights.astype("f4"))
    np.testing.assert_array_equal(bits(out), bits(same))
    (grad,) = pull(np.ones_like(out))
    assert grad.dtype == weights.dtype and np.abs(grad.astype("f4")).max() > 0


def test_the_block_is_its_routing_and_the_experts(adapter, rng) -> None:
    """moe, and moe_from_routing with the routing of moe, in 3 axes and with every integer type."""
    arrays = {k: adapter.array(v) for k, v in parameters(rng, Variant(), "float32").items()}
    x = adapter.array(normal(rng, (2, 5, D)))
    functions = adapter.functions
    out = functions.moe(x, make_params(arrays), CONFIG, capacity=4)
    ids = adapter.numpy(out.routing.indices)
    weights = out.routing.weights.reshape((2, 5, K))
    for dtype in ("int8", "uint8", "int16", "int32", "int64"):
        given = adapter.array(ids.astype(dtype).reshape(2, 5, K))
        again = functions.moe_from_routing(x, given, weights, make_params(arrays), capacity=4)
        assert adapter.numpy(again.output).shape == (2, 5, D)
        np.testing.assert_array_equal(adapter.numpy(again.output), adapter.numpy(out.output))
        for name in ("expert_counts", "kept_counts"):
            np.testing.assert_array_equal(
                adapter.numpy(getattr(again, name)), adapter.numpy(getattr(out, name))
            )
        assert again.load_balancing_loss is None and again.aux_loss is None
        assert again.logits is None and again.routing.score_sums is None


@pytest.mark.parametrize("how", ["moe", "moe_from_routing"])
def test_output_cannot_be_unpacked(how: str, adapter, rng) -> None:
    arrays = {k: adapter.array(v) for k, v in parameters(rng, Variant(), "float32").items()}
    x = adapter.array(normal(rng, (7, D)))
    if how == "moe":
        out = adapter.functions.moe(x, make_params(arrays), CONFIG)
    else:
        weights = adapter.array(normal(rng, (7, K)))
        out = adapter.functions.moe_from_routing(
            x, adapter.array(IDS), weights, make_params(arrays)
        )
    with pytest.raises(TypeError, match="read its fields: output, routing, expert_counts, kept"):
        _y, _routing = out


@pytest.mark.parametrize("coefficients", list(itertools.product((0.0, 0.25), (0.0, 0.5))))
def test_scaled_and_unscaled_losses(coefficients, adapter, rng) -> None:
    balance, z = coefficients
    arrays = parameters(rng, Variant(), "float32")
    x = normal(rng, (13, D))

    def f(router):
        params = make_params({k: adapter.array(v) for k, v in arrays.items()} | {"router": router})
        out = adapter.functions.moe(
            adapter.array(x), params, CONFIG, load_balancing_coeff=balance, z_loss_coeff=z
        )
        return out.load_balancing_loss, out.z_loss, out.aux_loss

    outputs, pull = adapter.vjp(f, arrays["router"])
    lb, z_loss, aux = (float(o) for o in outputs)
    assert outputs[2].shape == () and outputs[2].dtype == np.float32
    assert abs(aux - (balance * lb + z * z_loss)) <= 2 * U * aux
    if not any(coefficients):
        return
    parts = [pull(*(np.float32(c) for c in v))[0] for v in ((balance, z, 0), (0, 0, 1))]
    np.testing.assert_allclose(*parts, rtol=0, atol=8 * U * np.abs(parts[0]).max())


def given_block(adapter, variant: Variant, arrays: dict[str, np.ndarray]):
    """A smooth function: the block with a fixed routing, of x, weights and parameters."""

    def f(x, w, *ps):
        params = make_params(dict(zip(arrays, ps, strict=True)))
        out = adapter.functions.moe_from_routing(
            x, adapter.array(IDS), w, params, experts=variant.experts, recompute=variant.recompute
        )
        return out.output

    return f


@pytest.mark.parametrize("name", ["geglu, biases", "weights on the input", "swiglu"])
def test_the_frameworks_own_gradient_checks(name: str, jax_adapter, torch_adapter, rng) -> None:
    """Their differences are of float32, so the steps and tolerances are coarse."""
    variant = VARIANTS[name]
    arrays = {k: v for k, v in parameters(rng, variant, "float32").items() if k[:6] != "router"}
    primals = [normal(rng, (7, D)) * np.float32(0.5), normal(rng, (7, K)), *arrays.values()]
    with jax.default_matmul_precision("highest"):
        test_util.check_grads(
            given_block(jax_adapter, variant, arrays),
            [jax_adapter.array(p) for p in primals],
            order=1,
            modes=["rev"],
            eps=2e-3,
            atol=1e-2,
            rtol=2e-2,
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input #")  # that it is not float64
        assert torch.autograd.gradcheck(
            given_block(torch_adapter, variant, arrays),
            [torch_adapter.array(p).requires_grad_() for p in primals],
            eps=1e-2,
            atol=4e-3,
            rtol=2e-2,
            nondet_tol=0.0,
            fast_mode=True,
        )


# -- replay ----------------------------------------------------------------------------------------


def test_replay_mask_routes_the_others_natively(adapter, rng) -> None:
    config = RouterConfig(E, K, normalize=False)
    logits = normal(rng, (40, E))
    given = rng.integers(-1, E, (40, K)).astype("i4")
    replay, live = rng.random(40) < 0.5, rng.random(40) < 0.8
    f, a = adapter.functions, adapter.array
    native = f.route(a(logits), config, token_mask=a(live))
    replayed = f.route(a(logits), config, indices=a(given), token_mask=a(live))
    mixed = f.route(
        a(logits), config, indices=a(given), replay_mask=a(replay), token_mask=a(live), compare=True
    )
    for name in ("indices", "weights"):
        want = np.where(
            replay[:, None],
            adapter.numpy(getattr(replayed, name)),
            adapter.numpy(getattr(native, name)),
        )
        np.testing.assert_array_equal(adapter.numpy(getattr(mixed, name)), want)
    ids, alone = adapter.numpy(mixed.indices), adapter.numpy(native.indices)
    differ = [sorted(i[i >= 0]) != sorted(j[j >= 0]) for i, j in zip(ids, alone, strict=True)]
    assert int(mixed.mismatched_tokens) == sum(differ) > 0
    assert native.mismatched_tokens is None and replayed.mismatched_tokens is None


def test_replaying_the_own_routing_changes_no_bit(adapter, rng) -> None:
    arrays = parameters(rng, Variant(), "float32")
    x, g = normal(rng, (17, D)), normal(rng, (17, D))

    def call(options, x, *ps):
        params = make_params(dict(zip(arrays, ps, strict=True)))
        return adapter.functions.moe(x, params, CONFIG, **options)

    ids = adapter.numpy(call({}, *map(adapter.array, (x, *arrays.values()))).routing.indices)
    replays = (
        {},
        {"indices": adapter.array(ids)},
        {"indices": adapter.array(ids), "compare": True},
    )
    results = []
    for options in replays:
        outputs, pull = adapter.vjp(
            lambda *a, options=options: (call(options, *a).output,), x, *arrays.values()
        )
        results.append([*outputs, *pull(g)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


# -- shapes that invite mistakes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "width", "hidden"),
    [
        (8, 4, 2, 16, 8),  # 2 F = D
        (6, 6, 2, 6, 6),  # T = E = D = F
        (4, 4, 4, 4, 4),  # K = E
        (16, 4, 1, 4, 2),
        (1, 16, 8, 4, 4),
        (0, 4, 2, 4, 4),
        (5, 1, 1, 1, 1),
    ],
)
def test_square_and_tiny_shapes(tokens, experts, top_k, width, hidden, adapter, rng) -> None:
    config = RouterConfig(experts, top_k)
    shapes = {
        "router": (width, experts),
        "w_gate": (experts, width, hidden),
        "w_up": (experts, width, hidden),
        "w_down": (experts, hidden, width),
    }
    arrays = {n: normal(rng, s) for n, s in shapes.items()}
    x, g = normal(rng, (tokens, width)), normal(rng, (tokens, width))

    def f(x, *ps):
        out = adapter.functions.moe(x, make_params(dict(zip(arrays, ps, strict=True))), config)
        return out.output, out.load_balancing_loss

    outputs, pull = adapter.vjp(f, x, *arrays.values())
    got = [outputs[0], *pull(g, np.float32(0))]
    assert np.isfinite(outputs[1]) and all(np.isfinite(a).all() for a in got)
    leaves = {n: torch.tensor(a, dtype=torch.float64).requires_grad_() for n, a in arrays.items()}
    x64 = torch.tensor(x, dtype=torch.float64).requires_grad_()
    if tokens:
        chosen = torch.softmax(x64 @ leaves["router"], 1).topk(top_k)
        weights = chosen.values / chosen.values.sum(1, keepdim=True)
        y = plain_block(ExpertConfig(), x64, chosen.indices.numpy(), weights, leaves)
        grads = torch.autograd.grad(
            y, [x64, *leaves.values()], torch.tensor(g, dtype=torch.float64), allow_unused=True
        )
        for a, b in zip(got, [y, *grads], strict=True):
            want = b.detach().numpy()
            assert np.abs(a - want).max() <= 64 * U * max(1e-3, np.abs(want).max())
    else:
        assert got[0].shape == (0, width) and got[1].shape == (0, width)
        assert not any(a.any() for a in got)
