# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What all stages of the oracle share: its array types and the way into float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np

Array = np.ndarray
Outputs = dict[str, Array]


def f64(x: Array) -> Array:
    """`x` as float64."""
    return np.asarray(x).astype(np.float64)


def rounded(x: Array, dtype: str) -> Array:
    """`x` rounded to `dtype`, as float64."""
    return f64(np.asarray(x).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
