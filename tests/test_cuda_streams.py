# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Repeats, memory held before, streams, graphs and devices: what a kernel gives depends on its
inputs alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from adapters import TorchAdapter
from cuda_checks import MARKS, Rng, Values, normal, plan_attributes
from cuda_draws import logits
from duomoe import ops
from duomoe.config import RouterConfig

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch_frontend import bind

pytestmark = MARKS

# T, E, K, D and options of the router; the paths of small, usual, odd and large rows.
SHAPES = {
    "small": (1000, 8, 2, 100, {}),
    "usual": (700, 256, 8, 1024, {"score": "sigmoid", "num_groups": 8, "group_top_k": 4}),
    "odd": (333, 65, 6, 33, {"score": "sqrtsoftplus", "counts": "unbiased"}),
    "large": (130, 2304, 36, 64, {}),
    "one token": (1, 384, 8, 7168, {"score": "sigmoid"}),
}
shapes = pytest.mark.parametrize("shape", SHAPES)
Tensors = dict[str, Any]


class Chain:
    """Every op from the logits to the combined rows and all gradients, through the raw operators.

    The plan drops slots by weight and pads blocks; R does not depend on the routing.
    """

    def __init__(self, shape: str, dtype: str = "bfloat16") -> None:
        self.tokens, self.experts, self.top_k, self.width, options = SHAPES[shape]
        self.dtype = dtype
        config = RouterConfig(self.experts, self.top_k, scale=2.5, eps=1e-6, **options)
        self.router = config.attributes(num_sequences=1)
        mean = self.tokens * self.top_k // self.experts
        sizes = (self.tokens, self.top_k, self.experts)
        options = {"capacity": mean + 2, "alignment": 8, "drop_order": "weight"}
        self.plan = plan_attributes(*sizes, **options)

    def draw(self, rng: Rng, device: str = "cuda") -> Tensors:
        t, e, k, d, r = self.tokens, self.experts, self.top_k, self.width, self.plan["num_rows"]
        shapes = {"x": (t, d), "rows": (r, d), "grad_y": (t, d), "grad_rows": (r, d)}
        values: Values = {n: normal(rng, *s).astype(np.float32) for n, s in shapes.items()}
        adapter = TorchAdapter(device)
        inputs = {n: adapter.array(v).to(getattr(torch, self.dtype)) for n, v in values.items()}
        inputs["logits"] = adapter.array(logits(rng, "finite", t, e, k, self.dtype))
        inputs["bias"] = adapter.array(normal(rng, e, spread=0.1))
        inputs["token_mask"] = adapter.array((rng.random(t) < 0.9) | (np.arange(t) == 0))
        cotangents = {"weights": (t, k), "score_sums": (1, e), "logsumexp_sq": (1,)}
        for name, shape in cotangents.items():
            inputs["grad_" + name] = adapter.array(normal(rng, *shape))
        return inputs

    def run(self, given: Tensors) -> Tensors:
        """The outputs of all ops, OP.OUTPUT."""
        found = dict(given)

        def call(name: str, attributes: Values) -> Tensors:
            spec = ops.table()[name]
            own = {a.name: attributes[a.name] for a in spec.attributes}
            outputs = bind.call(spec, [found.get(s.name) for s in spec.inputs], own)
            return {s.name: o for s, o in zip(spec.outputs, outputs, strict=True)}

        results: Tensors = {}
        moves = ("permute", "permute_bwd", "permute_bwd_weights", "combine", "combine_bwd")
        routed = {"route": self.router, "route_bwd": self.router, "plan_dispatch": self.plan}
        for name, attributes in (routed | {name: {} for name in moves}).items():
            outputs = call(name, attributes)
            results |= {f"{name}.{n}": o for n, o in outputs.items()}
            if name in ("route", "plan_dispatch"):  # what the ops after them read
                found |= outputs
        return results


def differing(a: Tensors, b: Tensors, any_nan: bool = False) -> list[str]:
    """Outputs whose bits differ; NaN equals NaN of the same bits, or, where `any_nan`, of any: its
    sign and payload are the processor's.
    """
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

    def bits(x: Any) -> Any:
        x = x.cpu()
        if any_nan and x.is_floating_point():
            x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
        return x.view(raw[x.element_size()])

    return [n for n in a if not torch.equal(bits(a[n]), bits(b[n]))]


