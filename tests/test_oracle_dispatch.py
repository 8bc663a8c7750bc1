# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of dispatch and of the experts' products that hold by themselves, on both front ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from adapters import JaxAdapter, TorchAdapter, bits
from duomoe import oracle
from oracle_cases_experts import CASES, DISPATCHES, Dispatch, dispatch_name, row_inputs

Adapter = JaxAdapter | TorchAdapter


def plan_of(
    adapter: Adapter, indices: Any, num_experts: int, **options: Any
) -> dict[str, np.ndarray]:
    """The op's plan for `indices` [T, K]; capacity, num_rows and the rest as the op takes them."""
    indices = np.array(indices, "i4")
    weights = options.pop("weights", None)
    attributes = {
        "num_experts": num_experts,
        "num_rows": indices.size,
        "capacity": -1,
        "drop_order": "position",
        "alignment": 1,
        **options,
    }
    inputs = {"indices": indices, "weights": None if weights is None else np.array(weights, "f4")}
    return adapter.call("plan_dispatch", inputs, attributes)


@pytest.mark.parametrize("d", DISPATCHES, ids=dispatch_name)
def test_plan_is_consistent(adapter: Adapter, d: Dispatch) -> None:
    inputs, attributes = d.plan_inputs()
    plan = adapter.call("plan_dispatch", inputs, attributes)
    offsets, counts = plan["expert_offsets"], plan["expert_counts"]
    assert (offsets % attributes["alignment"] == 0).all()
    assert (offsets[:-1] + counts <= offsets[1:]).all() and offsets[-1] <= attributes["num_rows"]
    kept = np.flatnonzero(plan["slot_of_row"] >= 0)
    assert len(kept) == counts.sum() == (plan["row_of_slot"] >= 0).sum()
    slots = plan["slot_of_row"][kept]
    np.testing.assert_array_equal(plan["row_of_slot"].reshape(-1)[slots], kept)
    experts = inputs["indices"].reshape(-1)[slots]
    assert (np.diff(experts.astype("i8") * inputs["indices"].size + slots) > 0).all()
    if d.max_rows is None and (d.capacity is None or d.capacity >= inputs["indices"].size):
        np.testing.assert_array_equal(counts, plan["routed_counts"])


def test_capacity_keeps_the_first_in_row_order(adapter: Adapter) -> None:
    plan = plan_of(adapter, [[0], [0], [0], [0]], 2, capacity=2, num_rows=4)
    np.testing.assert_array_equal(plan["row_of_slot"], [[0], [1], [-1], [-1]])
    np.testing.assert_array_equal(plan["expert_counts"], [2, 0])
    np.testing.assert_array_equal(plan["routed_counts"], [4, 0])


