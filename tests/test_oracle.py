# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every op of the table, on both front ends, against the NumPy float64 oracle."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
from adapters import JaxAdapter, TorchAdapter
from duomoe import ops, oracle
from oracle_bounds import BOUNDS, assert_close
from oracle_cases import CASES, Case

Adapter = JaxAdapter | TorchAdapter

EVERY_CASE = [
    pytest.param(op, case, id=f"{op}-{case.name}") for op, cases in CASES.items() for case in cases
]


@functools.cache
def expected(op: str, case: Case) -> tuple[Any, Any, oracle.Outputs, Any]:
    """Inputs, attributes, outputs and bounds, made once for both front ends."""
    inputs, attributes = case.make()
    want = getattr(oracle, op)(**inputs, **attributes)
    return inputs, attributes, want, BOUNDS[op](inputs, attributes, want)


@pytest.mark.parametrize("op", ops.table())
def test_every_op_has_an_oracle_and_cases(op: str) -> None:
    spec = ops.table()[op]
    arguments = inspect.signature(getattr(oracle, op)).parameters
    assert list(arguments) == [s.name for s in (*spec.inputs, *spec.attributes)]
    assert CASES[op]
    optional = {s.name for s in spec.inputs if s.optional}
    assert {n for n, p in arguments.items() if p.default is None} == optional
    for case in CASES[op][:1]:
        inputs, attributes = case.make()
        assert list(getattr(oracle, op)(**inputs, **attributes)) == [s.name for s in spec.outputs]


def test_no_case_is_for_an_unknown_op() -> None:
    assert set(CASES) == set(BOUNDS) == set(ops.table())


@pytest.mark.parametrize("op, case", EVERY_CASE)
def test_op_agrees_with_the_oracle(adapter: Adapter, op: str, case: Case) -> None:
    inputs, attributes, want, bounds = expected(op, case)
    got = adapter.call(op, inputs, attributes)
    for name, value in want.items():
        assert_close(name, got[name], value, bounds.get(name, 0.0))
