# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Balancing through the selection bias: what the updates do to the load, on both front ends."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from adapters import bits
from duomoe import RouterConfig

CONFIG = RouterConfig(16, 4, score="sigmoid")


def skewed(rng, tokens: int = 2000, experts: int = 16) -> np.ndarray:
    """Logits that prefer some experts strongly."""
    return (rng.normal(size=(tokens, experts)) + rng.normal(size=experts)).astype("f4")


def load(adapter, logits: Any, bias: Any, config: RouterConfig = CONFIG) -> np.ndarray:
    return adapter.numpy(adapter.functions.route(logits, config, bias=bias).expert_counts)


# -- the sign rule ---------------------------------------------------------------------------------


def test_step_towards_the_mean_load(adapter) -> None:
    bias = np.array([0.5, -0.25, 0, 1], "f4")
    counts = np.array([7, 3, 5, 5], "i4")
    got = adapter.functions.update_expert_bias(
        adapter.array(bias), adapter.array(counts), rate=0.001
    )
    want = bias + np.float32(0.001) * np.array([-1, 1, 0, 0], "f4")
    np.testing.assert_array_equal(adapter.numpy(got), want, strict=True)


def test_equal_loads_and_no_tokens_change_nothing(adapter) -> None:
    bias = np.array([0.5, -0.0, 0, 1e-40], "f4")
    for counts in (np.zeros(4, "i4"), np.full(4, 9, "i4")):
        for center in (False, True):
            got = adapter.functions.update_expert_bias(
                adapter.array(bias), adapter.array(counts), rate=0.5, center=center
            )
            np.testing.assert_array_equal(bits(adapter.numpy(got)), bits(bias))


def test_centred_steps_keep_the_mean(adapter) -> None:
    counts = np.array([90, 1, 2, 3], "i4")
    got = adapter.functions.update_expert_bias(
        adapter.array(np.zeros(4, "f4")), adapter.array(counts), rate=0.25, center=True
    )
    np.testing.assert_array_equal(adapter.numpy(got), np.float32([-0.375, 0.125, 0.125, 0.125]))


def test_mean_is_exact_where_float32_is_not(adapter) -> None:
    """Loads above 2^24 that differ by one."""
    counts = np.array([2**24 + 1, 2**24, 2**24, 2**24], "i4")
    got = adapter.functions.update_expert_bias(
        adapter.array(np.zeros(4, "f4")), adapter.array(counts), rate=1.0
    )
    np.testing.assert_array_equal(adapter.numpy(got), np.float32([-1, 1, 1, 1]))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16"])
def test_counts_of_any_integer_type(adapter, dtype: str) -> None:
    if dtype == "int64" and adapter.name == "jax":
        pytest.skip("int64 needs x64 in JAX")
    counts = np.array([9, 1, 5], dtype)
    got = adapter.functions.update_expert_bias(
        adapter.array(np.zeros(3, "f4")), adapter.array(counts), rate=1.0
    )
    np.testing.assert_array_equal(adapter.numpy(got), np.float32([-1, 1, 0]))


def test_steps_balance_a_skewed_router(adapter, rng) -> None:
    logits = adapter.array(skewed(rng))
    bias = adapter.array(np.zeros(16, "f4"))
    first = load(adapter, logits, bias)
    assert first.max() > 3 * first.min()
    for _ in range(300):
        counts = adapter.functions.route(logits, CONFIG, bias=bias).expert_counts
        bias = adapter.functions.update_expert_bias(bias, counts, rate=0.002, center=True)
    last = load(adapter, logits, bias)
    assert last.max() < 1.1 * last.min()
    assert abs(adapter.numpy(bias).mean()) < 1e-6


# -- quantile balancing ----------------------------------------------------------------------------


