# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""One model in torch and in Flax: routing recorded in one framework replays in the other."""

from __future__ import annotations

import numpy as np
import pytest
from adapters import bits

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp
from duomoe import RouterConfig, RoutingRecord, convert

import torch_frontend as tf
from jax_frontend import linen

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
