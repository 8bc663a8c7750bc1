# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""How Hugging Face models compute and store their experts: one ExpertFamily per model_type says
what ExpertConfig has, which tensors hold the block's parameters, and under which names they lie on
disk. Formulas, names and layouts are those of the classes of transformers 5.24 and of its
conversion mapping for checkpoints; a test runs every class against the block.

Axis letters: E experts, D model width, F expert hidden width, S hidden width of the shared experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a block's state_dict.

    Attributes:
        key: in the module's state_dict.
        axes: letters, a number before one is a factor of its length: "E 2F D".
        fields: of MoEParams that it holds: one, or two that share the axis of factor 2.
        disk: its names in a checkpoint, where they differ. With "{}", an expert's number, one for
            each field; the experts' tensors are stacked, and fields joined, gate first.
        interleaved: fields take turns along their axis, gate first; otherwise each has half of it.
        when: a config key that is true (or above 0) where the tensor exists, and what the class
            takes for an absent key.
    """

    key: str
    axes: str
    fields: tuple[str, ...]
    disk: tuple[str, ...] = ()
    interleaved: bool = False
    when: tuple[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class ExpertFamily:
    """The experts of one model_type.

    Attributes:
        model_type: as in config.json.
        tensors: of a block.
        widths: F and S -> the config keys whose product they are.
        activation: the key of the activation and the class's default; None: the class has silu.
        options: option of ExpertConfig -> the key and the class's default.
        fixed: options that the class has built in.
        choices: key -> the values that it may hold, since others cannot be expressed.
        other: keys that look like options of experts and are none.
        roots: where the tensors lie below the prefix, if other modules lie there too.
        table: a key that may stand in place of the selection bias: a hash layer's ids.
    """

    model_type: str
    tensors: tuple[Tensor, ...]
    widths: Mapping[str, tuple[str, ...]]
    activation: tuple[str, str] | None = ("hidden_act", "silu")
    options: Mapping[str, tuple[str, float]] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    choices: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    other: frozenset[str] = frozenset()
    roots: tuple[str, ...] = ("",)
    table: str | None = None

    def known(self) -> set[str]:
        """Every key that the family can read or may pass over."""
        keys = {key for key, _ in self.options.values()} | set(self.choices) | self.other
        return keys | set(NO_BIAS) | ({self.activation[0]} if self.activation else set())


# -- tensors that several families share -----------------------------------------------------------

PER_EXPERT = ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")
PER_EXPERT_DOWN = ("experts.{}.down_proj.weight",)


def _gate_up(*disk: str, key: str = "experts.gate_up_proj") -> Tensor:
    return Tensor(key, "E 2F D", ("w_gate", "w_up"), disk)


def _down(*disk: str, key: str = "experts.down_proj") -> Tensor:
    return Tensor(key, "E D F", ("w_down",), disk)


def _bias(key: str, *disk: str, axes: str = "E", when: tuple[str, Any] | None = None) -> Tensor:
    return Tensor(key, axes, ("expert_bias",), disk, when=when)


def _shared(
    root: str, *disk: str, when: tuple[str, Any] | None = None, gated: bool = True
) -> tuple[Tensor, ...]:
    """The shared experts of a module; `disk` names gate, up and down where they differ."""
    names = ("gate", "up", "down") if gated else ("up", "down")
    return tuple(
        Tensor(
            f"{root}.{name}_proj.weight",
            "D S" if name == "down" else "S D",
            (f"shared_w_{name}",),
            disk[i : i + 1],
            when=when,
        )
        for i, name in enumerate(names)
    )


ROUTER = Tensor("gate.weight", "E D", ("router",))
EXPERTS = (_gate_up(*PER_EXPERT), _down(*PER_EXPERT_DOWN))
# w1 is the gate, w3 up, w2 down.
NUMBERED = (
    _gate_up("experts.{}.w1.weight", "experts.{}.w3.weight"),
    _down("experts.{}.w2.weight"),
)
SCORE_BIAS = "gate.e_score_correction_bias"
GATED_SHARED = (
    *_shared("shared_expert"),
    Tensor("shared_expert_gate.weight", "1 D", ("shared_router",)),
)

INNER = {"F": ("intermediate_size",)}
MOE_INNER = {"F": ("moe_intermediate_size",)}
DEEPSEEK_WIDTHS = MOE_INNER | {"S": ("moe_intermediate_size", "n_shared_experts")}
# Biases of the shared experts, which MoEParams lacks; no family may have them.
NO_BIAS: Mapping[str, tuple[Any, ...]] = {"mlp_bias": (False, None), "use_bias": (False, None)}


def _granite(root: str = "") -> tuple[Tensor, ...]:
    return (
        Tensor(f"{root}router.weight", "E D", ("router",), (f"{root}router.layer.weight",)),
        _gate_up(f"{root}input_linear.weight", key=f"{root}experts.gate_up_proj"),
        _down(f"{root}output_linear.weight", key=f"{root}experts.down_proj"),
    )


def _granite_shared(default: int) -> tuple[Tensor, ...]:
    when = ("shared_intermediate_size", default)
    return (
        *_granite("block_sparse_moe."),
        Tensor(
            "shared_mlp.input_linear.weight",
            "2S D",
            ("shared_w_gate", "shared_w_up"),
            when=when,
        ),
        Tensor("shared_mlp.output_linear.weight", "D S", ("shared_w_down",), when=when),
    )


_DEEPSEEK_V3 = ExpertFamily(
    "deepseek_v3",
    (ROUTER, _bias(SCORE_BIAS), *EXPERTS, *_shared("shared_experts")),
    DEEPSEEK_WIDTHS,
)
_GRANITE_SHARED = ExpertFamily(
    "granitemoeshared",
    _granite_shared(0),
    INNER | {"S": ("shared_intermediate_size",)},
    roots=("block_sparse_moe.", "shared_mlp."),
)


def _like(family: ExpertFamily, model_type: str, **changes: Any) -> ExpertFamily:
    return dataclasses.replace(family, model_type=model_type, **changes)


_MIXTRAL = ExpertFamily("mixtral", (ROUTER, *NUMBERED), INNER)
_QWEN2_MOE = ExpertFamily(
    "qwen2_moe",
    (ROUTER, *EXPERTS, *GATED_SHARED),
    MOE_INNER | {"S": ("shared_expert_intermediate_size",)},
)
_OLMOE = ExpertFamily("olmoe", (ROUTER, *EXPERTS), INNER)

_FAMILIES = (
    _MIXTRAL,
    _like(_MIXTRAL, "minimax"),
    ExpertFamily("minimax_m2", (ROUTER, _bias("e_score_correction_bias"), *NUMBERED), INNER),
    _QWEN2_MOE,
    _like(_QWEN2_MOE, "qwen3_next"),
    ExpertFamily("qwen3_moe", (ROUTER, *EXPERTS), MOE_INNER),
    _OLMOE,
    _like(_OLMOE, "flex_olmo"),
    ExpertFamily(
        "deepseek_v2",
        (ROUTER, *EXPERTS, *_shared("shared_experts")),
        DEEPSEEK_WIDTHS,
    ),
    _DEEPSEEK_V3,
    _like(_DEEPSEEK_V3, "deepseek_v32"),
    _like(_DEEPSEEK_V3, "kimi_k2"),
    _like(_DEEPSEEK_V3, "glm4_moe"),
    _like(_DEEPSEEK_V3, "glm4v_moe_text"),
    _like(_DEEPSEEK_V3, "glm4_moe_lite"),
    _like(_DEEPSEEK_V3, "glm_moe_dsa"),
    _like(
        _DEEPSEEK_V3,
        "kimi_linear",
        tensors=(ROUTER, _bias(SCORE_BIAS), *NUMBERED, *_shared("shared_experts")),
        # Kimi-K3's projections around the routed experts, which the class lacks.
        choices={"routed_expert_hidden_size": (None,), "latent_moe_use_norm": (False, None)},
    ),
    _like(
        _DEEPSEEK_V3,
        "bailing_hybrid",
        tensors=(
            ROUTER,
            _bias(SCORE_BIAS, "gate.expert_bias"),
            *EXPERTS,
            *_shared("shared_experts"),
        ),
        other=frozenset({"use_qkv_bias"}),
    ),
    _like(
        _DEEPSEEK_V3,
        "mistral4",
        tensors=(ROUTER, _gate_up(), _down(), *_shared("shared_experts")),
    ),
    ExpertFamily(
        "deepseek_v4",
        (
            ROUTER,
            _bias(SCORE_BIAS, "gate.bias"),
            *NUMBERED,
            *_shared(
                "shared_experts",
                "shared_experts.w1.weight",
                "shared_experts.w3.weight",
                "shared_experts.w2.weight",
            ),
        ),
        MOE_INNER | {"S": ("moe_intermediate_size",)},
        options={"limit": ("swiglu_limit", 10.0)},
        table="gate.tid2eid",
    ),
    ExpertFamily(
        "nemotron_h",
        (
            ROUTER,
            _bias(SCORE_BIAS),
            Tensor("experts.up_proj", "E F D", ("w_up",), ("experts.{}.up_proj.weight",)),
            _down(*PER_EXPERT_DOWN),
            *_shared("shared_experts", gated=False),
        ),
        MOE_INNER | {"S": ("moe_shared_expert_intermediate_size",)},
        activation=("mlp_hidden_act", "relu2"),
        # Routed experts of another width, between two projections.
        choices={"moe_latent_size": (None,)},
        other=frozenset({"mamba_hidden_act", "time_step_limit", "use_conv_bias", "use_bias"}),
    ),
    ExpertFamily(
        "gpt_oss",
        (
            Tensor("router.weight", "E D", ("router",)),
            Tensor("router.bias", "E", ("router_bias",)),
            Tensor("experts.gate_up_proj", "E D 2F", ("w_gate", "w_up"), interleaved=True),
            Tensor("experts.gate_up_proj_bias", "E 2F", ("b_gate", "b_up"), interleaved=True),
            Tensor("experts.down_proj", "E F D", ("w_down",)),
            Tensor("experts.down_proj_bias", "E D", ("b_down",)),
        ),
        INNER,
        activation=None,
        options={"alpha": ("swiglu_alpha", 1.702), "limit": ("swiglu_limit", 7.0)},
        fixed={"up_offset": 1.0},
        # The class does not read it.
        choices={"hidden_act": ("silu",)},
    ),
    ExpertFamily("granitemoe", _granite(), INNER),
    _GRANITE_SHARED,
    _like(
        _GRANITE_SHARED,
        "granitemoehybrid",
        tensors=_granite_shared(1024),
        other=frozenset({"time_step_limit"}),
    ),
    ExpertFamily(
        "llama4_text",
        (
            Tensor("router.weight", "E D", ("router",)),
            Tensor("experts.gate_up_proj", "E D 2F", ("w_gate", "w_up")),
            Tensor("experts.down_proj", "E F D", ("w_down",)),
            *_shared("shared_expert"),
        ),
        INNER | {"S": ("intermediate_size",)},
        fixed={"weight_on": "input"},
    ),
    ExpertFamily(
        "ernie4_5_moe",
        (
            ROUTER,
            _bias(
                "gate.moe_statics.e_score_correction_bias",
                "moe_statics.e_score_correction_bias",
                axes="1 E",
            ),
            *EXPERTS,
            *_shared("shared_experts", when=("moe_num_shared_experts", 2)),
        ),
        MOE_INNER | {"S": ("moe_intermediate_size", "moe_num_shared_experts")},
    ),
    ExpertFamily(
        "lfm2_moe",
        (ROUTER, _bias("expert_bias", when=("use_expert_bias", True)), *NUMBERED),
        MOE_INNER,
        activation=None,
        choices={"hidden_act": ("silu",)},
    ),
    ExpertFamily(
        "hunyuan_v1_moe",
        (
            Tensor("gate.wg.weight", "E D", ("router",)),
            *EXPERTS,
            *_shared("shared_mlp"),
        ),
        INNER | {"S": ("intermediate_size",)},
    ),
)

BY_TYPE = {family.model_type: family for family in _FAMILIES}
