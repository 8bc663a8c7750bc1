# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's table and its JSON report."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from duomoe.verification import environment, report
from duomoe.verification.compare import Comparison, Result
from duomoe.verification.corpus import Corpus
from duomoe.verification.train import Run, routed_identically

if TYPE_CHECKING:
    from duomoe.verification.demo import DemoOptions


def percent(share: float) -> str:
    """A share between 0 and 1 in per cent."""
    return f"{100 * share:.1f} %"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Everything that a demo found.

    Attributes:
        options: what was asked for.
        corpus: the text.
        results: the comparison at random inputs, by dtype.
        trained: the trained blocks on real activations.
        gradient_difference: of the whole model on the first batch: relative difference, parameter.
        runs: JAX, then torch.
        seconds: how long each part took.
    """

    options: DemoOptions
    corpus: Corpus
    results: Mapping[str, Result]
    trained: Sequence[Comparison]
    gradient_difference: tuple[float, str]
    runs: Sequence[Run]
    seconds: Mapping[str, float]

    def problems(self) -> list[str]:
        """Why the demo failed, if it did."""
        sentences = [
            f"{dtype}: {sentence}"
            for dtype, result in self.results.items()
            if not result.passed
            for sentence in (*report.problems(result, "cpu"), report.summary(result))
        ]
        if different := sum(not c.identical for c in self.trained):
            sentences.append(f"{different} arrays of the trained blocks differ")
        sentences += [
            f"{run.name} did not learn: held-out loss {run.held_out_before:.3f} before, "
            f"{run.held_out:.3f} after"
            for run in self.runs
            if not run.learned
        ]
        return sentences

    # -- terminal --------------------------------------------------------------------------------

    def text(self) -> str:
        """All of it as aligned plain text."""
        return "\n\n".join((self._ops(), self._training(), self._totals()))

    def _ops(self) -> str:
        names = {
            (c.op, c.case if c.op == "moe" else "")
            for result in self.results.values()
            for c in result.comparisons
        }
        table_order = list(
            dict.fromkeys(c.op for r in self.results.values() for c in r.comparisons)
        )
        rows = []
        for op, case in sorted(names, key=lambda name: (table_order.index(name[0]), name[1])):
            cells = [
                report.worst(
                    c
                    for c in result.comparisons
                    if c.op == op and case in ("", c.case) and c.quantity.startswith(kind)
                )
                for result in self.results.values()
                for kind in ("output", "grad")
            ]
            rows.append((f"{op} block, JAX {case}" if case else op, *cells))
        for case, group in itertools.groupby(self.trained, key=lambda c: c.case):
            arrays = list(group)
            cells = [
                report.worst(c for c in arrays if c.quantity.startswith(kind))
                for kind in ("output", "grad")
            ]
            rows.append((f"moe block, {case}", *cells, *["-"] * (2 * len(self.results) - 2)))
        headers = [f"{dtype} {kind}" for dtype in self.results for kind in ("outputs", "gradients")]
        return report.table(("JAX = PyTorch", *headers), rows)

    def _training(self) -> str:
        jax, torch = self.runs
        first, every = routed_identically(jax, torch)
        rows = []
        for step, in_first, in_all in zip(jax.checkpoints, first, every, strict=True):
            a, b = jax.losses[step], torch.losses[step]
            loads = [
                f"{100 * run.load[step].min():.0f}-{100 * run.load[step].max():.0f} %"
                for run in self.runs
            ]
            rows.append(
                (
                    str(step),
                    f"{a:.4f}",
                    f"{b:.4f}",
                    f"{a - b:+.1e}",
                    percent(in_first),
                    percent(in_all),
                    *loads,
                )
            )
        headers = (
            "step",
            "JAX loss",
            "PyTorch loss",
            "difference",
            "same experts: layer 1",
            "all layers",
            "expert load JAX",
            "expert load PyTorch",
        )
        steps = report.table(headers, rows, right="r" * len(headers))
        return steps + "\nloss in nats per byte; expert load from the least to the most used expert"

    def _totals(self) -> str:
        relative, name = self.gradient_difference
        rows = [
            ("held-out loss before (nats/byte)", *(f"{r.held_out_before:.4f}" for r in self.runs)),
            ("held-out loss after (nats/byte)", *(f"{r.held_out:.4f}" for r in self.runs)),
            ("held-out loss after (bits/byte)", *(f"{r.bits_per_byte:.4f}" for r in self.runs)),
            (
                "trained tokens (bytes) per second",
                *(f"{r.tokens_per_second:,.0f}" for r in self.runs),
            ),
            (
                "first step, with compilation (s)",
                *(f"{r.first_step_seconds:.2f}" for r in self.runs),
            ),
        ]
        totals = report.table(("after training", *(r.name for r in self.runs)), rows, right=" rr")
        return (
            f"{totals}\n\n"
            f"whole model's gradients on the first batch: {relative:.1e} apart at most (relative, "
            f"{name}).\n"
            "Attention, norms, head and Adam are each framework's own arithmetic, so the runs part "
            "slowly.\n"
            f"time: comparison {self.seconds['comparison']:.0f} s, "
            f"all {self.seconds['total']:.0f} s"
        )

    # -- JSON ------------------------------------------------------------------------------------

    def json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        options = dataclasses.asdict(self.options) | {"out": str(self.options.out)}
        relative, name = self.gradient_difference
        first, every = routed_identically(*self.runs)
        return {
            "command": "demo",
            "passed": not self.problems(),
            "problems": self.problems(),
            "options": options,
            "environment": environment.environment("cpu"),
            "corpus": {
                "source": self.corpus.source,
                "files": self.corpus.files,
                "training_bytes": len(self.corpus.training),
                "held_out_bytes": len(self.corpus.held_out),
                "sha256": self.corpus.sha256,
            },
            "comparison": {d: report.result_json(r) for d, r in self.results.items()},
            "trained_blocks": [
                dataclasses.asdict(c) | {"identical": c.identical} for c in self.trained
            ],
            "first_batch_gradients": {"largest_relative_difference": relative, "parameter": name},
            "routed_identically": {
                "step": self.runs[0].checkpoints,
                "first_layer": first,
                "all_layers": every,
            },
            "runs": [self._run_json(run) for run in self.runs],
            "seconds": dict(self.seconds),
        }

    @staticmethod
    def _run_json(run: Run) -> dict[str, Any]:
        return {
            "framework": run.name,
            "loss_nats_per_byte": run.losses.tolist(),
            "expert_load": run.load.round(5).tolist(),
            "held_out_nats_per_byte_before": run.held_out_before,
            "held_out_nats_per_byte": run.held_out,
            "held_out_bits_per_byte": run.bits_per_byte,
            "tokens_per_second": run.tokens_per_second,
            "first_step_seconds": run.first_step_seconds,
        }
