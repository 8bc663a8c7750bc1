# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sharded against unsharded, with inputs that really are sharded: jit, shard_map, meshes."""

from __future__ import annotations

import contextlib
import functools
import re

import numpy as np
import pytest
from samples import CASE_LOGITS, block, block_parameters, normal

jax = pytest.importorskip("jax")
jnp = jax.numpy
from duomoe import MoEParams, RouterConfig
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_samples import CONFIG, DEVICES, mesh, statistics_loss

import jax_frontend as jf

pytestmark = [pytest.mark.jax, pytest.mark.multidevice]


def all_gathers(text: str) -> list[str]:
    return re.findall(r"^.*= .*all-gather(?:-start)?\(.*$", text, re.MULTILINE)


def all_reduce_shapes(text: str) -> list[str]:
    return re.findall(r"= \(?([^=]*?)\)? all-reduce(?:-start)?\(", text)


# -- sharded against unsharded ---------------------------------------------------------------------


def test_scalar_cotangent_stays_scalar_under_shardy() -> None:
    """L = 1.7615942 and dL/dlogits by the probabilities' gradient [1, 1, 0, 0], g =
    2."""
    config = RouterConfig(4, 2)
    tokens = NamedSharding(mesh((2, 2), ("a", "b")), P("a"))
    sums = jax.device_put(np.tile(jax.nn.softmax(CASE_LOGITS[0]), (4, 1)), tokens)

    def loss(p):
        routing = jf.Routing(
            indices=None,
            weights=None,
            expert_counts=None,
            sequence_counts=jnp.array([[4, 4, 0, 0]], jnp.int32),
            score_sums=p.sum(0, keepdims=True),
            logsumexp_sq=None,
            num_tokens=jnp.array([4], jnp.int32),
        )
        return jf.load_balancing_loss(routing, config)

    value, pull = jax.jit(lambda p: jax.vjp(loss, p))(sums)
    (grad,) = jax.jit(lambda g: pull(g))(jnp.float32(2))
    assert value.shape == ()
    np.testing.assert_allclose(value, 1.7615942, rtol=1e-6)
    np.testing.assert_array_equal(grad, np.tile([1, 1, 0, 0], (4, 1)))

    # The whole way from logits, sharded on tokens.
    z = jax.device_put(CASE_LOGITS, tokens)
    total = jax.jit(
        jax.value_and_grad(lambda z: jf.load_balancing_loss(jf.route(z, config), config))
    )
    value, grad = total(z)
    want_value, want_grad = total(CASE_LOGITS)
    np.testing.assert_allclose(value, 1.7615942, rtol=1e-6)
    assert value == want_value
    np.testing.assert_array_equal(grad, want_grad)


SPECS = {
    "tokens": ((DEVICES,), ("dp",), P("dp")),
    "tokens over two axes": ((2, 2), ("a", "b"), P(("a", "b"))),
    "tokens and experts": ((2, 2), ("a", "b"), P("b", "a")),
    "experts": ((2, 2), ("a", "b"), P(None, "b")),
}


