# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routers of transformers against ours: ids, weights and gradients from the same logits, with the
RouterConfig that `from_hf` reads from the real configuration.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from adapters import DTYPES
from duomoe import RouterConfig, oracle, presets

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("transformers")

from transformers_cases import CASES, Case

pytestmark = [pytest.mark.jax, pytest.mark.torch]

TOKENS = 256
# Bounds in ulps of the dtype of the weights: what the model rounds to, ours is rounded to too.
WEIGHT_ULPS = {"float32": 6, "bfloat16": 1, "rounds": 4}
# Bounds of the gradient, in units of eps of its dtype times the row's largest product of weight and
# cotangent.
GRADIENT_EPS = {"float32": 4, "bfloat16": 2, "rounds": 8}
# Selection values closer than this, relative to the largest, are ties to one of the two sides.
TIE = {"float32": 2.0**-20, "bfloat16": 2.0**-20, "rounds": 2.0**-7}


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().numpy().astype(DTYPES[str(x.dtype).removeprefix("torch.")])


def gap(values: np.ndarray, chosen: int, ordered: bool) -> float:
    """The smallest distance that the choice, or the order of the chosen, hangs on."""
    best = -np.sort(-values)[: chosen + 1]
    distances = best[:-1] - best[1:]
    if len(values) == chosen and not ordered:
        return np.inf
    return (distances if ordered else distances[-1:]).min(initial=np.inf) / np.abs(best).max()


def is_clear(
    z: np.ndarray, config: RouterConfig, bias: np.ndarray | None, tie: float, ordered: bool
) -> bool:
    """No tie decides which experts logits z[E] choose."""
    bias = np.float64(0) if bias is None else bias
    values = oracle.selection_values(z, config.score, config.select_on, bias)
    groups = oracle.group_values(values, config.num_groups, config.group_score_k)
    kept = oracle.ranking(groups)[: config.group_top_k]
    values = values.reshape(config.num_groups, -1)[kept].reshape(-1)
    return gap(groups, config.group_top_k, False) > tie and gap(values, config.top_k, ordered) > tie


def ulps(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """The distance in units in the last place of `theirs`; ours is rounded to its dtype."""
    ours = ours.astype(theirs.dtype).astype(np.float64)
    theirs_64 = theirs.astype(np.float64)
    digits = 24 if theirs.dtype == np.float32 else 8
    _, exponent = np.frexp(np.abs(theirs_64))
    return np.abs(ours - theirs_64) / np.exp2(exponent.astype(np.float64) - digits)


def compare(
    case: Case,
    hf_config: Any,
    config: RouterConfig,
    dtype: str,
    adapters: list[Any],
    rng: np.random.Generator,
) -> tuple[float, float]:
    """The largest difference of a weight in ulps and of a gradient in eps; raises on different ids
    or differences beyond the bounds.
    """
    real = RouterConfig.from_hf(hf_config)
    z, w, ids, bias = case.run(hf_config, getattr(torch, dtype), rng, TOKENS)
    kind = str(w.dtype).removeprefix("torch.")
    kind = "rounds" if case.rounds and kind == "bfloat16" else kind
    bias_array = None if bias is None else bias.numpy()
    z_array = to_numpy(z)
    clear = np.array(
        [
            is_clear(row, real, bias_array, TIE[kind], case.ordered)
            for row in z_array.astype(np.float64)
        ]
    )
    assert clear.sum() >= 16
    per_expert = torch.from_numpy(rng.standard_normal(z.shape)).to(w.dtype)
    per_expert[~torch.from_numpy(clear)] = 0
    (gradient,) = torch.autograd.grad(w, z, per_expert.gather(1, ids))
    theirs, their_ids = to_numpy(w), ids.numpy()

    worst = [0.0, 0.0]
    for adapter in adapters:
        route, options = adapter.functions.route, {}
        if bias is not None:
            options["bias"] = adapter.array(bias_array)
        our_ids = adapter.numpy(route(adapter.array(z_array), config, **options).indices)
        if case.ordered:
            np.testing.assert_array_equal(our_ids[clear], their_ids[clear])
        ours_by_id, theirs_by_id = np.argsort(our_ids, axis=1), np.argsort(their_ids, axis=1)
        np.testing.assert_array_equal(
            np.take_along_axis(our_ids, ours_by_id, 1)[clear],
            np.take_along_axis(their_ids, theirs_by_id, 1)[clear],
        )
        (weights,), pull = adapter.vjp(
            lambda z, route=route, options=options: (route(z, config, **options).weights,), z_array
        )
        distance = ulps(
            np.take_along_axis(weights, ours_by_id, 1)[clear],
            np.take_along_axis(theirs, theirs_by_id, 1)[clear],
        ).max()
        assert distance <= WEIGHT_ULPS[kind], f"weights differ by {distance} ulp"

        cotangent = np.take_along_axis(per_expert.float().numpy(), our_ids.astype(np.int64), 1)
        (our_gradient,) = pull(cotangent)
        assert our_gradient.dtype == z_array.dtype
        scale = np.abs(cotangent).max(1) * weights.max(1)
        difference = np.abs(our_gradient.astype(np.float64) - to_numpy(gradient).astype(np.float64))
        eps = 2.0**-23 if kind == "float32" and z.dtype == torch.float32 else 2.0**-8
        error = (difference.max(1)[clear] / (eps * scale[clear])).max()
        bound = GRADIENT_EPS["bfloat16" if eps > 1e-3 and kind == "float32" else kind]
        assert error <= bound, f"gradients differ by {error} eps"
        worst = [max(worst[0], distance), max(worst[1], error)]
    return worst[0], worst[1]


@pytest.fixture
def both(jax_adapter, torch_adapter) -> list[Any]:
    return [jax_adapter, torch_adapter]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_small_router(name: str, dtype: str, both, rng) -> None:
    case = CASES[name]
    real = case.config(**case.small)
    compare(case, real, RouterConfig.from_hf(real), dtype, both, rng)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.preset])
def test_released_router(name: str, dtype: str, both, rng) -> None:
    """The preset is what from_hf reads from the released model's values, and routes like it."""
    case = CASES[name]
    real = case.config(**case.released)
    preset = getattr(presets, case.preset)()
    assert RouterConfig.from_hf(real) == preset
    compare(case, real, preset, dtype, both, rng)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_option_is_noticed(name: str, torch_adapter, rng) -> None:
    case = CASES[name]
    real = case.config(**case.small)
    right = RouterConfig.from_hf(real)
    wrong = {"normalize": not right.normalize} if case.wrong is None else case.wrong
    with pytest.raises(AssertionError):
        compare(case, real, dataclasses.replace(right, **wrong), "float32", [torch_adapter], rng)
