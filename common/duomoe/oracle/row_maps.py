# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Where rows go, in the forms that other libraries exchange."""

from __future__ import annotations

import numpy as np

from duomoe.oracle.float64 import Array, Outputs, f64


def plan_mask(
    *, routing_map: Array, num_rows: int, map_width: int, limit: int, alignment: int
) -> Outputs:
    """routing_map[T,E] -> row_of_slot[T,E], slot_of_row[R], row_id_map[T,W], counts, offsets."""
    tokens, experts = routing_map.shape
    row_of_slot = np.full((tokens, experts), -1, np.int32)
    unpadded_row = np.full((tokens, experts), -1, np.int32)
    slot_of_row = np.full(num_rows, -1, np.int32)
    kept = np.zeros(experts, np.int32)
    expert_offsets = np.zeros(experts + 1, np.int32)
    pad_offsets = np.zeros(experts, np.int32)
    left = limit if limit >= 0 else tokens * experts
    for e in range(experts):
        asked = np.flatnonzero(routing_map[:, e])[:left]
        left -= len(asked)
        begin, unpadded = expert_offsets[e], kept.sum()
        chosen = asked[: num_rows - begin]
        pad_offsets[e] = begin - unpadded
        for i, t in enumerate(chosen):
            row_of_slot[t, e] = begin + i
            unpadded_row[t, e] = unpadded + i
            slot_of_row[begin + i] = t * experts + e
        kept[e] = len(chosen)
        blocks = -(-len(chosen) // alignment)
        expert_offsets[e + 1] = min(num_rows, begin + blocks * alignment)
    row_id_map = np.full((tokens, map_width), -1, np.int32)
    for t in range(tokens):
        ids = np.flatnonzero(unpadded_row[t] >= 0)[::-1]
        row_id_map[t, : len(ids)] = unpadded_row[t, ids]
        row_id_map[t, experts : experts + len(ids)] = ids
        row_id_map[t, -1] = len(ids)
    return {
        "row_of_slot": row_of_slot,
        "slot_of_row": slot_of_row,
        "row_id_map": row_id_map,
        "expert_counts": kept,
        "routed_counts": routing_map.sum(axis=0, dtype=np.int32),
        "expert_offsets": expert_offsets,
        "pad_offsets": pad_offsets,
    }


def read_row_map(
    *, row_id_map: Array, pad_offsets: Array | None = None, num_experts: int, num_rows: int
) -> Outputs:
    """row_id_map[T,W], pad_offsets[E] -> row_of_slot[T,E]."""
    row_of_slot = np.full((len(row_id_map), num_experts), -1, np.int32)
    for t, line in enumerate(row_id_map):
        for i in range(min(max(line[-1], 0), num_experts)):
            row, e = int(line[i]), int(line[num_experts + i])
            if row < 0 or not 0 <= e < num_experts:
                continue
            row += 0 if pad_offsets is None else int(pad_offsets[e])
            row_of_slot[t, e] = row if 0 <= row < num_rows else -1
    return {"row_of_slot": row_of_slot}


def invert_rows(*, row_of_slot: Array, num_rows: int) -> Outputs:
    """row_of_slot[T,K] -> slot_of_row[R]."""
    slot_of_row = np.full(num_rows, -1, np.int32)
    for slot, row in enumerate(row_of_slot.reshape(-1)):
        if 0 <= row < num_rows:
            slot_of_row[row] = slot
    return {"slot_of_row": slot_of_row}


def sort_slots(*, indices: Array, num_rows: int) -> Outputs:
    """indices[T,K] -> row_of_slot[T,K], slot_of_row[R]."""
    ids = indices.reshape(-1)
    order = np.argsort(ids, kind="stable")
    order = order[ids[order] >= 0][:num_rows]
    slot_of_row = np.full(num_rows, -1, np.int32)
    slot_of_row[: len(order)] = order
    row_of_slot = np.full(ids.shape, -1, np.int32)
    row_of_slot[order] = np.arange(len(order))
    return {"row_of_slot": row_of_slot.reshape(indices.shape), "slot_of_row": slot_of_row}


def place_chunks(*, split_sizes: Array, sorted_indices: Array, num_tokens: int) -> Outputs:
    """split_sizes[C], sorted_indices[C] -> row_of_token[T], token_of_row[T]."""
    row_of_token = np.full(num_tokens, -1, np.int32)
    token_of_row = np.full(num_tokens, -1, np.int32)
    sizes = [max(0, int(n)) for n in split_sizes]
    row, placed = 0, set()
    for c in map(int, sorted_indices):
        if not 0 <= c < len(sizes):
            continue
        for i in range(sizes[c] if c not in placed else 0):
            token = sum(sizes[:c]) + i
            if max(token, row + i) >= num_tokens:
                break
            row_of_token[token] = row + i
            token_of_row[row + i] = token
        placed.add(c)
        row += sizes[c]
    return {"row_of_token": row_of_token, "token_of_row": token_of_row}


def cast(*, x: Array, out_dtype: str) -> Outputs:
    """x[R,D] -> out[R,D]."""
    return {"out": f64(x)}


def cast_bwd(*, grad_out: Array, out_dtype: str, x_dtype: str) -> Outputs:
    """grad_out[R,D] -> grad_x[R,D]."""
    return {"grad_x": f64(grad_out)}
