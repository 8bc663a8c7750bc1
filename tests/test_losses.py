# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The auxiliary losses: their scale, what counts in them, padding, sequences and accumulation over
micro-batches; values and gradients, on both front ends.
"""

from __future__ import annotations

import numpy as np
import pytest
from adapters import bits
from duomoe import RouterConfig
from oracle_bounds import U, assert_close
from oracle_cases import SCORES
from router_checks import Exact, as_dtype, decided, losses, run, same_bits
from samples import CASE_LOGITS, normal

SOFTMAX = np.exp([2.0, 1, 0, -1]) / np.exp([2.0, 1, 0, -1]).sum()


def cyclic(experts: int, top_k: int, rounds: int = 1, gap: float = 3.0) -> np.ndarray:
    """Balanced logits: token t prefers the K experts from t on."""
    tokens = np.arange(experts * rounds)[:, None]
    return as_dtype(gap * ((np.arange(experts) - tokens) % experts < top_k))


# -- scale -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens, shift", [(4, 0), (1, 40), (1000, 0)])
def test_the_loss_of_equal_rows_does_not_depend_on_their_number(adapter, tokens, shift) -> None:
    """1.7615942 by hand, the softmax taken once (twice would be 1.19785); a row's gradient is its
    share of the whole."""
    config = RouterConfig(4, 2)
    logits = np.tile(CASE_LOGITS[:1] + np.float32(shift), (tokens, 1))
    balance, z, grad = losses(adapter, logits, config, upstream=(2.0, 0.0))
    np.testing.assert_allclose(balance, 1.7615942, rtol=1e-6)
    np.testing.assert_allclose(z, (shift + np.log(np.exp([2.0, 1, 0, -1]).sum())) ** 2, rtol=1e-6)
    by_score = np.array([1.0, 1, 0, 0]) * 4 / tokens  # 2 * E / (K T^2) * counts
    want = SOFTMAX * (by_score - SOFTMAX @ by_score)
    np.testing.assert_allclose(grad, np.tile(want, (tokens, 1)), atol=8 * U * 4 / tokens)
    assert np.all(grad[:, 2:] != 0)  # experts that no token chose


@pytest.mark.parametrize(
    "score, experts, top_k",
    [
        ("softmax", 4, 1),
        ("softmax", 4, 4),
        ("sigmoid", 4, 2),
        ("sigmoid", 12, 5),
        ("sqrtsoftplus", 256, 8),
    ],
)
def test_perfect_balance_gives_the_coefficient(adapter, score, experts, top_k) -> None:
    """For every K and score; sigmoid scores of equal logits add up to 1, not to E / 2."""
    config = RouterConfig(experts, top_k, score=score)
    for gap in (3.0, 0.0) if experts == 4 else (3.0,):
        logits = cyclic(experts, top_k, gap=gap)
        options = {}
        if gap == 0:
            ids = (np.arange(experts)[:, None] + np.arange(top_k)) % experts
            options = {"indices": ids.astype("i4")}
        routing = run(adapter, logits, config, **options)
        np.testing.assert_array_equal(routing.sequence_counts, [[top_k] * experts])
        balance, _, _ = losses(adapter, logits, config, balance=1e-3, **options)
        np.testing.assert_allclose(balance, 1e-3, rtol=64 * U)


@pytest.mark.parametrize("score", SCORES)
def test_the_coefficient_is_a_factor_of_value_and_gradient(adapter, rng, score) -> None:
    config = RouterConfig(8, 2, score=score)
    logits = normal(rng, (6, 8))
    exact = Exact(logits, config)
    one = losses(adapter, logits, config, balance=1e-3, z=1e-3)
    two = losses(adapter, logits, config, balance=2e-3, z=2e-3)
    for a, b in zip(one, two, strict=True):  # a power of two is exact
        same_bits(2 * a, b)
    assert np.abs(one[2]).max() > 0
    for balance, z in ((0.0, 0.01), (-2.0, 1e-4)):
        values = losses(adapter, logits, config, balance=balance, z=z)
        exact.check_losses(values[:2], values[2], balance, z)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("counts", ["actual", "unbiased"])
def test_scores_of_all_experts_enter_the_loss(adapter, rng, score, counts) -> None:
    """Not the K weights: every logit gets a gradient, the loss is not constant, and normalisation,
    scale, bias and groups leave the scores alone."""
    bias = (rng.integers(-16, 16, 16) / 16).astype("f4")
    config = RouterConfig(
        16, 2, score=score, counts=counts, num_groups=4, group_top_k=2, scale=2.5, eps=1e-3
    )
    logits = decided(rng, 10, config, bias)
    exact = Exact(logits, config, bias=bias)
    routing = run(adapter, logits, config, bias=bias)
    exact.check(routing)
    np.testing.assert_allclose(routing.score_sums.sum(), 10, rtol=64 * U)
    balance, z, grad = losses(adapter, logits, config, bias=bias)
    exact.check_losses((balance, z), grad)
    assert np.all(grad != 0)
    plain = run(adapter, logits, RouterConfig(16, 2, score=score))
    same_bits(plain.score_sums, routing.score_sums)
    assert np.any(plain.expert_counts != routing.expert_counts)
    counted = plain.expert_counts if counts == "unbiased" else routing.expert_counts
    np.testing.assert_array_equal(routing.sequence_counts, [counted])


def test_the_mean_over_layers_is_not_the_loss_of_their_tokens(adapter) -> None:
    """Opposite imbalances add up; concatenated they would cancel."""
    config = RouterConfig(4, 1)
    layers = [as_dtype([[3, 0, 0, 0]] * 3 + [[0, 3, 0, 0]]), as_dtype([[0, 0, 3, 0]] * 4)]
    layers[1][3] = [0, 0, 0, 3]
    per_layer = [float(losses(adapter, z, config)[0]) for z in layers]
    np.testing.assert_allclose(per_layer[0], per_layer[1], rtol=8 * U)
    p = np.exp(layers[0].astype("f8"))
    p = (p / p.sum(1, keepdims=True)).sum(0)
    np.testing.assert_allclose(np.mean(per_layer), 4 / 16 * (np.array([3, 1, 0, 0]) @ p), rtol=1e-6)
    joined = float(losses(adapter, np.concatenate(layers), config)[0])
    assert joined < np.mean(per_layer) - 0.5


# -- counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_ids_out_of_range_are_counted_nowhere(adapter, dtype) -> None:
    """-1 is not the last expert, E is not clamped to it; int32 counts, the same in plans."""
    given = np.array([[-1, 0, 0], [2, 1, -2], [127, 1, -128]], dtype)
    routing = run(adapter, as_dtype(np.zeros((3, 2))), RouterConfig(2, 2), indices=given[:, :2])
    np.testing.assert_array_equal(routing.expert_counts, [1, 2])
    np.testing.assert_array_equal(routing.sequence_counts, [[1, 2]])
    assert routing.expert_counts.dtype == routing.sequence_counts.dtype == np.int32
    plan = adapter.functions.plan_dispatch(adapter.array(given), 2)
    np.testing.assert_array_equal(adapter.numpy(plan.routed_counts), [2, 2])
    np.testing.assert_array_equal(adapter.numpy(plan.expert_counts), [2, 2])
    np.testing.assert_array_equal(adapter.numpy(plan.expert_offsets), [0, 2, 4])


@pytest.mark.torch
def test_counts_under_torchs_deterministic_mode(torch_adapter, rng) -> None:
    torch = pytest.importorskip("torch")
    logits, config = normal(rng, (64, 8)), RouterConfig(8, 2)
    given = rng.integers(-1, 9, (64, 2)).astype("i4")
    want = np.bincount(given[(given >= 0) & (given < 8)], minlength=8)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            routing = run(torch_adapter, logits, config, indices=given)
            np.testing.assert_array_equal(routing.expert_counts, want)
            losses(torch_adapter, logits, config, indices=given)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("experts, top_k", [(4, 1), (300, 8)])
def test_the_last_expert_is_counted(adapter, experts, top_k) -> None:
    logits = as_dtype(np.tile(np.arange(experts), (5, 1)))
    routing = run(adapter, logits, RouterConfig(experts, top_k, select_on="logit"))
    want = np.where(np.arange(experts) >= experts - top_k, 5, 0)
    np.testing.assert_array_equal(routing.expert_counts, want)
    plan = adapter.functions.plan_dispatch(adapter.array(routing.indices), experts)
    np.testing.assert_array_equal(adapter.numpy(plan.routed_counts), want)
    assert adapter.numpy(plan.expert_offsets)[-1] == 5 * top_k


# -- padding ---------------------------------------------------------------------------------------


def test_padding_by_hand(adapter) -> None:
    """Rows of gap 3 for the experts 0, 1, 3, 3, of which the last two are padding."""
    config = RouterConfig(4, 1)
    logits = as_dtype(3 * np.eye(4)[[0, 1, 3, 3]])
    mask = np.array([True, True, False, False])
    routing = run(adapter, logits, config, token_mask=mask)
    np.testing.assert_array_equal(routing.expert_counts, [1, 1, 0, 0])
    balance, _, grad = losses(adapter, logits, config, token_mask=mask)
    np.testing.assert_allclose(balance, 1.82673, atol=5e-6)
    assert not bits(grad[2:]).any() and np.all(grad[:2] != 0)
    balance, _, _ = losses(adapter, logits, config)
    np.testing.assert_allclose(balance, 1.41337, atol=5e-6)


WHERE = {
    "behind": lambda n, p, rng: np.arange(n + p) < n,
    "before": lambda n, p, rng: np.arange(n + p) >= p,
    "between": lambda n, p, rng: np.isin(np.arange(n + p), rng.choice(n + p, n, replace=False)),
}


@pytest.mark.parametrize(
    "where, poison",
    [
        ("behind", 0.0),
        ("behind", np.nan),
        ("before", np.nan),
        ("before", np.inf),
        ("between", 0.0),
        ("between", np.nan),
        ("between", -np.inf),
        ("between", 3e38),
    ],
)
def test_padding_changes_nothing_wherever_it_stands(adapter, rng, where, poison) -> None:
    """Values, counts and gradients are those of the batch without its padding rows: in the same
    bits where they depend on no order of summation, else within the bounds of the float64 sums."""
    score = SCORES[list(WHERE).index(where)]
    config = RouterConfig(12, 3, score=score, num_groups=3, group_top_k=2)
    live = decided(rng, 70, config)
    mask = WHERE[where](70, 60, rng)
    padded = np.full((130, 12), poison, "f4")
    padded[mask] = live
    want, got = run(adapter, live, config), run(adapter, padded, config, token_mask=mask)
    for name in ("expert_counts", "sequence_counts", "num_tokens"):
        same_bits(getattr(got, name), getattr(want, name), name)
    for name in ("indices", "weights"):
        same_bits(getattr(got, name)[mask], getattr(want, name), name)
    exact = Exact(live, config)
    for name in ("score_sums", "logsumexp_sq"):
        assert_close(name, getattr(got, name), exact.out[name], exact.bounds[name])
        if where == "behind":
            same_bits(getattr(got, name), getattr(want, name), name)
    *values, grad = losses(adapter, padded, config, token_mask=mask)
    exact.check_losses(values)
    # The gradient depends on counts, n and the row's own logits alone.
    same_bits(grad[mask], losses(adapter, live, config)[2])
    assert not bits(grad[~mask]).any()


def test_sequences_of_unequal_length_weigh_the_same(adapter, rng) -> None:
    """The mean over sequences, each divided by its own number of live tokens; a sequence of
    padding only takes no part."""
    config = RouterConfig(8, 2, score="sigmoid")
    logits = decided(rng, 24, config)
    lengths = (6, 2, 0, 5)
    mask = np.concatenate([np.arange(6) < n for n in lengths])
    logits[~mask] = np.nan
    balance, z, grad = losses(adapter, logits, config, token_mask=mask, num_sequences=4)
    Exact(logits, config, token_mask=mask, num_sequences=4).check_losses((balance, z), grad)
    alone = [losses(adapter, s[: lengths[i]], config) for i, s in enumerate(np.split(logits, 4))]
    np.testing.assert_allclose(balance, np.mean([alone[i][0] for i in (0, 1, 3)]), rtol=4 * U)
    np.testing.assert_allclose(
        z, sum(n * a[1].astype("f8") for n, a in zip(lengths, alone, strict=True)) / 13, rtol=8 * U
    )
    assert not bits(grad[~mask]).any()


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("tokens", [0, 6])
def test_without_a_live_token_both_losses_are_zero(adapter, tokens, num_sequences) -> None:
    """Value and gradient exactly 0, never 0 / 0; and the next call works."""
    config = RouterConfig(5, 2)
    logits = np.full((tokens, 5), np.nan, "f4")
    mask = np.zeros(tokens, bool)
    options = {"token_mask": mask, "num_sequences": num_sequences}
    balance, z, grad = losses(adapter, logits, config, **options)
    assert balance == 0 and z == 0 and not bits(grad).any()
    routing = run(adapter, logits, config, **options)
    assert not routing.num_tokens.any() and not routing.expert_counts.any()
    assert routing.score_sums.shape == (num_sequences, 5) and not bits(routing.score_sums).any()
    assert losses(adapter, CASE_LOGITS, RouterConfig(4, 2))[0] > 1


# -- sequences and micro-batches -------------------------------------------------------------------


@pytest.mark.parametrize(
    "score, num_sequences", [("softmax", 4), ("sigmoid", 20), ("sqrtsoftplus", 2)]
)
def test_the_loss_of_sequences_is_the_mean_of_their_losses(
    adapter, rng, score, num_sequences
) -> None:
    config = RouterConfig(9, 2, score=score)
    logits = decided(rng, 20, config)
    balance, z, grad = losses(adapter, logits, config, num_sequences=num_sequences)
    exact = Exact(logits, config, num_sequences=num_sequences)
    exact.check(run(adapter, logits, config, num_sequences=num_sequences))
    exact.check_losses((balance, z), grad)
    alone = [losses(adapter, s, config)[0] for s in np.split(logits, num_sequences)]
    np.testing.assert_allclose(balance, np.mean(alone, dtype="f8"), rtol=4 * U)


def accumulated(adapter, logits, config, micro_batches: int, **options) -> np.ndarray:
    """The gradient of the mean of the micro-batches' losses."""
    share = (1 / micro_batches, 1 / micro_batches)
    parts = np.split(logits, micro_batches)
    return np.concatenate(
        [losses(adapter, part, config, upstream=share, **options)[2] for part in parts]
    )


