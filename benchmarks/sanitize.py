# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every op and its backward on small odd shapes, then the router, the plan and the row ops on
random calls of the tests, for compute-sanitizer: `compute-sanitizer --tool memcheck python
benchmarks/sanitize.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Every tensor and all scratch memory have an allocation of their own, so that memcheck sees reads
# past their ends.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import torch
from cuda_draws import MOVES, PLAN, ROUTER, cover, move_calls, plan_call, route_bwd_call, route_call
from cuda_targets import Target
from duomoe.verification.adapters import TorchAdapter
from duomoe.verification.compare import draw_cotangents, run_op
from duomoe.verification.inputs import GENERATORS, Draw, Options, forward_ops


def every_op(adapter: TorchAdapter) -> None:
    """From the table."""
    rng = np.random.default_rng(0)
    for options in (
        Options(tokens=131, experts=9, top_k=3, width=37, hidden=21),
        Options(
            tokens=70, experts=260, top_k=9, width=64, hidden=8, dtype="bfloat16", score="sigmoid"
        ),
        Options(tokens=1, experts=1, top_k=1, width=1, hidden=1, dtype="float16"),
    ):
        for op in forward_ops():
            for case in GENERATORS[op.name](Draw(options, rng, adapter.call)):
                run_op(adapter, op, case, draw_cotangents(op, case, rng))


def drawn_calls(target: Target, seed: int, count: int) -> None:
    """Small calls whose results are compared with the CPU's too: every number of
    experts, dtype, option and layout comes up.
    """
    few = {"tokens": [1, 33, 70], "sequences": [1, 2]}
    for choice in cover({**ROUTER, **few}, 2 * count, seed):
        forward = route_call(choice)
        target.check(route_bwd_call(choice, forward, target.check(forward)))
    for choice in cover({**PLAN, "tokens": [0, 1, 33, 331]}, count, seed):
        target.check(plan_call(choice))
    for choice in cover({**MOVES, "tokens": [0, 1, 33], "top_k": [1, 2, 8, 33]}, count, seed):
        for call in move_calls(choice, target.cpu.call):
            target.check(call)


def main() -> None:
    """Run the ops; the sanitizer reports what they do wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40, help="random calls of each kind")
    options = parser.parse_args()
    target = Target(options.device)
    every_op(target.adapter)
    drawn_calls(target, options.seed, options.count)
    if options.device == "cuda":
        torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
