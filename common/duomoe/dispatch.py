# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions from the plan on: moving rows to the experts and back, and what the experts
compute. The data flow is in duomoe.functional.

Axis letters: T tokens, E experts, K experts per token, D model width, N width of a product,
F expert hidden width, R permuted rows.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from duomoe import arguments
from duomoe.config import ACTIVATIONS, ExpertConfig
from duomoe.functional import Functions
from duomoe.ops import FLOAT_DTYPES
from duomoe.results import Array, DispatchPlan


def plan_rows(
    slots: int, num_experts: int, capacity: int | None, alignment: int, max_rows: int | None
) -> int:
    """R, the rows that a plan needs in the worst case: every expert's block padded to
    `alignment`.
    """
    rows = slots
    if alignment > 1:
        rows = (slots + min(num_experts, slots) * (alignment - 1)) // alignment * alignment
    if capacity is not None:
        rows = min(rows, num_experts * (-(-capacity // alignment) * alignment))
    return rows if max_rows is None else min(rows, max_rows)


def plan_options(
    capacity: Any, drop_order: Any, alignment: Any, max_rows: Any
) -> tuple[int | None, int, int | None]:
    """The checked capacity, alignment and max_rows."""
    arguments.one_of("drop_order", drop_order, ("position", "weight"))
    alignment = arguments.integer("alignment", alignment, 1, arguments.INT32_MAX)
    if capacity is not None:
        capacity = arguments.integer("capacity", capacity, 0)
    if max_rows is not None:
        max_rows = arguments.integer("max_rows", max_rows, 0)
        if max_rows % alignment:
            raise ValueError(f"max_rows ({max_rows}) must be a multiple of alignment ({alignment})")
    return capacity, alignment, max_rows


class DispatchFunctions(Functions):
    """The public functions of one front end from the plan on."""

    # -- dispatch ----------------------------------------------------------------------------------

    def plan_dispatch(
        self,
        indices: Array,
        num_experts: int,
        *,
        capacity: int | None = None,
        drop_order: Literal["position", "weight"] = "position",
        weights: Array | None = None,
        alignment: int = 1,
        max_rows: int | None = None,
    ) -> DispatchPlan:
        """Order the slots by expert, then token, then slot.

        R is static: T * K, more where `alignment` pads every block, less where `capacity` or
        `max_rows` bound it. Ids outside [0, E) are unused slots.

        Args:
            indices: [T, K] integers.
            num_experts: E.
            capacity: rows kept per expert; None keeps all.
            drop_order: which rows a full expert keeps: "position" the first in row order, "weight"
                those of the largest weights (ties: row order).
            weights: [T, K] float32, needed by drop_order="weight".
            alignment: every expert's block starts at a multiple of it.
            max_rows: upper bound of R, a multiple of `alignment`; rows beyond it are dropped and
                counted.

        Returns:
            DispatchPlan; routed_counts - expert_counts are the dropped rows.

        Raises:
            ValueError, TypeError: on an option, shape or dtype that does not fit.
        """
        num_experts = arguments.integer("num_experts", num_experts, 1, arguments.INT32_MAX - 1)
        options = plan_options(capacity, drop_order, alignment, max_rows)
        if drop_order == "weight" and weights is None:
            raise ValueError("drop_order='weight' needs weights, got None")
        indices = self._integers("indices", self._array("indices", indices, 2, "T, K"))
        if weights is not None:
            weights = self._frontend.stop_gradient(self._array("weights", weights, 2, "T, K"))
        num_rows = self._num_rows(indices.shape[0] * indices.shape[1], num_experts, *options)
        capacity, alignment, _ = options
        attributes = {
            "num_experts": num_experts,
            "num_rows": num_rows,
            "capacity": -1 if capacity is None else capacity,
            "drop_order": drop_order,
            "alignment": alignment,
        }
        return DispatchPlan(**self._named("plan_dispatch", (indices, weights), attributes))

    def _num_rows(
        self,
        slots: int,
        num_experts: int,
        capacity: int | None,
        alignment: int,
        max_rows: int | None,
    ) -> int:
        if slots > arguments.INT32_MAX:
            raise ValueError(f"slot numbers are int32: T * K must stay below 2^31, got {slots}")
        num_rows = plan_rows(slots, num_experts, capacity, alignment, max_rows)
        if num_rows > arguments.INT32_MAX:
            raise ValueError(
                f"row numbers are int32: the plan must have fewer than 2^31 rows, got {num_rows}; "
                "lower alignment, or set max_rows"
            )
        return num_rows

    def permute(self, x: Array, plan: DispatchPlan, weights: Array | None = None) -> Array:
        """Copy token rows into expert order.

        rows[r] = x[t] for the slot (t, k) of row r, times weights[t, k] where they are given, in
        float32 and rounded once; padding rows are 0.

        Args:
            x: [T, D] float32, bfloat16 or float16.
            plan: DispatchPlan of these T tokens.
            weights: [T, K] float32, to weight the experts' inputs instead of their outputs.

        Returns:
            [R, D] in x's dtype. Gradients flow to x and weights; that of x sums a token's rows in
            slot order, in float32, and rounds once.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        arguments.record("plan", plan, DispatchPlan)
        x = self._array("x", x, 2, "T, D")
        if weights is not None:
            weights = self._array("weights", weights, 2, "T, K")
        (rows,) = self._call("permute", (x, plan.row_of_slot, plan.slot_of_row, weights), {})
        return rows

    def combine(self, rows: Array, plan: DispatchPlan, weights: Array | None = None) -> Array:
        """Bring rows back to token order.

        y[t] = sum over k of weights[t, k] * rows[row_of_slot[t, k]], in float32, in slot order and
        rounded once; dropped slots contribute nothing.

        Args:
            rows: [R, D] float32, bfloat16 or float16.
            plan: the DispatchPlan that ordered the rows.
            weights: [T, K] float32; None counts as all ones.

        Returns:
            [T, D] in the rows' dtype. Gradients flow to rows and weights.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        arguments.record("plan", plan, DispatchPlan)
        rows = self._array("rows", rows, 2, "R, D")
        if weights is not None:
            weights = self._array("weights", weights, 2, "T, K")
        (y,) = self._call("combine", (rows, plan.row_of_slot, plan.slot_of_row, weights), {})
        return y

    # -- experts -----------------------------------------------------------------------------------

    def grouped_matmul(
        self,
        rows: Array,
        w: Array,
        plan: DispatchPlan,
        bias: Array | None = None,
        *,
        out_dtype: str | None = None,
    ) -> Array:
        """Multiply each expert's rows with its matrix and add its bias, summing in float32.

        Args:
            rows: [R, D] float32, bfloat16 or float16.
            w: [E, D, N] float32, bfloat16 or float16.
            plan: DispatchPlan whose blocks the rows lie in.
            bias: [E, N] float32, bfloat16 or float16.
            out_dtype: "float32", "bfloat16" or "float16"; None takes that of the rows.

        Returns:
            [R, N]; rows that belong to no slot are 0. An expert without rows has a gradient of
            exactly 0.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        arguments.record("plan", plan, DispatchPlan)
        rows = self._array("rows", rows, 2, "R, D")
        w = self._array("w", w, 3, "E, D, N")
        if bias is not None:
            bias = self._array("bias", bias, 2, "E, N")
        if out_dtype is None:
            out_dtype = self._frontend.dtype(rows)
        else:
            arguments.one_of("out_dtype", out_dtype, FLOAT_DTYPES)
        (out,) = self._call(
            "grouped_matmul",
            (rows, w, plan.expert_offsets, plan.expert_counts, bias),
            {"out_dtype": out_dtype},
        )
        return out

    def activate(self, x: Array, *, activation: str = "silu", alpha: float = 1.0) -> Array:
        """f(x), computed in float32 and rounded once.

        Args:
            x: [R, F] float32, bfloat16 or float16.
            activation: f. "silu" is x sigmoid(alpha x), "gelu" x Phi(x) with the normal
                distribution function, "gelu_tanh" its approximation by tanh (Hendrycks and Gimpel
                2016), "relu" max(x, 0), "relu_squared" max(x, 0)^2.
            alpha: of silu.

        Returns:
            [R, F] in x's dtype.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        arguments.one_of("activation", activation, ACTIVATIONS)
        x = self._array("x", x, 2, "R, F")
        attributes = {"activation": activation, "alpha": arguments.float32("alpha", alpha)}
        (out,) = self._call("activate", (x,), attributes)
        return out

    def glu(
        self,
        gate: Array,
        up: Array,
        *,
        activation: str = "silu",
        alpha: float = 1.0,
        limit: float | None = None,
        up_offset: float = 0.0,
    ) -> Array:
        """Gated linear unit f(gate) * up (Shazeer 2020), computed in float32 and rounded once.

        With a limit it is f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset); an element
        beyond its limit takes no gradient.

        Args:
            gate: [R, F] float32, bfloat16 or float16.
            up: [R, F] in gate's dtype.
            activation: f, as in activate: "silu" makes it SwiGLU, "gelu" GEGLU.
            alpha: of silu.
            limit: bound of both inputs, above 0; None for none.
            up_offset: added to up.

        Returns:
            [R, F] in gate's dtype.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        name = cast(Any, activation)
        config = ExpertConfig(name, alpha=alpha, limit=limit, up_offset=up_offset)
        gate = self._array("gate", gate, 2, "R, F")
        up = self._array("up", up, 2, "R, F")
        (out,) = self._call("glu", (gate, up), config.glu_attributes())
        return out

    def scale_rows(self, x: Array, scale: Array) -> Array:
        """scale[t] * x[t], in float32 and rounded once.

        Args:
            x: [T, D] float32, bfloat16 or float16.
            scale: [T] float32.

        Returns:
            [T, D] in x's dtype. Gradients flow to both.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        x = self._array("x", x, 2, "T, D")
        scale = self._array("scale", scale, 1, "T")
        (y,) = self._call("scale_rows", (x, scale), {})
        return y
