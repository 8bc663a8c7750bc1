# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark without a GPU: its cases, its peers' results, its report. No test asserts a
time.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu_bench
import gpu_dispatch
import gpu_jax
import gpu_router
import gpu_targets
from duomoe import RouterConfig
from gpu_common import Budget, Clock, Time, host_time, of_two, table

pytestmark = [pytest.mark.jax, pytest.mark.torch]
TOKENS = 40


def numpy(x: Any) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        return x.detach().double().numpy()
    return np.asarray(x, np.float64)


def close(got: Any, want: Any, tolerance: float) -> None:
    a, b = numpy(got), numpy(want)
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-30)


def small(case: Any) -> Any:
    width = {"width": 8} if getattr(case, "width", 0) else {}
    return dataclasses.replace(case, tokens=TOKENS, dtype="float32", **width)


def test_names_are_unique_and_targets_exist() -> None:
    cases: dict[str, Any] = {}
    for case in gpu_bench.all_cases():
        assert cases.setdefault(case.name, case) == case
    for target in gpu_targets.TARGETS:
        assert target.name in cases
        assert not target.other or target.other in cases
    for of_one in gpu_bench.with_peers().values():
        assert {c.name for c in of_one} <= {c.name for c in gpu_bench.target_cases()}


@pytest.mark.parametrize(
    ("shape", "values"),
    [(4, "normal"), (2, "normal"), *((0, values) for values in gpu_router.VALUES)],
)
def test_routers_agree(shape: int, values: str) -> None:
    _, config, bias = gpu_router.MAIN[shape]
    case = gpu_router.RouteCase("route", TOKENS, config, bias, values=values)
    inputs = case.inputs("cpu")
    ours = case.torch_ours(*inputs)()
    through_jax = case.jax_ours(*gpu_jax.to_jax(inputs))
    assert np.array_equal(numpy(ours.weights), numpy(through_jax[0]))
    assert np.array_equal(numpy(ours.indices), numpy(through_jax[1]))
    jax_function, arrays = case.jax_peer(*gpu_jax.to_jax(inputs))
    for weights, score_sums, squares, ids, counts in (
        case.torch_peer(*inputs)(),
        jax_function(*arrays),
    ):
        close(score_sums, ours.score_sums[0], 1e-5)
        close(squares, ours.logsumexp_sq[0], 1e-5)
        if values == "normal":  # with ties, the peers' choice is their own
            same = np.sort(numpy(ids)) == np.sort(numpy(ours.indices))
            assert same.mean() > 0.99
            assert numpy(counts).sum() == TOKENS * config.top_k
            if same.all():
                close(np.sort(numpy(weights)), np.sort(numpy(ours.weights)), 1e-5)


def test_skewed_logits_skew_the_loads() -> None:
    case = gpu_router.RouteCase("route", 2000, RouterConfig(64, 2, score="sigmoid"), True)
    normal = case.torch_ours(*case.inputs("cpu"))()
    zipf = dataclasses.replace(case, values="zipf")
    skewed = zipf.torch_ours(*zipf.inputs("cpu"))()
    assert skewed.expert_counts.max() > 3 * normal.expert_counts.max()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradients_of_the_peers(score: str) -> None:
    # All experts selected: the slots' order aside, there is nothing to choose.
    config = RouterConfig(6, 6, score=score)  # type: ignore[arg-type]
    case = gpu_router.RouteCase("route_bwd", TOKENS, config)
    z, ids, *grads = case.inputs("cpu")
    grads[0] = torch.ones_like(grads[0])
    inputs = (z, ids, *grads)
    ours = case.torch_ours(*inputs)()
    (through_jax,) = case.jax_ours(*gpu_jax.to_jax(inputs))
    assert np.array_equal(numpy(ours), numpy(through_jax))
    close(case.torch_peer(*inputs)()[0], ours, 1e-4)
    f, arrays = case.jax_peer(*gpu_jax.to_jax(inputs))
    close(f(*arrays)[0], ours, 1e-4)


