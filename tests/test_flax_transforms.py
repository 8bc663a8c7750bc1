# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The Flax modules under transformations, on meshes, and with recorded routing."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
from samples import normal

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp
from duomoe import RoutingRecord
from flax import nnx
from flax_samples import (
    ALL,
    CONFIG,
    HIDDEN,
    RULES,
    WIDTH,
    LinenStack,
    NnxStack,
    drawn,
    equal,
    function_params,
    linen_moe,
    load,
    nnx_moe,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_samples import mesh

import jax_frontend as jf

pytestmark = [pytest.mark.jax]

LAYERS, TOKENS = 3, 12


def stacks(rng, **options):
    """A linen stack with drawn variables, an nnx one of the same values, and x."""
    x = normal(rng, (TOKENS, WIDTH))
    module = LinenStack(LAYERS, **options)
    variables = drawn(module, x, rng)
    model = NnxStack(LAYERS, **options, rngs=nnx.Rngs(0))
    fill(model, variables)
    return module, variables, model, x


def fill(model, variables) -> None:
    if model.scanned:
        merged = {c: tree["moe"] for c, tree in variables.items()}
        load(model.moe, merged)
        return
    for i, moe in enumerate(model.moe):
        load(moe, {c: tree[f"moe_{i}"] for c, tree in variables.items()})


def unstacked(variables) -> dict:
    """The variables of a scanned stack as those of a loop."""
    return {
        c: {f"moe_{i}": jax.tree.map(lambda a, i=i: a[i], tree["moe"]) for i in range(LAYERS)}
        for c, tree in variables.items()
    }


def want_of(variables, x):
    """The loop over the function: output and gradients by x, and the ids of each layer."""
    layers = [
        function_params({c: tree[f"moe_{i}"] for c, tree in variables.items()})
        for i in range(LAYERS)
    ]

    def f(x):
        ids = []
        for params in layers:
            out = jf.moe(x, params, CONFIG)
            x = x + out.output
            ids.append(out.routing.indices)
        return (x**2).sum(), ids

    (value, ids), grad = jax.jit(jax.value_and_grad(f, has_aux=True))(x)
    return value, grad, ids


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
@pytest.mark.parametrize("scanned", [False, True], ids=["loop", "scan"])
def test_layers(scanned: bool, remat: bool, rng) -> None:
    """A loop and a scan over layers, recomputed or not: outputs, gradients, recorded ids."""
    module, variables, model, x = stacks(rng, scanned=scanned, remat=remat)
    value, grad, ids = want_of(unstacked(variables) if scanned else variables, x)

    def linen(x):
        y, state = module.apply(variables, x, mutable=["routing"])
        return (y**2).sum(), state["routing"]

    (got, recorded), got_grad = jax.jit(jax.value_and_grad(linen, has_aux=True))(x)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    np.testing.assert_allclose(got_grad, grad, rtol=1e-5, atol=1e-5)
    prefix = "moe." if scanned else "moe_"
    layers = jf.linen.routing_layers(recorded)
    equal(layers, {f"{prefix}{i}": ids[i] for i in range(LAYERS)})

    @nnx.jit
    def step(model, x):
        def loss(model, x):
            y, recorded = nnx.capture(lambda m, x: m(x), jf.nnx.RoutingIds)(model, x)
            return (y**2).sum(), jf.nnx.routing_layers(recorded)

        return nnx.value_and_grad(loss, argnums=1, has_aux=True)(model, x)

    (got, layers), got_grad = step(model, x)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    np.testing.assert_allclose(got_grad, grad, rtol=1e-5, atol=1e-5)
    equal(layers, {f"moe.{i}": ids[i] for i in range(LAYERS)})


def test_recording_needs_to_be_asked_for(rng) -> None:
    module, variables, model, x = stacks(rng)
    assert isinstance(module.apply(variables, x), jax.Array)
    assert set(jax.eval_shape(module.init, jax.random.key(0), x)) == {"params", "router_state"}
    before = nnx.state(model)
    model(x)
    equal(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(before))


# -- replay ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scanned", [False, True], ids=["loop", "scan"])
def test_replay(scanned: bool, rng) -> None:
    """Recorded ids through other parameters, where these would choose otherwise."""
    module, variables, model, x = stacks(rng, scanned=scanned)
    _, _, ids = want_of(unstacked(variables) if scanned else variables, x)
    other = drawn(module, x, rng)
    fill(model, other)
    _, _, free = want_of(unstacked(other) if scanned else other, x)
    assert any(np.any(a != b) for a, b in zip(ids, free, strict=True))

    prefix = "moe." if scanned else "moe_"
    layers = {f"{prefix}{i}": np.asarray(a) for i, a in enumerate(ids)}
    replay = jf.linen.replay_collection(layers, other["params"])
    run = jax.jit(lambda v, x: module.apply(v, x, mutable=["routing"]))
    y, state = run({**other, "replay": replay}, x)
    equal(jf.linen.routing_layers(state["routing"]), {n: jnp.asarray(a) for n, a in layers.items()})
    # What was recorded can be handed back as it is.
    again, _ = run({**other, "replay": state["routing"]}, x)
    equal(again, y)

    traced = []

    @nnx.jit
    def captured(model, x):
        traced.append(x)
        return nnx.capture(lambda m, x: m(x), jf.nnx.RoutingIds)(model, x)

    layers = {f"moe.{i}": np.asarray(a) for i, a in enumerate(ids)}
    with jf.nnx.replay_routing(model, layers):
        got, recorded = captured(model, x)
    equal(jf.nnx.routing_layers(recorded), {n: jnp.asarray(a) for n, a in layers.items()})
    np.testing.assert_allclose(got, y, rtol=1e-6, atol=1e-6)
    with jf.nnx.replay_routing(model, {name: 7 - a for name, a in layers.items()}):
        _, recorded = captured(model, x)
    equal(list(jf.nnx.routing_layers(recorded).values()), [7 - a for a in ids])
    assert len(traced) == 1
    _, recorded = captured(model, x)
    equal(list(jf.nnx.routing_layers(recorded).values()), free)


@pytest.mark.parametrize("scanned", [False, True], ids=["loop", "scan"])
def test_replay_of_a_record_with_a_mask(scanned: bool, rng) -> None:
    """Some tokens of an engine's record, the others route for themselves; mismatches counted."""
    module, variables, model, x = stacks(rng, scanned=scanned)
    free = want_of(unstacked(variables) if scanned else variables, x)[2]
    ids, mask = rng.integers(0, 8, (TOKENS, LAYERS, 2)), rng.random(TOKENS) < 0.5
    ids[:, 2] = -1  # replays no expert
    record = RoutingRecord.from_array(ids, 8, mask=mask)
    assert record.layers == ("0", "1", "2")
    collection = jf.linen.replay_collection(record, variables["params"])
    _, state = module.apply(
        {**variables, "replay": collection}, x, mutable=["routing", "routing_mismatches"]
    )
    linen = jf.linen.routing_layers(state["routing"])
    both = (jf.nnx.RoutingIds, jf.nnx.RoutingMismatches)
    with jf.nnx.replay_routing(model, record):
        _, recorded, found = nnx.jit(nnx.capture(lambda m, x: m(x), *both))(model, x)
    for layers in (linen, jf.nnx.routing_layers(recorded)):
        for i, used in enumerate(layers.values()):
            np.testing.assert_array_equal(np.asarray(used)[mask], ids[mask, i])
            assert np.all(np.asarray(used)[~mask] >= 0)
    # The first layer has the input of the free run.
    differs = np.any(np.sort(ids[:, 0]) != np.sort(free[0]), axis=-1) & mask
    first = lambda tree: np.ravel(tree["moe" if scanned else "moe_0"]["tokens"][0])[0]
    assert first(state["routing_mismatches"]) == differs.sum() > 0
    found = nnx.to_pure_dict(found)["moe"]
    assert np.ravel((found if scanned else found[0])["tokens"][0])[0] == differs.sum()
    _, none = module.apply(variables, x, mutable=["routing_mismatches"])
    assert not none


def test_record_round_trip(rng, tmp_path) -> None:
    """From linen through a file to nnx, to layers of other names."""
    module, variables, model, x = stacks(rng, scanned=True)
    y, state = module.apply(variables, x, mutable=["routing"])
    record = RoutingRecord.from_layers(jf.linen.routing_layers(state["routing"]), 8)
    assert record.layers == ("moe.0", "moe.1", "moe.2")
    record.save(tmp_path / "routing.safetensors")
    record = RoutingRecord.load(tmp_path / "routing.safetensors")
    other = drawn(module, x, rng)
    collection = jf.linen.replay_collection(record, other["params"])
    _, again = module.apply({**other, "replay": collection}, x, mutable=["routing"])
    equal(again["routing"], state["routing"])
    layers = unstacked(variables)
    loop = LinenStack(LAYERS)
    names = {f"moe_{i}": f"moe.{i}" for i in range(LAYERS)}
    collection = jf.linen.replay_collection(record, layers["params"], layers=names)
    equal(collection, {n: {"indices": record.layer(m)} for n, m in names.items()})
    np.testing.assert_allclose(
        loop.apply({**layers, "replay": collection}, x), y, rtol=1e-6, atol=1e-6
    )
    fill(model, variables)
    with jf.nnx.replay_routing(model, record):
        np.testing.assert_allclose(model(x), y, rtol=1e-6, atol=1e-6)


def test_replay_of_one_block(rng) -> None:
    """Ids of [T, K] for x[B, S, D], gradients of the weights, arguments before the collection."""
    x = normal(rng, (3, 4, WIDTH))
    ids, mask = rng.integers(0, 8, (TOKENS, 2)), rng.random(TOKENS) < 0.5
    module = linen_moe(**ALL)
    variables = drawn(module, x, rng)
    model = nnx_moe(**ALL)
    load(model, variables)
    params = function_params(variables)
    given = {"indices": ids.reshape(3, 4, 2), "replay_mask": mask.reshape(3, 4)}
    want = jf.moe(x, params, CONFIG, **given, compare=True)
    assert int(want.routing.mismatched_tokens) > 0
    replay = jf.linen.replay_collection({"": ids}, variables["params"], mask=mask)
    replaying = {**variables, "replay": replay}
    equal(module.apply(replaying, x, compare=True), want)
    equal(module.apply(replaying, x, indices=given["indices"]).routing.indices, ids.astype("int32"))
    with jf.nnx.replay_routing(model, {"": ids}, mask=mask):
        equal(model(x, compare=True), want)
        with jf.nnx.replay_routing(model, {"": ids}):
            equal(model(x).routing.indices, jnp.asarray(ids, jnp.int32))
        equal(model(x, compare=True), want)
        grads = nnx.grad(lambda m: (m(x).output ** 2).sum())(model)
    by_ids = jax.grad(lambda p: (jf.moe(x, p, CONFIG, **given).output ** 2).sum())(params)
    equal(grads["router"]["weight"].get_value(), by_ids.router)
    assert np.any(by_ids.router)
    equal(model(x), jf.moe(x, params, CONFIG))

    router = jf.nnx.Router(WIDTH, CONFIG, rngs=nnx.Rngs(0))
    tokens = x.reshape(-1, WIDTH)
    with jf.nnx.replay_routing(router, {"": ids}):
        equal(router(tokens)[0].indices, jnp.asarray(ids, jnp.int32))


def test_replay_errors(rng) -> None:
    _, variables, model, x = stacks(rng, scanned=True)
    params = variables["params"]
    ids = np.zeros((TOKENS, 2), np.int32)

    def refused(record, message, kind=ValueError, **options):
        with pytest.raises(kind, match=message):
            jf.linen.replay_collection(record, params, **options)
        with pytest.raises(kind, match=message), jf.nnx.replay_routing(model, record, **options):
            pass

    full = {f"moe.{i}": ids for i in range(LAYERS)}
    refused({"mlp": ids}, "the record has no layer for 'moe.0' of the model; its layers are 'mlp'")
    refused({**full, "moe.1": ids * 1.5}, "layer 'moe.1' must be an integer array", TypeError)
    refused([ids], "record must be a RoutingRecord or a mapping of arrays by layer", TypeError)
    refused(
        full,
        "layers must name layers of the model, 'moe.0', .*, got 'mlp'",
        layers={**{name: name for name in full}, "mlp": "moe.0"},
    )
    refused(RoutingRecord.from_layers(full, 9), "module 'moe' has E = 8, the record 9")
    assert model.moe.replay_indices is None
    with pytest.raises(ValueError, match="there is no MoE or Router to replay a record"):
        jf.linen.replay_collection(full, params["moe"]["experts"])
    short = dict.fromkeys(full, ids[1:])
    with pytest.raises(ValueError, match="the record is of 11 tokens, x has 12; replay record"):
        collection = jf.linen.replay_collection(short, params)
        LinenStack(LAYERS, scanned=True).apply({**variables, "replay": collection}, x)
    with (
        pytest.raises(ValueError, match="the record is of 11 tokens, x has 12"),
        jf.nnx.replay_routing(model, short),
    ):
        model(x)
    assert model.moe.replay_indices is None

    @nnx.capture(jf.nnx.RoutingIds)
    def twice(moe, x):
        return moe(moe(x).output)

    with pytest.raises(ValueError, match="layer '' ran 2 times, and a record holds one run"):
        jf.nnx.routing_layers(twice(nnx_moe(), x)[1])
    with pytest.raises(ValueError, match="layer '' was recorded 2 times, it replays one"):
        linen_moe().apply({**variables, "replay": {"indices": (ids, ids)}}, x)
    assert list(jf.linen.routing_layers({f"m_{i}": {"indices": (ids,)} for i in (10, 2)})) == [
        "m_2",
        "m_10",
    ]


# -- transformations -------------------------------------------------------------------------------


def test_vmap(rng) -> None:
    """Over data with shared parameters, and over stacked parameters."""
    x = normal(rng, (LAYERS, TOKENS, WIDTH))
    _, variables, model, _ = stacks(rng, scanned=True)
    inner = {c: tree["moe"] for c, tree in variables.items()}
    layers = [jax.tree.map(lambda a, i=i: a[i], inner) for i in range(LAYERS)]
    moe = linen_moe(expert_bias=True)
    apply = lambda v, x: moe.apply(v, x).output
    over_layers = np.stack([apply(layers[i], x[i]) for i in range(LAYERS)])
    over_data = np.stack([apply(layers[0], x[i]) for i in range(LAYERS)])

    lifted = nn.vmap(
        jf.linen.MoE,
        in_axes=0,
        variable_axes={"params": 0, "router_state": 0, "routing": 0},
        split_rngs={"params": True},
        metadata_params={nn.PARTITION_NAME: "layers"},
    )(WIDTH, HIDDEN, CONFIG, expert_bias=True)
    out, state = lifted.apply(inner, x, mutable=["routing"])
    np.testing.assert_array_equal(out.output, over_layers)
    assert state["routing"]["indices"][0].shape == (LAYERS, TOKENS, 2)
    np.testing.assert_array_equal(jax.vmap(apply, (None, 0))(layers[0], x), over_data)

    stacked = nnx.vmap(lambda m, x: m(x).output)
    np.testing.assert_array_equal(stacked(model.moe, x), over_layers)
    one = nnx_moe(expert_bias=True)
    load(one, layers[0])
    np.testing.assert_array_equal(
        nnx.vmap(lambda m, x: m(x).output, in_axes=(None, 0))(one, x), over_data
    )

    # The bias of stacked layers, by the counts of each.
    counts = out.expert_counts
    nnx.vmap(lambda m, c: m.update_expert_bias(c, rate=0.5))(model.moe, counts)
    bias = inner["router_state"]["router"]["expert_bias"]
    want = [jf.update_expert_bias(bias[i], counts[i], rate=0.5) for i in range(LAYERS)]
    np.testing.assert_array_equal(model.moe.router.expert_bias.get_value(), want)
    update = jax.vmap(lambda b, c: jf.update_expert_bias(b, c, rate=0.5))
    np.testing.assert_array_equal(update(bias, counts), want)


def test_copies_of_an_nnx_module(rng) -> None:
    x = normal(rng, (TOKENS, WIDTH))
    model = nnx_moe(**ALL)
    load(model, drawn(linen_moe(**ALL), x, rng))
    want = model(x)
    graph, params, bias = nnx.split(model, nnx.Param, jf.nnx.ExpertBias)
    equal(nnx.merge(graph, params, bias)(x), want)
    pure = jax.jit(lambda params, bias, x: nnx.merge(graph, params, bias)(x))
    equal(pure(params, bias, x), want)
    before = model.router.expert_bias.get_value()
    for other in (copy.deepcopy(model), nnx.clone(model)):
        other.update_expert_bias(want.expert_counts, rate=10.0)
        assert np.any(other.router.expert_bias.get_value() != before)
        assert np.any(other(x).expert_counts != want.expert_counts)
    equal(model(x), want)


def test_remat_of_the_module_itself(rng) -> None:
    x = normal(rng, (TOKENS, WIDTH))
    module = linen_moe(**ALL)
    variables = drawn(module, x, rng)
    again = nn.remat(jf.linen.MoE)(WIDTH, HIDDEN, CONFIG, **ALL)
    mask = rng.random(TOKENS) < 0.7

    def f(module, x):
        return (module.apply(variables, x, token_mask=mask).output ** 2).sum()

    equal(jax.grad(lambda x: f(again, x))(x), jax.grad(lambda x: f(module, x))(x))


# -- meshes ----------------------------------------------------------------------------------------


def close(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1, np.abs(b).max()))


