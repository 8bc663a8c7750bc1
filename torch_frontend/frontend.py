# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the shared functions need of torch (duomoe.frontend.FrontEnd)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from duomoe import ops

from torch_frontend import bind

TABLE = ops.table()


class _Fork(torch.autograd.Function):
    """A tensor twice.

    The outputs share its memory without being views of it, so that it may be changed in place
    afterwards. No jvp: torch.compile refuses a Function that has one, and forward-mode AD is an
    error without it too.
    """

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.detach(), x.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> torch.Tensor | None:
        # What nobody used costs nothing, and leaves the other cotangent's bits.
        used = [g for g in grads if g is not None]
        if len(used) < 2:
            return used[0] if used else None
        (total,) = bind.call(TABLE["add"], used, {})
        return total

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: torch.Tensor) -> Any:
        return _Fork.apply(x), (in_dims[0], in_dims[0])


class _EagerFork(torch.autograd.Function):
    """_Fork for eager calls: for a forward pass that takes the context, torch looks at no
    signature, which costs more than all the rest.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x.detach(), x.detach()

    backward = _Fork.backward


_eager_fork = bind.plain_apply(_EagerFork)


class _Join(torch.autograd.Function):
    """The core's sum of two tensors."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (total,) = bind.call(TABLE["add"], (a, b), {})
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], grads[0]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None], a: torch.Tensor, b: torch.Tensor
    ) -> Any:
        a, b = (
            x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0)
            for x, d in zip((a, b), in_dims, strict=True)
        )
        return _Join.apply(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2]), 0


class _AllSum(torch.autograd.Function):
    """All-reduce; the backward all-reduces the cotangents, as torch.distributed.nn does."""

    @staticmethod
    def forward(x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllSum.apply(grads[0], ctx.group), None


def _check_one_device(op: str, tensors: Mapping[str, torch.Tensor | None]) -> None:
    device = None
    for name, x in tensors.items():
        if x is None:
            continue
        device = device or x.device
        if x.device != device:
            raise ValueError(
                f"{op}: all arguments must be on one device, but {name} is on {x.device} "
                f"and others are on {device}"
            )


class TorchFrontEnd:
    """The torch side of duomoe.functional."""

    def check_array(self, name: str, value: Any) -> torch.Tensor:
        """`value`, if it is a torch.Tensor."""
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
        if value.layout is not torch.strided or value.is_nested:
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise TypeError(f"{name} must be a dense torch.Tensor, got a {kind} one")
        return value

    def count(self, n: int) -> None:
        """Static counts cost nothing here: torch.compile makes them symbolic."""
        return None

    def check_buffer(self, name: str, value: Any) -> torch.Tensor:
        """`value`, if it is a torch.Tensor."""
        return self.check_array(name, value)

    def write(self, buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The buffer, filled with `value`."""
        return buffer.copy_(value)

    def accumulate(self, buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The buffer, with `value` added to it."""
        return buffer.add_(value)

    def read(self, name: str, x: torch.Tensor) -> list[int]:
        """The integers of a tensor of rank 1; waits for the device."""
        return x.tolist()

    def dtype(self, x: torch.Tensor) -> str:
        """The dtype's name."""
        return bind.dtype_name(x)

    def cast(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        """`x` in another dtype."""
        return x.to(getattr(torch, dtype))

    def clip(self, x: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """`x` limited to [low, high]."""
        if x.dtype == torch.uint32:  # clamp has no kernel for it
            x = x.to(torch.int64)
        return x.clamp(low, high)

    def stop_gradient(self, x: torch.Tensor) -> torch.Tensor:
        """`x` detached."""
        return x.detach()

    def call(
        self, op: str, inputs: Sequence[torch.Tensor | None], attributes: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """Check the arguments, then run the operator."""
        spec = TABLE[op]
        if bind.is_plain(inputs):
            # The core checks the same before a kernel runs; this side says it in its own words.
            try:
                return bind.run(spec, inputs, spec.plain_values(attributes))
            except Exception:
                self._check_inputs(spec, inputs, attributes)
                raise
        self._check_inputs(spec, inputs, attributes)
        return bind.call(spec, inputs, attributes)

    def _check_inputs(
        self, op: ops.Op, inputs: Sequence[Any], attributes: Mapping[str, Any]
    ) -> None:
        for spec, x in zip(op.inputs, inputs, strict=True):
            if x is not None:
                self.check_array(f"{op.name}: {spec.name}", x)
        _check_one_device(op.name, {s.name: x for s, x in zip(op.inputs, inputs, strict=True)})
        shapes = [None if x is None else x.shape for x in inputs]
        dtypes = [None if x is None else bind.dtype_name(x) for x in inputs]
        op.bind(shapes, dtypes, attributes)

    def check_over(self, over: Any) -> None:
        """TypeError if `over` is no process group."""
        if over is not None and not isinstance(over, torch.distributed.ProcessGroup):
            raise TypeError(
                f"group must be a torch.distributed.ProcessGroup, got {type(over).__name__}"
            )

    def check_device(self, op: str, arrays: Mapping[str, torch.Tensor | None]) -> None:
        """TypeError naming the argument that is no tensor, ValueError that on another device."""
        for name, x in arrays.items():
            if x is not None:
                self.check_array(name, x)
        _check_one_device(op, arrays)

    def merge_leading(self, x: torch.Tensor, kept: int) -> torch.Tensor:
        """`x` with all axes but the last `kept` merged into one."""
        split = x.dim() - kept
        if split == 1:
            return x
        return x.reshape((math.prod(x.shape[:split]), *x.shape[split:]))

    def fork(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` twice, its cotangents joined by the core."""
        if bind.is_plain((x,)):
            if torch.is_grad_enabled() and x.requires_grad:
                return _eager_fork(x)
            return x.detach(), x.detach()
        return _Fork.apply(x)

    def join(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The core's sum of two tensors."""
        return _Join.apply(a, b)

    def where(self, mask: torch.Tensor, a: torch.Tensor, b: torch.Tensor | int) -> torch.Tensor:
        """`a` for the tokens of mask[T], `b` for the others."""
        return torch.where(mask[:, None], a, b)

    def zero(self, like: torch.Tensor) -> torch.Tensor:
        """A float32 0 of rank 0, where `like` is."""
        return torch.zeros((), dtype=torch.float32, device=like.device)

    def recompute(
        self, f: Callable[..., torch.Tensor], *arrays: torch.Tensor | None
    ) -> torch.Tensor:
        """f(*arrays), run again by the backward pass.

        torch.func's transforms cannot recompute: there everything is kept.
        """
        if bind.transforming():
            return f(*arrays)
        return torch.utils.checkpoint.checkpoint(
            f, *arrays, use_reentrant=False, preserve_rng_state=False
        )

    def all_sum(self, x: torch.Tensor, over: Any) -> torch.Tensor:
        """The sum over the ranks of a process group."""
        return _AllSum.apply(x, over)
