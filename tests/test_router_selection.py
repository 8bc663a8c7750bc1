# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which experts are selected: groups, limits of K and E, NaN, dtypes, precision of the bias, ties.

Every rule runs on both front ends through `route`.
"""

from __future__ import annotations

import numpy as np
import pytest
from adapters import bits
from duomoe import MoEParams, RouterConfig
from oracle_bounds import U
from oracle_cases import is_decided
from router_checks import Exact, as_dtype, decided, pull_back, run, same_bits
from samples import block_parameters, normal

# Sigmoid scores of two groups of four; 0 stands for a score that is practically nothing.
TWO_GROUPS = np.array([0.9, 0.1, 0, 0, 0.6, 0.6, 0, 0])
TWO_GROUPS_LOGITS = np.where(
    TWO_GROUPS > 0,
    np.log(np.maximum(TWO_GROUPS, 1e-9) / (1 - TWO_GROUPS)),
    -20,
)


def sigmoid(z):
    return 1 / (1 + np.exp(-np.asarray(z, np.float64)))


def best_by_brute_force(v: np.ndarray, config: RouterConfig) -> list[int]:
    """The rule for groups, written down anew: sums of the best, then the best within the kept."""
    size = config.num_experts // config.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_groups)]
    value = [sum(sorted((v[e] for e in g), reverse=True)[: config.group_score_k]) for g in groups]
    kept = sorted(range(config.num_groups), key=lambda g: (-value[g], g))[: config.group_top_k]
    allowed = [e for g in kept for e in groups[g]]
    return sorted(allowed, key=lambda e: (-v[e], e))[: config.top_k]


# -- groups ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("group_score_k, ids", [(1, [0, 1]), (2, [4, 5]), (3, [4, 5])])
def test_a_group_is_worth_the_sum_of_its_best_scores(adapter, group_score_k, ids, dtype) -> None:
    """One strong expert beats two good ones only where the maximum is the group's value."""
    config = RouterConfig(
        8, 2, score="sigmoid", num_groups=2, group_top_k=1, group_score_k=group_score_k
    )
    logits = as_dtype(np.stack([TWO_GROUPS_LOGITS, np.roll(TWO_GROUPS_LOGITS, 4)]), dtype)
    routing = run(adapter, logits, config)
    np.testing.assert_array_equal(routing.indices, [ids, [i ^ 4 for i in ids]])
    s = sigmoid(logits[0].astype("f8"))[ids]
    np.testing.assert_allclose(routing.weights, [s / s.sum()] * 2, rtol=16 * U)
    # With normalised sigmoid weights, only the selected logits get a gradient.
    grad = pull_back(adapter, logits, config, [np.array([[1, 0]] * 2), None, None])
    rest = np.setdiff1d(np.arange(8), ids)
    assert not bits(grad[0, rest]).any() and np.all(grad[0, ids] != 0)


def test_the_bias_counts_in_a_groups_value(adapter) -> None:
    config = RouterConfig(8, 2, score="sigmoid", num_groups=2, group_top_k=1)
    bias = np.array([0, 0.35, 0, 0, 0, 0, 0, 0], "f4")
    routing = run(adapter, as_dtype(TWO_GROUPS_LOGITS[None]), config, bias=bias)
    np.testing.assert_array_equal(routing.indices, [[0, 1]])
    np.testing.assert_allclose(routing.weights, [[0.9, 0.1]], rtol=16 * U)