def test_capacity_keeps_the_largest_weights_with_ties_in_row_order(adapter: Adapter) -> None:
    weights = [[0.1], [0.7], [0.5], [0.7], [0.5], [np.nan]]
    for capacity, kept in ((1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (5, [0, 1, 2, 3, 4])):
        plan = plan_of(
            adapter, [[0]] * 6, 2, capacity=capacity, drop_order="weight", weights=weights
        )
        np.testing.assert_array_equal(np.flatnonzero(plan["row_of_slot"] >= 0), kept)
        np.testing.assert_array_equal(plan["slot_of_row"], kept + [-1] * (6 - capacity))


def test_rows_beyond_max_rows_are_dropped_and_counted(adapter: Adapter) -> None:
    plan = plan_of(adapter, [[0, 1], [1, 2], [1, 2]], 3, num_rows=4)
    np.testing.assert_array_equal(plan["row_of_slot"], [[0, 1], [2, -1], [3, -1]])
    np.testing.assert_array_equal(plan["expert_counts"], [1, 3, 0])
    np.testing.assert_array_equal(plan["routed_counts"], [1, 3, 2])
    np.testing.assert_array_equal(plan["expert_offsets"], [0, 1, 4, 4])


def test_capacity_above_the_tokens_is_no_capacity(adapter: Adapter) -> None:
    """Also where max_rows drops: it drops what lies beyond the last row, whatever drop_order is."""
    weights = [[0.1], [0.7], [0.5], [0.7]]
    options = {"drop_order": "weight", "weights": weights, "num_rows": 2}
    without, above = (plan_of(adapter, [[0]] * 4, 2, capacity=c, **options) for c in (-1, 100))
    for name, value in without.items():
        np.testing.assert_array_equal(above[name], value, err_msg=name)


@pytest.mark.parametrize("d", DISPATCHES[4:-1], ids=dispatch_name)
def test_dropped_slots_and_padding_rows_get_gradient_zero(adapter: Adapter, d: Dispatch) -> None:
    inputs = row_inputs(d, 33, "float32")
    names = ("grad_y", "rows", "row_of_slot", "slot_of_row", "weights")
    out = adapter.call("combine_bwd", {n: inputs[n] for n in names}, {})
    assert not bits(out["grad_weights"][inputs["row_of_slot"] < 0]).any()
    assert not bits(out["grad_rows"][inputs["slot_of_row"] < 0]).any()
    rows = adapter.call("permute", {n: inputs[n] for n in ("x", "row_of_slot", "slot_of_row")}, {})[
        "rows"
    ]
    assert not bits(rows[inputs["slot_of_row"] < 0]).any()


def test_cases_have_poisoned_rows_and_experts_without_rows() -> None:
    """The cases of test_oracle.py hold what they claim to."""
    poisoned = idle = dropped = 0
    for case in CASES["grouped_matmul_bwd_w"]:
        inputs, _ = case.make()
        poisoned += bool(np.isnan(inputs["rows"].astype("f4")).any())
        idle += bool((inputs["expert_counts"] == 0).any())
    for case in CASES["combine_bwd"]:
        inputs, _ = case.make()
        dropped += bool((inputs["row_of_slot"] < 0).any())
    assert poisoned >= 8 and idle >= 8 and dropped >= 8


def test_expert_without_rows_gets_gradient_zero(adapter: Adapter) -> None:
    rows = np.full((8, 3), np.nan, "f4")
    rows[4:6] = 1
    inputs = {
        "rows": rows,
        "grad_out": rows,
        "expert_offsets": np.array([0, 4, 8, 8], "i4"),
        "expert_counts": np.array([0, 2, 0], "i4"),
    }
    grad = adapter.call("grouped_matmul_bwd_w", inputs, {"w_dtype": "float32"})["grad_w"]
    np.testing.assert_array_equal(grad[1], np.full((3, 3), 2))
    assert not bits(grad[[0, 2]]).any()


def test_bfloat16_sums_round_once(adapter: Adapter) -> None:
    """256 + 1 + 1 is 258, while a bfloat16 sum would stay at 256."""
    bfloat16 = row_inputs(DISPATCHES[4], 1, "bfloat16")["rows"].dtype
    rows = np.array([[256], [1], [1]]).astype(bfloat16)
    inputs = {"grad_rows": rows, "row_of_slot": np.array([[0, 1, 2]], "i4")}
    assert adapter.call("permute_bwd", inputs, {})["grad_x"][0, 0] == 258
    forward = {
        "rows": rows,
        "row_of_slot": inputs["row_of_slot"],
        "slot_of_row": np.arange(3, dtype="i4"),
    }
    assert adapter.call("combine", forward, {})["y"][0, 0] == 258


def test_permute_then_combine_is_the_identity_for_one_slot(adapter: Adapter) -> None:
    x = np.arange(30, dtype="f4").reshape(6, 5)
    plan = plan_of(adapter, [[3], [1], [0], [3], [2], [1]], 4, alignment=4, num_rows=24)
    both = {n: plan[n] for n in ("row_of_slot", "slot_of_row")}
    rows = adapter.call("permute", {"x": x, **both}, {})["rows"]
    np.testing.assert_array_equal(rows, oracle.permute(x=x, **both)["rows"])
    np.testing.assert_array_equal(adapter.call("combine", {"rows": rows, **both}, {})["y"], x)


def test_outputs_past_the_caches(adapter: Adapter) -> None:
    """Large outputs are written another way; padding rows lie between the others."""
    rng = np.random.default_rng(5)
    tokens, experts, top_k, width = 1200, 6, 3, 2500
    indices = rng.random((tokens, experts)).argsort(axis=1)[:, :top_k]
    plan = plan_of(adapter, indices, experts, alignment=64, num_rows=tokens * top_k + 384)
    slot_of_row = plan["slot_of_row"]
    kept = slot_of_row >= 0
    x, weights = (rng.standard_normal((tokens, n)).astype("f4") for n in (width, top_k))
    token_of_row = slot_of_row // top_k
    rows = adapter.call(
        "permute",
        {"x": x, "row_of_slot": plan["row_of_slot"], "slot_of_row": slot_of_row},
        {},
    )["rows"]
    assert rows.nbytes >= 2**25
    np.testing.assert_array_equal(rows, np.where(kept[:, None], x[token_of_row], 0))
    inputs = {"grad_y": x, "rows": rows, "weights": weights}
    inputs |= {name: plan[name] for name in ("row_of_slot", "slot_of_row")}
    grad_rows = adapter.call("combine_bwd", inputs, {})["grad_rows"]
    factor = np.where(kept, weights.reshape(-1)[slot_of_row], 0)[:, None]
    np.testing.assert_array_equal(grad_rows, np.where(kept[:, None], factor * x[token_of_row], 0))
