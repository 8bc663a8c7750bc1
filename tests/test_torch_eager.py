# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Eager calls in torch go past the dispatcher's Python layers: where they may, and that nobody can
tell but by the clock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from samples import normal

torch = pytest.importorskip("torch")
from duomoe import RouterConfig, ops
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_frontend as tf
from torch_frontend import bind

pytestmark = pytest.mark.torch

CONFIG = RouterConfig(8, 2, score="sigmoid", num_groups=4, group_top_k=2)
ROUTE = ops.table()["route"]


class Subclass(torch.Tensor):
    """Of no other behaviour."""


class Mode(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_which_tensors_are_plain() -> None:
    x = torch.rand(4, 8)
    parameter = torch.nn.Parameter(x)
    with torch.inference_mode():
        inference = torch.rand(4, 8)
        assert bind.is_plain((inference, x, inference[1:]))
    leaf = x.clone().requires_grad_()
    for t in (x, parameter, leaf, leaf * 2, x.t(), x.bfloat16(), x.int(), inference):
        assert bind.is_plain((t, None))
    negated = torch.view_as_complex(torch.rand(4, 2)).conj().imag
    assert negated.is_neg()
    others = {
        "negated": negated,
        "sparse": x.to_sparse(),
        "meta": x.to("meta"),
        "zero": torch._efficientzerotensor((2,)),
        "nested": torch.nested.nested_tensor([x, x]),
        "subclass": x.as_subclass(Subclass),
        "list": [1.0],
    }
    for name, t in others.items():
        assert not bind.is_plain((x, t)), name


def test_transformed_calls_are_not_plain() -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(bind.is_plain((x,)))
        return x.sum()

    x = torch.rand(4, 8)
    torch.func.grad(f)(x)
    torch.func.vmap(f)(x)
    with torch.autograd.forward_ad.dual_level():
        f(x)
    with Mode():
        f(x)
    assert seen == [False] * 4


def test_same_as_through_the_dispatcher(rng: np.random.Generator) -> None:
    z = torch.from_numpy(normal(rng, (6, 8)))
    values = ROUTE.attribute_values(CONFIG.attributes(num_sequences=1))
    operator = torch.ops.duomoe.route.default
    cotangents = [torch.from_numpy(normal(rng, (6, 2))), torch.from_numpy(normal(rng, (1, 8)))]

    def run(f: Any, x: torch.Tensor) -> list[torch.Tensor]:
        outputs = f(x)
        picked = [outputs[0], outputs[4]]
        names = [(o.dtype, o.requires_grad, o.is_leaf) for o in outputs]
        seen.append(names)
        grads = torch.autograd.grad(picked, x, cotangents) if x.requires_grad else []
        return [*outputs, *grads]

    def eager(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert bind.is_plain((x,))
        return bind.call(ROUTE, (x, None, None, None, None), CONFIG.attributes(num_sequences=1))

    for needs in (False, True):
        seen: list[Any] = []
        x = z.clone().requires_grad_(needs)
        through = run(lambda t: operator(t, None, None, None, None, *values), x)
        past = run(eager, x)
        assert seen[0] == seen[1]
        assert all(torch.equal(a, b) for a, b in zip(through, past, strict=True))


def test_negated_views_are_read_right(rng: np.random.Generator) -> None:
    z = torch.from_numpy(normal(rng, (6, 8, 2)))
    negated = torch.view_as_complex(z).conj().imag
    got, want = tf.route(negated, CONFIG), tf.route(-z[..., 1], CONFIG)
    assert torch.equal(got.weights, want.weights) and torch.equal(got.indices, want.indices)


def test_profilers_and_function_modes_see_the_operators(rng: np.random.Generator) -> None:
    z = torch.from_numpy(normal(rng, (6, 8)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tf.route(z, CONFIG)
        tf.route(z.clone().requires_grad_(), CONFIG)
    assert sum(e.name == "duomoe::route" for e in profile.events()) == 2

    names = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(f))
            return f(*args, **(kwargs or {}))

    with Seen():
        tf.route(z, CONFIG)
    assert any("duomoe.route" in name for name in names)


def test_second_derivatives_are_refused() -> None:
    z = torch.rand(6, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(tf.route(z, CONFIG).weights.sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()
