# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The real MoE blocks of transformers with random weights, and what they compute."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from duomoe import ExpertConfig, RouterConfig, hf_weights
from duomoe.convert import to_numpy
from test_transformers import is_clear
from transformers_cases import CASES, WIDTH, Case

INNER, SHARED = 20, 28
BATCH, LENGTH = 2, 19
TOKENS = BATCH * LENGTH
VOCABULARY = 50
SIZES = {
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "_experts_implementation": "eager",
}


class WithSharedMLP(torch.nn.Module):
    """What a Granite layer does between its norm and its residual."""

    def __init__(self, case: Case, config: Any) -> None:
        super().__init__()
        self.block_sparse_moe = case.modeling(f"{case.prefix}MoE")(config)
        if config.shared_intermediate_size:
            self.shared_mlp = case.modeling(f"{case.prefix}MLP")(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block_sparse_moe(x)
        return y + self.shared_mlp(x) if hasattr(self, "shared_mlp") else y


@dataclasses.dataclass(frozen=True)
class Block:
    """A block class.

    Attributes:
        router: the name of its router in CASES, which has the configuration class.
        suffix: the rest of the class's name.
        options: of the configuration, besides the router's.
        gate: the gate's product is in float32, or in the dtype of x ("x").
        layer: the class takes its number.
        hash: a layer with a table of ids.
        place: the block's name in its layer.
        mapping: the model_type whose checkpoints have it; None: the configuration's.
    """

    router: str
    suffix: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gate: str = "x"
    layer: bool = False
    hash: bool = False
    place: str = "mlp."
    mapping: str | None = None

    @property
    def case(self) -> Case:
        return CASES[self.router]

    def config(self, **options: Any) -> Any:
        """Small sizes; no size is a multiple of another."""
        return self.case.config(**{**self.case.small, **SIZES, **self.options, **options})

    def make(self, config: Any) -> torch.nn.Module:
        if self.suffix == "":
            return WithSharedMLP(self.case, config)
        block = self.case.modeling(self.case.prefix + self.suffix)
        return block(config, 0) if self.layer else block(config)


FLOAT32 = {"gate": "float32"}
ONE_SHARED = {"n_shared_experts": 1}
TWO_SHARED = {"n_shared_experts": 2}
QWEN_SHARED = {"shared_expert_intermediate_size": SHARED}
# A limit that a quarter of the values reach, the same number in every dtype.
LIMITED = {"swiglu_limit": 0.75}
# Few experts, so that enough tokens are away from the limit in all of them.
V4 = LIMITED | {"n_routed_experts": 8, "num_experts_per_tok": 3}

BLOCKS = {
    "mixtral": Block("mixtral", "SparseMoeBlock"),
    "minimax": Block("minimax", "SparseMoeBlock"),
    "minimax_m2": Block("minimax_m2", "SparseMoeBlock"),
    "qwen2_moe": Block("qwen2_moe", "SparseMoeBlock", QWEN_SHARED),
    "qwen3_moe": Block("qwen3_moe", "SparseMoeBlock"),
    "qwen3_next": Block("qwen3_next", "SparseMoeBlock", QWEN_SHARED),
    "olmoe": Block("olmoe", "SparseMoeBlock"),
    "flex_olmo": Block("flex_olmo", "SparseMoeBlock"),
    "deepseek_v2": Block("deepseek_v2", "Moe", TWO_SHARED, **FLOAT32),
    "deepseek_v3": Block("deepseek_v3", "MoE", TWO_SHARED, **FLOAT32),
    "deepseek_v32": Block("deepseek_v32", "MoE", ONE_SHARED, **FLOAT32),
    "bailing_hybrid": Block("bailing_hybrid", "MoE", **FLOAT32),
    "kimi_linear": Block("kimi_linear", "MoE", **FLOAT32),
    "glm4_moe": Block("glm4_moe", "MoE", ONE_SHARED, **FLOAT32),
    "glm4v_moe_text": Block("glm4v_moe_text", "MoE", TWO_SHARED, mapping="glm4v_moe", **FLOAT32),
    "glm4_moe_lite": Block("glm4_moe_lite", "MoE", ONE_SHARED, **FLOAT32),
    "glm_moe_dsa": Block("glm_moe_dsa", "MoE", ONE_SHARED, **FLOAT32),
    "mistral4": Block("mistral4", "MoE", ONE_SHARED),
    "deepseek_v4": Block("deepseek_v4", "SparseMoeBlock", V4 | {"num_hash_layers": 0}, layer=True),
    "deepseek_v4 hash": Block(
        "deepseek_v4",
        "SparseMoeBlock",
        V4 | {"num_hash_layers": 1, "vocab_size": VOCABULARY},
        layer=True,
        hash=True,
    ),
    "nemotron_h": Block(
        "nemotron_h",
        "MoE",
        {"moe_shared_expert_intermediate_size": SHARED},
        place="mixer.",
        **FLOAT32,
    ),
    "gpt_oss": Block("gpt_oss", "MLP", LIMITED),
    "granitemoe": Block("granitemoe", "MoE", place="block_sparse_moe."),
    "granitemoeshared": Block(
        "granitemoeshared", "", {"shared_intermediate_size": SHARED}, place=""
    ),
    "granitemoeshared alone": Block("granitemoeshared", "", place=""),
    "granitemoehybrid": Block(
        "granitemoehybrid", "", {"shared_intermediate_size": SHARED}, place=""
    ),
    "llama4_text": Block("llama4_text", "TextMoe", place="feed_forward."),
    "ernie4_5_moe": Block("ernie4_5_moe", "SparseMoeBlock", **FLOAT32),
    "ernie4_5_moe without shared": Block(
        "ernie4_5_moe", "SparseMoeBlock", {"moe_num_shared_experts": 0}, **FLOAT32
    ),
    "lfm2_moe": Block("lfm2_moe", "SparseMoeBlock", place="feed_forward."),
    "lfm2_moe without bias": Block(
        "lfm2_moe without bias", "SparseMoeBlock", place="feed_forward."
    ),
    "hunyuan_v1_moe": Block("hunyuan_v1_moe", "Moe"),
}


def numbers(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: to_numpy(tensor, name).copy() for name, tensor in tensors.items()}


def random_module(block: Block, config: Any, dtype: torch.dtype, rng: Any) -> torch.nn.Module:
    """The module with random parameters, of variance 1 / fan-in; hidden values are O(1)."""
    module = block.make(config).train(False)
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        if "bias" in name:
            scale = 0.1 if not parameter.requires_grad else 0.5
        else:
            inputs = parameter.ndim - 2 if block.router in ("gpt_oss", "llama4_text") else -1
            fan_in = shape[inputs] if parameter.ndim == 3 else shape[-1]
            scale = 1 / np.sqrt(fan_in)
        values = torch.from_numpy(rng.standard_normal(shape) * scale)
        parameter.data = values.to(dtype if parameter.requires_grad else torch.float32)
    for name, buffer in module.named_buffers():
        if buffer.dtype == torch.int64:  # the table of a hash layer
            rows = [rng.permutation(config.n_routed_experts)[: buffer.shape[1]] for _ in buffer]
            buffer.data = torch.from_numpy(np.stack(rows))
        else:
            assert name.endswith("bias")
            values = torch.from_numpy(rng.standard_normal(tuple(buffer.shape)) * 0.1)
            buffer.data = values.float()
    return module


@dataclasses.dataclass(frozen=True)
class Sample:
    """A module, and its output and gradients for one batch.

    Attributes:
        config: of transformers.
        state: the module's parameters and buffers.
        x, cotangent: [BATCH, LENGTH, D].
        ids: [BATCH, LENGTH, K] of a hash layer, or None.
        theirs: "output", "x" and fields of MoEParams -> the module's output and gradients.
        exact: the same of the module in float64.
    """

    config: Any
    state: dict[str, np.ndarray]
    x: np.ndarray
    cotangent: np.ndarray
    ids: np.ndarray | None
    theirs: dict[str, np.ndarray]
    exact: dict[str, np.ndarray]


def run(
    module: torch.nn.Module,
    config: Any,
    x: torch.Tensor,
    cotangent: torch.Tensor,
    tokens: torch.Tensor | None,
) -> dict[str, np.ndarray]:
    """The module's output, and the gradients of x and, in our layout, of all parameters."""
    x = x.detach().clone().requires_grad_()
    y = module(x) if tokens is None else module(x, tokens)
    y = (y[0] if isinstance(y, tuple) else y).reshape(x.shape)
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    pulled = torch.autograd.grad(y, [x, *named.values()], cotangent.to(y.dtype))
    # The conversion is linear, so it turns gradients into gradients.
    gradients = {name: torch.zeros_like(t) for name, t in module.state_dict().items()}
    gradients |= dict(zip(named, pulled[1:], strict=True))
    as_float = {n: g.float() if g.dtype == torch.float64 else g for n, g in gradients.items()}
    fields = hf_weights.moe_params(as_float, config)
    fields.pop("expert_bias")
    return {"output": to_numpy(y), "x": to_numpy(pulled[0])} | {
        n: a for n, a in fields.items() if a is not None
    }


def clear_tokens(
    x: np.ndarray, fields: dict[str, Any], config: Any, selects: bool, tie: float
) -> np.ndarray:
    """Which tokens x[T, D] are near no jump of the block or of a gradient: a choice of experts, or
    a limit of an expert's hidden values.
    """
    wide = {n: None if a is None else a.astype(np.float64) for n, a in fields.items()}
    x = x.astype(np.float64)
    clear = np.ones(len(x), bool)
    if selects:
        router = RouterConfig.from_hf(config)
        z = x @ wide["router"] + (0 if wide["router_bias"] is None else wide["router_bias"])
        clear &= [is_clear(row, router, wide["expert_bias"], tie, False) for row in z]
    if (limit := ExpertConfig.from_hf(config).limit) is not None:
        for name in ("w_gate", "w_up", "shared_w_gate", "shared_w_up"):
            if (w := wide[name]) is None:
                continue
            hidden = x @ w
            if (bias := wide[name.replace("w_", "b_")] if w.ndim == 3 else None) is not None:
                hidden += bias[:, None]
            # A limit above for the gate, on both sides for up; -limit costs tokens and no harm.
            near = np.abs(np.abs(hidden) - limit) < tie / 2
            clear &= ~(near.any((0, 2)) if w.ndim == 3 else near.any(1))
    return clear


@functools.cache
def sample(name: str, dtype: str, **options: Any) -> Sample:
    """The block with random weights, on tokens whose choice of experts hangs on no tie."""
    block = BLOCKS[name]
    rng = np.random.default_rng(list(f"{name} {dtype}".encode()))
    config = block.config(**options)
    torch_dtype = getattr(torch, dtype)
    module = random_module(block, config, torch_dtype, rng)
    state = module.state_dict()
    fields = hf_weights.moe_params(state, config)
    tie = {"float32": 2.0**-18, "bfloat16": 2.0**-6}[dtype]
    parts: list[np.ndarray] = []
    while sum(map(len, parts)) < TOKENS:
        drawn = torch.from_numpy(rng.standard_normal((256, WIDTH))).to(torch_dtype)
        clear = clear_tokens(to_numpy(drawn), fields, config, not block.hash, tie)
        parts.append(to_numpy(drawn)[clear])
    x = np.concatenate(parts)[:TOKENS]
    shape = (BATCH, LENGTH, WIDTH)
    x_torch = torch.from_numpy(x.astype(np.float32).reshape(shape)).to(torch_dtype)
    cotangent = torch.from_numpy(rng.standard_normal(shape)).to(torch_dtype)
    tokens = ids = None
    if block.hash:
        tokens = torch.from_numpy(rng.integers(0, VOCABULARY, shape[:2]))
        ids = module.get_buffer("gate.tid2eid")[tokens].numpy()
    wide = copy.deepcopy(module).double()
    return Sample(
        config,
        numbers(state),
        to_numpy(x_torch),
        to_numpy(cotangent),
        ids,
        run(module, config, x_torch, cotangent, tokens),
        run(wide, config, x_torch.double(), cotangent.double(), tokens),
    )
