# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Recorded routing: which experts a model used, to be kept in a file and replayed in JAX or torch.

Axis letters: T tokens, L layers, K experts per token.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from duomoe import arguments, tensor_file
from duomoe.convert import Array, to_numpy
from duomoe.results import _Named
from duomoe.tensor_file import FilePath

FORMAT = "duomoe.routing"
VERSION = "1"


def _integers(name: str, array: Array) -> np.ndarray:
    ids = to_numpy(array, name)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {ids.dtype}")
    return ids


def _check_ids(ids: np.ndarray, layers: Sequence[str], num_experts: int) -> None:
    """Ids [T, L, K] of any integer dtype; compared in their own, so that none wraps around."""
    if not ids.size or (int(ids.max()) < num_experts and int(ids.min()) >= -1):
        return
    wrong = ids >= num_experts
    if ids.dtype.kind == "i":
        wrong |= ids < -1
    token, layer, slot = np.argwhere(wrong)[0]
    raise ValueError(
        f"token {token}, layer {layers[layer]!r}, slot {slot} has expert id "
        f"{ids[token, layer, slot]}; allowed are 0 to {num_experts - 1}, and -1 for an unused slot"
    )


def _layer_names(layers: Any) -> tuple[str, ...]:
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"layers must be a sequence of str, got {layers!r}")
    names = tuple(layers)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"layers must be a sequence of str, got {name!r}")
    if not names:
        raise ValueError("layers must name at least one layer")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"layers must differ, got {twice!r} twice")
    return names


