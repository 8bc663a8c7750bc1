# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs for the ops from the plan on: moving rows to the experts and back, and what these compute.
Rows that belong to no slot hold NaN, so that none may leak.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from adapters import DTYPES
from duomoe import ops, oracle
from duomoe.config import ACTIVATIONS, ExpertConfig
from duomoe.dispatch import plan_rows
from oracle_draws import Attributes, Case, Inputs, rng_of

# -- dispatch --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """T, K, E and the options of a plan; `extra` rows follow those it needs."""

    tokens: int
    top_k: int
    experts: int
    capacity: int | None = None
    drop_order: str = "position"
    alignment: int = 1
    max_rows: int | None = None
    extra: int = 0
    to_one: bool = False

    def plan_inputs(self) -> tuple[Inputs, Attributes]:
        rng = rng_of("plan", dataclasses.astuple(self))
        shape = (self.tokens, self.top_k)
        # Some ids are out of range, some repeat, and with 5 experts or more one gets nothing.
        indices = rng.integers(-1, self.experts + 1, shape)
        indices[indices == 3] = 1
        if self.to_one:
            indices[:] = self.experts - 1
        rows = plan_rows(
            self.tokens * self.top_k, self.experts, self.capacity, self.alignment, self.max_rows
        )
        return {
            "indices": indices.astype("i4"),
            "weights": (rng.integers(0, 5, shape) / 4).astype("f4"),
        }, {
            "num_experts": self.experts,
            "num_rows": rows + self.extra,
            "capacity": -1 if self.capacity is None else self.capacity,
            "drop_order": self.drop_order,
            "alignment": self.alignment,
        }

    def plan(self) -> oracle.Outputs:
        inputs, attributes = self.plan_inputs()
        return oracle.plan_dispatch(**inputs, **attributes)


DISPATCHES = (
    Dispatch(0, 2, 4),
    Dispatch(0, 2, 4, alignment=8, extra=16),
    Dispatch(1, 1, 1),
    Dispatch(1, 1, 1, to_one=True),
    Dispatch(7, 3, 5),
    Dispatch(7, 5, 5, alignment=4),
    Dispatch(65, 2, 8, capacity=5),
    Dispatch(65, 2, 8, capacity=5, drop_order="weight"),
    Dispatch(65, 2, 8, capacity=0),
    Dispatch(65, 2, 8, capacity=1000, drop_order="weight", alignment=8),
    Dispatch(65, 6, 64, capacity=3, drop_order="weight", alignment=4, extra=8),
    Dispatch(65, 2, 8, max_rows=48, alignment=16),
    Dispatch(65, 2, 8, capacity=12, max_rows=56, alignment=8),
    Dispatch(130, 8, 33, alignment=16),
    Dispatch(130, 4, 256),
    Dispatch(65, 1, 8, to_one=True, alignment=32),
    Dispatch(4, 1, 2, to_one=True, capacity=2),
    Dispatch(1500, 8, 5, capacity=900, drop_order="weight"),
)


def dispatch_name(d: Dispatch) -> str:
    return "-".join(f"{v}" for v in dataclasses.astuple(d))


def plan_cases() -> Iterator[Case]:
    for d in DISPATCHES:
        yield Case(dispatch_name(d), d.plan_inputs)


def row_inputs(d: Dispatch, width: int, dtype: str) -> Inputs:
    """Everything that permute, combine and their gradients take; padding rows hold NaN."""
    rng = rng_of("rows", dataclasses.astuple(d), width, dtype)
    plan = d.plan()
    used = plan["slot_of_row"] >= 0

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(DTYPES[dtype])

    def rows() -> np.ndarray:
        return np.where(used[:, None], normal(len(used), width), np.array(np.nan, DTYPES[dtype]))

    return {
        "row_of_slot": plan["row_of_slot"],
        "slot_of_row": plan["slot_of_row"],
        "x": normal(d.tokens, width),
        "rows": rows(),
        "grad_rows": rows(),
        "grad_y": normal(d.tokens, width),
        "weights": rng.random((d.tokens, d.top_k)).astype("f4"),
    }


