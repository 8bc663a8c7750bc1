# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs for the ops that say where rows go, with numbers out of range among them, and for cast."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from adapters import DTYPES
from duomoe import ops, oracle
from oracle_cases_dense import ID_KINDS, draw_ids
from oracle_draws import SIZES, Attributes, Case, Inputs, rng_of

MASK_SIZES = (*SIZES, (3000, 3, 1), (1, 300, 7))
WILD = (2**31 - 1, -(2**31), -1, 0, 1)


def draw_mask(tokens: int, experts: int, top_k: int, kind: str) -> np.ndarray:
    """[T, E]: K of each token; any number of each; all; experts and tokens without rows."""
    rng = rng_of("mask", tokens, experts, top_k, kind)
    if kind == "full":
        return np.ones((tokens, experts), bool)
    if kind == "chosen":
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
        return (ids[..., None] == np.arange(experts)).any(axis=1)
    marks = rng.random((tokens, experts)) < 0.3
    return marks & (rng.random(experts) < 0.6) & (rng.random((tokens, 1)) < 0.8)


MASK_KINDS = ("chosen", "sparse", "full")
# Rows by `limit`, by num_rows, padded.
CUTS = ({}, {"limit": 0.6}, {"alignment": 8}, {"alignment": 5, "limit": 0.5}, {"rows": 0.4})


