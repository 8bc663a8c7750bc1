# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""RouterConfig.capacity: exact, for symbolic numbers of tokens too."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from duomoe import RouterConfig


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "factor", "want"),
    [
        (16, 8, 2, 1.0, 4),
        (17, 8, 2, 1, 5),
        (16, 8, 2, 1.25, 5),
        (0, 8, 2, 4.0, 0),
        (1, 64, 1, 0.01, 1),
        # In floats 1.1 * 30 is 33.000000000000004.
        (30, 4, 4, 1.1, 33),
        (3_000_000, 1, 1, 1 / 3, 1_000_000),
        (2**40, 8, 1, 1.1, -(-(2**37) * 11 // 10)),
        (np.int64(16), 8, 2, np.float32(1.5), 6),
    ],
)
def test_capacity(tokens, experts: int, top_k: int, factor: float, want: int) -> None:
    assert RouterConfig(experts, top_k).capacity(tokens, factor) == want


def test_capacity_is_the_ceiling(rng) -> None:
    for _ in range(200):
        experts, tokens, percent = (int(rng.integers(1, n)) for n in (100, 10_000, 400))
        top_k = int(rng.integers(1, experts + 1))
        got = RouterConfig(experts, top_k).capacity(tokens, percent / 100)
        exact = Fraction(tokens * top_k * percent, experts * 100)
        assert got - 1 < exact <= got


@pytest.mark.parametrize(
    ("tokens", "factor", "error", "message"),
    [
        (4, 0, ValueError, "factor must be above 0, got 0.0"),
        (4, 1e300, ValueError, "factor must give fewer than 2^63 rows per expert, got 1e+300"),
        (4, -1.5, ValueError, "factor must be above 0, got -1.5"),
        (4, 1e-9, ValueError, "factor must be above 0, got 1e-09"),
        (4, float("inf"), ValueError, "factor must be finite, got inf"),
        (4, "1", TypeError, "factor must be a float, got '1'"),
        (-1, 1.0, ValueError, "num_tokens must be at least 0, got -1"),
        (4.0, 1.0, TypeError, "num_tokens must be an int, got 4.0"),
    ],
)
def test_bad_numbers(tokens, factor, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        RouterConfig(8, 2).capacity(tokens, factor)
    assert str(caught.value) == message


@pytest.mark.torch
def test_symbolic_tokens() -> None:
    torch = pytest.importorskip("torch")
    config = RouterConfig(8, 2)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    f = torch.compile(
        lambda x: x * config.capacity(x.shape[0], 1.1),
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )
    for tokens in (10, 77, 123):
        assert f(torch.ones(tokens))[0] == config.capacity(tokens, 1.1)
    assert len(graphs) == 1
