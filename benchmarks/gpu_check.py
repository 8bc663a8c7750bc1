# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Route forward and backward on a GPU from both front ends: errors against the float64 oracle and
bits against the CPU core. Prints a table and writes JSON: `python benchmarks/gpu_check.py --out
DIR`. gpu_bench.py has the times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from duomoe import RouterConfig, ops, oracle
from duomoe.verification.adapters import DTYPES, JaxAdapter, TorchAdapter, bits
from gpu_common import Clock, machine

SEED = 20260
CPU_BITS = "bits equal the CPU's"


@dataclasses.dataclass(frozen=True)
class Shape:
    """One case: T tokens, the router's options, the dtype of the logits."""

    tokens: int
    config: RouterConfig
    dtype: str = "float32"
    bias: bool = False
    sequences: int = 1

    @property
    def name(self) -> str:
        """T, E, K and what the options say."""
        c = self.config
        parts = [
            f"{self.tokens},{c.num_experts},{c.top_k}",
            c.score + ("+bias" if self.bias else ""),
            self.dtype,
        ]
        if c.num_groups > 1:
            parts.append(f"groups {c.num_groups}/{c.group_top_k}")
        return " ".join(parts)


CHECKED = [
    Shape(2048, RouterConfig(256, 8, score="sigmoid", eps=1e-20, scale=2.5), bias=True),
    Shape(2048, RouterConfig(256, 8, score="sigmoid", num_groups=8, group_top_k=4), bias=True),
    Shape(2048, RouterConfig(256, 8, score="sigmoid"), "bfloat16", bias=True),
    Shape(1024, RouterConfig(128, 8)),
    Shape(1024, RouterConfig(128, 8, normalize=False), "float16", sequences=4),
    Shape(512, RouterConfig(8, 2)),
    Shape(512, RouterConfig(896, 16, score="sqrtsoftplus"), bias=True),
    Shape(512, RouterConfig(32, 4, select_on="logit", score_scope="selected"), "bfloat16"),
]


def draw(shape: Shape, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Fresh normal logits, and a bias where the case has one."""
    z = rng.standard_normal((shape.tokens, shape.config.num_experts)).astype(DTYPES[shape.dtype])
    inputs = {"logits": z}
    if shape.bias:
        inputs["bias"] = (rng.standard_normal(shape.config.num_experts) * 0.1).astype(np.float32)
    return inputs


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """||got - want|| / ||want|| in float64; NaN never passes."""
    difference = np.linalg.norm(got.astype(np.float64) - want)
    return float(difference / max(np.linalg.norm(want), 1e-30))


def check(shape: Shape, gpu: Any, cpu: Any, rng: np.random.Generator) -> dict[str, Any]:
    """One case from one front end."""
    inputs = draw(shape, rng)
    attributes = shape.config.attributes(num_sequences=shape.sequences)
    got = gpu.call("route", inputs, attributes)
    same = cpu.call("route", inputs, attributes)
    want = oracle.route(**inputs, given_indices=got["indices"], **attributes)
    grads = {
        f"grad_{name}": rng.standard_normal(got[name].shape).astype(np.float32)
        for name in ("weights", "score_sums", "logsumexp_sq")
    }
    names = {a.name for a in ops.table()["route_bwd"].attributes}
    backward = {"logits": inputs["logits"], "indices": got["indices"], **grads}
    options = {k: v for k, v in attributes.items() if k in names}
    got_grad = gpu.call("route_bwd", backward, options)["grad_logits"]
    same_grad = cpu.call("route_bwd", backward, options)["grad_logits"]
    want_grad = oracle.route_bwd(**backward, **options)["grad_logits"]
    return {
        "case": shape.name,
        "front end": gpu.name,
        "weights": relative_error(got["weights"], want["weights"]),
        "score_sums": relative_error(got["score_sums"], want["score_sums"]),
        "logsumexp_sq": relative_error(got["logsumexp_sq"], want["logsumexp_sq"]),
        "grad_logits": relative_error(got_grad, want_grad),
        "ids equal the CPU's": bool(np.array_equal(got["indices"], same["indices"])),
        CPU_BITS: all(np.array_equal(bits(got[k]), bits(same[k])) for k in got)
        and bool(np.array_equal(bits(got_grad), bits(same_grad))),
        "arrays": {**got, "grad_logits": got_grad},
    }


def print_report(report: dict[str, Any]) -> None:
    """The report as text."""
    versions = report["versions"]
    print(f"{report['device']}; torch {versions['torch']}, jax {versions['jax']}")
    columns = ("weights", "score_sums", "logsumexp_sq", "grad_logits")
    heads = "".join(f"{c:>13}" for c in columns)
    print(f"{'relative error against float64':44}{'':7}{heads}  CPU bits  JAX = torch")
    for r in report["checks"]:
        errors = "".join(f"{r[c]:13.1e}" for c in columns)
        verdict = "" if r["passed"] else "FAILED"
        print(
            f"{r['case']:44}{r['front end']:7}{errors}  {r[CPU_BITS]!s:9} {r['JAX = torch']!s:11}"
            f" {verdict}"
        )


def main() -> int:
    """Run all, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    arguments = parser.parse_args()
    gpus = [JaxAdapter(), TorchAdapter("cuda")]
    assert jax.devices()[0].platform == "gpu", jax.devices()
    cpu = TorchAdapter("cpu")
    rows, failed = [], 0
    for number, shape in enumerate(CHECKED):
        pair = [check(shape, gpu, cpu, np.random.default_rng([SEED, number])) for gpu in gpus]
        arrays = [r.pop("arrays") for r in pair]
        equal = all(np.array_equal(bits(arrays[0][k]), bits(arrays[1][k])) for k in arrays[0])
        for row in pair:
            row["JAX = torch"] = equal
            tolerance = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}[shape.dtype]
            row["passed"] = (
                equal
                and row[CPU_BITS]
                and all(row[k] < 2e-6 for k in ("weights", "score_sums", "logsumexp_sq"))
                and row["grad_logits"] < tolerance
            )
            failed += not row["passed"]
        rows += pair
    report = {**machine(Clock("cuda")), "checks": rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