@pytest.mark.parametrize("op", ["plan_dispatch", *gpu_dispatch.MOVES])
@pytest.mark.parametrize("values", ["normal", "zipf", "equal"])
def test_moves_agree(op: str, values: str) -> None:
    case = small(gpu_dispatch.DispatchCase(op, TOKENS, 16, 3, 8, values=values))
    inputs = case.inputs("cpu")
    ours = case.torch_ours(*inputs)()
    if op == "plan_dispatch":
        ours = ours.row_of_slot, ours.slot_of_row
    through_jax = case.jax_ours(*gpu_jax.to_jax(inputs))
    f, arrays = case.jax_peer(*gpu_jax.to_jax(inputs))
    peers = [case.torch_peer(*inputs)(), f(*arrays)]
    if op == "plan_dispatch":
        peers = [(inverse.reshape(TOKENS, -1), order) for order, inverse, _ in peers]
    ours, *peers = (x if isinstance(x, tuple | list) else (x,) for x in (ours, *peers))
    for i, x in enumerate(ours):
        assert np.array_equal(numpy(x), numpy(through_jax[i]))
        for peer in peers:
            close(peer[i], x, 1e-5)


def test_losses_agree() -> None:
    for case in gpu_dispatch.loss_cases():
        inputs = small(case).inputs("cpu")
        ours = case.torch_ours(*inputs)()
        close(case.torch_peer(*inputs)(), ours, 1e-5)
        close(case.jax_ours(*gpu_jax.to_jax(inputs)), ours, 0)


def test_floor_bytes() -> None:
    route = gpu_router.RouteCase("route", 100, RouterConfig(16, 2), dtype="bfloat16")
    assert route.floor_bytes == 100 * 16 * 2 + 100 * 2 * (4 + 4)
    backward = dataclasses.replace(route, op="route_bwd")
    assert backward.floor_bytes == 2 * 100 * 16 * 2 + 100 * 2 * (4 + 4)
    combine = gpu_dispatch.DispatchCase("combine_bwd", 100, 16, 2, 32)
    assert combine.floor_bytes == 100 * 32 * 2 * (1 + 2 + 2) + 200 * (4 + 4 + 4)


def test_judge() -> None:
    targets = [
        gpu_targets.Target("a", us=5),
        gpu_targets.Target("b", us=1, floors=2),
        gpu_targets.Target("c", other="a"),
        gpu_targets.Target("d", us=1),
        gpu_targets.Target("a", other="d"),
    ]
    rows = {
        "a": {"us": 5.0, "floor_us": 1.0},
        "b": {"us": 8.0, "floor_us": 3.0},
        "c": {"us": 4.9, "floor_us": 0.0},
    }
    host = {"torch: route": {"us": 15.1}}
    met = [v["met"] for v in gpu_targets.judge(rows, host, targets)]
    assert met == [True, False, True, None, None, False]


def test_budget_skips_by_name_and_survives_failures() -> None:
    budget = Budget(0.0)
    assert not budget.allows("late")
    assert budget.skipped == ["late"]
    assert budget.guard("bad", lambda: 1 // 0) is None
    assert budget.failed["bad"].startswith("ZeroDivisionError")
    assert Budget(100).allows("early")


def test_times_of_a_dry_run() -> None:
    assert of_two([2.0, 4.0, 6.0], [5.0, 5.0, 5.0], 2) == Time(2.5, 0.25)
    clock = Clock("cpu")
    case = gpu_router.RouteCase("route", 8, RouterConfig(8, 2))
    assert gpu_jax.ours(clock, case).spread >= 0
    assert host_time(clock, lambda: None, 3, lambda _: None)["done"] > 0
    assert table(["a", "b"], [["x", 1.5], ["yy", None]]) == "a     b\nx   1.5\nyy    -"


def test_quick_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    cases = [gpu_bench.target_cases()[0], *gpu_dispatch.plan_cases()[:1]]
    monkeypatch.setattr(gpu_bench, "target_cases", lambda: cases)
    monkeypatch.setattr(gpu_bench.gpu_host, "jax_runs", lambda device: {})
    monkeypatch.setattr(gpu_bench.gpu_host, "torch_runs", lambda device: {"torch: x": list})
    monkeypatch.setattr(gpu_bench.gc, "freeze", lambda: None)
    arguments = ["gpu_bench", "--device", "cpu", "--tiny", "--quick", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu_bench.main() == 0
    record = json.loads((tmp_path / "gpu_bench.json").read_text())
    assert [row["name"] for row in record["rows"]] == [case.name for case in cases]
    assert {v["met"] for v in record["targets"]} == {None}  # a dry run judges nothing
    assert cases[1].shape in capsys.readouterr().out
