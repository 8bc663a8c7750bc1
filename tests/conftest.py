# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import sys
from pathlib import Path

# Before JAX is imported anywhere: several fake devices for the sharding tests.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pytest
from adapters import JaxAdapter, TorchAdapter


@pytest.fixture(scope="session")
def jax_adapter() -> JaxAdapter:
    pytest.importorskip("jax", reason="JAX is not installed")
    return JaxAdapter()


@pytest.fixture(scope="session")
def torch_adapter() -> TorchAdapter:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return TorchAdapter()


@pytest.fixture(
    params=[
        pytest.param("jax", marks=pytest.mark.jax),
        pytest.param("torch", marks=pytest.mark.torch),
    ]
)
def adapter(request: pytest.FixtureRequest) -> JaxAdapter | TorchAdapter:
    """Each front end in turn."""
    return request.getfixturevalue(f"{request.param}_adapter")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh data for every test, the same in every run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