def test_cutoffs_and_bins_by_hand(adapter) -> None:
    """Logits as scores: [4, 3, 1, 0] with K = 2 has cutoff 1, differences [-3, -2, 0, 1]."""
    config = RouterConfig(4, 2, select_on="logit")
    logits = np.array([[4, 3, 1, 0], [0, 1, 3, 4]], "f4")
    bins = adapter.functions.count_quantile_bins(
        adapter.array(logits),
        config,
        bounds=adapter.array(np.array([-4, 2], "f4")),
        num_bins=6,
    )
    np.testing.assert_array_equal(adapter.numpy(bins.cutoffs), np.float32([1, 1]))
    want = np.zeros((4, 6), "i4")
    for row in ([1, 2, 4, 5], [5, 4, 2, 1]):
        for expert, bin_ in enumerate(row):
            want[expert, bin_] += 1
    np.testing.assert_array_equal(adapter.numpy(bins.counts), want, strict=True)


def test_default_bounds_hold_every_difference(adapter, rng) -> None:
    bias = rng.normal(size=16).astype("f4")
    bins = adapter.functions.count_quantile_bins(
        adapter.array(skewed(rng)), CONFIG, bias=adapter.array(bias)
    )
    assert float(bins.lower) == bias.min() - np.float32(1)
    assert float(bins.upper) == bias.max() + np.float32(1)
    assert adapter.numpy(bins.counts).shape == (16, 1000)
    assert (adapter.numpy(bins.counts).sum(1) == 2000).all()


def test_update_is_the_exact_quantile_within_a_bin(adapter, rng) -> None:
    logits, bias = skewed(rng), (0.1 * rng.normal(size=16)).astype("f4")
    scores = 1 / (1 + np.exp(-logits.astype("f8")))
    lacking = -np.sort(-(scores + bias), axis=1)[:, 4:5] - scores
    want = np.quantile(lacking, 4 / 16, axis=0)
    want -= want.mean()
    functions = adapter.functions
    bins = functions.count_quantile_bins(
        adapter.array(logits), CONFIG, bias=adapter.array(bias), num_bins=4000
    )
    got = functions.update_expert_bias_by_quantile(adapter.array(bias), bins, CONFIG)
    width = (float(bins.upper) - float(bins.lower)) / 4000
    np.testing.assert_allclose(adapter.numpy(got), want, atol=2 * width)
    half = functions.update_expert_bias_by_quantile(adapter.array(bias), bins, CONFIG, decay=0.5)
    blend = 0.5 * bias.astype("f8") + 0.5 * np.quantile(lacking, 4 / 16, axis=0)
    np.testing.assert_allclose(adapter.numpy(half), blend - blend.mean(), atol=2 * width)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_a_few_updates_balance_a_skewed_router(adapter, rng, score: Any) -> None:
    config = RouterConfig(16, 4, score=score)
    logits, functions = adapter.array(skewed(rng)), adapter.functions
    bias = adapter.array(np.zeros(16, "f4"))
    first = load(adapter, logits, bias, config)
    assert first.max() > 3 * first.min()
    bounds = None if score != "sqrtsoftplus" else adapter.array(np.array([-4, 4], "f4"))
    for _ in range(20):
        # Scores of a softmax over 16 experts are small: fine bins.
        bins = functions.count_quantile_bins(
            logits, config, bias=bias, bounds=bounds, num_bins=20000
        )
        bias = functions.update_expert_bias_by_quantile(bias, bins, config, decay=0.5)
    last = load(adapter, logits, bias, config)
    assert last.max() < 1.1 * last.min()