@pytest.mark.parametrize("layout", SPECS)
@pytest.mark.parametrize("num_sequences", [1, 3, 4, 12, 48])
def test_sharded_route_and_losses_equal_unsharded(layout: str, num_sequences: int, rng) -> None:
    shape, names, spec = SPECS[layout]
    z = normal(rng, (48, 8))
    f = jax.jit(jax.value_and_grad(functools.partial(statistics_loss, num_sequences=num_sequences)))
    want_value, want_grad = f(z)
    sharded = jax.device_put(z, NamedSharding(mesh(shape, names), spec))
    assert len({s.data.shape for s in sharded.addressable_shards}) == 1
    assert sharded.addressable_shards[0].data.shape != z.shape
    value, grad = f(sharded)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad, rtol=2e-6, atol=1e-8)

    routing = jax.jit(functools.partial(jf.route, config=CONFIG, num_sequences=num_sequences))
    want, got = routing(z), routing(sharded)
    for name in ("indices", "weights", "expert_counts", "sequence_counts", "num_tokens"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    np.testing.assert_allclose(got.score_sums, want.score_sums, rtol=1e-6)
    np.testing.assert_allclose(got.logsumexp_sq, want.logsumexp_sq, rtol=1e-6)


def test_sharded_statistics_are_reduced_and_logits_are_not_gathered(rng) -> None:
    z = jax.device_put(normal(rng, (48, 8)), NamedSharding(mesh((DEVICES,), ("dp",)), P("dp")))
    for num_sequences in (1, 3):
        f = jax.jit(
            jax.value_and_grad(functools.partial(statistics_loss, num_sequences=num_sequences))
        )
        text = f.lower(z).compile().as_text()
        assert not all_gathers(text)
        assert any(f"f32[{num_sequences},8]" in s for s in all_reduce_shapes(text))
        assert not any("[48,8]" in s or "[12,8]" in s for s in all_reduce_shapes(text))


def test_expert_sharded_logits_are_gathered_not_routed_per_shard(rng) -> None:
    z = normal(rng, (16, 8))
    sharded = jax.device_put(z, NamedSharding(mesh((DEVICES,), ("ep",)), P(None, "ep")))
    routing = jax.jit(functools.partial(jf.route, config=CONFIG))(sharded)
    np.testing.assert_array_equal(routing.indices, jf.route(z, CONFIG).indices)
    assert routing.indices.shape == (16, 2)
    assert int(routing.expert_counts.sum()) == 32


def test_sharded_statistics_of_a_long_slice(rng) -> None:
    """Shards longer than any block of the kernels (2048 tokens each) still equal one device."""
    z = normal(rng, (8192, 8))
    sharded = jax.device_put(z, NamedSharding(mesh((DEVICES,), ("dp",)), P("dp")))
    route = jax.jit(functools.partial(jf.route, config=CONFIG))
    want, got = route(z), route(sharded)
    np.testing.assert_array_equal(got.indices, want.indices)
    np.testing.assert_array_equal(got.weights, want.weights)
    np.testing.assert_allclose(got.score_sums, want.score_sums, rtol=1e-6)
    np.testing.assert_array_equal(got.sequence_counts, want.sequence_counts)


def test_uneven_shards_are_not_summed_with_padding(rng) -> None:
    z = normal(rng, (10, 8))
    tokens = NamedSharding(mesh((DEVICES,), ("dp",)), P("dp"))

    @jax.jit
    def f(z):
        z = jax.lax.with_sharding_constraint(jnp.concatenate([z, z[:2]])[:10], tokens)
        return jax.value_and_grad(statistics_loss)(z)

    value, grad = f(z)
    want_value, want_grad = jax.value_and_grad(statistics_loss)(z)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize(
    "spec", [P("a"), P("b", "a"), P(("a", "b")), P(("b", "a")), P(None, "b"), P()], ids=str
)
def test_constraint_within_the_program_alone(spec: P, rng) -> None:
    """JAX names the mesh of set_mesh to no operand then; the shards are still routed as such."""
    z = normal(rng, (48, 8))
    constrain = lambda z: jax.lax.with_sharding_constraint(z, spec)
    f = lambda z: statistics_loss(constrain(z), num_sequences=3)
    want = jax.value_and_grad(functools.partial(statistics_loss, num_sequences=3))(z)
    with jax.set_mesh(mesh((2, 2), ("a", "b"))):
        lowered = jax.jit(jax.value_and_grad(f)).lower(z)
        compiled = lowered.compile()
    for got, wanted in zip(compiled(z), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-8)
    if spec and spec[0] is not None:
        assert not [line for line in all_gathers(compiled.as_text()) if "48,8" in line]


@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(("a", "b"))], ids=str)
def test_sharded_block_equals_unsharded(spec: P, rng) -> None:
    parameters = block_parameters(rng, 8, 16, 32)
    x = normal(rng, (48, 16))
    grad_y = normal(rng, (48, 16))

    def loss(x, *p):
        y, lb, z = block(jf, CONFIG)(x, *p)
        return (y * grad_y).sum() + lb + z, y

    f = jax.jit(jax.value_and_grad(loss, argnums=range(5), has_aux=True))
    (want_value, want_y), want_grads = f(x, *parameters)
    sharded = jax.device_put(x, NamedSharding(mesh((2, 2), ("a", "b")), spec))
    (value, y), grads = f(sharded, *parameters)
    np.testing.assert_allclose(value, want_value, rtol=1e-4)
    np.testing.assert_allclose(y, want_y, rtol=1e-5, atol=1e-6)
    for got, want in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_sharded_expert_weights(rng) -> None:
    """Expert matrices sharded on experts or on their width give the unsharded block."""
    x, parameters = normal(rng, (32, 16)), block_parameters(rng, 8, 16, 32)
    grids = mesh((2, 2), ("a", "b"))
    f = jax.jit(lambda x, *p: jax.vjp(block(jf, CONFIG), x, *p)[0][0])
    want = f(x, *parameters)
    for spec in (P("a"), P("a", None, "b"), P(None, "b")):
        sharded = [parameters[0]] + [
            jax.device_put(p, NamedSharding(grids, spec)) for p in parameters[1:]
        ]
        np.testing.assert_allclose(f(x, *sharded), want, rtol=1e-6, atol=1e-6)


