# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What one writes in torch and in JAX without duomoe: the contestants of the benchmarks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from duomoe import RouterConfig


def torch_counts(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Slots by expert. On a GPU bincount synchronises with the host, so it is a scatter there."""
    flat = ids.flatten()
    if not ids.is_cuda:
        return torch.bincount(flat, minlength=experts)
    zeros = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    return zeros.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))


def torch_router(z: torch.Tensor, bias: torch.Tensor | None, c: RouterConfig) -> tuple[Any, ...]:
    """As a Hugging Face DeepSeek-V3 router, and the statistics of both losses."""
    z = z.float()
    experts, groups = c.num_experts, c.num_groups
    if c.score == "softmax":
        scores = z.softmax(-1)
    else:
        scores = z.sigmoid() if c.score == "sigmoid" else torch.nn.functional.softplus(z).sqrt()
    choice = scores.detach()
    if bias is not None:
        choice = choice + bias
    if groups > 1:
        members = choice.view(-1, groups, experts // groups)
        values = members.topk(c.group_score_k, dim=-1)[0].sum(-1)
        kept = values.topk(c.group_top_k, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(values).scatter_(1, kept, 1)
        mask = mask.unsqueeze(-1).expand(members.shape).reshape(choice.shape)
        choice = choice.masked_fill(~mask.bool(), float("-inf"))
    ids = choice.topk(c.top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    if c.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + c.eps)
    shares = scores if c.score == "softmax" else scores / scores.sum(-1, keepdim=True)
    counts = torch_counts(ids, experts)
    return weights * c.scale, shares.sum(0), (z.logsumexp(-1) ** 2).sum(), ids, counts


def jax_router(z: jax.Array, bias: jax.Array | None, c: RouterConfig) -> tuple[Any, ...]:
    """The same with lax.top_k."""
    z = z.astype(jnp.float32)
    experts, groups = c.num_experts, c.num_groups
    if c.score == "softmax":
        scores = jax.nn.softmax(z)
    else:
        scores = jax.nn.sigmoid(z) if c.score == "sigmoid" else jnp.sqrt(jax.nn.softplus(z))
    choice = jax.lax.stop_gradient(scores)
    if bias is not None:
        choice = choice + bias
    if groups > 1:
        members = choice.reshape(-1, groups, experts // groups)
        values = jax.lax.top_k(members, c.group_score_k)[0].sum(-1)
        kept = jax.lax.top_k(values, c.group_top_k)[1]
        mask = jax.nn.one_hot(kept, groups, dtype=bool).any(1)
        choice = jnp.where(jnp.repeat(mask, experts // groups, axis=1), choice, -jnp.inf)
    ids = jax.lax.top_k(choice, c.top_k)[1]
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if c.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + c.eps)
    shares = scores if c.score == "softmax" else scores / scores.sum(-1, keepdims=True)
    counts = jnp.bincount(ids.reshape(-1), length=experts)
    return weights * c.scale, shares.sum(0), (jax.nn.logsumexp(z, -1) ** 2).sum(), ids, counts


# -- dispatch: `order` is the stable order of the slots by expert ----------------------------------


def torch_plan(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, ...]:
    """Order, its inverse, and where the experts' rows end."""
    order = ids.flatten().argsort(stable=True)
    places = torch.arange(order.numel(), device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, places)
    return order, inverse, torch_counts(ids, experts).cumsum(0)


def torch_permute(x: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
    """Gathered."""
    return x.index_select(0, order // top_k)


def torch_permute_bwd(rows: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
    """Added back, by atomics."""
    y = rows.new_zeros(order.numel() // top_k, rows.shape[1])
    return y.index_add_(0, order // top_k, rows)


def torch_combine(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted and added back."""
    weighted = rows * weights.flatten()[order].unsqueeze(1).to(rows.dtype)
    return torch_permute_bwd(weighted, order, weights.shape[1])


def torch_combine_bwd(
    grad: torch.Tensor, rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """To the rows and the weights."""
    gathered = torch_permute(grad, order, weights.shape[1])
    grad_rows = gathered * weights.flatten()[order].unsqueeze(1).to(rows.dtype)
    dots = (gathered * rows).sum(-1, dtype=torch.float32)
    grad_weights = torch.empty_like(dots).scatter_(0, order, dots)
    return grad_rows, grad_weights.view(weights.shape)


def jax_plan(ids: jax.Array, experts: int) -> tuple[jax.Array, ...]:
    """The same in JAX."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    return order, inverse, jnp.bincount(flat, length=experts).cumsum()


def jax_permute(x: jax.Array, order: jax.Array, top_k: int) -> jax.Array:
    """The same in JAX."""
    return jnp.take(x, order // top_k, axis=0)


def jax_permute_bwd(rows: jax.Array, order: jax.Array, top_k: int) -> jax.Array:
    """The same in JAX."""
    y = jnp.zeros((order.size // top_k, rows.shape[1]), rows.dtype)
    return y.at[order // top_k].add(rows)


def jax_combine(rows: jax.Array, order: jax.Array, weights: jax.Array) -> jax.Array:
    """The same in JAX."""
    weighted = rows * weights.reshape(-1)[order][:, None].astype(rows.dtype)
    return jax_permute_bwd(weighted, order, weights.shape[1])


def jax_combine_bwd(
    grad: jax.Array, rows: jax.Array, order: jax.Array, weights: jax.Array
) -> tuple[jax.Array, ...]:
    """The same in JAX."""
    gathered = jax_permute(grad, order, weights.shape[1])
    grad_rows = gathered * weights.reshape(-1)[order][:, None].astype(rows.dtype)
    dots = (gathered * rows).sum(-1, dtype=jnp.float32)
    return grad_rows, jnp.zeros_like(dots).at[order].set(dots).reshape(weights.shape)