def test_micro_batches_add_up(adapter, rng) -> None:
    """Counts of parts are those of the whole, masked tokens left out."""
    logits, mask = skewed(rng, 60), rng.random(60) < 0.7
    logits[~mask] = np.nan
    bias, functions = adapter.array(rng.normal(size=16).astype("f4")), adapter.functions

    def count(part: slice, **options: Any) -> Any:
        z = adapter.array(logits[part])
        return functions.count_quantile_bins(z, CONFIG, bias=bias, num_bins=50, **options)

    whole = count(slice(None), token_mask=adapter.array(mask))
    parts = [
        count(part, token_mask=adapter.array(mask[part]))
        for part in (slice(0, 20), slice(20, 21), slice(21, 60))
    ]
    total = dataclasses.replace(whole, counts=sum(p.counts for p in parts))
    np.testing.assert_array_equal(adapter.numpy(whole.counts), adapter.numpy(total.counts))
    assert (adapter.numpy(whole.counts).sum(1) == mask.sum()).all()
    a, b = (functions.update_expert_bias_by_quantile(bias, x, CONFIG) for x in (whole, total))
    np.testing.assert_array_equal(adapter.numpy(a), adapter.numpy(b))


def test_special_logits(adapter) -> None:
    """An excluded expert needs more bias than there is; NaN is not counted; ids beyond K+1 finite
    ones leave the cutoff at -inf, which every expert exceeds."""
    z = np.array([[2, 1, -np.inf, 0], [2, np.nan, 1, 0], [1, -np.inf, -np.inf, -np.inf]], "f4")
    config = RouterConfig(4, 1, select_on="logit")
    bins = adapter.functions.count_quantile_bins(
        adapter.array(z), config, bounds=adapter.array(np.array([-2, 2], "f4")), num_bins=4
    )
    np.testing.assert_array_equal(adapter.numpy(bins.cutoffs), np.float32([1, 1, -np.inf]))
    want = np.array([[1, 2, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1], [0, 0, 0, 2]], "i4")
    np.testing.assert_array_equal(adapter.numpy(bins.counts), want)


def test_no_tokens_keep_the_bias_but_for_its_mean(adapter) -> None:
    bias = np.array([1, 2, 3, 6], "f4")
    config, functions = RouterConfig(4, 2), adapter.functions
    bins = functions.count_quantile_bins(
        adapter.array(np.zeros((0, 4), "f4")), config, bias=adapter.array(bias)
    )
    assert adapter.numpy(bins.counts).sum() == 0
    got = functions.update_expert_bias_by_quantile(adapter.array(bias), bins, config)
    np.testing.assert_array_equal(adapter.numpy(got), bias - 3)


# -- errors ----------------------------------------------------------------------------------------


