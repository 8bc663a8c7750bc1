# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a comparison needs of this machine, and what a report says of it."""

from __future__ import annotations

import importlib
import os
import platform
from importlib import metadata
from typing import Any

import duomoe
from duomoe import library, ops

DEMO_MODULES = ("optax", "matplotlib", "tqdm")


class CannotRun(Exception):
    """Something is missing; the message is one sentence for the user."""


def require_front_ends() -> None:
    """Import both front ends.

    Raises:
        CannotRun: a framework or a binding is missing.
    """
    # Two frameworks' thread pools share the cores: an OpenMP thread that spins while it waits, as
    # torch's do by default, can slow a step a hundredfold when other work holds a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for front_end in ("jax_frontend", "torch_frontend"):
        try:
            importlib.import_module(front_end)
        except ImportError as error:
            raise CannotRun(str(error)) from error


def require_device(device: str) -> None:
    """Check that both frameworks see the device, and that this build has a kernel for it.

    Raises:
        CannotRun: otherwise.
    """
    if device == "cpu":
        return
    import jax
    import torch

    if not torch.cuda.is_available():
        raise CannotRun("PyTorch sees no CUDA device on this machine; use --device cpu")
    try:
        jax.devices(device)
    except RuntimeError as error:
        raise CannotRun(
            "JAX sees no CUDA device on this machine; install jax[cuda] or use --device cpu"
        ) from error
    if not any(library.has_kernel(name, device) for name in ops.table()):
        raise CannotRun(
            "this build of duomoe has no CUDA kernels; reinstall it where nvcc is found"
        )


def require_demo() -> None:
    """Import what the demo needs beyond the front ends.

    Raises:
        CannotRun: a package is missing.
    """
    for module in DEMO_MODULES:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise CannotRun(
                f"the demo needs {module}, which is not installed; "
                "run: pip install 'duomoe[verify]'"
            ) from error


def environment(device: str) -> dict[str, Any]:
    """Versions and machine, for a report."""
    import torch

    names = ("jax", "jaxlib", "torch", "numpy", "ml_dtypes")
    return {
        "duomoe": duomoe.__version__,
        **{name: metadata.version(name) for name in names},
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu_threads": len(os.sched_getaffinity(0)),
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
    }
