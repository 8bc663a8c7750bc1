# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the experts compute, and sums of two tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from duomoe.oracle.float64 import Array, Outputs, f64


def expert_rows(expert_offsets: Array, expert_counts: Array) -> Iterator[tuple[int, slice]]:
    """(expert, the slice of R that holds its rows)."""
    for e, count in enumerate(expert_counts):
        yield e, slice(expert_offsets[e], expert_offsets[e] + count)


def grouped_matmul(
    *,
    rows: Array,
    w: Array,
    expert_offsets: Array,
    expert_counts: Array,
    bias: Array | None = None,
    out_dtype: str,
) -> Outputs:
    """rows[R,D], w[E,D,N], bias[E,N] -> out[R,N]."""
    out = np.zeros((rows.shape[0], w.shape[2]))
    for e, block in expert_rows(expert_offsets, expert_counts):
        out[block] = f64(rows[block]) @ f64(w[e])
        if bias is not None:
            out[block] += f64(bias[e])
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


def grouped_matmul_bwd_bias(
    *, grad_out: Array, expert_offsets: Array, expert_counts: Array, bias_dtype: str
) -> Outputs:
    """grad_out[R,N] -> grad_bias[E,N]."""
    grad_bias = np.zeros((len(expert_counts), grad_out.shape[1]))
    for e, block in expert_rows(expert_offsets, expert_counts):
        grad_bias[e] = f64(grad_out[block]).sum(axis=0)
    return {"grad_bias": grad_bias}


def activation_of(name: str, x: Array, alpha: float) -> tuple[Array, Array]:
    """f(x) and f'(x), any shape."""
    if name in ("silu", "gelu_tanh"):
        # x sigmoid(v) with slope sigmoid(v) + x v' sigmoid(v) sigmoid(-v)
        if name == "silu":
            v, slope = alpha * x, np.full(x.shape, alpha)
        else:
            v = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
            slope = 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
        below, above = np.exp(-np.logaddexp(0, -v)), np.exp(-np.logaddexp(0, v))
        return x * below, below + x * slope * below * above
    if name == "gelu":
        phi = np.vectorize(lambda z: math.erfc(-z / math.sqrt(2)) / 2, otypes=[float])(x)
        return x * phi, phi + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    positive = np.where(x <= 0, 0.0, x)  # or NaN
    if name == "relu":
        return positive, np.where(np.isnan(x), x, np.sign(positive))
    return positive**2, 2 * positive


def activate(*, x: Array, activation: str, alpha: float) -> Outputs:
    """x[R,F] -> out[R,F]."""
    return {"out": activation_of(activation, f64(x), alpha)[0]}


def activate_bwd(*, grad_out: Array, x: Array, activation: str, alpha: float) -> Outputs:
    """grad_out[R,F], x[R,F] -> grad_x[R,F]."""
    return {"grad_x": f64(grad_out) * activation_of(activation, f64(x), alpha)[1]}


def glu(
    *, gate: Array, up: Array, activation: str, alpha: float, limit: float, up_offset: float
) -> Outputs:
    """gate[R,F], up[R,F] -> out[R,F]."""
    bound = limit if limit > 0 else np.inf
    value, _ = activation_of(activation, np.minimum(f64(gate), bound), alpha)
    return {"out": value * (np.clip(f64(up), -bound, bound) + up_offset)}


def glu_bwd(
    *,
    grad_out: Array,
    gate: Array,
    up: Array,
    activation: str,
    alpha: float,
    limit: float,
    up_offset: float,
) -> Outputs:
    """grad_out[R,F], gate[R,F], up[R,F] -> grad_gate[R,F], grad_up[R,F]."""
    bound = limit if limit > 0 else np.inf
    g, u, d = f64(gate), f64(up), f64(grad_out)
    value, slope = activation_of(activation, np.minimum(g, bound), alpha)
    factor = np.clip(u, -bound, bound) + up_offset
    return {
        "grad_gate": np.where(g > bound, 0.0, d * factor * slope),
        "grad_up": np.where(np.abs(u) > bound, 0.0, d * value),
    }


def scale_rows(*, x: Array, scale: Array) -> Outputs:
    """x[T,D], scale[T] -> y[T,D]."""
    return {"y": f64(scale)[:, None] * f64(x)}


def scale_rows_bwd(*, grad_y: Array, x: Array, scale: Array) -> Outputs:
    """grad_y[T,D], x[T,D], scale[T] -> grad_x[T,D], grad_scale[T]."""
    return {
        "grad_x": f64(scale)[:, None] * f64(grad_y),
        "grad_scale": (f64(x) * f64(grad_y)).sum(axis=1),
    }


def add(*, a: Array, b: Array) -> Outputs:
    """a[R,D] + b[R,D] -> out[R,D]."""
    return {"out": f64(a) + f64(b)}
