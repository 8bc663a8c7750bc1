# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""RouterConfig and ExpertConfig: options of a router and of its experts, validated when made."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from duomoe import arguments

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
SCORE_SCOPES = ("all", "selected")
SELECT_ON = ("score", "logit")
NORMALIZE = (True, False, "if_k_gt_1")
EPS_MODES = ("add", "clamp")
COUNTS = ("actual", "unbiased")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")
WEIGHT_SITES = ("output", "input")


def _choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    # `is` for the bools, since 1 == True.
    if not any(value is a or (isinstance(a, str) and value == a) for a in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts and how the choices are weighted. Frozen, hashable, safe as a
    static argument.

    Attributes:
        num_experts: E.
        top_k: K experts per token, 1 <= K <= E.
        score: s(z): "softmax" (over all experts), "sigmoid", or "sqrtsoftplus" = sqrt(log(1 +
            e^z)).
        score_scope: "selected" takes the softmax over the selected experts only (softmax,
            select_on="logit").
        select_on: experts are ranked by "score" + bias or by "logit" + bias.
        num_groups: G groups of E / G neighbouring experts.
        group_top_k: groups that stay; they must hold at least K experts.
        group_score_k: a group's value is the sum of its best `group_score_k` selection values (1 =
            the largest).
        normalize: divide the weights by their sum; "if_k_gt_1" leaves K = 1 alone.
        eps: joins the sum as eps_mode says: "add" sum + eps, "clamp" max(sum, eps).
        eps_mode: "add" or "clamp".
        scale: the last factor of every weight.
        counts: what the load-balancing loss counts: the "actual" routing, or an "unbiased" plain
            top-K of the scores without bias and groups.

    Raises:
        ValueError, TypeError: on an option that is out of range or contradicts another.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    score_scope: Literal["all", "selected"] = "all"
    select_on: Literal["score", "logit"] = "score"
    num_groups: int = 1
    group_top_k: int = 1
    group_score_k: int = 2
    normalize: bool | Literal["if_k_gt_1"] = True
    eps: float = 0.0
    eps_mode: Literal["add", "clamp"] = "add"
    scale: float = 1.0
    counts: Literal["actual", "unbiased"] = "actual"

    def __post_init__(self) -> None:
        self._set_integer("num_experts", 1)
        self._set_integer("top_k", None)
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k must be between 1 and the number of experts ({self.num_experts}), "
                f"got {self.top_k}"
            )
        _choice("score", self.score, SCORES)
        _choice("score_scope", self.score_scope, SCORE_SCOPES)
        _choice("select_on", self.select_on, SELECT_ON)
        if isinstance(self.normalize, np.bool_):
            object.__setattr__(self, "normalize", bool(self.normalize))
        _choice("normalize", self.normalize, NORMALIZE)
        _choice("eps_mode", self.eps_mode, EPS_MODES)
        _choice("counts", self.counts, COUNTS)
        self._set_integer("num_groups", 1, self.num_experts)
        self._set_integer("group_top_k", 1, self.num_groups)
        self._set_integer("group_score_k", 1)
        for name in ("eps", "scale"):
            object.__setattr__(self, name, arguments.float32(name, getattr(self, name)))
        if self.eps < 0:
            raise ValueError(f"eps must not be negative, got {self.eps}")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_experts ({self.num_experts}) must be divisible by "
                f"num_groups ({self.num_groups})"
            )
        kept = self.group_top_k * (self.num_experts // self.num_groups)
        if kept < self.top_k:
            raise ValueError(
                f"group_top_k = {self.group_top_k} keeps {kept} experts, "
                f"fewer than top_k = {self.top_k}"
            )
        if self.score_scope == "selected":
            if self.score != "softmax":
                raise ValueError(
                    f"score_scope='selected' is for score='softmax' only, got {self.score!r}"
                )
            if self.select_on != "logit":
                raise ValueError("score_scope='selected' needs select_on='logit'")
            if self.eps != 0:
                raise ValueError(
                    f"score_scope='selected' needs eps=0, its weights already sum to one; "
                    f"got {self.eps}"
                )

    def _set_integer(self, name: str, low: int | None, high: int | None = None) -> None:
        # A NumPy integer becomes an int, so that equal configs hash and serialise alike.
        object.__setattr__(self, name, arguments.integer(name, getattr(self, name), low, high))

    def attributes(self, *, num_sequences: int) -> dict[str, Any]:
        """The static attributes of the core's `route` op."""
        # A softmax over the selected experts equals the softmax over all of them, divided by its
        # sum.
        if self.score_scope == "selected" or self.normalize is True:
            normalize = "always"
        else:
            normalize = "never" if self.normalize is False else self.normalize
        return {
            "top_k": self.top_k,
            "score": self.score,
            "normalize": normalize,
            "eps": self.eps,
            "eps_mode": self.eps_mode,
            "scale": self.scale,
            "num_sequences": num_sequences,
            "total_tokens": 0,
            "select_on": self.select_on,
            "num_groups": self.num_groups,
            "group_top_k": self.group_top_k,
            "group_score_k": self.group_score_k,
            "counts": self.counts,
        }

    def capacity(self, num_tokens: int, factor: float) -> int:
        """Rows per expert for a multiple of the mean load: ceil(num_tokens * K / E * factor).

        The expert capacity of Switch Transformers (Fedus et al. 2021, eq. 3), for K experts per
        token, in exact integers.

        Args:
            num_tokens: T.
            factor: the multiple, above 0; decimals beyond the sixth do not count.

        Raises:
            ValueError, TypeError: on a number of another kind or range.
        """
        num_tokens = arguments.integer("num_tokens", num_tokens, 0)
        factor = arguments.number("factor", factor)
        exact = Fraction(factor).limit_denominator(10**6)
        if exact <= 0:
            raise ValueError(f"factor must be above 0, got {factor}")
        slots = num_tokens * (self.top_k * exact.numerator)
        rows = -(-slots // (self.num_experts * exact.denominator))
        if isinstance(rows, int) and rows > arguments.INT64_MAX:
            raise ValueError(f"factor must give fewer than 2^63 rows per expert, got {factor}")
        return rows

    def to_json(self) -> str:
        """The options as a JSON object; `RouterConfig.from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RouterConfig:
        """Make a config from what `to_json` wrote.

        Raises:
            ValueError: on text that is no such object, or an option that RouterConfig lacks.
        """
        options = json.loads(text)
        if not isinstance(options, dict) or not {"num_experts", "top_k"} <= set(options):
            raise ValueError(
                f"a router config is a JSON object with num_experts and top_k, got {text[:80]!r}"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(options) - known):
            raise ValueError(
                f"unknown router option {unknown[0]!r}; allowed: {', '.join(sorted(known))}"
            )
        return cls(**options)

    @classmethod
    def from_hf(cls, config: Any, *, layer: int | None = None) -> RouterConfig:
        """Read the router of a Hugging Face config; docs/router.md lists the model_types.

        Keys that the config leaves out have the defaults of the model's class in transformers.
        transformers itself is not needed. What RouterConfig cannot express exactly is refused.

        Args:
            config: path of a config.json or of its folder, a dict, or an object with to_dict. The
                text_config of a multimodal one is taken.
            layer: the layer to read, needed where layers differ.

        Raises:
            ValueError: on an unknown model_type, value or key that looks like a router option, on a
                layer without a router, and on lists that differ by layer if layer is None; it names
                the key, the value and what is allowed. TypeError: on another kind of config.
            FileNotFoundError: on a path that is not there; names of a model hub are not looked up.
        """
        from duomoe import hf  # it needs this module, and the table of presets

        return hf.read(config, layer=layer)


@dataclasses.dataclass(frozen=True)
class ExpertConfig:
    """What the experts compute. Frozen, hashable, safe as a static argument.

    With w_gate an expert is a gated linear unit, f(min(gate, limit)) * (clamp(up, -limit, limit) +
    up_offset) between its products; without, it is f(up). The defaults are SwiGLU.

    Attributes:
        activation: f: "silu" x sigmoid(alpha x), "gelu", "gelu_tanh" (its approximation by tanh),
            "relu" or "relu_squared".
        alpha: of silu.
        limit: bound of gate (above) and up (both sides), for gated experts; None for none.
        up_offset: added to up, for gated experts.
        weight_on: routing weights multiply the experts' "output" in the sum over a token's
            experts, or their "input".

    Raises:
        ValueError, TypeError: on an option that is out of range or contradicts another.
    """

    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"] = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    weight_on: Literal["output", "input"] = "output"

    def __post_init__(self) -> None:
        _choice("activation", self.activation, ACTIVATIONS)
        _choice("weight_on", self.weight_on, WEIGHT_SITES)
        for name in ("alpha", "up_offset"):
            object.__setattr__(self, name, arguments.float32(name, getattr(self, name)))
        if self.alpha != 1 and self.activation != "silu":
            raise ValueError(f"alpha is for activation='silu' only, got {self.activation!r}")
        if self.limit is not None:
            object.__setattr__(self, "limit", arguments.float32("limit", self.limit))
            # In float32, where 0 stands for no limit.
            if np.float32(self.limit) <= 0:
                raise ValueError(f"limit must be above 0 or None, got {self.limit}")

    @property
    def needs_gate(self) -> bool:
        """Whether an option is for gated experts only."""
        return self.limit is not None or self.up_offset != 0

    def glu_attributes(self) -> dict[str, Any]:
        """The static attributes of the core's `glu` op."""
        return {
            "activation": self.activation,
            "alpha": self.alpha,
            "limit": self.limit or 0.0,
            "up_offset": self.up_offset,
        }

    @classmethod
    def from_hf(cls, config: Any) -> ExpertConfig:
        """Read the experts of a Hugging Face config; docs/hf.md lists the model_types.

        Keys that the config leaves out have the defaults of the model's class in transformers.
        transformers itself is not needed. What ExpertConfig and MoEParams cannot express is
        refused. `duomoe.hf_weights` converts the parameters.

        Args:
            config: as in `RouterConfig.from_hf`.

        Raises:
            ValueError: on an unknown model_type or value, or a key that looks like an option of
                the router or the experts and is not known; it names the key, the value and what is
                allowed. TypeError: on another kind of config.
            FileNotFoundError: on a path that is not there; names of a model hub are not looked up.
        """
        from duomoe import hf_experts  # it needs this module

        return hf_experts.read(config)
