# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle's gradients by central differences; the front ends' gradients are the backward ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from adapters import BFLOAT16, JaxAdapter, TorchAdapter, bits
from duomoe import DispatchPlan, ExpertConfig, RouterConfig, Routing, ops, oracle
from duomoe.config import ACTIVATIONS
from oracle_cases import SCORES, Inputs, gate_inputs, loss_inputs, rng_of
from oracle_cases_experts import Dispatch, row_inputs

Adapter = JaxAdapter | TorchAdapter

DIFFERENTIABLE = [name for name, op in ops.table().items() if op.backward]
PLAN = Dispatch(6, 3, 4, capacity=5, alignment=4)
LOSS = {"top_k": 2, "coeff": 0.7}


def routing_attributes(**options: Any) -> dict[str, Any]:
    return RouterConfig(6, 3, **options).attributes(num_sequences=3)


def gradient_case(op: str, dtype: Any = np.float64) -> tuple[Inputs, dict[str, Any]]:
    """Small inputs of a differentiable op; `dtype` float64 is for the oracle only."""
    rng = rng_of("gradient", op)
    name = np.dtype(dtype).name
    if op == "gate":
        inputs = gate_inputs(5, 4, 3, "float32", "float32", "float32")
        chosen = {n: inputs[n].astype(dtype) for n in ("x", "router", "router_bias")}
        return chosen, {"gate_dtype": name}
    if op == "route":
        return {"logits": rng.normal(size=(6, 6)).astype(dtype)}, routing_attributes(scale=2.5)
    if op in ("load_balancing_loss", "z_loss"):
        inputs = loss_inputs(5, 4, False)
        names = [s.name for s in ops.table()[op].inputs]
        return {n: inputs[n] for n in names}, {
            k: LOSS[k] for k in LOSS if "load" in op or k == "coeff"
        }
    if op in ("permute", "combine"):
        inputs = row_inputs(PLAN, 5, "float32")
        inputs = {
            n: v if n in ("row_of_slot", "slot_of_row") else v.astype(dtype)
            for n, v in inputs.items()
        }
        inputs["weights"] = inputs["weights"].astype("f8" if name == "float64" else "f4")
        return {s.name: inputs[s.name] for s in ops.table()[op].inputs}, {}
    if op == "grouped_matmul":
        plan = PLAN.plan()
        rows = np.where(
            plan["slot_of_row"][:, None] >= 0,
            rng.normal(size=(len(plan["slot_of_row"]), 5)),
            np.nan,
        )
        inputs = {"rows": rows.astype(dtype), "w": rng.normal(size=(4, 5, 3)).astype(dtype)}
        inputs["bias"] = rng.normal(size=(4, 3)).astype(dtype)
        inputs |= {n: plan[n] for n in ("expert_offsets", "expert_counts")}
        return inputs, {"out_dtype": name}
    if op == "activate":
        return {"x": rng.normal(size=(3, 4)).astype(dtype)}, {"activation": "silu", "alpha": 1.702}
    if op == "glu":
        inputs = {n: 2 * rng.normal(size=(3, 4)).astype(dtype) for n in ("gate", "up")}
        return inputs, ExpertConfig(limit=2.5, alpha=1.702, up_offset=1.0).glu_attributes()
    if op == "scale_rows":
        scale = rng.normal(size=3).astype("f8" if name == "float64" else "f4")
        return {"x": rng.normal(size=(3, 4)).astype(dtype), "scale": scale}, {}
    if op == "scatter_weights":
        weights = rng.normal(size=(4, 3)).astype("f8" if name == "float64" else "f4")
        # Distinct, unused, repeated and out of range.
        indices = np.array([[4, 0, 2], [-1, 3, 1], [2, 2, 0], [5, 1, -7]], "i4")
        return {"weights": weights, "indices": indices}, {"num_experts": 5, "probs_dtype": name}
    if op == "normalize_scores":
        return {"logits": rng.normal(size=(4, 5)).astype(dtype)}, {"score": "sqrtsoftplus"}
    if op == "cast":
        return {"x": rng.normal(size=(3, 4)).astype(dtype)}, {"out_dtype": name}
    if op == "aux_loss":
        return {
            "probs": rng.random((6, 8)).astype(dtype),
            "expert_loads": rng.integers(0, 5, 8).astype("f4"),
            "live_tokens": np.float32(5).reshape(()),
        }, {**LOSS, "num_experts": 4, "num_tokens": 9}
    raise NotImplementedError(f"{op} has a gradient: give it inputs here")


