# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs for the ops on [T, E] matrices, and for the loss over one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from adapters import DTYPES
from duomoe import ops
from oracle_draws import SCORES, SIZES, Attributes, Case, Inputs, draw_row, rng_of

# More slots than experts, so some repeat; and as many experts as fill their bytes.
ID_SIZES = (*SIZES, (7, 3, 8), (65, 1, 3), (7, 16, 2), (7, 9, 9))
ID_KINDS = ("distinct", "any", "extreme")


def draw_ids(tokens: int, experts: int, top_k: int, kind: str) -> np.ndarray:
    """[T, K]: distinct where there are enough; with repeats and unused slots; or ids at a limit."""
    rng = rng_of("ids", tokens, experts, top_k, kind)
    shape = (tokens, top_k)
    if kind == "distinct" and top_k <= experts:
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
    elif kind == "extreme":
        ids = rng.choice([2**31 - 1, -(2**31), experts, experts - 1, 0, -1], shape)
    else:
        ids = rng.integers(-2, experts + 2, shape)
    return ids.astype("i4")


def id_cases(make: Callable[[np.ndarray, int, str], Any]) -> Iterator[Case]:
    """Cases made from indices[T,K], E and a float dtype."""
    dtypes = itertools.cycle(ops.FLOAT_DTYPES)
    for (size, kind), dtype in zip(itertools.product(ID_SIZES, ID_KINDS), dtypes, strict=False):
        name = f"{'-'.join(map(str, size))}-{kind}-{dtype}"
        yield Case(name, lambda s=size, k=kind, d=dtype: make(draw_ids(*s, k), s[1], d))


def scattering(indices: np.ndarray, experts: int, dtype: str) -> Any:
    weights = rng_of("weights", indices.shape).normal(size=indices.shape).astype("f4")
    attributes = {"num_experts": experts, "probs_dtype": dtype}
    return {"weights": weights, "indices": indices}, attributes


def scattering_bwd(indices: np.ndarray, experts: int, dtype: str) -> Any:
    shape = (len(indices), experts)
    grad = rng_of("grad_probs", shape).normal(size=shape).astype(DTYPES[dtype])
    attributes = {"num_experts": experts, "probs_dtype": dtype}
    return {"grad_probs": grad, "indices": indices}, attributes


def marking(indices: np.ndarray, experts: int, _: str) -> Any:
    return {"indices": indices}, {"num_experts": experts}


