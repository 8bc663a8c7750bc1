# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""`ExpertConfig.from_hf` and `duomoe.hf_weights` without any framework: what they read, and what
they refuse. tests/test_hf_blocks.py compares with the real classes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from duomoe import ExpertConfig, MoEParams, expert_families, hf, hf_weights
from released_configs import RELEASED

E, D, F = 3, 4, 5
MIXTRAL = {
    "model_type": "mixtral",
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "hidden_size": D,
    "intermediate_size": F,
}
GPT_OSS = MIXTRAL | {"model_type": "gpt_oss"}


# -- ExpertConfig.from_hf --------------------------------------------------------------------------

OPTIONS = [
    ({"model_type": "mixtral"}, {}),
    ({"model_type": "mixtral", "hidden_act": "gelu"}, {"activation": "gelu"}),
    ({"model_type": "olmoe", "hidden_act": "gelu_new"}, {"activation": "gelu_tanh"}),
    ({"model_type": "olmoe", "hidden_act": "gelu_pytorch_tanh"}, {"activation": "gelu_tanh"}),
    ({"model_type": "qwen3_moe", "hidden_act": "relu"}, {"activation": "relu"}),
    ({"model_type": "nemotron_h"}, {"activation": "relu_squared"}),
    ({"model_type": "nemotron_h", "mlp_hidden_act": "silu"}, {}),
    ({"model_type": "gpt_oss"}, {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}),
    (
        {"model_type": "gpt_oss", "swiglu_alpha": 1, "swiglu_limit": 2.5},
        {"alpha": 1.0, "limit": 2.5, "up_offset": 1.0},
    ),
    ({"model_type": "deepseek_v4"}, {"limit": 10.0}),
    ({"model_type": "llama4_text"}, {"weight_on": "input"}),
    ({"model_type": "llama4", "text_config": {"hidden_act": "swish"}}, {"weight_on": "input"}),
    ({"model_type": "x", "text_config": {"model_type": "kimi_k2"}}, {}),
]


@pytest.mark.parametrize(("config", "options"), OPTIONS)
def test_options(config: dict, options: dict) -> None:
    assert ExpertConfig.from_hf(config) == ExpertConfig(**options)


