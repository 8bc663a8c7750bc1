# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The real routers of transformers, made from their own configuration classes."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

WIDTH = 48
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits, weights, ids


def _plain(module: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> Routed:
    return module(x)


def _bias_argument(module: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> Routed:
    return module(x, bias)


def _llama4(module: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> Routed:
    scores, logits = module(x)  # scores of the experts that were not chosen are 0
    ids = torch.topk(logits, module.top_k, dim=1).indices
    return logits, scores.gather(1, ids), ids


def _jetmoe(module: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> Routed:
    slots, _, sorted_weights, sizes, logits = module(x)
    sorted_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    back = torch.argsort(slots)
    shape = (len(x), module.top_k)
    return logits, sorted_weights[back].reshape(shape), sorted_ids[back].reshape(shape)


@dataclasses.dataclass(frozen=True)
class Case:
    """A router class of transformers.

    Attributes:
        package: below transformers.models.
        prefix: of its classes' names.
        router: the rest of the router class's name.
        small: keyword arguments of the configuration class.
        bias: the buffer with the selection bias, "argument" if forward takes it, or None.
        rounds: computes scores and weights in the gate's dtype, rounding at every step.
        ordered: its ids are in order of selection value.
        preset, released: the preset that the class has with the released model's arguments.
        wrong: options that must not pass for the right ones.
    """

    package: str
    prefix: str
    small: Mapping[str, Any]
    preset: str | None = None
    released: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    router: str = "TopKRouter"
    config_class: str | None = None
    bias: str | None = None
    rounds: bool = False
    ordered: bool = True
    call: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor | None], Routed] = _plain
    wrong: Mapping[str, Any] | None = None

    def modeling(self, name: str) -> Any:
        module = f"transformers.models.{self.package}.modeling_{self.package}"
        return getattr(importlib.import_module(module), name)

    @property
    def _config_class(self) -> Any:
        module = f"transformers.models.{self.package}.configuration_{self.package}"
        name = self.config_class or f"{self.prefix}Config"
        return getattr(importlib.import_module(module), name)

    @property
    def model_type(self) -> str:
        return self._config_class.model_type

    def default(self, **options: Any) -> Any:
        """The configuration class's own defaults, but for the options."""
        return self._config_class(**options)

    def config(self, **options: Any) -> Any:
        """A configuration of WIDTH."""
        return self.default(**{"hidden_size": WIDTH, "num_attention_heads": 4, **options})

    def make(self, config: Any, dtype: torch.dtype, rng: np.random.Generator) -> Any:
        """The router with random weights in this dtype, and its random selection bias."""
        router_class = self.modeling(self.prefix + self.router)
        if self.prefix == "JetMoe":
            module = router_class(WIDTH, config.num_local_experts, config.num_experts_per_tok)
        else:
            module = router_class(config)
        for parameter in module.parameters():
            values = rng.standard_normal(tuple(parameter.shape)) / np.sqrt(parameter.shape[-1])
            if not parameter.requires_grad:
                values *= 0.1 * np.sqrt(parameter.shape[-1])
            kept = parameter.dtype if not parameter.requires_grad else dtype
            parameter.data = torch.from_numpy(values).to(kept)
        bias = None
        if self.bias == "argument":
            experts = module.num_experts
            bias = torch.from_numpy(rng.standard_normal(experts) * 0.1).float()
        elif self.bias:
            *path, name = self.bias.split(".")
            holder = module.get_submodule(".".join(path))
            tensor = getattr(holder, name)
            tensor.data = torch.from_numpy(rng.standard_normal(tuple(tensor.shape)) * 0.1).float()
            bias = tensor.data.reshape(-1)
        return module, bias

    def run(
        self, config: Any, dtype: torch.dtype, rng: np.random.Generator, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Logits, weights, ids and bias of random tokens; weights can be differentiated."""
        module, bias = self.make(config, dtype, rng)
        x = torch.from_numpy(rng.standard_normal((tokens, WIDTH))).to(dtype)
        return *self.call(module, x, bias), bias


EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
PLAIN = {"num_experts": 12, "num_experts_per_tok": 3}
NORMALIZED = PLAIN | {"norm_topk_prob": True}
GROUPED = {
    "n_routed_experts": 24,
    "num_experts_per_tok": 4,
    "n_group": 6,
    "topk_group": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
}
KIMI = {
    "num_experts": 24,
    "num_experts_per_token": 4,
    "num_expert_group": 6,
    "topk_group": 3,
    "routed_scaling_factor": 1.7,
}
SIGMOID = {"router": "TopkRouter", "bias": "e_score_correction_bias", "ordered": False}
SELECTED = {"wrong": {"score_scope": "all", "normalize": False}}

CASES = {
    "mixtral": Case("mixtral", "Mixtral", EIGHT, "mixtral"),
    "minimax": Case("minimax", "MiniMax", EIGHT),
    "qwen2_moe": Case("qwen2_moe", "Qwen2Moe", PLAIN, "qwen2_moe"),
    "qwen2_moe normalised": Case("qwen2_moe", "Qwen2Moe", NORMALIZED),
    "qwen3_moe": Case("qwen3_moe", "Qwen3Moe", NORMALIZED, "qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe unnormalised": Case("qwen3_moe", "Qwen3Moe", PLAIN),
    "qwen3_next": Case("qwen3_next", "Qwen3Next", NORMALIZED),
    "olmoe": Case("olmoe", "Olmoe", PLAIN, "olmoe"),
    "flex_olmo": Case("flex_olmo", "FlexOlmo", NORMALIZED),
    "deepseek_v2": Case(
        "deepseek_v2",
        "DeepseekV2",
        {k: v for k, v in GROUPED.items() if k != "norm_topk_prob"}
        | {"topk_method": "group_limited_greedy"},
        "deepseek_v2",
        {
            "n_routed_experts": 160,
            "num_experts_per_tok": 6,
            "n_group": 8,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
        },
        router="TopkRouter",
        ordered=False,
    ),
    "deepseek_v2 greedy": Case(
        "deepseek_v2",
        "DeepseekV2",
        {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 1},
        router="TopkRouter",
        ordered=False,
    ),
    "deepseek_v3": Case("deepseek_v3", "DeepseekV3", GROUPED, "deepseek_v3", **SIGMOID),
    "deepseek_v3 unnormalised": Case(
        "deepseek_v3", "DeepseekV3", GROUPED | {"norm_topk_prob": False}, **SIGMOID
    ),
    "deepseek_v32": Case("deepseek_v32", "DeepseekV32", GROUPED, **SIGMOID),
    "bailing_hybrid": Case("bailing_hybrid", "BailingHybrid", KIMI, **SIGMOID),
    "nemotron_h": Case("nemotron_h", "NemotronH", GROUPED, **SIGMOID),
    "kimi_k2": Case(
        "deepseek_v3",
        "DeepseekV3",
        GROUPED,
        "kimi_k2",
        {
            "n_routed_experts": 384,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
        },
        **SIGMOID,
    ),
    "kimi_linear": Case(
        "kimi_linear",
        "KimiLinear",
        KIMI,
        "kimi_k3",
        {"num_experts": 896, "num_experts_per_token": 16, "routed_scaling_factor": 1.0},
        **SIGMOID,
    ),
    "glm4_moe": Case(
        "glm4_moe",
        "Glm4Moe",
        GROUPED,
        "glm_4_5",
        {"n_routed_experts": 160, "routed_scaling_factor": 2.5},
        **SIGMOID,
    ),
    "glm4v_moe_text": Case("glm4v_moe", "Glm4vMoeText", GROUPED, **SIGMOID),
    "glm4_moe_lite": Case("glm4_moe_lite", "Glm4MoeLite", GROUPED, **SIGMOID),
    "glm_moe_dsa": Case("glm_moe_dsa", "GlmMoeDsa", GROUPED, **SIGMOID),
    "deepseek_v4": Case(
        "deepseek_v4",
        "DeepseekV4",
        {"n_routed_experts": 16, "num_experts_per_tok": 4},
        "deepseek_v4",
        bias="e_score_correction_bias",
        rounds=True,
        ordered=False,
    ),
    "deepseek_v4 sigmoid": Case(
        "deepseek_v4",
        "DeepseekV4",
        {"n_routed_experts": 16, "num_experts_per_tok": 4, "scoring_func": "sigmoid"},
        bias="e_score_correction_bias",
        rounds=True,
        ordered=False,
    ),
    "gpt_oss": Case("gpt_oss", "GptOss", EIGHT, "gpt_oss", rounds=True, **SELECTED),
    "granitemoe": Case(
        "granitemoe",
        "GraniteMoe",
        EIGHT,
        "granite",
        {"num_local_experts": 40, "num_experts_per_tok": 8},
        **SELECTED,
    ),
    "granitemoeshared": Case("granitemoeshared", "GraniteMoeShared", EIGHT, **SELECTED),
    "granitemoehybrid": Case(
        "granitemoehybrid", "GraniteMoeHybrid", EIGHT | {"mamba_n_heads": 4}, **SELECTED
    ),
    "jetmoe": Case(
        "jetmoe", "JetMoe", EIGHT, "jetmoe", router="TopKGating", call=_jetmoe, **SELECTED
    ),
    "llama4_text": Case(
        "llama4",
        "Llama4",
        EIGHT,
        "llama4",
        router="Router",
        config_class="Llama4TextConfig",
        call=_llama4,
    ),
    "minimax_m2": Case(
        "minimax_m2",
        "MiniMaxM2",
        EIGHT,
        "minimax_m2",
        bias="argument",
        ordered=False,
        call=_bias_argument,
    ),
    "ernie4_5_moe": Case(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        {"moe_num_experts": 12, "moe_k": 3},
        "ernie_4_5",
        bias="moe_statics.e_score_correction_bias",
    ),
    "ernie4_5_moe clamped": Case(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        {"moe_num_experts": 12, "moe_k": 3, "moe_norm_min": 0.5},
        bias="moe_statics.e_score_correction_bias",
        wrong={"eps_mode": "add"},
    ),
    "lfm2_moe": Case(
        "lfm2_moe",
        "Lfm2Moe",
        NORMALIZED | {"routed_scaling_factor": 1.7},
        "lfm2",
        bias="argument",
        rounds=True,
        call=_bias_argument,
    ),
    "lfm2_moe without bias": Case(
        "lfm2_moe", "Lfm2Moe", NORMALIZED | {"use_expert_bias": False}, rounds=True
    ),
    "mistral4": Case(
        "mistral4",
        "Mistral4",
        GROUPED,
        "mistral_4",
        router="TopkRouter",
        rounds=True,
        ordered=False,
    ),
    "hunyuan_v1_moe": Case(
        "hunyuan_v1_moe",
        "HunYuanMoEV1",
        {"num_experts": 8, "moe_topk": 2},
        "hunyuan",
        {"num_experts": 64, "moe_topk": 8},
        router="Gate",
    ),
}
