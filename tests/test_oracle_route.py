# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of the router that hold by themselves, on both front ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from adapters import DTYPES, JaxAdapter, TorchAdapter, bits
from duomoe import RouterConfig, oracle
from oracle_bounds import U
from oracle_cases import SCORES, route_bwd, routing

Adapter = JaxAdapter | TorchAdapter
Outputs = dict[str, np.ndarray]


def route(
    adapter: Adapter, logits: Any, top_k: int, *, dtype: str = "float32", **options: Any
) -> Outputs:
    """The op on `logits` [T, E]; options that are arrays are inputs."""
    logits = np.asarray(logits).astype(DTYPES[dtype])
    names = ("bias", "given_indices", "token_mask")
    inputs = {n: np.asarray(options.pop(n)) for n in names if n in options}
    attributes = RouterConfig(logits.shape[1], top_k, **options).attributes(num_sequences=1)
    return adapter.call("route", {"logits": logits, **inputs}, attributes)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "experts, top_k, value", [(8, 2, 0), (256, 8, 3), (64, 40, -7), (5, 5, -200)]
)
def test_equal_logits_select_the_first_ids(
    adapter: Adapter, score: str, experts: int, top_k: int, value: float
) -> None:
    out = route(adapter, np.full((3, experts), value), top_k, score=score)
    np.testing.assert_array_equal(out["indices"], [np.arange(top_k)] * 3)
    np.testing.assert_allclose(out["weights"], 1 / top_k, rtol=4 * U)


def best_first(values: np.ndarray) -> np.ndarray:
    """Positions by (value descending, position ascending), along the last axis."""
    return np.argsort(-values, axis=-1, kind="stable")


def grid(tokens: int, experts: int, levels: int) -> np.ndarray:
    """Logits of so few levels that sums of them are exact and many are equal."""
    rng = np.random.default_rng([tokens, experts, levels])
    return rng.integers(-levels, levels, (tokens, experts)) / 16


@pytest.mark.parametrize("levels", [1, 4, 2000])
@pytest.mark.parametrize(
    "experts, top_k",
    [(16, 3), (17, 9), (33, 32), (64, 33), (72, 8), (128, 16), (257, 17), (384, 32), (1000, 12)],
)
def test_selection_is_a_stable_sort(
    adapter: Adapter, experts: int, top_k: int, levels: int
) -> None:
    z = grid(40, experts, levels)
    out = route(adapter, z, top_k, select_on="logit")
    np.testing.assert_array_equal(out["indices"], best_first(z)[:, :top_k])


@pytest.mark.parametrize("levels", [1, 4, 2000])
@pytest.mark.parametrize("group_score_k", [1, 2, 3])
@pytest.mark.parametrize(
    "experts, top_k, groups, kept",
    [
        (24, 3, 24, 5),
        (60, 8, 20, 3),
        (64, 8, 32, 6),
        (64, 6, 8, 4),
        (96, 10, 6, 5),
        (160, 6, 8, 3),
        (256, 8, 8, 4),
        (320, 20, 40, 36),
        (1000, 33, 125, 70),
    ],
)
def test_groups_are_chosen_by_a_stable_sort(
    adapter: Adapter,
    experts: int,
    top_k: int,
    groups: int,
    kept: int,
    group_score_k: int,
    levels: int,
) -> None:
    z = grid(40, experts, levels)
    options = {"num_groups": groups, "group_top_k": kept, "group_score_k": group_score_k}
    out = route(adapter, z, top_k, select_on="logit", **options)
    members = z.reshape(40, groups, -1)
    values = -np.sort(-members, axis=-1)[:, :, :group_score_k].sum(-1)
    excluded = np.ones((40, groups), bool)
    np.put_along_axis(excluded, best_first(values)[:, :kept], False, axis=1)
    ranked = np.where(excluded[:, :, None], -np.inf, members).reshape(z.shape)
    np.testing.assert_array_equal(out["indices"], best_first(ranked)[:, :top_k])


def test_minus_zero_equals_zero(adapter: Adapter) -> None:
    out = route(adapter, [[0.0, -0.0, 0.0, -0.0, -1]], 4, select_on="logit")
    np.testing.assert_array_equal(out["indices"], [[0, 1, 2, 3]])


def test_excluded_experts_stay_out_when_all_values_are_negative(adapter: Adapter) -> None:
    logits = [[-9, -8, -7, -6, -1, -2, -3, -4.0]]
    options = {"select_on": "logit", "num_groups": 2, "group_top_k": 1, "group_score_k": 2}
    out = route(adapter, logits, 4, **options)
    np.testing.assert_array_equal(out["indices"], [[4, 5, 6, 7]])


