# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions, written once over what a front end provides: the router and its losses.

    x[T,D] -> gate                        -> logits[T,E]
      -> route          indices[T,K], weights[T,K], statistics[S,E]
      -> plan_dispatch  row_of_slot[T,K], slot_of_row[R], expert_offsets[E+1], counts[E]
      -> permute        rows[R,D]         -> grouped_matmul, glu, grouped_matmul
      -> combine        y[T,D]
    losses: load_balancing_loss(routing, config), z_loss(routing)

From plan_dispatch on they are in duomoe.dispatch, the block in duomoe.block, the balancing of
the experts through their bias in duomoe.balance.

Axis letters: T tokens, E experts, K experts per token, D model width, S sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from duomoe import arguments
from duomoe.config import RouterConfig
from duomoe.frontend import FrontEnd
from duomoe.ops import FLOAT_DTYPES, table
from duomoe.results import Array, Routing

INTEGER_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


class Functions:
    """The public functions of one front end."""

    def __init__(self, frontend: FrontEnd) -> None:
        self._frontend = frontend
        self._table = table()  # read once: torch.compile cannot trace the loading of the library
        self._output_names = {n: tuple(o.name for o in op.outputs) for n, op in table().items()}

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

    def _mask(self, name: str, mask: Any, wanted: Sequence[int], letters: str) -> Array:
        mask = self._frontend.check_array(name, mask)
        arguments.shape(name, mask.shape, wanted, letters)
        if (dtype := self._frontend.dtype(mask)) != "bool":
            raise TypeError(f"{name} must be bool, got {dtype}")
        return mask

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
        return self._frontend.call(op, inputs, attributes)

    def _named(
        self, op: str, inputs: Sequence[Any], attributes: Mapping[str, Any]
    ) -> dict[str, Array]:
        """Run an op; its outputs by name."""
        return dict(zip(self._output_names[op], self._call(op, inputs, attributes), strict=True))

    # -- router ------------------------------------------------------------------------------------

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
            token_mask = self._mask("token_mask", token_mask, (x.shape[0],), "T")
        arguments.one_of("gate_dtype", gate_dtype, FLOAT_DTYPES)
        (logits,) = self._call(
            "gate", (x, router, router_bias, token_mask), {"gate_dtype": gate_dtype}
        )
        return logits

    def route(
        self,
        logits: Array,
        config: RouterConfig,
        *,
        bias: Array | None = None,
        indices: Array | None = None,
        token_mask: Array | None = None,
        num_sequences: int = 1,
        replay_mask: Array | None = None,
        compare: bool = False,
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
            replay_mask: [T] bool, with indices only; where it is False, the token selects for
                itself and its indices do not count.
            compare: with indices only: select too, and count the tokens and slots that differ
                (mismatched_tokens, mismatched_slots). This, and replay_mask, cost a second pass.

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
        compare = arguments.boolean("compare", compare)
        if indices is not None:
            indices = self._integers("indices", indices)
            arguments.shape("indices", indices.shape, (tokens, config.top_k), "T, K")
        elif replay_mask is not None or compare:
            name = "compare" if replay_mask is None else "replay_mask"
            raise ValueError(f"{name} is for given indices only, got indices=None")
        if token_mask is not None:
            token_mask = self._mask("token_mask", token_mask, (tokens,), "T")
        if replay_mask is not None:
            replay_mask = self._mask("replay_mask", replay_mask, (tokens,), "T")
        attributes = config.attributes(num_sequences=num_sequences)
        if replay_mask is None and not compare:
            return Routing(
                **self._named("route", (logits, bias, indices, token_mask, None), attributes)
            )
        alone = self._frontend.stop_gradient(logits)
        selected = self._named("route", (alone, bias, None, token_mask, None), attributes)[
            "indices"
        ]
        if replay_mask is not None:
            indices = self._frontend.where(replay_mask, indices, selected)
        found = self._named("route", (logits, bias, indices, token_mask, None), attributes)
        counts = self.count_mismatches(found["indices"], selected) if compare else (None, None)
        return Routing(**found, mismatched_tokens=counts[0], mismatched_slots=counts[1])

    def count_mismatches(self, indices: Array, others: Array) -> tuple[Array, Array]:
        """Count how far two routings of the same tokens differ; the order of slots does not matter.

        Args:
            indices: [T, K] integers, expert ids; negative ones are unused slots.
            others: [T, K] integers.

        Returns:
            mismatched tokens, those with an expert in one routing that the other lacks, and
            mismatched slots, those of `indices` that `others` lacks; int32 scalars of rank 0.

        Raises:
            ValueError, TypeError: on a shape or dtype that does not fit.
        """
        indices = self._integers("indices", self._array("indices", indices, 2, "T, K"))
        others = self._integers("others", self._array("others", others, 2, "T, K"))
        tokens, slots = self._call("count_mismatches", (indices, others), {})
        return tokens, slots

    def _num_sequences(self, num_sequences: Any, tokens: int) -> int:
        num_sequences = arguments.integer("num_sequences", num_sequences, 1)
        if tokens % num_sequences:
            raise ValueError(
                f"the number of tokens ({tokens}) must be divisible by "
                f"num_sequences ({num_sequences})"
            )
        return num_sequences

    # -- losses ------------------------------------------------------------------------------------

    def _all_sum(self, routing: Routing, over: Any) -> Routing:
        """The routing with statistics of all tokens that are spread over a mesh axis or group."""
        arguments.record("routing", routing, Routing)
        self._frontend.check_over(over)
        if over is None:
            return routing
        statistics = ("sequence_counts", "score_sums", "logsumexp_sq", "num_tokens")
        summed = {n: self._frontend.all_sum(getattr(routing, n), over) for n in statistics}
        return Routing(**{**vars(routing), **summed})

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