def kept(outputs: Tensors) -> Tensors:
    return {name: x.clone() for name, x in outputs.items()}


@shapes
def test_repeats(shape: str, rng: Rng) -> None:
    chain = Chain(shape)
    inputs = chain.draw(rng)
    first = chain.run(inputs)
    unequal = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        for name, x in chain.run(inputs).items():
            unequal += (x.view(torch.uint8) != first[name].view(torch.uint8)).sum()
    assert unequal.item() == 0


@shapes
def test_the_chain_has_the_bits_of_the_cpu(shape: str, rng: Rng) -> None:
    chain = Chain(shape)
    inputs = chain.draw(rng, "cpu")
    on_gpu = {n: x.cuda() for n, x in inputs.items()}
    assert differing(chain.run(inputs), chain.run(on_gpu), any_nan=True) == []


@shapes
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
def test_memory_held_before(shape: str, byte: int, rng: Rng) -> None:
    """Outputs and scratch get memory that the allocator held, filled with NaN or small integers."""
    chain = Chain(shape)
    inputs = chain.draw(rng)
    clean = chain.run(inputs)
    sizes = [1 << n for n in (9, 12, 15, 18, 20, 22, 25) for _ in range(24)]
    held = [torch.full((n,), byte, dtype=torch.uint8, device="cuda") for n in sizes]
    del held
    torch.use_deterministic_algorithms(byte == 0xFF)  # fills what torch.empty returns
    try:
        assert differing(clean, chain.run(inputs)) == []
    finally:
        torch.use_deterministic_algorithms(False)


def test_inputs_stay(rng: Rng) -> None:
    for shape in SHAPES:
        chain = Chain(shape)
        inputs = chain.draw(rng)
        before = kept(inputs)
        chain.run(inputs)
        assert differing(before, inputs) == []


@shapes
def test_two_streams(shape: str, rng: Rng) -> None:
    """Calls at the same time on other inputs don't share scratch memory."""
    chain = Chain(shape)
    inputs = [chain.draw(rng) for _ in range(2)]
    expected = [chain.run(i) for i in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results: list[list[Tensors]] = [[], []]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # so that both have work queued
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(chain.run(inputs[i]))
    torch.cuda.synchronize()
    for i, found in enumerate(results):
        assert [differing(expected[i], r) for r in found] == [[]] * len(found)


@shapes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_graph(shape: str, dtype: str, rng: Rng) -> None:
    """A graph captured on one routing gives another's results when replayed on its inputs."""
    chain = Chain(shape, dtype)
    batches = [chain.draw(rng) for _ in range(3)]
    batches[2]["logits"].zero_()  # all equal
    expected = [chain.run(b) for b in batches]
    routings = [e["route.indices"] for e in expected]
    assert not torch.equal(routings[0], routings[1])
    static = kept(batches[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain.run(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = chain.run(static)
    for i in (1, 2, 0, 0, 1):
        for name, x in static.items():
            x.copy_(batches[i][name])
        for x in captured.values():
            x.view(torch.uint8).fill_(0x7F)
        graph.replay()
        torch.cuda.synchronize()
        assert differing(expected[i], captured) == [], i


def test_no_tokens() -> None:
    for shape in SHAPES:
        chain = Chain(shape)
        chain.tokens = 0
        chain.plan = plan_attributes(0, chain.top_k, chain.experts, max_rows=0)
        outputs = chain.run(chain.draw(np.random.default_rng(0)))
        assert all(not x.any() for x in outputs.values())


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"
)
@pytest.mark.multidevice
@shapes
def test_every_device(shape: str, rng: Rng) -> None:
    """An op runs where its inputs are, whatever the current device is."""
    chain = Chain(shape)
    inputs = chain.draw(rng)
    expected = chain.run(inputs)
    for i in range(torch.cuda.device_count()):
        there = {n: x.to(f"cuda:{i}") for n, x in inputs.items()}
        outputs = chain.run(there)
        assert {x.device.index for x in outputs.values()} == {i}
        assert torch.cuda.current_device() == 0
        assert differing(expected, outputs) == []
