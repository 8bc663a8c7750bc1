# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Presets, and what `RouterConfig.from_hf` reads and refuses; needs no framework."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import duomoe
import numpy as np
import pytest
from duomoe import RouterConfig, hf, presets
from released_configs import RELEASED


@pytest.mark.parametrize("name", presets.MODELS)
def test_preset_is_what_the_released_config_says(name: str) -> None:
    assert RouterConfig.from_hf(RELEASED[name]) == getattr(presets, name)()


@pytest.mark.parametrize("name", presets.MODELS)
def test_every_option_can_be_overridden(name: str) -> None:
    function = getattr(duomoe.presets, name)
    assert function.__doc__.startswith("The router of ") and function.__name__ == name
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [f.name for f in dataclasses.fields(RouterConfig)]
    assert function() == RouterConfig(**{n: p.default for n, p in parameters.items()})
    other = {"num_experts": 480, "top_k": 2, "counts": "unbiased"}
    assert function(**other) == dataclasses.replace(function(), **other)
    with pytest.raises(ValueError, match="top_k must be between 1 and"):
        function(top_k=0)
    with pytest.raises(TypeError, match="colour"):
        function(colour="red")


def test_readme_counts_the_presets() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    assert f"lists {len(presets.MODELS)} models" in text


def test_presets_import_no_framework() -> None:
    code = (
        "import duomoe, duomoe.hf, sys; duomoe.RouterConfig.from_hf({'model_type': 'mixtral'});"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "duomoe.presets" in loaded.split()
    assert not {"jax", "torch", "transformers"} & set(loaded.split())


class Config:
    def __init__(self, values: dict) -> None:
        self.values = values

    def to_dict(self) -> dict:
        return self.values


@pytest.mark.parametrize("name", ["deepseek_v3", "llama4"])
def test_path_folder_dict_and_object_agree(name: str, tmp_path: Path) -> None:
    values = RELEASED[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    nested = {k: Config(v) if isinstance(v, dict) else v for k, v in values.items()}
    for config in (path, str(path), tmp_path, str(tmp_path), values, Config(values), nested):
        assert RouterConfig.from_hf(config) == getattr(presets, name)()


def test_what_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"config must be a path, a dict or an object .* got int"):
        RouterConfig.from_hf(3)
    with pytest.raises(TypeError, match=r"text_config must be a dict or an object .* got str"):
        RouterConfig.from_hf({"model_type": "llama4", "text_config": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        RouterConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        RouterConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError):
        RouterConfig.from_hf(tmp_path)


def test_model_type() -> None:
    with pytest.raises(ValueError, match=r"model_type must be one of .*mixtral.*, got 'phimoe'"):
        RouterConfig.from_hf({"model_type": "phimoe"})
    with pytest.raises(ValueError, match=r"model_type must be one of .* got \['mixtral'\]"):
        RouterConfig.from_hf({"model_type": ["mixtral"]})
    with pytest.raises(ValueError, match=r"model_type must be one of .* got None"):
        RouterConfig.from_hf({"num_experts": 8})
    with pytest.raises(ValueError, match=r"model_type must be one of .* got 'llama'"):
        RouterConfig.from_hf({"model_type": "llava", "text_config": {"model_type": "llama"}})


REFUSED = [
    # Values that RouterConfig has no words for, or whose meaning differs between implementations.
    ("mixtral", "router_jitter_noise", 0.1, "0.0"),
    ("llama4_text", "router_jitter_noise", 0.1, "0.0"),
    ("minimax_m2", "router_jitter_noise", 0.1, "0.0"),
    ("minimax_m2", "scoring_func", "softmax", "'sigmoid'"),
    ("deepseek_v2", "topk_method", "noaux_tc", "'greedy' or 'group_limited_greedy'"),
    ("deepseek_v2", "norm_topk_prob", True, "False"),
    ("deepseek_v2", "scoring_func", "sigmoid", "'softmax'"),
    ("deepseek_v2", "moe_layer_freq", 2, "1"),
    ("deepseek_v3", "topk_method", "greedy", "'noaux_tc'"),
    ("deepseek_v3", "scoring_func", "softmax", "'sigmoid'"),
    ("deepseek_v3", "moe_layer_freq", True, "1"),
    ("deepseek_v4", "scoring_func", "tanh", "'sqrtsoftplus' or 'sigmoid'"),
    ("deepseek_v4", "norm_topk_prob", False, "True"),
    ("deepseek_v4", "n_group", 8, "1 or None"),
    ("kimi_linear", "moe_router_activation_func", "softmax", "'sigmoid'"),
    ("kimi_linear", "use_grouped_topk", False, "True"),
    ("bailing_hybrid", "score_function", "softmax", "'sigmoid'"),
    ("glm4_moe_lite", "first_k_dense_replace", 2, "1"),
    ("ernie4_5_moe", "moe_gate", "top2_fused", "'topk'"),
    ("ernie4_5_moe", "moe_gate_act", "sigmoid", "'softmax'"),
    ("hunyuan_v1_moe", "norm_topk_prob", False, "True"),
    ("hunyuan_v1_moe", "routed_scaling_factor", 2.0, "1.0"),
    ("hunyuan_v1_moe", "group_limited_greedy", True, "False"),
    ("hunyuan_v1_moe", "moe_layer_num_skipped", 1, "0"),
    ("hunyuan_v1_moe", "moe_drop_tokens", True, "False"),
    ("hunyuan_v1_moe", "moe_random_routing_dropped_token", True, "False"),
    ("mixtral", "top_k", 4, "50"),
    # A key that the class ignores, with another value than the one it takes.
    ("gpt_oss", "experts_per_token", 2, "equal to num_experts_per_tok (4)"),
    ("jetmoe", "moe_top_k", 3, "equal to num_experts_per_tok (2)"),
    # Values of the wrong kind or size.
    ("mixtral", "num_local_experts", "8", "an int"),
    ("mixtral", "num_local_experts", True, "an int"),
    ("mixtral", "num_local_experts", 0, "at least 1"),
    ("mixtral", "num_experts_per_tok", [2, 2], "an int"),
    ("mixtral", "num_experts_per_tok", 9, "between 1 and the number of experts"),
    ("granitemoehybrid", "num_local_experts", 0, "at least 1"),
    ("deepseek_v3", "n_group", None, "an int"),
    ("deepseek_v3", "n_group", 7, "divisible"),
    ("deepseek_v3", "topk_group", 9, "between 1 and 8"),
    ("deepseek_v3", "norm_topk_prob", 1, "True or False"),
    ("deepseek_v3", "norm_topk_prob", "if_k_gt_1", "True or False"),
    ("deepseek_v3", "routed_scaling_factor", "2.5", "a float"),
    ("ernie4_5_moe", "moe_norm_min", -1.0, "must not be negative"),
    ("hunyuan_v1_moe", "moe_topk", [1, 2], "the same in every layer unless layer is given"),
    ("hunyuan_v1_moe", "num_experts", [], "the same in every layer unless layer is given"),
    # Keys that nobody told from_hf about.
    ("mixtral", "zero_expert_num", 2, "looks like a router option"),
    ("mixtral", "router_type", "sparsemixer", "looks like a router option"),
    ("mixtral", "expert_choice", True, "looks like a router option"),
    ("mixtral", "norm_topk_prob", True, "looks like a router option"),
    ("mixtral", "n_group", 2, "looks like a router option"),
    ("mixtral", "first_k_dense_replace", 1, "looks like a router option"),
    ("qwen3_moe", "routed_scaling_factor", 2.0, "looks like a router option"),
    ("olmoe", "scoring_func", "sigmoid", "looks like a router option"),
    ("deepseek_v3", "num_expert_group", 4, "looks like a router option"),
    ("deepseek_v3", "router_logit_softcapping", 30.0, "looks like a router option"),
    ("gpt_oss", "moe_renormalize", False, "looks like a router option"),
    ("minimax_m2", "routed_scaling_factor", 2.0, "looks like a router option"),
]


@pytest.mark.parametrize(("model_type", "key", "value", "allowed"), REFUSED)
def test_refusal_names_key_value_and_what_is_allowed(
    model_type: str, key: str, value: object, allowed: str
) -> None:
    config = {"model_type": model_type, key: value}
    if model_type == "deepseek_v2":
        config["num_experts_per_tok"] = 6
    with pytest.raises(ValueError) as caught:
        RouterConfig.from_hf(config)
    message = str(caught.value)
    assert model_type in message and key in message and allowed in message
    assert repr(value) in message


def test_two_names_of_one_key() -> None:
    both = {"model_type": "mixtral", "num_local_experts": 4, "num_experts": 4}
    assert RouterConfig.from_hf(both).num_experts == 4
    with pytest.raises(
        ValueError, match=r"num_experts must be equal to num_local_experts \(4\), got 5"
    ):
        RouterConfig.from_hf(both | {"num_experts": 5})
    with pytest.raises(ValueError, match=r"n_group must be equal to num_expert_group \(1\), got 2"):
        RouterConfig.from_hf({"model_type": "kimi_linear", "num_expert_group": 1, "n_group": 2})


@pytest.mark.parametrize(
    "key", [k for k in RELEASED["kimi_k2"] if k in hf.BY_TYPE["kimi_k2"][1].known()]
)
def test_keys_without_a_default(key: str) -> None:
    """transformers has no class for kimi_k2, so a router key that is missing is an error."""
    config = {k: v for k, v in RELEASED["kimi_k2"].items() if k != key}
    family = hf.BY_TYPE["kimi_k2"][1]
    if key in {names[0] for names in family.keys.values()}:
        with pytest.raises(ValueError, match=f"kimi_k2: {key}.* must be given"):
            RouterConfig.from_hf(config)
    elif key in family.choices:
        assert RouterConfig.from_hf(config) == presets.kimi_k2()
    else:
        with pytest.raises(ValueError, match=f"{key} must be an int, got None"):
            RouterConfig.from_hf(config, layer=5)


def test_top_k_of_deepseek_v2_has_no_default() -> None:
    with pytest.raises(ValueError, match="num_experts_per_tok must be given"):
        RouterConfig.from_hf({"model_type": "deepseek_v2"})
    limited = {"model_type": "deepseek_v2", "num_experts_per_tok": 6}
    with pytest.raises(ValueError, match="n_group must be given"):
        RouterConfig.from_hf(limited | {"topk_method": "group_limited_greedy"})


def test_wrapper_with_a_router_key_of_its_own() -> None:
    config = {"model_type": "mistral3", "router_scale": 2.0, "text_config": {}}
    with pytest.raises(ValueError, match=r"mistral3 around text_config: router_scale = 2\.0 looks"):
        RouterConfig.from_hf(config)


@pytest.mark.parametrize(
    ("config", "layer", "message"),
    [
        (RELEASED["deepseek_v3"], 2, r"layer 2 is dense .*first_k_dense_replace = 3"),
        (RELEASED["deepseek_v3"], 61, "layer must be between 0 and 60, got 61"),
        (RELEASED["deepseek_v3"], -1, "layer must be between 0 and 60, got -1"),
        (RELEASED["lfm2"], 1, r"layer 1 is dense .*num_dense_layers = 2"),
        (RELEASED["ernie_4_5"], 0, r"layer 0 is dense .*moe_layer_start_index = 1"),
        (RELEASED["llama4"], 48, "layer must be between 0 and 47, got 48"),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3]},
            3,
            r"layer 3 is dense .*decoder_sparse_step = 2, mlp_only_layers = \[3\]",
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, 0, "mlp_only_layers must be a list"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, 0, "decoder_sparse_step must be"),
        (
            {"model_type": "deepseek_v4", "mlp_layer_types": ["sparse"] * 43},
            0,
            "mlp_layer_types must hold 'hash_moe', 'moe', got 'sparse'",
        ),
        (
            {"model_type": "kimi_linear", "mlp_layer_types": ["sparse"]},
            0,
            "mlp_layer_types must be a list of 27 names",
        ),
        (
            {"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [1, 2]},
            2,
            "moe_topk must be a list with a value for layer 2",
        ),
    ],
)
def test_layers_that_are_refused(config: dict, layer: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig.from_hf(config, layer=layer)


def test_keys_about_losses_are_not_the_routers() -> None:
    losses = {"aux_loss_alpha": 0.1, "moe_aux_loss_coeff": 0.1, "router_z_loss_coef": 1e-3}
    for name, config in RELEASED.items():
        if "text_config" not in config:
            assert RouterConfig.from_hf(config | losses) == getattr(presets, name)()
    with pytest.raises(ValueError, match="moe_aux_loss_free = True looks like a router option"):
        RouterConfig.from_hf(RELEASED["mixtral"] | {"moe_aux_loss_free": True})


def test_layer_kinds() -> None:
    assert hf.layer_kinds(RELEASED["deepseek_v4"]) == ["hash_moe"] * 3 + ["moe"] * 40
    assert hf.layer_kinds(RELEASED["deepseek_v3"]) == ["dense"] * 3 + ["moe"] * 58
    for layer in (0, 3):
        assert RouterConfig.from_hf(RELEASED["deepseek_v4"], layer=layer) == presets.deepseek_v4()


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": "mixtral", 1: 2}, "config must have keys of str, got 1"),
        ({"model_type": "mixtral", "Num_Experts": 4}, "Num_Experts = 4 looks like"),
        ({"model_type": "mixtral", "output_scores": True}, "output_scores must be False, got True"),
        (
            {"model_type": "deepseek_v4", "mlp_layer_types": [["moe"]] * 99},
            r"mlp_layer_types must hold .*, got \['moe'\]",
        ),
        (
            {"text_config": {"model_type": "mixtral", "text_config": {"model_type": "olmoe"}}},
            "text_config must be the language model's own config",
        ),
    ],
)
def test_what_looks_right_and_is_not(config: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        RouterConfig.from_hf(config, layer=0)


def test_keys_of_an_older_dump_are_passed_over() -> None:
    """Generation options that transformers 4 wrote into every config."""
    dump = {"model_type": "mixtral", "output_scores": False, "top_k": 50, "num_beam_groups": 1}
    assert RouterConfig.from_hf(dump) == RouterConfig.from_hf({"model_type": "mixtral"})


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json holds no JSON"):
        RouterConfig.from_hf(path)
    path.write_text(json.dumps({"model_type": "mixtral"}), encoding="utf-8-sig")
    assert RouterConfig.from_hf(tmp_path).num_experts == 8


def test_numpy_bools_are_bools() -> None:
    assert presets.mixtral(normalize=np.bool_(True)) == presets.mixtral()


def test_router_page_names_every_allowed_value() -> None:
    from duomoe import config, router_page

    page = router_page.page()
    for allowed in (config.SCORES, config.SCORE_SCOPES, config.SELECT_ON, config.NORMALIZE):
        for value in (*allowed, *config.EPS_MODES, *config.COUNTS):
            assert (f'"{value}"' if isinstance(value, str) else str(value)) in page, value
