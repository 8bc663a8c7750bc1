# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Recording and replay of the routing in the modules of jax_frontend.linen, which needs flax.

Axis letters: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import numpy as np
from duomoe.results import Array, Routing

from jax_frontend import modules


def replayed(
    module: nn.Module, x: Array, indices: Array | None, replay_mask: Array | None
) -> tuple[Array | None, Array | None]:
    """The ids and the mask of a call: its own, or those of the collection "replay"."""
    if indices is not None or not module.has_variable("replay", "indices"):
        return indices, replay_mask
    indices = module.get_variable("replay", "indices")
    if isinstance(indices, (tuple, list)):  # as sown
        if len(indices) != 1:
            name = ".".join(module.path)
            raise ValueError(f"layer {name!r} was recorded {len(indices)} times, it replays one")
        (indices,) = indices
    leading = np.shape(x)[:-1]
    if replay_mask is None and module.has_variable("replay", "mask"):
        replay_mask = modules.as_leading(module.get_variable("replay", "mask"), leading, 0)
    return modules.as_leading(indices, leading, 1), replay_mask


def wants_mismatches(module: nn.Module, indices: Array | None) -> bool:
    """Whether mismatches of given ids are asked for through their collection."""
    return (
        indices is not None
        and not module.is_initializing()
        and module.is_mutable_collection("routing_mismatches")
    )


def record(module: nn.Module, routing: Routing, mismatches: bool) -> None:
    """Sow ids and mismatches, where they are asked for."""
    if not module.is_initializing():
        module.sow("routing", "indices", routing.indices)
    if mismatches:
        module.sow("routing_mismatches", "tokens", routing.mismatched_tokens)
        module.sow("routing_mismatches", "slots", routing.mismatched_slots)


def replay_collection(
    record: Any,
    params: Mapping[str, Any],
    *,
    layers: Mapping[str, str] | None = None,
    mask: Array | None = None,
) -> dict[str, Any]:
    """The collection "replay" for `apply`: recorded ids at the paths of the modules.

    Args:
        record: RoutingRecord, or a mapping of layer name to integers [T, K]; see routing_layers
            for the names.
        params: the model's "params", to find its MoE modules.
        layers: name of a layer of the model to name of the record's layer. None means equal names,
            or the order of names if the record's layers are numbered "0", "1", ...
        mask: [T] bool; where it is False, a token routes for itself. None takes the record's.

    Returns:
        Nested dict: `model.apply({**variables, "replay": ...}, x)`.

    Raises:
        ValueError: on a layer that cannot be matched, or whose E differs from the record's.
        TypeError: on a record of another type.
    """
    paths: dict[str, tuple[str, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}

    def search(node: Any, path: tuple[str, ...]) -> None:
        if not isinstance(node, Mapping):
            return
        if {"router", "experts"} <= set(node):
            name = ".".join(path)
            paths[name] = path
            shapes[name] = np.shape(nn.unbox(node["router"]["weight"]))
            return
        for key, child in node.items():
            search(child, (*path, key))

    search(params, ())
    collection: dict[str, Any] = {}
    for name, (ids, where) in modules.place_layers(record, mask, layers, shapes).items():
        node = collection
        for key in paths[name]:
            node = node.setdefault(key, {})
        node["indices"] = ids
        if where is not None:
            node["mask"] = where
    return collection
