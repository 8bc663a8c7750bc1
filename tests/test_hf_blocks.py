# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Whole MoE blocks of transformers against ours, with their weights converted by
`duomoe.hf_weights`: the output, and the gradients of x and of every parameter.
"""

from __future__ import annotations

import dataclasses
import os
import types
from typing import Any

import numpy as np
import pytest
from adapters import bits
from duomoe import ExpertConfig, MoEParams, RouterConfig, expert_families, hf_weights
from duomoe.convert import torch_state_dict

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("transformers")

from hf_block_cases import BLOCKS, WIDTH, Sample, numbers, sample

pytestmark = [pytest.mark.jax, pytest.mark.torch]

EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7}


def distances(
    given: dict[str, np.ndarray], exact: dict[str, np.ndarray], eps: float
) -> dict[str, float]:
    """For each array the largest difference of a slice, in eps of its largest element.

    A slice is a token's row, an expert's matrix, or the whole of what is neither. Where it is 0 (an
    expert without tokens), it must be 0.
    """
    result = {}
    for name, wanted in exact.items():
        shape = wanted.shape
        if name in ("output", "x"):
            shape = (-1, shape[-1])
        elif wanted.ndim == 3 or name.startswith("b_"):
            shape = (shape[0], -1)
        else:
            shape = (1, -1)
        wanted = wanted.astype(np.float64).reshape(shape)
        difference = np.abs(given[name].astype(np.float64).reshape(shape) - wanted).max(1)
        scale = np.abs(wanted).max(1)
        assert (difference[scale == 0] == 0).all(), f"{name} must be 0"
        result[name] = float((difference[scale > 0] / scale[scale > 0]).max(initial=0) / eps)
    return result


def ours(
    adapter: Any,
    fields: dict[str, np.ndarray | None],
    router: RouterConfig,
    experts: ExpertConfig,
    data: Sample,
    gate_dtype: str,
) -> dict[str, np.ndarray]:
    """Output and gradients of our block."""
    names = [n for n, a in fields.items() if a is not None and n != "expert_bias"]
    options: dict[str, Any] = {"experts": experts, "gate_dtype": gate_dtype}
    if data.ids is not None:
        options["indices"] = adapter.array(data.ids)
    bias = fields["expert_bias"]
    fixed = {"expert_bias": None if bias is None else adapter.array(bias)}

    def f(x: Any, *arrays: Any) -> tuple[Any]:
        given = dict.fromkeys(fields) | fixed | dict(zip(names, arrays, strict=True))
        return (adapter.functions.moe(x, MoEParams(**given), router, **options).output,)

    (output,), pull = adapter.vjp(f, data.x, *(fields[n] for n in names))
    x, *gradients = pull(data.cotangent)
    return {"output": output, "x": x} | dict(zip(names, gradients, strict=True))


# Bounds of a difference, in eps of the largest element of its slice: from the module in float64,
# and from the module itself. In float32 each number is a chain of products of up to 48 terms, in
# all some 100 roundings of half an eps or less that add up like a random walk, and a weight of up
# to 5 ulp (tests/test_transformers.py). In bfloat16 gate, up, hidden value, expert's output, their
# cotangents and the sum are each rounded once, half an eps; transformers rounds some of them more
# often, and the weights in some models.
FROM_EXACT = {"float32": 10, "bfloat16": 3}
FROM_THEIRS = {"float32": 10, "bfloat16": 4}


def check(given: dict[str, np.ndarray], data: Sample, dtype: str) -> None:
    """AssertionError on an output or gradient beyond the bounds."""
    for wanted, bounds in ((data.exact, FROM_EXACT), (data.theirs, FROM_THEIRS)):
        for name, distance in distances(given, wanted, EPS[dtype]).items():
            assert distance <= bounds[dtype], f"{name} differs by {distance} eps"


def converted(name: str, dtype: str, **options: Any) -> tuple[Sample, tuple[Any, ...]]:
    """A sample, and what ours() wants after the adapter."""
    data = sample(name, dtype, **options)
    gate_dtype = "float32" if BLOCKS[name].gate == "float32" else dtype
    return data, (
        hf_weights.moe_params(data.state, data.config),
        RouterConfig.from_hf(data.config),
        ExpertConfig.from_hf(data.config),
        data,
        gate_dtype,
    )


@pytest.fixture
def both(jax_adapter, torch_adapter) -> list[Any]:
    return [jax_adapter, torch_adapter]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str, dtype: str, both) -> None:
    """Output and all gradients, in both front ends, which agree in all bits."""
    data, rest = converted(name, dtype)
    first, second = (ours(adapter, *rest) for adapter in both)
    assert set(first) == set(second) == set(data.exact)
    for key, array in first.items():
        np.testing.assert_array_equal(bits(array), bits(second[key]), key)
    check(first, data, dtype)


ACTIVATIONS = ["swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("name", "key"), [("mixtral", "hidden_act"), ("nemotron_h", "mlp_hidden_act")]
)
def test_activations(name: str, key: str, activation: str, torch_adapter) -> None:
    data, rest = converted(name, "float32", **{key: activation})
    check(ours(torch_adapter, *rest), data, "float32")


def test_every_family_has_a_block() -> None:
    # Kimi-K2 has no class of its own: DeepSeek-V3's stands for it.
    tested = {block.config().model_type for block in BLOCKS.values()}
    assert set(expert_families.BY_TYPE) == tested | {"kimi_k2"}
    k2, v3 = (expert_families.BY_TYPE[name] for name in ("kimi_k2", "deepseek_v3"))
    assert dataclasses.replace(k2, model_type="deepseek_v3") == v3


# -- what must not pass ----------------------------------------------------------------------------


def swapped(fields: dict[str, Any]) -> dict[str, Any]:
    return {"w_gate": fields["w_up"], "w_up": fields["w_gate"]}


def in_halves(fields: dict[str, Any]) -> dict[str, Any]:
    """Interleaved columns taken for halves."""
    joined = np.stack([fields["w_gate"], fields["w_up"]], -1)
    joined = joined.reshape(*joined.shape[:2], -1)
    inner = joined.shape[2] // 2
    return {
        "w_gate": np.ascontiguousarray(joined[..., :inner]),
        "w_up": np.ascontiguousarray(joined[..., inner:]),
    }


def permuted(fields: dict[str, Any]) -> dict[str, Any]:
    """Experts in another order."""
    return {"w_down": np.ascontiguousarray(fields["w_down"][::-1])}


def without(*names: str) -> Any:
    return lambda fields: dict.fromkeys(names)


SHARED_FIELDS = ("shared_w_gate", "shared_w_up", "shared_w_down")
WRONG = [
    # block, option of the experts, option of the router, parameters
    ("mixtral", {"activation": "gelu"}, {}, None),
    ("mixtral", {"weight_on": "input"}, {}, None),
    ("mixtral", {"limit": 1.0}, {}, None),
    ("mixtral", {}, {"normalize": False}, None),
    ("mixtral", {}, {}, swapped),
    ("mixtral", {}, {}, permuted),
    ("gpt_oss", {"limit": None}, {}, None),
    ("gpt_oss", {"alpha": 1.0}, {}, None),
    ("gpt_oss", {"up_offset": 0.0}, {}, None),
    ("gpt_oss", {}, {}, in_halves),
    ("gpt_oss", {}, {}, without("router_bias")),
    ("gpt_oss", {}, {}, without("b_gate")),
    ("gpt_oss", {}, {}, without("b_up")),
    ("gpt_oss", {}, {}, without("b_down")),
    ("llama4_text", {"weight_on": "output"}, {}, None),
    ("llama4_text", {}, {}, without(*SHARED_FIELDS)),
    ("deepseek_v3", {}, {"scale": 1.0}, None),
    ("deepseek_v3", {}, {"num_groups": 1, "group_top_k": 1}, None),
    ("deepseek_v3", {}, {}, without("expert_bias")),
    ("deepseek_v3", {}, {}, without(*SHARED_FIELDS)),
    ("deepseek_v4", {"limit": None}, {}, None),
    ("qwen2_moe", {}, {}, without("shared_router")),
    ("qwen2_moe", {}, {}, without("shared_router", *SHARED_FIELDS)),
    ("nemotron_h", {"activation": "relu"}, {}, None),
]


@pytest.mark.parametrize(("name", "experts", "router", "change"), WRONG)
def test_a_wrong_block_is_noticed(name: str, experts, router, change, torch_adapter) -> None:
    data, (fields, router_config, expert_config, *rest) = converted(name, "float32")
    output = ours(
        torch_adapter,
        fields | (change(fields) if change else {}),
        dataclasses.replace(router_config, **router),
        dataclasses.replace(expert_config, **experts),
        *rest,
    )["output"]
    # In float32 and by far: bfloat16 would notice it too.
    (distance,) = distances({"output": output}, {"output": data.exact["output"]}, 1.0).values()
    assert distance > 2.0**-7 * FROM_EXACT["bfloat16"], f"differs by {distance} only"


def test_every_array_is_looked_at(torch_adapter) -> None:
    data, rest = converted("gpt_oss", "float32")
    right = ours(torch_adapter, *rest)
    check(right, data, "float32")
    for name in right:
        wrong = right | {name: right[name] * np.float32(1 + 2.0**-18)}
        with pytest.raises(AssertionError, match=f"^{name} differs by"):
            check(wrong, data, "float32")


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4_text"])
def test_transposed_squares_are_noticed(name: str, torch_adapter) -> None:
    """Where 2 F = D a transposed matrix has the right shape."""
    data, (fields, *rest) = converted(name, "float32", intermediate_size=WIDTH // 2)
    check(ours(torch_adapter, fields, *rest), data, "float32")
    key = "experts.gate_up_proj"
    state = data.state | {key: data.state[key].swapaxes(1, 2)}
    with pytest.raises(AssertionError, match="output differs by"):
        fields = hf_weights.moe_params(state, data.config)
        check(ours(torch_adapter, fields, *rest), data, "float32")


def test_hash_layer_without_its_table_is_noticed(torch_adapter) -> None:
    data, (*rest, _, gate_dtype) = converted("deepseek_v4 hash", "float32")
    selected = dataclasses.replace(data, ids=None)
    with pytest.raises(AssertionError, match="output differs by"):
        check(ours(torch_adapter, *rest, selected, gate_dtype), data, "float32")


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_round_trip(name: str, dtype: str, torch_adapter, jax_adapter) -> None:
    """The way back gives the module's own tensors, from arrays of either framework."""
    data = sample(name, dtype)
    fields = hf_weights.moe_params(data.state, data.config)
    state = hf_weights.hf_state_dict(MoEParams(**fields), data.config, "a.b.")
    for array in (torch_adapter.array, jax_adapter.array):
        own = {n: None if a is None else array(a) for n, a in fields.items()}
        again = hf_weights.hf_state_dict(own, data.config, "a.b.")
        assert all((bits(again[key]) == bits(state[key])).all() for key in state)
    table = {"a.b.gate.tid2eid"} if BLOCKS[name].hash else set()
    assert set(state) == {f"a.b.{key}" for key in data.state} - table
    for key, array in state.items():
        wanted = data.state[key.removeprefix("a.b.")]
        assert array.dtype == wanted.dtype and array.shape == wanted.shape
        np.testing.assert_array_equal(bits(array), bits(wanted), key)


