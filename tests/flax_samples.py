# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the Flax test files share: one block as a linen module, as an nnx module, as a function."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from duomoe import MoEParams, RouterConfig
from flax import nnx

import jax_frontend as jf
import jax_frontend.linen
import jax_frontend.nnx

WIDTH, HIDDEN = 16, 12
CONFIG = RouterConfig(8, 2, score="sigmoid")
# Every parameter that there is.
ALL = {
    "router_bias": True,
    "expert_bias": True,
    "bias": True,
    "shared_hidden": 6,
    "shared_router": True,
}
# What the logical names mean on a mesh with axes "a" and "b".
RULES = (("expert", "a"), ("mlp", "b"), ("embed", None))


def linen_moe(**options: Any) -> jf.linen.MoE:
    return jf.linen.MoE(WIDTH, HIDDEN, CONFIG, **options)


def nnx_moe(**options: Any) -> jf.nnx.MoE:
    """Matrices of 0, which compile nothing; `load` gives it values."""
    options = {"kernel_init": jax.nn.initializers.zeros, **options}
    return jf.nnx.MoE(WIDTH, HIDDEN, CONFIG, **options, rngs=nnx.Rngs(0))


def drawn(module: nn.Module, x: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Variables of a linen module, the biases drawn too instead of 0."""
    variables = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x))

    def draw(leaf: Any) -> Any:
        fan_in = leaf.shape[-2] if leaf.ndim > 1 else 9
        values = rng.standard_normal(leaf.shape) / np.sqrt(fan_in)
        return jnp.asarray(values, leaf.dtype)

    return jax.tree.map(draw, variables)


def load(model: nnx.Module, variables: dict[str, Any]) -> None:
    """Give an nnx module the values of linen's variables, which have the same paths."""
    state = nnx.state(model)
    merged = jax.tree.map(lambda a: a, variables["params"])
    for path, value in jax.tree_util.tree_flatten_with_path(variables.get("router_state", {}))[0]:
        node = merged
        for key in path[:-1]:
            node = node[key.key]
        node[path[-1].key] = value
    nnx.replace_by_pure_dict(state, merged)
    nnx.update(model, state)


def function_params(variables: dict[str, Any]) -> MoEParams:
    """Linen's variables as the functions take them."""
    params = variables["params"]
    return MoEParams(
        router=params["router"]["weight"],
        router_bias=params["router"].get("bias"),
        expert_bias=variables.get("router_state", {}).get("router", {}).get("expert_bias"),
        **{"w_gate": None, **params["experts"]},
        **{f"shared_{name}": array for name, array in params.get("shared", {}).items()},
    )


def equal(a: Any, b: Any) -> None:
    """The same trees with the same bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


class LinenStack(nn.Module):
    """Residual blocks over x[T, D], one after the other or scanned."""

    layers: int
    scanned: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        def block(moe, x):
            return x + moe(x).output

        if not self.scanned:
            kind = nn.remat(jf.linen.MoE) if self.remat else jf.linen.MoE
            for i in range(self.layers):
                x = block(kind(WIDTH, HIDDEN, CONFIG, expert_bias=True, name=f"moe_{i}"), x)
            return x

        def body(moe, x, _):
            return (nn.remat(block) if self.remat else block)(moe, x), None

        collections = ("params", "router_state", "routing", "routing_mismatches", "replay")
        scan = nn.scan(
            body,
            variable_axes=dict.fromkeys(collections, 0),
            split_rngs={"params": True},
            length=self.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        moe = jf.linen.MoE(WIDTH, HIDDEN, CONFIG, expert_bias=True, name="moe")
        return scan(moe, x, None)[0]


class NnxStack(nnx.Module):
    """The same."""

    def __init__(self, layers: int, *, scanned: bool = False, remat: bool = False, rngs: nnx.Rngs):
        self.scanned, self.remat = scanned, remat

        def make(rngs: nnx.Rngs) -> jf.nnx.MoE:
            zeros = jax.nn.initializers.zeros
            return jf.nnx.MoE(WIDTH, HIDDEN, CONFIG, expert_bias=True, kernel_init=zeros, rngs=rngs)

        if scanned:
            metadata = {nnx.PARTITION_NAME: "layers"}
            stacked = nnx.vmap(make, in_axes=0, out_axes=0, transform_metadata=metadata)
            self.moe = nnx.split_rngs(splits=layers)(stacked)(rngs)
        else:
            self.moe = nnx.List([make(rngs) for _ in range(layers)])

    def __call__(self, x):
        def block(moe, x):
            return x + moe(x).output

        step = nnx.remat(block) if self.remat else block
        if not self.scanned:
            for moe in self.moe:
                x = step(moe, x)
            return x
        metadata = {nnx.PARTITION_NAME: "layers"}
        scan = nnx.scan(
            step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=metadata
        )
        return scan(self.moe, x)