def test_unbiased_counts_ignore_bias_and_groups(adapter: Adapter) -> None:
    logits = [[4, 3, 2, 1, 0, 0, 0, 0.0]]
    bias = np.array([0, 0, 0, 0, 9, 9, 0, 0], "f4")
    for counts, want in (
        ("actual", [0, 0, 0, 0, 1, 1, 0, 0]),
        ("unbiased", [1, 1, 0, 0, 0, 0, 0, 0]),
    ):
        out = route(adapter, logits, 2, bias=bias, counts=counts, num_groups=2, group_top_k=1)
        np.testing.assert_array_equal(out["sequence_counts"], [want])
        np.testing.assert_array_equal(out["expert_counts"], [0, 0, 0, 0, 1, 1, 0, 0])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("level", [1e4, 100, 0, -50, -87, -95, -104, -112, -119, -130, -200, -1e4])
def test_weights_sum_to_scale_for_every_finite_logit(
    adapter: Adapter, score: str, level: float
) -> None:
    logits = level - np.arange(16).reshape(2, 8) / 2
    inputs = {"logits": logits.astype("f4")}
    options = {"score": score, "scale": 2.5, "select_on": "logit"}
    attributes = RouterConfig(8, 3, **options).attributes(num_sequences=1)
    out = adapter.call("route", inputs, attributes)
    np.testing.assert_array_equal(out["indices"], [[0, 1, 2]] * 2)
    np.testing.assert_allclose(out["weights"].sum(axis=1), 2.5, rtol=8 * U)
    np.testing.assert_allclose(out["score_sums"].sum(), 2, rtol=16 * U)
    got = adapter.call("route_bwd", *route_bwd(inputs, attributes))["grad_logits"]
    assert np.isfinite(got).all()


@pytest.mark.parametrize("score", SCORES)
def test_minus_infinity_ranks_below_every_finite_value(adapter: Adapter, score: str) -> None:
    inf = np.inf
    bias = np.array([100, 0, -100, 0, 0, 50], "f4")
    out = route(adapter, [[-inf, 0, -1e4, 1, 2, -inf]], 6, score=score, bias=bias)
    np.testing.assert_array_equal(out["indices"], [[4, 3, 1, 2, 0, 5]])
    np.testing.assert_array_equal(out["weights"][0, 4:], [0, 0])
    assert np.isfinite(out["weights"]).all() and np.isfinite(out["score_sums"]).all()


def test_minus_infinity_gets_gradient_zero(adapter: Adapter) -> None:
    for score in SCORES:
        logits = np.array([[1, -np.inf, 0.5, -np.inf]], "f4")
        attributes = RouterConfig(4, 3, score=score).attributes(num_sequences=1)
        grad = adapter.call("route_bwd", *route_bwd({"logits": logits}, attributes))["grad_logits"]
        assert np.isfinite(grad).all()
        np.testing.assert_array_equal(grad[0, [1, 3]], [0, 0])


@pytest.mark.parametrize("select_on", ["score", "logit"])
def test_nan_ranks_below_minus_infinity(adapter: Adapter, select_on: str) -> None:
    logits = [[np.nan, -np.inf, 1, np.nan, 2]]
    out = route(adapter, logits, 5, score="sigmoid", select_on=select_on)
    np.testing.assert_array_equal(out["indices"], [[4, 2, 1, 0, 3]])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_leaves_the_others_alone(
    adapter: Adapter, score: str, groups: int, bad: float
) -> None:
    inputs, attributes = routing(
        7, 16, 4, score=score, num_groups=groups, group_top_k=min(groups, 2), num_sequences=7
    )
    spoilt = {**inputs, "logits": inputs["logits"].copy()}
    spoilt["logits"][2] = bad
    spoilt["logits"][5, ::3] = bad
    good = [0, 1, 3, 4, 6]
    want, got = (adapter.call("route", i, attributes) for i in (inputs, spoilt))
    for name in ("weights", "indices", "score_sums", "logsumexp_sq", "sequence_counts"):
        np.testing.assert_array_equal(bits(got[name][good]), bits(want[name][good]), err_msg=name)
    for row in got["indices"]:
        assert len(set(row)) == 4 and row.min() >= 0 and row.max() < 16
    assert got["expert_counts"].sum() == 7 * 4
    if score == "softmax":
        assert np.isnan(got["weights"][[2, 5]]).all()
    backward_inputs, backward_attributes = route_bwd(inputs, attributes)
    gradients = [
        adapter.call("route_bwd", {**backward_inputs, "logits": i["logits"]}, backward_attributes)
        for i in (inputs, spoilt)
    ]
    want_grad, got_grad = (g["grad_logits"][good] for g in gradients)
    np.testing.assert_array_equal(bits(got_grad), bits(want_grad))


