# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""How Hugging Face configs describe a router: one Family per model_type says which key means which
RouterConfig option, what a key may hold, and which layers are dense. `duomoe.presets` says which
model each belongs to; `duomoe.hf` reads configs by them. The defaults are those of the model_type's
configuration class in transformers 5.24.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from duomoe.layer_rules import (
    HASH_LAYERS,
    INTERLEAVED,
    INTERVAL,
    MIXERS,
    SPARSE_STEP,
    LayerRule,
    leading_dense,
    typed_layers,
)

Choices = Mapping[Any, Mapping[str, Any]]


def only(*values: Any) -> Choices:
    """Choices that change no option: the key must hold one of the values."""
    return {value: {} for value in values}


@dataclasses.dataclass(frozen=True)
class Family:
    """The router keys of one model_type.

    Attributes:
        model_type: as in config.json.
        keys: option of RouterConfig -> the key, then its other names.
        defaults: option -> what the configuration class takes for an absent key; an option without
            one must be given.
        num_layers: the class's default of num_hidden_layers.
        layers: which layers have a router; None: all.
        choices: key -> value -> options that this value sets. Any other value is refused. The first
            is what an absent key means.
        echoes: key -> option: the class does not read the key, so it may only repeat the option.
        other: keys that look like router options and are none.
        per_layer: an option may be a list with a value for each layer.
    """

    model_type: str
    keys: Mapping[str, tuple[str, ...]]
    defaults: Mapping[str, Any]
    num_layers: int | None
    layers: LayerRule | None = None
    choices: Mapping[str, Choices] = dataclasses.field(default_factory=dict)
    echoes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other: frozenset[str] = frozenset()
    per_layer: bool = False

    def known(self) -> set[str]:
        """Every key that the family can read or may pass over."""
        named = {name for names in self.keys.values() for name in names}
        layers = set(self.layers.defaults) if self.layers else set()
        return named | layers | set(self.choices) | set(self.echoes) | self.other


def _defaults(num_experts: int, top_k: int, **options: Any) -> dict[str, Any]:
    return {"num_experts": num_experts, "top_k": top_k, **options}


# -- keys that several families share --------------------------------------------------------------

# Sizes of experts, and what a forward pass returns.
COMMON = frozenset(
    {
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "n_shared_experts",
        "num_shared_experts",
        "output_router_logits",
    }
)
# Sampling defaults that configs of transformers before version 5 carry.
GENERATION: Mapping[str, Choices] = {
    "top_k": only(50),
    "num_beam_groups": only(1),
    "output_scores": only(False),
}

NO_JITTER = {"router_jitter_noise": only(0.0)}
# Keys that DeepSeek's own code reads; the transformers classes have these values built in.
SIGMOID_NOAUX = {
    "topk_method": only("noaux_tc"),
    "scoring_func": only("sigmoid"),
    "moe_layer_freq": only(1),
}

TOP_K = {"top_k": ("num_experts_per_tok",)}
LOCAL = TOP_K | {"num_experts": ("num_local_experts",)}
LOCAL_OR_PLAIN = TOP_K | {"num_experts": ("num_local_experts", "num_experts")}
NORMALIZED = TOP_K | {"num_experts": ("num_experts",), "normalize": ("norm_topk_prob",)}
NORMALIZED_OR_LOCAL = NORMALIZED | {"num_experts": ("num_experts", "num_local_experts")}
SCALED = TOP_K | {
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "scale": ("routed_scaling_factor",),
}
GROUPED = SCALED | {"num_groups": ("n_group",), "group_top_k": ("topk_group",)}
DEEPSEEK = GROUPED | {"normalize": ("norm_topk_prob",)}
DEEPSEEK_SPARSE = DEEPSEEK | {
    "num_experts": ("n_routed_experts", "num_local_experts", "num_experts")
}
KIMI = DEEPSEEK | {
    "num_experts": ("num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_token", "num_experts_per_tok"),
    "num_groups": ("num_expert_group", "n_group"),
    "normalize": ("moe_renormalize", "norm_topk_prob"),
}
ONE_GROUP = {"num_groups": 1, "group_top_k": 1, "normalize": True}
FOUR_OF_EIGHT = {"num_groups": 8, "group_top_k": 4, "normalize": True}

# -- softmax over all experts ----------------------------------------------------------------------

