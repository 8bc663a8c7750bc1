# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs for every op of the table. Rows that belong to no slot hold NaN, so that none may leak."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle_cases_bias
import oracle_cases_dense
import oracle_cases_experts
import oracle_cases_maps
from adapters import DTYPES
from duomoe import RouterConfig, oracle
from oracle_draws import SCORES, SIZES, Attributes, Case, Inputs, draw_row, is_decided, rng_of


def routing(
    tokens: int,
    experts: int,
    top_k: int,
    *,
    kind: str = "grid",
    dtype: str = "float32",
    bias: bool = False,
    given: bool = False,
    mask: bool = False,
    num_sequences: int = 1,
    first_token: int | None = None,
    total_tokens: int = 0,
    **config: Any,
) -> tuple[Inputs, Attributes]:
    """Inputs of `route` whose selection does not hang on rounding."""
    rng = rng_of(tokens, experts, top_k, kind, dtype, sorted(config.items()))
    attributes = RouterConfig(experts, top_k, **config).attributes(num_sequences=num_sequences)
    attributes["total_tokens"] = total_tokens
    bias_values = rng.normal(size=experts).astype("f4") if bias else None
    logits = np.zeros((tokens, experts), DTYPES[dtype])
    for t in range(tokens):
        for _ in range(200):
            logits[t] = draw_row(rng, kind, experts).astype(DTYPES[dtype])
            if given or is_decided(logits[t].astype("f8"), attributes, bias_values):
                break
        else:
            raise AssertionError("no row of logits with a clear order was found")
    inputs: Inputs = {"logits": logits, "bias": bias_values}
    if given:
        inputs["given_indices"] = rng.integers(-2, experts + 2, (tokens, top_k)).astype("i4")
    if mask:
        inputs["token_mask"] = rng.random(tokens) < 0.7
    if first_token is not None:
        inputs["first_token"] = np.int32(first_token).reshape(())
    return inputs, attributes


def routing_options() -> Iterator[tuple[tuple[int, int, int], dict[str, Any]]]:
    normalize = itertools.cycle([True, False, "if_k_gt_1"])
    eps = itertools.cycle([0.0, 1e-20, 0.25, 1e-6])
    eps_mode = itertools.cycle(["add", "add", "add", "add", "clamp", "clamp", "clamp", "clamp"])
    dtype = itertools.cycle(["float32", "float32", "bfloat16", "float16", "float32"])
    kind = itertools.cycle(["grid", "normal"])
    flags = itertools.cycle(
        [{}, {"mask": True}, {"bias": True, "counts": "unbiased"}, {"bias": True}, {"given": True}]
    )
    for score, size in itertools.product(SCORES, SIZES):
        options = {
            "score": score,
            "normalize": next(normalize),
            "eps": next(eps),
            "eps_mode": next(eps_mode),
            "dtype": next(dtype),
            "kind": next(kind),
            "scale": 2.5,
            **next(flags),
        }
        yield size, {**options, "num_sequences": 5 if size[0] in (65, 130) else 1}
    for score in SCORES:
        yield (65, 64, 6), {"score": score, "select_on": "logit", "bias": True, "kind": "normal"}
        for groups, kept, score_k in ((4, 2, 1), (8, 3, 2), (16, 8, 3), (32, 6, 4)):
            group = {"num_groups": groups, "group_top_k": kept, "group_score_k": score_k}
            for flag in ({}, {"bias": True}, {"counts": "unbiased", "mask": True}):
                yield (65, 64, 6), {"score": score, **group, **flag}
        one_each = {"num_groups": 8, "group_top_k": 4}
        yield (7, 8, 4), {"score": score, "counts": "unbiased", "bias": True, **one_each}
        # Slices of 4 sequences of 10 tokens; the last two reach past the end.
        for first in (0, 13, 26, 39, 52):
            slice_ = {"first_token": first, "total_tokens": 40, "num_sequences": 4, "mask": True}
            yield (13, 8, 2), {"score": score, **slice_}
    for score, experts in itertools.product(SCORES, (8, 64, 130)):
        yield (65, experts, 3), {"score": score, "kind": "limit"}
        yield (65, experts, 3), {"score": score, "kind": "limit", "given": True, "normalize": False}
    yield (65, 64, 6), {"score_scope": "selected", "select_on": "logit", "dtype": "bfloat16"}
    for kind in ("huge", "far", "low", "lower", "lowest"):
        for score, normalize in itertools.product(SCORES, (True, False)):
            for choose in ({"given": True}, {"select_on": "logit"}):
                options = {"score": score, "normalize": normalize, "kind": kind, **choose}
                yield (7, 8, 3), options
    for score, mode in itertools.product(SCORES, ("add", "clamp")):
        for kind, eps in itertools.product(("low", "far"), (1e-20, 1e-6, 8.0)):
            yield (
                (7, 8, 3),
                {"score": score, "eps": eps, "eps_mode": mode, "kind": kind, "given": True},
            )


def route_cases() -> Iterator[Case]:
    for size, options in routing_options():
        name = "-".join([*map(str, size), *(f"{k}={v}" for k, v in options.items())])
        yield Case(name, lambda size=size, options=options: routing(*size, **options))


