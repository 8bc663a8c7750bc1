# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gives every op of the table its fake kernel, gradient and vmap rule in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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
    "uint8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(x: torch.Tensor) -> str:
    """The dtype's name without its module."""
    return DTYPE_NAMES.get(x.dtype) or str(x.dtype).removeprefix("torch.")


def overload(name: str) -> Any:
    """The torch operator of an op."""
    return getattr(torch.ops.duomoe, name).default


def is_plain(inputs: Sequence[Any]) -> bool:
    """Whether this is an eager call on torch's own dense tensors that nothing traces or transforms,
    so that of the dispatcher's keys only autograd and the backend count.
    """
    if torch.compiler.is_compiling() or _transforming():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    for x in inputs:
        if x is None:
            continue
        if type(x) not in _PLAIN_TYPES or _dispatch_keys(x).raw_repr() not in _PLAIN_KEYS:
            return False
    return True


def _key_set(*names: str) -> Any:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys.add(getattr(torch._C.DispatchKey, name))
    return keys


_dispatch_keys = torch._C._dispatch_keys
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_CPU, _CUDA = _key_set("CPU"), _key_set("CUDA")
# Of an inference tensor and of any other. More keys: sparse, negated, a wrapper of torch.func, ...
_PLAIN_KEYS = {
    _key_set(device, f"Autocast{device}", *more).raw_repr()
    for device in ("CPU", "CUDA")
    for more in ((), ("ADInplaceOrView", f"Autograd{device}"))
}


def run(
    op: ops.Op, inputs: Sequence[torch.Tensor | None], values: tuple[Any, ...]
) -> tuple[torch.Tensor, ...]:
    """Run an op where `is_plain`; `values` are its attributes in the table's order.

    Past the dispatcher's autograd kernel, which torch.library writes in Python and which costs a
    small call more than all the rest: here it is an autograd.Function with the same rules.
    """
    result: Any
    if torch.is_grad_enabled():
        for x in inputs:
            if x is not None and x.requires_grad:
                result = _eager_function(op.name)(values, *inputs)
                return result if isinstance(result, tuple) else (result,)
    result = _backend_call(op.name)(*inputs, *values)
    return result if isinstance(result, tuple) else (result,)


@functools.cache
def _backend_call(name: str) -> Callable[..., Any]:
    """An operator's kernel for the device of its arguments, where `is_plain`."""
    operator = overload(name)
    redispatch = operator._handle.redispatch_boxed
    count = len(ops.table()[name].inputs)

    def call(*args: Any) -> Any:
        # A redispatch is nothing that a profiler or a torch function mode sees.
        if torch._C._autograd._profiler_enabled() or torch._C._len_torch_function_stack():
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*args)
        for x in args[:count]:
            if x is not None and x.is_cuda:
                return redispatch(_CUDA, *args)
        return redispatch(_CPU, *args)

    return call


