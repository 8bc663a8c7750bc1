# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the experts compute, and the sum that joins cotangents."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from duomoe.oracle.float64 import Array, Outputs, f64


def expert_rows(expert_offsets: Array, expert_counts: Array) -> Iterator[tuple[int, slice]]:
    """(expert, the slice of R that holds its rows)."""
    for e, count in enumerate(expert_counts):
        yield e, slice(expert_offsets[e], expert_offsets[e] + count)


def grouped_matmul(
    *, rows: Array, w: Array, expert_offsets: Array, expert_counts: Array, out_dtype: str
) -> Outputs:
    """rows[R,D], w[E,D,N] -> out[R,N]."""
    out = np.zeros((rows.shape[0], w.shape[2]))
    for e, block in expert_rows(expert_offsets, expert_counts):
        out[block] = f64(rows[block]) @ f64(w[e])
    return {"out": out}


def grouped_matmul_bwd_rows(
    *, grad_out: Array, w: Array, expert_offsets: Array, expert_counts: Array, rows_dtype: str
) -> Outputs:
    """grad_out[R,N], w[E,D,N] -> grad_rows[R,D]."""
    grad_rows = np.zeros((grad_out.shape[0], w.shape[1]))
    for e, block in expert_rows(expert_offsets, expert_counts):
        grad_rows[block] = f64(grad_out[block]) @ f64(w[e]).T
    return {"grad_rows": grad_rows}


def grouped_matmul_bwd_w(
    *, rows: Array, grad_out: Array, expert_offsets: Array, expert_counts: Array, w_dtype: str
) -> Outputs:
    """rows[R,D], grad_out[R,N] -> grad_w[E,D,N]."""
    grad_w = np.zeros((len(expert_counts), rows.shape[1], grad_out.shape[1]))
    for e, block in expert_rows(expert_offsets, expert_counts):
        grad_w[e] = f64(rows[block]).T @ f64(grad_out[block])
    return {"grad_w": grad_w}


def silu(x: Array) -> Array:
    """The product of x and sigmoid(x), any shape."""
    return x * np.exp(-np.logaddexp(0, -x))


def swiglu(*, gate: Array, up: Array) -> Outputs:
    """gate[R,F], up[R,F] -> out[R,F]."""
    return {"out": silu(f64(gate)) * f64(up)}


def swiglu_bwd(*, grad_out: Array, gate: Array, up: Array) -> Outputs:
    """grad_out[R,F], gate[R,F], up[R,F] -> grad_gate[R,F], grad_up[R,F]."""
    g, x = f64(grad_out), f64(gate)
    sigmoid, one_minus_sigmoid = np.exp(-np.logaddexp(0, -x)), np.exp(-np.logaddexp(0, x))
    slope = sigmoid + x * sigmoid * one_minus_sigmoid
    return {"grad_gate": g * f64(up) * slope, "grad_up": g * silu(x)}


def add(*, a: Array, b: Array) -> Outputs:
    """a[R,D] + b[R,D] -> out[R,D]."""
    return {"out": f64(a) + f64(b)}
