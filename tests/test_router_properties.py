# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Properties of the router and its losses for any shape, dtype, option and logits: both front ends
give the same bits, and they are what the rules say."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from adapters import DTYPES, bits
from duomoe import RouterConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_bounds import assert_close
from oracle_cases import SCORES
from router_checks import FLOATS, INTEGERS, Exact, options_of, run, same_bits

pytestmark = [pytest.mark.torch]

# Sets that logits are drawn from; few values make many ties.
VALUES = {
    "ties": [-1.0, -0.0, 0.0, 0.5, 1.0],
    "equal": [-3.0],
    "low": [-100.0, -100.5, -104.0, -112.0],
    "extreme": [1e4, -1e4, 6e4, -6e4, 88.0, -104.0, 0.0, -0.0],
    "largest": [3e38, -3e38, 1e20, 0.0, 1.0],  # float16 has no such numbers
    "infinite": [-np.inf, -np.inf, 0.0, 1.0, np.inf],
    "faulty": [np.nan, np.inf, -np.inf, 0.0, -0.0, 3.0, -1e4, 1e-40],
}


@dataclasses.dataclass
class Problem:
    kind: str
    logits: np.ndarray
    config: RouterConfig
    options: dict[str, Any]
    cotangents: list[np.ndarray]

    @property
    def mask(self) -> np.ndarray:
        return self.options.get("token_mask", np.ones(len(self.logits), bool))


