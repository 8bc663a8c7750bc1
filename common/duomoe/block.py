# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The whole block over the public functions: gate, route, plan, permute, experts, combine, losses.

Axis letters: T tokens, E experts, K experts per token, D model width, F expert hidden width.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from duomoe import arguments
from duomoe.config import ExpertConfig, RouterConfig
from duomoe.experts import BlockOptions, ExpertFunctions
from duomoe.results import Array, MoEOutput, MoEParams, Routing


class BlockFunctions(ExpertFunctions):
    """The public functions of one front end, with the block."""

    def _moe(
        self,
        x: Array,
        params: MoEParams,
        config: RouterConfig,
        *,
        token_mask: Array | None,
        indices: Array | None,
        replay_mask: Array | None,
        compare: bool,
        num_sequences: int,
        load_balancing_coeff: float,
        z_loss_coeff: float,
        over: Any,
        **options: Any,
    ) -> MoEOutput:
        arguments.record("config", config, RouterConfig)
        coefficients = (
            arguments.number("load_balancing_coeff", load_balancing_coeff),
            arguments.number("z_loss_coeff", z_loss_coeff),
        )
        arguments.boolean("compare", compare)
        self._frontend.check_over(over)
        optional = {"token_mask": token_mask, "indices": indices, "replay_mask": replay_mask}
        x, leading, arrays, block = self._block_arguments(
            "moe", x, params, optional, config.num_experts, config.top_k, BlockOptions(**options)
        )
        num_sequences = self._num_sequences(num_sequences, math.prod(leading))
        self._check_router(params, x.shape[-1], config.num_experts)

        for_gate, for_experts = self._frontend.fork(self._frontend.merge_leading(x, 1))
        logits = self.gate(
            for_gate,
            params.router,
            params.router_bias,
            token_mask=arrays["token_mask"],
            gate_dtype=block.gate_dtype,
        )
        logits, for_route = self._frontend.fork(logits)
        routing = self.route(
            for_route,
            config,
            bias=params.expert_bias,
            num_sequences=num_sequences,
            compare=compare,
            **arrays,
        )
        weights, for_mix = self._frontend.fork(routing.weights)
        routing = Routing(**{**vars(routing), "weights": weights})
        y, plan = self._mix(
            for_experts,
            routing.indices,
            for_mix,
            params,
            config.num_experts,
            arrays["token_mask"],
            block,
        )
        everywhere = self._all_sum(routing, over)
        return MoEOutput(
            output=y.reshape((*leading, x.shape[-1])),
            routing=routing,
            load_balancing_loss=self._load_balancing_loss(everywhere, config, 1.0, None),
            z_loss=self._z_loss(everywhere, 1.0, None),
            expert_counts=routing.expert_counts,
            kept_counts=plan.expert_counts,
            aux_loss=self._aux_loss(everywhere, config, *coefficients),
            logits=logits,
        )

    def _check_router(self, params: MoEParams, width: int, experts: int) -> None:
        router = self._float_array("params.router", params.router, 2, "D, E")
        arguments.shape("params.router", router.shape, (width, experts), "D, E")
        for name in ("router_bias", "expert_bias"):
            if (bias := getattr(params, name)) is not None:
                bias = self._float_array(f"params.{name}", bias, 1, "E")
                arguments.shape(f"params.{name}", bias.shape, (experts,), "E")
        if (bias := params.expert_bias) is not None and self._frontend.dtype(bias) != "float32":
            dtype = self._frontend.dtype(bias)
            raise TypeError(f"params.expert_bias must be float32, got {dtype}")

    def _aux_loss(
        self, routing: Routing, config: RouterConfig, load_balancing: float, z: float
    ) -> Array:
        """Both losses times their coefficients; a plain 0 without any."""
        terms = []
        if load_balancing != 0:
            terms.append(self._load_balancing_loss(routing, config, load_balancing, None))
        if z != 0:
            terms.append(self._z_loss(routing, z, None))
        if not terms:
            return self._frontend.zero(routing.score_sums)
        if len(terms) == 1:
            return terms[0]
        return self._frontend.join(*(t.reshape((1, 1)) for t in terms)).reshape(())

    def moe_from_routing(
        self,
        x: Array,
        indices: Array,
        weights: Array,
        params: MoEParams,
        *,
        token_mask: Array | None = None,
        experts: ExpertConfig | None = None,
        capacity: int | None = None,
        drop_order: Literal["position", "weight"] = "position",
        alignment: int = 1,
        max_rows: int | None = None,
        gate_dtype: str = "float32",
        recompute: bool = False,
    ) -> MoEOutput:
        """Dispatch, experts and combine with a routing of the caller's own.

        Args:
            x: [..., D] float32, bfloat16 or float16; leading axes are tokens.
            indices: [..., K] integers, expert ids; -1 or an id out of range is an unused slot, the
                same id twice is two slots. They take no gradient.
            weights: [..., K] float32, bfloat16 or float16, factors of the experts' outputs (or
                inputs, by experts.weight_on); not read for unused and dropped slots.
            params: MoEParams; router, router_bias and expert_bias are not used and may be None.
            token_mask: [...] bool; a masked token (False) goes to no expert.
            experts: ExpertConfig; None for its defaults, SwiGLU.
            capacity: see plan_dispatch, as drop_order, alignment and max_rows.
            drop_order: see plan_dispatch.
            alignment: see plan_dispatch.
            max_rows: see plan_dispatch.
            gate_dtype: of the product with params.shared_router; see gate.
            recompute: see moe.

        Returns:
            MoEOutput, its routing with indices (-1 for masked tokens), float32 weights and
            expert_counts. What is made from logits is None: losses, statistics and logits.
            Gradients flow to x, weights and params.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit, before any kernel
                runs.
        """
        options = BlockOptions(
            experts, capacity, drop_order, alignment, max_rows, gate_dtype, recompute
        )
        for name, array in (("indices", indices), ("weights", weights)):
            self._frontend.check_array(name, array)
        optional = {"token_mask": token_mask, "indices": indices, "weights": weights}
        x, leading, arrays, options = self._block_arguments(
            "moe_from_routing", x, params, optional, None, None, options
        )
        indices, weights = arrays["indices"], arrays["weights"]
        if self._frontend.dtype(weights) != "float32":
            weights = self._frontend.cast(weights, "float32")
        if token_mask is not None:
            indices = self._frontend.where(arrays["token_mask"], indices, -1)
        y, plan = self._mix(
            self._frontend.merge_leading(x, 1),
            indices,
            weights,
            params,
            params.w_up.shape[0],
            arrays["token_mask"],
            options,
        )
        return MoEOutput(
            output=y.reshape((*leading, x.shape[-1])),
            routing=Routing(indices=indices, weights=weights, expert_counts=plan.routed_counts),
            expert_counts=plan.routed_counts,
            kept_counts=plan.expert_counts,
        )
