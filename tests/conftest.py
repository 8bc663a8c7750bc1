# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import sys
from pathlib import Path

# Before JAX is imported anywhere: several fake devices for the sharding tests.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# torch's OpenMP threads spin at barriers otherwise, and slow down whatever else runs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# DUOMOE_TEST_DEVICE=cuda runs the tests of single ops on the GPU, in both front ends.
DEVICE = os.environ.get("DUOMOE_TEST_DEVICE", "cpu")
os.environ.setdefault("JAX_PLATFORMS", "cpu" if DEVICE == "cpu" else "cuda,cpu")
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pytest
from adapters import JaxAdapter, TorchAdapter
from cuda_checks import Check, checker


@pytest.fixture(scope="session")
def jax_adapter() -> JaxAdapter:
    pytest.importorskip("jax", reason="JAX is not installed")
    return JaxAdapter()


@pytest.fixture(scope="session")
def torch_adapter() -> TorchAdapter:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return TorchAdapter(DEVICE)


@pytest.fixture(
    params=[
        pytest.param("jax", marks=pytest.mark.jax),
        pytest.param("torch", marks=pytest.mark.torch),
    ]
)
def adapter(request: pytest.FixtureRequest) -> JaxAdapter | TorchAdapter:
    """Each front end in turn."""
    return request.getfixturevalue(f"{request.param}_adapter")


@pytest.fixture(scope="session")
def gpu() -> TorchAdapter:
    """For tests that cuda_checks.MARKS marks."""
    return TorchAdapter("cuda")


@pytest.fixture(scope="session")
def check(gpu: TorchAdapter) -> Check:
    """Runs an op on the CPU and on the GPU, and compares the bits."""
    return checker(TorchAdapter("cpu"), gpu)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh data for every test, the same in every run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
