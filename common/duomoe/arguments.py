# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that are no arrays.

Each returns the value in its plain type, or raises an error that names the argument, what was given
and what is allowed.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)

Record = TypeVar("Record")


def _shown(value: Any) -> str:
    return type(value).__name__ if hasattr(value, "shape") else repr(value)


def is_integer(value: Any) -> bool:
    """Whether it is an int, NumPy's or torch's symbolic one, and no bool."""
    symbolic = type(value).__name__ == "SymInt"
    return symbolic or (isinstance(value, (int, np.integer)) and not isinstance(value, bool))


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """A static int; NumPy's become Python's, torch's symbolic ones stay as they are."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an int, got {_shown(value)}")
    if isinstance(value, np.integer):
        value = int(value)
    if (low is not None and value < low) or (high is not None and value > high):
        bound = f"between {low} and {high}" if high is not None else f"at least {low}"
        raise ValueError(f"{name} must be {bound}, got {value}")
    if isinstance(value, int) and value > INT64_MAX:
        raise ValueError(f"{name} must stay below 2^63, got {value}")
    return value


def number(name: str, value: Any) -> float:
    """A static finite float; -0.0 becomes 0.0, so that equal options give equal bits."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a float, got {_shown(value)}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    # In comparisons, which torch.compile can trace for a float that it has made symbolic.
    if not -math.inf < result < math.inf:
        raise ValueError(f"{name} must be finite, got {value if result != math.inf else 'inf'}")
    return result + 0.0


def float32(name: str, value: Any) -> float:
    """A static float that float32 can hold."""
    result = number(name, value)
    if not -FLOAT32_MAX <= result <= FLOAT32_MAX:
        raise ValueError(f"{name} must be a float32 number, got {result}")
    return result


def boolean(name: str, value: Any) -> bool:
    """A static bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool, got {_shown(value)}")
    return bool(value)


def one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of several names."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got {_shown(value)}"
        )
    return value


def record(name: str, value: Any, kind: type[Record]) -> Record:
    """A record of this very kind."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__.startswith("E") else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, got {type(value).__name__}")
    return value


def shape(name: str, given: Sequence[int], wanted: Sequence[int], letters: str) -> None:
    """The shape that the other arguments ask for."""
    if tuple(given) != tuple(wanted):
        raise ValueError(f"{name} must have shape [{letters}] = {list(wanted)}, got {list(given)}")
