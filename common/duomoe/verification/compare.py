# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""JAX against PyTorch, bit for bit: outputs and gradients of each op and of the MoE block."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from duomoe import library, ops
from duomoe.results import MoEParams
from duomoe.verification import inputs
from duomoe.verification.adapters import DTYPES, JaxAdapter, TorchAdapter, bits
from duomoe.verification.inputs import BlockCase, Case, Options

Adapter = JaxAdapter | TorchAdapter


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One array of JAX against the same array of torch.

    Attributes:
        op: an op of the table, or "moe".
        case: tells several calls of an op apart.
        quantity: "output NAME" or "grad NAME".
        kernel: the op of the table that computed it; empty for the block, and for a gradient that
            is zero by definition.
        shape: of the array.
        dtype: of the array.
        differing: elements whose bits differ; all of them where shapes or dtypes do.
        elements: how many there are.
        max_ulp: the largest distance in ulps of the dtype; None for integers and where it has no
            meaning.
        note: what else there is to say of a difference.
    """

    op: str
    case: str
    quantity: str
    kernel: str
    shape: tuple[int, ...]
    dtype: str
    differing: int
    elements: int
    max_ulp: int | None = None
    note: str = ""

    @property
    def identical(self) -> bool:
        """Whether every bit agrees."""
        return self.differing == 0 and not self.note

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.identical:
            return "bit-identical"
        parts = [f"{self.differing} of {self.elements} differ"]
        if self.max_ulp is not None:
            parts.append(f"by up to {self.max_ulp} ulp")
        return " ".join(parts) + (f" ({self.note})" if self.note else "")


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many floating-point numbers lie between two arrays of one dtype, element by element."""

    def rank(x: np.ndarray) -> np.ndarray:
        raw = bits(x).astype(np.int64)
        sign = np.int64(1) << (8 * x.dtype.itemsize - 1)
        return np.where(raw & sign, -(raw & (sign - 1)), raw)

    return np.abs(rank(a) - rank(b))


def compare_arrays(
    jax: np.ndarray, torch: np.ndarray, *, op: str, case: str, quantity: str, kernel: str
) -> Comparison:
    """Compare one array of each front end."""
    name, size = torch.dtype.name, max(int(torch.size), int(jax.size))

    def result(differing: int, max_ulp: int | None = None, note: str = "") -> Comparison:
        return Comparison(
            op, case, quantity, kernel, torch.shape, name, differing, size, max_ulp, note
        )

    if jax.shape != torch.shape or jax.dtype != torch.dtype:
        kinds = (f"{x.dtype.name}{list(x.shape)}" for x in (jax, torch))
        return result(size, note=" in JAX, ".join(kinds) + " in PyTorch")
    different = bits(jax) != bits(torch)
    count = int(different.sum())
    if not count or name not in ops.FLOAT_DTYPES:
        return result(count)
    nan = np.isnan(jax.astype(np.float32)) | np.isnan(torch.astype(np.float32))
    if (nan & different).any():
        return result(count, note="NaN among them")
    return result(count, int(ulp_distance(jax, torch).max()))


# -- ops -----------------------------------------------------------------------------------------


def _gradient_inputs(op: ops.Op, case: Case) -> list[str]:
    return (
        [s.name for s in op.inputs if s.is_float and s.name in case.inputs] if op.backward else []
    )


def _gradient_kernels(op: ops.Op) -> dict[str, str]:
    return {op.inputs[t].name: step.op.name for step in op.gradient_steps for t in step.targets}


def draw_cotangents(op: ops.Op, case: Case, rng: np.random.Generator) -> list[np.ndarray]:
    """Random cotangents of an op's float outputs."""
    given = [case.inputs.get(s.name) for s in op.inputs]
    results = op.infer(
        [None if x is None else x.shape for x in given],
        [None if x is None else x.dtype.name for x in given],
        case.attributes,
    )
    return [
        rng.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])
        for spec, (shape, dtype) in zip(op.outputs, results, strict=True)
        if spec.is_float
    ]