def route_bwd(inputs: Inputs, attributes: Attributes) -> tuple[Inputs, Attributes]:
    """The backward op of a forward case, with cotangents of mixed magnitude."""
    rng = rng_of("cotangents", inputs["logits"].shape)
    out = oracle.route(**inputs, **attributes)
    shapes = {name: out[name].shape for name in ("weights", "score_sums", "logsumexp_sq")}
    cotangents = {f"grad_{n}": rng.normal(size=s).astype("f4") for n, s in shapes.items()}
    kept = {n: inputs.get(n) for n in ("logits", "token_mask", "first_token")}
    forward_only = ("select_on", "num_groups", "group_top_k", "group_score_k", "counts")
    return (
        {**kept, "indices": out["indices"], **cotangents},
        {k: v for k, v in attributes.items() if k not in forward_only},
    )


def route_bwd_cases() -> Iterator[Case]:
    for case in route_cases():
        yield Case(case.name, lambda case=case: route_bwd(*case.make()))


# -- losses ----------------------------------------------------------------------------------------


def loss_inputs(sequences: int, experts: int, empty: bool) -> Inputs:
    rng = rng_of("loss", sequences, experts)
    tokens = (
        rng.integers(0, 3, sequences).astype("i4") * 0 if empty else rng.integers(0, 3, sequences)
    )
    counts = rng.integers(0, 1 + tokens[:, None], (sequences, experts))
    return {
        "sequence_counts": counts.astype("i4"),
        "score_sums": (rng.random((sequences, experts)) * tokens[:, None]).astype("f4"),
        "logsumexp_sq": (rng.random(sequences) * tokens).astype("f4"),
        "num_tokens": tokens.astype("i4"),
        "grad_loss": np.float32(-1.7).reshape(()),
    }


def loss_cases(op: str, *names: str) -> Iterator[Case]:
    top_k = {"top_k": 3} if op.startswith("load") else {}
    for sequences, experts, empty in (
        (1, 1, False),
        (1, 8, True),
        (8, 33, False),
        (13, 256, False),
    ):

        def make(size: tuple[int, int, bool] = (sequences, experts, empty)) -> Any:
            inputs = loss_inputs(*size)
            return {n: inputs[n] for n in names}, {**top_k, "coeff": 0.01}

        yield Case(f"{sequences}-{experts}-{'empty' if empty else 'used'}", make)


# -- the gate -------------------------------------------------------------------------------------


def gate_inputs(tokens: int, width: int, experts: int, x: str, router: str, bias: str) -> Inputs:
    rng = rng_of("gate", tokens, width, experts)
    return {
        "x": rng.normal(size=(tokens, width)).astype(DTYPES[x]),
        "router": rng.normal(size=(width, experts)).astype(DTYPES[router]),
        "router_bias": rng.normal(size=experts).astype(DTYPES[bias]),
        "grad_logits": rng.normal(size=(tokens, experts)),
    }


def gate_cases(names: tuple[str, ...], attributes: tuple[str, ...]) -> Iterator[Case]:
    f, b, h = "float32", "bfloat16", "float16"
    for tokens, width, experts, gate, x, router, bias in (
        (0, 5, 8, f, f, f, f),
        (1, 1, 1, f, b, f, h),
        (7, 33, 5, b, f, f, f),
        (65, 130, 64, f, b, b, b),
        (130, 300, 33, h, h, f, b),
        (65, 64, 256, b, b, f, f),
    ):

        def make(
            size: tuple[int, int, int] = (tokens, width, experts),
            dtypes: tuple[str, str, str, str] = (gate, x, router, bias),
        ) -> Any:
            inputs = gate_inputs(*size, *dtypes[1:])
            inputs["grad_logits"] = inputs["grad_logits"].astype(DTYPES[dtypes[0]])
            if size[0] == 65:  # masked tokens may hold anything
                mask = inputs["token_mask"] = rng_of("mask", size).random(65) < 0.7
                inputs["x"][~mask] = np.nan
                inputs["grad_logits"][~mask] = np.nan
            named = ("gate_dtype", "x_dtype", "router_dtype", "router_bias_dtype")
            given = dict(zip(named, dtypes, strict=True))
            chosen = {n: inputs[n] for n in (*names, "token_mask") if n in inputs}
            return chosen, {n: given[n] for n in attributes}

        yield Case(f"{tokens}-{width}-{experts}-{gate}-{x}-{router}", make)


CASES: dict[str, list[Case]] = {
    **oracle_cases_bias.CASES,
    **oracle_cases_dense.CASES,
    **oracle_cases_maps.CASES,
    **oracle_cases_experts.CASES,
    "gate": list(gate_cases(("x", "router", "router_bias"), ("gate_dtype",))),
    "gate_bwd_x": list(gate_cases(("grad_logits", "router"), ("gate_dtype", "x_dtype"))),
    "gate_bwd_params": list(
        gate_cases(("grad_logits", "x"), ("gate_dtype", "router_dtype", "router_bias_dtype"))
    ),
    "route": list(route_cases()),
    "route_bwd": list(route_bwd_cases()),
    "load_balancing_loss": list(
        loss_cases("load_balancing_loss", "sequence_counts", "score_sums", "num_tokens")
    ),
    "load_balancing_loss_bwd": list(
        loss_cases("load_balancing_loss_bwd", "sequence_counts", "num_tokens", "grad_loss")
    ),
    "z_loss": list(loss_cases("z_loss", "logsumexp_sq", "num_tokens")),
    "z_loss_bwd": list(loss_cases("z_loss_bwd", "num_tokens", "grad_loss")),
}
