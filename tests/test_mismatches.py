# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""count_mismatches: how far two routings differ."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from adapters import JaxAdapter, TorchAdapter

Adapter = JaxAdapter | TorchAdapter


def count(adapter: Adapter, indices: Any, others: Any) -> tuple[int, int]:
    """Mismatched tokens and slots of int32 arrays or lists."""
    arrays = (adapter.array(np.array(a, np.int32)) for a in (indices, others))
    results = [adapter.numpy(c) for c in adapter.functions.count_mismatches(*arrays)]
    assert all(r.shape == () and r.dtype == np.int32 for r in results)
    return int(results[0]), int(results[1])


@pytest.mark.parametrize(
    "mine, other, tokens, slots",
    [
        ([2, 0, 1], [1, 2, 0], 0, 0),  # the order does not matter
        ([2, 0, 1], [2, 0, 3], 1, 1),
        ([2, 2, 1], [2, 1, 1], 1, 1),  # as multisets
        ([2, 2, 2], [2, 2, 2], 0, 0),
        ([2, 2, 2], [2, -1, -1], 1, 2),
        ([2, -1, -1], [2, 2, 2], 1, 0),  # `others` has more: a mismatched token without a slot
        ([-1, 3, -1], [3, -5, -1], 0, 0),  # unused slots are left out
        ([-1, -1, -1], [-1, -2, -3], 0, 0),
        ([0, 1, 2], [-1, -1, -1], 1, 3),
        ([2**31 - 1, 0, 0], [0, 0, 2**31 - 1], 0, 0),
    ],
)
def test_one_token(
    adapter: Adapter, mine: list[int], other: list[int], tokens: int, slots: int
) -> None:
    assert count(adapter, [mine], [other]) == (tokens, slots)
    # Among tokens that agree, in several places.
    same = [[5, 6, 7]]
    many, others = same * 300 + [mine] * 3 + same, same * 300 + [other] * 3 + same
    assert count(adapter, many, others) == (3 * tokens, 3 * slots)


@pytest.mark.parametrize("top_k", [1, 2, 8, 31, 32])
@pytest.mark.parametrize("tokens", [0, 1, 257])
def test_counters_agree(adapter: Adapter, tokens: int, top_k: int, rng) -> None:
    indices = rng.integers(-2, top_k + 1, (tokens, top_k))
    others = np.where(rng.random((tokens, top_k)) < 0.5 / top_k, 0, rng.permuted(indices, axis=1))
    want_tokens = want_slots = 0
    for a, b in zip(indices.tolist(), others.tolist(), strict=True):
        mine, theirs = (Counter(e for e in row if e >= 0) for row in (a, b))
        want_tokens += mine != theirs
        want_slots += (mine - theirs).total()
    assert count(adapter, indices, others) == (want_tokens, want_slots)
    assert count(adapter, indices, rng.permuted(indices, axis=1)) == (0, 0)


@pytest.mark.jax
@pytest.mark.multidevice
@pytest.mark.parametrize("tokens", [48, 45])
def test_sharded_tokens_add_up(tokens: int, rng) -> None:
    """Under jit and in shard_map; 45 tokens do not divide by the devices, and are gathered."""
    jax = pytest.importorskip("jax")
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from jax_samples import DEVICES, mesh

    import jax_frontend as jf

    grid = mesh((DEVICES,), ("dp",))
    indices = rng.integers(-1, 6, (tokens, 4)).astype(np.int32)
    others = np.where(rng.random((tokens, 4)) < 0.3, indices, rng.permuted(indices, axis=0))
    want = jf.count_mismatches(indices, others)
    assert 0 < int(want[0]) < int(want[1])
    count = jf.count_mismatches
    if tokens % DEVICES == 0:
        arrays = [jax.device_put(a, NamedSharding(grid, P("dp"))) for a in (indices, others)]
        assert len(arrays[0].sharding.device_set) == DEVICES
        program = jax.jit(count).lower(*arrays).compile()
        assert "all-gather" not in program.as_text()
        assert program(*arrays) == want

        def total(a, b):
            return jax.lax.psum(count(a, b), "dp")

        mapped = jax.shard_map(total, mesh=grid, in_specs=P("dp"), out_specs=P())
        assert jax.jit(mapped)(*arrays) == want
    constrained = jax.jit(
        lambda a, b: count(jax.lax.with_sharding_constraint(a, NamedSharding(grid, P("dp"))), b)
    )
    assert constrained(indices, others) == want


@pytest.mark.jax
def test_under_vmap(rng) -> None:
    jax = pytest.importorskip("jax")
    import jax_frontend as jf

    indices, others = rng.integers(-1, 5, (2, 3, 7, 4)).astype(np.int32)
    got = jax.vmap(jf.count_mismatches)(indices, others)
    for i in range(3):
        want = jf.count_mismatches(indices[i], others[i])
        assert (int(got[0][i]), int(got[1][i])) == (int(want[0]), int(want[1]))
