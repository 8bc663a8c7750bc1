# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's language model in JAX; models.py has the axis letters, torch_model.py the twin."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_frontend
from duomoe.verification.models import EXPERTS, NORM_EPS, Evaluation, ModelConfig, Parameters

Arrays = dict[str, jax.Array]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * scale."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPS) * scale


def attention(x: jax.Array, qkv: jax.Array, out: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention: [S, C, D] to [S, C, D]."""
    sequences, context, width = x.shape
    q, k, v = jnp.moveaxis((x @ qkv).reshape(sequences, context, 3, heads, -1), 2, 0)
    scores = jnp.einsum("schd,skhd->shck", q, k) * (width // heads) ** -0.5
    causal = jnp.tril(jnp.ones((context, context), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("shck,skhd->schd", weights, v).reshape(x.shape) @ out


def forward(p: Arrays, tokens: jax.Array, config: ModelConfig) -> tuple[jax.Array, list[Any]]:
    """Logits [S, C, 256], and each block's (MoE input [S, C, D], MoEOutput)."""
    x = p["embedding"][tokens] + p["positions"]
    layers = []
    for i in range(config.blocks):
        normed = rms_norm(x, p[f"{i}.attention_norm"])
        x = x + attention(normed, p[f"{i}.qkv"], p[f"{i}.attention_out"], config.heads)
        normed = rms_norm(x, p[f"{i}.moe_norm"])
        params = jax_frontend.MoEParams(**{n: p[f"{i}.{n}"] for n in EXPERTS})
        moe = jax_frontend.moe(normed, params, config.router())
        layers.append((normed, moe))
        x = x + moe.output
    return rms_norm(x, p["norm"]) @ p["head"], layers


def loss(p: Arrays, batch: jax.Array, config: ModelConfig) -> tuple[jax.Array, Any]:
    """The training loss, and (cross entropy, layers)."""
    logits, layers = forward(p, batch[:, :-1], config)
    log_p = jax.nn.log_softmax(logits)
    cross_entropy = -jnp.mean(jnp.take_along_axis(log_p, batch[:, 1:, None], axis=-1))
    total = cross_entropy
    for _, moe in layers:
        total = total + config.load_balancing * moe.load_balancing_loss + config.z * moe.z_loss
    return total, (cross_entropy, layers)


class JaxModel:
    """The model and its optimizer, each call jitted; see models.LanguageModel."""

    name = "JAX"

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        self._parameters: Arrays = {n: jnp.asarray(x) for n, x in parameters.items()}
        adam = optax.adam(config.learning_rate, *config.betas, eps=config.eps)
        self._state = adam.init(self._parameters)
        objective = functools.partial(loss, config=config)

        @jax.jit
        def step(p: Arrays, state: Any, batch: jax.Array) -> Any:
            grads, (cross_entropy, layers) = jax.grad(objective, has_aux=True)(p, batch)
            updates, state = adam.update(grads, state)
            counts = jnp.stack([moe.expert_counts for _, moe in layers])
            return optax.apply_updates(p, updates), state, cross_entropy, counts

        self._step = step
        self._gradients = jax.jit(jax.grad(objective, has_aux=True))
        self._evaluate = jax.jit(objective)

    def step(self, batch: np.ndarray) -> tuple[float, np.ndarray]:
        """One step of Adam."""
        self._parameters, self._state, cross_entropy, counts = self._step(
            self._parameters, self._state, batch
        )
        return float(cross_entropy), np.asarray(counts)

    def gradients(self, batch: np.ndarray) -> Parameters:
        """Gradients of the training loss."""
        grads, _ = self._gradients(self._parameters, batch)
        return {n: np.asarray(g) for n, g in grads.items()}

    def evaluate(self, batch: np.ndarray) -> Evaluation:
        """A forward pass."""
        _, (cross_entropy, layers) = self._evaluate(self._parameters, batch)
        return Evaluation(
            float(cross_entropy),
            np.stack([moe.routing.indices for _, moe in layers]),
            np.stack([x.reshape(-1, x.shape[-1]) for x, _ in layers]),
        )

    def parameters(self) -> Parameters:
        """The current weights."""
        return {n: np.asarray(x) for n, x in self._parameters.items()}
