# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Train either framework's model on the same batches, and set the two runs against each other.

Axis letters: S sequences, C bytes of context, L blocks, E experts, K experts per token, T = S * C.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence

import numpy as np
from tqdm import tqdm

from duomoe.verification.models import LanguageModel


@dataclasses.dataclass(frozen=True)
class Run:
    """What was seen of one model while it was trained.

    Attributes:
        name: the framework.
        losses: [steps] cross entropy of each step's batch before the step, nats per byte.
        load: [steps, L, E] share of the token slots that each expert got, between 0 and 1.
        checkpoints: the steps before which `routed` was taken.
        routed: at each checkpoint, [L, T, K] experts of the tokens of one evaluation batch.
        held_out_before: cross entropy of the held-out text before training, nats per byte.
        held_out: the same after it.
        first_step_seconds: the first step, compilation included.
        tokens_per_second: over all steps but the first, if there are more.
    """

    name: str
    losses: np.ndarray
    load: np.ndarray
    checkpoints: list[int]
    routed: list[np.ndarray]
    held_out_before: float
    held_out: float
    first_step_seconds: float
    tokens_per_second: float

    @property
    def learned(self) -> bool:
        """Whether every loss is finite and the held-out loss fell."""
        return bool(np.isfinite(self.losses).all()) and self.held_out < self.held_out_before

    @property
    def bits_per_byte(self) -> float:
        """The held-out loss after training in bits."""
        return self.held_out / math.log(2)


def checkpoints(steps: int, count: int = 8) -> list[int]:
    """About `count` evenly spaced steps, the first and the last included."""
    return [*range(0, steps - 1, max(1, steps // count)), steps - 1]


def train(
    model: LanguageModel,
    batches: Iterable[np.ndarray],
    steps: int,
    held_out: Sequence[np.ndarray],
) -> Run:
    """Train for `steps` batches; the routing is watched on the first batch of `held_out`."""

    def held_out_loss() -> float:
        return float(np.mean([model.evaluate(batch).loss for batch in held_out]))

    before = held_out_loss()
    losses, load, routed, seconds, tokens = [], [], [], [], 0
    stops = checkpoints(steps)
    bar = tqdm(batches, f"train {model.name:>7}", steps, unit="step", mininterval=0.5)
    for step, batch in enumerate(bar):
        if step in stops:
            routed.append(model.evaluate(held_out[0]).indices)
        start = time.perf_counter()
        loss, counts = model.step(batch)
        seconds.append(time.perf_counter() - start)
        tokens = batch[:, 1:].size
        losses.append(loss)
        load.append(counts / counts.sum(axis=-1, keepdims=True))
        bar.set_postfix_str(f"{loss:.3f} nats/byte", refresh=False)
    timed = seconds[1:] or seconds
    return Run(
        name=model.name,
        losses=np.array(losses),
        load=np.array(load),
        checkpoints=stops,
        routed=routed,
        held_out_before=before,
        held_out=held_out_loss(),
        first_step_seconds=seconds[0],
        tokens_per_second=tokens * len(timed) / sum(timed),
    )


def same_experts(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[L, T] whether a token has the same set of experts in two routings [L, T, K]."""
    return (np.sort(a, axis=-1) == np.sort(b, axis=-1)).all(axis=-1)


def routed_identically(a: Run, b: Run) -> tuple[list[float], list[float]]:
    """Per checkpoint, the share of tokens with the same experts: in the first layer, in all."""
    same = [same_experts(x, y) for x, y in zip(a.routed, b.routed, strict=True)]
    return [float(s[0].mean()) for s in same], [float(s.all(axis=0).mean()) for s in same]


def gradient_difference(
    jax: dict[str, np.ndarray], torch: dict[str, np.ndarray]
) -> tuple[float, str]:
    """The largest max|a - b| / max|b| of all parameters, and whose it is."""
    return max(
        (float(np.abs(jax[name] - g).max() / np.abs(g).max()), name) for name, g in torch.items()
    )
