# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""duomoe: Mixture-of-Experts routing, losses, dispatch and experts for JAX and PyTorch, from one
core.

This package holds what both front ends share and neither framework owns; importing it imports
neither. The functions are in `jax_frontend` and `torch_frontend`, with the same names and
arguments.
"""

from duomoe import presets
from duomoe.config import ExpertConfig, RouterConfig
from duomoe.library import debug_checks
from duomoe.replay import RoutingRecord
from duomoe.results import DispatchPlan, MoEOutput, MoEParams, QuantileBins, Routing

__version__ = "0.1.0"

__all__ = [
    "DispatchPlan",
    "ExpertConfig",
    "MoEOutput",
    "MoEParams",
    "QuantileBins",
    "RouterConfig",
    "Routing",
    "RoutingRecord",
    "__version__",
    "debug_checks",
    "presets",
]
