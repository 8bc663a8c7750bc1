# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The routers of released models, as functions that return a RouterConfig.

Every function takes any option of RouterConfig by keyword and returns the released model's value
for the rest. One table, MODELS, holds them, how their Hugging Face configs are read
(`RouterConfig.from_hf`) and what docs/router.md says of them.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from duomoe import families
from duomoe.config import RouterConfig
from duomoe.families import Family

Preset = Callable[..., RouterConfig]


@dataclasses.dataclass(frozen=True)
class Model:
    """A preset.

    Attributes:
        name: the function's name.
        released: the model whose values are the defaults.
        options: those values; options left out are RouterConfig's own defaults.
        families: the Hugging Face model_types with this router.
        source: where the formula comes from.
        bias: what of it is added for selection, as `route(..., bias=)`; None: nothing.
        outside: what the model's block does around the router; None: nothing.
        gate: the dtypes in which the model's own code computes.
    """

    name: str
    released: str
    options: Mapping[str, Any]
    families: tuple[Family, ...]
    source: str
    gate: str
    bias: str | None = None
    outside: str | None = None

    def facts(self) -> str:
        """What docs/api.md says of the preset."""
        parts = [
            f"The router of {self.released}.",
            f"Source: {self.source}.",
            f"Selection bias: {self.bias or 'none'}.",
            f"Outside the router: {self.outside or 'nothing'}.",
            f"Gate: {self.gate}.",
        ]
        return "\n".join(textwrap.fill(part, 92, subsequent_indent="    ") for part in parts)

    def doc(self) -> str:
        """The function's docstring."""
        return f"""{self.facts()}

Args:
    options: any of RouterConfig's; the defaults are this model's.

Raises:
    ValueError, TypeError: as RouterConfig does.
"""


MODELS: dict[str, Model] = {}


def _preset(model: Model) -> Preset:
    """Enter a model into the table and make its function."""
    MODELS[model.name] = model

    def preset(**options: Any) -> RouterConfig:
        return RouterConfig(**{**model.options, **options})

    preset.__name__ = preset.__qualname__ = model.name
    preset.__doc__ = model.doc()
    fields = dataclasses.fields(RouterConfig)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=model.options.get(field.name, field.default),
            annotation=field.type,
        )
        for field in fields
    ]
    signature = inspect.Signature(parameters, return_annotation="RouterConfig")
    preset.__signature__ = signature  # type: ignore[attr-defined]
    return preset


SIGMOID_BIAS = "e_score_correction_bias [E]"
DEEPSEEK_GATE = "x and the gate in float32, all else too"
SHARED = "shared experts see every token and are added to the routed sum"
SOFTMAX_GATE = (
    "product in the dtype of x, softmax in float32, weights rounded to the dtype of the logits"
)

mixtral = _preset(
    Model(
        "mixtral",
        "Mixtral-8x7B",
        {"num_experts": 8, "top_k": 2},
        (families.MIXTRAL, families.MINIMAX),
        source="arXiv:2401.04088, section 2.1, and the transformers class; MiniMax-Text-01 and "
        "MiniMax-M1 have the same router",
        outside="in training, x may be multiplied by noise (router_jitter_noise)",
        gate="product in the dtype of x, softmax and weights in float32",
    )
)

qwen2_moe = _preset(
    Model(
        "qwen2_moe",
        "Qwen1.5-MoE-A2.7B",
        {"num_experts": 60, "top_k": 4, "normalize": False},
        (families.QWEN2_MOE,),
        source="arXiv:2407.10671, section 2.2.2, and the transformers class",
        outside="a shared expert, times sigmoid(x . shared_expert_gate), is added",
        gate=SOFTMAX_GATE,
    )
)

qwen3_moe = _preset(
    Model(
        "qwen3_moe",
        "Qwen3-30B-A3B and Qwen3-235B-A22B",
        {"num_experts": 128, "top_k": 8},
        (families.QWEN3_MOE, families.QWEN3_NEXT),
        source="arXiv:2505.09388, section 2, and the transformers class",
        gate=SOFTMAX_GATE,
        outside="Qwen3-Next adds a shared expert as Qwen2-MoE does; Qwen3-MoE has none",
    )
)

