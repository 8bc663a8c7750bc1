# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every op and its backward once on small odd shapes, for compute-sanitizer:
`compute-sanitizer --tool memcheck python benchmarks/sanitize.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from duomoe.verification.adapters import TorchAdapter
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
                outputs = adapter.call(op.name, case.inputs, case.attributes)
                given = [case.inputs.get(t.name) for t in op.inputs]
                pool = {
                    "input": given,
                    "output": list(outputs.values()),
                    "grad": [
                        rng.standard_normal(o.shape).astype(o.dtype) for o in outputs.values()
                    ],
                }
                dtypes = [None if g is None else g.dtype.name for g in given]
                for step in op.gradient_steps:
                    arrays = [pool[kind][i] for kind, i in step.sources]
                    names = [t.name for t in step.op.inputs]
                    attributes = op.gradient_attributes(step, case.attributes, dtypes)
                    adapter.call(step.op.name, dict(zip(names, arrays, strict=True)), attributes)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
