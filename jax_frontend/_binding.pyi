# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any

def handlers() -> dict[str, tuple[Any, Any, Any]]: ...
def has_workspace(op: int) -> bool: ...
def workspace_bytes(
    op: int,
    shapes: Sequence[Sequence[int] | None],
    dtypes: Sequence[int],
    attributes: Sequence[float],
) -> int: ...
