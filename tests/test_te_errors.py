# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The `te` modules' signatures, and what they refuse."""

from __future__ import annotations

import importlib
import inspect

import numpy as np
import pytest
from duomoe.te import ScoreFunction
from te_checks import loss_of, te, topk

pytestmark = [pytest.mark.jax, pytest.mark.torch]

BAD = {
    "topk": ({"k": 17}, ValueError, "topk must be between 1 and 16, got 17"),
    "score": ({"score_function": "tanh"}, ValueError, "score_function must be one of 'sigmoid'"),
    "map": ({"routing_map_format": 2}, ValueError, "routing_map_format must be one of"),
    "groups": ({"num_groups": 3, "group_topk": 2}, ValueError, "multiple of num_groups"),
    "too few kept": ({"num_groups": 16, "group_topk": 1}, ValueError, "fewer than topk = 4"),
    "more kept": ({"num_groups": 2, "group_topk": 4}, ValueError, "group_topk must be between"),
    "no groups": ({"group_topk": 2}, TypeError, "num_groups must be an int, got None"),
    "kept": ({"num_groups": 8, "group_topk": 3}, ValueError, "multiple of group_topk"),
    "scale": ({"scaling_factor": "2"}, TypeError, "scaling_factor must be a float"),
    "pre": ({"use_pre_softmax": 1}, TypeError, "use_pre_softmax must be a bool"),
    "bias": ({"expert_bias": np.zeros(15, "f4")}, ValueError, "^expert_bias must have shape"),
    "bias dtype": ({"expert_bias": np.zeros(16, "f2")}, TypeError, "^expert_bias must be float32"),
    "buffer": (
        {"topk_indices": np.zeros((5, 3), "i4")},
        ValueError,
        "topk_indices must have",
    ),
    "buffer dtype": ({"topk_indices": np.zeros((5, 4), "u1")}, TypeError, "topk_indices must be"),
    "histogram alone": (
        {"qb_histogram": np.zeros((16, 9), "i4")},
        ValueError,
        "must be given together",
    ),
    "histogram dtype": (
        {
            "qb_histogram": np.zeros((16, 9), "f4"),
            "qb_bin_bounds": np.zeros(2, "f4"),
            "qb_histogram_mode": "two_kernel",
        },
        TypeError,
        "qb_histogram must be int32",
    ),
    "histogram mode": (
        {
            "qb_histogram": np.zeros((16, 9), "i4"),
            "qb_bin_bounds": np.zeros(2, "f4"),
            "qb_histogram_mode": "slow",
        },
        ValueError,
        "qb_histogram_mode must be one of",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(adapter, name: str) -> None:
    options, error, message = BAD[name]
    given = {
        n: adapter.array(v) if isinstance(v, np.ndarray) else v
        for n, v in options.items()
        if n != "k"
    }
    with pytest.raises(error, match=message):
        topk(adapter, adapter.array(np.zeros((5, 16), "f4")), options.get("k", 4), **given)


def test_bad_input_of_the_loss(adapter) -> None:
    probs, counts = adapter.array(np.ones((5, 16), "f4")), adapter.array(np.ones(16, "i4"))
    with pytest.raises(ValueError, match=r"tokens_per_expert must have shape"):
        loss_of(adapter, probs, adapter.array(np.ones(8, "i4")))
    with pytest.raises(ValueError, match=r"multiple of num_experts \(5\)"):
        loss_of(adapter, probs, counts, num_experts=5)
    with pytest.raises(ValueError, match=r"total_num_tokens must be at least 0"):
        loss_of(adapter, probs, counts, total_num_tokens=-1)
    with pytest.raises(TypeError, match=r"total_num_tokens must be an int"):
        loss_of(adapter, probs, counts, total_num_tokens=2.5)
    with pytest.raises(TypeError, match=r"total_num_tokens must be integers, got float32"):
        loss_of(adapter, probs, counts, total_num_tokens=adapter.array(np.float32(5).reshape(())))
    with pytest.raises(TypeError, match=r"probs must be float32"):
        loss_of(adapter, counts.reshape(1, 16), counts)


# What Transformer Engine's users write: names, order, and which arguments may be left out.
SIGNATURES = {
    ("torch", "fused_topk_with_score_function"): """logits topk use_pre_softmax num_groups
        group_topk scaling_factor score_function expert_bias routing_map_format= topk_indices=
        qb_histogram= qb_bin_bounds= qb_histogram_mode=""",
    ("torch", "fused_compute_score_for_moe_aux_loss"): """logits topk score_function
        routing_map_format=""",
    ("torch", "fused_moe_aux_loss"): """probs tokens_per_expert total_num_tokens num_experts topk
        coeff""",
    ("jax", "fused_topk_with_score_function"): """logits topk use_pre_softmax= num_groups=
        group_topk= scaling_factor= score_function= expert_bias= compute_aux_scores=
        routing_map_format=""",
    ("jax", "fused_moe_aux_loss"): "probs tokens_per_expert topk coeff",
}


@pytest.mark.parametrize("framework, name", SIGNATURES)
def test_signatures(framework: str, name: str) -> None:
    module = importlib.import_module(f"{framework}_frontend.te")
    positional = [
        p.name + ("=" if p.default is not p.empty else "")
        for p in inspect.signature(getattr(module, name)).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert positional == SIGNATURES[framework, name].split()


def test_both_modules_have_the_same_options(jax_adapter, torch_adapter) -> None:
    ours, theirs = te(jax_adapter), te(torch_adapter)
    assert ours.__all__ == theirs.__all__
    for name in ours.__all__:
        options = [set(inspect.signature(getattr(m, name)).parameters) for m in (ours, theirs)]
        assert options[0] == options[1], name
    assert [ScoreFunction.SIGMOID, ScoreFunction.SOFTMAX] == [0, 1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_groups": 4, "group_topk": 2}, "quantile balancing .* without groups"),
        ({"k": 16}, "topk must be below the number of experts"),
        ({"qb_bin_bounds": np.zeros(3, "f4")}, r"qb_bin_bounds must have shape \[2\]"),
        ({"qb_bin_bounds": np.zeros(2, "f2")}, "qb_bin_bounds must be float32"),
    ],
)
def test_buffers_are_untouched_by_a_refused_call(torch_adapter, options, message) -> None:
    k = options.get("k", 4)
    ids = torch_adapter.array(np.full((5, k), -7, "i4"))
    histogram = torch_adapter.array(np.zeros((16, 9), "i4"))
    given = {"qb_bin_bounds": np.array([-1, 1], "f4"), **options}
    given = {
        n: torch_adapter.array(v) if isinstance(v, np.ndarray) else v for n, v in given.items()
    }
    given.pop("k", None)
    with pytest.raises((TypeError, ValueError), match=message):
        topk(
            torch_adapter,
            torch_adapter.array(np.zeros((5, 16), "f4")),
            k,
            topk_indices=ids,
            qb_histogram=histogram,
            qb_histogram_mode="two_kernel",
            **given,
        )
    assert (torch_adapter.numpy(ids) == -7).all() and not torch_adapter.numpy(histogram).any()
