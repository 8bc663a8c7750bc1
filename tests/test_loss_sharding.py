# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The router and its losses over tokens that are sharded in JAX, against float64 and against the
unsharded call.

Ids, weights, counts and gradients have the bits of the unsharded call: none depends on an order of
summation. score_sums and logsumexp_sq are sums over the shards; they, and the losses, are held to
the float64 results within the roundings of one call plus one for each addition of a shard.
"""

from __future__ import annotations

import contextlib
import functools
import re

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy
from duomoe import RouterConfig, Routing
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_samples import DEVICES, mesh
from router_checks import Exact, decided, same_bits

import jax_frontend as jf

pytestmark = [pytest.mark.jax, pytest.mark.multidevice]

CONFIG = RouterConfig(8, 2, score="sigmoid")
GROUPED = RouterConfig(
    8, 2, score="sqrtsoftplus", num_groups=4, group_top_k=2, counts="unbiased", scale=2.5
)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def everything(z, config, options, balance=1.0, squares=1.0):
    """Routing, both losses and the gradient of their sum, as one function of the logits."""

    def total(z):
        routing = jf.route(z, config, **options)
        values = jf.load_balancing_loss(routing, config), jf.z_loss(routing)
        return balance * values[0] + squares * values[1], (values, routing)

    (_, (values, routing)), grad = jax.value_and_grad(total, has_aux=True)(z)
    return values, grad, routing


@functools.cache
def program(config, num_sequences, names):
    """Jitted once for all layouts."""

    def f(z, *arrays):
        options = dict(zip(names, arrays, strict=True))
        return everything(z, config, {**options, "num_sequences": num_sequences})

    return jax.jit(f)


def check(got, want, exact: Exact) -> None:
    """Sharded results against unsharded ones (same bits) and against float64 (bounds)."""
    values, grad, routing = got
    for name in ("indices", "weights", "expert_counts", "sequence_counts", "num_tokens"):
        same_bits(*(np.asarray(getattr(r, name)) for r in (routing, want[2])), name)
    exact.check(Routing(**{n: np.asarray(v) for n, v in vars(routing).items() if v is not None}))
    assert all(v.shape == () for v in values)
    exact.check_losses(values, np.asarray(grad))
    same_bits(np.asarray(grad), np.asarray(want[1]))


def place(x, grid, spec):
    """`x` on a mesh, really cut along its tokens."""
    placed = jax.device_put(x, NamedSharding(grid, spec))
    pieces = {str(s.index) for s in placed.addressable_shards}
    assert len(pieces) > 1 and placed.addressable_shards[0].data.shape[0] < x.shape[0]
    return placed


def batch(rng, options: str):
    """48 tokens: logits, config, arrays that go with them and the number of sequences."""
    config = GROUPED if "groups" in options else CONFIG
    bias = (rng.integers(-8, 8, 8) / 16).astype("f4") if "groups" in options else None
    z, arrays, num_sequences = decided(rng, 48, config, bias), {}, 1
    if bias is not None:
        arrays["bias"] = bias
    if "mask" in options:
        # The second quarter is padding only, so that a shard has no live token.
        mask = rng.random(48) < 0.7
        mask[12:24] = False
        z[~mask] = np.nan
        arrays["token_mask"] = mask
    if "given" in options:
        arrays["indices"] = rng.integers(-1, 8, (48, 2)).astype("i4")
    if "sequences" in options:
        num_sequences = int(options.split("sequences ")[1])
    return z, config, arrays, num_sequences


LAYOUTS = {
    "one axis": ((DEVICES,), ("d",), (AUTO,), P("d")),
    "two axes": ((2, 2), ("a", "b"), (AUTO, AUTO), P(("a", "b"))),
    "two axes in turned order": ((2, 2), ("a", "b"), (AUTO, AUTO), P(("b", "a"))),
    "second of two axes": ((2, 2), ("a", "b"), (AUTO, AUTO), P("b")),
    "tokens and experts": ((2, 2), ("a", "b"), (AUTO, AUTO), P("b", "a")),
    "explicit axis": ((DEVICES,), ("d",), (EXPLICIT,), P("d")),
    "explicit axes": ((2, 2), ("a", "b"), (EXPLICIT, EXPLICIT), P(("a", "b"))),
    "explicit axes in turned order": ((2, 2), ("a", "b"), (EXPLICIT, EXPLICIT), P(("b", "a"))),
    "explicit and auto": ((2, 2), ("a", "b"), (EXPLICIT, AUTO), P("a")),
}
SOME = ("plain", "mask", "groups, sequences 3", "mask, sequences 8", "given, sequences 2")
CASES = [
    (layout, SOME[(2 * i + j) % len(SOME)]) for i, layout in enumerate(LAYOUTS) for j in range(2)
]


@pytest.mark.parametrize("layout, options", CASES)
def test_sharded_tokens(layout: str, options: str, rng) -> None:
    """Under jit, on Auto and Explicit meshes. Of 3 sequences one crosses the border between two of
    4 shards; with "mask" one shard of four has no live token."""
    shape, names, kinds, spec = LAYOUTS[layout]
    z, config, arrays, num_sequences = batch(rng, options)
    f = program(config, num_sequences, tuple(arrays))
    want = f(z, *arrays.values())
    grid = mesh(shape, names, kinds)
    by_token = {n: v for n, v in arrays.items() if n != "bias"}
    placed = {n: place(v, grid, P(spec[0])) for n, v in by_token.items()}
    with jax.set_mesh(grid) if EXPLICIT in kinds else contextlib.nullcontext():
        got = f(place(z, grid, spec), *{**arrays, **placed}.values())
    assert got[1].sharding.spec[0] == spec[0] or EXPLICIT not in kinds
    exact = Exact(z, config, roundings=DEVICES, num_sequences=num_sequences, **arrays)
    check(got, want, exact)


# -- one order of summation is as good as another --------------------------------------------------


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("kinds", [(AUTO, AUTO), (EXPLICIT, EXPLICIT)], ids=["auto", "explicit"])
def test_exact_sums_give_the_bits_of_float64(kinds, num_sequences: int, rng) -> None:
    """Rows of 0 and -inf whose shares are powers of two: every sum is exact, so sharded, unsharded
    and float64 loss are one number."""
    config = RouterConfig(8, 1)
    live = [np.r_[rng.permutation(8)[: 2 ** (t % 3)]] for t in range(48)]
    z = np.full((48, 8), -np.inf, "f4")
    for row, experts in zip(z, live, strict=True):
        row[experts] = 0
    exact = Exact(z, config, num_sequences=num_sequences)
    want = np.float32(exact.losses()["load_balancing_loss"][0])
    loss = lambda z: jf.load_balancing_loss(
        jf.route(z, config, num_sequences=num_sequences), config
    )
    f = jax.jit(jax.value_and_grad(loss))
    value, grad = f(z)
    same_bits(np.asarray(value), np.asarray(want))
    grid = mesh((2, 2), ("a", "b"), kinds)
    with jax.set_mesh(grid) if EXPLICIT in kinds else contextlib.nullcontext():
        sharded = f(place(z, grid, P(("a", "b"))))
    same_bits(np.asarray(sharded[0]), np.asarray(want))
    same_bits(np.asarray(sharded[1]), np.asarray(grad))
    np.testing.assert_array_equal(np.asarray(grad)[~np.isfinite(z)], 0)


# -- tokens that the mesh does not divide ----------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, spec", [(10, P(("a", "b"))), (6, P("a")), (7, P("b")), (1, P("a"))]
)
def test_uneven_tokens_under_jit_are_handled(tokens: int, spec: P, rng) -> None:
    """A constraint inside jit may cut tokens unevenly: padding of the shards enters no sum."""
    grid = mesh((2, 2), ("a", "b"))
    z = decided(rng, tokens, CONFIG)

    def f(z):
        z = jax.lax.with_sharding_constraint(z, NamedSharding(grid, spec))
        return everything(z, CONFIG, {})

    check(jax.jit(f)(z), everything(jnp.asarray(z), CONFIG, {}), Exact(z, CONFIG, roundings=4))


def test_uneven_tokens_are_refused_where_each_shard_is_a_call(rng) -> None:
    """JAX says what does not divide, before any kernel runs."""
    grid = mesh((DEVICES,), ("d",))
    z = decided(rng, 10, CONFIG)
    local = lambda z: jf.load_balancing_loss(jf.route(z, CONFIG), CONFIG, axis_name="d")
    with pytest.raises(ValueError, match="evenly divisible"):
        jax.jit(jax.shard_map(local, mesh=grid, in_specs=P("d"), out_specs=P()))(z)
    with pytest.raises(ValueError, match=r"evenly divid"):
        jax.device_put(z, NamedSharding(grid, P("d")))


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_no_tokens_at_all(num_sequences: int) -> None:
    """Empty shards: losses 0 and an empty gradient; the next call works."""
    grid = mesh((DEVICES,), ("d",))
    f = program(CONFIG, num_sequences, ())
    empty = jax.device_put(np.zeros((0, 8), "f4"), NamedSharding(grid, P("d")))
    values, grad, routing = f(empty)
    assert [float(v) for v in values] == [0, 0] and grad.shape == (0, 8)
    assert not np.asarray(routing.num_tokens).any()
    assert float(f(np.zeros((4, 8), "f4"))[0][0]) == 1  # equal scores


# -- shard_map -------------------------------------------------------------------------------------


def mapped(grid, spec, config, over, num_sequences=1, check_vma=True):
    """The losses inside shard_map, summed over the mesh axes `over`, as a function of the whole
    logits and mask."""

    def local(z, mask):
        routing = jf.route(z, config, token_mask=mask, num_sequences=num_sequences)
        return (
            jf.load_balancing_loss(routing, config, axis_name=over),
            jf.z_loss(routing, axis_name=over),
        )

    losses = jax.shard_map(
        local, mesh=grid, in_specs=(spec, spec), out_specs=(P(), P()), check_vma=check_vma
    )

    def total(z, mask):
        values = losses(z, mask)
        return values[0] + values[1], values

    return jax.jit(jax.value_and_grad(total, has_aux=True))


# (mesh shape, how the tokens lie on it, the axes that the losses sum over)
REDUCTIONS = {
    "one axis": ((4, 1), P("a"), "a"),
    "two axes": ((2, 2), P(("a", "b")), ("a", "b")),
    "two axes in turned order": ((2, 2), P(("b", "a")), ("a", "b")),
    "tokens repeated over an axis": ((2, 2), P("a"), "a"),
    "tokens repeated over an axis of the sum": ((2, 2), P("b"), ("a", "b")),
}


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses_over_mesh_axes(reduction: str, check_vma: bool, rng) -> None:
    """Value and gradient of the whole batch, however often an axis repeats the tokens: no factor
    of its size. One shard has no live token."""
    shape, spec, over = REDUCTIONS[reduction]
    z = decided(rng, 32, CONFIG)
    mask = rng.random(32) < 0.8
    mask[8:16] = False
    grid = mesh(shape, ("a", "b"))
    f = mapped(grid, spec, CONFIG, over, check_vma=check_vma)
    (_, values), grad = f(z, mask)
    assert all(v.shape == () for v in values)
    # Counts stay below 2^24: sums of repeated tokens are multiples of them.
    Exact(z, CONFIG, roundings=4, token_mask=mask).check_losses(values, np.asarray(grad))


def test_shards_hold_parts_of_every_sequence(rng) -> None:
    """Context parallelism: a shard's s-th sequence is its part of the batch's s-th sequence."""
    config, shards, sequences, length = CONFIG, 4, 3, 8
    z = decided(rng, sequences * length, config)
    mask = rng.random(len(z)) < 0.8
    # From [sequence, shard, token] to [shard, sequence, token], as a shard sees it.
    turn = np.arange(len(z)).reshape(sequences, shards, -1).swapaxes(0, 1).reshape(-1)
    f = mapped(mesh((4,), ("a",)), P("a"), config, "a", num_sequences=sequences)
    (_, values), grad = f(z[turn], mask[turn])
    exact = Exact(z, config, roundings=4, token_mask=mask, num_sequences=sequences)
    exact.check_losses(values, np.asarray(grad)[np.argsort(turn)])


def test_the_loss_of_one_shard_is_its_own_without_a_mesh_axis(rng) -> None:
    """axis_name=None inside shard_map: nothing is summed."""
    z = decided(rng, 16, CONFIG)
    local = lambda z: jf.load_balancing_loss(jf.route(z, CONFIG), CONFIG)[None]
    grid = mesh((DEVICES,), ("d",))
    got = jax.jit(jax.shard_map(local, mesh=grid, in_specs=P("d"), out_specs=P("d")))(z)
    want = [jf.load_balancing_loss(jf.route(p, CONFIG), CONFIG) for p in np.split(z, DEVICES)]
    np.testing.assert_array_equal(got, want)


# -- micro-batches and rank ------------------------------------------------------------------------


@pytest.mark.parametrize("kind, numbers", [(AUTO, (1, 2, 4)), (EXPLICIT, (2,))])
def test_accumulation_over_sharded_micro_batches(kind: AxisType, numbers, rng) -> None:
    """A scan over 1 x 8, 2 x 4 and 4 x 2 sequences, each micro-batch sharded on its tokens: the
    gradient of the whole batch, in its bits."""
    config = RouterConfig(8, 2, score="sigmoid")
    z = decided(rng, 8 * 4, config)

    def loss(z, sequences):
        routing = jf.route(z, config, num_sequences=sequences)
        return jf.load_balancing_loss(routing, config) + jf.z_loss(routing)

    want = np.asarray(jax.grad(functools.partial(loss, sequences=8))(z))
    grid = mesh((2,), ("d",), kind)
    for micro_batches in numbers:

        def total(parts, n=micro_batches):
            add = lambda carry, part: (carry + loss(part, 8 // n) / n, None)
            return jax.lax.scan(add, jnp.float32(0), parts)[0]

        with jax.set_mesh(grid) if kind == EXPLICIT else contextlib.nullcontext():
            parts = jax.device_put(
                z.reshape(micro_batches, -1, 8), NamedSharding(grid, P(None, "d"))
            )
            assert parts.addressable_shards[0].data.shape[1] == 16 // micro_batches
            got = np.asarray(jax.jit(jax.grad(total))(parts))
        same_bits(got.reshape(z.shape), want)


def rank(axes: str) -> int:
    return len(axes.split(", ")) if axes else 0


def rule_ranks(text: str) -> list[tuple[list[int], list[int]]]:
    """For every custom call of a lowered program, the ranks that its Shardy rule gives to operands
    and results, then those that they have."""
    calls = re.findall(r"op_sharding_rule<(.*?) \{.*?> *\} : (.*)$", text, re.MULTILINE)
    return [
        (
            [rank(axes) for axes in re.findall(r"\[(.*?)\]", rule)],
            [shape.count("x") for shape in re.findall(r"tensor<(.*?)>", types)],
        )
        for rule, types in calls
    ]


def test_losses_and_their_cotangents_have_rank_0_under_shardy(rng) -> None:
    """In the lowered program, in the sharding rules as in the operands, forward and backward."""
    assert jax.config.jax_use_shardy_partitioner
    whole = decided(rng, 16, CONFIG)
    z = place(whole, mesh((2, 2), ("a", "b")), P(("a", "b")))

    def both(z):
        routing = jf.route(z, CONFIG, num_sequences=2)
        return jf.load_balancing_loss(routing, CONFIG), jf.z_loss(routing)

    @jax.jit
    def value_and_pull(z, cotangents):
        values, pull = jax.vjp(both, z)
        return values, pull(cotangents)[0]

    upstream = (jnp.float32(2), jnp.float32(-1))
    calls = rule_ranks(value_and_pull.lower(z, upstream).as_text())
    # route and its backward; two losses, the rank-0 result last; two backward ops, the rank-0
    # cotangent before the result.
    assert len(calls) == 6 and all(rule == actual for rule, actual in calls)
    assert sorted(r for r, _ in calls if 0 in r) == [
        [1, 0, 1],
        [1, 1, 0],
        [2, 1, 0, 2],
        [2, 2, 1, 0],
    ]
    values, grad = value_and_pull(z, upstream)
    assert all(v.shape == () for v in values)
    same_bits(np.asarray(grad), np.asarray(value_and_pull(whole, upstream)[1]))
    exact = Exact(whole, CONFIG, num_sequences=2, roundings=4)
    exact.check_losses(values)
    exact.check_gradient(np.asarray(grad), exact.loss_cotangents(2, -1))
    with pytest.raises((TypeError, ValueError), match="shape"):
        value_and_pull(z, (jnp.ones(1), jnp.ones(1)))
