# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What it costs that a block's result has losses, counts and logits, where nobody uses them: the
block against the same public functions without losses, on two CPU threads.
`python benchmarks/block_overhead.py [--out FOLDER]`.

Both take turns; the ratio is that of the fastest calls, next to the median of the ratios of
neighbouring calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpu_common import THREADS, cpu_model

# isort: split

import jax
import jax.numpy as jnp
import numpy as np
import torch
from duomoe import MoEParams, RouterConfig
from duomoe.verification.memory import Block

import jax_frontend
import torch_frontend

torch.set_num_threads(THREADS)
BLOCKS = {
    "64 experts, 512 x 256": Block(4096, 64, 8, 512, 256),
    "256 experts, 16 x 16": Block(4096, 256, 8, 16, 16),  # little but the router
    "few tokens, 16 x 16": Block(16, 8, 2, 16, 16),  # little but calls
}


def composition(functions: Any, x: Any, p: MoEParams, config: RouterConfig) -> Any:
    """The block's output, and nothing else."""
    routing = functions.route(functions.gate(x, p.router), config)
    plan = functions.plan_dispatch(routing.indices, config.num_experts)
    rows = functions.permute(x, plan)
    gate = functions.grouped_matmul(rows, p.w_gate, plan)
    hidden = functions.glu(gate, functions.grouped_matmul(rows, p.w_up, plan))
    results = functions.grouped_matmul(hidden, p.w_down, plan)
    return functions.combine(results, plan, routing.weights)


def block(functions: Any, x: Any, p: MoEParams, config: RouterConfig) -> Any:
    """The output of a result whose other fields are dropped."""
    return functions.moe(x, p, config).output


def draw(b: Block) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The tokens and the parameters."""
    rng = np.random.default_rng(0)
    shapes = {name: t.shape for name, t in b.parameters().items()}
    parameters = {
        name: rng.standard_normal(s, dtype=np.float32) * np.float32(s[-2] ** -0.5)
        for name, s in shapes.items()
    }
    return rng.standard_normal((b.tokens, b.width), dtype=np.float32), parameters


def runs(b: Block) -> dict[str, dict[str, Callable[[], Any]]]:
    """{what: {"block", "composition": run}}, the results of both compared."""
    config = RouterConfig(b.experts, b.top_k)
    x, parameters = draw(b)
    tx = torch.from_numpy(x).requires_grad_()
    tp = {n: torch.from_numpy(a).requires_grad_() for n, a in parameters.items()}
    inputs, cotangent = [tx, *tp.values()], torch.ones_like(tx).detach()
    jx, jp = jnp.asarray(x), {n: jnp.asarray(a) for n, a in parameters.items()}

    def of(f: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
        def forward() -> Any:
            with torch.no_grad():
                return f(torch_frontend, tx, MoEParams(**tp), config)

        def step() -> Any:
            y = f(torch_frontend, tx, MoEParams(**tp), config)
            return torch.autograd.grad(y, inputs, cotangent)

        @jax.jit
        def jax_forward(x: Any, p: Any) -> Any:
            return f(jax_frontend, x, MoEParams(**p), config)

        @jax.jit
        def jax_step(x: Any, p: Any) -> Any:
            y, pull = jax.vjp(lambda *a: jax_forward(*a), x, p)
            return pull(jnp.ones_like(y))

        return {
            "torch forward": forward,
            "torch forward and backward": step,
            "jit forward": lambda: jax.block_until_ready(jax_forward(jx, jp)),
            "jit forward and backward": lambda: jax.block_until_ready(jax_step(jx, jp)),
        }

    whole, bare = of(block), of(composition)
    for name in ("torch forward", "jit forward"):
        np.testing.assert_array_equal(np.asarray(whole[name]()), np.asarray(bare[name]()))
    return {name: {"block": whole[name], "composition": bare[name]} for name in whole}


def ratios(pair: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Fastest times in ms and ratios of block to composition."""
    for run in pair.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in pair}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["block"]) < 5:
        # Who comes first changes.
        for name in sorted(pair, reverse=len(times["block"]) % 2 == 1):
            start = time.perf_counter()
            pair[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
    fastest = {name: min(t) for name, t in times.items()}
    neighbours = [a / b for a, b in zip(times["block"], times["composition"], strict=True)]
    return {
        **fastest,
        "ratio of the fastest": fastest["block"] / fastest["composition"],
        "median ratio": statistics.median(neighbours),
        "calls": len(neighbours),
    }


def main() -> None:
    """Runs all; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="of each pair")
    parser.add_argument("--out", type=Path, help="write block_overhead.json into this folder")
    options = parser.parse_args()
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "threads": THREADS,
        "versions": {"torch": torch.__version__, "jax": jax.__version__},
        "blocks": {name: dataclasses.asdict(b) for name, b in BLOCKS.items()},
        "milliseconds": {},
    }
    print(f"{'':54} {'block':>8} {'bare':>8} {'ratio':>6} {'median':>6}")
    for name, b in BLOCKS.items():
        for what, pair in runs(b).items():
            found = ratios(pair, options.seconds)
            record["milliseconds"][f"{name}: {what}"] = found
            print(
                f"{name + ': ' + what:54} {found['block']:8.3f} {found['composition']:8.3f} "
                f"{found['ratio of the fastest']:6.3f} {found['median ratio']:6.3f}",
                flush=True,
            )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "block_overhead.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
