# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""A float64 model of Transformer Engine's permutation: lists of (row, token, column) moves.

Column is the expert of a mask, or the slot of an index map. Numbers and gradients follow from the
moves alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from adapters import DTYPES, bits

# Half an ulp of the result's type, relative; what is smaller than its smallest number; and, of the
# sum of absolute values, what a float32 sum of a few hundred terms may lose.
HALF_ULP = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}
SUM_ERROR = 2.0**-19

# Sizes of the inputs that are drawn for all functions together.
T, E, K, D = 12, 6, 2, 5
ROWS = T * K
NAMES = ("x", "p", "w", "ids", "mask", "sizes", "order")


def drawn(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Inputs of every function, by name."""
    ids = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype("i4")
    return {
        "x": rng.normal(size=(T, D)).astype("f4"),
        "p": rng.normal(size=(T, E)).astype("f4"),
        "w": rng.normal(size=(T, K)).astype("f4"),
        "ids": ids,
        "mask": (ids[..., None] == np.arange(E)).any(axis=1),
        "sizes": np.array([3, 4, 0, 5], "i4"),
        "order": np.array([2, 3, 0, 1], "i4"),
    }


@dataclasses.dataclass(frozen=True)
class Moves:
    """Which rows hold which tokens, and at which column of [T, columns] their probability lies."""

    rows: np.ndarray
    tokens: np.ndarray
    columns: np.ndarray
    shape: tuple[int, int, int]  # R, T, columns

    @classmethod
    def of(cls, moves: list[tuple[int, int, int]], shape: tuple[int, int, int]) -> Moves:
        table = np.array(moves, int).reshape(-1, 3)
        return cls(table[:, 0], table[:, 1], table[:, 2], shape)

    def spread(self, x: np.ndarray) -> np.ndarray:
        """x[T, D] -> rows[R, D]."""
        rows = np.zeros((self.shape[0], x.shape[1]))
        rows[self.rows] = x[self.tokens]
        return rows

    def collect(self, rows: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """rows[R, D], weights[T, columns] -> y[T, D]."""
        y = np.zeros((self.shape[1], rows.shape[1]))
        factors = 1.0 if weights is None else weights[self.tokens, self.columns][:, None]
        np.add.at(y, self.tokens, factors * rows[self.rows])
        return y

    def pick(self, probs: np.ndarray) -> np.ndarray:
        """probs[T, columns] -> [R]."""
        picked = np.zeros(self.shape[0])
        picked[self.rows] = probs[self.tokens, self.columns]
        return picked

    def place(self, values: np.ndarray) -> np.ndarray:
        """[R] -> [T, columns], the transpose of `pick`."""
        probs = np.zeros(self.shape[1:])
        probs[self.tokens, self.columns] = values[self.rows]
        return probs

    def collect_gradients(
        self, grad: np.ndarray, rows: np.ndarray, weights: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Gradients of `collect` to rows and weights."""
        factors = 1.0 if weights is None else weights[self.tokens, self.columns][:, None]
        grad_rows, grad_weights = np.zeros(rows.shape), np.zeros(self.shape[1:])
        grad_rows[self.rows] = factors * grad[self.tokens]
        dots = (grad[self.tokens] * rows[self.rows]).sum(axis=1)
        grad_weights[self.tokens, self.columns] = dots
        return grad_rows, grad_weights


def mask_moves(
    mask: np.ndarray, limit: int | None = None, align: int = 1, rows: int | None = None
) -> Moves:
    """By expert, then token; the first `limit`; every expert's rows padded to `align`."""
    pairs = [(int(t), int(e)) for e in range(mask.shape[1]) for t in np.flatnonzero(mask[:, e])]
    pairs = pairs[:limit]
    moves, row = [], 0
    for e in range(mask.shape[1]):
        mine = [t for t, f in pairs if f == e]
        moves += [(row + i, t, e) for i, t in enumerate(mine)]
        row += -(-len(mine) // align) * align
    if rows is None:
        rows = row if limit is None else limit
    return Moves.of(moves, (rows, *mask.shape))


def index_moves(ids: np.ndarray, rows: int | None = None) -> Moves:
    """By id, then token, then slot; negative ids have no row."""
    slots = [s for s in np.argsort(ids.reshape(-1), kind="stable") if ids.reshape(-1)[s] >= 0]
    rows = ids.size if rows is None else rows
    moves = [(r, int(s) // ids.shape[1], int(s) % ids.shape[1]) for r, s in enumerate(slots[:rows])]
    return Moves.of(moves, (rows, *ids.shape))


def chunk_moves(sizes: np.ndarray, order: np.ndarray, tokens: int) -> Moves:
    begin = np.concatenate([[0], np.cumsum(sizes)])
    source = [t for c in order for t in range(begin[c], begin[c + 1])]
    return Moves.of([(r, t, 0) for r, t in enumerate(source)], (tokens, tokens, 1))


def assert_near(got: np.ndarray, want: np.ndarray, magnitude: np.ndarray | None = None) -> None:
    """One rounding from `want`; with `magnitude`, the sum of the absolute terms, a float32 sum
    before it.
    """
    assert got.shape == want.shape, (got.shape, want.shape)
    kind = got.dtype.name
    error = np.abs(got.astype("f8") - want)
    allowed = HALF_ULP[kind] * np.abs(want) * 1.01 + SMALLEST[kind] / 2
    if magnitude is not None:
        allowed = allowed + SUM_ERROR * magnitude
    assert (error <= allowed).all(), (error - allowed).max()


def f8(*arrays: Any) -> list[np.ndarray]:
    return [np.asarray(a).astype("f8") for a in arrays]


def normal(rng: Any, *shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.normal(size=shape).astype("f4").astype(DTYPES[dtype])


class Run:
    """A function on one front end: outputs, gradients for random cotangents, and other results."""

    def __init__(
        self,
        adapter: Any,
        f: Callable[..., tuple[Sequence[Any], Sequence[Any]]],
        primals: Sequence[np.ndarray],
        seed: int = 0,
    ) -> None:
        others: list[Any] = []

        def floats(*p: Any) -> Sequence[Any]:
            outputs, rest = f(*p)
            others[:] = rest
            return outputs

        self.outputs, pull = adapter.vjp(floats, *primals)
        rng = np.random.default_rng(seed)
        self.cotangents = [normal(rng, *o.shape).astype(o.dtype) for o in self.outputs]
        self.gradients = pull(*self.cotangents)
        self.others = [adapter.numpy(x) for x in others]
        for gradient, primal in zip(self.gradients, primals, strict=True):
            assert (gradient.dtype, gradient.shape) == (primal.dtype, primal.shape)


RECORDED: dict[str, tuple[str, list[np.ndarray]]] = {}


def same_on_both(request: Any, adapter: Any, *runs: Run) -> None:
    """JAX and torch give the same bits: a test's second front end is compared to its first."""
    name = request.node.nodeid.replace(adapter.name, "")
    got = [a for run in runs for a in (*run.outputs, *run.gradients, *run.others)]
    first, want = RECORDED.setdefault(name, (adapter.name, got))
    if first == adapter.name:
        return
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))
