# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The block under JAX's transformations: sharded tokens and weights, shard_map, explicit meshes,
vmap, scan, remat, for a routing of its own and for one that the caller gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from samples import normal

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from duomoe import ExpertConfig, MoEParams, RouterConfig
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_samples import DEVICES, mesh

import jax_frontend as jf

pytestmark = pytest.mark.jax

E, K, D, F = 8, 2, 16, 12
CONFIG = RouterConfig(E, K, score="sigmoid")
SHAPES = {
    "router": (D, E),
    "w_gate": (E, D, F),
    "w_up": (E, D, F),
    "w_down": (E, F, D),
    "b_up": (E, F),
    "b_down": (E, D),
    "shared_w_gate": (D, 20),
    "shared_w_up": (D, 20),
    "shared_w_down": (20, D),
    "shared_router": (D, 1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "shared": {},
    "recomputed": {"recompute": True},
    "weights on the input": {"experts": ExpertConfig("gelu", weight_on="input")},
    "capacity": {"capacity": 9, "drop_order": "weight"},
}


def parameters(rng: np.random.Generator) -> dict[str, jax.Array]:
    return {n: jnp.asarray(normal(rng, s)) * (s[-2] ** -0.5) for n, s in SHAPES.items()}


def routed_loss(x, p, g, axis_name=None, **options):
    out = jf.moe(
        x,
        MoEParams(**p),
        CONFIG,
        load_balancing_coeff=0.3,
        z_loss_coeff=0.1,
        axis_name=axis_name,
        **options,
    )
    y = (out.output * g).sum()
    return (y if axis_name is None else jax.lax.psum(y, axis_name)) + out.aux_loss


def given_loss(x, p, g, ids, weights, axis_name=None, **options):
    out = jf.moe_from_routing(x, ids, weights, MoEParams(**p), **options)
    y = (out.output * g).sum()
    return y if axis_name is None else jax.lax.psum(y, axis_name)


def case(kind: str, tokens: int, rng) -> tuple[Callable[..., Any], list[Any], list[Any]]:
    """The loss, its differentiated arguments and the rest; all with tokens first but the second."""
    x, g = (jnp.asarray(normal(rng, (tokens, D))) for _ in range(2))
    if kind == "given":
        ids = jnp.asarray(rng.integers(-1, E + 1, (tokens, K)), jnp.int32)
        weights = jnp.asarray(normal(rng, (tokens, K)))
        return given_loss, [x, parameters(rng)], [g, ids, weights]
    return routed_loss, [x, parameters(rng)], [g]


def close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.multidevice
@pytest.mark.parametrize("mode", ["jit", "explicit", "shard_map", "shard_map without vma"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["routed", "given"])
def test_sharded_tokens(kind: str, options: str, mode: str, rng) -> None:
    if mode.startswith("shard_map") and options == "capacity":
        pytest.skip("capacity is per shard there")
    loss, inputs, rest = case(kind, 48, rng)
    chosen = OPTIONS[options]
    argnums = (0, 1, 4) if kind == "given" else (0, 1)
    want = jax.grad(loss, argnums)(*inputs, *rest, **chosen)
    explicit = mode == "explicit"
    grid = mesh((DEVICES,), ("dp",), AxisType.Explicit if explicit else AxisType.Auto)
    if mode.startswith("shard_map"):

        def local(x, p, *rest):
            return loss(x, p, *rest, axis_name="dp", **chosen)

        f = jax.shard_map(
            local,
            mesh=grid,
            in_specs=(P("dp"), P(), *[P("dp")] * len(rest)),
            out_specs=P(),
            check_vma="without" not in mode,
        )
        got = jax.jit(jax.grad(f, argnums))(*inputs, *rest)
    else:
        with jax.set_mesh(grid) if explicit else contextlib.nullcontext():
            put = lambda a: jax.device_put(a, NamedSharding(grid, P("dp")))
            f = jax.jit(jax.grad(lambda *a: loss(*a, **chosen), argnums))
            got = f(put(inputs[0]), inputs[1], *map(put, rest))
    close(got, want)


@pytest.mark.multidevice
def test_sharded_hidden_width(rng) -> None:
    """Tensor parallelism: F on the mesh, for every matrix and bias."""
    loss, inputs, rest = case("routed", 24, rng)
    want = jax.grad(loss, (0, 1))(*inputs, *rest)
    grid = mesh((DEVICES,), ("tp",))
    specs = {
        "w_gate": P(None, None, "tp"),
        "w_up": P(None, None, "tp"),
        "b_up": P(None, "tp"),
        "w_down": P(None, "tp"),
        "shared_w_gate": P(None, "tp"),
        "shared_w_up": P(None, "tp"),
        "shared_w_down": P("tp"),
    }
    p = {n: jax.device_put(a, NamedSharding(grid, specs.get(n, P()))) for n, a in inputs[1].items()}
    close(jax.jit(jax.grad(loss, (0, 1)))(inputs[0], p, *rest), want)


@pytest.mark.multidevice
def test_mismatches_of_sharded_tokens_add_up(rng) -> None:
    z = jnp.asarray(normal(rng, (48, E)))
    ids = jnp.asarray(rng.integers(-1, E, (48, K)), jnp.int32)
    mask = jnp.asarray(rng.random(48) < 0.7)

    def counts(z, ids, mask):
        routing = jf.route(z, CONFIG, indices=ids, replay_mask=mask, compare=True)
        return routing.mismatched_tokens, routing.mismatched_slots, routing.indices

    want = counts(z, ids, mask)
    assert 0 < int(want[0]) < int(want[1])
    grid = mesh((DEVICES,), ("dp",))
    arrays = [jax.device_put(a, NamedSharding(grid, P("dp"))) for a in (z, ids, mask)]
    got = jax.jit(counts)(*arrays)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["routed", "given"])
def test_vmap_scan_and_remat(kind: str, recompute: bool, rng) -> None:
    loss, (_, p), _ = case(kind, 5, rng)
    cases = [case(kind, 5, rng) for _ in range(3)]
    x = jnp.stack([c[1][0] for c in cases])
    rest = [jnp.stack(parts) for parts in zip(*(c[2] for c in cases), strict=True)]
    grad = jax.grad(lambda x, p, *r: loss(x, p, *r, recompute=recompute), (0, 1))
    each = [grad(x[i], p, *(r[i] for r in rest)) for i in range(3)]
    want = jax.tree.map(lambda *a: jnp.stack(a), *each)
    mapped = jax.vmap(grad, in_axes=(0, None, *[0] * len(rest)))
    _, scanned = jax.lax.scan(lambda c, a: (c, grad(a[0], p, *a[1:])), 0, (x, *rest))
    remat = jax.grad(jax.checkpoint(lambda x, p, *r: loss(x, p, *r, recompute=recompute)), (0, 1))
    for got in (mapped(x, p, *rest), jax.jit(mapped)(x, p, *rest), scanned):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    got = jax.jit(remat)(x[0], p, *(r[0] for r in rest))
    jax.tree.map(np.testing.assert_array_equal, got, each[0])


def test_integer_routing_needs_no_care_under_grad(rng) -> None:
    """Ids in the middle of the arguments, without nondiff_argnums or stop_gradient; a closed-over
    table of a hash routing; float0 for whoever asks for the gradient of ids.
    """
    x, p = jnp.asarray(normal(rng, (6, D))), parameters(rng)
    table = jnp.asarray(rng.integers(0, E, (10, K)), jnp.int32)
    tokens = jnp.asarray(rng.integers(0, 10, 6))

    def f(x, ids, weights, p):
        out = jf.moe_from_routing(x, ids, weights, MoEParams(**p))
        return (out.output**2).sum(), out.expert_counts

    weights = jnp.asarray(normal(rng, (6, K)))
    g, counts = jax.jit(jax.grad(f, (0, 2, 3), has_aux=True))(x, table[tokens], weights, p)
    assert counts.dtype == jnp.int32 and int(counts.sum()) == 12
    assert all(np.abs(a).max() > 0 for a in (g[0], g[1], g[2]["w_up"], g[2]["shared_w_down"]))
    assert not g[2]["router"].any()
    _, pull, _ = jax.vjp(lambda ids: f(x, ids, weights, p), table[tokens], has_aux=True)
    assert pull(jnp.float32(1))[0].dtype == jax.dtypes.float0

    def hashed(p):
        out = jf.moe(x, MoEParams(**p), CONFIG, indices=table[tokens])
        return (out.output**2).sum()

    router = jax.jit(jax.grad(hashed))(p)["router"]
    assert np.abs(router).max() > 0


def test_recomputation_keeps_no_rows_in_expert_order(rng) -> None:
    from jax._src.ad_checkpoint import saved_residuals

    x, p, tokens = jnp.asarray(normal(rng, (11, D))), parameters(rng), 11
    sizes = {}
    for recompute in (False, True):
        kept = saved_residuals(
            lambda x, p, r=recompute: jf.moe(x, MoEParams(**p), CONFIG, recompute=r).output.sum(),
            x,
            p,
        )
        shapes = [aval.shape for aval, _ in kept]
        sizes[recompute] = sum(s in ((tokens * K, D), (tokens * K, F)) for s in shapes)
    assert sizes[False] >= 4 and sizes[True] == 0


def test_unused_losses_are_removed(rng) -> None:
    """What is not asked for is not in the compiled program."""
    p = MoEParams(**parameters(rng))
    x = jnp.asarray(normal(rng, (6, D)))
    text = jax.jit(lambda x: jf.moe(x, p, CONFIG).output).lower(x).compile().as_text()
    assert "duomoe.route" in text
    assert "duomoe.z_loss" not in text and "duomoe.load_balancing_loss" not in text