MIXTRAL = Family("mixtral", LOCAL_OR_PLAIN, _defaults(8, 2), 32, choices=NO_JITTER)
MINIMAX = dataclasses.replace(MIXTRAL, model_type="minimax")
QWEN2_MOE = Family(
    "qwen2_moe", NORMALIZED, _defaults(60, 4, normalize=False), 24, layers=SPARSE_STEP
)
QWEN3_MOE = Family(
    "qwen3_moe", NORMALIZED_OR_LOCAL, _defaults(128, 8, normalize=False), 24, layers=SPARSE_STEP
)
QWEN3_NEXT = Family(
    "qwen3_next", NORMALIZED, _defaults(512, 10, normalize=True), 48, layers=SPARSE_STEP
)
OLMOE = Family("olmoe", NORMALIZED_OR_LOCAL, _defaults(64, 8, normalize=False), 16)
FLEX_OLMO = Family("flex_olmo", NORMALIZED_OR_LOCAL, _defaults(7, 5, normalize=False), 32)
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    GROUPED | {"num_experts": ("n_routed_experts", "num_experts")},
    {"num_experts": 64, "scale": 1.0},
    32,
    layers=leading_dense("first_k_dense_replace", 0),
    choices={
        "topk_method": {
            "greedy": {"num_groups": 1, "group_top_k": 1},
            "group_limited_greedy": {},
        },
        # The transformers class ignores the key; DeepSeek's own code normalises instead of scaling.
        "norm_topk_prob": only(False),
        "scoring_func": only("softmax"),
        "moe_layer_freq": only(1),
    },
)
ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    {
        "num_experts": ("moe_num_experts", "num_experts"),
        "top_k": ("moe_k", "num_experts_per_tok"),
        "eps": ("moe_norm_min",),
    },
    _defaults(64, 6, eps=1e-12),
    28,
    layers=INTERVAL,
    choices={
        "moe_gate": only("topk"),
        "moe_gate_act": only("softmax"),
        "moe_use_aux_free": only(True, False),
    },
    other=frozenset({"moe_capacity", "moe_num_shared_experts"}),
)
MISTRAL4 = Family(
    "mistral4",
    DEEPSEEK,
    _defaults(128, 4, scale=1.0, **ONE_GROUP),
    36,
    layers=leading_dense("first_k_dense_replace", 0),
    choices={"scoring_func": only("softmax"), "moe_layer_freq": only(1)},
)
HUNYUAN_V1_MOE = Family(
    "hunyuan_v1_moe",
    {
        "num_experts": ("num_experts", "num_local_experts"),
        "top_k": ("moe_topk", "num_experts_per_tok"),
    },
    _defaults(1, 1),
    32,
    # The transformers class ignores these keys; Tencent's own code reads them.
    choices={
        "norm_topk_prob": only(True),
        "routed_scaling_factor": only(1.0),
        "group_limited_greedy": only(False),
        "moe_layer_num_skipped": only(0),
        "moe_drop_tokens": only(False),
        "moe_random_routing_dropped_token": only(False),
    },
    # Groups and capacity have no effect where the last three keys above are false.
    other=frozenset(
        {
            "n_group",
            "topk_group",
            "capacity_factor",
            "num_shared_expert",
            "use_mixed_mlp_moe",
            "expert_hidden_dim",
        }
    ),
    per_layer=True,
)

# -- softmax over the selected experts, sigmoid of the selected logits -----------------------------

GPT_OSS = Family(
    "gpt_oss", LOCAL_OR_PLAIN, _defaults(128, 4), 36, echoes={"experts_per_token": "top_k"}
)
GRANITEMOE = Family("granitemoe", LOCAL, _defaults(8, 2), 32)
GRANITEMOESHARED = dataclasses.replace(GRANITEMOE, model_type="granitemoeshared")
GRANITEMOEHYBRID = dataclasses.replace(
    GRANITEMOE, model_type="granitemoehybrid", other=frozenset({"mamba_n_groups"})
)
JETMOE = Family(
    "jetmoe",
    LOCAL,
    _defaults(8, 2),
    12,
    echoes={"moe_num_experts": "num_experts", "moe_top_k": "top_k"},
)
LLAMA4_TEXT = Family(
    "llama4_text", LOCAL, _defaults(16, 1), 48, layers=INTERLEAVED, choices=NO_JITTER
)

