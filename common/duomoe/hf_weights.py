# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters of a Hugging Face MoE block to those of a block here, and back.

Tensors are transposed, sliced, stacked and joined: no value changes, and no dtype, but that of the
selection bias, which is float32 here. `duomoe.expert_families` has the layouts; docs/hf.md lists
the model_types.

Axis letters: E experts, D model width, F expert hidden width, S hidden width of the shared experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from duomoe import convert
from duomoe.expert_families import Tensor
from duomoe.hf_experts import ExpertReader
from duomoe.layer_rules import HASH_MOE
from duomoe.results import MoEParams

FIELDS = tuple(field.name for field in dataclasses.fields(MoEParams))
DTYPES = tuple(map(np.dtype, ("float32", ml_dtypes.bfloat16, "float16")))
# The axes of every field, in the letters of Tensor.axes.
AXES = {
    "router": "D E",
    "w_gate": "E D F",
    "w_up": "E D F",
    "w_down": "E F D",
    "router_bias": "E",
    "expert_bias": "E",
    "b_gate": "E F",
    "b_up": "E F",
    "b_down": "E D",
    "shared_w_gate": "D S",
    "shared_w_up": "D S",
    "shared_w_down": "S D",
    "shared_router": "D 1",
}


def _array(name: str, value: Any) -> np.ndarray:
    """An array of either framework as NumPy's; it may share memory."""
    array = convert.to_numpy(value, name)
    if array.dtype not in DTYPES:
        raise ValueError(
            f"{name} must be {', '.join(d.name for d in DTYPES[:-1])} or {DTYPES[-1].name}, got "
            f"{array.dtype}; quantised weights must be dequantised first"
        )
    return array


def _factor(axis: str) -> tuple[int, str]:
    """The parts of an axis: "2F" is 2 and "F"."""
    return (int(axis[0]), axis[1:]) if len(axis) > 1 else (1, axis)


class _Sizes:
    """Lengths of the axes: what the config says, then what the first tensor with the axis has."""

    def __init__(self, reader: ExpertReader, layer: int | None) -> None:
        self.known = {"1": 1, "E": reader.router(layer).num_experts}
        widths = {"D": ("hidden_size",), **reader.experts.widths}
        for letter, keys in widths.items():
            given = [reader.values.get(key) for key in keys]
            lengths = [n for n in given if isinstance(n, int) and not isinstance(n, bool)]
            if len(lengths) == len(keys):
                self.known[letter] = math.prod(lengths)

    def check(self, name: str, axes: str, shape: Sequence[int]) -> None:
        """ValueError if the shape does not fit; axes of unknown length take theirs from it."""
        letters = axes.split()
        if len(letters) == len(shape):
            for axis, length in zip(letters, shape, strict=True):
                factor, letter = _factor(axis)
                if letter not in self.known and length % factor == 0:
                    self.known[letter] = length // factor
        wanted = [
            factor * self.known[letter] if letter in self.known else axis
            for axis in letters
            for factor, letter in (_factor(axis),)
        ]
        if list(shape) != wanted:
            shown = ", ".join(map(str, wanted))
            raise ValueError(
                f"{name} must have shape [{', '.join(letters)}] = [{shown}], got {list(shape)}"
            )


def _moved(array: np.ndarray, source: str, target: str) -> np.ndarray:
    """The array with its axes in another order; axes of length 1 come and go."""
    kept = [axis for axis in source.split() if axis != "1"]
    lengths = [n for n, axis in zip(array.shape, source.split(), strict=True) if axis != "1"]
    order = [kept.index(axis) for axis in target.split() if axis != "1"]
    moved = array.reshape(lengths).transpose(order)
    at = [i for i, axis in enumerate(target.split()) if axis == "1"]
    return np.expand_dims(moved, at)


