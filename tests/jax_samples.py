# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the JAX test files share. JAX must be importable."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from duomoe import RouterConfig
from jax.sharding import AxisType

import jax_frontend as jf

DEVICES = 4
CONFIG = RouterConfig(8, 2, score="sigmoid")


@functools.cache
def mesh(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    kinds: AxisType | tuple[AxisType, ...] = AxisType.Auto,
):
    """A mesh over the first devices; one kind is for all axes."""
    needed = math.prod(shape)
    if len(jax.devices()) < needed:
        pytest.skip(f"needs {needed} devices")
    kinds = kinds if isinstance(kinds, tuple) else (kinds,) * len(names)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[:needed])


def statistics_loss(z, config=CONFIG, num_sequences=1):
    routing = jf.route(z, config, num_sequences=num_sequences)
    ramp = jnp.arange(1.0, config.top_k + 1)
    return (
        2 * jf.load_balancing_loss(routing, config)
        + jf.z_loss(routing)
        + (routing.weights * ramp).sum()
    )
