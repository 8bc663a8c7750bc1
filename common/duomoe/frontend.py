# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a framework provides to the shared functions of duomoe.functional."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from duomoe.results import Array


class FrontEnd(Protocol):
    """What a framework provides; see jax_frontend/frontend.py and torch_frontend/frontend.py."""

    def check_array(self, name: str, value: Any) -> Array:
        """`value` as an array of the framework; TypeError naming the argument if it is none."""

    def count(self, n: Any) -> Array | None:
        """A static count as float32 of rank 0, where a new static value would cost a compilation;
        None where it would not.
        """

    def check_buffer(self, name: str, value: Any) -> Any:
        """`value`, if an output may be written into it; TypeError naming the argument if not."""

    def write(self, buffer: Any, value: Array) -> Array:
        """`value` in the buffer's dtype: in the buffer itself where arrays are mutable."""

    def accumulate(self, buffer: Array, value: Array) -> Array:
        """The sum of both: in the buffer itself where arrays are mutable."""

    def read(self, name: str, x: Array) -> list[int]:
        """The integers of an array of rank 1, on the host; ValueError naming the argument where
        they are not known yet.
        """

    def dtype(self, x: Array) -> str:
        """The dtype's name, as NumPy or ml_dtypes writes it."""

    def cast(self, x: Array, dtype: str) -> Array:
        """`x` in another dtype."""

    def clip(self, x: Array, low: int, high: int) -> Array:
        """`x` limited to [low, high]."""

    def stop_gradient(self, x: Array) -> Array:
        """`x` without a gradient."""

    def call(
        self, op: str, inputs: Sequence[Array | None], attributes: Mapping[str, Any]
    ) -> tuple[Array, ...]:
        """Run an op of the table, or raise what is wrong with its inputs: TypeError naming the
        one that is no array, ValueError or TypeError on a shape or dtype.
        """

    def check_over(self, over: Any) -> None:
        """TypeError if `over` is nothing to sum over."""

    def check_device(self, op: str, arrays: Mapping[str, Array | None]) -> None:
        """TypeError naming the argument that is no array, ValueError that on another device."""

    def merge_leading(self, x: Array, kept: int) -> Array:
        """`x` with all axes but the last `kept` merged into one."""

    def fork(self, x: Array) -> tuple[Array, Array]:
        """`x` twice; the cotangents are joined by the core's `add`, in float32 and rounded once."""

    def join(self, a: Array, b: Array) -> Array:
        """The core's `add` of two tensors of rank 2; the cotangent goes to both as it is."""

    def where(self, mask: Array, a: Array, b: Array | int) -> Array:
        """Integers [T, K]: `a` for the tokens of mask[T], `b` for the others."""

    def zero(self, like: Array) -> Array:
        """A float32 0 of rank 0, where `like` is."""

    def recompute(self, f: Callable[..., Array], *arrays: Array | None) -> Array:
        """f(*arrays), keeping only the arrays for the backward pass, which runs f again."""

    def all_sum(self, x: Array, over: Any) -> Array:
        """The sum over a mesh axis (JAX) or a process group (torch); differentiable."""
