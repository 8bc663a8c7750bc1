# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's language model in PyTorch; models.py has the axis letters, jax_model.py the twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import torch_frontend
from duomoe.verification.models import EXPERTS, NORM_EPS, Evaluation, ModelConfig, Parameters


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * scale."""
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + NORM_EPS) * scale


def attention(x: Tensor, qkv: Tensor, out: Tensor, heads: int) -> Tensor:
    """Causal self-attention: [S, C, D] to [S, C, D]."""
    sequences, context, width = x.shape
    q, k, v = (x @ qkv).reshape(sequences, context, 3, heads, -1).unbind(2)
    scores = torch.einsum("schd,skhd->shck", q, k) * (width // heads) ** -0.5
    causal = torch.ones(context, context, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(dim=-1)
    return torch.einsum("shck,skhd->schd", weights, v).reshape(x.shape) @ out


def forward(
    p: dict[str, Tensor], tokens: Tensor, config: ModelConfig
) -> tuple[Tensor, list[tuple[Tensor, Any]]]:
    """Logits [S, C, 256], and each block's (MoE input [S, C, D], MoEOutput)."""
    # Not p["embedding"][tokens]: the backward of indexing adds up in no fixed order.
    x = torch.nn.functional.embedding(tokens, p["embedding"]) + p["positions"]
    layers = []
    for i in range(config.blocks):
        normed = rms_norm(x, p[f"{i}.attention_norm"])
        x = x + attention(normed, p[f"{i}.qkv"], p[f"{i}.attention_out"], config.heads)
        normed = rms_norm(x, p[f"{i}.moe_norm"])
        params = torch_frontend.MoEParams(**{n: p[f"{i}.{n}"] for n in EXPERTS})
        moe = torch_frontend.moe(normed, params, config.router())
        layers.append((normed, moe))
        x = x + moe.output
    return rms_norm(x, p["norm"]) @ p["head"], layers


def loss(
    p: dict[str, Tensor], batch: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Any]]]:
    """The training loss, the cross entropy, and the layers."""
    logits, layers = forward(p, batch[:, :-1], config)
    cross_entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    total = cross_entropy
    for _, moe in layers:
        total = total + config.load_balancing * moe.load_balancing_loss + config.z * moe.z_loss
    return total, cross_entropy, layers


class TorchModel:
    """The model and its optimizer, eager; see models.LanguageModel."""

    name = "PyTorch"

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        self._config = config
        self._parameters = {
            n: torch.from_numpy(x.copy()).requires_grad_() for n, x in parameters.items()
        }
        self._adam = torch.optim.Adam(
            self._parameters.values(), config.learning_rate, betas=config.betas, eps=config.eps
        )

    def _loss(self, batch: np.ndarray) -> tuple[Tensor, Tensor, list[tuple[Tensor, Any]]]:
        return loss(self._parameters, torch.from_numpy(batch).long(), self._config)

    def step(self, batch: np.ndarray) -> tuple[float, np.ndarray]:
        """One step of Adam."""
        total, cross_entropy, layers = self._loss(batch)
        self._adam.zero_grad()
        total.backward()
        self._adam.step()
        return cross_entropy.item(), np.stack([moe.expert_counts.numpy() for _, moe in layers])

    def gradients(self, batch: np.ndarray) -> Parameters:
        """Gradients of the training loss."""
        total, _, _ = self._loss(batch)
        grads = torch.autograd.grad(total, list(self._parameters.values()))
        return {n: g.numpy() for n, g in zip(self._parameters, grads, strict=True)}

    @torch.no_grad()
    def evaluate(self, batch: np.ndarray) -> Evaluation:
        """A forward pass."""
        _, cross_entropy, layers = self._loss(batch)
        return Evaluation(
            cross_entropy.item(),
            np.stack([moe.routing.indices.numpy() for _, moe in layers]),
            np.stack([x.flatten(0, 1).numpy() for x, _ in layers]),
        )

    def parameters(self) -> Parameters:
        """The current weights."""
        return {n: x.detach().numpy() for n, x in self._parameters.items()}