olmoe = _preset(
    Model(
        "olmoe",
        "OLMoE-1B-7B",
        {"num_experts": 64, "top_k": 8, "normalize": False},
        (families.OLMOE, families.FLEX_OLMO),
        source="arXiv:2409.02060, section 2, and the transformers class",
        gate=SOFTMAX_GATE,
    )
)

deepseek_v2 = _preset(
    Model(
        "deepseek_v2",
        "DeepSeek-V2 (V2-Lite: num_experts=64, num_groups=1, group_top_k=1, scale=1.0)",
        {
            "num_experts": 160,
            "top_k": 6,
            "num_groups": 8,
            "group_top_k": 3,
            "group_score_k": 1,
            "normalize": False,
            "scale": 16.0,
        },
        (families.DEEPSEEK_V2,),
        source="arXiv:2405.04434, sections 2.2.1 and 2.2.2, and the transformers class",
        outside=SHARED,
        gate=DEEPSEEK_GATE,
    )
)

deepseek_v3 = _preset(
    Model(
        "deepseek_v3",
        "DeepSeek-V3 and DeepSeek-R1",
        {
            "num_experts": 256,
            "top_k": 8,
            "score": "sigmoid",
            "num_groups": 8,
            "group_top_k": 4,
            "eps": 1e-20,
            "scale": 2.5,
        },
        (
            families.DEEPSEEK_V3,
            families.DEEPSEEK_V32,
            families.BAILING_HYBRID,
            families.NEMOTRON_H,
        ),
        source="arXiv:2412.19437, section 2.1.2, and the transformers class",
        bias=SIGMOID_BIAS,
        outside=SHARED,
        gate=DEEPSEEK_GATE,
    )
)

deepseek_v4 = _preset(
    Model(
        "deepseek_v4",
        "DeepSeek-V4-Flash",
        {
            "num_experts": 256,
            "top_k": 6,
            "score": "sqrtsoftplus",
            "eps": 1e-20,
            "scale": 1.5,
        },
        (families.DEEPSEEK_V4,),
        source="the DeepSeek-V4 report, section 2.1, and the transformers class",
        bias=f"{SIGMOID_BIAS}; none in hash layers",
        outside="the first layers (hash_moe, 3 in the release) take their ids from a table of "
        f"token ids: route(..., indices=tid2eid[token_ids]), weights as elsewhere; {SHARED}",
        gate="product, scores and weights in the dtype of the gate; selection adds a float32 bias "
        "to the rounded scores",
    )
)

kimi_k2 = _preset(
    Model(
        "kimi_k2",
        "Kimi-K2",
        {"num_experts": 384, "top_k": 8, "score": "sigmoid", "eps": 1e-20, "scale": 2.827},
        (families.KIMI_K2,),
        source="arXiv:2507.20534, section 2.3; DeepSeek-V3's formula with one group",
        bias=SIGMOID_BIAS,
        outside=SHARED,
        gate=DEEPSEEK_GATE,
    )
)

kimi_k3 = _preset(
    Model(
        "kimi_k3",
        "Kimi-K3 (Kimi-Linear-48B-A3B: num_experts=256, top_k=8, scale=2.446)",
        {"num_experts": 896, "top_k": 16, "score": "sigmoid", "eps": 1e-20},
        (families.KIMI_LINEAR,),
        source="the Kimi K3 report and the transformers class of Kimi-Linear, which is its text "
        "model's model_type; transformers 5.24 has no Kimi-K3, so its eps is Kimi-Linear's",
        bias=f"{SIGMOID_BIAS}; K3 trains it by quantile balancing",
        outside=f"K3's routed experts work at half the width, between two projections; {SHARED}",
        gate=DEEPSEEK_GATE,
    )
)

glm_4_5 = _preset(
    Model(
        "glm_4_5",
        "GLM-4.5 (GLM-4.5-Air: num_experts=128, scale=1.0)",
        {"num_experts": 160, "top_k": 8, "score": "sigmoid", "eps": 1e-20, "scale": 2.5},
        (families.GLM4_MOE, families.GLM4V_MOE_TEXT, families.GLM4_MOE_LITE, families.GLM_MOE_DSA),
        source="arXiv:2508.06471, section 2.1, and the transformers class",
        bias=SIGMOID_BIAS,
        outside=SHARED,
        gate=DEEPSEEK_GATE,
    )
)

