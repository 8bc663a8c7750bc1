# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The block as `nn.Module`s; jax_frontend.linen and jax_frontend.nnx have the same ones.

Axis letters: T tokens, E experts, K experts per token, D model width, F expert hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from duomoe import module_options
from duomoe.config import ExpertConfig, RouterConfig
from duomoe.results import MoEOutput, MoEParams, Routing
from torch import Tensor, nn

from torch_frontend import functional
from torch_frontend.routes import Routes

NAMES = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")


def _parameter(
    module: nn.Module, name: str, wanted: bool, shape: Sequence[int], **factory: Any
) -> None:
    """A parameter, or None in its place."""
    module.register_parameter(
        name, nn.Parameter(torch.empty(*shape, **factory)) if wanted else None
    )


@torch.no_grad()
def _initialize(module: nn.Module) -> None:
    """Matrices [..., D, N] with variance 1 / D, vectors and the selection bias with 0."""
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith("b"):
            parameter.zero_()
        else:
            parameter.normal_(std=parameter.shape[-2] ** -0.5)
    for buffer in module.buffers(recurse=False):
        buffer.zero_()


class Router(Routes):
    """Gate and router: logits = x . weight + bias, then the choice and weights of K experts.

    Args:
        width: D.
        config: RouterConfig.
        bias: add a trained bias to the logits.
        expert_bias: keep a selection bias, stepped by `update_expert_bias`.
        gate_dtype: "float32", "bfloat16" or "float16", of the product; see gate.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        weight: [D, E].
        bias: [E] or None.
        expert_bias: [E] float32 buffer or None; stays float32 when the module's dtype is changed.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        width: int,
        config: RouterConfig,
        *,
        bias: bool = False,
        expert_bias: bool = False,
        gate_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        module_options.check_router(width, config, gate_dtype)
        self.config, self.gate_dtype = config, gate_dtype
        experts = config.num_experts
        _parameter(self, "weight", True, (width, experts), device=device, dtype=dtype)
        _parameter(self, "bias", bias, (experts,), device=device, dtype=dtype)
        zeros = torch.zeros(experts, device=device, dtype=torch.float32) if expert_bias else None
        self.register_buffer("expert_bias", zeros)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight normal with variance 1 / D, the biases 0."""
        _initialize(self)

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        indices: Tensor | None = None,
        replay_mask: Tensor | None = None,
        compare: bool = False,
        num_sequences: int = 1,
    ) -> tuple[Routing, Tensor]:
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
        indices, replay_mask, compare = self._replayed(x, indices, replay_mask, compare)
        logits = functional.gate(
            x, self.weight, self.bias, token_mask=token_mask, gate_dtype=self.gate_dtype
        )
        routing = functional.route(
            logits,
            self.config,
            bias=self.expert_bias,
            indices=indices,
            token_mask=token_mask,
            num_sequences=num_sequences,
            replay_mask=replay_mask,
            compare=compare,
        )
        self._note(routing)
        return routing, logits

    @torch.no_grad()
    def update_expert_bias(
        self, expert_counts: Tensor, *, rate: float, center: bool = False, group: Any = None
    ) -> None:
        """Step the selection bias towards even loads; see functional.update_expert_bias.

        Args:
            expert_counts: [E] integers, of one step or summed over micro-batches.
            rate: the step.
            center: subtract the mean step.
            group: process group over which the counts are summed.

        Raises:
            RuntimeError: without an expert_bias, and in evaluation mode: loads of evaluation must
                not steer training.
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        module_options.check_bias_update(self.expert_bias, self.training)
        assert self.expert_bias is not None
        self.expert_bias.copy_(
            functional.update_expert_bias(
                self.expert_bias, expert_counts, rate=rate, center=center, group=group
            )
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # What moves the module moves the selection bias, but none of it changes its dtype: in
        # bfloat16 neighbouring biases would collapse.
        bias, self.expert_bias = self.expert_bias, None
        super()._apply(fn, recurse)
        if bias is not None:
            moved = fn(bias)
            self.expert_bias = moved if moved.dtype == torch.float32 else bias.to(moved.device)
        return self

    def extra_repr(self) -> str:
        """What the module's repr shows."""
        given = f"{cast(Tensor, self.weight).shape[0]}, {self.config}"
        return f"{given}, bias={self.bias is not None}, gate_dtype={self.gate_dtype!r}"


class Experts(nn.Module):
    """Dispatch, experts and combine, for a routing that is given.

    Args:
        width: D.
        hidden: F.
        num_experts: E.
        config: ExpertConfig; None for its defaults, SwiGLU.
        gated: gated linear units, f(x . w_gate) * (x . w_up); else f(x . w_up).
        bias: add a bias to each product.
        device: of the parameters.
        dtype: of the parameters.

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
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        module_options.check_lengths(width=width, hidden=hidden, num_experts=num_experts)
        module_options.check_experts("config", config, gated)
        self.config = ExpertConfig() if config is None else config
        factory = {"device": device, "dtype": dtype}
        for name in NAMES:
            rows, columns = (hidden, width) if name.endswith("down") else (width, hidden)
            matrix = name.startswith("w")
            wanted = (gated or not name.endswith("gate")) and (matrix or bias)
            shape = (num_experts, rows, columns) if matrix else (num_experts, columns)
            _parameter(self, name, wanted, shape, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices normal with variance 1 / fan-in, biases 0."""
        _initialize(self)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor, **options: Any) -> MoEOutput:
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
        params = MoEParams(router=None, **{name: getattr(self, name) for name in NAMES})
        return functional.moe_from_routing(
            x, indices, weights, params, experts=self.config, **options
        )

    def extra_repr(self) -> str:
        """What the module's repr shows."""
        experts, width, hidden = cast(Tensor, self.w_up).shape
        given = f"{width}, {hidden}, {experts}, {self.config}"
        return f"{given}, gated={self.w_gate is not None}, bias={self.b_up is not None}"


