# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The parameters of the nnx modules, made from their specs and read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from duomoe.results import Array
from flax import nnx
from flax.core import spmd

from jax_frontend import modules


def declare(
    module: nnx.Module,
    specs: Mapping[str, modules.ParameterSpec],
    kernel_init: Callable[..., Array],
    dtype: Any,
    rngs: nnx.Rngs,
    absent: tuple[str, ...],
) -> None:
    """Set the parameters as attributes, None for those that are absent."""
    # nnx lays a parameter out when it is made, and fails without a mesh: logical names mean
    # something only where a mesh and rules are set.
    laid_out = (
        nnx.using_eager_sharding()
        and not jax.sharding.get_abstract_mesh().empty
        and bool(spmd.get_logical_axis_rules())
    )
    for name in absent:
        setattr(module, name, nnx.data(None))
    for name, spec in specs.items():
        make = modules.initializer(name, kernel_init)
        value = make(rngs.params(), spec.shape, dtype)
        parameter = nnx.Param(value, out_sharding=spec.axes, eager_sharding=laid_out)
        setattr(module, name, parameter)


def values(module: nnx.Module, names: tuple[str, ...]) -> dict[str, Array]:
    """The parameters that there are."""
    found = ((name, getattr(module, name)) for name in names)
    return {name: variable.get_value() for name, variable in found if variable is not None}
