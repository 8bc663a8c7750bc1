# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What modules that route tokens share: they record their routing, and replay one."""

from __future__ import annotations

from typing import Any

from duomoe.results import Routing
from torch import Tensor, nn


class Routes(nn.Module):
    """A module that routes tokens: records its routing, and replays one."""

    def __init__(self) -> None:
        super().__init__()
        # What record_routing and replay_routing put here while they last.
        self.recording: Any = None
        self.replaying: Any = None

    def _replayed(
        self, x: Tensor, indices: Tensor | None, replay_mask: Tensor | None, compare: bool
    ) -> tuple[Tensor | None, Tensor | None, bool]:
        """The ids, the mask and `compare` of a call: its own, or those of `replay_routing`."""
        if self.replaying is None:
            return indices, replay_mask, compare
        return self.replaying.of(x, indices, replay_mask, compare)

    def _note(self, routing: Routing) -> None:
        if self.replaying is not None:
            self.replaying.note(routing)
        if self.recording is not None:
            self.recording.note(routing)
