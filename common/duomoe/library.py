# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The core's shared library: where it is, that its version fits, and what it says of its ops."""

from __future__ import annotations

import ctypes
import functools
import json
from importlib import metadata
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "lib" / "libduomoe.so"


@functools.cache
def load() -> ctypes.CDLL:
    """Load libduomoe, once per process; both front ends link to this very file.

    Raises:
        ImportError: the library is missing, cannot be loaded, or is of another version.
    """
    if not PATH.exists():
        raise ImportError(f"duomoe's core library is missing ({PATH}); reinstall duomoe with pip")
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        raise ImportError(f"duomoe's core library cannot be loaded: {error}") from error
    library.duomoe_version.restype = ctypes.c_char_p
    library.duomoe_op_table.restype = ctypes.c_char_p
    library.duomoe_has_kernel.argtypes = [ctypes.c_int, ctypes.c_int]
    built, wanted = library.duomoe_version().decode(), metadata.version("duomoe")
    if built != wanted:
        raise ImportError(
            f"duomoe {wanted} found a core library of version {built}; reinstall duomoe with pip"
        )
    return library


def op_table() -> list[dict[str, Any]]:
    """The core's declarations of all ops, parsed."""
    return json.loads(load().duomoe_op_table())


def has_kernel(op: str, backend: str) -> bool:
    """Whether this build holds a kernel of `op` for `backend` ("cpu" or "cuda")."""
    names = [entry["name"] for entry in op_table()]
    return bool(load().duomoe_has_kernel(names.index(op), ("cpu", "cuda").index(backend)))


def debug_checks(enabled: bool) -> None:
    """Turn faults in data into errors that name the token, or leave them dropped and counted.

    Checked: ids outside [-1, E) or beyond the rows, and rows that `max_rows` cuts off. The checks
    read tensors on the host; on a GPU they wait for the stream and cannot be captured in a graph.
    The environment variable DUOMOE_DEBUG=1 turns them on from the start.

    Args:
        enabled: on or off, for the whole process.
    """
    load().duomoe_set_debug_checks(int(bool(enabled)))


def missing_binding(package: str, framework: str, error: Exception) -> ImportError:
    """The error for a front end that cannot be imported: one sentence that says what to do."""
    reinstall = (
        "in duomoe's source folder: pip install --force-reinstall --no-deps --no-build-isolation ."
    )
    if getattr(error, "name", None) == framework:
        return ImportError(
            f"{package} needs {framework}, which is not installed; install it, then run {reinstall}"
        )
    return ImportError(
        f"{package} was installed without a {framework} binding that fits ({error}); "
        f"where {framework} is installed, run {reinstall}"
    )
