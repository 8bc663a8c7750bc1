# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs drawn calls on a target, a front end on a device: the same bits as the CPU core."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from adapters import JaxAdapter, TorchAdapter
from cuda_checks import MARKS, Values, assert_same
from cuda_draws import Call, Choice
from duomoe import ops

# "cpu" keeps the draws valid where there is no GPU, and compares views at odd addresses there.
TARGETS = [
    pytest.param("cpu", marks=pytest.mark.torch),
    pytest.param("cuda", marks=MARKS),
    pytest.param("jax", marks=[*MARKS, pytest.mark.jax]),
]


def laid_out(adapter: TorchAdapter, x: np.ndarray, place: str) -> Any:
    """The tensor of the same values, but another layout in memory.

    "odd" starts at any element of a buffer and ends with it; "columns" are some of a wider matrix;
    what NumPy broadcasts is expanded in torch too.
    """
    if x.size and 0 in x.strides and x.shape != (1,) * x.ndim:
        part = x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.strides)]
        return adapter.array(part).expand(x.shape)
    tensor = adapter.array(x)
    if place == "odd":
        start = 1 + x.size % 7
        return tensor.new_zeros(start + x.size)[start:].view(x.shape).copy_(tensor)
    if place == "columns" and x.ndim:
        wide = tensor.new_zeros((*x.shape[:-1], x.shape[-1] + 3))
        return wide[..., 2:-1].copy_(tensor)
    if place == "transposed" and x.ndim == 2:
        return tensor.mT.contiguous().mT
    return tensor


class Target:
    """A front end on a device, and the CPU core to compare it with."""

    def __init__(self, name: str) -> None:
        self.cpu = TorchAdapter("cpu")
        self.adapter: Any = self.cpu if name == "cpu" else None
        if name == "cuda":
            self.adapter = TorchAdapter("cuda")
        elif name == "jax":
            jax = pytest.importorskip("jax", reason="JAX is not installed")
            if jax.default_backend() != "gpu":
                pytest.skip("JAX sees no GPU, or DUOMOE_TEST_DEVICE is not cuda")
            self.adapter = JaxAdapter()

    def run(self, call: Call) -> Values:
        """The outputs on the target."""
        if isinstance(self.adapter, JaxAdapter):
            return self.adapter.call(call.op, call.inputs, call.attributes)
        spec, lay = ops.table()[call.op], laid_out
        tensors = [
            None if x is None else lay(self.adapter, x, call.places.get(s.name, "plain"))
            for s, x in ((s, call.inputs.get(s.name)) for s in spec.inputs)
        ]
        outputs = self.adapter.apply(spec, tensors, call.attributes)
        return {s.name: self.adapter.numpy(o) for s, o in zip(spec.outputs, outputs, strict=True)}

    def check(self, call: Call) -> Values:
        """The CPU core's outputs, which the target's equal."""
        expected = self.cpu.call(call.op, call.inputs, call.attributes)
        try:
            assert_same(expected, self.run(call))
        except AssertionError as error:
            shapes = {n: x.shape for n, x in call.inputs.items() if x is not None}
            message = f"{call.op} {shapes} {call.attributes} {call.places}: {str(error)[:600]}"
            raise AssertionError(message) from None
        return expected


def check_all(choices: Iterable[Choice], check: Callable[[Choice], None]) -> None:
    """Checks every choice, and fails with how many of them failed and the first few in full."""
    failures, count = [], 0
    for choice in choices:
        count += 1
        try:
            check(choice)
        except AssertionError as error:
            failures.append(f"{choice}\n{error}")
        except Exception as error:
            error.add_note(f"drawn from {choice}")
            raise
    if failures:
        shown = "\n\n".join(failures[:4])
        pytest.fail(f"{len(failures)} of {count} draws differ:\n{shown}", pytrace=False)
