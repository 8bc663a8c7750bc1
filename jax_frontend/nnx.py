# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The block as Flax NNX modules; jax_frontend.linen and torch_frontend have the same ones.

Parameters are nnx.Param with the logical axis names "embed", "mlp" and "expert" as their
out_sharding. They are laid out when they are made if a mesh is set and nnx.logical_axis_rules says
what the names mean on it; otherwise nnx.get_partition_spec reads the names.

The selection bias is an ExpertBias, no nnx.Param: gradients and optimizers over nnx.Param leave it
alone. `nnx.capture(model, RoutingIds)` records routing, `replay_routing` replays it, and
`nnx.capture(model, RoutingMismatches)` counts what would have been routed differently.

Axis letters: T tokens, E experts, K experts per token, D model width, F expert hidden width,
F' joint hidden width of the shared experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from duomoe import module_options
from duomoe.config import ExpertConfig, RouterConfig
from duomoe.results import Array, MoEOutput, MoEParams, Routing

from jax_frontend import functional, modules
from jax_frontend.modules import default_kernel_init, routing_layers

try:
    from flax import nnx

    from jax_frontend.nnx_parameters import declare, values
    from jax_frontend.nnx_replay import (
        Replay,
        Routes,
        RoutingIds,
        RoutingMismatches,
        replay_routing,
    )
except ImportError as error:
    modules.explain(__name__, error)
    raise

__all__ = [
    "Experts",
    "ExpertBias",
    "MoE",
    "Replay",
    "Router",
    "RoutingIds",
    "RoutingMismatches",
    "SharedExperts",
    "replay_routing",
    "routing_layers",
]


class ExpertBias(nnx.Variable):
    """The selection bias: [E] float32, stepped by update_expert_bias and by nothing else."""


class Router(Routes):
    """Gate and router: logits = x . weight + bias, then the choice and weights of K experts.

    Args:
        width: D.
        config: RouterConfig.
        bias: add a trained bias to the logits.
        expert_bias: keep a selection bias, stepped by `update_expert_bias`.
        gate_dtype: "float32", "bfloat16" or "float16", of the product; see gate.
        param_dtype: of the parameters.
        kernel_init: makes the weight.
        rngs: for the stream "params".

    Attributes:
        weight: [D, E].
        bias: [E] or None.
        expert_bias: [E] float32 ExpertBias, or None.
        deterministic: True in evaluation mode, as train(), eval() and nnx.view set it.
    """

    def __init__(
        self,
        width: int,
        config: RouterConfig,
        *,
        bias: bool = False,
        expert_bias: bool = False,
        gate_dtype: str = "float32",
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Array] = default_kernel_init,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__()
        module_options.check_router(width, config, gate_dtype)
        self.config, self.gate_dtype = config, gate_dtype
        self.deterministic = False
        specs = modules.router_specs(width, config.num_experts, bias=bias)
        declare(self, specs, kernel_init, param_dtype, rngs, ("bias",))
        self.expert_bias: ExpertBias | None = nnx.data(None)
        if expert_bias:
            self.expert_bias = ExpertBias(jnp.zeros((config.num_experts,), jnp.float32))

    def parameters(self) -> tuple[dict[str, Array], Array | None]:
        """The parameters by name, and the selection bias."""
        bias = self.expert_bias
        return values(self, ("weight", "bias")), None if bias is None else bias.get_value()

    def __call__(
        self,
        x: Array,
        *,
        token_mask: Array | None = None,
        indices: Array | None = None,
        replay_mask: Array | None = None,
        compare: bool = False,
        num_sequences: int = 1,
    ) -> tuple[Routing, Array]:
        """Route tokens.

        Args:
            x: [T, D].
            token_mask: [T] bool; see route.
            indices: [T, K] integers; see route.
            replay_mask: [T] bool; see route.
            compare: see route.
            num_sequences: see route.

        Returns:
            Routing, and the logits [T, E] in gate_dtype.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        arrays, expert_bias = self.parameters()
        indices, replay_mask = self.replayed(x, indices, replay_mask)
        mismatches = self.compares(indices)
        logits = functional.gate(
            x,
            arrays["weight"],
            arrays.get("bias"),
            token_mask=token_mask,
            gate_dtype=self.gate_dtype,
        )
        routing = functional.route(
            logits,
            self.config,
            bias=expert_bias,
            indices=indices,
            token_mask=token_mask,
            num_sequences=num_sequences,
            replay_mask=replay_mask,
            compare=compare or mismatches,
        )
        self.record(routing, mismatches)
        return routing, logits

    def update_expert_bias(
        self, expert_counts: Array, *, rate: float, center: bool = False, axis_name: Any = None
    ) -> None:
        """Step the selection bias towards even loads; see functional's update_expert_bias.

        Args:
            expert_counts: [E] integers, of one step or summed over micro-batches.
            rate: the step.
            center: subtract the mean step.
            axis_name: inside shard_map, the mesh axes over which the counts are summed.

        Raises:
            RuntimeError: without an expert_bias, and in evaluation mode: loads of evaluation must
                not steer training.
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        module_options.check_bias_update(self.expert_bias, not self.deterministic)
        assert self.expert_bias is not None
        self.expert_bias.set_value(
            functional.update_expert_bias(
                self.expert_bias.get_value(),
                expert_counts,
                rate=rate,
                center=center,
                axis_name=axis_name,
            )
        )

    def set_view(self, deterministic: bool | None = None) -> None:
        """What nnx.view calls.

        Args:
            deterministic: if True, update_expert_bias is refused.
        """
        if deterministic is not None:
            self.deterministic = deterministic


