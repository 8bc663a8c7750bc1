# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the selected experts weigh: where the softmax stands, normalisation, bias, scale, huge
logits; the weights and their gradients, on both front ends.
"""

from __future__ import annotations

import numpy as np
import pytest
from adapters import bits
from duomoe import RouterConfig
from oracle_bounds import U
from oracle_cases import SCORES
from router_checks import Exact, as_dtype, decided, losses, pull_back, run, same_bits
from samples import normal

ROW = [2.0, 1, 0, -1]


def softmax(z):
    p = np.exp(np.asarray(z, np.float64) - np.max(z))
    return p / p.sum()


# -- the bias --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "experts, top_k, score, normalize, select_on",
    [
        (4, 2, "sigmoid", True, "score"),
        (128, 8, "sigmoid", True, "score"),
        (128, 8, "softmax", True, "logit"),
        (33, 9, "sqrtsoftplus", False, "score"),
        (16, 1, "softmax", False, "score"),
    ],
)
def test_the_bias_selects_and_does_not_weigh(
    adapter, rng, experts, top_k, score, normalize, select_on
) -> None:
    """Weights and gradients have the bits of the same ids without a bias; the bias gets none."""
    config = RouterConfig(experts, top_k, score=score, normalize=normalize, select_on=select_on)
    bias = np.array([2, 0, 0, 1.5], "f4") if experts == 4 else normal(rng, (experts,))
    logits = as_dtype([[0, 1, 2, -1]]) if experts == 4 else decided(rng, 6, config, bias)
    biased, plain = run(adapter, logits, config, bias=bias), run(adapter, logits, config)
    assert np.any(biased.indices != plain.indices)
    replayed = run(adapter, logits, config, indices=biased.indices)
    same_bits(replayed.weights, biased.weights)
    Exact(logits, config, bias=bias).check(biased)
    if experts == 4:
        np.testing.assert_array_equal(biased.indices, [[0, 3]])
        np.testing.assert_allclose(biased.weights, [[0.6502, 0.3498]], atol=5e-5)

    f = adapter.functions
    _, pull = adapter.vjp(lambda z, b: [f.route(z, config, bias=b).weights], logits, bias)
    cotangent = normal(rng, (len(logits), top_k))
    grad, grad_bias = pull(cotangent)
    assert not bits(grad_bias).any()
    same_bits(
        grad,
        pull_back(adapter, logits, config, [cotangent, None, None], indices=biased.indices),
    )


# -- where the softmax stands ----------------------------------------------------------------------

ALL, RENORMALIZED, SELECTED = (
    {"normalize": False},
    {"normalize": True},
    {"score_scope": "selected", "select_on": "logit"},
)


@pytest.mark.parametrize(
    "mode, weights",
    [(ALL, [0.6439, 0.2369]), (RENORMALIZED, [0.7311, 0.2689]), (SELECTED, [0.7311, 0.2689])],
    ids=["all", "renormalized", "selected"],
)
@pytest.mark.parametrize("shift", [0, -5])
def test_three_places_of_the_softmax(adapter, mode, weights, shift) -> None:
    """Over all experts, renormalised, over the selected. Without renormalisation the logits that
    are not selected get a gradient too."""
    logits = as_dtype([ROW, ROW[::-1]]) + np.float32(shift)
    config = RouterConfig(4, 2, **mode)
    routing = run(adapter, logits, config)
    np.testing.assert_array_equal(routing.indices, [[0, 1], [3, 2]])
    np.testing.assert_allclose(routing.weights, [weights] * 2, atol=5e-5)
    upstream = np.array([0.3, -0.8])
    over = np.arange(4) if mode is ALL else np.arange(2)
    p = softmax(np.array(ROW)[over])
    jacobian = np.diag(p) - np.outer(p, p)  # d p_i / d z_j
    want = np.zeros(4)
    want[over] = upstream @ jacobian[:2]
    got = pull_back(adapter, logits, config, [np.tile(upstream, (2, 1)), None, None])
    np.testing.assert_allclose(got, [want, want[::-1]], atol=4 * U)
    unselected = got[[0, 0, 1, 1], [2, 3, 0, 1]]
    assert np.all(unselected != 0) if mode is ALL else not bits(unselected).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_renormalised_and_selected_are_one_function(adapter, rng, dtype) -> None:
    """Softmax over all, renormalised, is the softmax over the selected, whatever the logits."""
    logits = as_dtype(rng.normal(size=(9, 40)) * [[1], [1], [1], [5], [5], [30], [30], [99], [99]])
    logits = as_dtype(logits, dtype)
    got = run(adapter, logits, RouterConfig(40, 6, **SELECTED))
    same_bits(got.weights, run(adapter, logits, RouterConfig(40, 6, select_on="logit")).weights)
    for z, ids, weights in zip(logits.astype("f8"), got.indices, got.weights, strict=True):
        np.testing.assert_allclose(weights, softmax(z[ids]), rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize(
    "score, top_k", [("softmax", 2), ("softmax", 1), ("sigmoid", 3), ("sqrtsoftplus", 2)]
)
def test_without_normalisation_the_weights_are_scores_not_logits(adapter, score, top_k) -> None:
    logits = as_dtype([[-3, -1, -2, -4], [-30, -10, -20, -40]])
    config = RouterConfig(4, top_k, score=score, normalize=False)
    routing = run(adapter, logits, config)
    np.testing.assert_array_equal(routing.indices, [[1, 2, 0][:top_k]] * 2)
    z = logits.astype("f8")
    s = {
        "softmax": np.stack([softmax(row) for row in z]),
        "sigmoid": 1 / (1 + np.exp(-z)),
        "sqrtsoftplus": np.sqrt(np.log1p(np.exp(z))),
    }[score]
    np.testing.assert_allclose(routing.weights, s[:, [1, 2, 0][:top_k]], rtol=64 * U)
    if score == "softmax":
        np.testing.assert_allclose(routing.weights[0, :2], [0.6439, 0.2369][:top_k], atol=5e-5)
    cotangents = [np.array([[1.0, -2, 3][:top_k]] * 2), None, None]
    exact = Exact(logits, config)
    exact.check(routing)
    exact.check_gradient(pull_back(adapter, logits, config, cotangents), cotangents)


# -- K = 1 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "score, tokens", [("softmax", 2), ("sigmoid", 1), ("sqrtsoftplus", 5), ("sigmoid", 2)]
)
def test_one_expert_is_normalised_within_its_token(adapter, rng, score, tokens) -> None:
    """[T, 1] weights, each divided by its own sum, never by that over the tokens."""
    config = RouterConfig(6, 1, score=score, scale=2.5)
    logits = normal(rng, (tokens, 6))
    routing = run(adapter, logits, config)
    assert routing.weights.shape == (tokens, 1)
    np.testing.assert_array_equal(routing.weights, np.full((tokens, 1), 2.5, "f4"))


@pytest.mark.parametrize("score", SCORES)
def test_one_normalised_expert_trains_the_router_through_the_losses_only(adapter, score) -> None:
    """Weight 1 and gradient exactly 0; without normalisation, the slope of the score."""
    logits = as_dtype([[1, 0.5, -1, 0]])
    ones = [np.ones((1, 1)), None, None]
    for normalize in (True, "if_k_gt_1", False):
        config = RouterConfig(4, 1, score=score, normalize=normalize)
        grad = pull_back(adapter, logits, config, ones)
        if normalize is True:
            assert not bits(np.abs(grad)).any()
            assert np.abs(losses(adapter, logits, config)[2]).min() > 1e-3
            continue
        Exact(logits, config).check_gradient(grad, ones)
        if score == "softmax":
            np.testing.assert_allclose(grad[0], [0.2493, -0.1363, -0.0304, -0.0827], atol=5e-5)
    two = run(adapter, logits, RouterConfig(4, 2, score=score, normalize="if_k_gt_1"))
    np.testing.assert_allclose(two.weights.sum(), 1, rtol=4 * U)


# -- scale -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "score, given", [("softmax", False), ("sigmoid", True), ("sqrtsoftplus", False)]
)
def test_the_scale_is_applied_once_and_to_weights_only(adapter, rng, score, given) -> None:
    """Weights sum to it; losses keep their bits; gradients through the weights carry it once."""
    logits = normal(rng, (7, 12))
    options = {"indices": rng.integers(0, 12, (7, 2)).astype("i4")} if given else {}
    one, scaled = (RouterConfig(12, 2, score=score, scale=s) for s in (1.0, 2.5))
    want, got = (run(adapter, logits, c, **options) for c in (one, scaled))
    np.testing.assert_allclose(got.weights.sum(axis=1), 2.5, rtol=4 * U)
    np.testing.assert_allclose(got.weights, 2.5 * want.weights.astype("f8"), rtol=2 * U)
    for name in ("indices", "score_sums", "logsumexp_sq", "sequence_counts"):
        same_bits(getattr(got, name), getattr(want, name), name)
    for a, b in zip(*(losses(adapter, logits, c, **options) for c in (one, scaled)), strict=True):
        same_bits(a, b)
    cotangents = [rng.normal(size=(7, 2)), None, None]
    grads = [pull_back(adapter, logits, c, cotangents, **options) for c in (one, scaled)]
    np.testing.assert_allclose(
        grads[1], 2.5 * grads[0], rtol=64 * U, atol=16 * U * np.abs(grads[1]).max()
    )
    raw = RouterConfig(12, 2, score=score, scale=2.5, normalize=False)
    Exact(logits, raw, **options).check(run(adapter, logits, raw, **options))


# -- huge logits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize, dtype", [(True, "float32"), (False, "bfloat16")])
@pytest.mark.parametrize("score", SCORES)
def test_huge_logits_give_finite_weights_and_gradients(adapter, score, normalize, dtype) -> None:
    """No inf / inf, forward or backward; values that every dtype holds exactly."""
    top = 9984.0  # with a neighbour at 64 in bfloat16
    rows = [
        [top, top - 64, 0, -top],
        [-top, -top, -top + 64, -top],
        [top, top, top, top],
        [0, 0, 0, -top],
        [100, -100, 99, -99],
    ]
    logits = as_dtype(rows, dtype)
    np.testing.assert_array_equal(logits.astype("f8"), rows)
    config = RouterConfig(4, 2, score=score, normalize=normalize, select_on="logit")
    routing = run(adapter, logits, config)
    np.testing.assert_array_equal(routing.indices, [[0, 1], [2, 0], [0, 1], [0, 1], [0, 2]])
    if normalize:
        np.testing.assert_allclose(routing.weights.sum(axis=1), 1, rtol=4 * U)
    exact = Exact(logits, config)
    exact.check(routing)
    for weights in (np.ones((5, 2)), np.array([[1.0, -2]] * 5)):
        cotangents = [weights, np.array([[1.0, -1, 2, 0]]), None]
        grad = pull_back(adapter, logits, config, cotangents)
        assert np.isfinite(grad).all()
        exact.check_gradient(grad, cotangents)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("level", [1e4, 3e38])
def test_neighbours_at_a_huge_level_share_by_their_difference(adapter, score, level) -> None:
    """In float32: [1e4, 1e4 - 1] weigh .731 and .269 by softmax, and as good as equal else."""
    logits = as_dtype([[level, level - 1, 0, -level]])
    config = RouterConfig(4, 2, score=score)
    routing = run(adapter, logits, config)
    np.testing.assert_array_equal(routing.indices, [[0, 1]])
    apart = score == "softmax" and level < 1e9
    want = softmax([0, -1]) if apart else [0.5, 0.5]
    np.testing.assert_allclose(routing.weights, [want], rtol=1e-4)
    if apart:
        np.testing.assert_allclose(routing.weights, [[0.7310586, 0.2689414]], atol=1e-7)
    for weights in (np.ones((1, 2)), np.array([[1.0, 0]])):
        grad = pull_back(adapter, logits, config, [weights, np.ones((1, 4)), None])
        assert np.isfinite(grad).all()
        if apart:  # a softmax does not change when all logits shift
            np.testing.assert_allclose(grad.sum(), 0, atol=8 * U)


def test_optional_arguments_left_out_and_none_are_the_same(adapter, rng) -> None:
    """Forward and backward; and so are their neutral values."""
    config = RouterConfig(8, 2, score="sigmoid")
    logits, cotangents = normal(rng, (5, 8)), [normal(rng, (5, 2)), normal(rng, (1, 8)), None]
    want, grad = run(adapter, logits, config), pull_back(adapter, logits, config, cotangents)
    for options in (
        {"bias": None, "indices": None, "token_mask": None},
        {"bias": np.zeros(8, "f4"), "token_mask": np.ones(5, bool), "num_sequences": 1},
        {"indices": want.indices},
    ):
        got = run(adapter, logits, config, **options)
        for name, value in vars(want).items():
            same_bits(getattr(got, name), value, name)
        same_bits(pull_back(adapter, logits, config, cotangents, **options), grad)


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("eps", [1e-20, 0.5])
def test_a_row_without_a_finite_logit_adds_nothing(adapter, rng, score, eps: float) -> None:
    """Weights, statistics and gradients of an excluded row are 0; the losses stay those of the
    other tokens' sums."""
    config = RouterConfig(6, 2, score=score, eps=eps)
    logits = rng.normal(size=(5, 6)).astype("f4")
    logits[2] = -np.inf
    out, others = run(adapter, logits, config), run(adapter, np.delete(logits, 2, 0), config)
    np.testing.assert_array_equal(out.weights[2], 0)
    np.testing.assert_array_equal(np.delete(out.weights, 2, 0), others.weights)
    np.testing.assert_allclose(out.score_sums, others.score_sums, rtol=1e-6)
    cotangents = [np.ones((5, 2), "f4"), rng.normal(size=(1, 6)).astype("f4"), None]
    grad = pull_back(adapter, logits, config, cotangents)
    np.testing.assert_array_equal(grad[2], 0)
    assert np.isfinite(grad).all() and np.abs(np.delete(grad, 2, 0)).min() > 0


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("normalize", [True, False])
def test_finite_weights_beside_a_nan_keep_their_gradient(adapter, score, normalize) -> None:
    """Where the loss asks for weights only, NaN shares do not enter. Neither row is moderate."""
    config = RouterConfig(4, 2, score=score, normalize=normalize)
    logits = np.array([[np.nan, 1, 2, 3], [-100, 1, 2, 3]], "f4")
    out = run(adapter, logits, config)
    np.testing.assert_array_equal(out.indices, [[3, 2], [3, 2]])
    np.testing.assert_array_equal(out.weights[0], out.weights[1])
    cotangent = np.array([[1, -2], [1, -2]], "f4")
    grad = pull_back(adapter, logits, config, [cotangent, None, None])
    np.testing.assert_array_equal(grad[0, 1:], grad[1, 1:])
    assert grad[0, 2] != 0 and grad[0, 0] == 0
    asked = pull_back(adapter, logits, config, [cotangent, np.ones((1, 4), "f4"), None])
    assert np.isnan(asked[0]).any() and np.isfinite(asked[1]).all()


def test_the_largest_logits_have_a_finite_z_loss_gradient(adapter) -> None:
    """2 logsumexp alone would overflow; times a small cotangent it does not."""
    logits = np.array([[2e38, 0, 0, 0], [np.finfo("f4").min] * 4], "f4")
    g = np.full(1, 1e-30, "f4")
    grad = pull_back(adapter, logits, RouterConfig(4, 2), [None, None, g])
    want = np.zeros((2, 4))
    want[0, 0] = 2 * 2e38 * 1e-30
    want[1] = 2 * float(np.finfo("f4").min) * 1e-30 / 4
    np.testing.assert_allclose(grad, want, rtol=1e-6)
