# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The ops from the plan on: the CUDA kernels against the CPU kernels, the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from adapters import BFLOAT16, bits
from cuda_checks import (
    FLOATS,
    MARKS,
    Check,
    Rng,
    name_of,
    normal,
    plan_attributes,
    random_ids,
)
from duomoe.config import ACTIVATIONS

pytestmark = MARKS

# --- dispatch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0, 1, 7, 130, 1000])
@pytest.mark.parametrize(("e", "k"), [(1, 1), (5, 5), (8, 2), (64, 6), (256, 8), (896, 16)])
def test_plan_dispatch(check: Check, rng: Rng, t: int, e: int, k: int) -> None:
    ids = random_ids(rng, t, k, e)
    weights = np.round(normal(rng, t, k), 1)  # many ties
    weights[:1] = np.nan
    mean = t * k // e
    for options in (
        {},
        {"alignment": 16, "capacity": mean},
        {"capacity": mean + 1, "alignment": 8, "drop_order": "weight"},
        {"capacity": mean // 2 + 1, "drop_order": "weight"},
        {"capacity": 0, "drop_order": "weight"},
        {"capacity": mean + 1, "drop_order": "weight", "max_rows": t * k // 2},
        {"alignment": 4, "max_rows": t * k // 8 * 4},
        {"max_rows": 0},
    ):
        inputs = {"indices": ids, "weights": weights}
        check("plan_dispatch", inputs, plan_attributes(t, k, e, **options))


def test_plan_dispatch_many_slots_one_expert(check: Check, rng: Rng) -> None:
    t, k, e = 90000, 8, 64  # blocks of more than 512 slots
    ids = np.where(rng.random((t, k)) < 0.9, 5, rng.integers(0, e, (t, k))).astype(np.int32)
    inputs = {"indices": ids, "weights": np.round(normal(rng, t, k), 3)}
    for order in ("position", "weight"):
        check("plan_dispatch", inputs, plan_attributes(t, k, e, capacity=20000, drop_order=order))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("t", "k"), [(0, 2), (1, 1), (7, 3), (130, 4)])
@pytest.mark.parametrize("d", [1, 64, 333, 1000])
def test_rows(check: Check, rng: Rng, dtype: Any, t: int, k: int, d: int) -> None:
    indices = {"indices": random_ids(rng, t, k, 9)}
    plan = check("plan_dispatch", indices, plan_attributes(t, k, 9, capacity=t, alignment=4))
    for broken in (False, True):  # a plan from elsewhere, with numbers out of range
        if broken and t:
            plan["row_of_slot"][0, 0] = 2**31 - 1
            plan["slot_of_row"][0] = t * k
        to_rows = {name: plan[name] for name in ("row_of_slot", "slot_of_row")}
        x, y = (normal(rng, n, d, dtype=dtype) for n in (t, len(plan["slot_of_row"])))
        to_slots = {"row_of_slot": plan["row_of_slot"]}
        check("permute_bwd_weights", {"grad_rows": y, "x": x, **to_slots}, {})
        for w in (None, normal(rng, t, k)):
            check("permute", {"x": x, **to_rows, "weights": w}, {})
            check("permute_bwd", {"grad_rows": y, **to_slots, "weights": w}, {})
            check("combine", {"rows": y, **to_rows, "weights": w}, {})
            check("combine_bwd", {"grad_y": x, "rows": y, **to_rows, "weights": w}, {})


@pytest.mark.parametrize(("t", "k", "d"), [(48000, 3, 1024), (9500, 8, 5000)])
def test_permute_of_many_large_rows(check: Check, rng: Rng, t: int, k: int, d: int) -> None:
    indices = {"indices": random_ids(rng, t, k, 9)}
    plan = check("plan_dispatch", indices, plan_attributes(t, k, 9, capacity=t // 3, alignment=16))
    x = rng.integers(0, 2**15, (t, d), np.uint16).view(BFLOAT16)
    for broken in (False, True):
        for numbers in (plan["row_of_slot"].reshape(-1), plan["slot_of_row"]) if broken else ():
            at = rng.integers(0, len(numbers), len(numbers) // 9)
            numbers[at] = rng.integers(-2, t * k + 9, len(at))
            numbers[at[0]] = 2**31 - 1
        check("permute", {"x": x, **{n: plan[n] for n in ("row_of_slot", "slot_of_row")}}, {})


@pytest.mark.parametrize(
    ("t", "e"), [(0, 3), (1, 1), (7, 33), (31, 64), (130, 5), (5000, 40), (300, 1000)]
)
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_plan_mask(check: Check, rng: Rng, t: int, e: int, density: float) -> None:
    mask = rng.random((t, e)) < density
    total = int(mask.sum())
    for limit, alignment, part in ((-1, 1, 1), (total // 2, 1, 1), (-1, 8, 1), (-1, 5, 0.5)):
        rows = int((total + e * (alignment - 1)) // alignment * alignment * part)
        attributes = {"num_rows": rows, "limit": limit, "alignment": alignment}
        plan = check("plan_mask", {"routing_map": mask}, {**attributes, "map_width": 2 * e + 1})
        for broken in (False, True):
            if broken and t:
                plan["row_id_map"][::2] = rng.integers(-3, e + 3, (t + 1) // 2)[:, None]
                plan["row_id_map"][0, :e] = 2**31 - 1
            given = {"row_id_map": plan["row_id_map"]}
            sizes = {"num_experts": e, "num_rows": rows}
            check("read_row_map", given, sizes)
            check("read_row_map", {**given, "pad_offsets": plan["pad_offsets"]}, sizes)
        check("invert_rows", {"row_of_slot": plan["row_of_slot"]}, {"num_rows": rows // 2 + 1})


@pytest.mark.parametrize(("t", "k"), [(0, 1), (1, 1), (7, 3), (600, 2), (70000, 3)])
@pytest.mark.parametrize("largest", [5, 3000, 2**31 - 1])
def test_sort_slots(check: Check, rng: Rng, t: int, k: int, largest: int) -> None:
    ids = rng.integers(-largest // 4, largest, (t, k)).astype(np.int32)
    for rows in (t * k, t * k // 2, t * k + 5):
        check("sort_slots", {"indices": ids}, {"num_rows": rows})
    repeated = (ids % max(1, t)).astype(np.int32)
    check("invert_rows", {"row_of_slot": repeated}, {"num_rows": t})


@pytest.mark.parametrize(
    ("t", "c"), [(0, 0), (0, 3), (1, 1), (7, 0), (65, 8), (130, 300), (90000, 2000)]
)
def test_place_chunks(check: Check, rng: Rng, t: int, c: int) -> None:
    wild = rng.choice([2**31 - 1, -(2**31), -1, 0, 1], c)
    for total in (t, t // 2, 2 * t + 3):
        sizes = rng.multinomial(total, np.ones(c) / c) if c else np.zeros(0)
        for order in (rng.permutation(c), rng.integers(-2, c + 2, c)):
            for s in (sizes, np.where(rng.random(c) < 0.3, wild, sizes)):
                inputs = {
                    "split_sizes": s.astype(np.int32),
                    "sorted_indices": order.astype(np.int32),
                }
                check("place_chunks", inputs, {"num_tokens": t})


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("t", "d"), [(0, 5), (1, 1), (130, 333), (3, 5000)])
def test_scale_rows(check: Check, rng: Rng, dtype: Any, t: int, d: int) -> None:
    x, y = (normal(rng, t, d, dtype=dtype) for _ in range(2))
    scale = normal(rng, t)
    check("scale_rows", {"x": x, "scale": scale}, {})
    check("scale_rows_bwd", {"grad_y": y, "x": x, "scale": scale}, {})


@pytest.mark.parametrize("t", [0, 1, 255, 70000])
@pytest.mark.parametrize("k", [1, 8, 32])
def test_count_mismatches(check: Check, rng: Rng, t: int, k: int) -> None:
    indices = rng.integers(-2, 40, (t, k)).astype(np.int32)
    changed = rng.random((t, k)) < 0.3 / k
    others = np.where(changed, indices + 1, rng.permuted(indices, axis=1)).astype(np.int32)
    counts = check("count_mismatches", {"indices": indices, "others": others}, {})
    assert t < 255 or 0 < counts["mismatched_tokens"] < t


# --- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(0, 0), (1, 1), (2, 1), (0, 2)])
@pytest.mark.parametrize(
    ("t", "k", "e"), [(0, 1, 3), (1, 1, 1), (7, 3, 5), (130, 2, 8), (60, 4, 64)]
)
@pytest.mark.parametrize(("d", "n"), [(1, 1), (33, 65), (300, 100)])
def test_grouped_matmul(
    check: Check, rng: Rng, dtypes: Any, t: int, k: int, e: int, d: int, n: int
) -> None:
    x_dtype, w_dtype = (FLOATS[i] for i in dtypes)
    indices = {"indices": random_ids(rng, t, k, e)}
    plan = check("plan_dispatch", indices, plan_attributes(t, k, e, alignment=8))
    for broken in (False, True):
        if broken:
            plan["expert_offsets"][1:] += 3
            plan["expert_counts"][::2] = -1
        groups = {name: plan[name] for name in ("expert_offsets", "expert_counts")}
        rows = len(plan["slot_of_row"])
        x, w = normal(rng, rows, d, dtype=x_dtype), normal(rng, e, d, n, dtype=w_dtype)
        if not broken:  # what padding rows hold must not matter
            x[plan["slot_of_row"] < 0] = np.nan
        grad = normal(rng, rows, n, dtype=x_dtype)
        for out in FLOATS:
            for bias in (None, normal(rng, e, n, dtype=out)):
                inputs = {"rows": x, "w": w, **groups, "bias": bias}
                check("grouped_matmul", inputs, {"out_dtype": name_of(out)})
            inputs = {"grad_out": grad, "w": w, **groups}
            check("grouped_matmul_bwd_rows", inputs, {"rows_dtype": name_of(out)})
            inputs = {"rows": x, "grad_out": grad, **groups}
            result = check("grouped_matmul_bwd_w", inputs, {"w_dtype": name_of(out)})
            assert not bits(result["grad_w"][plan["expert_counts"] <= 0]).any()
            inputs = {"grad_out": grad, **groups}
            result = check("grouped_matmul_bwd_bias", inputs, {"bias_dtype": name_of(out)})
            assert not bits(result["grad_bias"][plan["expert_counts"] <= 0]).any()


def test_bias_gradient_of_many_rows(check: Check, rng: Rng) -> None:
    """More rows of one expert than a block sums at once, beside experts of few."""
    counts = np.array([3, 20000, 0, 257], np.int32)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    grad = normal(rng, int(offsets[-1]), 40)
    inputs = {"grad_out": grad, "expert_offsets": offsets, "expert_counts": counts}
    check("grouped_matmul_bwd_bias", inputs, {"bias_dtype": "float32"})


@pytest.mark.parametrize("gate_dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("t", "d"), [(0, 5), (1, 1), (7, 300), (130, 64), (9000, 3)])
@pytest.mark.parametrize("e", [1, 70])
def test_gate(check: Check, rng: Rng, gate_dtype: Any, t: int, d: int, e: int) -> None:
    for x_dtype, w_dtype in zip(FLOATS, FLOATS[::-1], strict=True):
        x, router = normal(rng, t, d, dtype=x_dtype), normal(rng, d, e, dtype=w_dtype)
        grad = normal(rng, t, e, dtype=gate_dtype)
        gate = {"gate_dtype": name_of(gate_dtype)}
        for bias in (None, normal(rng, e, dtype=w_dtype)):
            check("gate", {"x": x, "router": router, "router_bias": bias}, gate)
        inputs = {"grad_logits": grad, "router": router}
        check("gate_bwd_x", inputs, {**gate, "x_dtype": name_of(x_dtype)})
        kinds = {"router_dtype": name_of(w_dtype), "router_bias_dtype": name_of(x_dtype)}
        check("gate_bwd_params", {"grad_logits": grad, "x": x}, {**gate, **kinds})


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("r", "f"), [(0, 3), (1, 1), (130, 333)])
def test_add(check: Check, rng: Rng, dtype: Any, r: int, f: int) -> None:
    a, b = (normal(rng, r, f, dtype=dtype, spread=20.0) for _ in range(2))
    check("add", {"a": a, "b": b}, {})
    with np.errstate(over="ignore"):
        cubes = a * a * a
    for out in FLOATS:
        check("cast", {"x": cubes}, {"out_dtype": name_of(out)})


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(check: Check, rng: Rng, dtype: Any, activation: str) -> None:
    """Both tails, denormals, infinities and NaN."""
    shape = (131, 333)
    spread = rng.choice([1.0, 10.0, 100.0], shape)
    x, up, grad = ((spread * rng.standard_normal(shape)).astype(np.float32) for _ in range(3))
    edges = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, -1e-40, 3e38, -3e38, -92, -13, 7])
    x[:, :12], up[:, 20:32] = edges, edges
    with np.errstate(over="ignore"):
        x, up, grad = (v.astype(dtype) for v in (x, up, grad))
    for alpha in (1.0, 1.702, -0.5):
        options = {"activation": activation, "alpha": alpha}
        check("activate", {"x": x}, options)
        check("activate_bwd", {"grad_out": grad, "x": x}, options)
        for limit, offset in ((0.0, 0.0), (7.0, 1.0)):
            glu = {**options, "limit": limit, "up_offset": offset}
            check("glu", {"gate": x, "up": up}, glu)
            check("glu_bwd", {"grad_out": grad, "gate": x, "up": up}, glu)
