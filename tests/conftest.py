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
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pytest
from adapters import JaxAdapter, TorchAdapter
from cuda_checks import GPU, Check, checker

# Their tests of single ops and of the block run on the GPU, in both front ends, where
# DUOMOE_TEST_DEVICE is cuda, which `-m cuda` alone implies on a machine with a GPU.
ON_DEVICE = (
    *("test_balance", "test_block", "test_losses", "test_mismatches", "test_oracle"),
    *("test_router_selection", "test_router_weights", "test_te", "test_te_chunks"),
    *("test_te_errors", "test_te_frameworks", "test_te_permutation", "test_te_permutation_errors"),
)


def device() -> str:
    return os.environ.get("DUOMOE_TEST_DEVICE", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Before a test imports JAX, which makes its own choice where only `-m cuda` asks for a GPU."""
    if config.option.markexpr == "cuda" and GPU and "DUOMOE_TEST_DEVICE" not in os.environ:
        os.environ["DUOMOE_TEST_DEVICE"] = "cuda"
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu" if device() == "cpu" else "cuda,cpu")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m cuda` needs nothing that only other tests import."""
    name = collection_path.stem
    if config.option.markexpr != "cuda" or not name.startswith("test_"):
        return None
    return None if name.startswith("test_cuda") or name in ON_DEVICE else True


def pytest_itemcollected(item: pytest.Item) -> None:
    if device() != "cpu" and item.path.stem in ON_DEVICE:
        item.add_marker(pytest.mark.cuda)


@pytest.hookimpl(trylast=True)  # of the tests that are left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """DUOMOE_TEST_SHARE=2/8 keeps the second of eight shares, for processes side by side."""
    part, parts = map(int, os.environ.get("DUOMOE_TEST_SHARE", "1/1").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"DUOMOE_TEST_SHARE={part}/{parts}: allowed are 1/N to N/N")
    others = [item for i, item in enumerate(items) if i % parts != part - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = items[part - 1 :: parts]


@pytest.fixture(scope="session")
def jax_adapter() -> JaxAdapter:
    pytest.importorskip("jax", reason="JAX is not installed")
    return JaxAdapter()


@pytest.fixture(scope="session")
def torch_adapter() -> TorchAdapter:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return TorchAdapter(device())


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
