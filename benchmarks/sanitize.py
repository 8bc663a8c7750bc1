# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every op and its backward once on small odd shapes, for compute-sanitizer:
`compute-sanitizer --tool memcheck python benchmarks/sanitize.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from duomoe.verification.adapters import TorchAdapter
from duomoe.verification.compare import draw_cotangents, run_op
from duomoe.verification.inputs import GENERATORS, Draw, Options, forward_ops


def main() -> None:
    """Run the ops; the sanitizer reports what they do wrong."""
    adapter = TorchAdapter("cuda")
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
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
