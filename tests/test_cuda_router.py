# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The router's kernels on random calls: the bits of the CPU kernels."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_draws import (
    EXPERTS,
    MIXES,
    ROUTER,
    ROWS,
    Call,
    Choice,
    cover,
    generator,
    logits,
    route_bwd_call,
    route_call,
)
from cuda_targets import TARGETS, Target, check_all
from duomoe import ops

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

COUNTS = {"cpu": 60, "cuda": 400, "jax": 32}


def check_both(target: Target, choice: Choice) -> None:
    forward = route_call(choice)
    target.check(route_bwd_call(choice, forward, target.check(forward)))


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", TARGETS)
def test_route_and_its_gradient(name: str, part: int) -> None:
    """Every option beside every other, on all sizes."""
    target = Target(name)
    choices = cover(ROUTER, COUNTS[name], part)
    check_all(choices, lambda choice: check_both(target, choice))


PLAIN = {
    **{axis: [values[0]] for axis, values in ROUTER.items()},
    "experts": EXPERTS,
    "top_k": [1, 2, 6, 8, 16, 36],
    "tokens": [70, 129, 331],
    "kind": [*ROWS, *MIXES],
    "dtype": ["float32", "bfloat16", "float16"],
    "score": ROUTER["score"],
    "bias": [None, "small"],
    "cotangents": ["normal", "normal", "weights", "sums"],
    "place": ["plain", "plain", "odd"],
}


@pytest.mark.parametrize("name", TARGETS)
def test_plain_route_and_its_gradient(name: str) -> None:
    """The options that nearly every call has, which the fastest paths are for."""
    target = Target(name)
    check_all(cover(PLAIN, COUNTS[name], 7), lambda choice: check_both(target, choice))


@pytest.mark.parametrize("kind", ROWS)
def test_kinds_of_rows(kind: str) -> None:
    """The draws hold what their names say."""
    e, k = 60, 6
    z = logits(np.random.default_rng(3), kind, 300, e, k, "float32")
    assert z.shape == (300, e) and z.dtype == np.float32
    magnitude = np.abs(z)
    ordered = -np.sort(-z, axis=1)
    holds = {
        "equal": lambda: (z == z[:, :1]).all(),
        "extreme": lambda: magnitude.max() > 1e37 and 0 < magnitude[z != 0].min() < 1e-44,
        "large": lambda: 1e20 < magnitude.max() < np.inf,
        "tiny": lambda: magnitude.max() < 1e-5 and 0 < magnitude[z != 0].min() < 1e-38,
        "levels": lambda: len(np.unique(z)) <= 5,
        "ulps": lambda: len(np.unique(z)) == 4,
        "ascending": lambda: (np.diff(z, axis=1) >= 0).all(),
        "descending": lambda: (np.diff(z, axis=1) <= 0).all(),
        "threshold": lambda: ((z == ordered[:, k - 1 : k]).sum(axis=1) > 32).any(),
        "hot lanes": lambda: ((z > 5).sum(axis=1) > 32).any() and ((z > 5).sum(axis=1) < 9).any(),
        "some -inf": lambda: np.isneginf(z).any() and np.isfinite(z).any(),
        "some inf": lambda: np.isposinf(z).any() and np.isfinite(z).any(),
        "some nan": lambda: np.isnan(z).any() and np.isfinite(z).any(),
        "rows of -inf": lambda: 0 < np.isneginf(z).all(axis=1).sum() < 300,
        "rows of inf": lambda: 0 < np.isposinf(z).all(axis=1).sum() < 300,
        "rows of nan": lambda: 0 < np.isnan(z).all(axis=1).sum() < 300,
        "zeros": lambda: not z.any() and 0 < np.signbit(z).sum() < z.size,
    }.get(kind, lambda: len(np.unique(z)) > 2)
    assert holds()


@pytest.mark.parametrize(
    ("t", "e", "k"),
    [
        (100_002, 8, 2),
        (70_000, 64, 6),
        (40_001, 128, 8),
        (40_005, 256, 8),
        (20_003, 384, 8),
        (10_010, 512, 10),
        (5_005, 896, 16),
        (3_003, 2304, 36),
    ],
)
@pytest.mark.parametrize("name", [pytest.param("cpu", marks=pytest.mark.slow), TARGETS[1]])
def test_many_tokens(name: str, t: int, e: int, k: int) -> None:
    """More tokens than a grid has warps, rows of all kinds, statistics over several sequences."""
    target = Target(name)
    choice = {a: v[0] for a, v in ROUTER.items()} | {"experts": e, "top_k": k, "tokens": 70}
    choice |= {"bias": "small", "seed": (t, e)}
    sequences = next(s for s in (7, 11, 13, 3, 1) if t % s == 0)
    for options in (
        {"kind": "normal", "groups": 8, "kept": "some"},
        {"kind": "finite", "score": "sigmoid", "dtype": "bfloat16"},
        {"kind": "normal", "score": "sqrtsoftplus", "dtype": "float16", "counts": "unbiased"},
    ):
        drawn = choice | options
        small = route_call(drawn)
        z = logits(generator(drawn), drawn["kind"], t, e, k, drawn["dtype"])
        attributes = {**small.attributes, "num_sequences": sequences}
        forward = Call("route", {**small.inputs, "logits": z}, attributes, small.places)
        target.check(route_bwd_call(drawn, forward, target.check(forward)))


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
@pytest.mark.parametrize("e", [4, 64, 256, 384])
@pytest.mark.parametrize("name", TARGETS[:2])
def test_every_alignment(name: str, e: int, offset: int) -> None:
    """Rows of a multiple of four logits that start at any element: the same bits as aligned."""
    adapter = Target(name).adapter
    choice = {a: v[0] for a, v in ROUTER.items()} | {"experts": e, "top_k": 2, "tokens": 130}
    spec = ops.table()["route"]
    for dtype in ("float32", "bfloat16", "float16"):
        call = route_call({**choice, "dtype": dtype, "seed": (e, offset)})
        z = adapter.array(call.inputs["logits"])
        buffer = z.new_full((z.numel() + offset,), float("nan"))
        shifted = buffer[offset:].view(z.shape).copy_(z)
        assert shifted.data_ptr() % 16 == offset * z.element_size() % 16
        absent = [None] * (len(spec.inputs) - 1)
        want, got = (adapter.apply(spec, [x, *absent], call.attributes) for x in (z, shifted))
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