# -- sigmoid and sqrtsoftplus ----------------------------------------------------------------------

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    DEEPSEEK,
    _defaults(256, 8, scale=2.5, **FOUR_OF_EIGHT),
    61,
    layers=leading_dense("first_k_dense_replace", 3),
    choices=SIGMOID_NOAUX,
)
DEEPSEEK_V32 = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    keys=DEEPSEEK_SPARSE,
    layers=typed_layers("first_k_dense_replace", 3),
    other=frozenset({"index_topk"}),
)
NEMOTRON_H = Family(
    "nemotron_h",
    DEEPSEEK,
    _defaults(8, 2, scale=1.0, **ONE_GROUP),
    4,
    layers=MIXERS,
    choices=SIGMOID_NOAUX,
    other=frozenset(
        {
            "n_groups",
            "mamba_n_groups",
            "moe_latent_size",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_overlap",
        }
    ),
)
# transformers has no class of this name, so there are no defaults to take.
KIMI_K2 = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="kimi_k2",
    defaults={},
    num_layers=None,
    layers=leading_dense("first_k_dense_replace", None),
)
KIMI_LINEAR = Family(
    "kimi_linear",
    KIMI,
    _defaults(256, 8, scale=2.446, **ONE_GROUP),
    27,
    layers=typed_layers("first_k_dense_replace", 1),
    choices=SIGMOID_NOAUX
    | {"moe_router_activation_func": only("sigmoid"), "use_grouped_topk": only(True)},
    other=frozenset({"routed_expert_hidden_size", "latent_moe_use_norm", "mla_use_output_gate"}),
)
BAILING_HYBRID = Family(
    "bailing_hybrid",
    KIMI,
    _defaults(512, 8, scale=2.5, **FOUR_OF_EIGHT),
    42,
    layers=typed_layers("first_k_dense_replace", 2),
    choices=SIGMOID_NOAUX
    | {"score_function": only("sigmoid"), "moe_router_enable_expert_bias": only(True, False)},
    other=frozenset(
        {
            "kda_safe_gate",
            "layer_group_size",
            "group_norm_size",
            "moe_shared_expert_intermediate_size",
        }
    ),
)
GLM4_MOE = Family(
    "glm4_moe",
    DEEPSEEK,
    _defaults(128, 8, scale=1.0, **ONE_GROUP),
    46,
    layers=leading_dense("first_k_dense_replace", 1),
    choices=SIGMOID_NOAUX,
)
GLM4V_MOE_TEXT = dataclasses.replace(GLM4_MOE, model_type="glm4v_moe_text")
GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    DEEPSEEK,
    _defaults(64, 4, scale=1.8, **ONE_GROUP),
    47,
    layers=typed_layers(None, 1),
    # The class ignores the key: without mlp_layer_types, one layer is dense.
    choices=SIGMOID_NOAUX | {"first_k_dense_replace": only(1)},
)
GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    DEEPSEEK_SPARSE,
    _defaults(256, 8, scale=2.5, **ONE_GROUP),
    78,
    layers=typed_layers("first_k_dense_replace", 3),
    choices=SIGMOID_NOAUX,
    other=frozenset(
        {"index_topk", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"}
    ),
)
MINIMAX_M2 = Family(
    "minimax_m2",
    LOCAL_OR_PLAIN,
    _defaults(256, 8),
    62,
    choices=NO_JITTER | {"scoring_func": only("sigmoid"), "use_routing_bias": only(True, False)},
)
LFM2_MOE = Family(
    "lfm2_moe",
    NORMALIZED | {"scale": ("routed_scaling_factor",)},
    _defaults(32, 4, normalize=True, scale=1.0),
    32,
    layers=leading_dense("num_dense_layers", 2),
    choices={"use_expert_bias": only(True, False)},
)
DEEPSEEK_V4 = Family(
    "deepseek_v4",
    SCALED,
    _defaults(256, 6, scale=1.5),
    43,
    layers=HASH_LAYERS,
    choices={
        "scoring_func": {
            "sqrtsoftplus": {"score": "sqrtsoftplus"},
            "sigmoid": {"score": "sigmoid"},
        },
        # The class ignores these keys: it always normalises, and has no groups.
        "norm_topk_prob": only(True),
        "topk_method": only("noaux_tc"),
        "n_group": only(1, None),
        "topk_group": only(1, None),
        **NO_JITTER,
    },
    other=frozenset({"o_groups", "index_topk", "expert_dtype"}),
)