def backward(
    run: Callable[..., dict[str, np.ndarray]],
    op: ops.Op,
    inputs: Inputs,
    attributes: dict[str, Any],
    outputs: dict[str, np.ndarray],
    cotangents: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Gradients by forward input, from the backward ops, which `run` runs."""
    gradients = {}
    names = [s.name for s in op.inputs]
    dtypes = [None if inputs.get(n) is None else inputs[n].dtype.name for n in names]
    pools = {
        "input": [inputs.get(n) for n in names],
        "output": list(outputs.values()),
        "grad": [cotangents.get(s.name) for s in op.outputs],
    }
    for step in op.gradient_plan(tuple(inputs.get(n) is not None for n in names)).steps:
        given = {
            s.name: pools[kind][i]
            for s, (kind, i) in zip(step.op.inputs, step.sources, strict=True)
        }
        result = run(step.op.name, given, op.gradient_attributes(step, attributes, dtypes))
        for target, gradient in zip(step.targets, result.values(), strict=True):
            # A gradient without leading axes of its input is the same along them.
            gradients[names[target]] = np.broadcast_to(gradient, inputs[names[target]].shape)
    return gradients


def run_oracle(op: str, inputs: Inputs, attributes: dict[str, Any]) -> dict[str, np.ndarray]:
    return getattr(oracle, op)(**inputs, **attributes)


def check_by_differences(op: str, inputs: Inputs, attributes: dict[str, Any]) -> None:
    spec = ops.table()[op]
    rng = rng_of("differences", op)
    out = run_oracle(op, inputs, attributes)
    floats = [s.name for s in spec.outputs if s.is_float]
    cotangents = {n: rng.normal(size=out[n].shape) for n in floats}
    if op == "route":
        inputs = {**inputs, "given_indices": out["indices"]}

    def objective(name: str, value: np.ndarray) -> float:
        result = run_oracle(op, {**inputs, name: value}, attributes)
        return sum(float((result[n] * cotangents[n]).sum()) for n in floats)

    step = 1e-5
    for name, gradient in backward(run_oracle, spec, inputs, attributes, out, cotangents).items():
        x = inputs[name].astype("f8")
        want = np.zeros(x.shape)
        for at in np.ndindex(x.shape):
            if np.isfinite(x[at]):
                nudge = np.zeros(x.shape)
                nudge[at] = step
                want[at] = (objective(name, x + nudge) - objective(name, x - nudge)) / (2 * step)
        assert np.abs(want).max() > 1e-3
        np.testing.assert_allclose(
            gradient, want, rtol=1e-6, atol=2e-8 * np.abs(want).max(), err_msg=name
        )


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_oracle_gradient_is_the_limit_of_differences(op: str) -> None:
    check_by_differences(op, *gradient_case(op))


WAYS: dict[str, tuple[Inputs, dict[str, Any]]] = {
    "mask": ({"token_mask": np.arange(6) % 4 != 1}, {}),
    "groups": (
        {"bias": np.linspace(0, 1, 6)},
        {"num_groups": 3, "group_top_k": 2, "counts": "unbiased"},
    ),
    "given": ({"given_indices": np.array([[0, -1, 3], [2, 2, 5], [6, 1, -5]] * 2, "i4")}, {}),
    "slice": ({"first_token": np.int32(4), "total_tokens": 9}, {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("normalize", [True, False, "if_k_gt_1"])
@pytest.mark.parametrize("score", SCORES)
def test_oracle_route_gradient(score: Any, normalize: Any, way: str) -> None:
    for eps_mode, eps in itertools.product(("add", "clamp"), (0.0, 1e-20, 1e-6, 20.0)):
        given, options = WAYS[way]
        attributes = routing_attributes(
            score=score, normalize=normalize, eps=eps, eps_mode=eps_mode, scale=1.5, **options
        )
        attributes["total_tokens"] = given.get("total_tokens", 0)
        inputs = {k: v for k, v in given.items() if k != "total_tokens"}
        logits = 2 * rng_of(score, way).normal(size=(6, 6))
        check_by_differences("route", {"logits": logits, **inputs}, attributes)


@pytest.mark.parametrize("score", SCORES)
def test_oracle_normalized_scores_gradient(score: str) -> None:
    logits = 3 * rng_of("normalized", score).normal(size=(4, 7))
    check_by_differences("normalize_scores", {"logits": logits}, {"score": score})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_oracle_activation_gradients(activation: Any) -> None:
    rng = rng_of("activation", activation)
    x, up = 3 * rng.normal(size=(2, 5, 4))
    for alpha in (1.0, -0.3):
        attributes = {"activation": activation, "alpha": alpha}
        check_by_differences("activate", {"x": x}, attributes)
        for limit, offset in ((0.0, 0.0), (1.5, -0.5)):
            options = {**attributes, "limit": limit, "up_offset": offset}
            check_by_differences("glu", {"gate": x, "up": up}, options)


@pytest.mark.parametrize("op", ["permute", "grouped_matmul"])
def test_oracle_gradient_without_the_optional_input(op: str) -> None:
    inputs, attributes = gradient_case(op)
    del inputs["weights" if op == "permute" else "bias"]
    check_by_differences(op, inputs, attributes)


@pytest.mark.parametrize("live", [None, 3])
def test_oracle_aux_loss_gradient(live: int | None) -> None:
    inputs, attributes = gradient_case("aux_loss")
    inputs["live_tokens"] = None if live is None else np.float32(live).reshape(())
    check_by_differences("aux_loss", inputs, attributes)


def test_oracle_clamp_has_no_gradient_through_the_divisor() -> None:
    attributes = routing_attributes(score="sigmoid", eps=20.0, eps_mode="clamp", scale=20.0)
    logits = np.linspace(-1, 1, 6)[None].repeat(3, axis=0)
    out = oracle.route(logits=logits, **attributes)
    s = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(out["weights"], np.take_along_axis(s, out["indices"], 1), rtol=1e-14)


# -- front ends ------------------------------------------------------------------------------------


def public_call(
    adapter: Adapter, op: str, arrays: dict[str, Any], attributes: dict[str, Any]
) -> list[Any]:
    """The float outputs of the public function that stands for an op."""
    f = adapter.functions
    plan = DispatchPlan(
        **{k.name: arrays.get(k.name) for k in ops.table()["plan_dispatch"].outputs}
    )
    routing = Routing(**{k.name: arrays.get(k.name) for k in ops.table()["route"].outputs})
    if op == "gate":
        return [f.gate(arrays["x"], arrays["router"], arrays["router_bias"], **attributes)]
    if op == "route":
        result = f.route(arrays["logits"], RouterConfig(6, 3, scale=2.5), num_sequences=3)
        return [result.weights, result.score_sums, result.logsumexp_sq]
    if op == "load_balancing_loss":
        return [f.load_balancing_loss(routing, RouterConfig(4, 2), coeff=attributes["coeff"])]
    if op == "z_loss":
        return [f.z_loss(routing, coeff=attributes["coeff"])]
    if op == "permute":
        return [f.permute(arrays["x"], plan, arrays["weights"])]
    if op == "combine":
        return [f.combine(arrays["rows"], plan, arrays["weights"])]
    if op == "grouped_matmul":
        return [f.grouped_matmul(arrays["rows"], arrays["w"], plan, arrays["bias"], **attributes)]
    if op == "activate":
        return [f.activate(arrays["x"], **attributes)]
    if op == "glu":
        return [f.glu(arrays["gate"], arrays["up"], **attributes)]
    if op == "scale_rows":
        return [f.scale_rows(arrays["x"], arrays["scale"])]
    if op in ("scatter_weights", "normalize_scores", "aux_loss", "cast"):  # no function
        spec = ops.table()[op]
        return list(adapter.apply(spec, [arrays.get(s.name) for s in spec.inputs], attributes))
    raise NotImplementedError(f"{op} has a gradient: call its public function here")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradient_of_the_public_function_is_the_backward_op(
    adapter: Adapter, op: str, dtype: str
) -> None:
    spec = ops.table()[op]
    inputs, attributes = gradient_case(op, BFLOAT16 if dtype == "bfloat16" else np.float32)
    targets = sorted({spec.inputs[t].name for step in spec.gradient_steps for t in step.targets})
    constants = {n: adapter.array(v) for n, v in inputs.items() if n not in targets}
    outputs, pull = adapter.vjp(
        lambda *xs: public_call(
            adapter, op, {**constants, **dict(zip(targets, xs, strict=True))}, attributes
        ),
        *(inputs[n] for n in targets),
    )
    direct = adapter.call(op, inputs, attributes)
    floats = [s.name for s in spec.outputs if s.is_float]
    rng = rng_of("cotangents", op)
    cotangents = {}
    for name, output in zip(floats, outputs, strict=True):
        np.testing.assert_array_equal(bits(output), bits(direct[name]), err_msg=name)
        cotangents[name] = rng.normal(size=output.shape).astype(output.dtype)
    want = backward(adapter.call, spec, inputs, attributes, direct, cotangents)
    for name, gradient in zip(targets, pull(*cotangents.values()), strict=True):
        assert gradient.dtype == inputs[name].dtype
        np.testing.assert_array_equal(bits(gradient), bits(want[name]), err_msg=name)