def row_cases(*names: str) -> Iterator[Case]:
    dtypes, widths = (
        itertools.cycle(("float32", "bfloat16", "float16")),
        itertools.cycle((1, 5, 64, 130)),
    )
    for d, dtype, width in zip(DISPATCHES[:-1], dtypes, widths, strict=False):
        for weighted in (True, False) if "weights" in names else (True,):

            def make(
                d: Dispatch = d, dtype: str = dtype, width: int = width, w: bool = weighted
            ) -> Any:
                inputs = row_inputs(d, width, dtype)
                return {n: inputs[n] if w or n != "weights" else None for n in names}, {}

            yield Case(f"{dispatch_name(d)}-{width}-{dtype}-{weighted}", make)


# -- products --------------------------------------------------------------------------------------


def product_cases(names: tuple[str, ...], dtype_attribute: str) -> Iterator[Case]:
    f, b, h = "float32", "bfloat16", "float16"
    dtypes = itertools.cycle([(f, f, f), (b, b, b), (b, f, f), (h, h, f), (f, b, h)])
    sizes = itertools.cycle([(1, 1), (5, 33), (64, 40), (130, 7)])
    for d, size, dtype in zip(DISPATCHES[:-1], sizes, dtypes, strict=False):

        def make(
            d: Dispatch = d,
            size: tuple[int, int] = size,
            dtype: tuple[str, str, str] = dtype,
        ) -> Any:
            (width, wide), plan = size, d.plan()
            rng = rng_of("product", dataclasses.astuple(d), size)
            used = (plan["slot_of_row"] >= 0)[:, None]

            def rows(n: int, kind: str) -> np.ndarray:
                values = np.where(used, rng.normal(size=(len(used), n)), np.nan)
                return values.astype(DTYPES[kind])

            bias = rng.normal(size=(d.experts, wide)).astype(DTYPES[dtype[2]])
            inputs = {
                "bias": bias if "bias" in names and d.tokens % 2 else None,
                "rows": rows(width, dtype[0]),
                "w": rng.normal(size=(d.experts, width, wide)).astype(DTYPES[dtype[1]]),
                "grad_out": rows(wide, dtype[1]),
                **{n: plan[n] for n in ("expert_offsets", "expert_counts")},
            }
            return {n: inputs[n] for n in names}, {dtype_attribute: dtype[2]}

        yield Case(f"{dispatch_name(d)}-{size[0]}-{size[1]}-{'-'.join(dtype)}", make)


# -- elementwise -----------------------------------------------------------------------------------

SHAPES = ((0, 5), (1, 1), (7, 33), (65, 130))


def elementwise(dtype: str, shape: tuple[int, int], names: tuple[str, ...]) -> Inputs:
    """Values of mixed size: those of gates reach both tails of every activation."""
    rng = rng_of("elementwise", dtype, shape)
    inputs = {n: rng.normal(size=shape) for n in names}
    for name in {"gate", "x"} & set(names):
        inputs[name] *= rng.choice([1, 3, 10, 100], shape)
    return {n: v.astype(DTYPES[dtype]) for n, v in inputs.items()}


def elementwise_cases(*names: str) -> Iterator[Case]:
    for dtype, shape in itertools.product(ops.FLOAT_DTYPES, SHAPES):

        def make(dtype: str = dtype, shape: tuple[int, int] = shape) -> Any:
            return elementwise(dtype, shape, names), {}

        yield Case(f"{shape[0]}-{shape[1]}-{dtype}", make)


ALPHA = float(np.float32(1.702))  # what the core takes it for
EXPERTS = (
    *map(ExpertConfig, ACTIVATIONS),
    ExpertConfig("silu", alpha=ALPHA),
    ExpertConfig("silu", alpha=-0.25),
    ExpertConfig("silu", alpha=ALPHA, limit=7.0, up_offset=1.0),
    ExpertConfig("gelu", limit=0.5),
    ExpertConfig("gelu_tanh", limit=2.5, up_offset=-0.5),
    ExpertConfig("relu", limit=10.0),
    ExpertConfig("relu_squared", up_offset=3.0),
)


