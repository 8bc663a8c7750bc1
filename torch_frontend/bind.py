# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gives every op of the table its fake kernel, gradient and vmap rule in torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from duomoe import ops

BINDING = Path(__file__).parent / "_binding.so"

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "bool": torch.bool,
}


def dtype_name(x: torch.Tensor) -> str:
    """The dtype's name without its module."""
    return str(x.dtype).removeprefix("torch.")


def overload(op: ops.Op) -> Any:
    """The torch operator of an op."""
    return getattr(torch.ops.duomoe, op.name).default


def call(
    op: ops.Op, inputs: Sequence[torch.Tensor | None], attributes: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Run an op; the result is a tuple, of one output too."""
    result = overload(op)(*inputs, *op.attribute_values(attributes))
    return result if isinstance(result, tuple) else (result,)


def _split(op: ops.Op, args: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    count = len(op.inputs)
    return args[:count], {a.name: v for a, v in zip(op.attributes, args[count:], strict=True)}


def _shapes(tensors: Sequence[torch.Tensor | None]) -> tuple[list[Any], list[str | None]]:
    return [None if t is None else t.shape for t in tensors], [
        None if t is None else dtype_name(t) for t in tensors
    ]


def _results(op: ops.Op, outputs: Sequence[torch.Tensor]) -> Any:
    return outputs[0] if len(op.outputs) == 1 else tuple(outputs)


def _register_fake(op: ops.Op) -> None:
    def fake(*args: Any) -> Any:
        tensors, attributes = _split(op, args)
        device = next(t for t in tensors if t is not None).device
        return _results(
            op,
            [
                torch.empty(shape, dtype=DTYPES[dtype], device=device)
                for shape, dtype in op.infer(*_shapes(tensors), attributes)
            ],
        )

    torch.library.register_fake(f"duomoe::{op.name}", fake)


def _register_gradient(op: ops.Op) -> None:
    steps = op.gradient_steps
    kept = sorted({source for step in steps for source in step.sources if source[0] != "grad"})

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, ctx.attributes = _split(op, inputs)
        outputs = output if isinstance(output, tuple) else (output,)
        pool = {"input": tensors, "output": outputs}
        ctx.save_for_backward(*(pool[kind][i] for kind, i in kept))
        ctx.input_dtypes = _shapes(tensors)[1]
        ctx.output_shapes = [(o.shape, o.device) for o in outputs]
        integers = [o for o, spec in zip(outputs, op.outputs, strict=True) if not spec.is_float]
        ctx.mark_non_differentiable(*integers)

    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        saved = dict(zip(kept, ctx.saved_tensors, strict=True))
        output_dtypes = _gradient_dtypes(op, ctx.attributes, ctx.input_dtypes)

        def fetch(source: tuple[str, int]) -> torch.Tensor | None:
            kind, i = source
            if kind != "grad":
                return saved[source]
            if grads[i] is not None:
                return grads[i]
            shape, device = ctx.output_shapes[i]
            return torch.zeros(shape, dtype=DTYPES[output_dtypes[i]], device=device)

        result: list[Any] = [None] * (len(op.inputs) + len(op.attributes))
        for step in steps:
            if not any(ctx.needs_input_grad[i] for i in step.targets):
                continue
            attributes = op.gradient_attributes(step, ctx.attributes, ctx.input_dtypes)
            for target, gradient in zip(
                step.targets,
                call(step.op, [fetch(s) for s in step.sources], attributes),
                strict=True,
            ):
                if ctx.needs_input_grad[target]:
                    result[target] = gradient
        return tuple(result)

    torch.library.register_autograd(f"duomoe::{op.name}", backward, setup_context=setup_context)


def _gradient_dtypes(
    op: ops.Op, attributes: dict[str, Any], input_dtypes: Sequence[str | None]
) -> list[str]:
    variables = {
        spec.dtype: dtype
        for spec, dtype in zip(op.inputs, input_dtypes, strict=True)
        if spec.dtype[0] == "<" and dtype
    }
    return [
        variables[o.dtype]
        if o.dtype[0] == "<"
        else attributes[o.dtype[1:]]
        if o.dtype[0] == "@"
        else o.dtype
        for o in op.outputs
    ]


def _register_no_gradient(op: ops.Op) -> None:
    """A backward op refuses to be differentiated, rather than count as a constant."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(ops.not_twice_differentiable(op.name))

    torch.library.register_autograd(f"duomoe::{op.name}", backward, setup_context=setup_context)


def _register_vmap(op: ops.Op) -> None:
    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        slices = [
            overload(op)(
                *(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True))
            )
            for i in range(info.batch_size)
        ]
        if len(op.outputs) == 1:
            return torch.stack(slices), 0
        return tuple(torch.stack(parts) for parts in zip(*slices, strict=True)), (0,) * len(
            op.outputs
        )

    torch.library.register_vmap(f"duomoe::{op.name}", rule)


def register() -> None:
    """Load the binding and complete its operators; called once, when torch_frontend is imported."""
    torch.ops.load_library(str(BINDING))
    for op in ops.table().values():
        _register_fake(op)
        if op.backward:
            _register_gradient(op)
        elif any(o.is_float for o in op.outputs):
            _register_no_gradient(op)
        _register_vmap(op)
