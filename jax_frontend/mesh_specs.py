# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Partitions of operands along the axes of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def spec_entry(axes: tuple[Any, ...]) -> Any:
    """An entry of a PartitionSpec."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def on_mesh(mesh: Any, args: Sequence[Any], context: Any) -> tuple[Any, list[PartitionSpec]]:
    """The mesh that a call's operands lie on, and their partitions.

    JAX hands over no mesh, and shardings without a spec, where only specs within the program name
    the mesh of set_mesh. Both are read off the slices that each device has.

    Args:
        mesh: from JAX, or an empty one.
        args: shapes with shardings.
        context: the abstract mesh that the call was traced under.
    """
    if not mesh.empty:
        return mesh, [a.sharding.spec for a in args]
    slices = [a.sharding.devices_indices_map(a.shape) for a in args]
    devices = np.array(list(slices[0]))
    if context.size == devices.size and not context.empty:
        mesh = Mesh(devices.reshape(context.axis_sizes), context.axis_names)
    else:
        mesh = Mesh(devices, ("devices",))

    def spec(shape: tuple[int, ...], indices: Mapping[Any, tuple[slice, ...]]) -> PartitionSpec:
        entries = []
        for i in range(len(shape)):
            starts = np.array([index[i].start or 0 for index in indices.values()])
            grid = starts.reshape(mesh.axis_sizes)
            # Of several mesh axes the first is the one with the largest step.
            steps = {
                name: int(np.take(grid, 1, axis).flat[0]) - int(grid.flat[0])
                for axis, name in enumerate(mesh.axis_names)
                if grid.shape[axis] > 1
            }
            names = sorted((n for n, step in steps.items() if step), key=lambda n: -steps[n])
            entries.append(spec_entry(tuple(names)))
        found = PartitionSpec(*entries)
        if NamedSharding(mesh, found).devices_indices_map(shape) == indices:
            return found
        return PartitionSpec()  # no partition along mesh axes: gathered

    return mesh, [spec(a.shape, indices) for a, indices in zip(args, slices, strict=True)]
