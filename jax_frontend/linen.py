# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The block as Flax linen modules; jax_frontend.nnx and torch_frontend have the same ones.

Parameters carry logical axis names, "embed", "mlp" and "expert", as nn.with_logical_partitioning
gives them; `nn.unbox` takes them off. Besides "params" there are three collections:

- "router_state" holds the selection bias, float32, which update_expert_bias steps;
- "routing", where it is mutable, receives the ids of every call;
- "replay", where it is given, holds ids for calls without `indices`: what "routing" received, or
  what `replay_collection` makes of a record;
- "routing_mismatches", where it is mutable, receives the numbers of tokens and of slots that a
  replay would have been routed differently.

Axis letters: T tokens, E experts, K experts per token, D model width, F expert hidden width,
F' joint hidden width of the shared experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax.numpy as jnp
from duomoe import module_options
from duomoe.config import ExpertConfig, RouterConfig
from duomoe.results import Array, MoEOutput, MoEParams, Routing

from jax_frontend import functional, modules
from jax_frontend.modules import default_kernel_init, routing_layers

try:
    import flax.linen as nn

    from jax_frontend.linen_replay import record, replay_collection, replayed, wants_mismatches
except ImportError as error:
    modules.explain(__name__, error)
    raise

__all__ = [
    "Experts",
    "MoE",
    "Router",
    "SharedExperts",
    "replay_collection",
    "routing_layers",
]


def _declare(
    module: nn.Module,
    specs: Mapping[str, modules.ParameterSpec],
    kernel_init: Callable[..., Array],
    dtype: Any,
) -> dict[str, Array]:
    """The parameters of a module by name."""
    return {
        name: module.param(
            name,
            nn.with_logical_partitioning(modules.initializer(name, kernel_init), spec.axes),
            spec.shape,
            dtype,
        )
        for name, spec in specs.items()
    }


