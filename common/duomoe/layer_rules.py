# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model have a router, as Hugging Face configs say it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from duomoe import arguments

DENSE, MOE, HASH_MOE = "dense", "moe", "hash_moe"


@dataclasses.dataclass(frozen=True)
class LayerRule:
    """Which layers have a router.

    Attributes:
        defaults: the keys that say so, with the configuration class's defaults.
        kinds: from these keys' values and the number of layers to every layer's kind.
    """

    defaults: Mapping[str, Any]
    kinds: Callable[[Mapping[str, Any], int], Sequence[str]]


def leading_dense(key: str, dense: int | None) -> LayerRule:
    """The first `key` layers are dense; None: the key must be given."""

    def kinds(values: Mapping[str, Any], count: int) -> list[str]:
        leading = arguments.integer(key, values[key], 0)
        return [DENSE if i < leading else MOE for i in range(count)]

    return LayerRule({key: dense}, kinds)


def _names(key: str, names: Any, count: int, kind_of: Mapping[str, str]) -> list[str]:
    if not isinstance(names, (list, tuple)) or len(names) < count:
        raise ValueError(f"{key} must be a list of {count} names, got {names!r}")
    if unknown := [n for n in names if not isinstance(n, str) or n not in kind_of]:
        allowed = ", ".join(map(repr, kind_of))
        raise ValueError(f"{key} must hold {allowed}, got {unknown[0]!r}")
    return [kind_of[name] for name in names[:count]]


def typed_layers(key: str | None, leading: int) -> LayerRule:
    """`mlp_layer_types` names every layer; without it, the first `key` (or `leading`) are dense."""

    def kinds(values: Mapping[str, Any], count: int) -> list[str]:
        if (names := values["mlp_layer_types"]) is not None:
            return _names("mlp_layer_types", names, count, {"dense": DENSE, "sparse": MOE})
        dense = leading if key is None else arguments.integer(key, values[key], 0)
        return [DENSE if i < dense else MOE for i in range(count)]

    return LayerRule({"mlp_layer_types": None} | ({key: leading} if key else {}), kinds)


def _hash_layers(values: Mapping[str, Any], count: int) -> list[str]:
    if (names := values["mlp_layer_types"]) is not None:
        return _names("mlp_layer_types", names, count, {"hash_moe": HASH_MOE, "moe": MOE})
    leading = arguments.integer("num_hash_layers", values["num_hash_layers"], 0)
    return [HASH_MOE if i < leading else MOE for i in range(count)]


HASH_LAYERS = LayerRule({"mlp_layer_types": None, "num_hash_layers": 3}, _hash_layers)


def _indices(key: str, value: Any) -> set[int]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{key} must be a list of layers, got {value!r}")
    return {arguments.integer(key, i) for i in value}


def _sparse_step(values: Mapping[str, Any], count: int) -> list[str]:
    step = arguments.integer("decoder_sparse_step", values["decoder_sparse_step"], 1)
    dense = _indices("mlp_only_layers", values["mlp_only_layers"] or [])
    return [DENSE if i in dense or (i + 1) % step else MOE for i in range(count)]


SPARSE_STEP = LayerRule({"decoder_sparse_step": 1, "mlp_only_layers": None}, _sparse_step)


def _interleaved(values: Mapping[str, Any], count: int) -> list[str]:
    if (given := values["moe_layers"]) is not None:
        moe = _indices("moe_layers", given)
        return [MOE if i in moe else DENSE for i in range(count)]
    key = "interleave_moe_layer_step"
    step = arguments.integer(key, values[key], 1)
    return [DENSE if (i + 1) % step else MOE for i in range(count)]


INTERLEAVED = LayerRule({"moe_layers": None, "interleave_moe_layer_step": 1}, _interleaved)


def _interval(values: Mapping[str, Any], count: int) -> list[str]:
    start = arguments.integer("moe_layer_start_index", values["moe_layer_start_index"])
    end = arguments.integer("moe_layer_end_index", values["moe_layer_end_index"])
    step = arguments.integer("moe_layer_interval", values["moe_layer_interval"], 1)
    end = count - 1 if end == -1 else end
    return [MOE if start <= i <= end and (i + 1) % step == 0 else DENSE for i in range(count)]


INTERVAL = LayerRule(
    {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}, _interval
)


# The names, the older ones among them, and the letters of hybrid_override_pattern.
_MIXERS = {"moe": MOE} | dict.fromkeys(
    ("linear_attention", "full_attention", "mamba", "attention", "mlp"), DENSE
)
_MIXER_LETTERS = {"E": MOE, "M": DENSE, "*": DENSE, "-": DENSE}


def _mixers(values: Mapping[str, Any], count: int) -> list[str]:
    # The class takes the number of layers from the list, whatever num_hidden_layers says.
    if (names := values["layers_block_type"]) is not None:
        length = len(names) if isinstance(names, (list, tuple)) else count
        return _names("layers_block_type", names, length, _MIXERS)
    if (pattern := values["hybrid_override_pattern"]) is not None:
        letters = list(pattern) if isinstance(pattern, str) else pattern
        length = len(letters) if isinstance(letters, list) else count
        return _names("hybrid_override_pattern", letters, length, _MIXER_LETTERS)
    return [DENSE, MOE, DENSE, DENSE]


MIXERS = LayerRule({"layers_block_type": None, "hybrid_override_pattern": None}, _mixers)
