# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The Flax modules: their parameters, linen = nnx = function bit for bit, the selection bias."""

from __future__ import annotations

import numpy as np
import pytest
from samples import normal

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
optax = pytest.importorskip("optax")
import flax
import jax.numpy as jnp
from duomoe import ExpertConfig
from flax import nnx
from flax_samples import (
    ALL,
    CONFIG,
    HIDDEN,
    WIDTH,
    drawn,
    equal,
    function_params,
    linen_moe,
    load,
    nnx_moe,
)

import jax_frontend as jf

pytestmark = [pytest.mark.jax]

TREE = {
    "router": {"weight": (16, 8), "bias": (8,)},
    "experts": {
        "w_gate": (8, 16, 12),
        "w_up": (8, 16, 12),
        "w_down": (8, 12, 16),
        "b_gate": (8, 12),
        "b_up": (8, 12),
        "b_down": (8, 16),
    },
    "shared": {"w_gate": (16, 6), "w_up": (16, 6), "w_down": (6, 16), "router": (16, 1)},
}
AXES = {
    "router": {"weight": ("embed", "expert"), "bias": ("expert",)},
    "experts": {
        "w_gate": ("expert", "embed", "mlp"),
        "w_up": ("expert", "embed", "mlp"),
        "w_down": ("expert", "mlp", "embed"),
        "b_gate": ("expert", "mlp"),
        "b_up": ("expert", "mlp"),
        "b_down": ("expert", "embed"),
    },
    "shared": {
        "w_gate": ("embed", "mlp"),
        "w_up": ("embed", "mlp"),
        "w_down": ("mlp", "embed"),
        "router": ("embed", None),
    },
}


def small_tree(gated: bool) -> dict:
    names = ("w_gate", "w_up", "w_down") if gated else ("w_up", "w_down")
    experts = {name: TREE["experts"][name] for name in names}
    return {"router": {"weight": (16, 8)}, "experts": experts}


@pytest.mark.parametrize(
    ("options", "tree"),
    [(ALL, TREE), ({}, small_tree(True)), ({"gated": False}, small_tree(False))],
    ids=["all", "none", "not gated"],
)
def test_tree_of_parameters(options: dict, tree: dict, rng) -> None:
    """Also from an abstract initialisation."""
    boxed = jax.eval_shape(linen_moe(**options).init, jax.random.key(0), jnp.ones((4, WIDTH)))
    variables = nn.unbox(boxed)
    assert jax.tree.map(lambda a: a.shape, variables["params"]) == tree
    bias = {"router": {"expert_bias": (8,)}}
    state = variables.get("router_state", {})
    assert jax.tree.map(lambda a: a.shape, state) == (bias if "expert_bias" in options else {})

    model = nnx.eval_shape(lambda: nnx_moe(**options))
    shapes = lambda kind: jax.tree.map(lambda a: a.shape, nnx.to_pure_dict(nnx.state(model, kind)))
    assert shapes(nnx.Param) == tree
    assert shapes(jf.nnx.ExpertBias) == (bias if "expert_bias" in options else {})
    assert shapes(nnx.Not(nnx.Any(nnx.Param, jf.nnx.ExpertBias))) == {}


def test_logical_axes() -> None:
    boxed = jax.eval_shape(linen_moe(**ALL).init, jax.random.key(0), jnp.ones((4, WIDTH)))
    names = jax.tree.map(
        lambda box: box.names, boxed["params"], is_leaf=lambda a: hasattr(a, "names")
    )
    assert names == AXES
    model = nnx_moe(**ALL)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert variable.get_metadata("out_sharding") == AXES[path[0]][path[1]]


def test_initial_values() -> None:
    """Variance 1 / fan-in, whatever the number of experts; each expert draws its own matrix."""
    linen = jf.linen.Experts(64, 64, 32, bias=True, gated=False)
    ids, weights = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1))
    init = jax.jit(linen.init)(jax.random.key(1), jnp.ones((2, 64)), ids, weights)
    model = nnx.jit(lambda: jf.nnx.Experts(64, 64, 32, bias=True, gated=False, rngs=nnx.Rngs(1)))()
    for arrays in (nn.unbox(init["params"]), nnx.to_pure_dict(nnx.state(model))):
        for name, array in arrays.items():
            square = float(jnp.mean(array**2))
            np.testing.assert_allclose(square * 64, 0 if name.startswith("b") else 1, rtol=0.05)
        first, second = arrays["w_up"][:2]
        assert not np.any(first == second) and not np.any(first == arrays["w_down"][0])