class Router(nn.Module):
    """Gate and router: logits = x . weight + bias, then the choice and weights of K experts.

    Parameters: weight [D, E], and bias [E] if there is one. Collection "router_state": expert_bias
    [E] float32, if there is one.

    Attributes:
        width: D.
        config: RouterConfig.
        bias: add a trained bias to the logits.
        expert_bias: keep a selection bias, stepped by `update_expert_bias`.
        gate_dtype: "float32", "bfloat16" or "float16", of the product; see gate.
        param_dtype: of the parameters.
        kernel_init: makes the weight.
    """

    width: int
    config: RouterConfig
    _: dataclasses.KW_ONLY
    bias: bool = False
    expert_bias: bool = False
    gate_dtype: str = "float32"
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = default_kernel_init

    def __post_init__(self) -> None:
        module_options.check_router(self.width, self.config, self.gate_dtype)
        super().__post_init__()

    def setup(self) -> None:
        """Declare the parameters."""
        experts = self.config.num_experts
        specs = modules.router_specs(self.width, experts, bias=self.bias)
        self.arrays = _declare(self, specs, self.kernel_init, self.param_dtype)
        self.selection_bias = (
            self.variable("router_state", "expert_bias", jnp.zeros, (experts,), jnp.float32)
            if self.expert_bias
            else None
        )

    def parameters(self) -> tuple[Mapping[str, Array], Array | None]:
        """The parameters by name, and the selection bias."""
        return self.arrays, None if self.selection_bias is None else self.selection_bias.value

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
        indices, replay_mask = replayed(self, x, indices, replay_mask)
        mismatches = wants_mismatches(self, indices)
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
        record(self, routing, mismatches)
        return routing, logits

    def update_expert_bias(
        self, expert_counts: Array, *, rate: float, center: bool = False, axis_name: Any = None
    ) -> None:
        """Step the selection bias towards even loads; see functional's update_expert_bias.

        In training only, with "router_state" mutable:
        `module.apply(variables, counts, rate=1e-3, method="update_expert_bias",
        mutable=["router_state"])`.

        Args:
            expert_counts: [E] integers, of one step or summed over micro-batches.
            rate: the step.
            center: subtract the mean step.
            axis_name: inside shard_map, the mesh axes over which the counts are summed.

        Raises:
            flax.errors.ModifyScopeVariableError: if "router_state" is not mutable.
            RuntimeError: without an expert_bias.
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        module_options.check_bias_update(self.selection_bias, training=True)
        assert self.selection_bias is not None
        self.selection_bias.value = functional.update_expert_bias(
            self.selection_bias.value,
            expert_counts,
            rate=rate,
            center=center,
            axis_name=axis_name,
        )


class Experts(nn.Module):
    """Dispatch, experts and combine, for a routing that is given.

    Parameters: w_gate [E, D, F], w_up [E, D, F], w_down [E, F, D], b_gate [E, F], b_up [E, F],
    b_down [E, D], of those that there are.

    Attributes:
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
    """

    width: int
    hidden: int
    num_experts: int
    config: ExpertConfig | None = None
    _: dataclasses.KW_ONLY
    gated: bool = True
    bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = default_kernel_init

    def setup(self) -> None:
        """Declare the parameters."""
        module_options.check_experts("config", self.config, self.gated)
        specs = modules.expert_specs(
            self.width, self.hidden, self.num_experts, gated=self.gated, bias=self.bias
        )
        self.arrays = _declare(self, specs, self.kernel_init, self.param_dtype)

    def parameters(self) -> Mapping[str, Array]:
        """The parameters by name."""
        return self.arrays

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
        params = MoEParams(router=None, **{"w_gate": None, **self.arrays})
        x, params = modules.in_dtype(x, params, self.dtype)
        return functional.moe_from_routing(
            x, indices, weights, params, experts=self.config, **options
        )


class SharedExperts(nn.Module):
    """Parameters of the experts that every token goes to.

    Parameters: w_gate [D, F'], w_up [D, F'], w_down [F', D], router [D, 1], of those that there
    are.

    Attributes:
        width: D.
        hidden: F'.
        gated: gated linear units.
        router: weight their output with the sigmoid of a logit of their own.
        param_dtype: of the parameters.
        kernel_init: makes each matrix.
    """

    width: int
    hidden: int
    _: dataclasses.KW_ONLY
    gated: bool = True
    router: bool = False
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = default_kernel_init

    def setup(self) -> None:
        """Declare the parameters."""
        specs = modules.shared_specs(self.width, self.hidden, gated=self.gated, router=self.router)
        self.arrays = _declare(self, specs, self.kernel_init, self.param_dtype)

    def parameters(self) -> Mapping[str, Array]:
        """The parameters by name."""
        return self.arrays


class MoE(nn.Module):
    """A Mixture-of-Experts block: gate, router, dispatch, experts and combine.

    Submodules: router, experts and, with shared_hidden, shared; see Router, Experts and
    SharedExperts for the parameters, which have the names, shapes and layouts of the torch module.

    Attributes:
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

    Raises:
        ValueError, TypeError: on an option of another kind or range, or one that lacks another.
    """

    width: int
    hidden: int
    config: RouterConfig
    _: dataclasses.KW_ONLY
    experts: ExpertConfig | None = None
    gated: bool = True
    router_bias: bool = False
    expert_bias: bool = False
    bias: bool = False
    shared_hidden: int = 0
    shared_router: bool = False
    capacity_factor: float | None = None
    drop_order: Literal["position", "weight"] = "position"
    alignment: int = 1
    max_rows: int | None = None
    gate_dtype: str = "float32"
    load_balancing_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    recompute: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = default_kernel_init

    def __post_init__(self) -> None:
        layout = (self.gated, self.shared_hidden, self.shared_router)
        self._settings().check(self.width, self.hidden, self.config, *layout)
        super().__post_init__()

    @nn.nowrap
    def _settings(self) -> modules.BlockSettings:
        options = tuple((name, getattr(self, name)) for name in modules.OPTIONS)
        return modules.BlockSettings(self.experts, self.capacity_factor, self.dtype, options)

    def setup(self) -> None:
        """Make the submodules."""
        factory = {"param_dtype": self.param_dtype, "kernel_init": self.kernel_init}
        self.router = Router(
            self.width,
            self.config,
            bias=self.router_bias,
            expert_bias=self.expert_bias,
            gate_dtype=self.gate_dtype,
            **factory,
        )
        self.routed = Experts(
            self.width,
            self.hidden,
            self.config.num_experts,
            self.experts,
            gated=self.gated,
            bias=self.bias,
            dtype=self.dtype,
            name="experts",
            **factory,
        )
        self.shared = (
            SharedExperts(
                self.width,
                self.shared_hidden,
                gated=self.gated,
                router=self.shared_router,
                **factory,
            )
            if self.shared_hidden
            else None
        )

    def params(self) -> MoEParams:
        """The parameters as the functions take them."""
        router, expert_bias = self.router.parameters()
        shared = {} if self.shared is None else self.shared.parameters()
        return modules.join_params(router, expert_bias, self.routed.parameters(), shared)

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
            indices: [..., K] integers; None takes those of the collection "replay", if it has any.
            replay_mask: [...] bool.
            compare: count the tokens that would have been routed differently.
            num_sequences: S.
            axis_name: inside shard_map, the mesh axes over which the losses' statistics are summed.

        Returns:
            MoEOutput.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        indices, replay_mask = replayed(self, x, indices, replay_mask)
        mismatches = wants_mismatches(self, indices)
        out = self._settings().run(
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
        record(self, out.routing, mismatches)
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