def on_disk(name: str, state: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], str]:
    """A layer's tensors as transformers writes them into a checkpoint, and their prefix."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    block = BLOCKS[name]
    config = block.config()
    conversions = get_checkpoint_conversion_mapping(block.mapping or config.model_type) or []
    model = types.SimpleNamespace(_weight_conversions=conversions, config=config)
    place = f"model.layers.1.{block.place}"
    tensors = torch_state_dict({place + key: array for key, array in state.items()})
    written = revert_weight_conversion(model, tensors)
    if not block.place:
        return numbers(written), place
    common = os.path.commonpath([key.replace(".", "/") for key in written])
    return numbers(written), common.replace("/", ".") + "."


SAME_ON_DISK = {"mistral4", "gpt_oss", "llama4_text"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_checkpoint(name: str, dtype: str) -> None:
    """The names on disk, by transformers' own conversion, beside other modules' tensors."""
    data = sample(name, dtype)
    tensors, prefix = on_disk(name, data.state)
    place = f"model.layers.1.{BLOCKS[name].place}"
    same = set(tensors) == {place + key for key in data.state}
    assert same == (name in SAME_ON_DISK)
    others = {"lm_head.weight": np.zeros(3), "model.layers.1.norm.weight": np.zeros(3, np.int8)}
    given = hf_weights.moe_params(tensors | others, data.config, prefix)
    wanted = hf_weights.moe_params(data.state, data.config)
    for field, array in wanted.items():
        assert (array is None) == (given[field] is None)
        if array is not None:
            assert given[field].dtype == array.dtype
            np.testing.assert_array_equal(bits(given[field]), bits(array), field)
