# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reading the experts of a Hugging Face config; `ExpertConfig.from_hf` is the way in.

As for routers: what a config says is either expressed exactly or refused, with the key, its value
and what is allowed.
"""

from __future__ import annotations

import re
from typing import Any

from duomoe import arguments, hf
from duomoe.config import ExpertConfig
from duomoe.expert_families import BY_TYPE, NO_BIAS, ExpertFamily
from duomoe.families import COMMON

# Names of activations in transformers.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
# A key that matches is taken for an option of experts unless its family knows better.
LOOKS_LIKE_EXPERTS = re.compile(
    r"(^|_)act(_|$)|activation|glu(_|$)|clamp|limit|latent|(mlp|use|expert)\w*_bias|expert_hidden"
)


class ExpertReader(hf.Reader):
    """One config, read as its families say."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        model_type = self.family.model_type
        if model_type not in BY_TYPE:
            raise ValueError(
                f"model_type must be one of {', '.join(sorted(BY_TYPE))}, got {model_type!r}"
            )
        self.experts: ExpertFamily = BY_TYPE[model_type]
        known = self.experts.known()
        for key, value in self.values.items():
            if key in known or key in COMMON or key in self.family.known():
                continue
            if LOOKS_LIKE_EXPERTS.search(key.lower()):
                raise ValueError(
                    f"{model_type}: {key} = {value!r} looks like an option of experts and from_hf "
                    f"does not know it; it knows {', '.join(sorted(known))}"
                )
        for key, allowed in {**NO_BIAS, **self.experts.choices}.items():
            if key in self.experts.other:
                continue
            # By type too: 0 == False.
            value = self.values.get(key, allowed[0])
            if not any(value == a and type(value) is type(a) for a in allowed):
                raise self.error(key, " or ".join(map(repr, allowed)))

    def config(self) -> ExpertConfig:
        """What ExpertConfig has of it."""
        options = dict(self.experts.fixed)
        if self.experts.activation is not None:
            key, default = self.experts.activation
            name = self.values.get(key, default)
            if not isinstance(name, str) or name not in ACTIVATIONS:
                raise self.error(key, f"one of {', '.join(map(repr, ACTIVATIONS))}")
            options["activation"] = ACTIVATIONS[name]
        for option, (key, number) in self.experts.options.items():
            try:
                options[option] = arguments.float32(key, self.values.get(key, number))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self.family.model_type}: {error}") from None
        try:
            return ExpertConfig(**options)
        except (TypeError, ValueError) as error:
            keys = ", ".join(f"{o} is {key}" for o, (key, _) in self.experts.options.items())
            raise ValueError(f"{self.family.model_type}: {error} ({keys})") from None


def read(config: Any) -> ExpertConfig:
    """The experts of a config; `ExpertConfig.from_hf` says how."""
    return ExpertReader(config).config()
