# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the block does with a routing: plan, permute, experts and combine, and the shared experts.

Axis letters: T tokens, E experts, K experts per token, D model width, F expert hidden width,
N width of a product.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from duomoe import arguments
from duomoe.config import ExpertConfig, RouterConfig
from duomoe.dispatch import DispatchFunctions, plan_options
from duomoe.ops import FLOAT_DTYPES
from duomoe.results import Array, DispatchPlan, MoEParams

_DEFAULT_EXPERTS = ExpertConfig()
# The factor of the shared experts' output: the sigmoid of a logit of its own.
_SHARED_ROUTER = RouterConfig(1, 1, score="sigmoid", normalize=False)


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """The options of a block that come after the routing; see the arguments of `moe`."""

    experts: ExpertConfig | None
    capacity: int | None
    drop_order: str
    alignment: int
    max_rows: int | None
    gate_dtype: str
    recompute: bool

    def plan(self) -> dict[str, Any]:
        """The options of plan_dispatch."""
        names = ("capacity", "drop_order", "alignment", "max_rows")
        return {name: getattr(self, name) for name in names}


class ExpertFunctions(DispatchFunctions):
    """The public functions of one front end up to the block."""

    # -- arguments ---------------------------------------------------------------------------------

    def _tokens(self, x: Any) -> Array:
        """x[..., D]."""
        x = self._frontend.check_array("x", x)
        if len(x.shape) < 1:
            raise ValueError("x must have shape [..., D], got []")
        return self._float_array("x", x, len(x.shape), "..., D")

    def _block_arguments(
        self,
        op: str,
        x: Any,
        params: MoEParams,
        optional: Mapping[str, Any],
        num_experts: int | None,
        top_k: int | None,
        options: BlockOptions,
    ) -> tuple[Array, tuple[int, ...], dict[str, Any], BlockOptions]:
        """Check everything before the first kernel runs.

        Args:
            op: the function, for messages.
            x: [..., D].
            params: MoEParams.
            optional: its other arrays by name, each [...], or [..., K] for indices and weights.
            num_experts: E, or None to take it from params.
            top_k: K, or None to take it from indices.
            options: as the caller gave them.

        Returns:
            x, its leading axes, the other arrays with these merged into one, and the options with
            the experts' defaults.
        """
        x = self._tokens(x)
        leading, width = tuple(x.shape[:-1]), x.shape[-1]
        arguments.record("params", params, MoEParams)
        experts = options.experts
        if experts is None:
            experts = _DEFAULT_EXPERTS
        arguments.record("experts", experts, ExpertConfig)
        arguments.one_of("gate_dtype", options.gate_dtype, FLOAT_DTYPES)
        arguments.boolean("recompute", options.recompute)
        present = {name: array for name, array in optional.items() if array is not None}
        named = {f"params.{n}": array for n, array in vars(params).items() if array is not None}
        num_experts = self._check_params(params, experts, width, num_experts)
        if top_k is None:
            shape = present["indices"].shape
            if len(shape) != len(leading) + 1:
                raise ValueError(
                    f"indices must have shape [..., K], the leading axes being those of x, "
                    f"{list(leading)}, got {list(shape)}"
                )
            top_k = shape[-1]
        bounds = plan_options(**options.plan())
        self._num_rows(math.prod(leading) * top_k, num_experts, *bounds)
        self._frontend.check_device(op, {"x": x, **named, **present})
        arrays: dict[str, Any] = dict.fromkeys(optional)
        for name, array in present.items():
            if name.endswith("mask"):
                array = self._mask(name, array, leading, "...")
            else:
                if name == "indices":
                    array = self._integers(name, array)
                else:
                    array = self._float_array(name, array, len(leading) + 1, "..., K")
                arguments.shape(name, array.shape, (*leading, top_k), "..., K")
            arrays[name] = self._frontend.merge_leading(array, 0 if name.endswith("mask") else 1)
        return x, leading, arrays, dataclasses.replace(options, experts=experts)

    def _check_params(
        self, params: MoEParams, experts: ExpertConfig, width: int, num_experts: int | None
    ) -> int:
        """Check the experts' parameters; E."""

        def check(name: str, letters: str, wanted: Sequence[int]) -> tuple[int, ...]:
            # -1 stands for any length.
            array = self._float_array(f"params.{name}", getattr(params, name), len(wanted), letters)
            given = tuple(n if w < 0 else w for n, w in zip(array.shape, wanted, strict=True))
            arguments.shape(f"params.{name}", array.shape, given, letters)
            return given

        def check_units(prefix: str, letters: str, batch: tuple[int, ...]) -> tuple[int, ...]:
            """The matrices of one kind of experts; the leading axes and F of w_up."""
            up = check(f"{prefix}w_up", f"{letters}D, F", (*batch, width, -1))
            batch, inner = up[:-2], up[-1]
            if getattr(params, f"{prefix}w_gate") is not None:
                check(f"{prefix}w_gate", f"{letters}D, F", (*batch, width, inner))
            check(f"{prefix}w_down", f"{letters}F, D", (*batch, inner, width))
            return (*batch, inner)

        num_experts, inner = check_units("", "E, ", (-1 if num_experts is None else num_experts,))
        if num_experts == 0:
            raise ValueError("params.w_up must be of at least one expert, got E = 0")
        lengths = {"b_gate": ("E, F", inner), "b_up": ("E, F", inner), "b_down": ("E, D", width)}
        for name, (letters, length) in lengths.items():
            if getattr(params, name) is not None:
                check(name, letters, (num_experts, length))
        if params.w_gate is None:
            if params.b_gate is not None:
                raise ValueError("params.b_gate is for gated experts, but params.w_gate is None")
            if experts.needs_gate:
                raise ValueError(
                    "experts.limit and experts.up_offset are for gated experts, but "
                    "params.w_gate is None"
                )
        shared = ("shared_w_gate", "shared_w_up", "shared_w_down", "shared_router")
        if params.shared_w_up is not None:
            check_units("shared_", "", ())
            if params.shared_router is not None:
                check("shared_router", "D, 1", (width, 1))
            if params.shared_w_gate is None and experts.needs_gate:
                raise ValueError(
                    "experts.limit and experts.up_offset are for gated experts, but "
                    "params.shared_w_gate is None"
                )
        elif given := [name for name in shared if getattr(params, name) is not None]:
            raise ValueError(f"params.{given[0]} needs params.shared_w_up, got None")
        return num_experts

    # -- computation -------------------------------------------------------------------------------

    def _mix(
        self,
        x: Array,
        indices: Array,
        weights: Array,
        params: MoEParams,
        num_experts: int,
        token_mask: Array | None,
        options: BlockOptions,
    ) -> tuple[Array, DispatchPlan]:
        """x[T, D] through its experts and the shared ones: y[T, D], and the plan."""
        experts = options.experts
        assert experts is not None
        plan = self.plan_dispatch(
            indices,
            num_experts,
            weights=weights if options.drop_order == "weight" else None,
            **options.plan(),
        )
        if params.shared_w_up is not None:
            x, for_shared = self._frontend.fork(x)
        early = experts.weight_on == "input"
        activated = self._activation(experts)

        def routed(x: Array, weights: Array, *matrices: Array | None) -> Array:
            w_gate, w_up, w_down, b_gate, b_up, b_down = matrices
            rows = self.permute(x, plan, weights if early else None)
            if w_gate is None:
                hidden = activated(self.grouped_matmul(rows, w_up, plan, b_up))
            else:
                rows_gate, rows_up = self._frontend.fork(rows)
                hidden = activated(
                    self.grouped_matmul(rows_gate, w_gate, plan, b_gate),
                    self.grouped_matmul(rows_up, w_up, plan, b_up),
                )
            results = self.grouped_matmul(hidden, w_down, plan, b_down)
            return self.combine(results, plan, None if early else weights)

        matrices = (params.w_gate, params.w_up, params.w_down)
        biases = (params.b_gate, params.b_up, params.b_down)
        run = self._frontend.recompute if options.recompute else _call
        y = run(routed, x, weights, *matrices, *biases)
        if params.shared_w_up is not None:
            y = self._frontend.join(y, self._shared(for_shared, params, token_mask, options))
        return y, plan

    def _shared(
        self, x: Array, params: MoEParams, token_mask: Array | None, options: BlockOptions
    ) -> Array:
        """The experts that every unmasked token goes to: [T, D]."""
        experts = options.experts
        assert experts is not None
        if params.shared_router is not None:
            x, for_router = self._frontend.fork(x)
            logits = self.gate(
                for_router,
                params.shared_router,
                token_mask=token_mask,
                gate_dtype=options.gate_dtype,
            )
            factors = self.route(logits, _SHARED_ROUTER, token_mask=token_mask).weights

        activated = self._activation(experts)

        def run(x: Array, w_gate: Array | None, w_up: Array, w_down: Array) -> Array:
            def product(a: Array, w: Array) -> Array:
                return self.gate(a, w, token_mask=token_mask, gate_dtype=self._frontend.dtype(a))

            if w_gate is None:
                return product(activated(product(x, w_up)), w_down)
            x_gate, x_up = self._frontend.fork(x)
            return product(activated(product(x_gate, w_gate), product(x_up, w_up)), w_down)

        call = self._frontend.recompute if options.recompute else _call
        y = call(run, x, params.shared_w_gate, params.shared_w_up, params.shared_w_down)
        if params.shared_router is not None:
            y = self.scale_rows(y, factors.reshape((factors.shape[0],)))
        return y

    def _activation(self, experts: ExpertConfig) -> Callable[..., Array]:
        """The activation as a function of (gate, up) or of up alone."""
        # Read here, since torch.compile cannot trace an option's first use within `recompute`.
        options = {
            k: float(v) if isinstance(v, float) else v for k, v in experts.glu_attributes().items()
        }
        alone = {name: options[name] for name in ("activation", "alpha")}

        def activated(*inputs: Array) -> Array:
            gated = len(inputs) == 2
            (out,) = self._call("glu" if gated else "activate", inputs, options if gated else alone)
            return out

        return activated


def _call(f: Any, *arrays: Any) -> Any:
    return f(*arrays)