@pytest.mark.parametrize("score, length", [("softmax", 5), ("sigmoid", 1), ("sqrtsoftplus", 3)])
def test_accumulated_per_sequence_losses_are_the_batchs(adapter, rng, score, length) -> None:
    """8 sequences as 1 x 8, 2 x 4 and 4 x 2: the scale never depends on how many sequences
    a micro-batch holds. Halving is exact, so even the bits agree."""
    config = RouterConfig(6, 2, score=score)
    logits = decided(rng, 8 * length, config)
    *values, whole = losses(adapter, logits, config, num_sequences=8)
    Exact(logits, config, num_sequences=8).check_losses(values, whole)
    for micro_batches in (2, 4):
        got = accumulated(adapter, logits, config, micro_batches, num_sequences=8 // micro_batches)
        same_bits(got, whole)


@pytest.mark.parametrize("score, top_k", [("softmax", 2), ("sigmoid", 1), ("sqrtsoftplus", 3)])
def test_accumulated_losses_of_alike_micro_batches_are_the_batchs(
    adapter, rng, score, top_k
) -> None:
    """8 tokens as 1 x 8, 2 x 4 and 4 x 2, in each of which the same experts are chosen equally
    often, by different logits: no factor of the number of micro-batches or their size."""
    config = RouterConfig(6, top_k, score=score)
    order = np.array([[0, 1, 2, 3, 4, 5], [2, 0, 4, 5, 1, 3]] * 4)  # two kinds of tokens in turn
    ranks = np.argsort(order, axis=1)
    logits = as_dtype(3 - ranks + rng.uniform(-0.4, 0.4, ranks.shape))
    *values, whole = losses(adapter, logits, config)
    Exact(logits, config).check_losses(values, whole)
    assert values[0] > 1.01
    for micro_batches in (2, 4):
        got = accumulated(adapter, logits, config, micro_batches)
        np.testing.assert_allclose(got, whole, rtol=4 * U, atol=U * np.abs(whole).max())
        parts = [losses(adapter, p, config)[0] for p in np.split(logits, micro_batches)]
        np.testing.assert_allclose(np.mean(parts, dtype="f8"), values[0], rtol=4 * U)


def test_three_micro_batches_agree_to_rounding(adapter, rng) -> None:
    """A number of micro-batches that no float holds the inverse of."""
    config = RouterConfig(6, 2)
    logits = decided(rng, 24, config)
    whole = losses(adapter, logits, config, num_sequences=6)[2]
    got = accumulated(adapter, logits, config, 3, num_sequences=2)
    np.testing.assert_allclose(got, whole, rtol=8 * U, atol=4 * U * np.abs(whole).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_losses_of_16_bit_logits_are_float32(adapter, rng, dtype) -> None:
    """Only the gradient is rounded to the logits' dtype, once."""
    config = RouterConfig(8, 2, score="sigmoid")
    logits = as_dtype(decided(rng, 12, config), dtype)
    wide = losses(adapter, logits.astype("f4"), config, num_sequences=3)
    short = losses(adapter, logits, config, num_sequences=3)
    same_bits(short[0], wide[0])
    same_bits(short[1], wide[1])
    same_bits(short[2], as_dtype(wide[2], dtype))
