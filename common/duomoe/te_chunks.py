# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's sorting of chunks, and its dispatch by expert ids, written once for both
front ends.

Axis letters: T tokens, E experts, K experts per token, D model width, R permuted rows, C chunks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from duomoe import arguments
from duomoe.results import Array
from duomoe.te_permutation import PermutationFunctions


class PureJaxPermState(NamedTuple):
    """What `pure_jax_token_combine` needs of `pure_jax_token_dispatch`.

    Attributes:
        sorted_indices: [R] int32, the slot t * K + k of every row; -1 for a padding row.
        num_real_tokens: T * K.
        padding_size: R - T * K.
    """

    sorted_indices: Array
    num_real_tokens: int
    padding_size: int


class ChunkFunctions(PermutationFunctions):
    """The rest of Transformer Engine's permutation over one front end."""

    # -- chunks ------------------------------------------------------------------------------------

    def _sort_chunks(
        self,
        function: str,
        inp: Any,
        probs: Any,
        split_sizes: Any,
        order: Any,
        order_name: str,
    ) -> tuple[Array, Array, Array]:
        inp = self._tokens("inp", inp, "D")
        tokens = inp.shape[0]
        arrays = {"inp": inp, "probs": probs, "split_sizes": split_sizes, order_name: order}
        self._frontend.check_device(function, arrays)
        sizes = self._integers("split_sizes", self._array("split_sizes", split_sizes, 1, "C"))
        order = self._integers(order_name, order)
        arguments.shape(order_name, order.shape, sizes.shape, "C")
        if probs is not None:
            probs = self._frontend.check_array("probs", probs)
            self._float_array("probs", probs, len(probs.shape), "T")
            probs = self._frontend.merge_leading(probs[..., None], 1)
            arguments.shape("probs", probs.shape[:1], (tokens,), "T")
        row_of_token, token_of_row = self._call(
            "place_chunks", (sizes, order), {"num_tokens": tokens}
        )
        row_of_slot = row_of_token.reshape((tokens, 1))
        output = self._move(inp, row_of_slot, token_of_row)
        if probs is not None:
            probs = self._move(probs, row_of_slot, token_of_row).reshape((tokens,))
        return output, probs, row_of_token

    def moe_sort_chunks_by_index(
        self, inp: Array, split_sizes: Array, sorted_index: Array
    ) -> Array:
        """Cut tokens into chunks of neighbours and lay these down in another order.

        Args:
            inp: [..., D] float32, bfloat16 or float16; leading axes are tokens.
            split_sizes: [C] integers, tokens of each chunk.
            sorted_index: [C] integers, the chunks in their new order.

        Returns:
            [T, D] in inp's dtype; tokens past the last chunk are left out, and the rows after the
            chunks are 0. Differentiable.

        Raises:
            ValueError, TypeError: on a shape or dtype that does not fit.
        """
        return self._sort_chunks(
            "moe_sort_chunks_by_index", inp, None, split_sizes, sorted_index, "sorted_index"
        )[0]

    def moe_sort_chunks_by_index_with_probs(
        self, inp: Array, probs: Array, split_sizes: Array, sorted_index: Array
    ) -> tuple[Array, Array]:
        """`moe_sort_chunks_by_index`, and the same for one probability per token.

        Args:
            inp: [..., D] float32, bfloat16 or float16; leading axes are tokens.
            probs: [T] float32, bfloat16 or float16.
            split_sizes: [C] integers, tokens of each chunk.
            sorted_index: [C] integers, the chunks in their new order.

        Returns:
            output: [T, D] in inp's dtype; tokens past the last chunk are left out, and the rows
                after the chunks are 0.
            permuted_probs: [T] in probs's dtype, likewise. Both are differentiable.

        Raises:
            ValueError, TypeError: on a shape or dtype that does not fit.
        """
        self._frontend.check_array("probs", probs)
        name = "moe_sort_chunks_by_index_with_probs"
        return self._sort_chunks(name, inp, probs, split_sizes, sorted_index, "sorted_index")[:2]

    def sort_chunks_by_index(
        self, inp: Array, split_sizes: Array, sorted_indices: Array
    ) -> tuple[Array, Array]:
        """`moe_sort_chunks_by_index`, and the map that it moved rows by.

        Args:
            inp: [..., D] float32, bfloat16 or float16; leading axes are tokens.
            split_sizes: [C] integers, tokens of each chunk.
            sorted_indices: [C] integers, the chunks in their new order.

        Returns:
            output: [T, D] in inp's dtype; tokens past the last chunk are left out, and the rows
                after the chunks are 0. Differentiable.
            row_id_map: [T] int32, the row of each token; -1 past the last chunk.

        Raises:
            ValueError, TypeError: on a shape or dtype that does not fit.
        """
        output, _, row_of_token = self._sort_chunks(
            "sort_chunks_by_index", inp, None, split_sizes, sorted_indices, "sorted_indices"
        )
        return output, row_of_token

    # -- expert ids instead of a map ---------------------------------------------------------------

    def pure_jax_token_dispatch(
        self,
        inputs: Array,
        selected_experts: Array,
        num_experts: int,
        num_experts_per_tok: int,
        align_size: int = 0,
        roll_to_expert_id: int | None = None,
    ) -> tuple[Array, PureJaxPermState, Array]:
        """Copy token rows into the order of their experts, given as ids.

        The name is the original's; here it calls the same kernels as the others.

        Args:
            inputs: [..., D] float32, bfloat16 or float16; leading axes are tokens.
            selected_experts: [..., K] integers; an id outside [0, E) is an unused slot.
            num_experts: E.
            num_experts_per_tok: K.
            align_size: every expert's rows are padded to a multiple of it; 0 means no padding.
            roll_to_expert_id: the expert that comes first; the others follow, cyclically.

        Returns:
            sorted_inputs: [R, D] by expert, then token, then slot; rows that no slot fills are 0.
                R = T * K, with align_size T * K + E * (align_size - 1). Differentiable.
            perm_state: for `pure_jax_token_combine`.
            group_sizes: [E] int32, rows of each expert in row order, padding counted.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        num_experts = arguments.integer("num_experts", num_experts, 1, arguments.INT32_MAX - 1)
        top_k = arguments.integer("num_experts_per_tok", num_experts_per_tok, 1)
        align_size = arguments.integer("align_size", align_size, 0, arguments.INT32_MAX)
        inputs = self._tokens("inputs", inputs, "D")
        tokens = inputs.shape[0]
        ids = self._integers("selected_experts", selected_experts)
        if len(ids.shape) < 2:
            raise ValueError(f"selected_experts must have shape [..., K], got {list(ids.shape)}")
        ids = self._frontend.merge_leading(ids, 1)
        arguments.shape("selected_experts", ids.shape, (tokens, top_k), "..., K")
        self._same_device("pure_jax_token_dispatch", inputs=inputs, selected_experts=ids)
        if roll_to_expert_id is not None:
            shift = arguments.integer("roll_to_expert_id", roll_to_expert_id) % num_experts
            used = self._frontend.cast((ids >= 0) & (ids < num_experts), "int32")
            ids = self._frontend.cast((ids * used + (num_experts - shift)) % num_experts, "int32")
            ids = ids * used + (used - 1)
        padding = num_experts * (align_size - 1) if align_size else 0
        num_rows = tokens * top_k + padding
        self._check_rows(num_rows)
        _, slot_of_row, _, _, offsets = plan = self._call(
            "plan_dispatch",
            (ids, None),
            {
                "num_experts": num_experts,
                "num_rows": num_rows,
                "capacity": -1,
                "drop_order": "position",
                "alignment": align_size or 1,
            },
        )
        state = PureJaxPermState(slot_of_row, tokens * top_k, padding)
        return self._move(inputs, plan[0], slot_of_row), state, offsets[1:] - offsets[:-1]

    def pure_jax_token_combine(
        self,
        expert_outputs: Array,
        perm_state: PureJaxPermState,
        routing_weights: Array,
        num_experts_per_tok: int,
        batch_size: int,
        sequence_length: int,
    ) -> Array:
        """Bring rows back to token order and sum those of a token, weighted.

        Args:
            expert_outputs: [R, D] float32, bfloat16 or float16.
            perm_state: of `pure_jax_token_dispatch`.
            routing_weights: T * K numbers of float32, bfloat16 or float16, in the order of the
                slots.
            num_experts_per_tok: K.
            batch_size: B.
            sequence_length: T / B.

        Returns:
            [B, T / B, D] in expert_outputs's dtype, summed in float32 and rounded once. Gradients
            flow to expert_outputs and routing_weights.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        rows = self._float_array("expert_outputs", expert_outputs, 2, "R, D")
        arguments.record("perm_state", perm_state, PureJaxPermState)
        top_k = arguments.integer("num_experts_per_tok", num_experts_per_tok, 1)
        batch = arguments.integer("batch_size", batch_size, 0)
        length = arguments.integer("sequence_length", sequence_length, 0)
        tokens = batch * length
        weights = self._frontend.check_array("routing_weights", routing_weights)
        self._float_array("routing_weights", weights, len(weights.shape), "T, K")
        if math.prod(weights.shape) != tokens * top_k:
            raise ValueError(
                f"routing_weights must hold {batch} * {length} * {top_k} numbers, got "
                f"{list(weights.shape)}"
            )
        weights = weights.reshape((tokens, top_k))
        slot_of_row = self._integers("perm_state.sorted_indices", perm_state.sorted_indices)
        arguments.shape("perm_state.sorted_indices", slot_of_row.shape, (rows.shape[0],), "R")
        # Slots take the part of the rows here.
        attributes = {"num_rows": tokens * top_k}
        (row_of_slot,) = self._call(
            "invert_rows", (slot_of_row.reshape((rows.shape[0], 1)),), attributes
        )
        y = self._merge(rows, row_of_slot.reshape((tokens, top_k)), weights)
        return y.reshape((batch, length, rows.shape[1]))