_EXPERT_NAMES = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
_SHARED_NAMES = ("w_gate", "w_up", "w_down", "router")


class Experts(nnx.Module):
    """Dispatch, experts and combine, for a routing that is given.

    Args:
        width: D.
        hidden: F.
        num_experts: E.
        config: ExpertConfig; None for its defaults, SwiGLU.
        gated: gated linear units, f(x . w_gate) * (x . w_up); else f(x . w_up).
        bias: add a bias to each product.
        dtype: x and the parameters are rounded to it; None leaves both as they are, and results
            have the dtype of x.
        param_dtype: of the parameters.
        kernel_init: makes one expert's matrix [in, out].
        rngs: for the stream "params".

    Attributes:
        w_gate: [E, D, F] or None.
        w_up: [E, D, F].
        w_down: [E, F, D].
        b_gate: [E, F] or None.
        b_up: [E, F] or None.
        b_down: [E, D] or None.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        config: ExpertConfig | None = None,
        *,
        gated: bool = True,
        bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Array] = default_kernel_init,
        rngs: nnx.Rngs,
    ) -> None:
        module_options.check_experts("config", config, gated)
        self.config, self.dtype = config, dtype
        specs = modules.expert_specs(width, hidden, num_experts, gated=gated, bias=bias)
        declare(self, specs, kernel_init, param_dtype, rngs, _EXPERT_NAMES)

    def parameters(self) -> dict[str, Array]:
        """The parameters by name."""
        return values(self, _EXPERT_NAMES)

    def __call__(self, x: Array, indices: Array, weights: Array, **options: Any) -> MoEOutput:
        """See moe_from_routing.

        Args:
            x: [..., D].
            indices: [..., K] integers.
            weights: [..., K].
            options: token_mask, capacity, drop_order, alignment, max_rows and recompute, as there.

        Returns:
            MoEOutput.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        params = MoEParams(router=None, **{"w_gate": None, **self.parameters()})
        x, params = modules.in_dtype(x, params, self.dtype)
        return functional.moe_from_routing(
            x, indices, weights, params, experts=self.config, **options
        )