def test_path_folder_and_object(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))

    class Config:
        def to_dict(self) -> dict:
            return {"model_type": "gpt_oss"}

    wanted = ExpertConfig(alpha=1.702, limit=7.0, up_offset=1.0)
    for config in (tmp_path, str(tmp_path / "config.json"), Config()):
        assert ExpertConfig.from_hf(config) == wanted
    with pytest.raises(FileNotFoundError):
        ExpertConfig.from_hf(tmp_path / "absent.json")
    with pytest.raises(TypeError, match="config must be a path, a dict or an object"):
        ExpertConfig.from_hf(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs(name: str) -> None:
    refused = {
        "jetmoe": "got 'jetmoe'",
        "kimi_k3": "kimi_linear: routed_expert_hidden_size must be None, got 3584",
    }
    if name in refused:
        with pytest.raises(ValueError, match=refused[name]):
            ExpertConfig.from_hf(RELEASED[name])
    else:
        ExpertConfig.from_hf(RELEASED[name])


REFUSED = [
    ({"model_type": "jetmoe"}, "model_type must be one of bailing_hybrid, .*, got 'jetmoe'"),
    ({"model_type": "bert"}, "model_type must be one of .*, got 'bert'"),
    (
        {"model_type": "mixtral", "hidden_act": "quick_gelu"},
        "mixtral: hidden_act must be one of 'silu', .*, got 'quick_gelu'",
    ),
    ({"model_type": "mixtral", "hidden_act": None}, "hidden_act must be one of .*, got None"),
    ({"model_type": "gpt_oss", "hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ({"model_type": "lfm2_moe", "hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ({"model_type": "gpt_oss", "swiglu_limit": None}, "gpt_oss: swiglu_limit must be a float"),
    ({"model_type": "gpt_oss", "swiglu_limit": 0.0}, "limit must be above 0 .*swiglu_limit"),
    ({"model_type": "deepseek_v4", "swiglu_limit": True}, "swiglu_limit must be a float, got True"),
    ({"model_type": "deepseek_v3", "mlp_bias": True}, "mlp_bias must be False or None, got True"),
    ({"model_type": "ernie4_5_moe", "use_bias": True}, "use_bias must be False or None, got True"),
    ({"model_type": "mixtral", "mlp_bias": 0}, "mlp_bias must be False or None, got 0"),
    ({"model_type": "nemotron_h", "moe_latent_size": 64}, "moe_latent_size must be None, got 64"),
    (
        {"model_type": "kimi_linear", "routed_expert_hidden_size": 64},
        "routed_expert_hidden_size must be None, got 64",
    ),
    (
        {"model_type": "mixtral", "swiglu_limit": 7.0},
        "mixtral: swiglu_limit = 7.0 looks like an option of experts .* it knows hidden_act",
    ),
    ({"model_type": "mixtral", "router_top_p": 1}, "router_top_p = 1 looks like a router option"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_refused(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertConfig.from_hf(config)


def test_families_are_consistent() -> None:
    """Every type has a router, and every field at most one place, with all its axes."""
    assert set(expert_families.BY_TYPE) == set(hf.BY_TYPE) - {"jetmoe"}
    for family in expert_families.BY_TYPE.values():
        fields = [field for tensor in family.tensors for field in tensor.fields]
        assert len(set(fields)) == len(fields)
        assert {"router", "w_up", "w_down"} <= set(fields) <= set(hf_weights.AXES)
        for tensor in family.tensors:
            letters = tensor.axes.replace("2", "").replace("1", "").split()
            for field in tensor.fields:
                wanted = hf_weights.AXES[field].replace("1", "").split()
                assert sorted(letters) == sorted(wanted)
            assert ("2" in tensor.axes) == (len(tensor.fields) == 2)


def test_docs_list_the_model_types() -> None:
    root = Path(__file__).parents[1]
    table = (root / "docs" / "hf.md").read_text().split("## ")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(listed) == sorted(expert_families.BY_TYPE)
    count = f"{len(listed)} model types"
    assert count in (root / "README.md").read_text()
    assert count in (root / "CHANGELOG.md").read_text()


# -- hf_weights ------------------------------------------------------------------------------------


def mixtral(rng: np.random.Generator, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    shapes = {
        "gate.weight": (E, D),
        "experts.gate_up_proj": (E, 2 * F, D),
        "experts.down_proj": (E, D, F),
    }
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def mixtral_on_disk(rng: np.random.Generator) -> dict[str, np.ndarray]:
    state = mixtral(rng)
    result = {"a.gate.weight": state["gate.weight"]}
    for i in range(E):
        result[f"a.experts.{i}.w1.weight"] = state["experts.gate_up_proj"][i, :F]
        result[f"a.experts.{i}.w3.weight"] = state["experts.gate_up_proj"][i, F:]
        result[f"a.experts.{i}.w2.weight"] = state["experts.down_proj"][i]
    return result


def gpt_oss(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {
        "router.weight": (E, D),
        "router.bias": (E,),
        "experts.gate_up_proj": (E, D, 2 * F),
        "experts.gate_up_proj_bias": (E, 2 * F),
        "experts.down_proj": (E, F, D),
        "experts.down_proj_bias": (E, D),
    }
    return {n: rng.standard_normal(s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}


def test_mixtral(rng) -> None:
    state = mixtral(rng)
    fields = hf_weights.moe_params(state, MIXTRAL)
    assert list(fields) == [f.name for f in dataclasses.fields(MoEParams)]
    both = state["experts.gate_up_proj"]
    wanted = {
        "router": state["gate.weight"].T,
        "w_gate": both[:, :F].transpose(0, 2, 1),
        "w_up": both[:, F:].transpose(0, 2, 1),
        "w_down": state["experts.down_proj"].transpose(0, 2, 1),
    }
    for name, array in fields.items():
        if name not in wanted:
            assert array is None
            continue
        np.testing.assert_array_equal(array, wanted[name])
        assert array.flags.c_contiguous and array.flags.writeable
        assert not any(np.shares_memory(array, given) for given in state.values())


def test_gpt_oss_interleaves_gate_and_up(rng) -> None:
    state = gpt_oss(rng)
    fields = hf_weights.moe_params(state, GPT_OSS)
    assert {a.dtype for a in fields.values() if a is not None} == {np.dtype(ml_dtypes.bfloat16)}
    wanted = {
        "router": state["router.weight"].T,
        "router_bias": state["router.bias"],
        "w_gate": state["experts.gate_up_proj"][..., ::2],
        "w_up": state["experts.gate_up_proj"][..., 1::2],
        "b_gate": state["experts.gate_up_proj_bias"][:, ::2],
        "b_up": state["experts.gate_up_proj_bias"][:, 1::2],
        "w_down": state["experts.down_proj"],
        "b_down": state["experts.down_proj_bias"],
    }
    assert {name for name, array in fields.items() if array is not None} == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(fields[name], array)
    back = hf_weights.hf_state_dict(fields, GPT_OSS, "x.")
    assert {key.removeprefix("x.") for key in back} == set(state)
    for key, array in back.items():
        np.testing.assert_array_equal(array, state[key.removeprefix("x.")])


def test_sizes_may_come_from_the_tensors(rng) -> None:
    bare = {k: v for k, v in MIXTRAL.items() if not k.endswith("_size")}
    assert hf_weights.moe_params(mixtral(rng), bare)["w_up"].shape == (E, D, F)


def test_selection_bias_becomes_float32(rng) -> None:
    config = MIXTRAL | {"model_type": "minimax_m2"}
    state = mixtral(rng, np.float16) | {"e_score_correction_bias": np.ones(E, np.float16)}
    fields = hf_weights.moe_params(state, config)
    assert fields["expert_bias"].dtype == np.float32
    assert fields["router"].dtype == np.float16


def test_layers_that_differ(rng) -> None:
    config = MIXTRAL | {"model_type": "hunyuan_v1_moe", "num_local_experts": [2, E], "moe_topk": 1}
    config["num_hidden_layers"] = 2
    del config["num_experts_per_tok"]
    state = mixtral(rng)
    state["gate.wg.weight"] = state.pop("gate.weight")
    for name in ("gate", "up"):
        state[f"shared_mlp.{name}_proj.weight"] = np.ones((F, D), np.float32)
    state["shared_mlp.down_proj.weight"] = np.ones((D, F), np.float32)
    assert hf_weights.moe_params(state, config, layer=1)["router"].shape == (D, E)
    with pytest.raises(ValueError, match=r"gate.wg.weight must have shape \[E, D\] = \[2, 4\]"):
        hf_weights.moe_params(state, config, layer=0)
    with pytest.raises(ValueError, match="num_local_experts must be the same in every layer"):
        hf_weights.moe_params(state, config)


def test_hash_layers(rng) -> None:
    config = MIXTRAL | {
        "model_type": "deepseek_v4",
        "n_routed_experts": E,
        "moe_intermediate_size": F,
        "num_hash_layers": 1,
        "num_hidden_layers": 2,
    }
    del config["num_local_experts"], config["intermediate_size"]
    state = mixtral(rng)
    for name in ("gate", "up"):
        state[f"shared_experts.{name}_proj.weight"] = np.ones((F, D), np.float32)
    state["shared_experts.down_proj.weight"] = np.ones((D, F), np.float32)
    table = state | {"gate.tid2eid": np.zeros((9, 2), np.int64)}
    bias = state | {"gate.e_score_correction_bias": np.ones(E, np.float32)}
    for layer in (None, 0):
        assert hf_weights.moe_params(table, config, layer=layer)["expert_bias"] is None
    for layer in (None, 1):
        fields = hf_weights.moe_params(bias, config, layer=layer)
        assert set(hf_weights.hf_state_dict(fields, config, layer=layer)) == set(bias)
    missing = "lacks gate.e_score_correction_bias"
    for given, layer in ((table, 1), (state, None), (state, 1)):
        with pytest.raises(ValueError, match=missing):
            hf_weights.moe_params(given, config, layer=layer)
    for given, layer in ((bias | table, None), (bias, 0)):
        with pytest.raises(ValueError, match="is no tensor of a deepseek_v4 block"):
            hf_weights.moe_params(given, config, layer=layer)
    with pytest.raises(ValueError, match=r"params\.expert_bias is needed for gate.e_score"):
        hf_weights.hf_state_dict(fields | {"expert_bias": None}, config, layer=1)


WRONG_STATES = [
    ({"gate.weight": None}, ValueError, r"lacks gate.weight \[E, D\] of a mixtral block"),
    (
        {"experts.gate_up_proj": None},
        ValueError,
        r"lacks experts.0.w1.weight \[E, 2F, D\] .*of the module \(experts.gate_up_proj\) or of a "
        r"checkpoint \(experts.0.w1.weight, experts.0.w3.weight\)",
    ),
    (
        {"gate.weight": np.zeros((D, E), np.float32)},
        ValueError,
        r"gate.weight must have shape \[E, D\] = \[3, 4\], got \[4, 3\]",
    ),
    (
        {"experts.gate_up_proj": np.zeros((E, D, 2 * F), np.float32)},
        ValueError,
        r"experts.gate_up_proj must have shape \[E, 2F, D\] = \[3, 10, 4\], got \[3, 4, 10\]",
    ),
    (
        {"experts.down_proj": np.zeros((E, D), np.float32)},
        ValueError,
        r"experts.down_proj must have shape \[E, D, F\] = \[3, 4, 5\], got \[3, 4\]",
    ),
    (
        {"gate.bias": np.zeros(E, np.float32)},
        ValueError,
        "gate.bias is no tensor of a mixtral block; under the prefix '' it knows gate.weight, "
        "experts.gate_up_proj, experts.down_proj",
    ),
    (
        {"experts.0.w1.weight": np.zeros((F, D), np.float32), "experts.0.w2.weight": 0},
        ValueError,
        r"experts.0.w1.weight is no tensor of a mixtral block \(nor are 1 others\)",
    ),
    (
        {"experts.down_proj": np.zeros((E, D, F), np.int8)},
        ValueError,
        "experts.down_proj must be float32, bfloat16 or float16, got int8; quantised",
    ),
    (
        {"experts.down_proj": np.zeros((E, D, F))},
        ValueError,
        "experts.down_proj must be float32, bfloat16 or float16, got float64",
    ),
    ({"gate.weight": [[1.0]]}, TypeError, "gate.weight must be a NumPy, JAX or torch array, got l"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG_STATES)
def test_wrong_states(change: dict, error: type, message: str, rng) -> None:
    state = {k: v for k, v in {**mixtral(rng), **change}.items() if v is not None}
    with pytest.raises(error, match=message):
        hf_weights.moe_params(state, MIXTRAL)


WRONG_CHECKPOINTS = [
    ({"a.experts.1.w3.weight": None}, r"lacks a.experts.1.w3.weight \[E, 2F, D\]"),
    (
        {"a.experts.2.w2.weight": np.zeros((F, D), np.float32)},
        r"a.experts.2.w2.weight must have shape \[D, F\] = \[4, 5\], got \[5, 4\]",
    ),
    (
        {"a.experts.1.w1.weight": np.zeros((F, D), np.float16)},
        "a.experts.1.w1.weight must be float32 as expert 0, got float16",
    ),
    (
        {"a.experts.3.w1.weight": np.zeros((F, D), np.float32)},
        "a.experts.3.w1.weight is no tensor of a mixtral block",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG_CHECKPOINTS)
def test_wrong_checkpoints(change: dict, message: str, rng) -> None:
    right = mixtral_on_disk(rng)
    hf_weights.moe_params(right, MIXTRAL, "a.")
    state = {k: v for k, v in {**right, **change}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        hf_weights.moe_params(state, MIXTRAL, "a.")


def test_quantised_experts_are_refused(rng) -> None:
    state = gpt_oss(rng)
    state["experts.gate_up_proj_blocks"] = np.zeros((E, 2 * F, 1, 16), np.uint8)
    del state["experts.gate_up_proj"]
    message = r"lacks experts.gate_up_proj .*; not read yet: experts.down_proj, .*"
    with pytest.raises(ValueError, match=message):
        hf_weights.moe_params(state, GPT_OSS)


def test_wrong_arguments(rng) -> None:
    state = mixtral(rng)
    fields = hf_weights.moe_params(state, MIXTRAL)
    with pytest.raises(
        ValueError, match=r"no key of state_dict begins with 'b\.'; its first are 'g"
    ):
        hf_weights.moe_params(state, MIXTRAL, "b.")
    with pytest.raises(TypeError, match="state_dict must be a dict, got list"):
        hf_weights.moe_params([state], MIXTRAL)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prefix must be a str, got int"):
        hf_weights.moe_params(state, MIXTRAL, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="params must be MoEParams or a dict, got list"):
        hf_weights.hf_state_dict([fields], MIXTRAL)  # type: ignore[arg-type]
    wrong: dict[str, tuple[Any, str]] = {
        "colour": (1, "params must have the fields of MoEParams, router, .*, got 'colour'"),
        "w_up": (None, "params.w_up is needed for experts.gate_up_proj of a mixtral block"),
        "b_up": (np.zeros((E, F), np.float32), "params.b_up has no place in a mixtral block"),
        "router": (
            np.zeros((E, D), np.float32),
            r"params.router must have shape \[D, E\] = \[4, 3\], got \[3, 4\]",
        ),
        "w_down": (np.zeros((E, F, D), np.int32), "params.w_down must be float32, .* got int32"),
        "w_gate": (np.zeros((E, D, F)), "params.w_gate must be float32, .* got float64"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(ValueError, match=message):
            hf_weights.hf_state_dict(fields | {name: value}, MIXTRAL)
    mixed = fields | {"w_up": fields["w_up"].astype(np.float16)}
    with pytest.raises(ValueError, match=r"params\.w_up must be float32 as params.w_gate, got flo"):
        hf_weights.hf_state_dict(mixed, MIXTRAL)
