# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the shared functions need of JAX (duomoe.frontend.FrontEnd)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from duomoe import library, ops

from jax_frontend import _binding, transforms


def register() -> None:
    """Register the FFI handlers; called once, when jax_frontend is imported."""
    for name, (cpu, cuda, cuda_scratch) in _binding.handlers().items():
        targets = {False: cuda, True: cuda_scratch}
        for scratch, on_cuda in targets.items():
            target = transforms.target_name(ops.table()[name], scratch)
            jax.ffi.register_ffi_target(target, cpu, platform="cpu")
            if library.has_kernel(name, "cuda"):
                jax.ffi.register_ffi_target(target, on_cuda, platform="CUDA")


class JaxFrontEnd:
    """The JAX side of duomoe.functional."""

    def check_array(self, name: str, value: Any) -> Any:
        """`value`, if it is a JAX or NumPy array."""
        if isinstance(value, np.generic):  # what NumPy makes of an array of rank 0
            value = np.asarray(value)
        if not isinstance(value, (jax.Array, np.ndarray)):
            raise TypeError(f"{name} must be a jax.Array, got {type(value).__name__}")
        # NumPy arrays as they are: their own dtype is checked, not the one JAX would make of it.
        return value

    def count(self, n: Any) -> Any:
        """A static count, or a symbolic one of jax.export, as float32 of rank 0."""
        return np.asarray(n, np.float32) if isinstance(n, int) else jnp.asarray(n, jnp.float32)

    def check_buffer(self, name: str, value: Any) -> Any:
        """`value`, if it has a shape and a dtype; arrays are immutable, so only these count."""
        if not isinstance(value, jax.ShapeDtypeStruct):
            value = self.check_array(name, value)
        if jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
            raise TypeError(f"{name} of {value.dtype.name} needs jax_enable_x64")
        return value

    def write(self, buffer: Any, value: jax.Array) -> jax.Array:
        """`value` in the buffer's dtype."""
        return value.astype(buffer.dtype)

    def accumulate(self, buffer: jax.Array, value: jax.Array) -> jax.Array:
        """The sum of both."""
        return jnp.add(buffer, value)

    def read(self, name: str, x: Any) -> list[int]:
        """The integers of an array of rank 1."""
        try:
            return np.asarray(x).tolist()
        except jax.errors.TracerArrayConversionError:
            raise ValueError(
                f"{name} must be known while JAX traces the call: the number of rows follows from "
                "it; or give num_out_tokens"
            ) from None

    def dtype(self, x: jax.Array) -> str:
        """The dtype's name."""
        return x.dtype.name

    def cast(self, x: jax.Array, dtype: str) -> jax.Array:
        """`x` in another dtype, or what JAX makes of it without x64."""
        return x.astype(jax.dtypes.canonicalize_dtype(dtype))

    def clip(self, x: jax.Array, low: int, high: int) -> jax.Array:
        """`x` limited to [low, high]."""
        # Without x64 JAX would keep the low 32 bits of NumPy's int64.
        return np.clip(x, low, high) if isinstance(x, np.ndarray) else jnp.clip(x, low, high)

    def stop_gradient(self, x: jax.Array) -> jax.Array:
        """`x` without a gradient."""
        return x if isinstance(x, np.ndarray) else jax.lax.stop_gradient(x)

    def merge_leading(self, x: jax.Array, kept: int) -> jax.Array:
        """`x` with all axes but the last `kept` merged into one."""
        return transforms.merge_leading(x, kept)

    def call(
        self, op: str, inputs: Sequence[jax.Array | None], attributes: Mapping[str, Any]
    ) -> tuple[jax.Array, ...]:
        """Check the arguments, then run the op."""
        spec = ops.table()[op]
        inputs = [
            None if x is None else self.check_array(f"{op}: {s.name}", x)
            for s, x in zip(spec.inputs, inputs, strict=True)
        ]
        shapes = [None if x is None else x.shape for x in inputs]
        dtypes = [None if x is None else x.dtype.name for x in inputs]
        spec.bind(shapes, dtypes, attributes)
        return transforms.call(spec, inputs, attributes)

    def check_over(self, over: Any) -> None:
        """Psum itself says what is wrong with a name, while it traces."""

    def check_device(self, op: str, arrays: Mapping[str, jax.Array | None]) -> None:
        """TypeError naming the argument that is no array; JAX checks the devices itself, before a
        call runs.
        """
        for name, x in arrays.items():
            if x is not None and not isinstance(x, jax.ShapeDtypeStruct):  # what a buffer may be
                self.check_array(name, x)

    def fork(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`x` twice, its cotangents joined by the core."""
        return transforms.fork(x)

    def join(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The core's sum of two tensors."""
        return transforms.join(a, b)

    def where(self, mask: jax.Array, a: jax.Array, b: Any) -> jax.Array:
        """`a` for the tokens of mask[T], `b` for the others."""
        return jnp.where(mask[:, None], a, b)

    def zero(self, like: jax.Array) -> jax.Array:
        """A float32 0 of rank 0."""
        return jnp.zeros((), jnp.float32)

    def recompute(self, f: Callable[..., jax.Array], *arrays: jax.Array | None) -> jax.Array:
        """f(*arrays), run again by the backward pass."""
        return jax.checkpoint(f)(*arrays)

    def all_sum(self, x: jax.Array, over: Any) -> jax.Array:
        """The sum over mesh axes, inside shard_map."""
        return transforms.all_sum(x, over)