class SharedExperts(nnx.Module):
    """Parameters of the experts that every token goes to.

    Args:
        width: D.
        hidden: F'.
        gated: gated linear units.
        router: weight their output with the sigmoid of a logit of their own.
        param_dtype: of the parameters.
        kernel_init: makes each matrix.
        rngs: for the stream "params".

    Attributes:
        w_gate: [D, F'] or None.
        w_up: [D, F'].
        w_down: [F', D].
        router: [D, 1] or None.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        gated: bool = True,
        router: bool = False,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Array] = default_kernel_init,
        rngs: nnx.Rngs,
    ) -> None:
        specs = modules.shared_specs(width, hidden, gated=gated, router=router)
        declare(self, specs, kernel_init, param_dtype, rngs, _SHARED_NAMES)

    def parameters(self) -> dict[str, Array]:
        """The parameters by name."""
        return values(self, _SHARED_NAMES)


class MoE(Routes):
    """A Mixture-of-Experts block: gate, router, dispatch, experts and combine.

    Args:
        width: D.
        hidden: F.
        config: RouterConfig.
        experts: ExpertConfig; None for its defaults, SwiGLU.
        gated: gated linear units; see Experts.
        router_bias: add a trained bias to the logits.
        expert_bias: keep a selection bias, stepped by `update_expert_bias`.
        bias: add a bias to each product of the experts.
        shared_hidden: F'; 0 for no shared experts.
        shared_router: weight the shared experts' output with a sigmoid of their own.
        capacity_factor: rows kept per expert as a multiple of the mean load; see
            RouterConfig.capacity. None keeps all.
        drop_order: see plan_dispatch.
        alignment: see plan_dispatch.
        max_rows: see plan_dispatch.
        gate_dtype: see gate.
        load_balancing_coeff: factor of the load-balancing loss in aux_loss.
        z_loss_coeff: factor of the z loss in aux_loss.
        recompute: see moe.
        dtype: x and the experts' parameters are rounded to it; None leaves both as they are, and
            results have the dtype of x. The gate's product has its own gate_dtype.
        param_dtype: of the parameters.
        kernel_init: makes one matrix [in, out], (key, shape, dtype); each expert's has a key of
            its own.
        rngs: for the stream "params".

    Attributes:
        router: Router.
        experts: Experts.
        shared: SharedExperts or None. The names, shapes and layouts of the parameters of all three
            are those of the torch module.

    Raises:
        ValueError, TypeError: on an option of another kind or range, or one that lacks another.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        config: RouterConfig,
        *,
        experts: ExpertConfig | None = None,
        gated: bool = True,
        router_bias: bool = False,
        expert_bias: bool = False,
        bias: bool = False,
        shared_hidden: int = 0,
        shared_router: bool = False,
        capacity_factor: float | None = None,
        drop_order: Literal["position", "weight"] = "position",
        alignment: int = 1,
        max_rows: int | None = None,
        gate_dtype: str = "float32",
        load_balancing_coeff: float = 0.0,
        z_loss_coeff: float = 0.0,
        recompute: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Array] = default_kernel_init,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__()
        given = {
            "drop_order": drop_order,
            "alignment": alignment,
            "max_rows": max_rows,
            "gate_dtype": gate_dtype,
            "load_balancing_coeff": load_balancing_coeff,
            "z_loss_coeff": z_loss_coeff,
            "recompute": recompute,
        }
        self.settings = modules.BlockSettings(experts, capacity_factor, dtype, tuple(given.items()))
        self.settings.check(width, hidden, config, gated, shared_hidden, shared_router)
        factory: dict[str, Any] = {
            "param_dtype": param_dtype,
            "kernel_init": kernel_init,
            "rngs": rngs,
        }
        self.router = Router(
            width,
            config,
            bias=router_bias,
            expert_bias=expert_bias,
            gate_dtype=gate_dtype,
            **factory,
        )
        self.experts = Experts(
            width,
            hidden,
            config.num_experts,
            experts,
            gated=gated,
            bias=bias,
            dtype=dtype,
            **factory,
        )
        self.shared: SharedExperts | None = nnx.data(None)
        if shared_hidden:
            self.shared = SharedExperts(
                width, shared_hidden, gated=gated, router=shared_router, **factory
            )

    @property
    def config(self) -> RouterConfig:
        """The router's."""
        return self.router.config

    def params(self) -> MoEParams:
        """The parameters as the functions take them."""
        router, expert_bias = self.router.parameters()
        shared = {} if self.shared is None else self.shared.parameters()
        return modules.join_params(router, expert_bias, self.experts.parameters(), shared)

    def __call__(
        self,
        x: Array,
        *,
        token_mask: Array | None = None,
        indices: Array | None = None,
        replay_mask: Array | None = None,
        compare: bool = False,
        num_sequences: int = 1,
        axis_name: Any = None,
    ) -> MoEOutput:
        """See moe, whose other options the module holds.

        Args:
            x: [..., D].
            token_mask: [...] bool.
            indices: [..., K] integers; None takes those of `replay_routing`, inside it.
            replay_mask: [...] bool.
            compare: count the tokens that would have been routed differently.
            num_sequences: S.
            axis_name: inside shard_map, the mesh axes over which the losses' statistics are summed.

        Returns:
            MoEOutput.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        indices, replay_mask = self.replayed(x, indices, replay_mask)
        mismatches = self.compares(indices)
        out = self.settings.run(
            x,
            self.params(),
            self.config,
            token_mask=token_mask,
            indices=indices,
            replay_mask=replay_mask,
            compare=compare or mismatches,
            num_sequences=num_sequences,
            axis_name=axis_name,
        )
        self.record(out.routing, mismatches)
        return out

    def update_expert_bias(
        self, expert_counts: Array, *, rate: float, center: bool = False, axis_name: Any = None
    ) -> None:
        """See Router.update_expert_bias.

        Args:
            expert_counts: [E] integers: `expert_counts` of the outputs, summed over micro-batches.
            rate: the step.
            center: subtract the mean step.
            axis_name: inside shard_map, the mesh axes over which the counts are summed.
        """
        self.router.update_expert_bias(expert_counts, rate=rate, center=center, axis_name=axis_name)
