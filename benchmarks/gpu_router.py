# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The router's cases for the GPU benchmark: shapes, logits, ours and the peers', bytes to move."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import torch
from duomoe import RouterConfig, ops
from gpu_common import Run
from peers import jax_router, torch_router

import jax_frontend
import torch_frontend
from jax_frontend import transforms

VALUES = ("normal", "zipf", "tied", "equal")


def draw_logits(
    tokens: int, experts: int, values: str, device: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[T, E] logits.

    normal: standard normal. zipf: log(1 / rank) + Gumbel noise, the ranks in an order of their own,
    so that a token's experts are drawn without replacement with chances as 1 / rank. tied: normal,
    rounded to halves. equal: all the same.
    """
    shape = tokens, experts
    if values == "equal":
        return torch.full(shape, 0.25, dtype=dtype, device=device)
    if values == "zipf":
        z = torch.empty(shape, device=device).exponential_().clamp_(min=1e-30).log_().neg_()
        ranks = torch.randperm(experts, generator=torch.Generator().manual_seed(3)) + 1
        return z.sub_(ranks.to(device).log()).to(dtype)
    z = torch.randn(shape, device=device)
    return (z.mul_(2).round_().div_(2) if values == "tied" else z).to(dtype)


@functools.cache
def _jax_vjp(config: RouterConfig) -> Any:
    """(outputs, pullback) of JAX's router without a bias."""

    def with_pullback(z: jax.Array) -> Any:
        return jax.vjp(lambda x: jax_router(x, None, config)[:3], z)

    return jax.jit(with_pullback)


@dataclasses.dataclass(frozen=True)
class RouteCase:
    """One op of the router on one shape: T tokens, options, dtype and values of the logits."""

    op: str  # route or route_bwd
    tokens: int
    config: RouterConfig
    bias: bool = False
    dtype: str = "float32"
    values: str = "normal"

    @property
    def shape(self) -> str:
        """T,E,K and what the options say."""
        c = self.config
        parts = [
            f"{self.tokens},{c.num_experts},{c.top_k}",
            c.score + "+bias" * self.bias,
            *([f"groups {c.num_groups}/{c.group_top_k}"] if c.num_groups > 1 else []),
        ]
        return " ".join(parts)

    @property
    def name(self) -> str:
        """For --one: op and shape; options other than the first of a shape follow."""
        c = self.config
        parts = [self.op, str(self.tokens), str(c.num_experts), str(c.top_k), c.score]
        parts += ["bias"] * self.bias + ["groups"] * (c.num_groups > 1)
        parts += ["bf16"] * (self.dtype == "bfloat16")
        parts += [self.values] * (self.values != "normal")
        return "_".join(parts)

    @property
    def floor_bytes(self) -> int:
        """Logits once (and their gradient); of each slot a weight (or its cotangent) and an id."""
        c = self.config
        logits = self.tokens * c.num_experts * (2 if self.dtype == "bfloat16" else 4)
        return logits * (2 if self.op == "route_bwd" else 1) + self.tokens * c.top_k * 8

    @property
    def set_bytes(self) -> int:
        """What one input set and its outputs take."""
        return self.floor_bytes

    def inputs(self, device: str) -> tuple[Any, ...]:
        """(logits, bias), or (logits, ids, cotangents of weights, score_sums, logsumexp_sq)."""
        c, dtype = self.config, getattr(torch, self.dtype)
        z = draw_logits(self.tokens, c.num_experts, self.values, device, dtype)
        bias = None
        if self.bias:
            # Small, so that the logits make the loads; 0 where they are to be skewed or tied.
            size = 0.01 if self.values == "normal" else 0.0
            bias = size * torch.randn(c.num_experts, device=device)
        if self.op == "route":
            return z, bias
        ids = torch_frontend.route(z, c, bias=bias).indices
        cotangents = (
            torch.randn(shape, device=device) for shape in (ids.shape, (1, c.num_experts), (1,))
        )
        return z, ids, *cotangents

    @functools.cached_property
    def attributes(self) -> dict[str, Any]:
        """Of the op."""
        attributes = self.config.attributes(num_sequences=1)
        return {a.name: attributes[a.name] for a in ops.table()[self.op].attributes}

    # -- ours --------------------------------------------------------------------------------------

    def torch_ours(self, *inputs: Any) -> Run:
        """The public function, or the op of its gradient."""
        if self.op == "route":
            z, bias = inputs
            return lambda: torch_frontend.route(z, self.config, bias=bias)
        z, ids, *grads = inputs
        values = ops.table()[self.op].attribute_values(self.attributes)
        backward = torch.ops.duomoe.route_bwd.default
        return lambda: backward(z, ids, None, None, *grads, *values)

    def jax_ours(self, *arrays: Any) -> Any:
        """The same, to be traced."""
        if self.op == "route":
            r = jax_frontend.route(arrays[0], self.config, bias=arrays[1])
            return r.weights, r.indices
        z, ids, *grads = arrays
        inputs = [z, ids, None, None, *grads]
        return transforms.call(ops.table()[self.op], inputs, self.attributes)

    # -- peers -------------------------------------------------------------------------------------

    def torch_peer(self, *inputs: Any, router: Any = torch_router) -> Run:
        """Torch's own ops, eager or compiled; backward is autograd's with residuals kept."""
        if self.op == "route":

            def forward() -> Any:
                with torch.no_grad():
                    return router(*inputs, self.config)

            return forward
        z, _, *cotangents = inputs
        leaf = z.detach().requires_grad_()
        outputs = router(leaf, None, self.config)[:3]
        grads = [g.reshape(o.shape) for g, o in zip(cotangents, outputs, strict=True)]
        return lambda: torch.autograd.grad(outputs, leaf, grads, retain_graph=True)

    def jax_peer(self, *arrays: Any) -> tuple[Any, tuple[Any, ...]]:
        """(function, its arguments): lax.top_k's router, or its pullback with residuals kept."""
        c = self.config
        if self.op == "route":
            return lambda z, bias: jax_router(z, bias, c), arrays
        z, _, *cotangents = arrays
        outputs, pull = _jax_vjp(c)(z)
        grads = tuple(g.reshape(o.shape) for g, o in zip(cotangents, outputs, strict=True))
        return lambda pull, grads: pull(grads), (pull, grads)


# -- which -----------------------------------------------------------------------------------------

SIGMOID_256 = RouterConfig(256, 8, score="sigmoid")
GROUPS = RouterConfig(256, 8, score="sigmoid", num_groups=8, group_top_k=4)
MAIN = [  # (T, config, bias), the shapes of the targets
    (16384, SIGMOID_256, True),
    (65536, RouterConfig(384, 8, score="sigmoid"), True),
    (32768, RouterConfig(128, 8), False),
    (8192, RouterConfig(8, 2), False),
    (16384, GROUPS, True),
    (16384, RouterConfig(896, 16, score="sigmoid"), True),
    (16384, RouterConfig(2304, 36, score="sigmoid"), True),
]
PEERS = [*MAIN[:4], MAIN[4]]  # shapes at which the peers run too
SIZES = [(8, 2), (64, 6), (128, 8), (256, 8), (384, 8), (512, 10), (896, 16)]


def main_cases(dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> list[RouteCase]:
    """Both ops on the shapes of the targets."""
    return [
        RouteCase(op, *shape, dtype=dtype)
        for shape in MAIN
        for op in ("route", "route_bwd")
        for dtype in dtypes
    ]


def other_values() -> list[RouteCase]:
    """Skewed, tied and equal logits."""
    forward = [RouteCase("route", *shape, values=v) for shape in MAIN for v in VALUES[1:]]
    half = [RouteCase("route", *MAIN[0], dtype="bfloat16", values=v) for v in VALUES[1:]]
    backward = [RouteCase("route_bwd", *MAIN[0], values=v) for v in VALUES[1:]]
    return forward + half + backward


def size_cases() -> list[RouteCase]:
    """E and K over their range at 16384 tokens, and the third score."""
    sizes = [
        RouteCase(op, 16384, RouterConfig(e, k), dtype=dtype)
        for e, k in SIZES
        for op in ("route", "route_bwd")
        for dtype in ("float32", "bfloat16")
    ]
    root = RouterConfig(256, 8, score="sqrtsoftplus")
    return sizes + [RouteCase(op, 16384, root, True) for op in ("route", "route_bwd")]