gpt_oss = _preset(
    Model(
        "gpt_oss",
        "gpt-oss-120b (gpt-oss-20b: num_experts=32)",
        {"num_experts": 128, "top_k": 4, "score_scope": "selected", "select_on": "logit"},
        (families.GPT_OSS,),
        source="arXiv:2508.10925, section 2, and the transformers class",
        outside="the gate has a learned bias of its own: gate(..., router_bias=), which is part of "
        "the logits and so of the weights",
        gate="product, softmax and weights in the dtype of the gate, each rounded once",
    )
)

granite = _preset(
    Model(
        "granite",
        "Granite-3.0-3B-A800M (1B-A400M: num_experts=32)",
        {"num_experts": 40, "top_k": 8, "score_scope": "selected", "select_on": "logit"},
        (families.GRANITEMOE, families.GRANITEMOESHARED, families.GRANITEMOEHYBRID),
        source="the transformers class",
        outside="the block's output is multiplied by residual_multiplier; granitemoeshared and "
        "granitemoehybrid add a shared expert",
        gate="product in the dtype of x, softmax in float32, weights rounded to the dtype of x",
    )
)

jetmoe = _preset(
    Model(
        "jetmoe",
        "JetMoE-8B",
        {"num_experts": 8, "top_k": 2, "score_scope": "selected", "select_on": "logit"},
        (families.JETMOE,),
        source="arXiv:2404.07413, section 2, and the transformers class",
        outside="a learned bias is added to the block's output; attention heads are chosen by a "
        "second router of the same kind",
        gate="product in the dtype of x, softmax in float32, weights rounded to the dtype of x",
    )
)

llama4 = _preset(
    Model(
        "llama4",
        "Llama-4-Scout (Maverick: num_experts=128)",
        {
            "num_experts": 16,
            "top_k": 1,
            "score": "sigmoid",
            "select_on": "logit",
            "normalize": False,
        },
        (families.LLAMA4_TEXT,),
        source="the transformers class",
        outside="the weight multiplies the expert's input, not its output: scale the permuted rows "
        "and combine without weights; a shared expert is added",
        gate="product in the dtype of x, sigmoid in float32, weights rounded to the dtype of x",
    )
)

minimax_m2 = _preset(
    Model(
        "minimax_m2",
        "MiniMax-M2",
        {"num_experts": 256, "top_k": 8, "score": "sigmoid"},
        (families.MINIMAX_M2,),
        source="the transformers class",
        bias=SIGMOID_BIAS,
        outside="nothing here; MiniMax-M3, which from_hf refuses, multiplies the routed sum by 2",
        gate="x in the gate's dtype for the product, all else in float32",
    )
)

ernie_4_5 = _preset(
    Model(
        "ernie_4_5",
        "ERNIE-4.5-21B-A3B (300B-A47B: top_k=8)",
        {"num_experts": 64, "top_k": 6, "eps": 1e-12, "eps_mode": "clamp"},
        (families.ERNIE4_5_MOE,),
        source="the ERNIE 4.5 report and the transformers class",
        bias="moe_statics.e_score_correction_bias [1, E], to be squeezed",
        outside=f"moe_capacity bounds an expert's tokens in Baidu's training code; {SHARED}",
        gate="all in float32, weights rounded to the dtype of x",
    )
)

lfm2 = _preset(
    Model(
        "lfm2",
        "LFM2-8B-A1B",
        {"num_experts": 32, "top_k": 4, "score": "sigmoid", "eps": 1e-6},
        (families.LFM2_MOE,),
        source="the transformers class",
        bias="expert_bias [E], where use_expert_bias is true",
        gate="all in the dtype of x, but for the float32 bias added to the rounded scores",
    )
)

mistral_4 = _preset(
    Model(
        "mistral_4",
        "Mistral-Small-4",
        {"num_experts": 128, "top_k": 4, "eps": 1e-20},
        (families.MISTRAL4,),
        source="the transformers class",
        outside=SHARED,
        gate="all in the dtype of x: scores, group sums and weights are each rounded to it",
    )
)

hunyuan = _preset(
    Model(
        "hunyuan",
        "Hunyuan-A13B",
        {"num_experts": 64, "top_k": 8},
        (families.HUNYUAN_V1_MOE,),
        source="the transformers class",
        outside="a shared MLP sees every token and is added to the routed sum",
        gate="all in float32 where the gate is float32, weights rounded to the dtype of the logits",
    )
)

__all__ = [*MODELS]