def run_op(
    adapter: Adapter, op: ops.Op, case: Case, cotangents: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Outputs and gradients of one call, by "output NAME" and "grad NAME"."""
    outputs = adapter.call(op.name, case.inputs, case.attributes)
    results = {f"output {name}": value for name, value in outputs.items()}
    names = _gradient_inputs(op, case)
    if not names:
        return results
    constants = {n: adapter.array(x) for n, x in case.inputs.items() if n not in names}

    def floats(*arrays: Any) -> list[Any]:
        given = constants | dict(zip(names, arrays, strict=True))
        produced = adapter.apply(op, [given.get(s.name) for s in op.inputs], case.attributes)
        return [o for s, o in zip(op.outputs, produced, strict=True) if s.is_float]

    _, pull = adapter.vjp(floats, *(case.inputs[n] for n in names))
    gradients = pull(*cotangents)
    return results | {f"grad {n}": g for n, g in zip(names, gradients, strict=True)}


def compare_op(
    op: ops.Op, case: Case, jax: Adapter, torch: Adapter, rng: np.random.Generator
) -> Iterator[Comparison]:
    """Compare every output and the gradient of every float input of one call."""
    cotangents = draw_cotangents(op, case, rng)
    kernels = _gradient_kernels(op)
    left, right = (run_op(a, op, case, cotangents) for a in (jax, torch))
    for quantity in left:
        kind, name = quantity.split()
        kernel = op.name if kind == "output" else kernels.get(name, "")
        yield compare_arrays(
            left[quantity],
            right[quantity],
            op=op.name,
            case=case.label,
            quantity=quantity,
            kernel=kernel,
        )


# -- block ---------------------------------------------------------------------------------------


BLOCK_OUTPUTS = ("output", "load_balancing_loss", "z_loss")


def run_block(
    adapter: Adapter, case: BlockCase, cotangents: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Outputs of `moe` and its gradients for x and every trained parameter."""
    bias = None if case.expert_bias is None else adapter.array(case.expert_bias)

    def moe(x: Any, *arrays: Any) -> Any:
        params = dict(zip(case.parameters, arrays, strict=True))
        return adapter.functions.moe(x, MoEParams(**params, expert_bias=bias), case.config)

    def floats(*arrays: Any) -> list[Any]:
        result = moe(*arrays)
        return [getattr(result, name) for name in BLOCK_OUTPUTS]

    primals = [case.x, *case.parameters.values()]
    outputs, pull = adapter.vjp(floats, *primals)
    routing = moe(*map(adapter.array, primals)).routing
    results = {f"output {n}": o for n, o in zip(BLOCK_OUTPUTS, outputs, strict=True)}
    results |= {f"output {n}": adapter.numpy(getattr(routing, n)) for n in ("indices", "weights")}
    names = ("x", *case.parameters)
    gradients = pull(*cotangents)
    return results | {f"grad {n}": g for n, g in zip(names, gradients, strict=True)}


def compare_block(
    case: BlockCase,
    adapters: dict[str, Adapter],
    torch: Adapter,
    rng: np.random.Generator,
    label: str = "",
) -> Iterator[Comparison]:
    """Compare the block of every adapter in `adapters`, by the name it is reported under."""
    cotangents = [
        rng.standard_normal(case.x.shape, dtype=np.float32).astype(case.x.dtype),
        np.array(0.01, np.float32),
        np.array(0.001, np.float32),
    ]
    expected = run_block(torch, case, cotangents)
    for name, adapter in adapters.items():
        where = ", ".join(filter(None, (label, name)))
        for quantity, value in run_block(adapter, case, cotangents).items():
            yield compare_arrays(
                value, expected[quantity], op="moe", case=where, quantity=quantity, kernel=""
            )


# -- everything ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """What `compare_all` found.

    Attributes:
        comparisons: every array that was compared.
        without_generator: ops of the table for which nobody wrote inputs: an error.
        without_kernel: ops that this build cannot run on the device, so that were not compared.
    """

    comparisons: list[Comparison]
    without_generator: list[str]
    without_kernel: list[str]

    @property
    def passed(self) -> bool:
        """Whether everything was compared and every bit agrees."""
        return not self.without_generator and all(c.identical for c in self.comparisons)


def missing_kernels(device: str) -> list[str]:
    """The ops of the table that this build cannot run on a device, forward or backward."""
    return [name for name in ops.table() if not library.has_kernel(name, device)]


def compare_all(options: Options) -> Result:
    """Compare every op of the table that is no other op's backward, then the block.

    Raises:
        ImportError: a front end or its framework is missing.
    """
    missing = set(missing_kernels(options.device))
    with on_device(options.device):
        jax, torch = JaxAdapter(), TorchAdapter(options.device)
        planner = TorchAdapter("cpu")
        comparisons: list[Comparison] = []
        without_generator: list[str] = []
        without_kernel: list[str] = []
        for op in inputs.forward_ops():
            if op.name not in inputs.GENERATORS:
                without_generator.append(op.name)
            elif {op.name, *op.backward} & missing:
                without_kernel.append(op.name)
            else:
                rng = np.random.default_rng([options.seed, *op.name.encode()])
                draw = inputs.Draw(options, rng, planner.call)
                for case in inputs.GENERATORS[op.name](draw):
                    comparisons += compare_op(op, case, jax, torch, rng)
        if missing:
            without_kernel.append("moe")
        else:
            rng = np.random.default_rng([options.seed, *b"moe"])
            block = inputs.block_case(options, rng)
            both: dict[str, Adapter] = {"eager": jax, "jit": JaxAdapter(jit=True)}
            comparisons += compare_block(block, both, torch, rng)
    return Result(comparisons, without_generator, without_kernel)


def on_device(device: str) -> contextlib.AbstractContextManager[Any]:
    """Make `device` JAX's default."""
    import jax

    return jax.default_device(jax.devices(device)[0])