def test_kernel_init_makes_one_matrix() -> None:
    seen = []

    def init(key, shape, dtype):
        seen.append((shape, dtype))
        return jnp.full(shape, 2, dtype)

    options = {**ALL, "kernel_init": init, "param_dtype": jnp.bfloat16}
    variables = linen_moe(**options).init(jax.random.key(0), jnp.ones((4, WIDTH), jnp.bfloat16))
    matrices = [(16, 8), (16, 12), (16, 12), (12, 16), (16, 6), (16, 6), (6, 16), (16, 1)]
    assert sorted(shape for shape, _ in seen) == sorted(matrices)
    assert {dtype for _, dtype in seen} == {jnp.bfloat16}
    params = nn.unbox(variables["params"])
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert np.all(params["experts"]["w_down"] == 2)
    bias = variables["router_state"]["router"]["expert_bias"]
    assert bias.dtype == jnp.float32 and not bias.any()
    seen.clear()
    model = nnx_moe(**options)
    assert sorted(shape for shape, _ in seen) == sorted(matrices)
    bias = model.router.expert_bias.get_value()
    assert bias.dtype == jnp.float32 and not bias.any()


# Options of the module, and what they are for the function on 15 tokens.
CASES = {
    "plain": ({}, {}),
    "all": (ALL, {}),
    "not gated": (
        {"gated": False, "experts": ExpertConfig(activation="relu_squared")},
        {"experts": ExpertConfig(activation="relu_squared")},
    ),
    "capacity": (
        {"capacity_factor": 1.1, "drop_order": "weight", "alignment": 2},
        {"capacity": 5, "drop_order": "weight", "alignment": 2},
    ),
    "losses": (
        {"load_balancing_coeff": 0.5, "z_loss_coeff": 0.25, "recompute": True},
        {"load_balancing_coeff": 0.5, "z_loss_coeff": 0.25, "recompute": True},
    ),
    "clamped": (
        {**ALL, "experts": ExpertConfig(alpha=1.7, limit=0.5, up_offset=1.0), "max_rows": 20},
        {"experts": ExpertConfig(alpha=1.7, limit=0.5, up_offset=1.0), "max_rows": 20},
    ),
    "bfloat16 gate": ({"gate_dtype": "bfloat16"}, {"gate_dtype": "bfloat16"}),
}


@pytest.mark.parametrize("case", CASES)
def test_modules_are_the_function(case: str, rng) -> None:
    """Every output and gradient has the same bits, in linen, nnx and the function."""
    options, arguments = CASES[case]
    x, grad_y = normal(rng, (3, 5, WIDTH)), normal(rng, (3, 5, WIDTH))
    given = {"token_mask": rng.random((3, 5)) < 0.8, "num_sequences": 3}
    module = linen_moe(**options)
    variables = drawn(module, x, rng)
    params = function_params(variables)
    model = nnx_moe(**options)
    load(model, variables)

    def loss(out):
        return (out.output * grad_y).sum() + out.aux_loss, out

    def linen(params, x):
        return loss(module.apply({**variables, "params": params}, x, **given))

    def function(params, x):
        return loss(jf.moe(x, params, CONFIG, **arguments, **given))

    differentiate = lambda f, *a: jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(*a)
    (_, want), (want_params, want_x) = differentiate(function, params, x)
    (_, out), (grad_params, grad_x) = differentiate(linen, variables["params"], x)
    equal(out, want)
    equal(grad_x, want_x)
    state = {} if params.expert_bias is None else {"router": {"expert_bias": jnp.zeros(8)}}
    got = function_params({"params": grad_params, "router_state": state})
    equal(got, want_params)  # that of the selection bias is 0

    step = nnx.jit(nnx.value_and_grad(lambda m, x: loss(m(x, **given)), has_aux=True))
    (_, out), grads = step(model, x)
    equal(out, want)
    equal(nnx.to_pure_dict(grads), grad_params)
    if case == "capacity":
        assert int(want.kept_counts.sum()) < int(want.expert_counts.sum())


