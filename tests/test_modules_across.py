# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Modules of torch and Flax side by side: routing recorded in one framework replays in the other,
and the same arguments are refused in the same words.
"""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest
from adapters import bits

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp
from duomoe import RouterConfig, RoutingRecord, convert
from flax import nnx

import torch_frontend as tf
from jax_frontend import linen
from jax_frontend import nnx as nnx_modules

pytestmark = [pytest.mark.jax, pytest.mark.torch]

CONFIG = RouterConfig(8, 2, score="sigmoid")
LAYERS = ("first", "second")


class TorchModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in LAYERS:
            setattr(self, name, tf.MoE(16, 12, CONFIG, bias=True, expert_bias=True))

    def forward(self, x):
        for name in LAYERS:
            x = getattr(self, name)(x).output
        return x


class JaxModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in LAYERS:
            x = linen.MoE(16, 12, CONFIG, bias=True, expert_bias=True, name=name)(x).output
        return x


@pytest.fixture
def models():
    torch.manual_seed(0)
    model = TorchModel()
    with torch.no_grad():
        for layer in model.children():
            layer.router.expert_bias.normal_(std=0.1)
    return model, JaxModel(), convert.jax_variables(model.state_dict())


def torch_record(model, x) -> RoutingRecord:
    with tf.record_routing(model) as recording, torch.no_grad():
        model(torch.tensor(x))
    return recording.record()


def jax_record(model, variables, x) -> RoutingRecord:
    _, state = model.apply(variables, jnp.asarray(x), mutable=["routing"])
    return RoutingRecord.from_layers(linen.routing_layers(state["routing"]), 8)


def test_both_record_the_same(models, rng) -> None:
    torch_model, jax_model, variables = models
    x = rng.standard_normal((21, 16)).astype("f4")
    mine, other = torch_record(torch_model, x), jax_record(jax_model, variables, x)
    assert mine.layers == other.layers == LAYERS
    np.testing.assert_array_equal(mine.indices, other.indices)


@pytest.mark.parametrize("recorded_in", ["torch", "jax"])
def test_a_recorded_routing_replays_in_the_other(recorded_in: str, models, rng, tmp_path) -> None:
    """Through a file, with a mask, on other inputs: outputs and the gradients of x have the same
    bits in both, and the experts are those of the record.
    """
    torch_model, jax_model, variables = models
    before, x = (rng.standard_normal((21, 16)).astype("f4") for _ in range(2))
    if recorded_in == "torch":
        record = torch_record(torch_model, before)
    else:
        record = jax_record(jax_model, variables, before)
    mask = np.arange(21) % 4 != 2
    RoutingRecord(record.indices, record.layers, 8, mask).save(tmp_path / "routing.safetensors")
    record = RoutingRecord.load(tmp_path / "routing.safetensors")

    leaf = torch.tensor(x, requires_grad=True)
    with (
        tf.replay_routing(torch_model, record, compare=True) as replay,
        tf.record_routing(torch_model) as recording,
    ):
        y = torch_model(leaf)
        (gradient,) = torch.autograd.grad(y.sum(), leaf)
    replayed = recording.record().indices
    np.testing.assert_array_equal(replayed[mask], record.indices[mask])

    with_replay = {**variables, "replay": linen.replay_collection(record, variables["params"])}
    mutable = ["routing", "routing_mismatches"]
    out, state = jax_model.apply(with_replay, jnp.asarray(x), mutable=mutable)
    ids = linen.routing_layers(state["routing"])
    for i, name in enumerate(LAYERS):
        np.testing.assert_array_equal(ids[name], replayed[:, i])
        tokens = state["routing_mismatches"][name]["tokens"][0]
        assert replay.mismatched_tokens()[name] == int(tokens) > 0
    grad = jax.grad(lambda x: jax_model.apply(with_replay, x).sum())(jnp.asarray(x))
    np.testing.assert_array_equal(bits(np.asarray(out)), bits(y.detach().numpy()))
    np.testing.assert_array_equal(bits(np.asarray(grad)), bits(gradient.numpy()))


# -- the same options in all three -----------------------------------------------------------------

ZEROS = {"kernel_init": jax.nn.initializers.zeros}  # which compile nothing
MODULES = {
    "torch": tf.MoE,
    "linen": functools.partial(linen.MoE, **ZEROS),
    "nnx": lambda *args, **options: nnx_modules.MoE(*args, **options, **ZEROS, rngs=nnx.Rngs(0)),
}
# Of one framework: where parameters lie and what makes them.
OWN = {"device", "dtype", "param_dtype", "kernel_init", "rngs", "parent", "name", "self"}


@pytest.mark.parametrize("name", ["MoE", "Router", "Experts", "SharedExperts"])
def test_modules_have_the_same_arguments(name: str) -> None:
    found = []
    for module in (getattr(m, name) for m in (tf, linen, nnx_modules)):
        taken = inspect.signature(module.__init__).parameters.values()
        found.append([(p.name, p.default, p.kind) for p in taken if p.name not in OWN])
    assert found[0] == found[1] == found[2] and len(found[0]) >= 4


@pytest.mark.parametrize("framework", MODULES)
@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((0, 12, CONFIG), {}, ValueError, "width must be at least 1, got 0"),
        ((16, 1.5, CONFIG), {}, TypeError, "hidden must be an int, got 1.5"),
        ((16, 12, 8), {}, TypeError, "config must be a RouterConfig, got int"),
        ((16, 12, CONFIG), {"experts": CONFIG}, TypeError, "experts must be an ExpertConfig, got"),
        ((16, 12, CONFIG), {"shared_hidden": -1}, ValueError, "shared_hidden must be at least 0"),
        ((16, 12, CONFIG), {"shared_router": True}, ValueError, "needs shared experts, got shared"),
        ((16, 12, CONFIG), {"capacity_factor": 0}, ValueError, "factor must be above 0, got 0"),
    ],
)
def test_options_are_refused_in_the_same_words(framework, args, options, error, message) -> None:
    with pytest.raises(error, match=message):
        MODULES[framework](*args, **options)


def test_routers_refuse_other_configs() -> None:
    for module, options in ((tf, {}), (linen, {}), (nnx_modules, {"rngs": nnx.Rngs(0)})):
        with pytest.raises(TypeError, match="config must be a RouterConfig, got int"):
            module.Router(16, 8, **options)


@pytest.mark.parametrize("framework", MODULES)
def test_input_is_refused_in_the_same_words(framework: str) -> None:
    module = MODULES[framework](16, 12, CONFIG, capacity_factor=1.0)
    x = torch.tensor(1.0) if framework == "torch" else jnp.asarray(1.0)
    with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., D\], got \[\]"):
        module.init(jax.random.key(0), x) if framework == "linen" else module(x)


@pytest.mark.parametrize("framework", MODULES)
def test_what_a_call_gives_comes_before_the_record(framework: str, rng) -> None:
    """Its own mask instead of the record's, its own ids instead of both; either is counted."""
    x = rng.standard_normal((6, 16)).astype("f4")
    recorded, own = np.tile([[6, 7]], (6, 1)), np.tile([[7, 5]], (6, 1))
    record = RoutingRecord.from_layers({"": recorded}, 8, mask=np.ones(6, bool))
    mask = np.arange(6) < 3
    calls = {"mask": {"replay_mask": mask}, "ids": {"indices": own.astype("i4")}}
    module = MODULES[framework](16, 12, CONFIG)
    for name, given in calls.items():
        if framework == "torch":
            arguments = {k: torch.tensor(v) for k, v in given.items()}
            with tf.replay_routing(module, record, compare=True) as replay:
                ids = module(torch.tensor(x), **arguments).routing.indices
            native = module(torch.tensor(x)).routing.indices
            tokens = replay.mismatched_tokens()[""]
        elif framework == "linen":
            variables = nn.unbox(module.init(jax.random.key(0), x))
            replay = linen.replay_collection(record, variables["params"])
            out, state = module.apply(
                {**variables, "replay": replay}, x, **given, mutable=["routing_mismatches"]
            )
            ids, native = out.routing.indices, module.apply(variables, x).routing.indices
            (tokens,) = state["routing_mismatches"]["tokens"]
        else:
            with nnx_modules.replay_routing(module, record):
                run = nnx.capture(module, nnx_modules.RoutingMismatches)
                out, state = run(x, **given)
            ids, native = out.routing.indices, module(x).routing.indices
            (tokens,) = state["tokens"].get_value()
        native = np.asarray(native)
        want = own if name == "ids" else np.where(mask[:, None], recorded, native)
        np.testing.assert_array_equal(np.asarray(ids), want)
        differ = [set(a) != set(b) for a, b in zip(want.tolist(), native.tolist(), strict=True)]
        assert int(tokens) == sum(differ) > 0


def test_a_router_alone_is_recorded_and_replayed(rng) -> None:
    """In torch as in nnx; the router within a block is no layer of its own."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"moe": tf.MoE(16, 12, CONFIG), "alone": tf.Router(16, CONFIG)})
    x = torch.tensor(rng.standard_normal((9, 16)).astype("f4"))
    with tf.record_routing(model) as recording:
        model["moe"](x)
        model["alone"](x)
    record = recording.record()
    assert record.layers == ("moe", "alone")
    with torch.no_grad():
        model["alone"].weight.neg_()
    with tf.replay_routing(model, record, compare=True) as replay:
        model["moe"](x)
        routing, _ = model["alone"](x)
    np.testing.assert_array_equal(routing.indices, record.layer("alone"))
    assert replay.mismatched_tokens() == {"moe": 0, "alone": 9}

    other = nnx_modules.Router(16, CONFIG, rngs=nnx.Rngs(0))
    with nnx_modules.replay_routing(other, {"": record.layer("alone")}):
        ids = other(jnp.asarray(x.numpy()))[0].indices
    np.testing.assert_array_equal(ids, record.layer("alone"))