def test_masked_tokens_count_nowhere(adapter: Adapter) -> None:
    inputs, attributes = routing(65, 33, 4, num_sequences=5)
    inputs["token_mask"] = np.arange(65) % 3 != 0
    inputs["logits"][0] = np.nan  # masked
    out = adapter.call("route", inputs, attributes)
    masked = ~inputs["token_mask"]
    assert (out["indices"][masked] == -1).all() and not bits(out["weights"][masked]).any()
    assert out["num_tokens"].sum() == (~masked).sum()
    assert out["expert_counts"].sum() == 4 * (~masked).sum()
    assert np.isfinite(out["score_sums"]).all()
    live = {**inputs, "logits": np.nan_to_num(inputs["logits"])}
    given, rest = route_bwd(live, attributes)
    grad = adapter.call("route_bwd", {**given, "logits": inputs["logits"]}, rest)["grad_logits"]
    assert not bits(grad[masked]).any() and np.isfinite(grad).all()


def test_given_ids_out_of_range_are_unused_and_repeats_are_two_slots(adapter: Adapter) -> None:
    given = np.array([[2, 2, -1], [4, 0, 2**31 - 1], [-(2**31), 9, -7]], "i4")
    out = route(adapter, np.zeros((3, 4)), 3, given_indices=given)
    np.testing.assert_array_equal(out["indices"], [[2, 2, -1], [-1, 0, -1], [-1, -1, -1]])
    np.testing.assert_array_equal(out["weights"], [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(out["expert_counts"], [1, 0, 2, 0])


def test_slices_make_the_whole(adapter: Adapter) -> None:
    """Two shards of 20 tokens in 4 sequences of 9 tokens: the last 4 tokens are padding."""
    inputs, attributes = routing(36, 8, 2, num_sequences=4)
    whole = adapter.call("route", inputs, attributes)
    padded = np.concatenate([inputs["logits"], np.full((4, 8), np.nan, "f4")])
    parts = [
        adapter.call(
            "route",
            {"logits": padded[first : first + 20], "first_token": np.int32(first).reshape(())},
            {**attributes, "total_tokens": 36},
        )
        for first in (0, 20)
    ]
    for name in ("weights", "indices"):
        joined = np.concatenate([p[name] for p in parts])
        np.testing.assert_array_equal(bits(joined[:36]), bits(whole[name]))
        assert (joined[36:] == {"weights": 0, "indices": -1}[name]).all()
    for name in ("expert_counts", "sequence_counts", "num_tokens"):
        np.testing.assert_array_equal(parts[0][name] + parts[1][name], whole[name])


@pytest.mark.parametrize("score", SCORES)
def test_given_ids_far_below_the_largest_logit_share_by_their_own_difference(
    adapter: Adapter, score: str
) -> None:
    """Even where the difference from the row's largest logit rounds or overflows."""
    logits = np.array([[3e38, -3e38, -3e38], [1e6, -200, -201], [1e6, 0.01, 0]], "f4")
    given = np.array([[1, 2]] * 3, "i4")
    out = route(adapter, logits, 2, score=score, given_indices=given)
    attributes = RouterConfig(3, 2, score=score).attributes(num_sequences=1)
    want = oracle.route(logits=logits, given_indices=given, **attributes)["weights"]
    np.testing.assert_allclose(want.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(out["weights"], want, rtol=32 * U)


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_scores_are_within_three_ulps(adapter: Adapter, score: str) -> None:
    """What docs/numerics.md says: with one expert the weight is the score."""
    rng = np.random.default_rng(0)
    z = np.concatenate([rng.uniform(-90, 90, 100_000), rng.uniform(-8, 8, 200_000)]).astype("f4")
    config = RouterConfig(1, 1, score=score, normalize=False)
    weights = adapter.numpy(adapter.functions.route(adapter.array(z[:, None]), config).weights)[
        :, 0
    ]
    x = z.astype(np.float64)
    want = 1 / (1 + np.exp(-x)) if score == "sigmoid" else np.sqrt(np.logaddexp(0, x))
    normal = want >= np.finfo("f4").tiny
    ulps = np.abs(weights - want) / np.spacing(want.astype("f4"))
    assert ulps[normal].max() < 3
    assert ulps[normal].max() > 1.0  # the claim is about this much, not a loose bound