def test_dtype(rng) -> None:
    """The experts round to dtype, the gate does not; None keeps what is given."""
    x = normal(rng, (10, WIDTH))
    module = linen_moe(**ALL, dtype=jnp.bfloat16)
    variables = drawn(module, x, rng)
    model = nnx_moe(**ALL, dtype=jnp.bfloat16)
    load(model, variables)
    params = function_params(variables)
    kept = ("router", "router_bias", "expert_bias", "shared_router")
    rounded = type(params)(
        **{n: a if n in kept else a.astype(jnp.bfloat16) for n, a in vars(params).items()}
    )
    want = jf.moe(jnp.asarray(x, jnp.bfloat16), rounded, CONFIG)
    assert want.output.dtype == jnp.bfloat16
    equal(module.apply(variables, x), want)
    equal(model(x), want)
    half = jnp.asarray(x, jnp.bfloat16)
    out = linen_moe(**ALL).apply(variables, half)
    equal(out, jf.moe(half, params, CONFIG))
    assert out.output.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="dtype must be one of 'float32', 'bfloat16', 'float16'"):
        linen_moe(dtype=jnp.int8).apply(variables, x)
    with pytest.raises(TypeError, match="x must be float32, bfloat16 or float16, got int32"):
        model(np.ones((3, WIDTH), np.int32))


def test_router_and_experts_alone(rng) -> None:
    """One after the other they are the block."""
    x = normal(rng, (10, WIDTH))
    module = linen_moe(router_bias=True, expert_bias=True, bias=True)
    variables = drawn(module, x, rng)
    want = module.apply(variables, x)
    router = jf.linen.Router(WIDTH, CONFIG, bias=True, expert_bias=True)
    experts = jf.linen.Experts(WIDTH, HIDDEN, 8, bias=True)
    part = lambda name: {c: tree[name] for c, tree in variables.items() if name in tree}
    routing, logits = router.apply(part("router"), x)
    out = experts.apply(part("experts"), x, routing.indices, routing.weights)
    equal((routing, logits, out.output), (want.routing, want.logits, want.output))

    model = nnx_moe(router_bias=True, expert_bias=True, bias=True)
    load(model, variables)
    routing, logits = model.router(x)
    out = model.experts(x, routing.indices, routing.weights, capacity=1)
    equal((routing, logits), (want.routing, want.logits))
    assert int(out.kept_counts.max()) == 1


@pytest.mark.torch
def test_torch_module_with_the_same_parameters(rng) -> None:
    """A torch state_dict carried over: the outputs have the same bits, and back it is the same."""
    torch = pytest.importorskip("torch")
    from duomoe import convert

    import torch_frontend as tf

    x, mask = normal(rng, (3, 5, WIDTH)), rng.random((3, 5)) < 0.8
    options = {**ALL, "capacity_factor": 1.25, "drop_order": "weight", "z_loss_coeff": 0.5}
    module = tf.MoE(WIDTH, HIDDEN, CONFIG, **options)
    with torch.no_grad():
        for array in module.state_dict().values():
            array.copy_(torch.from_numpy(normal(rng, tuple(array.shape))))
    want = module(torch.from_numpy(x), token_mask=torch.from_numpy(mask))
    model = nnx_moe(**options)
    state = nnx.state(model)
    arrays = convert.numpy_state_dict(module.state_dict())
    nnx.replace_by_pure_dict(state, convert.unflatten(arrays))
    nnx.update(model, state)
    variables = convert.jax_variables(module.state_dict())
    for out in (
        linen_moe(**options).apply(variables, x, token_mask=mask),
        model(x, token_mask=mask),
    ):
        for name in ("output", "logits", "aux_loss", "kept_counts"):
            got, wanted = getattr(out, name), getattr(want, name).detach().numpy()
            np.testing.assert_array_equal(np.asarray(got), wanted)
    for tensors in (
        convert.torch_state_dict(nnx.state(model)),
        convert.torch_state_dict(variables),
    ):
        module.load_state_dict(tensors)
        assert tensors.keys() == arrays.keys()


# -- selection bias --------------------------------------------------------------------------------


