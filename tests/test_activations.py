# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The activations' accuracy over all of float32, and what they make of infinities and NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from adapters import JaxAdapter, TorchAdapter
from duomoe import oracle
from duomoe.config import ACTIVATIONS
from oracle_bounds import activation_errors

Adapter = JaxAdapter | TorchAdapter

NAN, INF = np.nan, np.inf
LARGEST, SMALLEST_NORMAL = float(np.finfo("f4").max), float(np.finfo("f4").tiny)
# What docs/numerics.md promises of f(x), in ulps, where it is normal.
ULPS = {"silu": 4.5, "gelu": 6.5, "gelu_tanh": 4.5, "relu": 0.0, "relu_squared": 0.5}
VARIANTS = [(name, 1.0) for name in ACTIVATIONS]
VARIANTS += [("silu", alpha) for alpha in (1.702, -1.3, 0.1, 1e4, 1e-4)]


def inputs(alpha: float) -> np.ndarray:
    """Every 2^15 + 1-th float32, and the two tails more densely."""
    everywhere = np.arange(0, 2**32, 2**15 + 1, dtype=np.uint32).view("f4")
    tails = np.linspace(-150, 150, 40001) / abs(alpha)
    x = np.concatenate([everywhere, tails.astype("f4")])
    return x[np.isfinite(x)]


def run(adapter: Adapter, x: Any, activation: str, alpha: float = 1.0) -> tuple[Any, Any]:
    """f(x) and f'(x), [N]."""
    x = np.asarray(x, "f4").reshape(1, -1)
    options = {"activation": activation, "alpha": alpha}
    value = adapter.call("activate", {"x": x}, options)["out"]
    slope = adapter.call("activate_bwd", {"grad_out": np.ones_like(x), "x": x}, options)["grad_x"]
    return value[0], slope[0]


@pytest.mark.parametrize("activation, alpha", VARIANTS)
def test_accuracy_over_float32(torch_adapter: TorchAdapter, activation: str, alpha: float) -> None:
    x, alpha = inputs(alpha), float(np.float32(alpha))
    got = run(torch_adapter, x, activation, alpha)
    wide = x.astype("f8")
    with np.errstate(over="ignore", under="ignore"):
        want = oracle.activation_of(activation, wide, alpha)
        bounds = activation_errors(wide, {"activation": activation, "alpha": alpha})
    for a, b, bound in zip(got, want, bounds, strict=True):
        fits = np.abs(b) < LARGEST
        assert np.isinf(a[~fits]).all()
        assert (np.abs(a - b)[fits] <= bound[fits]).all()
    value, exact = got[0].astype("f8"), want[0]
    normal = (np.abs(exact) >= SMALLEST_NORMAL) & (np.abs(exact) < LARGEST)
    ulp = np.spacing(np.abs(exact[normal]).astype("f4")).astype("f8")
    # The ulp of an exact value just below a power of two, where float32 rounds up to it.
    ulp = np.minimum(ulp, 2.0 ** (np.frexp(exact[normal])[1] - 24))
    assert (np.abs(value - exact)[normal] / ulp).max(initial=0) <= ULPS[activation]
    assert normal.sum() > 10000


