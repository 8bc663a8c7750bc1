# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The whole block over the public functions: gate, route, plan, permute, experts, combine, losses.

Axis letters: T tokens, E experts, K experts per token, D model width, F expert hidden width.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from duomoe import arguments
from duomoe.config import RouterConfig
from duomoe.functional import Functions
from duomoe.ops import FLOAT_DTYPES
from duomoe.results import Array, MoEOutput, MoEParams


class BlockFunctions(Functions):
    """The public functions of one front end, with the block."""

    def _moe(
        self,
        x: Array,
        params: MoEParams,
        config: RouterConfig,
        *,
        token_mask: Array | None,
        indices: Array | None,
        num_sequences: int,
        capacity: int | None,
        drop_order: Literal["position", "weight"],
        alignment: int,
        max_rows: int | None,
        gate_dtype: str,
        over: Any,
    ) -> MoEOutput:
        # Everything is checked before the first kernel runs.
        x = self._frontend.check_array("x", x)
        if len(x.shape) < 1:
            raise ValueError("x must have shape [..., D], got []")
        self._float_array("x", x, len(x.shape), "..., D")
        arguments.record("params", params, MoEParams)
        arguments.record("config", config, RouterConfig)
        arguments.one_of("gate_dtype", gate_dtype, FLOAT_DTYPES)
        capacity, alignment, max_rows = self._plan_options(
            capacity, drop_order, alignment, max_rows
        )
        leading, width = tuple(x.shape[:-1]), x.shape[-1]
        num_sequences = self._num_sequences(num_sequences, math.prod(leading))
        self._check_params(params, width, config.num_experts)
        self._num_rows(
            math.prod(leading) * config.top_k, config.num_experts, capacity, alignment, max_rows
        )
        self._frontend.check_over(over)
        self._frontend.check_device(
            "moe",
            {
                "x": x,
                **{f"params.{name}": array for name, array in vars(params).items()},
                "token_mask": token_mask,
                "indices": indices,
            },
        )
        if token_mask is not None:
            token_mask = self._mask(token_mask, leading, "...")
            token_mask = self._frontend.merge_leading(token_mask, 0)
        if indices is not None:
            indices = self._integers("indices", indices)
            arguments.shape("indices", indices.shape, (*leading, config.top_k), "..., K")
            indices = self._frontend.merge_leading(indices, 1)

        for_gate, for_rows = self._frontend.fork(self._frontend.merge_leading(x, 1))
        logits = self.gate(
            for_gate,
            params.router,
            params.router_bias,
            token_mask=token_mask,
            gate_dtype=gate_dtype,
        )
        routing = self.route(
            logits,
            config,
            bias=params.expert_bias,
            indices=indices,
            token_mask=token_mask,
            num_sequences=num_sequences,
        )
        plan = self.plan_dispatch(
            routing.indices,
            config.num_experts,
            capacity=capacity,
            drop_order=drop_order,
            weights=routing.weights if drop_order == "weight" else None,
            alignment=alignment,
            max_rows=max_rows,
        )
        rows_gate, rows_up = self._frontend.fork(self.permute(for_rows, plan))
        hidden = self.swiglu(
            self.grouped_matmul(rows_gate, params.w_gate, plan),
            self.grouped_matmul(rows_up, params.w_up, plan),
        )
        y = self.combine(self.grouped_matmul(hidden, params.w_down, plan), plan, routing.weights)
        return MoEOutput(
            output=y.reshape((*leading, width)),
            routing=routing,
            load_balancing_loss=self._load_balancing_loss(routing, config, 1.0, over),
            z_loss=self._z_loss(routing, 1.0, over),
            expert_counts=routing.expert_counts,
            kept_counts=plan.expert_counts,
        )

    def _check_params(self, params: MoEParams, width: int, experts: int) -> None:
        def check(name: str, letters: str, wanted: tuple[int, ...]) -> Array:
            array = self._float_array(f"params.{name}", getattr(params, name), len(wanted), letters)
            given = tuple(n if w < 0 else w for n, w in zip(array.shape, wanted, strict=True))
            arguments.shape(f"params.{name}", array.shape, given, letters)
            return array

        check("router", "D, E", (width, experts))
        inner = check("w_gate", "E, D, F", (experts, width, -1)).shape[-1]
        check("w_up", "E, D, F", (experts, width, inner))
        check("w_down", "E, F, D", (experts, inner, width))
        if params.router_bias is not None:
            check("router_bias", "E", (experts,))
        if params.expert_bias is not None:
            bias = check("expert_bias", "E", (experts,))
            if (dtype := self._frontend.dtype(bias)) != "float32":
                raise TypeError(f"params.expert_bias must be float32, got {dtype}")