def activation_cases(*names: str) -> Iterator[Case]:
    """All activations, and for gated units limits that a third of the values are beyond."""
    gated = "gate" in names
    shapes = itertools.cycle(SHAPES[::-1])
    for config, dtype in itertools.product(EXPERTS, ops.FLOAT_DTYPES):
        if config.needs_gate and not gated:
            continue
        attributes = config.glu_attributes()
        if not gated:
            attributes = {n: attributes[n] for n in ("activation", "alpha")}

        def make(
            dtype: str = dtype, shape: tuple[int, int] = next(shapes), given: Any = attributes
        ) -> Any:
            inputs = elementwise(dtype, shape, names)
            if given["activation"] == "relu_squared":  # float16 ends at 65504
                for name in {"gate", "x"} & set(names):
                    inputs[name] = (inputs[name].astype("f4") / 8).astype(DTYPES[dtype])
            if given.get("limit"):
                inputs["up"] = (inputs["up"].astype("f4") * given["limit"]).astype(DTYPES[dtype])
                inputs["up"][:1, :2] = [given["limit"], -given["limit"]][: shape[1]]
                inputs["gate"][:1, -1:] = given["limit"]
            return inputs, given

        yield Case("-".join(map(str, (*attributes.values(), dtype))), make)


def scale_cases(*names: str) -> Iterator[Case]:
    for dtype, shape in itertools.product(ops.FLOAT_DTYPES, SHAPES):

        def make(dtype: str = dtype, shape: tuple[int, int] = shape) -> Any:
            inputs = elementwise(dtype, shape, tuple(n for n in names if n != "scale"))
            scale = rng_of("scale", dtype, shape).normal(size=shape[0]).astype("f4")
            return {**inputs, "scale": scale}, {}

        yield Case(f"{shape[0]}-{shape[1]}-{dtype}", make)


def mismatch_cases() -> Iterator[Case]:
    """Repeated ids, unused slots and slots in another order."""
    for tokens, top_k, experts in (
        (0, 2, 4),
        (1, 1, 1),
        (7, 3, 2),
        (65, 8, 40),
        (130, 32, 33),
        (300, 1, 3),
    ):

        def make(size: tuple[int, int, int] = (tokens, top_k, experts)) -> Any:
            tokens, top_k, experts = size
            rng = rng_of("mismatches", size)
            indices = rng.integers(-2, experts, (tokens, top_k))
            others = rng.permuted(indices, axis=1)
            changed = rng.random((tokens, top_k)) < 0.5 / top_k
            others = np.where(changed, rng.integers(-2, experts, changed.shape), others)
            return {"indices": indices.astype("i4"), "others": others.astype("i4")}, {}

        yield Case(f"{tokens}-{top_k}-{experts}", make)


_SLOTS = ("row_of_slot", "slot_of_row")
_PLAN = ("expert_offsets", "expert_counts")

CASES: dict[str, list[Case]] = {
    "count_mismatches": list(mismatch_cases()),
    "plan_dispatch": list(plan_cases()),
    "permute": list(row_cases("x", *_SLOTS, "weights")),
    "permute_bwd": list(row_cases("grad_rows", "row_of_slot", "weights")),
    "permute_bwd_weights": list(row_cases("grad_rows", "x", "row_of_slot")),
    "combine": list(row_cases("rows", *_SLOTS, "weights")),
    "combine_bwd": list(row_cases("grad_y", "rows", *_SLOTS, "weights")),
    "grouped_matmul": list(product_cases(("rows", "w", *_PLAN, "bias"), "out_dtype")),
    "grouped_matmul_bwd_rows": list(product_cases(("grad_out", "w", *_PLAN), "rows_dtype")),
    "grouped_matmul_bwd_w": list(product_cases(("rows", "grad_out", *_PLAN), "w_dtype")),
    "grouped_matmul_bwd_bias": list(product_cases(("grad_out", *_PLAN), "bias_dtype")),
    "activate": list(activation_cases("x")),
    "activate_bwd": list(activation_cases("grad_out", "x")),
    "glu": list(activation_cases("gate", "up")),
    "glu_bwd": list(activation_cases("grad_out", "gate", "up")),
    "scale_rows": list(scale_cases("x", "scale")),
    "scale_rows_bwd": list(scale_cases("grad_y", "x", "scale")),
    "add": list(elementwise_cases("a", "b")),
}
