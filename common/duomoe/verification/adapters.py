# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""One face for both front ends: what is written once in NumPy arrays runs on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from duomoe import ops

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    "float32": np.dtype("float32"),
    "bfloat16": BFLOAT16,
    "float16": np.dtype("float16"),
    "int32": np.dtype("int32"),
    "bool": np.dtype("bool"),
    "uint8": np.dtype("uint8"),
}


class Adapter:
    """What both adapters share."""

    def array(self, x: np.ndarray) -> Any:
        """The framework's array of the same bits."""
        raise NotImplementedError

    def numpy(self, x: Any) -> np.ndarray:
        """The NumPy array of the same bits."""
        raise NotImplementedError

    def apply(
        self, op: ops.Op, arrays: Sequence[Any], attributes: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Run an op on the framework's own arrays, differentiably."""
        raise NotImplementedError

    def call(
        self, op: str, inputs: Mapping[str, np.ndarray | None], attributes: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Run an op of the table by name; inputs left out are absent."""
        spec = ops.table()[op]
        given = [inputs.get(s.name) for s in spec.inputs]
        arrays = [None if x is None else self.array(x) for x in given]
        outputs = self.apply(spec, arrays, attributes)
        return {s.name: self.numpy(o) for s, o in zip(spec.outputs, outputs, strict=True)}


class JaxAdapter(Adapter):
    """The JAX front end on its default device, or on the one given."""

    name = "jax"

    def __init__(self, jit: bool = False) -> None:
        import jax

        import jax_frontend
        from jax_frontend import transforms

        self._jax, self.functions, self._transforms, self._jit = jax, jax_frontend, transforms, jit

    def array(self, x: np.ndarray) -> Any:
        return self._jax.numpy.asarray(x)

    def numpy(self, x: Any) -> np.ndarray:
        return np.asarray(x)

    def apply(
        self, op: ops.Op, arrays: Sequence[Any], attributes: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Run an op on the framework's own arrays, differentiably."""
        return self._transforms.call(op, arrays, attributes)

    def vjp(
        self, f: Callable[..., Sequence[Any]], *primals: np.ndarray
    ) -> tuple[list[np.ndarray], Callable[..., list[np.ndarray]]]:
        """Outputs of f and the function from cotangents to gradients. f returns float arrays."""
        wrapped = (
            (lambda *a: tuple(f(*a))) if not self._jit else self._jax.jit(lambda *a: tuple(f(*a)))
        )
        outputs, pull = self._jax.vjp(wrapped, *map(self.array, primals))
        return [self.numpy(o) for o in outputs], lambda *g: [
            self.numpy(x) for x in pull(tuple(map(self.array, g)))
        ]


class TorchAdapter(Adapter):
    """The torch front end on one device."""

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        import torch

        import torch_frontend
        from torch_frontend import bind

        self._torch, self.functions, self._bind, self.device = torch, torch_frontend, bind, device

    def array(self, x: np.ndarray) -> Any:
        x = np.array(x)  # torch wants it writable
        if x.dtype == BFLOAT16:
            return (
                self._torch.from_numpy(x.view(np.int16)).view(self._torch.bfloat16).to(self.device)
            )
        return self._torch.from_numpy(x).to(self.device)

    def numpy(self, x: Any) -> np.ndarray:
        x = x.detach().cpu()
        if x.dtype == self._torch.bfloat16:
            return x.contiguous().view(self._torch.int16).numpy().view(BFLOAT16)
        return x.numpy()

    def apply(
        self, op: ops.Op, arrays: Sequence[Any], attributes: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Run an op on the framework's own arrays, differentiably."""
        return self._bind.call(op, arrays, dict(attributes))

    def vjp(
        self, f: Callable[..., Sequence[Any]], *primals: np.ndarray
    ) -> tuple[list[np.ndarray], Callable[..., list[np.ndarray]]]:
        leaves = [self.array(p).requires_grad_() for p in primals]
        outputs = tuple(f(*leaves))

        def pull(*cotangents: np.ndarray) -> list[np.ndarray]:
            grads = self._torch.autograd.grad(
                outputs,
                leaves,
                [self.array(c) for c in cotangents],
                allow_unused=True,
                retain_graph=True,
            )
            return [
                np.zeros(p.shape, p.dtype) if g is None else self.numpy(g)
                for g, p in zip(grads, primals, strict=True)
            ]

        return [self.numpy(o) for o in outputs], pull


def bits(x: np.ndarray) -> np.ndarray:
    """An array's bits, for comparisons in which NaN equals NaN and -0 differs from 0."""
    x = np.ascontiguousarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])
