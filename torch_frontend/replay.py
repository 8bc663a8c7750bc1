# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Recording and replaying the routing of a model's MoE and Router modules.

Axis letters: T tokens, L layers, K experts per token, D model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from duomoe.replay import RoutingRecord, match_layers
from duomoe.results import Routing
from torch import Tensor, nn

from torch_frontend.modules import MoE, Router

Site = MoE | Router


def _layers(model: nn.Module) -> dict[str, Site]:
    routers = {name: m for name, m in model.named_modules() if isinstance(m, MoE | Router)}
    # The router of a block does not route by itself.
    inside = {id(m.router) for m in routers.values() if isinstance(m, MoE)}
    found = {name: m for name, m in routers.items() if id(m) not in inside}
    if not found:
        raise ValueError(f"model has no torch_frontend.MoE or Router, got {type(model).__name__}")
    return found


def _in_backward() -> bool:
    """Whether a forward is run again by activation checkpointing."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class _Notes:
    """What one module notes while it runs."""

    def __init__(self) -> None:
        self.indices: list[Tensor] = []

    def note(self, routing: Routing) -> None:
        if not _in_backward():
            self.indices.append(routing.indices.detach())


class Recording:
    """The expert ids of a model's forwards while `record_routing` lasts."""

    def __init__(self, layers: Mapping[str, Site]) -> None:
        self._notes = {name: _Notes() for name in layers}
        self._experts = {name: module.config.num_experts for name, module in layers.items()}

    def record(self, *, metadata: Mapping[str, str] | None = None) -> RoutingRecord:
        """What was recorded; the tokens of several forwards follow each other.

        Args:
            metadata: the user's own, for the file.

        Returns:
            RoutingRecord, its layers named as the modules are in the model.

        Raises:
            ValueError: if no forward was recorded, or layers differ in tokens, K or E.
        """
        experts = set(self._experts.values())
        if len(experts) > 1:
            raise ValueError(f"layers must have one number of experts, got {self._experts}")
        for name, notes in self._notes.items():
            if not notes.indices:
                raise ValueError(f"layer {name!r} was not run while its routing was recorded")
        layers = {name: torch.cat(notes.indices).cpu() for name, notes in self._notes.items()}
        return RoutingRecord.from_layers(layers, experts.pop(), metadata=metadata)


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[Recording]:
    """Record the expert ids that each MoE of a model uses, in every forward within the `with`.

    A Router that is no part of an MoE counts as a layer, too.

    Forwards that activation checkpointing runs again in the backward pass are left out.

    Args:
        model: a module with MoE or Router modules in it, or one itself.

    Returns:
        A context manager of a Recording, whose `record()` gives the RoutingRecord.

    Raises:
        ValueError: on a model without an MoE or Router.
    """
    layers = _layers(model)
    recording = Recording(layers)
    before = {name: module.recording for name, module in layers.items()}
    try:
        for name, module in layers.items():
            module.recording = recording._notes[name]
        yield recording
    finally:
        for name, module in layers.items():
            module.recording = before[name]


class _LayerReplay:
    """The recorded ids of one layer."""

    def __init__(self, name: str, indices: Tensor, mask: Tensor | None, compare: bool) -> None:
        self.name, self.indices, self.mask, self.compare = name, indices, mask, compare
        self.tokens: list[Tensor] = []
        self.slots: list[Tensor] = []

    def of(
        self, x: Tensor, indices: Tensor | None, replay_mask: Tensor | None, compare: bool
    ) -> tuple[Tensor, Tensor | None, bool]:
        """The arguments of a forward of x[..., D]; what the call itself gives comes first."""
        compare = compare or self.compare
        if indices is not None:
            return indices, replay_mask, compare
        leading = x.shape[:-1]
        if leading.numel() != self.indices.shape[0]:
            raise ValueError(
                f"the record of layer {self.name!r} is of {self.indices.shape[0]} tokens, x has "
                f"{leading.numel()}; replay record[a:b] for a part"
            )
        if self.indices.device != x.device:
            self.indices = self.indices.to(x.device)
            self.mask = None if self.mask is None else self.mask.to(x.device)
        if replay_mask is None and self.mask is not None:
            replay_mask = self.mask.reshape(leading)
        indices = self.indices.reshape(*leading, self.indices.shape[-1])
        return indices, replay_mask, compare

    def note(self, routing: Routing) -> None:
        if self.compare and not _in_backward():
            self.tokens.append(routing.mismatched_tokens)
            self.slots.append(routing.mismatched_slots)


class Replay:
    """What `replay_routing` counts, with compare=True."""

    def __init__(self, layers: Mapping[str, _LayerReplay]) -> None:
        self._layers = layers

    def mismatched_tokens(self) -> dict[str, int]:
        """By layer, tokens that would have been routed differently, over all forwards so far."""
        return {n: sum(int(c) for c in layer.tokens) for n, layer in self._layers.items()}

    def mismatched_slots(self) -> dict[str, int]:
        """By layer, given slots whose expert would not have been selected."""
        return {n: sum(int(c) for c in layer.slots) for n, layer in self._layers.items()}


@contextlib.contextmanager
def replay_routing(
    model: nn.Module,
    record: RoutingRecord,
    *,
    layers: Mapping[str, str] | None = None,
    compare: bool = False,
) -> Iterator[Replay]:
    """Route the MoEs of a model as recorded, with weights and gradients of the live logits.

    Every forward within the `with` must be of the record's tokens; replay `record[a:b]` for a
    micro-batch. Tokens that the record masks route themselves. `indices` or a `replay_mask` that a
    call gives itself come first. The record is not consumed: a forward that activation
    checkpointing runs again replays the same ids, so let the backward pass run within the `with`,
    too.

    Args:
        model: a module with MoE or Router modules in it, or one itself.
        record: RoutingRecord, recorded in either framework or by an inference engine.
        layers: name of a module to name of the record's layer. None means equal names, or the
            order of the modules if the record's layers are numbered "0", "1", ...
        compare: count the tokens that would have been routed differently; a second selection.

    Returns:
        A context manager of a Replay, with the counts.

    Raises:
        ValueError: on a layer that cannot be matched, or whose E or K differs from the record's.
        TypeError: on a record of another type.
    """
    if not isinstance(record, RoutingRecord):
        raise TypeError(f"record must be a RoutingRecord, got {type(record).__name__}")
    found = _layers(model)
    names = match_layers(found, record.layers, layers)
    mask = None if record.mask is None else torch.from_numpy(record.mask.copy())
    replays = {}
    for name, module in found.items():
        config = module.config
        if (config.num_experts, config.top_k) != (record.num_experts, record.top_k):
            raise ValueError(
                f"module {name!r} has E = {config.num_experts} and K = {config.top_k}, the record "
                f"{record.num_experts} and {record.top_k}"
            )
        ids = torch.from_numpy(record.layer(names[name]).copy())
        replays[name] = _LayerReplay(name, ids, mask, compare)
    before = {name: module.replaying for name, module in found.items()}
    try:
        for name, module in found.items():
            module.replaying = replays[name]
        yield Replay(replays)
    finally:
        for name, module in found.items():
            module.replaying = before[name]
