# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""torch modules: names, state, dtypes, compilation, balancing, recording and replay."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from duomoe import ExpertConfig, MoEParams, RouterConfig
from duomoe.replay import RoutingRecord
from torch import nn

import torch_frontend as tf

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]

CONFIG = RouterConfig(8, 2, score="sigmoid")
FULL = dict(
    experts=ExpertConfig(alpha=1.5, limit=2.0, up_offset=1.0),
    router_bias=True,
    expert_bias=True,
    bias=True,
    shared_hidden=12,
    shared_router=True,
    capacity_factor=0.9,
    load_balancing_coeff=0.01,
    z_loss_coeff=0.001,
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make(**options) -> tf.MoE:
    module = tf.MoE(16, 24, CONFIG, **{**FULL, **options})
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1 or not parameter.abs().max():
                parameter.normal_(std=0.1)
        if module.router.expert_bias is not None:
            module.router.expert_bias.copy_(6.817 + 0.001 * torch.arange(8.0))
    return module


def layers(depth: int = 3, **options) -> nn.Module:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = tf.MoE(16, 8, CONFIG, **options)

        def forward(self, x):
            return x + self.moe(x).output

    return nn.Sequential(*(Layer() for _ in range(depth)))


def parameters_of(module: nn.Module) -> MoEParams:
    state = module.state_dict()
    names = {
        "router": "router.weight",
        "router_bias": "router.bias",
        "expert_bias": "router.expert_bias",
        **{n: f"experts.{n}" for n in ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")},
        **{f"shared_{n}": f"shared.{n}" for n in ("w_gate", "w_up", "w_down", "router")},
    }
    return MoEParams(**{k: state[n] for k, n in names.items()})


def test_module_is_the_function() -> None:
    module, x = make(), torch.randn(3, 7, 16)
    want = tf.moe(
        x,
        parameters_of(module),
        CONFIG,
        experts=FULL["experts"],
        capacity=5,  # ceil(21 * 2 / 8 * 0.9)
        load_balancing_coeff=0.01,
        z_loss_coeff=0.001,
    )
    got = module(x)
    assert int((got.expert_counts - got.kept_counts).sum()) > 0
    for name in ("output", "aux_loss", "load_balancing_loss", "kept_counts", "logits"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_state_dict_has_plain_names() -> None:
    shapes = {k: tuple(v.shape) for k, v in make().state_dict().items()}
    assert shapes == {
        "router.weight": (16, 8),
        "router.bias": (8,),
        "router.expert_bias": (8,),
        "experts.w_gate": (8, 16, 24),
        "experts.w_up": (8, 16, 24),
        "experts.w_down": (8, 24, 16),
        "experts.b_gate": (8, 24),
        "experts.b_up": (8, 24),
        "experts.b_down": (8, 16),
        "shared.w_gate": (16, 12),
        "shared.w_up": (16, 12),
        "shared.w_down": (12, 16),
        "shared.router": (16, 1),
    }
    plain = tf.MoE(16, 24, CONFIG, gated=False, experts=ExpertConfig("relu_squared"))
    assert set(plain.state_dict()) == {"router.weight", "experts.w_up", "experts.w_down"}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.double().float(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: nn.Sequential(m).bfloat16()[0],
        lambda m: m.float(),
    ],
)
def test_selection_bias_keeps_every_bit(change) -> None:
    """Eight biases that are one number in bfloat16."""
    module = make()
    bias = module.router.expert_bias.clone()
    other = change(copy.deepcopy(module))
    assert other.router.expert_bias.dtype == torch.float32
    assert torch.equal(other.router.expert_bias, bias)
    assert "expert_bias" in dict(other.router.named_buffers())
    assert "router.expert_bias" not in dict(other.named_parameters())
    x = torch.zeros(2, 16, dtype=other.router.weight.dtype)
    with torch.no_grad():
        other.router.bias.zero_()
    assert (other(x).routing.indices[:, 0] == 7).all()


def test_copies_and_files(tmp_path) -> None:
    module, x = make(), torch.randn(5, 16)
    want = module(x).output
    torch.save(module.state_dict(), tmp_path / "state.pt")
    loaded = make()
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(other(x).output, want)
        assert other.router.weight.data_ptr() != module.router.weight.data_ptr()


def test_meta_device() -> None:
    with torch.device("meta"):
        module = tf.MoE(16, 24, CONFIG, **FULL)
    assert all(t.device.type == "meta" for t in module.state_dict().values())
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert module.router.expert_bias.dtype == torch.float32
    assert not module.router.expert_bias.any() and not module.experts.b_up.any()
    w = module.experts.w_up.detach()
    assert abs(float(w.std()) * 16**0.5 - 1) < 0.05
    assert torch.isfinite(module(torch.randn(4, 16)).output).all()
    assert tf.MoE(16, 24, CONFIG, device="meta", dtype=torch.bfloat16).router.weight.is_meta


@pytest.mark.parametrize("recompute", [False, True])
def test_compiles_whole(recompute: bool) -> None:
    module = make(recompute=recompute)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        x = torch.randn(tokens, 16, requires_grad=True)
        results = []
        for f in (module, compiled):
            out = f(x)
            loss = out.output.pow(2).sum() + out.aux_loss
            grads = torch.autograd.grad(loss, [x, *module.parameters()])
            results.append([out.output, out.expert_counts, *grads])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recomputation_keeps_no_rows_in_expert_order() -> None:
    """Of the tensors that autograd keeps, none has R rows."""
    sizes = {}
    for recompute in (False, True):
        module = make(recompute=recompute, capacity_factor=None)
        kept: list[torch.Size] = []

        def pack(t, kept=kept):
            kept.append(t.shape)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = module(torch.randn(11, 16)).output
        rows = [s for s in kept if len(s) == 2 and s[0] == 22 and s[1] in (16, 24)]
        sizes[recompute] = len(rows)
        del out
    assert sizes[False] >= 4 and sizes[True] == 0


@pytest.mark.parametrize("how", ["function", "module"])
def test_gradients_of_recomputation_are_the_same(how: str) -> None:
    grads = []
    for recompute in (False, True):
        module = make(recompute=recompute)
        x = torch.linspace(-2, 2, 11 * 16).reshape(11, 16).requires_grad_()
        if how == "function":
            g = torch.func.grad(lambda x, m=module: m(x).output.pow(2).sum())(x.detach())
            grads.append([g])
        else:
            torch.manual_seed(1)
            with torch.no_grad():
                for p in module.parameters():
                    p.normal_(std=0.2)
            loss = module(x).output.pow(2).sum()
            grads.append(torch.autograd.grad(loss, [x, *module.parameters()]))
        torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_bias_update_is_for_training_only() -> None:
    module = make()
    before = module.router.expert_bias.clone()
    counts = module(torch.randn(40, 16)).expert_counts
    module.update_expert_bias(counts, rate=0.01)
    want = tf.update_expert_bias(before, counts, rate=0.01)
    assert torch.equal(module.router.expert_bias, want) and not torch.equal(want, before)
    module.eval()
    with pytest.raises(RuntimeError, match="eval mode"):
        module.update_expert_bias(counts, rate=0.01)
    assert torch.equal(module.router.expert_bias, want)
    with pytest.raises(RuntimeError, match="expert_bias=True"):
        tf.MoE(16, 24, CONFIG).update_expert_bias(counts, rate=0.01)


def test_training_evens_the_load() -> None:
    """Experts 6 and 7 start with all tokens; the bias alone spreads them."""
    module = make(router_bias=True, load_balancing_coeff=0.0, capacity_factor=None)
    with torch.no_grad():
        module.router.expert_bias.zero_()
        module.router.bias.copy_(torch.tensor([0.0] * 6 + [3.0] * 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    x = torch.randn(256, 16)
    target = torch.randn(256, 16)
    losses, peaks = [], []
    for _ in range(60):
        out = module(x)
        loss = (out.output - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        module.update_expert_bias(out.expert_counts, rate=0.03)
        losses.append(float(loss.detach()))
        peaks.append(int(out.expert_counts.max()))
    assert losses[-1] < 0.9 * losses[0]
    assert peaks[0] > 180 and peaks[-1] < 110


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        ([[0.0] * 16], TypeError, "x must be a torch.Tensor, got list"),
        (torch.tensor(0.0), ValueError, r"x must have shape \[..., D\], got \[\]"),
        (torch.zeros(2, 16).to_sparse(), TypeError, "x must be a dense torch.Tensor, got a sparse"),
    ],
    ids=["list", "scalar", "sparse"],
)
def test_wrong_inputs(x, error: type[Exception], words: str, capacity_factor) -> None:
    module = tf.MoE(16, 24, CONFIG, capacity_factor=capacity_factor)
    with pytest.raises(error, match=words):
        module(x)


def test_router_and_experts_alone() -> None:
    module, x = make(shared_hidden=0, shared_router=False, capacity_factor=None), torch.randn(9, 16)
    routing, logits = module.router(x)
    out = module.experts(x, routing.indices, routing.weights)
    want = module(x)
    assert torch.equal(logits, want.logits)
    assert torch.equal(out.output, want.output)
    assert torch.equal(out.expert_counts, want.expert_counts)


# -- recording and replay --------------------------------------------------------------------------


def run(model, x):
    loss = model(x).pow(2).sum()
    return loss, torch.autograd.grad(loss, list(model.parameters()))


def test_recorded_routing_replays() -> None:
    model = layers()
    x = torch.randn(2, 5, 16)
    with tf.record_routing(model) as recording:
        want = run(model, x)
    record = recording.record(metadata={"step": "7"})
    assert record.layers == ("0.moe", "1.moe", "2.moe")
    assert record.indices.shape == (10, 3, 2)
    with tf.replay_routing(model, record, compare=True) as replay:
        got = run(model, x)
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))
    assert replay.mismatched_tokens() == dict.fromkeys(record.layers, 0)

    # Another router: the same experts, weights and gradients of its own.
    with torch.no_grad():
        model[1].moe.router.weight.neg_()
    with (
        tf.replay_routing(model, record, compare=True) as replay,
        tf.record_routing(model) as again,
    ):
        _, grads = run(model, x)
    np.testing.assert_array_equal(again.record().indices, record.indices)
    counts = replay.mismatched_tokens()
    assert counts["0.moe"] == 0 and counts["1.moe"] == 10
    assert replay.mismatched_slots()["1.moe"] >= 10
    assert grads[4].abs().max() > 0  # its own router's
    assert model[0].moe.recording is None and model[0].moe.replaying is None


def test_replay_with_a_mask_and_micro_batches() -> None:
    model = layers(2)
    x = torch.randn(8, 16)
    ids = np.tile(np.array([[5, 1], [0, 3]], np.int32), (8, 1, 1))
    mask = np.arange(8) % 3 != 1
    record = RoutingRecord.from_array(ids, 8, mask=mask)  # layers "0", "1": by order
    with tf.record_routing(model) as native:
        model(x)
    with tf.record_routing(model) as recording:
        for part in (slice(0, 3), slice(3, 8)):
            with tf.replay_routing(model, record[part]):
                model(x[part])
    got = recording.record().indices
    np.testing.assert_array_equal(got[mask], ids[mask])
    np.testing.assert_array_equal(got[~mask][:, 0], native.record().indices[~mask][:, 0])


def test_checkpointed_forwards_replay_and_are_recorded_once() -> None:
    model = layers()
    x = torch.randn(6, 16, requires_grad=True)

    def forward(x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum()

    with tf.record_routing(model) as recording:
        want = torch.autograd.grad(forward(x), x)[0]
    record = recording.record()
    assert record.num_tokens == 6
    with torch.no_grad():
        model[2].moe.router.weight.neg_()
    plain = None
    with tf.replay_routing(model, record, compare=True) as replay:
        got = torch.autograd.grad(forward(x), x)[0]
        plain = torch.autograd.grad(model(x).sum(), x)[0]
    assert torch.equal(got, plain) and not torch.equal(got, want)
    assert replay.mismatched_tokens()["2.moe"] == 2 * 6  # two forwards, none of the recomputation


def test_recording_a_compiled_model() -> None:
    model, x = layers(2), torch.randn(6, 16)
    compiled = torch.compile(model, fullgraph=True)
    with tf.record_routing(model) as recording:
        compiled(x)
    with tf.record_routing(model) as plain:
        model(x)
    np.testing.assert_array_equal(recording.record().indices, plain.record().indices)


def test_replay_refuses_what_does_not_fit() -> None:
    model, x = layers(2), torch.randn(4, 16)
    ids = np.zeros((4, 2, 2), np.int32)
    named = RoutingRecord(ids, ("a", "b"), 8)
    with (
        pytest.raises(ValueError, match=r"no layer for '0.moe' of the model.*'a', 'b'"),
        tf.replay_routing(model, named),
    ):
        pass
    names = {"0.moe": "b", "1.moe": "a"}
    with tf.replay_routing(model, named, layers=names):
        model(x)
        with pytest.raises(ValueError, match="4 tokens, x has 3"):
            model(x[:3])
    for wrong, layers_of, error, message in (
        (named, names | {"c": "a"}, ValueError, "got 'c'"),
        (RoutingRecord(ids, ("0", "1"), 9), None, ValueError, "K = 2, the record 9 and 2"),
        (ids, None, TypeError, "RoutingRecord, got ndarray"),
    ):
        with (
            pytest.raises(error, match=message),
            tf.replay_routing(model, wrong, layers=layers_of),
        ):
            pass
    with (
        pytest.raises(ValueError, match=r"no torch_frontend\.MoE or Router, got Linear"),
        tf.record_routing(nn.Linear(2, 2)),
    ):
        pass
    with tf.record_routing(model) as recording:
        pass
    with pytest.raises(ValueError, match=r"'0.moe' was not run"):
        recording.record()
