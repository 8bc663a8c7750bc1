# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the JAX test files share. JAX must be importable."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from duomoe import RouterConfig
from jax.sharding import AxisType

import jax_frontend as jf

DEVICES = 4
CONFIG = RouterConfig(8, 2, score="sigmoid")


@functools.cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType = AxisType.Auto):
    if len(jax.devices()) < DEVICES:
        pytest.skip(f"needs {DEVICES} devices")
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def statistics_loss(z, config=CONFIG, num_sequences=1):
    routing = jf.route(z, config, num_sequences=num_sequences)
    ramp = jnp.arange(1.0, config.top_k + 1)
    return (
        2 * jf.load_balancing_loss(routing, config)
        + jf.z_loss(routing)
        + (routing.weights * ramp).sum()
    )