def test_update_expert_bias(rng) -> None:
    x = normal(rng, (10, WIDTH))
    module = linen_moe(expert_bias=True)
    variables = drawn(module, x, rng)
    model = nnx_moe(expert_bias=True)
    load(model, variables)
    counts = model(x).expert_counts
    old = variables["router_state"]["router"]["expert_bias"]
    want = jf.update_expert_bias(old, counts, rate=0.5, center=True)
    update = {"rate": 0.5, "center": True, "method": "update_expert_bias"}
    result, state = module.apply(variables, counts, mutable=["router_state"], **update)
    assert result is None and state.keys() == {"router_state"}
    equal(state["router_state"]["router"]["expert_bias"], want)
    with pytest.raises(flax.errors.ModifyScopeVariableError, match="router_state"):
        module.apply(variables, counts, **update)

    model.eval()
    with pytest.raises(RuntimeError, match="update_expert_bias is for training"):
        model.update_expert_bias(counts, rate=0.5)
    model.train()
    view = nnx.view(model, deterministic=True)
    with pytest.raises(RuntimeError, match="eval mode"):
        view.update_expert_bias(counts, rate=0.5)
    nnx.jit(lambda m, c: m.update_expert_bias(c, rate=0.5, center=True))(model, counts)
    equal(model.router.expert_bias.get_value(), want)

    with pytest.raises(RuntimeError, match="made with expert_bias=True"):
        nnx_moe().update_expert_bias(counts, rate=0.5)
    with pytest.raises(RuntimeError, match="made with expert_bias=True"):
        linen_moe().apply({"params": variables["params"]}, counts, **update)


def task(rng) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of which most would go to the same experts, and what to make of them."""
    x = normal(rng, (64, WIDTH)) + 1.5
    return x, np.tanh(x @ normal(rng, (WIDTH, WIDTH)) / 4)


def spread(counts) -> float:
    return float(counts.max() / counts.mean())


def test_linen_module_trains_and_its_load_evens_out(rng) -> None:
    x, y = task(rng)
    module = linen_moe(expert_bias=True, load_balancing_coeff=1e-3)
    variables = drawn(module, x, rng)
    optimizer = optax.adamw(3e-3)

    @jax.jit
    def step(variables, opt_state):
        def loss(params):
            out = module.apply({**variables, "params": params}, x)
            return ((out.output - y) ** 2).mean() + out.aux_loss, out.expert_counts

        (value, counts), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, opt_state = optimizer.update(grads, opt_state, variables["params"])
        params = optax.apply_updates(variables["params"], updates)
        _, state = module.apply(
            {**variables, "params": params},
            counts,
            rate=0.05,
            method="update_expert_bias",
            mutable=["router_state"],
        )
        return {"params": params, **state}, opt_state, value, counts

    opt_state = optimizer.init(variables["params"])
    history = []
    for _ in range(40):
        variables, opt_state, value, counts = step(variables, opt_state)
        history.append((float(value), spread(counts)))
    assert history[-1][0] < 0.5 * history[0][0]
    assert history[0][1] > 2 and history[-1][1] < 1.6


def test_nnx_module_trains_and_its_load_evens_out(rng) -> None:
    """The optimizer's weight decay would shrink a selection bias that it saw."""
    x, y = task(rng)
    module = linen_moe(expert_bias=True)
    model = nnx_moe(expert_bias=True, load_balancing_coeff=1e-3)
    load(model, drawn(module, x, rng))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3, weight_decay=0.1), wrt=nnx.Param)
    model.router.expert_bias.set_value(jnp.arange(8.0))

    def loss(model):
        out = model(x)
        return ((out.output - y) ** 2).mean() + out.aux_loss, out.expert_counts

    @nnx.jit
    def step(model, optimizer):
        (value, counts), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, grads)
        return value, counts

    step(model, optimizer)
    np.testing.assert_array_equal(model.router.expert_bias.get_value(), np.arange(8.0))
    model.router.expert_bias.set_value(jnp.zeros(8))

    update = nnx.jit(lambda model, counts: model.update_expert_bias(counts, rate=0.05))
    history = []
    for _ in range(40):
        value, counts = step(model, optimizer)
        update(model, counts)
        history.append((float(value), spread(counts)))
    assert history[-1][0] < 0.5 * history[0][0]
    assert history[0][1] > 2 and history[-1][1] < 1.6