# x, f(x) and f'(x). The values are the frameworks', NaN at -inf included. The slopes are limits at
# infinities, where the frameworks mostly have NaN, and NaN at NaN, where torch has 1 and JAX 0 for
# relu.
SPECIAL = {
    "silu": [(INF, INF, 1.0), (-INF, NAN, 0.0), (LARGEST, LARGEST, 1.0), (-LARGEST, 0.0, 0.0)],
    "relu": [(INF, INF, 1.0), (-INF, 0.0, 0.0), (0.0, 0.0, 0.0), (1e-45, 1e-45, 1.0)],
    "relu_squared": [(INF, INF, INF), (-INF, 0.0, 0.0), (LARGEST, INF, INF), (-1e-45, 0.0, 0.0)],
}
SPECIAL["gelu"] = SPECIAL["gelu_tanh"] = SPECIAL["silu"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(adapter: Adapter, activation: str) -> None:
    x, value, slope = np.array([*SPECIAL[activation], (NAN, NAN, NAN)], "f4").T
    got = run(adapter, x, activation)
    np.testing.assert_array_equal(got[0], value)
    np.testing.assert_array_equal(got[1], slope)


@pytest.mark.torch
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_are_those_of_torch(torch_adapter: TorchAdapter, activation: str) -> None:
    """Also at infinities, but for NaN that torch's vectorised functions alone have."""
    torch = pytest.importorskip("torch")
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.nn.functional.relu,
        "relu_squared": lambda x: torch.nn.functional.relu(x) ** 2,
    }
    x = np.concatenate([[NAN, INF, -INF, 0.0], np.linspace(-9, 9, 4001)]).astype("f4")
    leaf = torch.from_numpy(x.astype("f8")).requires_grad_()
    want = functions[activation](leaf)
    (slope,) = torch.autograd.grad(want.sum(), leaf)
    got = run(torch_adapter, x, activation)
    np.testing.assert_allclose(got[0], want.detach(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(got[1][3:], slope[3:], rtol=1e-6, atol=1e-6)
    assert np.isnan(got[1][0])


@pytest.mark.parametrize("activation", ["relu", "relu_squared"])
def test_no_gradient_reaches_what_relu_cut_off(adapter: Adapter, activation: str) -> None:
    """As in both frameworks, even of an infinity or NaN."""
    x = np.array([[-1.0, 0.0, -INF, 2.0]], "f4")
    options = {"activation": activation, "alpha": 1.0}
    for bad in (INF, NAN):
        grad = np.full(x.shape, bad, "f4")
        got = adapter.call("activate_bwd", {"grad_out": grad, "x": x}, options)["grad_x"]
        np.testing.assert_array_equal(got, [[0, 0, 0, bad]])


@pytest.mark.torch
@pytest.mark.parametrize("limit", [None, 2.5])
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_limits_are_those_of_torch_s_clamp(
    torch_adapter: TorchAdapter, activation: str, limit: float | None
) -> None:
    """Values and gradients inside, at the limit (which takes the gradient), beyond it, at NaN."""
    torch = pytest.importorskip("torch")
    f = getattr(torch.nn.functional, activation)
    edges = [-INF, -4.0, -2.5, -1.0, 0.0, 0.5, 2.5, 4.0, INF]
    gate, up = (m.reshape(1, -1).astype("f4") for m in np.meshgrid(edges, edges))
    if limit is None:
        gate, up = gate[np.isfinite(gate)][None], up[np.isfinite(gate)][None]
    leaves = [torch.from_numpy(v.astype("f8")).requires_grad_() for v in (gate, up)]
    clamped = leaves
    if limit is not None:
        clamped = [leaves[0].clamp(max=limit), leaves[1].clamp(-limit, limit)]
    want = f(clamped[0]) * (clamped[1] + 1.0)
    cotangent = np.linspace(0.5, 1.5, gate.size, dtype="f4").reshape(1, -1)
    wanted = torch.autograd.grad(want, leaves, torch.from_numpy(cotangent.astype("f8")))
    options = {"activation": activation, "alpha": 1.0, "limit": limit or 0.0, "up_offset": 1.0}
    got = torch_adapter.call("glu", {"gate": gate, "up": up}, options)["out"]
    grads = torch_adapter.call(
        "glu_bwd", {"grad_out": cotangent, "gate": gate, "up": up}, options
    ).values()
    finite = np.isfinite(gate) & (np.isfinite(up) if limit is None else True)
    np.testing.assert_allclose(got[finite], want.detach().numpy()[finite], rtol=1e-6)
    for a, b in zip(grads, wanted, strict=True):
        at = finite & np.isfinite(b.numpy())
        np.testing.assert_allclose(a[at], b.numpy()[at], rtol=2e-6, atol=1e-6)
    # An infinite gate is cut to the limit; -inf stays, as in torch.
    if limit is not None and activation != "relu":
        assert np.isnan(got[gate == -INF]).any() and np.isfinite(got[gate == INF]).all()


def test_nan_stays_nan_under_a_limit(adapter: Adapter) -> None:
    gate, up = np.array([[NAN, 1.0, NAN]], "f4"), np.array([[1.0, NAN, NAN]], "f4")
    for activation in ACTIVATIONS:
        options = {"activation": activation, "alpha": 1.0, "limit": 2.0, "up_offset": 0.0}
        out = adapter.call("glu", {"gate": gate, "up": up}, options)["out"]
        assert np.isnan(out).all()
        given = {"grad_out": np.ones_like(gate), "gate": gate, "up": up}
        grads = adapter.call("glu_bwd", given, options)
        assert np.isnan(grads["grad_gate"]).all() and np.isnan(grads["grad_up"][0, [0, 2]]).all()