@pytest.mark.parametrize(
    "experts, groups, kept, top_k, score_k, score",
    [
        (16, 4, 2, 6, 3, "softmax"),  # K / kept groups, not 2
        (16, 4, 2, 6, 3, "sigmoid"),
        (16, 4, 2, 8, 4, "sqrtsoftplus"),  # the whole group
        (16, 4, 1, 2, 9, "sigmoid"),  # more than a group holds: all of it
        (12, 6, 3, 4, 1, "softmax"),
        (64, 8, 4, 8, 2, "sqrtsoftplus"),
        (256, 8, 4, 8, 2, "sigmoid"),
        (160, 16, 5, 40, 5, "softmax"),
    ],
)
def test_groups_by_brute_force(adapter, rng, experts, groups, kept, top_k, score_k, score) -> None:
    config = RouterConfig(
        experts, top_k, score=score, num_groups=groups, group_top_k=kept, group_score_k=score_k
    )
    # Scores of a permutation are distinct; sums of a few may still tie, which `decided` sorts out.
    draw = lambda: rng.permutation(experts) * (8 / experts) - 4
    logits = decided(rng, 3, config, draw=draw)
    routing = run(adapter, logits, config)
    z = logits.astype("f8")
    v = {
        "softmax": np.exp(z) / np.exp(z).sum(1, keepdims=True),
        "sigmoid": sigmoid(z),
        "sqrtsoftplus": np.sqrt(np.log1p(np.exp(z))),
    }[score]
    want = [best_by_brute_force(row, config) for row in v]
    np.testing.assert_array_equal(routing.indices, want)
    Exact(logits, config).check(routing)


@pytest.mark.parametrize(
    "experts, kept, top_k, score",
    [
        (8, 4, 4, "softmax"),
        (8, 4, 4, "sigmoid"),
        (5, 3, 3, "sqrtsoftplus"),
        (64, 9, 6, "softmax"),
        (1, 1, 1, "sigmoid"),
    ],
)
def test_groups_of_one_expert_are_plain_routing(adapter, rng, experts, kept, top_k, score) -> None:
    """A group smaller than group_score_k is worth what it has; the same bits, gradients too."""
    plain = RouterConfig(experts, top_k, score=score)
    grouped = RouterConfig(experts, top_k, score=score, num_groups=experts, group_top_k=kept)
    assert grouped.group_score_k == 2
    logits = normal(rng, (5, experts))
    want, got = run(adapter, logits, plain), run(adapter, logits, grouped)
    for name, value in vars(want).items():
        same_bits(getattr(got, name), value, name)
    cotangents = [rng.normal(size=(5, top_k)), rng.normal(size=(1, experts)), np.ones(1)]
    same_bits(*(pull_back(adapter, logits, c, cotangents) for c in (plain, grouped)))


@pytest.mark.parametrize("experts", [256, 60])
@pytest.mark.parametrize("top_k", [8, 3])
def test_one_group_is_plain_routing(adapter, rng, experts, top_k) -> None:
    """With one group, or all groups kept; a smaller K takes the first of a larger one's ids."""
    logits = normal(rng, (4, experts))
    want = run(adapter, logits, RouterConfig(experts, 8))
    for groups, kept in ((1, 1), (4, 4), (experts, experts)):
        config = RouterConfig(experts, top_k, num_groups=groups, group_top_k=kept)
        routing = run(adapter, logits, config)
        np.testing.assert_array_equal(routing.indices, want.indices[:, :top_k])
    ranked = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(routing.indices, ranked)


