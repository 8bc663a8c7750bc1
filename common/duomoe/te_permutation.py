# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The permutation functions of Transformer Engine's users, written once for both front ends.

Names, argument and return orders are those of Transformer Engine 2.x (`pytorch.permutation`,
`jax.permutation`); docs/te.md lists the differences.

Axis letters: T tokens, E experts, K experts per token, D model width, R permuted rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from duomoe import arguments
from duomoe.functional import Functions
from duomoe.results import Array

MapType = Literal["mask", "index"]
MAP_TYPES = ("mask", "index")


class Rows(NamedTuple):
    """Where the rows of a map of tokens by experts lie; slot t * E + e is token t at expert e."""

    row_of_slot: Array  # [T, E], padding counted
    slot_of_row: Array  # [R]
    row_id_map: Array  # [T, 2 E + 1], padding not counted
    expert_counts: Array  # [E]
    expert_offsets: Array  # [E + 1]
    pad_offsets: Array  # [E]


class PermutationFunctions(Functions):
    """Transformer Engine's permutation over one front end."""

    # -- arguments ---------------------------------------------------------------------------------

    def _tokens(self, name: str, value: Any, letters: str) -> Array:
        """A float [..., N] as [T, N]."""
        value = self._frontend.check_array(name, value)
        if len(value.shape) < 2:
            raise ValueError(f"{name} must have shape [..., {letters}], got {list(value.shape)}")
        self._float_array(name, value, len(value.shape), f"..., {letters}")
        return self._frontend.merge_leading(value, 1)

    def _mask_of(self, routing_map: Any, tokens: Any) -> Array:
        """A map of bools or integers as bool [T, E]; what is not 0 is routed."""
        routing_map = self._frontend.check_array("routing_map", routing_map)
        shape = list(routing_map.shape)
        if len(shape) < 2 or shape[-1] < 1:
            raise ValueError(f"routing_map must have shape [..., E], E at least 1, got {shape}")
        if self._frontend.dtype(routing_map) != "bool":
            self._integers("routing_map", routing_map)  # the dtype
            routing_map = routing_map != 0
        routing_map = self._frontend.merge_leading(routing_map, 1)
        wanted = (tokens, shape[-1])
        arguments.shape("routing_map", routing_map.shape, wanted, "..., E with the tokens of inp")
        return routing_map

    def _probs(self, name: str, probs: Any, tokens: Any, columns: int, letter: str = "E") -> Array:
        probs = self._tokens(name, probs, letter)
        arguments.shape(name, probs.shape, (tokens, columns), f"..., {letter}")
        return probs

    @staticmethod
    def _row_limit(num_out_tokens: Any, unlimited: Any) -> int:
        """The number of rows asked for; None and negative numbers mean all."""
        if num_out_tokens is None:
            return unlimited
        num_out_tokens = arguments.integer("num_out_tokens", num_out_tokens)
        return unlimited if num_out_tokens < 0 else num_out_tokens

    def _same_device(self, function: str, **arrays: Any) -> None:
        self._frontend.check_device(function, arrays)

    @staticmethod
    def _check_rows(num_rows: Any, advice: str = "") -> None:
        if num_rows > arguments.INT32_MAX:
            raise ValueError(
                f"row numbers are int32: there must be fewer than 2^31 rows, got {num_rows}{advice}"
            )

    # -- the moves ---------------------------------------------------------------------------------

    def _plan(self, routing_map: Array, num_rows: Any, limit: Any, alignment: int = 1) -> Rows:
        self._check_rows(num_rows, "; set num_out_tokens")
        outputs = self._call(
            "plan_mask",
            (routing_map,),
            {
                "num_rows": num_rows,
                "map_width": 2 * routing_map.shape[1] + 1,
                "limit": limit,
                "alignment": alignment,
            },
        )
        names = [spec.name for spec in self._table["plan_mask"].outputs]
        given = dict(zip(names, outputs, strict=True))
        return Rows(**{name: given[name] for name in Rows._fields})

    def _move(self, x: Array, row_of_slot: Array, slot_of_row: Array) -> Array:
        (rows,) = self._call("permute", (x, row_of_slot, slot_of_row, None), {})
        return rows

    def _move_numbers(self, numbers: Array, row_of_slot: Array, slot_of_row: Array) -> Array:
        """One number per slot [T, E] to one per row [R]: rows of width 1, exact both ways."""
        slots = row_of_slot.shape[0] * row_of_slot.shape[1]
        column = self._frontend.merge_leading(numbers[..., None], 1)
        rows = self._move(column, row_of_slot.reshape((slots, 1)), slot_of_row)
        return rows.reshape((slot_of_row.shape[0],))

    def _merge(self, rows: Array, row_of_slot: Array, probs: Array | None) -> Array:
        if probs is not None and self._frontend.dtype(probs) != "float32":
            (probs,) = self._call("cast", (probs,), {"out_dtype": "float32"})
        (slot_of_row,) = self._call("invert_rows", (row_of_slot,), {"num_rows": rows.shape[0]})
        (y,) = self._call("combine", (rows, row_of_slot, slot_of_row, probs), {})
        return y

    # -- permute -----------------------------------------------------------------------------------

    def moe_permute(
        self,
        inp: Array,
        routing_map: Array,
        num_out_tokens: int | None = -1,
        max_token_num: int = -1,
        map_type: MapType = "mask",
    ) -> tuple[Array, Array]:
        """Copy token rows into the order of their experts.

        With a mask, rows are ordered by expert, then token; with an index map, by expert id, then
        token, then slot. What lies beyond `num_out_tokens` rows is dropped: its rows are the last.

        Args:
            inp: [..., D] float32, bfloat16 or float16; leading axes are tokens.
            routing_map: "mask": bool or integer [..., E], not 0 where the token goes to the expert.
                "index": integer [..., K], expert ids of any size; a negative one is unused.
            num_out_tokens: R, the rows of the output; None or a negative number means room for all:
                T * E rows for a mask, T * K for an index map (for which 0 means that too).
            max_token_num: without effect; there is no workspace to size.
            map_type: "mask" or "index".

        Returns:
            output: [R, D] in inp's dtype; rows that no token fills are 0. Its gradient sums a
                token's rows in float32 and rounds once; a dropped row adds nothing.
            row_id_map: int32, for `moe_unpermute`. "mask": [T, 2 E + 1]: a token's n rows, last
                expert first, from column E on their experts, n in the last column; -1 elsewhere.
                "index": [K * T], the row of slot k of token t at k * T + t; -1 for none.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        arguments.one_of("map_type", map_type, MAP_TYPES)
        arguments.integer("max_token_num", max_token_num)
        inp = self._tokens("inp", inp, "D")
        tokens = inp.shape[0]
        self._same_device("moe_permute", inp=inp, routing_map=routing_map)
        if map_type == "mask":
            routing_map = self._mask_of(routing_map, tokens)
            rows = self._row_limit(num_out_tokens, tokens * routing_map.shape[1])
            plan = self._plan(routing_map, rows, rows)
            return self._move(inp, plan.row_of_slot, plan.slot_of_row), plan.row_id_map
        ids = self._integers("routing_map", routing_map)
        if len(ids.shape) < 2 or ids.shape[-1] < 1:
            raise ValueError(
                f"routing_map must have shape [..., K], K at least 1, got {list(ids.shape)}"
            )
        ids = self._frontend.merge_leading(ids, 1)
        top_k = ids.shape[1]
        arguments.shape("routing_map", ids.shape, (tokens, top_k), "..., K with the tokens of inp")
        rows = self._row_limit(num_out_tokens or None, tokens * top_k)
        row_of_slot, slot_of_row = self._call("sort_slots", (ids,), {"num_rows": rows})
        output = self._move(inp, row_of_slot, slot_of_row)
        return output, row_of_slot.T.reshape((tokens * top_k,))

    def moe_permute_with_probs(
        self, inp: Array, probs: Array, routing_map: Array, num_out_tokens: int | None = -1
    ) -> tuple[Array, Array, Array]:
        """`moe_permute` with a mask, and every row's probability.

        Args:
            inp: [..., D] float32, bfloat16 or float16; leading axes are tokens.
            probs: [..., E] float32, bfloat16 or float16.
            routing_map: bool or integer [..., E], not 0 where the token goes to the expert.
            num_out_tokens: R; None or a negative number means room for all, T * E rows.

        Returns:
            output: [R, D] in inp's dtype, whatever the probabilities are.
            permuted_probs: [R] in probs's dtype, 0 for rows that no token fills; differentiable.
            row_id_map: [T, 2 E + 1] int32.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        output, permuted, plan = self._dispatch(
            "moe_permute_with_probs", inp, routing_map, num_out_tokens, probs, None
        )
        return output, permuted, plan.row_id_map

    def moe_permute_and_pad_with_probs(
        self,
        inp: Array,
        probs: Array,
        routing_map: Array,
        tokens_per_expert: Array,
        align_size: int,
        *,
        num_out_tokens: int | None = None,
    ) -> tuple[Array, Array, Array, Array, Array]:
        """`moe_permute_with_probs` with every expert's rows padded to a multiple of `align_size`.

        Args:
            inp: [..., D] float32, bfloat16 or float16; leading axes are tokens.
            probs: [..., E] float32, bfloat16 or float16.
            routing_map: bool or integer [..., E], not 0 where the token goes to the expert.
            tokens_per_expert: [E] integers, the tokens of every expert. R follows from them, so
                they are read on the host: keep them there where you can.
            align_size: the multiple.
            num_out_tokens: N, an upper bound of the rows before padding. Where it is given, nothing
                is read on the host, and R = (N + E * (align_size - 1)) // align_size * align_size.

        Returns:
            output: [R, D] in inp's dtype; padding rows are 0.
            permuted_probs: [R] in probs's dtype; differentiable.
            row_id_map: [T, 2 E + 1] int32, rows as they would lie without padding.
            pad_offsets: [E], padding rows before each expert, for `moe_unpermute`; all 0 where no
                padding is needed. In the dtype of tokens_per_expert.
            target_tokens_per_expert: [E], rows of each expert with padding, in the dtype of
                tokens_per_expert.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        name = "moe_permute_and_pad_with_probs"
        align_size = arguments.integer("align_size", align_size, 1, arguments.INT32_MAX)
        given = self._array("tokens_per_expert", tokens_per_expert, 1, "E")
        self._integers("tokens_per_expert", given)  # the dtype
        routing_map = self._frontend.check_array("routing_map", routing_map)
        experts = routing_map.shape[-1] if len(routing_map.shape) else 0
        arguments.shape("tokens_per_expert", given.shape, (experts,), "E")
        rows = None
        if num_out_tokens is None:
            counts = self._frontend.read("tokens_per_expert", given)
            if any(n < 0 for n in counts):
                raise ValueError(f"tokens_per_expert must not be negative, got {counts}")
            rows = sum(-(-n // align_size) * align_size for n in counts)
        output, permuted, plan = self._dispatch(
            name, inp, routing_map, num_out_tokens, probs, align_size, rows
        )
        dtype = self._frontend.dtype(given)
        pads, targets = (
            self._frontend.cast(x, dtype) for x in (plan.pad_offsets, self._padded_counts(plan))
        )
        return output, permuted, plan.row_id_map, pads, targets

    @staticmethod
    def _padded_counts(plan: Rows) -> Array:
        return plan.expert_offsets[1:] - plan.expert_offsets[:-1]

    def _dispatch(
        self,
        function: str,
        inp: Any,
        routing_map: Any,
        num_out_tokens: Any,
        probs: Any,
        align_size: int | None,
        rows: int | None = None,
    ) -> tuple[Array, Array, Rows]:
        """The permuted rows, their probs or None, and the plan; `rows` where R is known."""
        self._frontend.check_array("inp", inp)
        inp = self._tokens("inp", inp, "D")
        tokens = inp.shape[0]
        self._same_device(function, inp=inp, probs=probs, routing_map=routing_map)
        routing_map = self._mask_of(routing_map, tokens)
        experts = routing_map.shape[1]
        if probs is not None:
            probs = self._probs("probs", probs, tokens, experts)
        limit = self._row_limit(num_out_tokens, tokens * experts)
        alignment = align_size or 1
        if rows is None:
            rows = (limit + experts * (alignment - 1)) // alignment * alignment
        plan = self._plan(routing_map, rows, limit, alignment)
        output = self._move(inp, plan.row_of_slot, plan.slot_of_row)
        if probs is not None:
            probs = self._move_numbers(probs, plan.row_of_slot, plan.slot_of_row)
        return output, probs, plan

    def token_dispatch(
        self,
        inp: Array,
        routing_map: Array,
        num_out_tokens: int | None,
        probs: Array | None = None,
        align_size: int | None = None,
    ) -> tuple[Array, Array | None, Array, Array | None, Array]:
        """Copy token rows into the order of their experts, padded where `align_size` is given.

        Args:
            inp: [..., D] float32, bfloat16 or float16; leading axes are tokens.
            routing_map: bool or integer [..., E], not 0 where the token goes to the expert.
            num_out_tokens: N, the rows before padding, static; what lies beyond is dropped. None or
                a negative number means room for all, T * E.
            probs: [..., E] float32, bfloat16 or float16.
            align_size: every expert's rows are padded to a multiple of it.

        Returns:
            output: [R, D] in inp's dtype; rows that no token fills are 0. R = N, with align_size
                (N + E * (align_size - 1)) // align_size * align_size.
            permuted_probs: [R] in probs's dtype, or None; differentiable.
            row_id_map: [T, 2 E + 1] int32, rows as they would lie without padding.
            pad_offsets: [E] int32, padding rows before each expert, or None without align_size.
            tokens_per_expert: [E] int32, rows of each expert, dropped ones not counted, with
                align_size padded ones counted.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        if align_size is not None:
            align_size = arguments.integer("align_size", align_size, 1, arguments.INT32_MAX)
        output, permuted, plan = self._dispatch(
            "token_dispatch", inp, routing_map, num_out_tokens, probs, align_size
        )
        if align_size is None:
            return output, permuted, plan.row_id_map, None, plan.expert_counts
        return output, permuted, plan.row_id_map, plan.pad_offsets, self._padded_counts(plan)

    # -- unpermute ---------------------------------------------------------------------------------

    def moe_unpermute(
        self,
        inp: Array,
        row_id_map: Array,
        merging_probs: Array | None = None,
        restore_shape: Sequence[int] | None = None,
        map_type: MapType = "mask",
        probs: Array | None = None,
        pad_offsets: Array | None = None,
    ) -> Array:
        """Bring rows back to token order and sum those of a token, weighted by `merging_probs`.

        Sums are float32 and rounded once. Rows to which the map does not lead are never read.

        Args:
            inp: [R, D] float32, bfloat16 or float16.
            row_id_map: of `moe_permute` with the same map_type.
            merging_probs: float32, bfloat16 or float16, "mask": [..., E], "index": [..., K]; None
                counts as all ones.
            restore_shape: shape of the result, [..., D] with T tokens; None means [T, D]. For an
                index map without merging_probs, it also tells T; without either, K is 1.
            map_type: "mask" or "index".
            probs: deprecated name of merging_probs.
            pad_offsets: [E] integers of `moe_permute_and_pad_with_probs`, for a mask.

        Returns:
            [T, D], or restore_shape, in inp's dtype. Gradients flow to inp and merging_probs.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        if probs is not None:
            if merging_probs is not None:
                raise ValueError("probs is the deprecated name of merging_probs: give one of them")
            warnings.warn(
                "moe_unpermute: probs is deprecated, use merging_probs", FutureWarning, stacklevel=2
            )
            merging_probs = probs
        arguments.one_of("map_type", map_type, MAP_TYPES)
        inp = self._float_array("inp", inp, 2, "R, D")
        shape = None
        if restore_shape is not None:
            shape = [arguments.integer("restore_shape", n, 0) for n in restore_shape]
            if len(shape) < 2 or shape[-1] != inp.shape[1]:
                raise ValueError(
                    f"restore_shape must be [..., D] with D = {inp.shape[1]}, got {shape}"
                )
        if map_type == "mask":
            y = self._combine("moe_unpermute", inp, row_id_map, merging_probs, pad_offsets)
        elif pad_offsets is not None:
            raise ValueError("pad_offsets are for map_type='mask', got map_type='index'")
        else:
            y = self._combine_index(inp, row_id_map, merging_probs, shape)
        if shape is None:
            return y
        if math.prod(shape[:-1]) != y.shape[0]:
            raise ValueError(f"restore_shape must hold {y.shape[0]} tokens, got {shape}")
        return y if len(shape) == 2 else y.reshape(tuple(shape))

    def token_combine(
        self,
        inp: Array,
        row_id_map: Array,
        merging_probs: Array | None = None,
        pad_offsets: Array | None = None,
    ) -> Array:
        """Bring rows back to token order and sum those of a token, weighted by `merging_probs`.

        Sums are float32 and rounded once. Rows to which the map does not lead are never read.

        Args:
            inp: [R, D] float32, bfloat16 or float16.
            row_id_map: [T, 2 E + 1] integers of `token_dispatch`.
            merging_probs: [..., E] float32, bfloat16 or float16; None counts as all ones.
            pad_offsets: [E] integers of `token_dispatch`; needed where that had an align_size.

        Returns:
            [T, D] in inp's dtype. Gradients flow to inp and merging_probs.

        Raises:
            ValueError, TypeError: on a shape or dtype that does not fit.
        """
        inp = self._float_array("inp", inp, 2, "R, D")
        return self._combine("token_combine", inp, row_id_map, merging_probs, pad_offsets)

    def _combine(
        self, function: str, inp: Array, row_id_map: Any, merging_probs: Any, pad_offsets: Any
    ) -> Array:
        row_id_map = self._integers(
            "row_id_map", self._array("row_id_map", row_id_map, 2, "T, 2 E + 1")
        )
        tokens, width = row_id_map.shape
        experts = (width - 1) // 2
        if width < 3 or width != 2 * experts + 1:
            raise ValueError(
                f"row_id_map must have shape [T, 2 E + 1], got {list(row_id_map.shape)}"
            )
        self._same_device(
            function,
            inp=inp,
            row_id_map=row_id_map,
            merging_probs=merging_probs,
            pad_offsets=pad_offsets,
        )
        if merging_probs is not None:
            merging_probs = self._probs("merging_probs", merging_probs, tokens, experts)
        if pad_offsets is not None:
            pad_offsets = self._integers("pad_offsets", pad_offsets)
            arguments.shape("pad_offsets", pad_offsets.shape, (experts,), "E")
        attributes = {"num_experts": experts, "num_rows": inp.shape[0]}
        (row_of_slot,) = self._call("read_row_map", (row_id_map, pad_offsets), attributes)
        return self._merge(inp, row_of_slot, merging_probs)

    def _combine_index(
        self, inp: Array, row_id_map: Any, merging_probs: Any, shape: Sequence[int] | None
    ) -> Array:
        row_id_map = self._integers("row_id_map", self._array("row_id_map", row_id_map, 1, "K * T"))
        slots = row_id_map.shape[0]
        self._same_device(
            "moe_unpermute", inp=inp, row_id_map=row_id_map, merging_probs=merging_probs
        )
        if merging_probs is not None:
            merging_probs = self._tokens("merging_probs", merging_probs, "K")
            tokens, top_k = merging_probs.shape
        elif shape is not None:
            tokens = math.prod(shape[:-1])
            top_k = slots // tokens if tokens else 1
        else:
            tokens, top_k = slots, 1
        if tokens * top_k != slots:
            raise ValueError(
                f"row_id_map must hold K * T = {top_k} * {tokens} numbers, got {slots}"
            )
        row_of_slot = row_id_map.reshape((top_k, tokens)).T
        return self._merge(inp, row_of_slot, merging_probs)
