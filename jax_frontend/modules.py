# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What jax_frontend.linen and jax_frontend.nnx share: parameters, one call of the block, names of
recorded routing. It does not need flax.

Axis letters: T tokens, E experts, K experts per token, D model width, F expert hidden width,
F' joint hidden width of the shared experts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from duomoe import arguments, module_options
from duomoe.config import ExpertConfig, RouterConfig
from duomoe.ops import FLOAT_DTYPES
from duomoe.replay import RoutingRecord, match_layers
from duomoe.results import Array, MoEOutput, MoEParams

from jax_frontend import functional
from jax_frontend.frontend import JaxFrontEnd

# Of one matrix [in, out]: normal with variance 1 / in.
default_kernel_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal")


def explain(module: str, error: ImportError) -> None:
    """Say what to install, if an import failed because flax is missing or old."""
    if (error.name or "").partition(".")[0] == "flax":
        raise ImportError(
            f"{module} needs flax 0.12.8 or newer: pip install 'flax>=0.12.8'"
        ) from error


# -- parameters ------------------------------------------------------------------------------------


class ParameterSpec(NamedTuple):
    """Shape of a parameter, and the logical name of each of its axes."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def router_specs(width: int, num_experts: int, *, bias: bool) -> dict[str, ParameterSpec]:
    """The parameters of a router by name."""
    specs = {"weight": ParameterSpec((width, num_experts), ("embed", "expert"))}
    if bias:
        specs["bias"] = ParameterSpec((num_experts,), ("expert",))
    return specs


def expert_specs(
    width: int, hidden: int, num_experts: int, *, gated: bool, bias: bool
) -> dict[str, ParameterSpec]:
    """The parameters of the experts by name, in the order of MoEParams."""
    module_options.check_lengths(width=width, hidden=hidden, num_experts=num_experts)
    inner, outer = (hidden, "mlp"), (width, "embed")
    products = {"gate": (outer, inner), "up": (outer, inner), "down": (inner, outer)}
    if not gated:
        del products["gate"]
    specs = {
        f"w_{name}": ParameterSpec((num_experts, a[0], b[0]), ("expert", a[1], b[1]))
        for name, (a, b) in products.items()
    }
    if bias:
        for name, (_, b) in products.items():
            specs[f"b_{name}"] = ParameterSpec((num_experts, b[0]), ("expert", b[1]))
    return specs


def shared_specs(width: int, hidden: int, *, gated: bool, router: bool) -> dict[str, ParameterSpec]:
    """The parameters of the shared experts by name: those of one expert, and of their factor."""
    routed = expert_specs(width, hidden, 1, gated=gated, bias=False)
    specs = {n: ParameterSpec(spec.shape[1:], spec.axes[1:]) for n, spec in routed.items()}
    if router:
        specs["router"] = ParameterSpec((width, 1), ("embed", None))
    return specs


def initializer(name: str, kernel_init: Callable[..., Array]) -> Callable[..., Array]:
    """An initializer (key, shape, dtype): zeros for biases, `kernel_init` for every matrix.

    Each expert's matrix has a key of its own, so that an initializer that reads fans off a shape
    sees [in, out] and not the number of experts.
    """

    def matrices(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        if len(shape) == 2:
            return kernel_init(key, shape, dtype)
        one = lambda key: kernel_init(key, shape[1:], dtype)  # noqa: E731
        return jax.vmap(one)(jax.random.split(key, shape[0]))

    return jax.nn.initializers.zeros if name.startswith("b") else matrices


def join_params(
    router: Mapping[str, Array],
    expert_bias: Array | None,
    experts: Mapping[str, Array],
    shared: Mapping[str, Array],
) -> MoEParams:
    """The parameters of the three submodules as the functions take them."""
    named = {"w_gate": None, **experts, **{f"shared_{n}": a for n, a in shared.items()}}
    return MoEParams(
        router=router["weight"], router_bias=router.get("bias"), expert_bias=expert_bias, **named
    )


# -- one call --------------------------------------------------------------------------------------

# Options of `moe` that a module holds as they are.
OPTIONS = (
    "drop_order",
    "alignment",
    "max_rows",
    "gate_dtype",
    "load_balancing_coeff",
    "z_loss_coeff",
    "recompute",
)


@dataclasses.dataclass(frozen=True)
class BlockSettings:
    """What a module holds of a block's options; see the arguments of `moe`."""

    experts: ExpertConfig | None
    capacity_factor: float | None
    dtype: Any
    options: tuple[tuple[str, Any], ...]

    def check(
        self,
        width: int,
        hidden: int,
        config: RouterConfig,
        gated: bool,
        shared_hidden: int,
        shared_router: bool,
    ) -> None:
        """Refuse when a module is made what no call of it could mend."""
        module_options.check_block(
            width,
            hidden,
            config,
            experts=self.experts,
            capacity_factor=self.capacity_factor,
            gated=gated,
            shared_hidden=shared_hidden,
            shared_router=shared_router,
            **dict(self.options),
        )
        check_dtype("dtype", self.dtype)

    def run(self, x: Array, params: MoEParams, config: RouterConfig, **given: Any) -> MoEOutput:
        """The block on x[..., D]."""
        x, params = in_dtype(x, params, self.dtype)
        return functional.moe(
            x,
            params,
            config,
            experts=self.experts,
            capacity=module_options.capacity(config, self.capacity_factor, x.shape[:-1]),
            **dict(self.options),
            **given,
        )