@pytest.mark.parametrize("experts, groups, kept", [(8, 4, 2), (256, 8, 1), (6, 3, 3), (9, 9, 5)])
def test_kept_groups_may_hold_exactly_k_experts(adapter, rng, experts, groups, kept) -> None:
    size = experts // groups
    config = RouterConfig(experts, kept * size, num_groups=groups, group_top_k=kept)
    routing = run(adapter, normal(rng, (6, experts)), config)
    for row in routing.indices:
        assert len(set(row)) == kept * size and len(set(row // size)) == kept
    with pytest.raises(ValueError, match=f"top_k.*{kept * size}"):
        RouterConfig(experts, kept * size + 1, num_groups=groups, group_top_k=kept)


# -- limits of E and K -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "experts, top_k, dtype",
    [
        (1024, 32, "float32"),
        (2304, 8, "float32"),
        (2304, 33, "bfloat16"),
        (1023, 100, "float16"),
    ],
)
def test_many_experts_and_large_k(adapter, rng, experts, top_k, dtype) -> None:
    logits = normal(rng, (4, experts), dtype)
    routing = run(adapter, logits, RouterConfig(experts, top_k, select_on="logit"))
    ranked = np.argsort(-logits.astype("f8"), axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(routing.indices, ranked)
    Exact(logits, RouterConfig(experts, top_k, select_on="logit")).check(routing)
    assert routing.expert_counts.sum() == 4 * top_k


@pytest.mark.parametrize(
    "experts, normalize", [(1, True), (4, True), (4, False), (32, False), (33, True), (65, False)]
)
def test_k_equal_to_e_selects_every_expert_once(adapter, experts, normalize) -> None:
    """The weights are the softmax; their sum is constant, so its gradient is 0 to rounding."""
    z = np.arange(experts) % 4 + np.arange(experts) / 64
    logits = as_dtype(np.stack([z, z[::-1]]))
    config = RouterConfig(experts, experts, normalize=normalize)
    routing = run(adapter, logits, config)
    np.testing.assert_array_equal(np.sort(routing.indices, axis=1), [np.arange(experts)] * 2)
    weights = np.zeros((2, experts))
    np.put_along_axis(weights, routing.indices, routing.weights, 1)
    p = np.exp(logits.astype("f8"))
    p /= p.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, p, rtol=32 * U)
    if experts == 4:
        four = run(adapter, as_dtype([[0, 1, 2, 3]]), config).weights[0, ::-1]
        np.testing.assert_allclose(four, [0.0321, 0.0871, 0.2369, 0.6439], atol=5e-5)
    grad = pull_back(adapter, logits, config, [np.ones((2, experts)), None, None])
    np.testing.assert_allclose(grad, 0, atol=8 * U)


def test_k_above_e_is_refused_before_any_call() -> None:
    for experts in (1, 4, 300):
        with pytest.raises(ValueError, match=f"number of experts .{experts}., got {experts + 1}"):
            RouterConfig(experts, experts + 1)


# -- NaN and infinity ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "experts, top_k, groups, score, dtype",
    [
        (4, 2, 1, "softmax", "float32"),
        (4, 2, 1, "sigmoid", "bfloat16"),
        (4, 4, 1, "sqrtsoftplus", "float16"),
        (300, 40, 1, "sigmoid", "float32"),
        (300, 40, 1, "softmax", "bfloat16"),
        (64, 6, 8, "sqrtsoftplus", "float32"),
        (64, 6, 8, "softmax", "float16"),
    ],
)
def test_a_token_of_nans_has_distinct_ids_in_range(
    adapter, rng, experts, top_k, groups, score, dtype
) -> None:
    """And the token beside it is routed, weighted and trained as if it were alone."""
    config = RouterConfig(
        experts, top_k, score=score, num_groups=groups, group_top_k=min(groups, 3)
    )
    clean = normal(rng, (1, experts), dtype)
    if experts == 4:
        clean[0] = [3, 1, 2, 0]
    logits = np.concatenate([np.full_like(clean, np.nan), clean])
    bias = normal(rng, (experts,)) if experts == 300 else None
    options = {} if bias is None else {"bias": bias}
    routing, alone = run(adapter, logits, config, **options), run(adapter, clean, config, **options)
    for row in routing.indices:
        assert len(set(row)) == top_k and row.min() >= 0 and row.max() < experts
    if (experts, top_k) == (4, 2):
        np.testing.assert_array_equal(routing.indices[1], [0, 2])
    same_bits(routing.indices[1:], alone.indices)
    same_bits(routing.weights[1:], alone.weights)
    assert routing.expert_counts.sum() == routing.sequence_counts.sum() == 2 * top_k
    grad_weights = rng.normal(size=(2, top_k))
    both = pull_back(adapter, logits, config, [grad_weights, None, None], **options)
    one = pull_back(adapter, clean, config, [grad_weights[1:], None, None], **options)
    same_bits(both[1:], one)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_token_spoils_only_its_own_row_of_the_block(adapter, rng, bad) -> None:
    """Ids of NaN logits are used to read and write rows: they must be ids of experts."""
    config = RouterConfig(6, 3, score="sigmoid")
    x = normal(rng, (5, 8))
    x[2] = bad
    clean = np.where(np.arange(5)[:, None] == 2, 0, x).astype("f4")
    p = MoEParams(*map(adapter.array, block_parameters(rng, 6, 8, 12)))
    got, want = (
        adapter.numpy(adapter.functions.moe(adapter.array(v), p, config).output) for v in (x, clean)
    )
    good = [0, 1, 3, 4]
    same_bits(got[good], want[good])
    assert np.isfinite(got[good]).all()


