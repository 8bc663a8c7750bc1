# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: both loss curves, and the expert load over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from duomoe.verification.train import Run

JAX_COLOR, TORCH_COLOR = "#f2a65a", "#1b3a6b"
WINDOWS = 50  # the load is averaged over about this many spans of steps
BELOW: dict[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.14),
    "ncols": 2,
    "frameon": False,
}


def draw(path: Path, jax: Run, torch: Run) -> None:
    """Write a PNG of two panels."""
    figure = Figure(figsize=(12, 5.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_losses(left, jax, torch)
    _draw_load(right, jax, torch)
    figure.suptitle("One MoE language model, trained in JAX and in PyTorch on the same batches")
    figure.savefig(path)


def _draw_losses(axes: Axes, jax: Run, torch: Run) -> None:
    steps = len(jax.losses)
    axes.plot(jax.losses, color=JAX_COLOR, linewidth=3.5, label="JAX, training")
    axes.plot(torch.losses, color=TORCH_COLOR, linewidth=1, label="PyTorch, training")
    for run, color, marker in ((jax, JAX_COLOR, "o"), (torch, TORCH_COLOR, "x")):
        axes.plot(
            [steps],
            [run.held_out],
            marker=marker,
            color=color,
            markersize=9,
            markeredgewidth=2,
            linestyle="none",
            clip_on=False,
            zorder=5,
            label=f"{run.name}, held out: {run.held_out:.3f}",
        )
    axes.set(xlabel="step", ylabel="cross entropy (nats per byte)", xlim=(0, steps))
    axes.grid(alpha=0.3)
    axes.legend(**BELOW)
    axes.set_title("Loss")


def _windowed(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Middle steps of spans, [W], and the first layer's mean load in each, [W, E] in per cent."""
    load = 100 * run.load[:, 0]
    spans = np.array_split(np.arange(len(load)), min(WINDOWS, len(load)))
    return np.array([s.mean() for s in spans]), np.stack([load[s].mean(axis=0) for s in spans])


def _draw_load(axes: Axes, jax: Run, torch: Run) -> None:
    steps, load = _windowed(jax)
    _, other = _windowed(torch)
    experts = load.shape[1]
    colors = matplotlib.colormaps["viridis"](np.linspace(0.15, 0.95, experts))
    axes.stackplot(steps, load.T, colors=colors, edgecolor="white", linewidth=0.4)
    for boundary in other.cumsum(axis=1).T[:-1]:
        axes.plot(steps, boundary, color="black", linewidth=0.9, linestyle=(0, (4, 2)))
    middles = load[-1].cumsum() - load[-1] / 2
    for expert, middle in enumerate(middles if experts <= 16 else []):
        axes.annotate(
            str(expert),
            (1.0, middle / 100),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set(xlabel="step", ylabel="share of token slots, stacked (%)", ylim=(0, 100))
    axes.margins(x=0)
    axes.legend(
        handles=[
            Patch(facecolor=colors[experts // 2], label="JAX, one colour per expert"),
            Line2D([], [], color="black", linestyle=(0, (4, 2)), label="PyTorch, where they meet"),
        ],
        **BELOW,
    )
    axes.set_title("Expert load, first MoE layer (number: expert)")
