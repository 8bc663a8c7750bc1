# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Recording and replay of the routing in the modules of jax_frontend.nnx, which needs flax.

Axis letters: T tokens, K experts per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from duomoe.results import Array, Routing
from flax import nnx

from jax_frontend import modules


class RoutingIds(nnx.Variable):
    """Ids that a module used, [T, K] int32, as nnx.capture collects them."""


class RoutingMismatches(nnx.Variable):
    """Numbers of tokens and slots, int32, that a replay would have been routed differently, as
    nnx.capture collects them.
    """


class Replay(nnx.Variable):
    """Ids or mask that a module is to replay, while `replay_routing` lasts."""


class Routes(nnx.Module):
    """A module that routes tokens: records its routing, and replays one."""

    def __init__(self) -> None:
        self.replay_indices: Replay | None = nnx.data(None)
        self.replay_mask: Replay | None = nnx.data(None)

    def replayed(
        self, x: Array, indices: Array | None, replay_mask: Array | None
    ) -> tuple[Array | None, Array | None]:
        """The ids and the mask of a call: its own, or those of `replay_routing`."""
        if indices is not None or self.replay_indices is None:
            return indices, replay_mask
        leading = np.shape(x)[:-1]
        if replay_mask is None and self.replay_mask is not None:
            replay_mask = modules.as_leading(self.replay_mask.get_value(), leading, 0)
        return modules.as_leading(self.replay_indices.get_value(), leading, 1), replay_mask

    def compares(self, indices: Array | None) -> bool:
        """Whether mismatches of given ids are asked for by nnx.capture."""
        captures = getattr(self, "__captures__", ())
        return indices is not None and any(isinstance(c, RoutingMismatches) for c in captures)

    def record(self, routing: Routing, mismatches: bool) -> None:
        """Hand ids and mismatches to nnx.capture, inside it."""
        if hasattr(self, "__captures__"):  # elsewhere nnx deprecates sow
            self.sow(RoutingIds, "indices", routing.indices)
        if mismatches:
            self.sow(RoutingMismatches, "tokens", routing.mismatched_tokens)
            self.sow(RoutingMismatches, "slots", routing.mismatched_slots)


@contextlib.contextmanager
def replay_routing(
    model: nnx.Module,
    record: Any,
    *,
    layers: Mapping[str, str] | None = None,
    mask: Array | None = None,
) -> Iterator[None]:
    """Route the MoEs of a model as recorded, with weights and gradients of the live logits.

    Ids that a call gives itself come first. Recorded ids are Variables of the modules, so nnx.jit,
    nnx.grad and nnx.scan pass them on: other ids of the same shape compile nothing again.

    Args:
        model: a module with MoE or Router modules in it, or one itself.
        record: RoutingRecord, or a mapping of layer name to integers [T, K]; see routing_layers
            for the names.
        layers: name of a layer of the model to name of the record's layer. None means equal names,
            or the order of names if the record's layers are numbered "0", "1", ...
        mask: [T] bool; where it is False, a token routes for itself. None takes the record's.

    Raises:
        ValueError: on a layer that cannot be matched, or whose E differs from the record's.
        TypeError: on a record of another type.
    """
    routers = {path: m for path, m in nnx.iter_modules(model) if isinstance(m, Routes)}
    # The router of a block does not route by itself.
    inside = {id(m.router) for m in routers.values() if hasattr(m, "router")}
    sites = {".".join(map(str, path)): m for path, m in routers.items() if id(m) not in inside}
    owners: dict[str, Any] = {n: getattr(m, "router", m) for n, m in sites.items()}
    shapes = {name: router.weight.shape for name, router in owners.items()}
    placed = modules.place_layers(record, mask, layers, shapes)
    before = {name: (m.replay_indices, m.replay_mask) for name, m in sites.items()}
    try:
        for name, (ids, where) in placed.items():
            sites[name].replay_indices = Replay(jnp.asarray(ids))
            sites[name].replay_mask = (
                nnx.data(None) if where is None else Replay(jnp.asarray(where))
            )
        yield
    finally:
        for name, (ids, where) in before.items():
            sites[name].replay_indices = nnx.data(ids)
            sites[name].replay_mask = nnx.data(where)
