# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The router's kernels on more than 2^31 logits, and the plan of more than 2^27 slots. What a long
call gives for some sequences is what a short call gives for these alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cuda_checks import GPU, MARKS, plan_attributes
from duomoe import ops
from duomoe.config import RouterConfig

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch_frontend import bind

GIB = 2**30
LENGTH = 8192  # of a sequence
pytestmark = [
    *MARKS,
    pytest.mark.skipif(
        not GPU or torch.cuda.mem_get_info()[0] < 60 * GIB, reason="needs 60 GiB of GPU memory"
    ),
]


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    yield
    if GPU:
        torch.cuda.empty_cache()


def call(name: str, attributes: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    spec = ops.table()[name]
    own = {a.name: attributes[a.name] for a in spec.attributes}
    outputs = bind.call(spec, [inputs.get(s.name) for s in spec.inputs], own)
    return {s.name: o for s, o in zip(spec.outputs, outputs, strict=True)}


def noise(rows: int, width: int, dtype: Any) -> Any:
    """Normal numbers without a huge temporary."""
    torch.manual_seed(rows)
    x = torch.empty(rows, width, dtype=dtype, device="cuda")
    for part in x.split(LENGTH * 32):
        part.copy_(torch.randn(part.shape, device="cuda"))
    return x


@pytest.mark.parametrize(
    ("sequences", "e", "k", "score", "dtype"),
    [
        (1025, 256, 8, "sigmoid", torch.bfloat16),
        (32769, 8, 2, "softmax", torch.bfloat16),
        (2049, 130, 6, "sqrtsoftplus", torch.float16),
        (1025, 256, 8, "softmax", torch.float32),
    ],
)
def test_route(sequences: int, e: int, k: int, score: str, dtype: Any) -> None:
    tokens = sequences * LENGTH
    assert tokens * e > 2**31
    config = RouterConfig(e, k, score=score)
    z = noise(tokens, e, dtype)
    whole = config.attributes(num_sequences=sequences)
    routing = call("route", whole, logits=z)
    grads = {
        "grad_weights": noise(tokens, k, torch.float32),
        "grad_score_sums": noise(sequences, e, torch.float32),
        "grad_logsumexp_sq": noise(sequences, 1, torch.float32)[:, 0],
    }
    grad = call("route_bwd", whole, logits=z, indices=routing["indices"], **grads)["grad_logits"]
    counts = torch.zeros_like(routing["expert_counts"])
    step = 2**28 // e // LENGTH
    for first in range(0, sequences, step):
        s = slice(first, min(first + step, sequences))
        t = slice(s.start * LENGTH, s.stop * LENGTH)
        attributes = config.attributes(num_sequences=s.stop - s.start)
        part = call("route", attributes, logits=z[t])
        counts += part.pop("expert_counts")
        for name, want in part.items():
            got = routing[name][t if name in ("weights", "indices") else s]
            if name in ("score_sums", "logsumexp_sq"):
                # A call's chunks depend on its tokens. Roundings of random signs come to some
                # sqrt(LENGTH) 2^-24; a token that is left out, to 1 / LENGTH.
                torch.testing.assert_close(got, want, rtol=4 * LENGTH**0.5 * 2.0**-24, atol=0)
            else:
                assert torch.equal(got, want), (name, s)
        cotangents = {n: g[t if n == "grad_weights" else s] for n, g in grads.items()}
        inputs = {"logits": z[t], "indices": part["indices"], **cotangents}
        want = call("route_bwd", attributes, **inputs)["grad_logits"]
        assert torch.equal(grad[t], want), s
    assert torch.equal(routing["expert_counts"], counts) and counts.sum() == tokens * k


def test_one_sequence() -> None:
    """Chunks of many tokens: a sequence longer than 2^31 / E, its counts exact."""
    tokens, e, k = 2**23 + 12345, 256, 8
    z = noise(tokens, e, torch.bfloat16)
    routing = call("route", RouterConfig(e, k).attributes(num_sequences=1), logits=z)
    counts = torch.zeros_like(routing["expert_counts"])
    for i in range(0, tokens, 2**20):
        part = z[i : i + 2**20]
        want = call("route", RouterConfig(e, k).attributes(num_sequences=1), logits=part)
        counts += want["expert_counts"]
        for name in ("weights", "indices"):
            assert torch.equal(routing[name][i : i + 2**20], want[name]), (name, i)
    assert torch.equal(routing["expert_counts"], counts)
    assert torch.equal(routing["sequence_counts"][0], counts)
    assert routing["num_tokens"].item() == tokens
    mean = routing["score_sums"].double().sum().item() / tokens
    assert abs(mean - 1) < 1e-4  # each token adds probabilities whose sum is 1


@pytest.mark.parametrize("order", ["position", "weight"])
@pytest.mark.parametrize(("tokens", "e", "k"), [(2**24 + 77, 256, 8), (2**26 + 77, 8, 2)])
def test_plan(tokens: int, e: int, k: int, order: str) -> None:
    """A stable sort of the slots by expert, of which a full expert keeps the first or largest."""
    torch.manual_seed(0)
    ids = torch.randint(-1, e, (tokens, k), device="cuda", dtype=torch.int32)
    weights = torch.randint(0, 1000, (tokens, k), device="cuda").float()
    capacity = tokens * k // e // 2
    attributes = plan_attributes(tokens, k, e, capacity=capacity, drop_order=order)
    plan = call("plan_dispatch", attributes, indices=ids, weights=weights)
    flat, heavy = ids.view(-1), weights.view(-1)
    counts = torch.bincount(flat[flat >= 0], minlength=e)
    assert torch.equal(plan["routed_counts"].long(), counts)
    assert torch.equal(plan["expert_counts"].long(), counts.clamp(max=capacity))
    offsets = plan["expert_offsets"].tolist()
    row_of_slot = torch.full_like(flat, -1)
    for expert in range(e):
        slots = (flat == expert).nonzero()[:, 0]
        if order == "weight":
            best = torch.sort(heavy[slots], descending=True, stable=True).indices[:capacity]
            slots = slots[best.sort().values]
        slots = slots[:capacity]
        begin = offsets[expert]
        rows = torch.arange(begin, begin + len(slots), dtype=torch.int32, device="cuda")
        row_of_slot[slots] = rows
        assert torch.equal(plan["slot_of_row"][begin : begin + len(slots)], slots.int()), expert
    assert torch.equal(plan["row_of_slot"].view(-1), row_of_slot)