class SharedExperts(nn.Module):
    """Parameters of the experts that every token goes to.

    Args:
        width: D.
        hidden: F', the joint hidden width.
        gated: gated linear units.
        router: weight their output with the sigmoid of a logit of their own.
        device: of the parameters.
        dtype: of the parameters.

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
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        module_options.check_lengths(width=width, hidden=hidden)
        factory = {"device": device, "dtype": dtype}
        _parameter(self, "w_gate", gated, (width, hidden), **factory)
        _parameter(self, "w_up", True, (width, hidden), **factory)
        _parameter(self, "w_down", True, (hidden, width), **factory)
        _parameter(self, "router", router, (width, 1), **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices normal with variance 1 / fan-in."""
        _initialize(self)


class MoE(Routes):
    """A Mixture-of-Experts block: gate, router, dispatch, experts and combine.

    Its state_dict has router.weight, router.bias, router.expert_bias, experts.w_gate, .w_up,
    .w_down, .b_gate, .b_up, .b_down and shared.w_gate, .w_up, .w_down, .router, of those that
    there are: the names, shapes and layouts of the JAX modules.

    Args:
        width: D.
        hidden: F.
        config: RouterConfig.
        experts: ExpertConfig; None for its defaults, SwiGLU.
        gated: gated linear units; see Experts.
        router_bias: add a trained bias to the logits.
        expert_bias: keep a selection bias, stepped by `update_expert_bias`.
        bias: add a bias to each product of the experts.
        shared_hidden: F', joint hidden width of the shared experts; 0 for none.
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
        device: of the parameters; "meta" works, with to_empty and reset_parameters.
        dtype: of the parameters.

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
        gate_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        load_balancing_coeff: float = 0.0,
        z_loss_coeff: float = 0.0,
        recompute: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "drop_order": drop_order,
            "alignment": alignment,
            "max_rows": max_rows,
            "gate_dtype": gate_dtype,
            "load_balancing_coeff": load_balancing_coeff,
            "z_loss_coeff": z_loss_coeff,
            "recompute": recompute,
        }
        module_options.check_block(
            width,
            hidden,
            config,
            experts=experts,
            gated=gated,
            shared_hidden=shared_hidden,
            shared_router=shared_router,
            capacity_factor=capacity_factor,
            **options,
        )
        factory = {"device": device, "dtype": dtype}
        self.router = Router(
            width,
            config,
            bias=router_bias,
            expert_bias=expert_bias,
            gate_dtype=gate_dtype,
            **factory,
        )
        self.experts = Experts(
            width, hidden, config.num_experts, experts, gated=gated, bias=bias, **factory
        )
        self.shared = (
            SharedExperts(width, shared_hidden, gated=gated, router=shared_router, **factory)
            if shared_hidden
            else None
        )
        self.capacity_factor = capacity_factor
        self.options = options

    @property
    def config(self) -> RouterConfig:
        """The router's."""
        return self.router.config

    def reset_parameters(self) -> None:
        """Matrices normal with variance 1 / fan-in, biases 0."""
        self.router.reset_parameters()
        self.experts.reset_parameters()
        if self.shared is not None:
            self.shared.reset_parameters()

    def params(self) -> MoEParams:
        """The parameters as the functions take them."""
        shared = self.shared
        return MoEParams(
            router=self.router.weight,
            router_bias=self.router.bias,
            expert_bias=self.router.expert_bias,
            shared_w_gate=None if shared is None else shared.w_gate,
            shared_w_up=None if shared is None else shared.w_up,
            shared_w_down=None if shared is None else shared.w_down,
            shared_router=None if shared is None else shared.router,
            **{name: getattr(self.experts, name) for name in NAMES},
        )

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        indices: Tensor | None = None,
        replay_mask: Tensor | None = None,
        compare: bool = False,
        num_sequences: int = 1,
        group: Any = None,
    ) -> MoEOutput:
        """See moe, whose other options the module holds.

        Args:
            x: [..., D].
            token_mask: [...] bool.
            indices: [..., K] integers; None takes those of `replay_routing`, inside it.
            replay_mask: [...] bool.
            compare: count the tokens that would have been routed differently.
            num_sequences: S.
            group: process group over which the losses' statistics are summed.

        Returns:
            MoEOutput.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        x = functional._functions._tokens(x)
        indices, replay_mask, compare = self._replayed(x, indices, replay_mask, compare)
        out = functional.moe(
            x,
            self.params(),
            self.config,
            token_mask=token_mask,
            indices=indices,
            replay_mask=replay_mask,
            compare=compare,
            num_sequences=num_sequences,
            experts=self.experts.config,
            capacity=module_options.capacity(self.config, self.capacity_factor, x.shape[:-1]),
            group=group,
            **self.options,
        )
        self._note(out.routing)
        return out

    def update_expert_bias(
        self, expert_counts: Tensor, *, rate: float, center: bool = False, group: Any = None
    ) -> None:
        """See Router.update_expert_bias.

        Args:
            expert_counts: [E] integers: `expert_counts` of the outputs, summed over micro-batches.
            rate: the step.
            center: subtract the mean step.
            group: process group over which the counts are summed.
        """
        self.router.update_expert_bias(expert_counts, rate=rate, center=center, group=group)

    def extra_repr(self) -> str:
        """What the module's repr shows."""
        given = {"capacity_factor": self.capacity_factor, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())
