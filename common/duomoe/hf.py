# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reading a router from a Hugging Face config; `RouterConfig.from_hf` is the way in.

What a config says is either expressed exactly or refused, with the key, its value and what is
allowed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duomoe import arguments
from duomoe.config import RouterConfig
from duomoe.families import COMMON, GENERATION, Family
from duomoe.layer_rules import DENSE, MOE
from duomoe.presets import MODELS, Model

# A key that matches is taken for a router option unless its family knows better.
LOOKS_LIKE_ROUTER = re.compile(
    r"rout|moe|expert|top_?k|scor|group|gate|gating|jitter|hash|dense|capacity"
    r"|sparse_step|mlp_only|mlp_layer"
)
# What concerns only losses; "aux_loss_free" is a way of choosing.
CONCERNS_A_LOSS = re.compile(r"aux_loss(?!_free)|z_loss")
# Wrappers whose class takes this text model for a text_config without model_type.
TEXT_TYPES = {"llama4": "llama4_text", "kimi_k25": "deepseek_v3"}

BY_TYPE: dict[str, tuple[Model, Family]] = {
    family.model_type: (model, family) for model in MODELS.values() for family in model.families
}


def _load(config: Any) -> dict[str, Any]:
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise ValueError(f"{path} holds no JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
        return values
    return _values("config", "a path, a dict or an object with to_dict", config)


def _values(name: str, allowed: str, config: Any) -> dict[str, Any]:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise TypeError(f"{name} must be {allowed}, got {type(config).__name__}")
    if wrong := [key for key in config if not isinstance(key, str)]:
        raise TypeError(f"{name} must have keys of str, got {wrong[0]!r}")
    return dict(config)


def _refuse_unknown(where: str, values: Mapping[str, Any], known: set[str]) -> None:
    for key in values:
        if key in known or CONCERNS_A_LOSS.search(key):
            continue
        if LOOKS_LIKE_ROUTER.search(key.lower()):
            raise ValueError(
                f"{where}: {key} = {values[key]!r} looks like a router option and from_hf does "
                f"not know it; it knows {', '.join(sorted(known))}"
            )


def _text(values: dict[str, Any]) -> dict[str, Any]:
    """The language model's own config, out of a multimodal one."""
    model_type = values.get("model_type")
    default = TEXT_TYPES.get(model_type) if isinstance(model_type, str) else None
    if values.get("text_config") is None and default is None:
        return values
    _refuse_unknown(f"{model_type or 'config'} around text_config", values, {*COMMON, *GENERATION})
    given = values.get("text_config") or {}
    text = _values("text_config", "a dict or an object with to_dict", given)
    if text.get("text_config") is not None:
        raise ValueError("text_config must be the language model's own config, got one in it")
    return text if text.get("model_type") is not None else {**text, "model_type": default}


class Reader:
    """One config, read as its family says."""

    def __init__(self, config: Any) -> None:
        self.values = _text(_load(config))
        model_type = self.values.get("model_type")
        if not isinstance(model_type, str) or model_type not in BY_TYPE:
            raise ValueError(
                f"model_type must be one of {', '.join(sorted(BY_TYPE))}, got {model_type!r}"
            )
        self.model, self.family = BY_TYPE[model_type]
        self.choices = {**GENERATION, **self.family.choices}
        known = self.family.known() | COMMON | set(GENERATION)
        _refuse_unknown(model_type, self.values, known)

    def error(self, key: str, allowed: str) -> ValueError:
        return ValueError(
            f"{self.family.model_type}: {key} must be {allowed}, got {self.values[key]!r}"
        )

    def chosen(self) -> dict[str, Any]:
        """Options that follow from the keys with a fixed set of values."""
        options: dict[str, Any] = {}
        for key, allowed in self.choices.items():
            if key not in self.values:
                options |= next(iter(allowed.values()))
                continue
            value = self.values[key]
            # 1 == True, but they mean different things here.
            same = [
                a for a in allowed if a == value and isinstance(a, bool) is isinstance(value, bool)
            ]
            if not same:
                raise self.error(key, " or ".join(map(repr, allowed)))
            options |= allowed[same[0]]
        return options

    def option(self, option: str, layer: int | None) -> tuple[str, Any]:
        """The key of an option, and its value."""
        names = self.family.keys[option]
        given = [name for name in names if name in self.values]
        if not given:
            if option not in self.family.defaults:
                raise ValueError(f"{self.family.model_type}: {' or '.join(names)} must be given")
            return names[0], self.family.defaults[option]
        for other in given[1:]:
            if self.values[other] != self.values[given[0]]:
                raise self.error(other, f"equal to {given[0]} ({self.values[given[0]]!r})")
        key = given[0]
        return key, self._typed(option, key, self._of_layer(key, layer))

    def _of_layer(self, key: str, layer: int | None) -> Any:
        value = self.values[key]
        if not self.family.per_layer or not isinstance(value, (list, tuple)):
            return value
        if layer is None:
            if not value or any(v != value[0] for v in value):
                raise self.error(key, "the same in every layer unless layer is given")
            return value[0]
        if layer >= len(value):
            raise self.error(key, f"a list with a value for layer {layer}")
        return value[layer]

    def _typed(self, option: str, key: str, value: Any) -> Any:
        if option == "normalize":
            if not isinstance(value, bool):
                raise self.error(key, "True or False")
            return value
        try:
            if option in ("scale", "eps"):
                return arguments.number(key, value)
            return arguments.integer(key, value, 1)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.family.model_type}: {error}") from None

    def layer_kinds(self) -> list[str]:
        """Every layer's kind."""
        family = self.family
        count = self.values.get("num_hidden_layers", family.num_layers)
        try:
            count = arguments.integer("num_hidden_layers", count, 1)
            if family.layers is None:
                return [MOE] * count
            values = {k: self.values.get(k, v) for k, v in family.layers.defaults.items()}
            return list(family.layers.kinds(values, count))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{family.model_type}: {error}") from None

    def check_layer(self, layer: int) -> int:
        kinds = self.layer_kinds()
        layer = arguments.integer("layer", layer, 0, len(kinds) - 1)
        if kinds[layer] == DENSE:
            rule = self.family.layers
            keys = rule.defaults if rule else {}
            why = ", ".join(f"{key} = {self.values.get(key, keys[key])!r}" for key in keys)
            raise ValueError(
                f"{self.family.model_type}: layer {layer} is dense and has no router ({why})"
            )
        return layer

    def router(self, layer: int | None) -> RouterConfig:
        if layer is not None:
            layer = self.check_layer(layer)
        fixed = self.chosen()
        options = {**self.model.options, **fixed}
        origin = {}
        for option in self.family.keys:
            if option not in fixed:
                origin[option], options[option] = self.option(option, layer)
        for key, option in self.family.echoes.items():
            if key in self.values and self.values[key] != options[option]:
                raise self.error(key, f"equal to {origin[option]} ({options[option]!r})")
        try:
            return RouterConfig(**options)
        except (TypeError, ValueError) as error:
            keys = ", ".join(f"{o} is {key} = {options[o]!r}" for o, key in origin.items())
            raise ValueError(f"{self.family.model_type}: {error} ({keys})") from None


def read(config: Any, *, layer: int | None = None) -> RouterConfig:
    """The router of a config; `RouterConfig.from_hf` says how."""
    return Reader(config).router(layer)


def layer_kinds(config: Any) -> list[str]:
    """What each layer has: "dense" no router, "moe" a router, "hash_moe" a router whose ids come
    from a table of token ids (`route(..., indices=table[token_ids])`).

    Args:
        config: as in `RouterConfig.from_hf`.

    Raises:
        ValueError: as `RouterConfig.from_hf` does for model_type and the keys about layers.
    """
    return Reader(config).layer_kinds()