@pytest.mark.multidevice
def test_linen_on_a_mesh(rng) -> None:
    """Parameters and tokens really sharded, by logical names: as on one device."""
    grid = mesh((2, 2), ("a", "b"))
    x = normal(rng, (32, WIDTH))
    module = linen_moe(**ALL, load_balancing_coeff=0.1)
    abstract = jax.eval_shape(module.init, jax.random.key(0), x)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), grid, RULES)
    variables = drawn(module, x, rng)

    def loss(params, x):
        out = module.apply({**variables, "params": params}, x)
        return (out.output**2).sum() + out.aux_loss, out

    step = jax.value_and_grad(loss, has_aux=True)
    want = jax.jit(step)(variables["params"], x)
    placed = jax.device_put(variables["params"], shardings["params"])
    w_up = placed["experts"]["w_up"]
    assert w_up.sharding.spec == P("a", None, "b")
    assert w_up.addressable_shards[0].data.shape == (4, WIDTH, HIDDEN // 2)
    tokens = NamedSharding(grid, P("a"))
    got = jax.jit(step, out_shardings=(None, shardings["params"]))(
        placed, jax.device_put(x, tokens)
    )
    close(got, want)
    equal(got[0][1].expert_counts, want[0][1].expert_counts)
    assert got[1]["experts"]["w_up"].sharding.spec == P("a", None, "b")

    # Boxed parameters constrain themselves where a mesh and rules are set.
    boxed = nn.meta.replace_boxed(abstract, variables)
    with jax.set_mesh(grid), nn.logical_axis_rules(RULES):
        lowered = jax.jit(lambda v, x: module.apply(v, x).output).lower(boxed, x)
    assert re.findall(r"sharding_constraint .*\"a\".*\"b\".*tensor<8x16x12xf32>", lowered.as_text())
    close(lowered.compile()(boxed, x), want[0][1].output)


@pytest.mark.multidevice
def test_nnx_on_a_mesh(rng) -> None:
    grid = mesh((2, 2), ("a", "b"))
    x = normal(rng, (32, WIDTH))
    options = {**ALL, "load_balancing_coeff": 0.1}
    variables = drawn(linen_moe(**options), x, rng)
    model = nnx_moe(**options)
    load(model, variables)

    def loss(model, x):
        out = model(x)
        return (out.output**2).sum() + out.aux_loss, out

    step = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
    want = step(model, x)
    with nnx.logical_axis_rules(RULES):
        shardings = nnx.get_named_sharding(nnx.state(model), grid)
        nnx.update(model, jax.device_put(nnx.state(model), shardings))
        with jax.set_mesh(grid):
            made = nnx_moe(**options)
    for sharded in (model, made):
        assert sharded.experts.w_up.get_value().sharding.spec == P("a", None, "b")
        assert sharded.router.weight.get_value().sharding.spec == P(None, "a")
    got = step(model, jax.device_put(x, NamedSharding(grid, P("a"))))
    close(got, want)
    equal(got[0][1].expert_counts, want[0][1].expert_counts)


@pytest.mark.multidevice
def test_nnx_on_an_explicit_mesh(rng) -> None:
    grid = mesh((2, 2), ("a", "b"), AxisType.Explicit)
    x = normal(rng, (32, WIDTH))
    variables = drawn(linen_moe(**ALL), x, rng)
    model = nnx_moe(**ALL)
    load(model, variables)
    want = model(x)
    with jax.set_mesh(grid), nnx.logical_axis_rules(RULES):
        shardings = nnx.get_named_sharding(nnx.state(model), grid)
        nnx.update(model, jax.device_put(nnx.state(model), shardings))
        out = nnx.jit(lambda m, x: m(x))(model, jax.device_put(x, NamedSharding(grid, P("a"))))
        made = nnx_moe(**ALL)
    assert jax.typeof(made.experts.w_up.get_value()).sharding.spec == P("a", None, "b")
    close(out.output, want.output)
    equal(out.expert_counts, want.expert_counts)


@pytest.mark.multidevice
def test_shard_map(rng) -> None:
    """axis_name sums the losses' statistics and the counts of the update."""
    grid = mesh((4,), ("dp",))
    x = normal(rng, (32, WIDTH))
    module = linen_moe(expert_bias=True, load_balancing_coeff=0.5, z_loss_coeff=0.5)
    variables = drawn(module, x, rng)
    update = {"rate": 0.5, "method": "update_expert_bias", "mutable": ["router_state"]}
    want = module.apply(variables, x)
    _, bias = module.apply(variables, want.expert_counts, **update)

    def local(x):
        out = module.apply(variables, x, axis_name="dp")
        _, bias = module.apply(variables, out.expert_counts, axis_name="dp", **update)
        return out.output, out.aux_loss, bias

    mapped = jax.shard_map(local, mesh=grid, in_specs=P("dp"), out_specs=(P("dp"), P(), P()))
    y, aux, got = jax.jit(mapped)(x)
    np.testing.assert_array_equal(y, want.output)
    np.testing.assert_allclose(aux, want.aux_loss, rtol=1e-6)
    equal(got, bias)
