# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The plan that orders slots by expert, the moves of rows along it, and how two routings differ."""

from __future__ import annotations

from collections import Counter

import numpy as np

from duomoe.oracle.float64 import Array, Outputs, f64
from duomoe.oracle.scores import ranking


def plan_dispatch(
    *,
    indices: Array,
    weights: Array | None = None,
    num_experts: int,
    num_rows: int,
    capacity: int,
    drop_order: str,
    alignment: int,
) -> Outputs:
    """indices[T,K], weights[T,K] -> row_of_slot[T,K], slot_of_row[R], counts[E], offsets[E+1]."""
    experts = indices.reshape(-1)
    row_of_slot = np.full(experts.shape, -1, np.int32)
    slot_of_row = np.full(num_rows, -1, np.int32)
    expert_counts = np.zeros(num_experts, np.int32)
    routed_counts = np.zeros(num_experts, np.int32)
    expert_offsets = np.zeros(num_experts + 1, np.int32)
    for e in range(num_experts):
        slots = np.flatnonzero(experts == e)
        routed_counts[e] = len(slots)
        if capacity >= 0:
            if drop_order == "weight":
                assert weights is not None
                slots = slots[ranking(f64(weights).reshape(-1)[slots])]
            slots = np.sort(slots[:capacity])
        slots = slots[: num_rows - expert_offsets[e]]
        expert_counts[e] = len(slots)
        for row, slot in enumerate(slots, expert_offsets[e]):
            row_of_slot[slot] = row
            slot_of_row[row] = slot
        blocks = -(-len(slots) // alignment)
        expert_offsets[e + 1] = expert_offsets[e] + blocks * alignment
    return {
        "row_of_slot": row_of_slot.reshape(indices.shape),
        "slot_of_row": slot_of_row,
        "expert_counts": expert_counts,
        "routed_counts": routed_counts,
        "expert_offsets": expert_offsets,
    }


def permute(
    *, x: Array, row_of_slot: Array, slot_of_row: Array, weights: Array | None = None
) -> Outputs:
    """x[T,D], weights[T,K] -> rows[R,D]."""
    rows = np.zeros((len(slot_of_row), x.shape[1]))
    for r, slot in enumerate(slot_of_row):
        if slot >= 0:
            t, k = divmod(slot, row_of_slot.shape[1])
            rows[r] = (1.0 if weights is None else float(weights[t, k])) * f64(x[t])
    return {"rows": rows}


def permute_bwd(*, grad_rows: Array, row_of_slot: Array, weights: Array | None = None) -> Outputs:
    """grad_rows[R,D], weights[T,K] -> grad_x[T,D]."""
    grad_x = np.zeros((len(row_of_slot), grad_rows.shape[1]))
    for t, k in np.argwhere(row_of_slot >= 0):
        weight = 1.0 if weights is None else float(weights[t, k])
        grad_x[t] += weight * f64(grad_rows[row_of_slot[t, k]])
    return {"grad_x": grad_x}


def permute_bwd_weights(*, grad_rows: Array, x: Array, row_of_slot: Array) -> Outputs:
    """grad_rows[R,D], x[T,D] -> grad_weights[T,K]."""
    grad_weights = np.zeros(row_of_slot.shape)
    for t, k in np.argwhere(row_of_slot >= 0):
        grad_weights[t, k] = f64(x[t]) @ f64(grad_rows[row_of_slot[t, k]])
    return {"grad_weights": grad_weights}


def combine(
    *, rows: Array, row_of_slot: Array, slot_of_row: Array, weights: Array | None = None
) -> Outputs:
    """rows[R,D], weights[T,K] -> y[T,D]."""
    y = np.zeros((len(row_of_slot), rows.shape[1]))
    for t, k in np.argwhere(row_of_slot >= 0):
        weight = 1.0 if weights is None else float(weights[t, k])
        y[t] += weight * f64(rows[row_of_slot[t, k]])
    return {"y": y}


def combine_bwd(
    *,
    grad_y: Array,
    rows: Array,
    row_of_slot: Array,
    slot_of_row: Array,
    weights: Array | None = None,
) -> Outputs:
    """grad_y[T,D], rows[R,D], weights[T,K] -> grad_rows[R,D], grad_weights[T,K]."""
    grad_rows, grad_weights = np.zeros(rows.shape), np.zeros(row_of_slot.shape)
    for t, k in np.argwhere(row_of_slot >= 0):
        row = row_of_slot[t, k]
        weight = 1.0 if weights is None else float(weights[t, k])
        grad_rows[row] = weight * f64(grad_y[t])
        grad_weights[t, k] = f64(grad_y[t]) @ f64(rows[row])
    return {"grad_rows": grad_rows, "grad_weights": grad_weights}


def count_mismatches(*, indices: Array, others: Array) -> Outputs:
    """indices[T,K], others[T,K] -> mismatched_tokens, mismatched_slots."""
    tokens = slots = 0
    for a, b in zip(indices, others, strict=True):
        mine, theirs = Counter(a[a >= 0].tolist()), Counter(b[b >= 0].tolist())
        tokens += mine != theirs
        slots += (mine - theirs).total()
    return {
        "mismatched_tokens": np.array(tokens, np.int32),
        "mismatched_slots": np.array(slots, np.int32),
    }