def marking_bits(indices: np.ndarray, experts: int, _: str) -> Any:
    return {"indices": indices}, {"num_experts": experts, "num_bytes": -(-experts // 8)}


# -- normalised scores -----------------------------------------------------------------------------


def score_inputs(tokens: int, experts: int, kind: str, dtype: str, excluded: bool) -> Inputs:
    """Logits and cotangents of mixed magnitude; `excluded` sets some logits to -inf."""
    rng = rng_of("scores", tokens, experts, kind, dtype, excluded)
    rows = [draw_row(rng, kind, experts) for _ in range(tokens)]
    logits = np.reshape(rows, (tokens, experts))
    if excluded:
        out = rng.random((tokens, experts)) < 0.4
        out[:, rng.integers(experts)] = False  # one is left
        logits = np.where(out, -np.inf, logits)
    grad = rng.normal(size=logits.shape) * rng.choice([1, 0.01], logits.shape)
    return {"logits": logits.astype(DTYPES[dtype]), "grad_scores": grad.astype("f4")}


def scoring(
    names: tuple[str, ...], score: str, size: tuple[int, int], kind: str, dtype: str, excluded: bool
) -> tuple[Inputs, Attributes]:
    inputs = score_inputs(*size, kind, dtype, excluded)
    return {n: inputs[n] for n in names}, {"score": score}


def score_cases(*names: str) -> Iterator[Case]:
    sizes = dict.fromkeys((tokens, experts) for tokens, experts, _ in SIZES)
    drawn = list(zip(sizes, itertools.cycle(("normal", "grid")), strict=False))
    drawn += [((7, 8), kind) for kind in ("huge", "far", "low", "lower", "lowest", "bottom")]
    dtypes = itertools.cycle(ops.FLOAT_DTYPES)
    for score, (size, kind), excluded in itertools.product(SCORES, drawn, (False, True)):
        dtype = next(dtypes) if kind != "bottom" else "float32"  # not all hold it
        options = (score, size, kind, dtype, excluded)
        name = f"{score}-{size[0]}-{size[1]}-{kind}-{dtype}{'-excluded' if excluded else ''}"
        yield Case(name, lambda options=options: scoring(names, *options))


# -- the loss over a matrix ------------------------------------------------------------------------


AUX_SIZES = (  # T, E, sequences, K, num_tokens, live_tokens
    (0, 8, 1, 2, 0, None),
    (0, 8, 3, 2, 40, None),  # a shard without tokens
    (1, 1, 1, 1, 1, None),
    (1, 33, 3, 33, 1, 1),
    (7, 5, 1, 2, 7, None),
    (7, 5, 3, 2, 7, 4),
    (7, 1000, 1, 40, 9, None),
    (65, 5, 1, 1, 65, 0),
    (65, 5, 1, 1, 65, -3),
    (65, 64, 3, 6, 0, None),
    (65, 64, 3, 6, 0, 65),
    (130, 256, 1, 8, 130, None),
    (130, 256, 3, 256, 260, 77),
    (130, 33, 1, 4, 2**31 - 1, None),
    (1000, 33, 3, 4, 1000, 900),
    (17000, 4, 1, 2, 17000, None),  # longer chunks
)


def aux(
    names: tuple[str, ...], options: tuple[str, ...], sizes: Any, probs_dtype: str
) -> tuple[Inputs, Attributes]:
    tokens, experts, sequences, top_k, num_tokens, live_tokens = sizes
    rng = rng_of("aux", sizes)
    columns = sequences * experts
    loads = rng.random(columns) * tokens * (rng.random(columns) < 0.8)
    inputs = {
        "probs": rng.normal(0.5, 0.5, (tokens, columns)).astype(DTYPES[probs_dtype]),
        "expert_loads": loads.astype("f4"),
        "live_tokens": None if live_tokens is None else np.float32(live_tokens).reshape(()),
        "grad_loss": np.float32(-1.7).reshape(()),
    }
    attributes = {
        "num_experts": experts,
        "top_k": top_k,
        "num_tokens": num_tokens,
        "coeff": 0.3,
        "probs_dtype": probs_dtype,
    }
    return {n: inputs[n] for n in names}, {n: attributes[n] for n in options}


def aux_cases(names: tuple[str, ...], options: tuple[str, ...]) -> Iterator[Case]:
    for sizes, dtype in zip(AUX_SIZES, itertools.cycle(ops.FLOAT_DTYPES), strict=False):
        name = "-".join(map(str, (*sizes, dtype)))
        yield Case(name, lambda s=sizes, d=dtype: aux(names, options, s, d))


_AUX = ("num_experts", "top_k", "num_tokens", "coeff")

CASES: dict[str, list[Case]] = {
    "scatter_weights": list(id_cases(scattering)),
    "scatter_weights_bwd": list(id_cases(scattering_bwd)),
    "mark_experts": list(id_cases(marking)),
    "mark_expert_bits": list(id_cases(marking_bits)),
    "normalize_scores": list(score_cases("logits")),
    "normalize_scores_bwd": list(score_cases("logits", "grad_scores")),
    "aux_loss": list(aux_cases(("probs", "expert_loads", "live_tokens"), _AUX)),
    "aux_loss_bwd": list(
        aux_cases(("expert_loads", "live_tokens", "grad_loss"), (*_AUX, "probs_dtype"))
    ),
}