@st.composite
def configs(draw: st.DrawFn) -> RouterConfig:
    experts = draw(st.one_of(st.integers(1, 12), st.sampled_from([31, 32, 33, 64, 96, 256, 300])))
    top_k = draw(st.one_of(st.integers(1, min(experts, 8)), st.integers(1, experts)))
    divisors = [g for g in range(1, experts + 1) if experts % g == 0]
    groups = draw(st.one_of(st.just(1), st.sampled_from(divisors)))
    score = draw(st.sampled_from(SCORES))
    scope = draw(st.sampled_from(["all", "all", "selected"])) if score == "softmax" else "all"
    selected = scope == "selected"
    return RouterConfig(
        experts,
        top_k,
        score=score,
        score_scope=scope,
        select_on="logit" if selected else draw(st.sampled_from(["score", "logit"])),
        num_groups=groups,
        group_top_k=draw(st.integers(-(-top_k * groups // experts), groups)),
        group_score_k=draw(st.integers(1, 4)),
        normalize=draw(st.sampled_from([True, False, "if_k_gt_1"])),
        eps=0.0 if selected else draw(st.sampled_from([0.0, 1e-20, 1e-3])),
        eps_mode=draw(st.sampled_from(["add", "clamp"])),
        scale=draw(st.sampled_from([1.0, 2.5])),
        counts=draw(st.sampled_from(["actual", "unbiased"])),
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    config = draw(configs())
    experts, top_k = config.num_experts, config.top_k
    tokens = draw(st.one_of(st.integers(0, 5), st.integers(0, 40)))
    divisors = [s for s in range(1, tokens + 1) if tokens % s == 0] or [1, 3]
    num_sequences = draw(st.one_of(st.just(1), st.sampled_from(divisors)))
    kind = draw(st.sampled_from(["normal", *VALUES]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (tokens, experts)
    logits = 3 * rng.normal(size=shape) if kind == "normal" else rng.choice(VALUES[kind], shape)
    options: dict[str, Any] = {"num_sequences": num_sequences}
    if draw(st.booleans()):
        options["bias"] = rng.choice([-1.5, 0, 0.25, 0.25, 2], experts).astype("f4")
    live = draw(st.sampled_from([None, 0.8, 0.3, 0.0]))
    if live is not None:
        options["token_mask"] = rng.random(tokens) < live
    if draw(st.integers(0, 4)) == 0:
        options["indices"] = rng.integers(-2, experts + 2, (tokens, top_k)).astype("i4")
    shapes = [(tokens, top_k), (num_sequences, experts), (num_sequences,), (), ()]
    cotangents = [np.asarray(rng.normal(size=s), np.float32) for s in shapes]
    if kind not in ("normal", "ties", "equal"):
        # Squares of huge logits overflow, and their gradient does in 16 bits.
        cotangents[2], cotangents[4] = np.zeros_like(cotangents[2]), np.zeros((), np.float32)
    dtypes = ["float32", "bfloat16"] + ["float16"] * (kind != "largest")
    dtype = DTYPES[draw(st.sampled_from(dtypes))]
    return Problem(kind, logits.astype(dtype), config, options, cotangents)


def everything(adapter: Any, problem: Problem) -> dict[str, np.ndarray]:
    """All outputs, both losses and the gradient with respect to the logits."""
    f, given = adapter.functions, options_of(adapter, problem.options)

    def floats(z: Any) -> list[Any]:
        routing = f.route(z, problem.config, **given)
        balance = f.load_balancing_loss(routing, problem.config)
        return [*(getattr(routing, n) for n in FLOATS), balance, f.z_loss(routing)]

    outputs, pull = adapter.vjp(floats, problem.logits)
    names = (*FLOATS, "load_balancing_loss", "z_loss")
    routing = run(adapter, problem.logits, problem.config, **problem.options)
    return {
        **dict(zip(names, outputs, strict=True)),
        **{n: getattr(routing, n) for n in INTEGERS},
        "grad": pull(*problem.cotangents)[0],
    }


def float32_scores(adapter: Any, problem: Problem) -> np.ndarray:
    """s[T, E], read off unnormalised weights of all experts."""
    experts = problem.config.num_experts
    every = RouterConfig(
        experts, experts, score=problem.config.score, select_on="logit", normalize=False
    )
    ids = np.tile(np.arange(experts, dtype="i4"), (len(problem.logits), 1))
    return run(adapter, problem.logits, every, indices=ids).weights


def ranking(v: np.ndarray) -> np.ndarray:
    """By falling value, equal ones by rising id, NaN last."""
    return np.argsort(-v, kind="stable")


def selection(v: np.ndarray, config: RouterConfig) -> np.ndarray:
    """The rule, on one row of float32 selection values."""
    if config.group_top_k == config.num_groups:
        return ranking(v)[: config.top_k]
    groups = v.reshape(config.num_groups, -1)
    worth = np.zeros(len(groups), np.float32)
    for g, values in enumerate(groups):
        best = values[ranking(values)][: config.group_score_k]
        worth[g] = best[0]
        for x in best[1:]:
            worth[g] += x
    kept = ranking(worth)[: config.group_top_k]
    return np.array([e for e in ranking(v) if e // groups.shape[1] in kept][: config.top_k])


@pytest.mark.jax
@settings(max_examples=25, deadline=None, derandomize=True)
@given(problem=problems())
def test_both_front_ends_have_the_bits_of_any_problem(
    problem: Problem, jax_adapter, torch_adapter
) -> None:
    with np.errstate(all="ignore"):
        want, got = (everything(a, problem) for a in (torch_adapter, jax_adapter))
        for name, value in got.items():
            same_bits(value, want[name], name)
        check(problem, want, float32_scores(jax_adapter, problem))


# JAX compiles anew for every shape; torch gets through many more.
@settings(max_examples=80, deadline=None, derandomize=True)
@given(problem=problems())
def test_the_rules_hold_for_any_problem(problem: Problem, torch_adapter) -> None:
    with np.errstate(all="ignore"):
        check(problem, everything(torch_adapter, problem), float32_scores(torch_adapter, problem))


def check(problem: Problem, out: dict[str, np.ndarray], scores: np.ndarray) -> None:
    """The rules for one problem: `out` is what `everything` returned."""
    config, mask, options = problem.config, problem.mask, problem.options
    replayed = options.get("indices")

    # Ids: given ones as they are, else those of the rule; distinct and in range.
    z, ids = problem.logits.astype("f4"), out["indices"]
    on = z if config.select_on == "logit" else scores
    plain = RouterConfig(config.num_experts, config.top_k)
    counts = np.zeros_like(out["sequence_counts"])
    length = max(1, len(z) // options["num_sequences"])
    for t in range(len(z)):
        v = np.where(z[t] == -np.inf, -np.inf, on[t] + options.get("bias", np.float32(0)))
        if not mask[t]:
            assert np.all(ids[t] == -1)
            continue
        if replayed is None:
            np.testing.assert_array_equal(ids[t], selection(v, config))
            assert len(set(ids[t])) == config.top_k and ids[t].min() >= 0
        else:
            fits = (replayed[t] >= 0) & (replayed[t] < config.num_experts)
            np.testing.assert_array_equal(ids[t], np.where(fits, replayed[t], -1))
        counted = ids[t][ids[t] >= 0]
        if config.counts == "unbiased":
            counted = selection(np.where(z[t] == -np.inf, -np.inf, on[t]), plain)
        np.add.at(counts[t // length], counted, 1)

    # Counts are those of the ids.
    used = ids[ids >= 0]
    assert used.max(initial=0) < config.num_experts
    want = np.bincount(used, minlength=config.num_experts)
    np.testing.assert_array_equal(out["expert_counts"], want)
    np.testing.assert_array_equal(out["sequence_counts"], counts)
    per_sequence = mask.reshape(options["num_sequences"], -1).sum(1)
    np.testing.assert_array_equal(out["num_tokens"], per_sequence)

    # Unused slots and masked tokens: 0 forward and backward. Nothing live: everything 0.
    assert not bits(out["weights"][ids < 0]).any() and not bits(out["grad"][~mask]).any()
    if not mask.any():
        for name in (*FLOATS, "expert_counts", "load_balancing_loss", "z_loss"):
            assert not bits(out[name]).any(), name

    # Finite logits, finite numbers.
    finite = np.isfinite(z).all(axis=1)
    assert np.isfinite(out["weights"][finite]).all() and np.isfinite(out["grad"][finite]).all()
    if finite[mask].all():
        assert np.isfinite(out["score_sums"]).all() and np.isfinite(out["load_balancing_loss"])
        if replayed is None and config.eps == 0 and config.normalize is True:
            sums = out["weights"][mask].sum(axis=1, dtype="f8")
            np.testing.assert_allclose(sums, config.scale, rtol=2e-6)

    # And they are those of float64, with the ids that were selected.
    if problem.kind in ("normal", "ties", "equal"):
        exact = Exact(problem.logits, config, **{**options, "indices": ids})
        for name in FLOATS:
            assert_close(name, out[name], exact.out[name], exact.bounds[name])
        exact.out["sequence_counts"] = counts
        exact.check_losses([out["load_balancing_loss"], out["z_loss"]])
        through_losses = exact.loss_cotangents(*map(float, problem.cotangents[3:]))
        exact.check_gradient(
            out["grad"],
            [problem.cotangents[0]]
            + [a + b for a, b in zip(problem.cotangents[1:3], through_losses[1:], strict=True)],
        )


@pytest.mark.jax
@settings(max_examples=8, deadline=None, derandomize=True)
@given(problem=problems())
def test_a_token_is_routed_as_if_it_were_alone(
    problem: Problem, jax_adapter, torch_adapter
) -> None:
    """Ids, weights and the gradient through the weights do not depend on the other tokens, on
    their number or order."""
    tokens = len(problem.logits)
    order = np.random.default_rng(tokens).permutation(tokens)[: (tokens + 1) // 2]
    options = {**problem.options, "num_sequences": 1}
    part = {n: v[order] if n in ("token_mask", "indices") else v for n, v in options.items()}
    for adapter in (jax_adapter, torch_adapter):
        results = []
        for logits, chosen, rows in (
            (problem.logits, options, slice(None)),
            (problem.logits[order], part, order),
        ):
            arrays = options_of(adapter, chosen)
            route = lambda z, a=adapter, o=arrays: [
                a.functions.route(z, problem.config, **o).weights
            ]
            (weights,), pull = adapter.vjp(route, logits)
            grad = pull(problem.cotangents[0][rows])[0]
            ids = run(adapter, logits, problem.config, **chosen).indices
            results.append((ids, weights, grad))
        for whole, alone in zip(*results, strict=True):
            same_bits(whole[order], alone)