def check_dtype(name: str, dtype: Any) -> None:
    """None, or a dtype that the ops take."""
    if dtype is not None:
        arguments.one_of(name, jnp.dtype(dtype).name, FLOAT_DTYPES)


# The gate rounds its own operands, to gate_dtype; the selection bias is always float32.
_AS_THEY_ARE = ("router", "router_bias", "expert_bias", "shared_router")


def in_dtype(x: Array, params: MoEParams, dtype: Any) -> tuple[Array, MoEParams]:
    """Round x and the experts' parameters to a dtype; None leaves them as they are."""
    x = JaxFrontEnd().check_array("x", x)
    if dtype is None:
        return x, params
    check_dtype("dtype", dtype)
    if x.dtype.name not in FLOAT_DTYPES:
        raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype.name}")
    rounded = {
        name: array if array is None or name in _AS_THEY_ARE else jnp.asarray(array, dtype)
        for name, array in vars(params).items()
    }
    return jnp.asarray(x, dtype), MoEParams(**rounded)


def as_leading(array: Array, leading: tuple[int, ...], kept: int) -> Array:
    """Recorded [T, ...] with the tokens' axis split into x's leading axes."""
    split = array.ndim - kept
    tokens, wanted = math.prod(array.shape[:split]), math.prod(leading)
    if tokens != wanted:
        raise ValueError(
            f"the record is of {tokens} tokens, x has {wanted}; replay record[a:b] for a part"
        )
    if array.shape[:split] == leading:
        return array
    return array.reshape((*leading, *array.shape[split:]))


# -- recorded routing ------------------------------------------------------------------------------


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def routing_layers(recorded: Mapping[Any, Any]) -> dict[str, Array]:
    """What a model recorded, by layer: for RoutingRecord.from_layers, and to be replayed.

    A layer's name is its module's path, joined by dots. Axes that a scan over layers has put before
    [T, K] number further layers: "blocks.moe.0", "blocks.moe.1", ...

    Args:
        recorded: the collection "routing" of linen, or nnx's State of RoutingIds.

    Returns:
        name to [T, K] int32, "moe_2" before "moe_10".

    Raises:
        ValueError: if a module ran more than once: nothing tells its calls apart.
    """
    layers: dict[str, Array] = {}

    def unstack(name: str, ids: Array) -> None:
        if ids.ndim == 2:
            layers[name] = ids
            return
        for i in range(ids.shape[0]):
            unstack(f"{name}.{i}" if name else str(i), ids[i])

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, Mapping):
            for key, value in node.items():
                walk(value, (*path, str(key)))
            return
        value = node.get_value() if hasattr(node, "get_value") else node
        name = ".".join(path[:-1])
        if len(value) != 1:
            raise ValueError(f"layer {name!r} ran {len(value)} times, and a record holds one run")
        unstack(name, value[0])

    walk(recorded, ())
    return dict(sorted(layers.items(), key=lambda item: _natural(item[0])))


def _numbered_layers(
    modules: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Module and numbers of every layer, in the order of names."""
    layers = {}
    for module in sorted(modules, key=_natural):
        for numbers in np.ndindex(*modules[module][:-2]):
            parts = [module, *map(str, numbers)] if module else map(str, numbers)
            layers[".".join(parts)] = module, numbers
    return layers


def place_layers(
    record: Any,
    mask: Array | None,
    layers: Mapping[str, str] | None,
    modules: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[Array, Array | None]]:
    """Recorded ids and mask by module, the layers of one module stacked.

    Args:
        record: RoutingRecord, or a mapping of layer name to integers [T, K].
        mask: [T] bool; None takes the record's.
        layers: name of a layer of the model to name of the record's; see replay_routing.
        modules: shape of the router's weight by path of the module, [..., D, E], the leading axes
            of a scan over layers included.

    Raises:
        ValueError: on a layer that cannot be matched, or whose E differs from the record's.
        TypeError: on a record of another type.
    """
    if isinstance(record, RoutingRecord):
        for module, shape in modules.items():
            if shape[-1] != record.num_experts:
                raise ValueError(
                    f"module {module!r} has E = {shape[-1]}, the record {record.num_experts}"
                )
        mask = record.mask if mask is None else mask
        recorded = {name: record.layer(name) for name in record.layers}
    elif isinstance(record, Mapping):
        recorded = {
            name: functional._functions._integers(f"layer {name!r}", ids)
            for name, ids in record.items()
        }
    else:
        raise TypeError(
            f"record must be a RoutingRecord or a mapping of arrays by layer, got "
            f"{type(record).__name__}"
        )
    known = _numbered_layers(modules)
    if not known:
        raise ValueError("there is no MoE or Router to replay a record")
    layers = match_layers(known, recorded, layers)
    placed: dict[str, tuple[Array, Array | None]] = {}
    for module, shape in modules.items():
        ids = [recorded[layers[name]] for name, (owner, _) in known.items() if owner == module]
        sizes = shape[:-2]
        if not sizes:
            placed[module] = ids[0], mask
            continue
        stack = np.stack if all(isinstance(i, np.ndarray) for i in ids) else jnp.stack
        stacked = stack(ids)
        where = None if mask is None else jnp.broadcast_to(jnp.asarray(mask), sizes + mask.shape)
        placed[module] = stacked.reshape(sizes + stacked.shape[1:]), where
    return placed
