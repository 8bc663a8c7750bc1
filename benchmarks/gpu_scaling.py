# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Device time over the number of tokens, and a plot of the bandwidth reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duomoe import RouterConfig
from gpu_common import Budget, Clock
from gpu_dispatch import DispatchCase
from gpu_router import SIGMOID_256, RouteCase

TOKENS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
MARKERS = {"route": "o", "route_bwd": "s", "plan_dispatch": "^"}


def lines() -> dict[str, list[Any]]:
    """{what: its cases, T growing}."""
    softmax = RouterConfig(128, 8)
    found: dict[str, list[Any]] = {}
    for label, (config, bias, dtype) in {
        "256/8 sigmoid+bias float32": (SIGMOID_256, True, "float32"),
        "128/8 softmax bfloat16": (softmax, False, "bfloat16"),
    }.items():
        for op in ("route", "route_bwd"):
            found[f"{op} {label}"] = [RouteCase(op, t, config, bias, dtype) for t in TOKENS]
    for e in (256, 128):
        found[f"plan_dispatch {e}/8"] = [
            DispatchCase("plan_dispatch", t, e, 8, dtype="int32") for t in TOKENS
        ]
    return found


def measure(clock: Clock, budget: Budget, largest: int) -> list[dict[str, Any]]:
    """Rows of all lines up to `largest` tokens; the small ones of all lines come first."""
    rows = []
    for number, tokens in enumerate(t for t in TOKENS if t <= largest):
        for what, cases in lines().items():
            case = cases[number]
            label = f"scaling: {what} T={tokens}"
            if not budget.allows(label, 1.0):
                continue

            def make(case: Any = case) -> Any:
                return case.torch_ours(*case.inputs(clock.device))

            took = budget.guard(label, clock.time, make, case.set_bytes)
            if took:
                rows.append(
                    {
                        "what": what,
                        "tokens": tokens,
                        "us": took.us,
                        "spread": took.spread,
                        "floor_us": case.floor_bytes / clock.ceiling,
                        "GB/s": case.floor_bytes / took.us / 1e3,
                    }
                )
    return rows


def plot(path: Path, rows: Sequence[dict[str, Any]], record: dict[str, Any]) -> bool:
    """Write an SVG of GB/s over T; False, with a word on the terminal, without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: it needs matplotlib, which is not installed (pip install matplotlib)")
        return False
    matplotlib.rcParams["svg.hashsalt"] = "duomoe"  # the same picture has the same bytes
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    ceiling = record["copy ceiling GB/s"]
    axes.axhline(ceiling, color="black", linewidth=0.9, linestyle=(0, (4, 2)))
    axes.annotate(
        f"copy ceiling, {ceiling:.0f} GB/s", (TOKENS[0], ceiling), xytext=(0, 4),
        textcoords="offset points", fontsize=9,
    )  # fmt: skip
    names = list(dict.fromkeys(r["what"] for r in rows))
    colors = matplotlib.colormaps["viridis"]([i / max(len(names), 1) for i in range(len(names))])
    for name, color in zip(names, colors, strict=True):
        of = [r for r in rows if r["what"] == name]
        shape = MARKERS[name.split()[0]]
        x, y = [r["tokens"] for r in of], [r["GB/s"] for r in of]
        axes.plot(x, y, color=color, marker=shape, markersize=4, label=name)
    axes.set(
        xscale="log", yscale="log", xlabel="tokens T", ylabel="bytes that must move / time (GB/s)",
        title=f"Bandwidth reached, cold L2, {record['device']}",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    return True