def masked(size: Any, kind: str, cut: dict[str, Any]) -> tuple[Inputs, Attributes]:
    mask = draw_mask(*size, kind)
    total, alignment = int(mask.sum()), cut.get("alignment", 1)
    limit = int(total * cut["limit"]) if "limit" in cut else -1
    rows = (total if limit < 0 else limit) + mask.shape[1] * (alignment - 1)
    rows = int(rows // alignment * alignment * cut.get("rows", 1))
    attributes = {"num_rows": rows, "limit": limit, "alignment": alignment}
    return {"routing_map": mask}, {**attributes, "map_width": 2 * mask.shape[1] + 1}


def mask_cases() -> Iterator[Case]:
    for (size, kind), cut in zip(
        itertools.product(MASK_SIZES, MASK_KINDS), itertools.cycle(CUTS), strict=False
    ):
        name = "-".join(map(str, (*size, kind, *itertools.chain(*cut.items()))))
        yield Case(name, lambda s=size, k=kind, c=cut: masked(s, k, c))


def reading(size: Any, padded: bool, broken: bool) -> tuple[Inputs, Attributes]:
    given, attributes = masked(size, "chosen", {"alignment": 4})
    plan = oracle.plan_mask(**given, **attributes)
    rng, experts = rng_of("reading", size, padded, broken), given["routing_map"].shape[1]
    row_map, pads = plan["row_id_map"], plan["pad_offsets"]
    if broken:
        row_map = np.where(
            rng.random(row_map.shape) < 0.2, rng.choice(WILD, row_map.shape), row_map
        )
        row_map[:, -1] = rng.integers(-1, experts + 3, len(row_map))
        pads = np.where(rng.random(experts) < 0.3, rng.choice(WILD, experts), pads)
    inputs = {"row_id_map": row_map.astype("i4")}
    if padded:
        inputs["pad_offsets"] = pads.astype("i4")
    return inputs, {"num_experts": experts, "num_rows": attributes["num_rows"]}


def reading_cases() -> Iterator[Case]:
    for size, padded, broken in itertools.product(SIZES, (False, True), (False, True)):
        name = f"{'-'.join(map(str, size))}{'-padded' if padded else ''}{'-broken' * broken}"
        yield Case(name, lambda o=(size, padded, broken): reading(*o))


def inverting(size: Any, kind: str) -> tuple[Inputs, Attributes]:
    rng = rng_of("inverting", size, kind)
    tokens, _, top_k = size
    slots = tokens * top_k
    if kind == "permutation":
        rows = rng.permutation(slots)
    else:  # repeats, unused slots and numbers out of range
        rows = rng.integers(-2, max(2, slots // 2), slots)
        rows = np.where(rng.random(slots) < 0.1, rng.choice(WILD, slots), rows)
    return {"row_of_slot": rows.reshape(tokens, top_k).astype("i4")}, {"num_rows": slots // 2 + 3}


def inverting_cases() -> Iterator[Case]:
    for size, kind in itertools.product(SIZES, ("permutation", "any")):
        name = f"{'-'.join(map(str, size))}-{kind}"
        yield Case(name, lambda s=size, k=kind: inverting(s, k))


def sorting(size: Any, kind: str, part: float) -> tuple[Inputs, Attributes]:
    if kind == "large":
        rng = rng_of("sorting", size)
        ids = rng.integers(-(2**20), 2**31, (size[0], size[2])).astype("i4")
    else:
        ids = draw_ids(*size, kind)
    return {"indices": ids}, {"num_rows": int(ids.size * part)}


def sorting_cases() -> Iterator[Case]:
    kinds = (*ID_KINDS, "large")
    sizes = (*SIZES, (3000, 5000, 2))
    for (size, kind), part in zip(
        itertools.product(sizes, kinds), itertools.cycle((1, 0.5, 1.5)), strict=False
    ):
        name = f"{'-'.join(map(str, size))}-{kind}-{part}"
        yield Case(name, lambda o=(size, kind, part): sorting(*o))


CHUNK_KINDS = ("exact", "fewer", "more", "wild", "repeated", "empty")


def chunking(tokens: int, chunks: int, kind: str) -> tuple[Inputs, Attributes]:
    rng = rng_of("chunking", tokens, chunks, kind)
    total = {"fewer": tokens // 2, "more": 2 * tokens + 3, "empty": 0}.get(kind, tokens)
    sizes = rng.multinomial(total, np.ones(chunks) / chunks) if chunks else np.zeros(0)
    order = rng.permutation(chunks)
    if kind == "wild":
        sizes = np.where(rng.random(chunks) < 0.3, rng.choice(WILD, chunks), sizes)
        order = np.where(rng.random(chunks) < 0.3, rng.choice(WILD, chunks), order)
    if kind == "repeated" and chunks:
        order = rng.integers(0, chunks, chunks)
    inputs = {"split_sizes": sizes.astype("i4"), "sorted_indices": order.astype("i4")}
    return inputs, {"num_tokens": tokens}


def chunk_cases() -> Iterator[Case]:
    sizes = ((0, 0), (0, 4), (1, 1), (7, 0), (7, 3), (65, 8), (130, 300), (5000, 7))
    for (tokens, chunks), kind in itertools.product(sizes, CHUNK_KINDS):
        name = f"{tokens}-{chunks}-{kind}"
        yield Case(name, lambda o=(tokens, chunks, kind): chunking(*o))


def casting(name: str, shape: tuple[int, int], source: str, target: str, options: Any) -> Any:
    rng = rng_of("casting", shape, source, target)
    # Among them are denormals of every dtype, and infinities.
    values = rng.normal(size=shape) * 2.0 ** rng.integers(-145, 12, shape)
    values = np.where(rng.random(shape) < 0.05, np.inf, values)
    inputs = {name: values.astype("f4").astype(DTYPES[source])}
    return inputs, dict(zip(options, (target, source), strict=False))


def cast_cases(name: str, *options: str) -> Iterator[Case]:
    """`options` are the dtype of the result and, for the gradient, that of its input."""
    shapes = itertools.cycle(((0, 3), (1, 1), (7, 33), (130, 257)))
    for source, target, shape in zip(
        *zip(*itertools.product(ops.FLOAT_DTYPES, repeat=2), strict=True), shapes, strict=False
    ):
        label = f"{'-'.join(map(str, shape))}-{source}-{target}"
        yield Case(label, lambda o=(name, shape, source, target, options): casting(*o))


CASES: dict[str, list[Case]] = {
    "plan_mask": list(mask_cases()),
    "read_row_map": list(reading_cases()),
    "invert_rows": list(inverting_cases()),
    "sort_slots": list(sorting_cases()),
    "place_chunks": list(chunk_cases()),
    "cast": list(cast_cases("x", "out_dtype")),
    "cast_bwd": list(cast_cases("grad_out", "x_dtype", "out_dtype")),
}
