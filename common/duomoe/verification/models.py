# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the JAX and the torch language model share: sizes, first weights, what training sees.

    bytes[S,C] -> embedding + positions
      -> blocks of: x + attention(rms_norm(x)), x + moe(rms_norm(x))
      -> rms_norm -> head -> logits[S,C,256]

Axis letters: S sequences, C bytes of context, D width, H attention heads, E experts, F expert
hidden width, K experts per token, L blocks, T = S * C tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from duomoe.config import RouterConfig

VOCABULARY = 256
NORM_EPS = 1e-6
EXPERTS = ("router", "w_gate", "w_up", "w_down")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes, losses and optimizer of the demo's model.

    Attributes:
        context: C.
        width: D.
        heads: H.
        blocks: L.
        experts: E.
        top_k: K.
        hidden: F.
        load_balancing: coefficient of the load-balancing loss, summed over the blocks.
        z: coefficient of the z loss, summed over the blocks.
        learning_rate: of Adam, constant.
        betas: of Adam.
        eps: of Adam.
    """

    context: int = 64
    width: int = 64
    heads: int = 4
    blocks: int = 2
    experts: int = 8
    top_k: int = 2
    hidden: int = 128
    load_balancing: float = 1e-2
    z: float = 1e-3
    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("context", "width", "heads", "blocks", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be divisible by {self.heads} heads")
        self.router()

    def router(self) -> RouterConfig:
        """The router of every block."""
        return RouterConfig(self.experts, self.top_k)


Parameters = dict[str, np.ndarray]


def initial_parameters(config: ModelConfig, seed: int) -> Parameters:
    """The first weights, float32, by name; those of block i start with "i."."""
    rng = np.random.default_rng(seed)
    d, f, e = config.width, config.hidden, config.experts

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    def ones(*shape: int) -> np.ndarray:
        return np.ones(shape, np.float32)

    parameters = {
        "embedding": normal(VOCABULARY, d, scale=0.3),
        "positions": normal(config.context, d, scale=0.1),
    }
    into_residual = (2 * config.blocks) ** -0.5
    for i in range(config.blocks):
        parameters |= {
            f"{i}.attention_norm": ones(d),
            f"{i}.qkv": normal(d, 3 * d, scale=d**-0.5),
            f"{i}.attention_out": normal(d, d, scale=d**-0.5 * into_residual),
            f"{i}.moe_norm": ones(d),
            f"{i}.router": normal(d, e, scale=d**-0.5),
            f"{i}.w_gate": normal(e, d, f, scale=d**-0.5),
            f"{i}.w_up": normal(e, d, f, scale=d**-0.5),
            f"{i}.w_down": normal(e, f, d, scale=f**-0.5 * into_residual),
        }
    return parameters | {"norm": ones(d), "head": normal(d, VOCABULARY, scale=0.02)}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A forward pass on one batch.

    Attributes:
        loss: mean cross entropy, nats per byte, without the auxiliary losses.
        indices: [L, T, K] int32, the experts of every token.
        moe_inputs: [L, T, D] float32, what the MoE layers were given.
    """

    loss: float
    indices: np.ndarray
    moe_inputs: np.ndarray


class LanguageModel(Protocol):
    """One framework's model with its optimizer. Batches are [S, C + 1] int32."""

    name: str

    def step(self, batch: np.ndarray) -> tuple[float, np.ndarray]:
        """One step of Adam; its cross entropy, nats per byte, and the expert counts, [L, E]."""

    def gradients(self, batch: np.ndarray) -> Parameters:
        """Gradients of the training loss, auxiliary losses included."""

    def evaluate(self, batch: np.ndarray) -> Evaluation:
        """A forward pass with the current weights."""

    def parameters(self) -> Parameters:
        """The current weights."""
