# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of the plan and of moving rows on random calls: the bits of the CPU kernels."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_draws import MOVES, PLAN, Call, Choice, cover, move_calls, plan_call
from cuda_targets import TARGETS, Target, check_all

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

COUNTS = {"cpu": 60, "cuda": 300, "jax": 24}


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("name", TARGETS)
def test_plan_dispatch(name: str, part: int) -> None:
    target = Target(name)
    check_all(cover(PLAN, COUNTS[name], part), lambda choice: target.check(plan_call(choice)))


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("name", TARGETS)
def test_moving_rows(name: str, part: int) -> None:
    target = Target(name)

    def check(choice: Choice) -> None:
        for call in move_calls(choice, target.cpu.call):
            target.check(call)

    count = {"cpu": 20, "cuda": 150, "jax": 10}[name]
    check_all(cover(MOVES, count, part), check)


@pytest.mark.parametrize(
    ("t", "e", "k"), [(40_001, 8, 2), (33_333, 128, 8), (20_011, 256, 8), (9_001, 2304, 36)]
)
@pytest.mark.parametrize("name", [pytest.param("cpu", marks=pytest.mark.slow), TARGETS[1]])
def test_plan_of_many_slots(name: str, t: int, e: int, k: int) -> None:
    """More blocks of slots than a grid holds at once."""
    target = Target(name)
    axes = {
        "experts": [e],
        "top_k": [k],
        "tokens": [t],
        "ids": PLAN["ids"],
        "weights": ["ties", "normal"],
        "capacity": [None, None, "mean", "half"],
        "alignment": [1, 16],
        "max_rows": [None, None, "half"],
        "more_rows": [0],
        "drop_order": ["position", "weight"],
    }
    check_all(cover(axes, 10, e), lambda choice: target.check(plan_call(choice)))


@pytest.mark.parametrize("name", TARGETS[:2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_rows(name: str, dtype: str) -> None:
    """A plan without rows, and tokens none of whose slots has one."""
    target = Target(name)
    choice = {a: v[0] for a, v in MOVES.items()} | {"dtype": dtype, "width": 64, "seed": (1,)}
    for t, r in ((5, 0), (5, 3), (0, 4)):
        choice["tokens"] = t
        none = {
            "row_of_slot": np.full((t, 1), -1, np.int32),
            "slot_of_row": np.full(r, -1, np.int32),
        }
        for call in move_calls(choice, lambda *_, none=none: none):
            outputs = target.check(call)
            assert not any(o.astype(np.float32).any() for o in outputs.values()), call.op


@pytest.mark.parametrize("name", TARGETS[:2])
def test_plan_of_slots_without_an_expert(name: str) -> None:
    """No slot counts for an id outside [0, E)."""
    e = 7
    ids = np.array([[-1, e], [2**31 - 1, -(2**31)], [3, e + 25]], np.int32)
    attributes = {"num_experts": e, "num_rows": 6, "capacity": -1, "drop_order": "position"}
    call = Call("plan_dispatch", {"indices": ids}, {**attributes, "alignment": 1})
    plan = Target(name).check(call)
    assert plan["routed_counts"].tolist() == plan["expert_counts"].tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert plan["slot_of_row"].tolist() == [4, -1, -1, -1, -1, -1]