@dataclasses.dataclass(frozen=True, eq=False)
class RoutingRecord(_Named):
    """The experts that each token went to in each MoE layer of a model.

    `from_layers` and `from_array` make records; the constructor takes an int32 array as it is,
    without a copy. `record[a:b]`, and `record[ids]` with an array of token numbers or a bool array,
    are records of some of the tokens.

    Attributes:
        indices: [T, L, K] int32 NumPy array, not writable; -1 is an unused slot.
        layers: names of the L layers, which differ.
        num_experts: ids are below it.
        mask: [T] bool NumPy array, not writable; False marks a token without recorded routing,
            which the model routes itself. None counts as all True.
        metadata: the user's own, dict of str to str.

    Raises:
        ValueError, TypeError: on a shape, dtype or id that does not fit; ids are checked in masked
            tokens too.
    """

    indices: np.ndarray
    layers: tuple[str, ...]
    num_experts: int
    mask: np.ndarray | None = None
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = _layer_names(self.layers)
        num_experts = arguments.integer("num_experts", self.num_experts, 1, arguments.INT32_MAX)
        ids = _integers("indices", self.indices)
        if ids.ndim != 3 or ids.shape[1] != len(layers) or ids.shape[2] < 1:
            raise ValueError(
                f"indices must have shape [T, L, K] with L = {len(layers)} layers and K at least "
                f"1, got {list(ids.shape)}"
            )
        _check_ids(ids, layers, num_experts)
        mask = self.mask
        if mask is not None:
            mask = to_numpy(mask, "mask")
            if mask.dtype != np.bool_:
                raise TypeError(f"mask must be bool, got {mask.dtype}")
            arguments.shape("mask", mask.shape, ids.shape[:1], "T")
            mask = _read_only(mask)
        ids = _read_only(ids.astype(np.int32, copy=False))
        metadata = tensor_file.check_metadata(self.metadata)
        for name, value in (
            ("indices", ids),
            ("layers", layers),
            ("num_experts", num_experts),
            ("mask", mask),
            ("metadata", metadata),
        ):
            object.__setattr__(self, name, value)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.indices.shape[0]

    @property
    def top_k(self) -> int:
        """K."""
        return self.indices.shape[2]

    @classmethod
    def from_layers(
        cls,
        layers: Mapping[str, Array],
        num_experts: int,
        *,
        mask: Array | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> RoutingRecord:
        """A record of what each layer used.

        Args:
            layers: layer name to integer array [..., K] (NumPy, JAX or torch), -1 for an unused
                slot. Leading axes are flattened to tokens. All layers have the same T and K.
            num_experts: ids must be below it.
            mask: [...] bool, False for tokens without recorded routing; flattened too.
            metadata: the user's own.

        Raises:
            ValueError, TypeError: that names the layer which does not fit, or the id that is out
                of range.
        """
        if not isinstance(layers, Mapping):
            raise TypeError(f"layers must be a dict of arrays by name, got {type(layers).__name__}")
        names = _layer_names(layers)
        num_experts = arguments.integer("num_experts", num_experts, 1, arguments.INT32_MAX)
        record = np.empty((0, 0, 0), np.int32)
        for position, name in enumerate(names):
            ids = _integers(f"layer {name!r}", layers[name])
            if ids.ndim < 1 or ids.shape[-1] < 1:
                raise ValueError(
                    f"layer {name!r} must have shape [..., K] with K at least 1, got "
                    f"{list(ids.shape)}"
                )
            tokens = ids.reshape(ids.size // ids.shape[-1], ids.shape[-1])
            if position == 0:
                record = np.empty((tokens.shape[0], len(names), tokens.shape[1]), np.int32)
            wanted = (record.shape[0], record.shape[2])
            if tokens.shape != wanted:
                raise ValueError(
                    f"layer {name!r} has (T, K) = {tokens.shape}, layer {names[0]!r} {wanted}; "
                    "they must be the same"
                )
            _check_ids(tokens[:, None, :], (name,), num_experts)
            record[:, position, :] = tokens
        if mask is not None:
            mask = np.array(to_numpy(mask, "mask")).reshape(-1)
        return cls(record, names, num_experts, mask, metadata or {})

    @classmethod
    def from_array(
        cls,
        indices: Array,
        num_experts: int,
        *,
        layers: Iterable[str] | None = None,
        layer_axis: int = 1,
        mask: Array | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> RoutingRecord:
        """A record of one array for all layers, as inference engines return it.

        Args:
            indices: [T, L, K] integers of any size, or [L, T, K] with layer_axis=0; -1 is an unused
                slot.
            num_experts: ids must be below it.
            layers: names of the L layers; None means "0", "1", ...
            layer_axis: 0 or 1, where the layers lie.
            mask: [T] bool, False for tokens without recorded routing.
            metadata: the user's own.

        Raises:
            ValueError: on another rank or number of layers, or that names token, layer and slot of
                an id out of range.
            TypeError: if the array is none of integers.
        """
        ids = _integers("indices", indices)
        layer_axis = arguments.integer("layer_axis", layer_axis, 0, 1)
        if ids.ndim != 3:
            raise ValueError(f"indices must have 3 axes, [T, L, K], got {list(ids.shape)}")
        if layer_axis == 0:
            ids = ids.swapaxes(0, 1)
        names = _layer_names(map(str, range(ids.shape[1])) if layers is None else layers)
        num_experts = arguments.integer("num_experts", num_experts, 1, arguments.INT32_MAX)
        if ids.shape[1] == len(names):  # otherwise the constructor refuses
            _check_ids(ids, names, num_experts)
        if mask is not None:
            mask = np.array(to_numpy(mask, "mask"))
        return cls(ids.astype(np.int32, order="C"), names, num_experts, mask, metadata or {})

    @classmethod
    def concatenate(cls, records: Iterable[RoutingRecord]) -> RoutingRecord:
        """One record of the tokens of several, in order.

        Layers, K and num_experts must be the same. Metadata that all of them share is kept.

        Raises:
            ValueError: if they differ, or there are no records; TypeError: on another kind of them.
        """
        parts = list(records)
        if not parts:
            raise ValueError("records must hold at least one record")
        first = arguments.record("records[0]", parts[0], RoutingRecord)
        for i, part in enumerate(parts):
            arguments.record(f"records[{i}]", part, RoutingRecord)
            for name in ("layers", "top_k", "num_experts"):
                if getattr(part, name) != getattr(first, name):
                    raise ValueError(
                        f"records[{i}] has {name} = {getattr(part, name)}, records[0] "
                        f"{getattr(first, name)}; they must be the same"
                    )
        mask = None
        if any(part.mask is not None for part in parts):
            mask = np.concatenate(
                [np.ones(p.num_tokens, bool) if p.mask is None else p.mask for p in parts]
            )
        shared = dict(first.metadata)
        for part in parts[1:]:
            shared = {k: v for k, v in shared.items() if part.metadata.get(k) == v}
        indices = np.concatenate([part.indices for part in parts])
        return cls(indices, first.layers, first.num_experts, mask, shared)

    def __getitem__(self, tokens: Any) -> RoutingRecord:
        """Some of the tokens; a slice shares memory with this record."""
        if not isinstance(tokens, slice):
            given = tokens
            tokens = to_numpy(tokens) if hasattr(tokens, "dtype") else np.asarray(tokens)
            if not tokens.size and tokens.dtype != np.bool_:
                tokens = tokens.astype(np.intp)
            if isinstance(given, tuple) or tokens.ndim != 1 or tokens.dtype.kind not in "iub":
                raise TypeError(
                    "a record is indexed by tokens: a slice, or a one-dimensional array of ints or "
                    f"bools, got {given!r}; record[i:i + 1] is one token"
                )
        mask = None if self.mask is None else self.mask[tokens]
        return dataclasses.replace(self, indices=self.indices[tokens], mask=mask)

    def pad(self, tokens: int) -> RoutingRecord:
        """Append tokens without recorded routing: ids -1, mask False.

        An engine has no routing for the last token that it sampled: `record.pad(1)` fits the
        sequence again.

        Args:
            tokens: how many.

        Raises:
            ValueError, TypeError: on a negative number, or none.
        """
        count = arguments.integer("tokens", tokens, 0)
        empty = np.full((count, *self.indices.shape[1:]), -1, np.int32)
        rows = dataclasses.replace(self, indices=empty, mask=np.zeros(count, bool))
        return RoutingRecord.concatenate([self, rows]) if count else self

    def _position(self, name: str) -> int:
        if name not in self.layers:
            raise ValueError(f"there is no layer {name!r}; there are {', '.join(self.layers)}")
        return self.layers.index(name)

    def layer(self, name: str) -> np.ndarray:
        """The ids of one layer: [T, K] int32, a contiguous copy.

        Raises:
            ValueError: if there is no such layer.
        """
        return self.indices[:, self._position(name), :].copy()

    def select_layers(self, names: Iterable[str]) -> RoutingRecord:
        """Only these layers, in this order, for instance without an engine's dense ones.

        Raises:
            ValueError, TypeError: if there is no such layer, or it is named twice.
        """
        names = _layer_names(names)
        positions = [self._position(name) for name in names]
        return dataclasses.replace(self, indices=self.indices[:, positions, :], layers=names)

    def save(self, path: FilePath) -> None:
        """Write a safetensors file: "indices", "mask" if there is one, and the rest in its header.

        Raises:
            OSError: if the file cannot be written.
            ImportError: if safetensors is not installed.
        """
        tensors = {"indices": self.indices}
        if self.mask is not None:
            tensors["mask"] = self.mask
        header = {
            "format": FORMAT,
            "version": VERSION,
            "num_experts": str(self.num_experts),
            "layers": json.dumps(self.layers),
            "user": json.dumps(self.metadata),
        }
        tensor_file.write(path, tensors, header)

    @classmethod
    def load(cls, path: FilePath) -> RoutingRecord:
        """Read what `save` wrote.

        Raises:
            ValueError: that names the file and what is wrong in it.
            OSError: if it cannot be opened.
            ImportError: if safetensors is not installed.
        """
        tensors, header = tensor_file.read(path)
        for key, wanted in (("format", FORMAT), ("version", VERSION)):
            if header.get(key) != wanted:
                raise ValueError(
                    f"{path} is no routing record that this version reads: its {key} must be "
                    f"{wanted!r}, got {header.get(key)!r}"
                )
        if sorted(tensors) not in (["indices"], ["indices", "mask"]):
            raise ValueError(
                f"{path}: tensors must be indices, and mask or none, got {', '.join(tensors)}"
            )
        if tensors["indices"].dtype != np.int32:
            raise ValueError(f"{path}: indices must be int32, got {tensors['indices'].dtype}")
        num_experts = _parsed(path, header, "num_experts", int)
        layers = _parsed(path, header, "layers", list)
        metadata = _parsed(path, {"user": "{}"} | header, "user", dict)
        try:
            return cls(tensors["indices"], layers, num_experts, tensors.get("mask"), metadata)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None


def match_layers(
    model_layers: Iterable[str], record_layers: Iterable[str], layers: Mapping[str, str] | None
) -> dict[str, str]:
    """The record's layer of every layer of a model.

    Args:
        model_layers: names, in order.
        record_layers: names, in order.
        layers: name of a layer of the model to name of the record's. None means equal names, or the
            order of both if the record's are as many, numbered "0", "1", ...

    Raises:
        ValueError: on a layer of the model that has none, or a name that is no layer of the model.
        TypeError: if layers is no mapping.
    """
    model_layers, record_layers = list(model_layers), list(record_layers)
    if layers is None:
        numbers = [str(i) for i in range(len(model_layers))]
        names = numbers if record_layers == numbers else model_layers
        layers = dict(zip(model_layers, names, strict=True))
    elif not isinstance(layers, Mapping):
        raise TypeError(f"layers must be a dict of str to str, got {type(layers).__name__}")
    for name in model_layers:
        if layers.get(name) not in record_layers:
            raise ValueError(
                f"the record has no layer for {name!r} of the model; its layers are "
                f"{', '.join(map(repr, record_layers))}; name them with layers="
            )
    for name in layers:
        if name not in model_layers:
            raise ValueError(
                f"layers must name layers of the model, {', '.join(map(repr, model_layers))}, "
                f"got {name!r}"
            )
    return dict(layers)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _parsed(path: FilePath, header: Mapping[str, str], key: str, kind: type) -> Any:
    try:
        value = json.loads(header.get(key, ""))
    except (ValueError, RecursionError):
        value = None
    if type(value) is not kind:
        raise ValueError(f"{path}: {key} must be a JSON {kind.__name__}, got {header.get(key)!r}")
    return value
