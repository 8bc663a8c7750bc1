# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Faults in data: dropped and counted, or, with debug checks, an error that names the token."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import duomoe
import numpy as np
import pytest
from duomoe import RouterConfig

CONFIG = RouterConfig(8, 2)
Z = np.zeros((6, 8), np.float32)
IDS = np.zeros((6, 2), np.int32)


def wild_slot(f, a):
    plan = f.plan_dispatch(a.array(IDS), 8)
    slots = a.numpy(plan.slot_of_row).copy()
    slots[0] = 99
    rows = f.permute(a.array(Z + 1), dataclasses.replace(plan, slot_of_row=a.array(slots)))
    return dataclasses.replace(plan, slot_of_row=rows)


FAULTS = {
    "slot of row": (
        "permute: slot_of_row of row 0 is 99, allowed: -1 .unused. to 11",
        wild_slot,
    ),
    "capacity and max_rows": (
        "plan_dispatch: max_rows leaves expert 0 2 of 3 rows(\n|$)",
        lambda f, a: f.plan_dispatch(
            a.array(IDS[:2]),
            8,
            capacity=3,
            max_rows=2,
            drop_order="weight",
            weights=a.array(np.array([[0.1, 0.2], [0.3, 0.4]], np.float32)),
        ),
    ),
    "given id": (
        "route: indices of token 4, slot 1 is 8, allowed: -1 .unused. to 7",
        lambda f, a: f.route(
            a.array(Z), CONFIG, indices=a.array(np.where(np.arange(12).reshape(6, 2) == 9, 8, IDS))
        ),
    ),
    "largest id": (
        "route: indices of token 0, slot 0 is 2147483647, allowed",
        lambda f, a: f.route(a.array(Z), CONFIG, indices=a.array(np.full((6, 2), 2**31 - 1, "i4"))),
    ),
    "planned id": (
        "plan_dispatch: indices of token 0, slot 0 is -2, allowed",
        lambda f, a: f.plan_dispatch(a.array(IDS - 2), 8),
    ),
    "max_rows": (
        "plan_dispatch: max_rows leaves expert 0 4 of 12 rows; the first dropped token is 2",
        lambda f, a: f.plan_dispatch(a.array(IDS), 8, max_rows=4),
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_in_data_are_dropped_or_named(case: str, adapter) -> None:
    """Dropped without an error by default; with debug checks an error that names the token."""
    words, call = FAULTS[case]
    jax_like = adapter.name == "jax"

    def run_to_the_end():
        result = call(adapter.functions, adapter)
        return [adapter.numpy(x) for x in vars(result).values() if x is not None]

    # Every wild id, slot or row ends as an unused one.
    assert any((x == -1).any() or (x == 0).all(axis=-1).any() for x in run_to_the_end())
    duomoe.debug_checks(True)
    try:
        with pytest.raises(ValueError if jax_like else RuntimeError, match=words):
            run_to_the_end()
        adapter.functions.route(adapter.array(Z), CONFIG, indices=adapter.array(IDS - 1))
        masked = np.where(np.arange(6)[:, None] == 3, 99, IDS)
        mask = adapter.array(np.arange(6) != 3)
        routing = adapter.functions.route(
            adapter.array(Z), CONFIG, indices=adapter.array(masked), token_mask=mask
        )
        assert (adapter.numpy(routing.indices)[3] == -1).all()
    finally:
        duomoe.debug_checks(False)
    run_to_the_end()


def test_debug_checks_from_the_environment() -> None:
    code = """
import torch, torch_frontend as tf
try:
    tf.plan_dispatch(torch.full((2, 2), 9), 8)
except RuntimeError as error:
    print(error)
"""
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"DUOMOE_DEBUG": "1"},
        capture_output=True,
        text=True,
    )
    assert "indices of token 0, slot 0 is 9, allowed: -1 (unused) to 7" in out.stdout, out.stderr