def call(
    op: ops.Op, inputs: Sequence[torch.Tensor | None], attributes: Mapping[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Run an op; the result is a tuple, of one output too."""
    if is_plain(inputs):
        return run(op, inputs, op.plain_values(attributes))
    if not transforming():
        return _call_operator(op, inputs, attributes)
    result = _function(op.name).apply(*inputs, *op.attribute_values(attributes))
    return result if isinstance(result, tuple) else (result,)


def _call_operator(
    op: ops.Op, inputs: Sequence[torch.Tensor | None], attributes: Mapping[str, Any]
) -> tuple[torch.Tensor, ...]:
    result = overload(op.name)(*inputs, *op.attribute_values(attributes))
    return result if isinstance(result, tuple) else (result,)


def transforming() -> bool:
    """Inside torch.func's transforms or forward-mode AD.

    What torch.library.register_autograd makes does not work under torch.func, and drops tangents
    without an error; there an op is called as an autograd.Function with the same rules.
    """
    return not torch.compiler.is_compiling() and _transforming()


def _transforming() -> bool:
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


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


SetupContext = Callable[[Any, tuple[Any, ...], Any], None]
Gradients = Callable[..., Any]  # of the context, which inputs need one, and the cotangents


def _gradient_rules(op: ops.Op) -> tuple[SetupContext, Gradients]:
    """setup_context and gradients of an op with a gradient."""
    integers = [i for i, spec in enumerate(op.outputs) if not spec.is_float]
    names = [a.name for a in op.attributes]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = inputs[: len(op.inputs)]
        outputs = output if isinstance(output, tuple) else (output,)
        pool = {"input": tensors, "output": outputs}
        ctx.plan = plan = op.gradient_plan(tuple([t is not None for t in tensors]))
        ctx.save_for_backward(*[pool[kind][i] for kind, i in plan.residuals])
        ctx.attributes = inputs[len(op.inputs) :]
        ctx.input_kinds = [None if t is None else (t.shape, t.dtype) for t in tensors]
        of_output = [(i, outputs[i]) for i in plan.cotangents]
        ctx.output_kinds = {i: (o.shape, o.dtype, o.device) for i, o in of_output}
        ctx.mark_non_differentiable(*[outputs[i] for i in integers])
        # No zeros for integer outputs, nor for float ones that nobody used: `backward` makes those.
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, needed: Sequence[bool], *grads: torch.Tensor | None) -> tuple[Any, ...]:
        saved = dict(zip(ctx.plan.residuals, ctx.saved_tensors, strict=True))

        def fetch(source: tuple[str, int]) -> torch.Tensor | None:
            kind, i = source
            if kind != "grad":
                return saved[source]
            if grads[i] is not None:
                return grads[i]
            shape, dtype, device = ctx.output_kinds[i]
            return torch.zeros(shape, dtype=dtype, device=device)

        attributes = dict(zip(names, ctx.attributes, strict=True))
        dtypes = [None if kind is None else DTYPE_NAMES[kind[1]] for kind in ctx.input_kinds]
        result: list[Any] = [None] * (len(op.inputs) + len(op.attributes))
        for step in ctx.plan.steps:
            if not any(needed[i] for i in step.targets):
                continue
            options = op.gradient_attributes(step, attributes, dtypes)
            found = call(step.op, [fetch(s) for s in step.sources], options)
            for target, gradient in zip(step.targets, found, strict=True):
                if needed[target]:
                    shape = ctx.input_kinds[target][0]
                    lacks_axes = gradient.dim() != len(shape)
                    result[target] = gradient.expand(shape) if lacks_axes else gradient
        return tuple(result)

    return setup_context, gradients


def _refusing_rules(op: ops.Op) -> tuple[SetupContext, Gradients]:
    """Those of an op without a gradient: it refuses, rather than count as a constant."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        integers = [o for o, spec in zip(outputs, op.outputs, strict=True) if not spec.is_float]
        ctx.mark_non_differentiable(*integers)

    def gradients(ctx: Any, needed: Sequence[bool], *grads: Any) -> Any:
        raise RuntimeError(ops.not_twice_differentiable(op.name))

    return setup_context, gradients


def _rules(op: ops.Op) -> tuple[SetupContext, Gradients]:
    return _gradient_rules(op) if op.backward else _refusing_rules(op)


def _dispatcher_rules(op: ops.Op) -> tuple[SetupContext, Callable[..., Any]]:
    """setup_context and backward, for a function of the inputs and attributes one by one."""
    setup_context, gradients = _rules(op)

    def backward(ctx: Any, *grads: Any) -> Any:
        return gradients(ctx, ctx.needs_input_grad, *grads)

    return setup_context, backward


def _vmap_rule(op: ops.Op, run: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., Any]:
    """One call of `run` per slice."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        def slice_of(i: int) -> tuple[Sequence[Any], dict[str, Any]]:
            return _split(
                op,
                [a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)],
            )

        if info.batch_size == 0:
            tensors, attributes = _split(op, args)
            shapes, dtypes = _shapes(tensors)
            for i, d in enumerate(in_dims[: len(tensors)]):
                if d is not None:
                    shapes[i] = [n for axis, n in enumerate(shapes[i]) if axis != d]
            device = next(t for t in tensors if t is not None).device
            outputs = [
                torch.empty((0, *shape), dtype=DTYPES[dtype], device=device)
                for shape, dtype in op.infer(shapes, dtypes, attributes)
            ]
        else:
            results = [run(op, *slice_of(i)) for i in range(info.batch_size)]
            outputs = [torch.stack(parts) for parts in zip(*results, strict=True)]
        return _results(op, outputs), 0 if len(outputs) == 1 else (0,) * len(outputs)

    return rule


@functools.cache
def _eager_function(name: str) -> Callable[..., Any]:
    """The `apply` of an op's autograd.Function for `run`; one whose forward pass takes the context,
    so that torch looks at no signature, and all attributes as one argument.
    """
    setup_context, gradients = _rules(ops.table()[name])
    run_backend = _backend_call(name)
    count = len(ops.table()[name].inputs)

    def forward(ctx: Any, values: tuple[Any, ...], *inputs: Any) -> Any:
        args = inputs + values
        output = run_backend(*args)
        setup_context(ctx, args, output)
        return output

    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *gradients(ctx, ctx.needs_input_grad[1:], *grads)[:count])

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return plain_apply(type(name, (torch.autograd.Function,), members))


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its Python part, which looks for torch.func's wrappers."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


@functools.cache
def _function(name: str) -> type[torch.autograd.Function]:
    """An op as an autograd.Function that torch.func can transform."""
    op = ops.table()[name]
    setup_context, backward = _dispatcher_rules(op)

    def forward(*args: Any) -> Any:
        return overload(name)(*args)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(f"duomoe: {name} has no forward-mode derivative")

    members = {
        "forward": forward,
        "setup_context": setup_context,
        "backward": backward,
        "jvp": jvp,
        "vmap": _vmap_rule(op, call),
    }
    return type(name, (torch.autograd.Function,), {k: staticmethod(v) for k, v in members.items()})


def register() -> None:
    """Load the binding and complete its operators; called once, when torch_frontend is imported."""
    torch.ops.load_library(str(BINDING))
    for op in ops.table().values():
        qualified = f"duomoe::{op.name}"
        _register_fake(op)
        if any(o.is_float for o in op.outputs):
            setup_context, backward = _dispatcher_rules(op)
            torch.library.register_autograd(qualified, backward, setup_context=setup_context)
        torch.library.register_vmap(qualified, _vmap_rule(op, _call_operator))