# -- values and dtypes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "experts, top_k, score, dtype",
    [
        (256, 8, "softmax", "float32"),
        (256, 8, "softmax", "bfloat16"),
        (60, 4, "sigmoid", "bfloat16"),
        (60, 40, "sqrtsoftplus", "float32"),
    ],
)
def test_negative_logits_select_as_shifted_ones_do(
    adapter, rng, experts, top_k, score, dtype
) -> None:
    """Logits on a grid of 1/8, so that taking off 20 or 24 is exact in bfloat16 too."""
    config = RouterConfig(experts, top_k, score=score)
    logits = (rng.integers(-30, 32, (6, experts)) / 8).astype("f4")
    want = run(adapter, as_dtype(logits, dtype), config)
    ranked = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(want.indices, ranked)
    for shift in (20, 24):
        routing = run(adapter, as_dtype(logits - shift, dtype), config)
        np.testing.assert_array_equal(routing.indices, want.indices)
        if score == "softmax":
            # A moderate row is not shifted by its peak, so its exponentials round anew.
            np.testing.assert_allclose(routing.weights, want.weights, rtol=16 * U)
        Exact(as_dtype(logits - shift, dtype), config).check(routing)


@pytest.mark.parametrize(
    "score, normalize", [("softmax", True), ("softmax", False), ("sigmoid", True)]
)
def test_every_logits_dtype_gives_the_same_bits(adapter, rng, score, normalize) -> None:
    """Values that all dtypes hold; the gradient is the float32 one, rounded once."""
    config = RouterConfig(48, 5, score=score, normalize=normalize, num_groups=6, group_top_k=2)
    bias = (rng.integers(-8, 8, 48) / 16).astype("f4")
    logits = as_dtype(rng.integers(-64, 64, (9, 48)) / 16)
    cotangents = [rng.normal(size=(9, 5)), rng.normal(size=(1, 48)), np.ones(1)]
    want = run(adapter, logits, config, bias=bias)
    grad = pull_back(adapter, logits, config, cotangents, bias=bias)
    for dtype in ("bfloat16", "float16"):
        short = as_dtype(logits, dtype)
        routing = run(adapter, short, config, bias=bias)
        for name, value in vars(want).items():
            same_bits(getattr(routing, name), value, name)
        same_bits(pull_back(adapter, short, config, cotangents, bias=bias), as_dtype(grad, dtype))


@pytest.mark.parametrize(
    "experts, top_k, select_on, dtype",
    [
        (8, 1, "score", "float32"),
        (8, 1, "logit", "bfloat16"),
        (256, 8, "score", "bfloat16"),
        (256, 8, "logit", "float16"),
    ],
)
def test_biases_closer_than_bfloat16_decide(adapter, rng, experts, top_k, select_on, dtype) -> None:
    """In bfloat16, 256 biases from 6.817 on in steps of 0.001 would be nine different values."""
    order = rng.permutation(experts)
    bias = (6.817 + 0.001 * order).astype("f4")
    assert len(np.unique(as_dtype(bias, "bfloat16"))) <= 9
    config = RouterConfig(experts, top_k, score="sigmoid", select_on=select_on)
    routing = run(adapter, as_dtype(np.zeros((2, experts)), dtype), config, bias=bias)
    np.testing.assert_array_equal(routing.indices, [np.argsort(-order)[:top_k]] * 2)
    np.testing.assert_allclose(routing.weights, 1 / top_k, rtol=4 * U)