# -- shard_map and explicit meshes -----------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma: bool, rng) -> None:
    z = normal(rng, (48, 8))
    grid = mesh((DEVICES,), ("dp",))

    def local(z):
        routing = jf.route(z, CONFIG)
        weighted = (routing.weights * jnp.arange(1.0, 3)).sum()
        return (
            2 * jf.load_balancing_loss(routing, CONFIG, axis_name="dp")
            + jf.z_loss(routing, axis_name="dp")
            + jax.lax.psum(weighted, "dp")
        )

    mapped = jax.shard_map(local, mesh=grid, in_specs=P("dp"), out_specs=P(), check_vma=check_vma)
    value, grad = jax.jit(jax.value_and_grad(mapped))(z)
    want_value, want_grad = jax.value_and_grad(statistics_loss)(z)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_adds_up_gradients_of_replicated_parameters(check_vma: bool, rng) -> None:
    parameters = block_parameters(rng, 8, 16, 32)
    x, grad_y = normal(rng, (48, 16)), normal(rng, (48, 16))
    grid = mesh((DEVICES,), ("dp",))

    def local(x, g, *p):
        out = jf.moe(x, MoEParams(*p), CONFIG, axis_name="dp")
        return jax.lax.psum((out.output * g).sum(), "dp") + out.load_balancing_loss + out.z_loss

    mapped = jax.shard_map(
        local,
        mesh=grid,
        in_specs=(P("dp"), P("dp"), *[P()] * 4),
        out_specs=P(),
        check_vma=check_vma,
    )

    def whole(x, g, *p):
        out = jf.moe(x, MoEParams(*p), CONFIG)
        return (out.output * g).sum() + out.load_balancing_loss + out.z_loss

    arguments = (0, 2, 3, 4, 5)
    got = jax.jit(jax.grad(mapped, arguments))(x, grad_y, *parameters)
    want = jax.grad(whole, arguments)(x, grad_y, *parameters)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("how", ["jit", "eager", "jit without set_mesh"])
def test_explicit_mesh(how: str, rng) -> None:
    z = normal(rng, (48, 8))
    grid = mesh((DEVICES,), ("dp",), AxisType.Explicit)
    f = jax.value_and_grad(statistics_loss)
    want_value, want_grad = f(z)
    with contextlib.nullcontext() if "without" in how else jax.set_mesh(grid):
        sharded = jax.device_put(z, NamedSharding(grid, P("dp")))
        value, grad = f(sharded) if how == "eager" else jax.jit(f)(sharded)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad, rtol=2e-6, atol=1e-8)
    assert grad.sharding.spec[0] == "dp"


def test_explicit_mesh_block(rng) -> None:
    parameters, x = block_parameters(rng, 8, 16, 32), normal(rng, (48, 16))

    def loss(x, *p):
        y, lb, z = block(jf, CONFIG)(x, *p)
        return (y**2).sum() + lb + z

    want = jax.grad(loss, range(5))(x, *parameters)
    grid = mesh((DEVICES,), ("dp",), AxisType.Explicit)
    with jax.set_mesh(grid):
        got = jax.jit(jax.grad(loss, range(5)))(
            jax.device_put(x, NamedSharding(grid, P("dp"))), *parameters
        )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("spec", [P(None, "b"), P("a", "b"), P("a")], ids=str)
def test_explicit_mesh_with_two_token_axes(spec: P, rng) -> None:
    """[B, S, D] sharded on either axis: merging them needs S whole."""
    parameters, x = block_parameters(rng, 8, 16, 32), normal(rng, (4, 6, 16))
    mask = rng.random((4, 6)) < 0.8

    def loss(x, mask, *p):
        out = jf.moe(x, MoEParams(*p), CONFIG, token_mask=mask)
        return (out.output**2).sum() + out.load_balancing_loss

    want = jax.grad(loss)(x, mask, *parameters)
    grid = mesh((2, 2), ("a", "b"), AxisType.Explicit)
    with jax.set_mesh(grid):
        arrays = [jax.device_put(a, NamedSharding(grid, spec)) for a in (x, mask)]
        got = jax.jit(jax.grad(loss))(*arrays, *parameters)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kinds", ["EE", "EA", "AE", "AA"])
def test_shard_map_over_one_axis_of_a_mesh(kinds: str, check_vma: bool, rng) -> None:
    """The other axis may be Auto or Explicit."""
    types = tuple({"E": AxisType.Explicit, "A": AxisType.Auto}[k] for k in kinds)
    grid = jax.make_mesh((2, 2), ("a", "b"), axis_types=types)
    z = normal(rng, (16, 8))

    def local(z):
        return jf.load_balancing_loss(jf.route(z, CONFIG), CONFIG, axis_name="a")

    with jax.set_mesh(grid):
        mapped = jax.shard_map(
            local, in_specs=P("a"), out_specs=P(), axis_names={"a"}, check_vma=check_vma
        )
        got = jax.jit(mapped)(z)
    want = jf.load_balancing_loss(jf.route(z, CONFIG), CONFIG)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_one_program_on_every_device_at_once(rng) -> None:
    """Handlers that wait for XLA's pool cannot block each other."""
    grid = mesh((DEVICES,), ("dp",))
    z = jax.device_put(normal(rng, (4096, 64)), NamedSharding(grid, P("dp")))
    config = RouterConfig(64, 4)
    f = jax.jit(lambda z: [jf.route(z + i, config).weights for i in range(8)])
    for _ in range(5):
        out = f(z)
    np.testing.assert_array_equal(out[0], jf.route(np.asarray(z), config).weights)