def test_bad_input(adapter) -> None:
    functions, array = adapter.functions, adapter.array
    bias, counts = array(np.zeros(16, "f4")), array(np.zeros(16, "i4"))
    logits = array(np.zeros((5, 16), "f4"))
    bins = functions.count_quantile_bins(logits, CONFIG, bias=bias, num_bins=3)
    quantile, count = functions.update_expert_bias_by_quantile, functions.count_quantile_bins
    wide = RouterConfig(16, 16, score="sigmoid")
    grouped = RouterConfig(16, 4, num_groups=4, group_top_k=2)
    for error, message, call in (
        (ValueError, "expert_counts must have shape", lambda: functions.update_expert_bias(
            bias, array(np.zeros(15, "i4")), rate=1.0)),
        (TypeError, "expert_counts must be one of int8", lambda: functions.update_expert_bias(
            bias, bias, rate=1.0)),
        (TypeError, "expert_counts must be one of int8", lambda: functions.update_expert_bias(
            bias, array(np.zeros(16, "u4")), rate=1.0)),
        (ValueError, "bias must have at least one expert", lambda: functions.update_expert_bias(
            array(np.zeros(0, "f4")), array(np.zeros(0, "i4")), rate=1.0)),
        (TypeError, "bias must be float32, got float16", lambda: functions.update_expert_bias(
            array(np.zeros(16, "f2")), counts, rate=1.0)),
        (TypeError, "rate must be a float", lambda: functions.update_expert_bias(
            bias, counts, rate="1")),
        (ValueError, "rate must be a float32", lambda: functions.update_expert_bias(
            bias, counts, rate=1e39)),
        (TypeError, "bounds must be float32, got float16", lambda: count(
            logits, CONFIG, bounds=array(np.zeros(2, "f2")))),
        (TypeError, "center must be a bool", lambda: functions.update_expert_bias(
            bias, counts, rate=1.0, center=1)),
        (ValueError, "top_k must be below the number of experts", lambda: count(
            logits, wide, bias=bias)),
        (ValueError, "without groups", lambda: count(logits, grouped, bias=bias)),
        (ValueError, "E = config.num_experts = 8", lambda: count(
            logits, RouterConfig(8, 2), bias=bias)),
        (ValueError, "bounds must be given where bias is None", lambda: count(logits, CONFIG)),
        (ValueError, "bounds must be given for score='sqrtsoftplus'", lambda: count(
            logits, RouterConfig(16, 4, score="sqrtsoftplus"), bias=bias)),
        (ValueError, "bounds must have shape", lambda: count(
            logits, CONFIG, bounds=array(np.zeros(3, "f4")))),
        (ValueError, "num_bins must be between 1", lambda: count(
            logits, CONFIG, bias=bias, num_bins=0)),
        (ValueError, "decay must be between 0 and 1", lambda: quantile(
            bias, bins, CONFIG, decay=1.5)),
        (TypeError, "bins must be a QuantileBins", lambda: quantile(bias, counts, CONFIG)),
        (ValueError, "bias must have shape", lambda: quantile(
            array(np.zeros(4, "f4")), bins, CONFIG)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_debug_checks_name_a_bad_range(adapter) -> None:
    import duomoe

    args = adapter.array(np.zeros((5, 16), "f4")), CONFIG
    bounds = adapter.array(np.array([1, 1], "f4"))
    with np.errstate(all="ignore"):
        bins = adapter.functions.count_quantile_bins(*args, bounds=bounds, num_bins=3)
        assert adapter.numpy(bins.counts).sum() in (0, 5 * 16)
    duomoe.debug_checks(True)
    try:
        with pytest.raises(Exception, match="bounds must be finite, the lower below the upper"):
            adapter.numpy(
                adapter.functions.count_quantile_bins(*args, bounds=bounds, num_bins=3).counts
            )
    finally:
        duomoe.debug_checks(False)


# -- frameworks ------------------------------------------------------------------------------------


@pytest.mark.jax
@pytest.mark.torch
def test_front_ends_agree_bit_for_bit(jax_adapter, torch_adapter, rng) -> None:
    logits, bias = skewed(rng, 300), rng.normal(size=16).astype("f4")
    results = []
    for adapter in (jax_adapter, torch_adapter):
        functions = adapter.functions
        b, z = adapter.array(bias), adapter.array(logits)
        bins = functions.count_quantile_bins(z, CONFIG, bias=b)
        counts = functions.route(z, CONFIG, bias=b).expert_counts
        stepped = functions.update_expert_bias(b, counts, rate=1e-3, center=True)
        moved = functions.update_expert_bias_by_quantile(b, bins, CONFIG, decay=0.9)
        fields = [getattr(bins, f.name) for f in dataclasses.fields(bins)]
        results.append([adapter.numpy(x) for x in (*fields, stepped, moved)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.torch
def test_torch_updates_carry_no_gradient(torch_adapter) -> None:
    torch = pytest.importorskip("torch")
    functions = torch_adapter.functions
    bias = torch.zeros(16, requires_grad=True)
    logits = torch.randn(8, 16, requires_grad=True)
    bins = functions.count_quantile_bins(logits, CONFIG, bias=bias)
    assert not bins.cutoffs.requires_grad
    assert not functions.update_expert_bias_by_quantile(bias, bins, CONFIG).requires_grad
    counts = functions.route(logits, CONFIG, bias=bias).expert_counts
    assert not functions.update_expert_bias(bias, counts, rate=1.0).requires_grad


@pytest.mark.jax
@pytest.mark.multidevice
def test_jax_counts_of_sharded_tokens(rng) -> None:
    """Under jit with sharded tokens, and per shard in shard_map with axis_name."""
    jax = pytest.importorskip("jax")
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from jax_samples import mesh

    import jax_frontend as jf

    logits, bias = skewed(rng, 64), rng.normal(size=16).astype("f4")

    def update(z, over=None):
        counts = jf.route(z, CONFIG, bias=bias).expert_counts
        bins = jf.count_quantile_bins(z, CONFIG, bias=bias)
        stepped = jf.update_expert_bias(bias, counts, rate=0.5, axis_name=over)
        moved = jf.update_expert_bias_by_quantile(bias, bins, CONFIG, axis_name=over)
        return stepped, moved, bins.cutoffs

    want = jax.jit(update)(logits)
    grid = mesh((2, 2), ("a", "b"))
    for spec in (P("a"), P(("a", "b")), P(None, "b")):
        got = jax.jit(update)(jax.device_put(logits, NamedSharding(grid, spec)))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
    axes = ("a", "b")
    mapped = jax.shard_map(
        lambda z: update(z, axes),
        mesh=grid,
        in_specs=P(axes),
        out_specs=(P(), P(), P(axes)),
    )
    for a, b in zip(jax.jit(mapped)(logits), want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.jax
def test_jax_update_in_a_scanned_step(rng) -> None:
    """The bias as a carry of lax.scan, under jit and remat, with gradients around it."""
    jax = pytest.importorskip("jax")
    import jax_frontend as jf

    logits = skewed(rng, 100)

    @jax.checkpoint
    def step(bias, scale):
        routing = jf.route(logits * scale, CONFIG, bias=bias)
        updated = jf.update_expert_bias(bias, routing.expert_counts, rate=0.01)
        return updated, (routing.weights[:, 0].sum(), routing.expert_counts)

    def total(scales):
        bias, (sums, counts) = jax.lax.scan(step, np.zeros(16, "f4"), scales)
        return sums.sum(), (bias, counts)

    scales = np.linspace(0.5, 1.5, 20).astype("f4")
    (_, (bias, counts)), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(scales)
    want = np.zeros(16, "f4")
    for one in np.asarray(counts):
        want = want + np.float32(0.01) * np.sign(one.mean() - one).astype("f4")
    np.testing.assert_array_equal(bias, want)
    assert np.abs(grad).min() > 0


def test_counts_beyond_int32(adapter) -> None:
    """Only differences of the loads count, so that sums over long steps stay exact."""
    counts = np.arange(8, dtype="i8") + 3_000_000_000
    want = np.float32(1e-3) * np.sign(3.5 - np.arange(8)).astype("f4")
    loads = counts if adapter.name == "jax" else adapter.array(counts)  # NumPy's int64 in JAX
    got = adapter.functions.update_expert_bias(adapter.array(np.zeros(8, "f4")), loads, rate=1e-3)
    np.testing.assert_array_equal(adapter.numpy(got), want)


@pytest.mark.jax
@pytest.mark.multidevice
def test_counts_whose_sum_over_shards_leaves_int32() -> None:
    jax = pytest.importorskip("jax")
    from jax.sharding import PartitionSpec as P
    from jax_samples import mesh

    import jax_frontend as jf

    counts = np.tile(np.array([2**30 + 10, 2**30 - 1, 2**30, 2**30], "i4"), (4, 1))
    update = jax.shard_map(
        lambda c: jf.update_expert_bias(np.zeros(4, "f4"), c[0], rate=1.0, axis_name="a"),
        mesh=mesh((4,), ("a",)),
        in_specs=P("a"),
        out_specs=P(),
    )
    np.testing.assert_array_equal(jax.jit(update)(counts), np.float32([-1, 1, 1, 1]))