# -- ties ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0.0, -70.0])
@pytest.mark.parametrize("experts", [8, 64, 150])
def test_saturated_scores_tie(adapter, rng, experts, least) -> None:
    """From a logit of 18 on, 1 - sigmoid is less than half an ulp of 1: the scores are 1, and their
    lower ids win, beside a logit that makes the row moderate and beside one that does not."""
    logits = rng.uniform(-5, 5, (30, experts)).astype("f4")
    logits[:, -1] = least
    where = np.argsort(rng.random((30, experts - 1)), axis=1)[:, :4]
    high = rng.permuted(np.tile(np.array([20, 30, 40, 60], "f4"), (30, 1)), axis=1)
    np.put_along_axis(logits, where, high, axis=1)
    out = run(adapter, logits, RouterConfig(experts, 5, score="sigmoid", normalize=False))
    np.testing.assert_array_equal(out.indices[:, :4], np.sort(where, axis=1))
    np.testing.assert_array_equal(out.weights[:, :4], 1)
    rest = logits.copy()
    np.put_along_axis(rest, where, -100, axis=1)
    np.testing.assert_array_equal(out.indices[:, 4], rest.argmax(axis=1))
    # Their slopes are not lost with 1 - s: d s / dz = s (1 - s), to 5 roundings.
    config = RouterConfig(experts, 5, score="sigmoid", normalize=False)
    grad = pull_back(adapter, logits, config, (np.ones((30, 5)), None, None))
    slope = np.exp(-high.astype("f8")) / (1 + np.exp(-high.astype("f8"))) ** 2
    got = np.take_along_axis(grad, where, axis=1)
    np.testing.assert_allclose(got, slope, rtol=5 * U)


@pytest.mark.parametrize("experts, top_k, levels", [(8, 2, 1), (8, 2, 2), (64, 6, 3), (33, 33, 2)])
def test_recomputed_ties_select_the_same_experts(adapter, rng, experts, top_k, levels) -> None:
    """All-zero router weights, and few distinct ones: 20 checkpointed backward passes see the ids
    of the forward pass."""
    config = RouterConfig(experts, top_k)
    logits = rng.integers(0, levels, (64, experts)).astype("f4")
    seen, backward = recording(adapter, config)
    want = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    first = backward(logits)
    for _ in range(19):
        same_bits(backward(logits), first)
    assert len(seen) >= 40  # forward and recompute
    for ids in seen:
        np.testing.assert_array_equal(ids, want)


def recording(adapter, config: RouterConfig):
    """A list, and a checkpointed backward pass that adds to it the ids of every evaluation."""
    seen: list[np.ndarray] = []
    f = adapter.functions
    ramp = np.arange(1.0, config.top_k + 1, dtype="f4")
    if adapter.name == "torch":
        from torch.utils.checkpoint import checkpoint

        def local(z):
            routing = f.route(z, config)
            seen.append(adapter.numpy(routing.indices))
            return (routing.weights * adapter.array(ramp)).sum()

        def backward(z):
            leaf = adapter.array(z).requires_grad_()
            checkpoint(local, leaf, use_reentrant=False).backward()
            return adapter.numpy(leaf.grad)

        return seen, backward

    import jax

    def local(z):
        routing = f.route(z, config)
        jax.debug.callback(lambda ids: seen.append(np.array(ids)), routing.indices)
        return (routing.weights * ramp).sum()

    # Recompute the ids rather than keep them.
    policy = jax.checkpoint_policies.nothing_saveable
    gradient = jax.jit(jax.grad(jax.checkpoint(local, policy=policy)))

    def backward(z):
        grad = np.asarray(gradient(z))
        jax.effects_barrier()
        return grad

    return seen, backward


def test_the_reference_sees_an_undecided_row() -> None:
    """`decided` must drop rows whose order hangs on a rounding."""
    attributes = RouterConfig(3, 1).attributes(num_sequences=1)
    assert not is_decided(np.array([0.0, 1e-9, -5]), attributes, None)
