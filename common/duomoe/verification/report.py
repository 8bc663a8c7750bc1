# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tables for the terminal and rows for the JSON report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from duomoe.verification.compare import Comparison, Result


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> str:
    """Aligned plain text; column i is right-aligned where `right[i]` is "r"."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * w for w in widths])
    sides = [">" if right[i : i + 1] == "r" else "<" for i in range(len(widths))]
    return "\n".join(
        "  ".join(f"{c:{s}{w}}" for c, s, w in zip(line, sides, widths, strict=True)).rstrip()
        for line in lines
    )


def comparison_table(comparisons: Iterable[Comparison]) -> str:
    """One line for every array that was compared."""
    rows = [
        (c.op, c.case, c.quantity, f"[{', '.join(map(str, c.shape))}]", c.dtype, c.verdict)
        for c in comparisons
    ]
    return table(("op", "case", "output or gradient", "shape", "dtype", "JAX = PyTorch"), rows)


def worst(comparisons: Iterable[Comparison]) -> str:
    """Many comparisons in one word or, if any differs, the worst of them in a few."""
    comparisons = list(comparisons)
    if not comparisons:
        return "-"
    different = [c for c in comparisons if not c.identical]
    if not different:
        return "bit-identical"
    if any(c.max_ulp is None for c in different):
        return f"{different[0].quantity} differs"
    return f"{max(c.max_ulp or 0 for c in different)} ulp"


def problems(result: Result, device: str) -> list[str]:
    """One sentence for everything but identity."""
    sentences = [
        f"error: {name} is in the op table, but duomoe.verification.inputs has no generator for it"
        for name in result.without_generator
    ]
    if result.without_kernel:
        sentences.append(
            f"not compared, because this build has no {device.upper()} kernel for it: "
            + ", ".join(result.without_kernel)
        )
    return sentences


def summary(result: Result) -> str:
    """The last line of a comparison."""
    different = sum(not c.identical for c in result.comparisons)
    count = len(result.comparisons)
    if different:
        return f"{different} of {count} arrays differ between JAX and PyTorch"
    return f"all {count} arrays are bit-identical in JAX and PyTorch"


def result_json(result: Result) -> dict[str, Any]:
    """A result as JSON values."""
    return {
        "passed": result.passed,
        "comparisons": [
            dataclasses.asdict(c) | {"identical": c.identical} for c in result.comparisons
        ],
        "without_generator": result.without_generator,
        "without_kernel": result.without_kernel,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a report."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