def _split(tensor: Tensor, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The fields that a tensor of the module holds, in their layout."""
    axes = tensor.axes.split()
    single = " ".join(_factor(axis)[1] for axis in axes)
    count = len(tensor.fields)
    joined = next((i for i, axis in enumerate(axes) if _factor(axis)[0] > 1), 0)
    length = array.shape[joined] // count
    for i, field in enumerate(tensor.fields):
        part = slice(i, None, count) if tensor.interleaved else slice(i * length, (i + 1) * length)
        index = (slice(None),) * joined + (part,)
        dtype = np.dtype("float32") if field == "expert_bias" else array.dtype
        moved = _moved(array[index] if count > 1 else array, single, AXES[field])
        yield field, np.array(moved, dtype, order="C")


def _joined(tensor: Tensor, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The inverse of _split."""
    axes = tensor.axes.split()
    single = " ".join(_factor(axis)[1] for axis in axes)
    moved = [_moved(p, AXES[f], single) for p, f in zip(parts, tensor.fields, strict=True)]
    if len(moved) == 1:
        return np.array(moved[0], order="C")
    at = next(i for i, axis in enumerate(axes) if _factor(axis)[0] > 1)
    if not tensor.interleaved:
        return np.concatenate(moved, at)
    stacked = np.stack(moved, at + 1)
    shape = list(moved[0].shape)
    shape[at] *= len(moved)
    return stacked.reshape(shape)


class _Block:
    """The tensors that the block of one layer has."""

    def __init__(self, config: Any, prefix: str, layer: int | None) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a str, got {type(prefix).__name__}")
        self.prefix = prefix
        self.reader = ExpertReader(config)
        self.reader.config()
        self.family = self.reader.experts
        self.sizes = _Sizes(self.reader, layer)
        # Whether it is a hash layer, which has a table in place of a selection bias; None: unknown.
        self.hash: bool | None = False
        if self.family.table is not None:
            self.hash = None if layer is None else self.reader.layer_kinds()[layer] == HASH_MOE
        self.tensors = [t for t in self.family.tensors if self._exists(t)]

    def _exists(self, tensor: Tensor) -> bool:
        if tensor.when is None:
            return not (self.hash and tensor.fields == ("expert_bias",))
        key, default = tensor.when
        value = self.reader.values.get(key, default)
        if value is not None and not isinstance(value, (bool, int)):
            raise self.reader.error(key, "a bool or an int")
        return bool(value)

    def optional(self, tensor: Tensor) -> bool:
        """Whether the layer may lack the tensor."""
        return self.hash is None and tensor.fields == ("expert_bias",)


class _Source:
    """What lies under the prefix of a state_dict, and what of it has been read."""

    def __init__(self, state_dict: Mapping[str, Any], block: _Block) -> None:
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        self.block, self.entries = block, state_dict
        roots = tuple(block.prefix + root for root in block.family.roots)
        self.left = {k for k in state_dict if isinstance(k, str) and k.startswith(roots)}
        if not self.left:
            some = ", ".join(repr(key) for key in list(state_dict)[:3])
            raise ValueError(
                f"no key of state_dict begins with {' or '.join(map(repr, roots))}; its first are "
                f"{some or 'none'}"
            )

    def missing(self, key: str, tensor: Tensor) -> ValueError:
        other = [self.block.prefix + name for name in (tensor.key, *tensor.disk)]
        other = [name.replace("{}", "0") for name in other]
        shape = ", ".join(tensor.axes.split())
        unknown = sorted(self.left - set(other))[:3]
        return ValueError(
            f"state_dict lacks {key} [{shape}] of a {self.block.family.model_type} block, in the "
            f"layout of the module ({other[0]})"
            + (f" or of a checkpoint ({', '.join(other[1:])})" if other[1:] else "")
            + (f"; not read yet: {', '.join(unknown)}" if unknown else "")
        )

    def take(self, key: str) -> np.ndarray:
        self.left.discard(key)
        return _array(key, self.entries[key])

    def has(self, tensor: Tensor) -> bool:
        """Whether something of the tensor is there, in either layout."""
        names = [tensor.key, *(name.replace("{}", "0") for name in tensor.disk)]
        return any(self.block.prefix + name in self.left for name in names)

    def read(self, tensor: Tensor) -> Iterator[tuple[str, np.ndarray]]:
        """The fields of a tensor."""
        stacked = tensor.disk and "{}" in tensor.disk[0]
        for name in (tensor.key, *(() if stacked else tensor.disk)):
            key = self.block.prefix + name
            if key in self.left:
                array = self.take(key)
                self.block.sizes.check(key, tensor.axes, array.shape)
                yield from _split(tensor, array)
                return
        if not stacked:
            raise self.missing(self.block.prefix + tensor.key, tensor)
        yield from self._stacked(tensor)

    def _stacked(self, tensor: Tensor) -> Iterator[tuple[str, np.ndarray]]:
        """The fields of a tensor of which every expert has its own."""
        # "E 2F D" is stored as [F, D] for each expert and field.
        axes = " ".join(_factor(axis)[1] for axis in tensor.axes.split()[1:])
        for field, name in zip(tensor.fields, tensor.disk, strict=True):
            stack: np.ndarray | None = None
            for i in range(self.block.sizes.known["E"]):
                key = self.block.prefix + name.format(i)
                if key not in self.left:
                    raise self.missing(key, tensor)
                array = self.take(key)
                self.block.sizes.check(key, axes, array.shape)
                moved = _moved(array, axes, AXES[field].removeprefix("E "))
                if stack is None:
                    stack = np.empty((self.block.sizes.known["E"], *moved.shape), array.dtype)
                if array.dtype != stack.dtype:
                    raise ValueError(f"{key} must be {stack.dtype} as expert 0, got {array.dtype}")
                stack[i] = moved
            assert stack is not None
            yield field, stack

    def finish(self) -> None:
        """ValueError if something was not read."""
        if self.left:
            known = ", ".join(tensor.key for tensor in self.block.tensors)
            extra = sorted(self.left)
            raise ValueError(
                f"{extra[0]} is no tensor of a {self.block.family.model_type} block"
                + (f" (nor are {len(extra) - 1} others)" if extra[1:] else "")
                + f"; under the prefix {self.block.prefix!r} it knows {known}"
            )


def moe_params(
    state_dict: Mapping[str, Any], config: Any, prefix: str = "", *, layer: int | None = None
) -> dict[str, np.ndarray | None]:
    """The parameters of a Hugging Face MoE block, in the layout of MoEParams.

    Args:
        state_dict: name -> torch, JAX or NumPy array (float32, bfloat16 or float16), in the layout
            of transformers' module (`experts.gate_up_proj`), or of the model's checkpoint
            (`experts.0.w1.weight`). It may hold other modules, not below the prefix.
        config: as in `RouterConfig.from_hf`.
        prefix: what the names of the block begin with, "model.layers.3.mlp." for instance; of
            granitemoeshared and granitemoehybrid, whose shared experts lie beside the block, that
            of the layer.
        layer: the layer, needed where layers differ.

    Returns:
        Every field of MoEParams, None where the model has no such parameter: arrays of their own,
        contiguous, in the dtype they came in; expert_bias is float32. A hash layer (DeepSeek-V4)
        has no expert_bias; its table of ids is no parameter: pass
        `moe(..., indices=table[token_ids])`.

    Raises:
        ValueError: on a key that is missing, unknown, of a wrong shape or dtype; it names the key
            and what is expected. On a config that `ExpertConfig.from_hf` or `RouterConfig.from_hf`
            refuses. TypeError: on what is no array.
    """
    block = _Block(config, prefix, layer)
    source = _Source(state_dict, block)
    fields: dict[str, np.ndarray | None] = dict.fromkeys(FIELDS)
    table = None if block.family.table is None else prefix + block.family.table
    for tensor in block.tensors:
        if block.optional(tensor) and not source.has(tensor):
            if table not in source.left:
                raise source.missing(prefix + tensor.key, tensor)
            continue
        fields.update(source.read(tensor))
    if fields["expert_bias"] is None and table is not None:
        source.left.discard(table)
    source.finish()
    return fields


def hf_state_dict(
    params: MoEParams | Mapping[str, Any],
    config: Any,
    prefix: str = "",
    *,
    layer: int | None = None,
) -> dict[str, np.ndarray]:
    """The way back: a Hugging Face block's state_dict in the layout of transformers' module.

    `moe_params` of the result gives the same bits again.

    Args:
        params: MoEParams, or a dict of its fields, of torch, JAX or NumPy arrays.
        config: as in `RouterConfig.from_hf`.
        prefix: what the names are to begin with, as in `moe_params`.
        layer: the layer, needed where layers differ.

    Returns:
        name -> array of its own, contiguous.

    Raises:
        ValueError: on a field that is missing, that the model lacks, or of a wrong shape or dtype.
            TypeError: on what is no array.
    """
    block = _Block(config, prefix, layer)
    given = vars(params) if isinstance(params, MoEParams) else params
    if not isinstance(given, Mapping):
        raise TypeError(f"params must be MoEParams or a dict, got {type(params).__name__}")
    if unknown := [name for name in given if name not in FIELDS]:
        raise ValueError(
            f"params must have the fields of MoEParams, {', '.join(FIELDS)}, got {unknown[0]!r}"
        )
    left = {name for name, value in given.items() if value is not None}
    result = {}
    for tensor in block.tensors:
        if block.optional(tensor) and not left & set(tensor.fields):
            continue
        parts: list[np.ndarray] = []
        for field in tensor.fields:
            if field not in left:
                raise ValueError(
                    f"params.{field} is needed for {tensor.key} of a {block.family.model_type} "
                    "block, got None"
                )
            part = _array(f"params.{field}", given[field])
            block.sizes.check(f"params.{field}", AXES[field], part.shape)
            if parts and part.dtype != parts[0].dtype:
                raise ValueError(
                    f"params.{field} must be {parts[0].dtype} as params.{tensor.fields[0]}, got "
                    f"{part.dtype}"
                )
            parts.append(part)
            left.remove(field)
        result[prefix + tensor.key] = _joined(tensor, parts)
    if left:
        field = min(left, key=FIELDS.index)
        raise ValueError(f"params.{field} has no place in a {block.family.model_type} block")
    return result
