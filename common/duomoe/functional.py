# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions, written once over what a front end provides.

    x[T,D] -> gate                        -> logits[T,E]
      -> route          indices[T,K], weights[T,K], statistics[S,E]
      -> plan_dispatch  row_of_slot[T,K], slot_of_row[R], expert_offsets[E+1], counts[E]
      -> permute        rows[R,D]         -> grouped_matmul, swiglu, grouped_matmul
      -> combine        y[T,D]
    losses: load_balancing_loss(routing, config), z_loss(routing)
    bias: update_expert_bias(bias, counts)  (duomoe.balance)

Axis letters: T tokens, E experts, K experts per token, D model width, N width of a product,
F expert hidden width, R permuted rows, S sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from duomoe import arguments
from duomoe.arguments import Record
from duomoe.config import RouterConfig
from duomoe.frontend import FrontEnd
from duomoe.ops import FLOAT_DTYPES, table
from duomoe.results import Array, DispatchPlan, Routing

INTEGER_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


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


class Functions:
    """The public functions of one front end."""

    def __init__(self, frontend: FrontEnd) -> None:
        self._frontend = frontend
        self._table = table()  # read once: torch.compile cannot trace the loading of the library

    # -- arguments ---------------------------------------------------------------------------------

    def _array(self, name: str, value: Any, rank: int, letters: str) -> Array:
        value = self._frontend.check_array(name, value)
        if len(value.shape) != rank:
            raise ValueError(f"{name} must have shape [{letters}], got {list(value.shape)}")
        return value

    def _float_array(self, name: str, value: Any, rank: int, letters: str) -> Array:
        value = self._array(name, value, rank, letters)
        dtype = self._frontend.dtype(value)
        if dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {dtype}")
        return value

    def _mask(self, token_mask: Any, wanted: Sequence[int], letters: str) -> Array:
        token_mask = self._frontend.check_array("token_mask", token_mask)
        arguments.shape("token_mask", token_mask.shape, wanted, letters)
        if (dtype := self._frontend.dtype(token_mask)) != "bool":
            raise TypeError(f"token_mask must be bool, got {dtype}")
        return token_mask

    def _integers(self, name: str, value: Any) -> Array:
        """Integers as int32; one that int32 cannot hold becomes its largest or smallest."""
        value = self._frontend.check_array(name, value)
        dtype = self._frontend.dtype(value)
        if dtype not in INTEGER_DTYPES:
            raise TypeError(f"{name} must be an integer array, got {dtype}")
        if dtype in ("int64", "uint32"):
            value = self._frontend.clip(value, 0 if dtype == "uint32" else -(2**31), 2**31 - 1)
        return value if dtype == "int32" else self._frontend.cast(value, "int32")

    def _call(
        self, op: str, inputs: Sequence[Any], attributes: Mapping[str, Any]
    ) -> tuple[Array, ...]:
        """Run an op; a field of a record that is no array is refused by its name."""
        specs = self._table[op].inputs
        checked = [
            None if x is None else self._frontend.check_array(f"{op}: {spec.name}", x)
            for spec, x in zip(specs, inputs, strict=True)
        ]
        return self._frontend.call(op, checked, attributes)

    def _record(
        self, record: type[Record], op: str, inputs: Sequence[Any], attributes: Mapping[str, Any]
    ) -> Record:
        """Run an op whose outputs have the names of a record's fields."""
        outputs = self._call(op, inputs, attributes)
        return record(
            **{spec.name: out for spec, out in zip(self._table[op].outputs, outputs, strict=True)}
        )

    # -- router ------------------------------------------------------------------------------------

    def route(
        self,
        logits: Array,
        config: RouterConfig,
        *,
        bias: Array | None = None,
        indices: Array | None = None,
        token_mask: Array | None = None,
        num_sequences: int = 1,
    ) -> Routing:
        """Choose K experts per token and weight them; all arithmetic is float32.

        Experts are ordered by selection value, larger first, ties to the lower id; -inf logits
        rank below every finite value and NaN below those. The K ids of a token are distinct and in
        range.

        Args:
            logits: [T, E] float32, bfloat16 or float16.
            config: the RouterConfig; config.num_experts is E, config.top_k is K.
            bias: [E] float32, added for selection only; gets no gradient and never touches a
                weight.
            indices: [T, K] integers; selection is skipped, and the weights come from the live
                logits at these ids (hash routing, replay). -1 or an id out of range is an unused
                slot; the same id twice is two slots.
            token_mask: [T] bool; a masked token (False) gets ids -1, weights 0, no count and
                gradient 0.
            num_sequences: S; the tokens of a sequence are neighbours and T must be divisible by S.

        Returns:
            Routing. Gradients flow to the logits from weights, score_sums and logsumexp_sq.

        Raises:
            ValueError: on a shape or option that does not fit; TypeError: on a dtype that is not
                allowed.
        """
        arguments.record("config", config, RouterConfig)
        logits = self._array("logits", logits, 2, "T, E")
        tokens, experts = logits.shape
        if experts != config.num_experts:
            raise ValueError(
                f"logits must have shape [T, E] with E = config.num_experts = "
                f"{config.num_experts}, got {list(logits.shape)}"
            )
        num_sequences = self._num_sequences(num_sequences, tokens)
        if bias is not None:
            bias = self._frontend.stop_gradient(self._array("bias", bias, 1, "E"))
        if indices is not None:
            indices = self._integers("indices", indices)
            arguments.shape("indices", indices.shape, (tokens, config.top_k), "T, K")
        if token_mask is not None:
            token_mask = self._mask(token_mask, (tokens,), "T")
        return self._record(
            Routing,
            "route",
            (logits, bias, indices, token_mask, None),
            config.attributes(num_sequences=num_sequences),
        )

    def _num_sequences(self, num_sequences: Any, tokens: int) -> int:
        num_sequences = arguments.integer("num_sequences", num_sequences, 1)
        if tokens % num_sequences:
            raise ValueError(
                f"the number of tokens ({tokens}) must be divisible by "
                f"num_sequences ({num_sequences})"
            )
        return num_sequences

    # -- losses ------------------------------------------------------------------------------------

    def _load_balancing_loss(
        self, routing: Routing, config: RouterConfig, coeff: float, over: Any
    ) -> Array:
        arguments.record("routing", routing, Routing)
        arguments.record("config", config, RouterConfig)
        coeff = arguments.number("coeff", coeff)
        self._frontend.check_over(over)
        counts, sums, tokens = routing.sequence_counts, routing.score_sums, routing.num_tokens
        experts = self._frontend.check_array("routing.sequence_counts", counts).shape[-1]
        if experts != config.num_experts:
            raise ValueError(
                f"routing is of {experts} experts, config.num_experts is {config.num_experts}"
            )
        if routing.indices is not None and routing.indices.shape[-1] != config.top_k:
            raise ValueError(
                f"routing is of {routing.indices.shape[-1]} experts per token, "
                f"config.top_k is {config.top_k}"
            )
        if over is not None:
            counts, sums, tokens = (self._frontend.all_sum(a, over) for a in (counts, sums, tokens))
        (loss,) = self._call(
            "load_balancing_loss", (counts, sums, tokens), {"top_k": config.top_k, "coeff": coeff}
        )
        return loss

    def _z_loss(self, routing: Routing, coeff: float, over: Any) -> Array:
        arguments.record("routing", routing, Routing)
        coeff = arguments.number("coeff", coeff)
        self._frontend.check_over(over)
        squares, tokens = routing.logsumexp_sq, routing.num_tokens
        if over is not None:
            squares, tokens = (self._frontend.all_sum(a, over) for a in (squares, tokens))
        (loss,) = self._call("z_loss", (squares, tokens), {"coeff": coeff})
        return loss

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
        options = self._plan_options(capacity, drop_order, alignment, max_rows)
        if drop_order == "weight" and weights is None:
            raise ValueError("drop_order='weight' needs weights, got None")
        indices = self._integers("indices", self._array("indices", indices, 2, "T, K"))
        if weights is not None:
            weights = self._frontend.stop_gradient(self._array("weights", weights, 2, "T, K"))
        num_rows = self._num_rows(indices.shape[0] * indices.shape[1], num_experts, *options)
        capacity, alignment, _ = options
        return self._record(
            DispatchPlan,
            "plan_dispatch",
            (indices, weights),
            {
                "num_experts": num_experts,
                "num_rows": num_rows,
                "capacity": -1 if capacity is None else capacity,
                "drop_order": drop_order,
                "alignment": alignment,
            },
        )

    def _num_rows(
        self,
        slots: int,
        num_experts: int,
        capacity: int | None,
        alignment: int,
        max_rows: int | None,
    ) -> int:
        num_rows = plan_rows(slots, num_experts, capacity, alignment, max_rows)
        if num_rows > arguments.INT32_MAX:
            raise ValueError(
                f"row numbers are int32: the plan must have fewer than 2^31 rows, got {num_rows}; "
                "lower alignment, or set max_rows"
            )
        return num_rows

    def _plan_options(
        self, capacity: Any, drop_order: Any, alignment: Any, max_rows: Any
    ) -> tuple[int | None, int, int | None]:
        """The checked capacity, alignment and max_rows."""
        arguments.one_of("drop_order", drop_order, ("position", "weight"))
        alignment = arguments.integer("alignment", alignment, 1, arguments.INT32_MAX)
        if capacity is not None:
            capacity = arguments.integer("capacity", capacity, 0)
        if max_rows is not None:
            max_rows = arguments.integer("max_rows", max_rows, 0)
            if max_rows % alignment:
                raise ValueError(
                    f"max_rows ({max_rows}) must be a multiple of alignment ({alignment})"
                )
        return capacity, alignment, max_rows

    def permute(self, x: Array, plan: DispatchPlan) -> Array:
        """Copy token rows into expert order.

        rows[r] = x[t] for the slot (t, k) of row r; padding rows are 0.

        Args:
            x: [T, D] float32, bfloat16 or float16.
            plan: DispatchPlan of these T tokens.

        Returns:
            [R, D] in x's dtype. The gradient sums a token's rows in slot order, in float32, and
            rounds once.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        arguments.record("plan", plan, DispatchPlan)
        x = self._array("x", x, 2, "T, D")
        (rows,) = self._call("permute", (x, plan.row_of_slot, plan.slot_of_row), {})
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
        self, rows: Array, w: Array, plan: DispatchPlan, *, out_dtype: str | None = None
    ) -> Array:
        """Multiply each expert's rows with its matrix, summing in float32.

        Args:
            rows: [R, D] float32, bfloat16 or float16.
            w: [E, D, N] float32, bfloat16 or float16.
            plan: DispatchPlan whose blocks the rows lie in.
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
        if out_dtype is None:
            out_dtype = self._frontend.dtype(rows)
        else:
            arguments.one_of("out_dtype", out_dtype, FLOAT_DTYPES)
        (out,) = self._call(
            "grouped_matmul",
            (rows, w, plan.expert_offsets, plan.expert_counts),
            {"out_dtype": out_dtype},
        )
        return out

    def gate(
        self,
        x: Array,
        router: Array,
        router_bias: Array | None = None,
        *,
        token_mask: Array | None = None,
        gate_dtype: str = "float32",
    ) -> Array:
        """The router's product: logits = x . router + router_bias.

        Args:
            x: [T, D] float32, bfloat16 or float16.
            router: [D, E] float32, bfloat16 or float16.
            router_bias: [E] float32, bfloat16 or float16.
            token_mask: [T] bool; a masked token's logits are 0 and it takes part in no gradient,
                whatever its x holds.
            gate_dtype: "float32", "bfloat16" or "float16"; x and router are rounded to it, the sum
                is float32, the logits are rounded to it.

        Returns:
            [T, E] in gate_dtype.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        x = self._array("x", x, 2, "T, D")
        router = self._array("router", router, 2, "D, E")
        if router_bias is not None:
            router_bias = self._array("router_bias", router_bias, 1, "E")
        if token_mask is not None:
            token_mask = self._mask(token_mask, (x.shape[0],), "T")
        arguments.one_of("gate_dtype", gate_dtype, FLOAT_DTYPES)
        (logits,) = self._call(
            "gate", (x, router, router_bias, token_mask), {"gate_dtype": gate_dtype}
        )
        return logits

    def swiglu(self, gate: Array, up: Array) -> Array:
        """silu(gate) * up, computed in float32 and rounded once; silu(x) = x / (1 + e^-x).

        Args:
            gate: [R, F] float32, bfloat16 or float16.
            up: [R, F] in gate's dtype.

        Returns:
            [R, F] in gate's dtype.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        gate = self._array("gate", gate, 2, "R, F")
        up = self._array("up", up, 2, "R, F")
        (out,) = self._call("swiglu", (gate, up), {})
        return out
