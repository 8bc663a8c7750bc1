# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The op table as Python objects: checks, output shapes and gradient plans for both front ends.

Axis letters: T tokens, E experts, K experts per token, D model width, N width of a product,
F expert hidden width, R permuted rows, S sequences.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from duomoe import library

FLOAT_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """An input or output: `axes` are letters, the last with "+1" if it is one longer than its
    letter.
    """

    name: str
    axes: tuple[str, ...]
    dtype: str
    optional: bool

    @property
    def is_float(self) -> bool:
        """Whether it can carry a gradient."""
        return self.dtype not in ("int32", "bool", "uint8")


@dataclasses.dataclass(frozen=True)
class AttributeSpec:
    """A static option: kind "int", "float" or "choice"."""

    name: str
    kind: str
    axis: str
    dtype_of: str
    minimum: int
    choices: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class GradientStep:
    """One backward op of an op.

    `sources[i]` tells where input i of `op` comes from: ("input", j), ("output", j) or ("grad",
    j), j a position among the forward op's inputs or outputs. `targets[i]` is the forward input
    whose gradient output i is.
    """

    op: Op
    sources: tuple[tuple[str, int], ...]
    targets: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class GradientPlan:
    """The backward ops that have the gradient of an input that is there, what they need of the
    forward pass, ("input", j) and ("output", j), and whose cotangents.
    """

    steps: tuple[GradientStep, ...]
    residuals: tuple[tuple[str, int], ...]
    cotangents: tuple[int, ...]  # outputs


