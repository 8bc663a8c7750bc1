# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests of the CUDA kernels share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from adapters import BFLOAT16, DTYPES, bits
from duomoe import library, ops
from duomoe.dispatch import plan_rows

try:
    import torch
except ImportError:
    torch = None

GPU = torch is not None and torch.cuda.is_available()
MISSING = [op for op in ops.table() if not library.has_kernel(op, "cuda")]
MARKS = [
    pytest.mark.cuda,
    pytest.mark.torch,
    pytest.mark.skipif(not GPU, reason="torch sees no GPU"),
    pytest.mark.skipif(bool(MISSING), reason=f"no CUDA kernel for {', '.join(MISSING)}"),
]

FLOATS = [DTYPES["float32"], BFLOAT16, DTYPES["float16"]]
Values = dict[str, Any]
Check = Callable[[str, Values, Values], Values]
Rng = np.random.Generator


def name_of(dtype: np.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def assert_same(expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray]) -> None:
    """The same bits, but for the sign and payload of a NaN, which no standard fixes."""
    for name, a in expected.items():
        b = actual[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if a.dtype in FLOATS:
            nan = np.isnan(a.astype(np.float32))
            np.testing.assert_array_equal(nan, np.isnan(b.astype(np.float32)), err_msg=name)
            a, b = (np.where(nan, np.zeros((), x.dtype), x) for x in (a, b))
        np.testing.assert_array_equal(bits(a), bits(b), err_msg=name)


def checker(reference: Any, other: Any) -> Check:
    """Runs an op on two adapters, compares, and returns the outputs."""

    def check(op: str, inputs: Values, attributes: Values) -> Values:
        expected = reference.call(op, inputs, attributes)
        assert_same(expected, other.call(op, inputs, attributes))
        return expected

    return check


def normal(rng: Rng, *shape: int, dtype: Any = np.float32, spread: float = 1.0) -> np.ndarray:
    return (spread * rng.standard_normal(shape)).astype(np.float32).astype(dtype)


def random_ids(rng: Rng, t: int, k: int, e: int) -> np.ndarray:
    """Ids with more slots on low experts, some slots unused, some ids out of range."""
    ids = np.minimum(rng.geometric(1 / (1 + e / 3), (t, k)) - 1, e + 1).astype(np.int32)
    return np.where(rng.random((t, k)) < 0.1, -1, ids)


def plan_attributes(t: int, k: int, e: int, **options: Any) -> Values:
    capacity, alignment = options.get("capacity"), options.get("alignment", 1)
    rows = plan_rows(t * k, e, capacity, alignment, options.pop("max_rows", None))
    defaults = {"capacity": -1, "drop_order": "position", "alignment": 1}
    return {"num_experts": e, "num_rows": rows, **defaults, **options}