@dataclasses.dataclass(frozen=True)
class Op:
    """One op of the table."""

    name: str
    summary: str
    shard_axes: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: tuple[AttributeSpec, ...]
    backward: tuple[str, ...]

    # -- attributes --------------------------------------------------------------------------------

    def attribute_values(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """`values` in the table's order, with a float for every float attribute."""
        return tuple(
            float(values[a.name]) if a.kind == "float" else values[a.name] for a in self.attributes
        )

    @functools.cached_property
    def plain_values(self) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
        """`attribute_values` without the conversion to float, several times as fast."""
        names = [a.name for a in self.attributes]
        if len(names) > 1:
            return operator.itemgetter(*names)
        return lambda values: tuple(values[name] for name in names)

    # -- shapes and dtypes -------------------------------------------------------------------------

    def bind(
        self,
        shapes: Sequence[Sequence[int] | None],
        dtypes: Sequence[str | None],
        attributes: Mapping[str, Any],
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Check the inputs against the table; return the length of every axis and every dtype
        variable.

        Raises:
            ValueError: an input is missing, or its shape disagrees with the table or another input.
            TypeError: an input has a dtype that the op does not take.
        """
        axes: dict[str, Any] = {a.axis: attributes[a.name] for a in self.attributes if a.axis}
        variables: dict[str, str] = {}
        for spec, shape, dtype in zip(self.inputs, shapes, dtypes, strict=True):
            if shape is None or dtype is None:
                if not spec.optional:
                    raise ValueError(f"{self.name}: {spec.name} is missing")
                continue
            self._bind_shape(spec, shape, axes)
            self._bind_dtype(spec, dtype, variables, attributes)
        return axes, variables

    def _bind_shape(self, spec: TensorSpec, shape: Sequence[int], axes: dict[str, Any]) -> None:
        def fail() -> ValueError:
            known = {name: length for name, length in axes.items() if name in "".join(spec.axes)}
            where = "".join(f", {name} = {length}" for name, length in known.items())
            return ValueError(
                f"{self.name}: {spec.name} must have shape [{', '.join(spec.axes)}]{where}, "
                f"got {list(shape)}"
            )

        if len(shape) != len(spec.axes):
            raise fail()
        for axis, length in zip(spec.axes, shape, strict=True):
            length = length - 1 if axis.endswith("+1") else length
            if axes.setdefault(axis[0], length) != length:
                raise fail()

    def _bind_dtype(
        self, spec: TensorSpec, dtype: str, variables: dict[str, str], attributes: Mapping[str, Any]
    ) -> None:
        allowed: tuple[str, ...]
        if spec.dtype.startswith("<"):
            allowed = (variables[spec.dtype],) if spec.dtype in variables else FLOAT_DTYPES
            if dtype in allowed:
                variables[spec.dtype] = dtype
        else:
            allowed = (self._output_dtype(spec, variables, attributes),)
        if dtype not in allowed:
            names = " or ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1])))
            raise TypeError(f"{self.name}: {spec.name} must be {names}, got {dtype}")

    def _output_dtype(
        self, spec: TensorSpec, variables: dict[str, str], attributes: Mapping[str, Any]
    ) -> str:
        if spec.dtype.startswith("<"):
            return variables[spec.dtype]
        return attributes[spec.dtype[1:]] if spec.dtype.startswith("@") else spec.dtype

    def infer(
        self,
        shapes: Sequence[Sequence[int] | None],
        dtypes: Sequence[str | None],
        attributes: Mapping[str, Any],
    ) -> list[tuple[tuple[Any, ...], str]]:
        """Check the inputs, then return (shape, dtype) of every output."""
        axes, variables = self.bind(shapes, dtypes, attributes)
        return [
            (
                tuple(axes[a[0]] + 1 if a.endswith("+1") else axes[a] for a in out.axes),
                self._output_dtype(out, variables, attributes),
            )
            for out in self.outputs
        ]

    # -- gradients ---------------------------------------------------------------------------------

    @functools.cached_property
    def gradient_steps(self) -> tuple[GradientStep, ...]:
        """How the gradient is made from the backward ops, matched by name."""
        input_position = {spec.name: i for i, spec in enumerate(self.inputs)}
        output_position = {spec.name: i for i, spec in enumerate(self.outputs)}

        def source(name: str) -> tuple[str, int]:
            if name.startswith("grad_"):
                return "grad", output_position[name.removeprefix("grad_")]
            return (
                ("output", output_position[name])
                if name in output_position
                else ("input", input_position[name])
            )

        return tuple(
            GradientStep(
                op=table()[name],
                sources=tuple(source(spec.name) for spec in table()[name].inputs),
                targets=tuple(
                    input_position[spec.name.removeprefix("grad_")]
                    for spec in table()[name].outputs
                ),
            )
            for name in self.backward
        )

    def gradient_plan(self, present: tuple[bool, ...]) -> GradientPlan:
        """What the gradient takes where only these inputs are there."""
        plan = self._gradient_plans.get(present)
        if plan is None:
            steps = tuple(s for s in self.gradient_steps if any(present[t] for t in s.targets))
            sources = {source for step in steps for source in step.sources}
            residuals = tuple(sorted(source for source in sources if source[0] != "grad"))
            cotangents = tuple(sorted(i for kind, i in sources if kind == "grad"))
            plan = self._gradient_plans[present] = GradientPlan(steps, residuals, cotangents)
        return plan

    @functools.cached_property
    def _gradient_plans(self) -> dict[tuple[bool, ...], GradientPlan]:
        return {}

    def gradient_attributes(
        self, step: GradientStep, attributes: Mapping[str, Any], input_dtypes: Sequence[str | None]
    ) -> dict[str, Any]:
        """The attributes of one backward op; the dtype of an absent input counts as float32."""
        positions = self._input_positions
        return {
            a.name: (input_dtypes[positions[a.dtype_of]] or "float32")
            if a.dtype_of
            else attributes[a.name]
            for a in step.op.attributes
        }

    @functools.cached_property
    def _input_positions(self) -> dict[str, int]:
        return {spec.name: i for i, spec in enumerate(self.inputs)}


def _parse(entry: dict[str, Any]) -> Op:
    def tensors(key: str) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(t["name"], tuple(t["axes"].split()), t["dtype"], t["optional"])
            for t in entry[key]
        )

    return Op(
        name=entry["name"],
        summary=entry["summary"],
        shard_axes=tuple(entry["shard_axes"].split()),
        inputs=tensors("inputs"),
        outputs=tensors("outputs"),
        attributes=tuple(
            AttributeSpec(
                a["name"], a["kind"], a["axis"], a["dtype_of"], a["minimum"], tuple(a["choices"])
            )
            for a in entry["attributes"]
        ),
        backward=tuple(entry["backward"]),
    )


@functools.cache
def table() -> dict[str, Op]:
    """All ops by name, in the core's order."""
    return {entry["name"]: _parse(entry) for entry in library.op_table()}


def not_twice_differentiable(op: str) -> str:
    """The message for a derivative of a backward op, in both front ends."""
    return f"duomoe: {op} has no derivative (ops are differentiable once)"
