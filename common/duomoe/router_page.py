# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""docs/router.md: the options of a router, and the table of presets."""

from __future__ import annotations

import dataclasses

from duomoe.config import RouterConfig
from duomoe.presets import MODELS, Model

FORMULAS = {
    "num_experts": "E; logits z[T, E]",
    "top_k": "K experts per token",
    "score": 's = "softmax", "sigmoid" or "sqrtsoftplus" of z over all E experts, '
    "sqrtsoftplus(z) = sqrt(log(1 + e^z))",
    "score_scope": '"all"; "selected": s = softmax over the K selected logits',
    "select_on": 'experts are ranked by "score", v = s + bias, or by "logit", v = z + bias',
    "num_groups": "G groups of E / G neighbouring experts",
    "group_top_k": "groups that stay; experts of the others cannot be selected",
    "group_score_k": "a group's value = sum of its `group_score_k` largest v",
    "normalize": "True: w = s / (sum of the selected s); False: w = s; "
    '"if_k_gt_1": True unless K = 1',
    "eps": "joins that sum as `eps_mode` says",
    "eps_mode": '"add": s / (sum + eps); "clamp": s / max(sum, eps)',
    "scale": "w is multiplied by it",
    "counts": 'what the load-balancing loss counts: the "actual" routing, or an "unbiased" '
    "plain top-K without bias and groups; no influence on ids and weights",
}

TOP = """# Describing a router

Made by `make reference`; tests compare it with the code and run its examples.

A router turns logits z[T, E] into K expert ids and K weights per token. A `RouterConfig` says how;
the selection bias and given ids are arguments of `route`. [Numerics](numerics.md) has the rules for
ties, -inf, NaN and underflow.

## Options

| option | default | formula |
|---|---|---|
"""

READING = """
## Presets and Hugging Face configs

`duomoe.presets.<model>()` returns the released model's router; any option can be given by keyword.
`RouterConfig.from_hf(config)` reads a `config.json` (its path, its folder, a dict, or a
configuration object). Neither needs transformers.

```python
from duomoe import RouterConfig, presets

config = RouterConfig.from_hf(
    {"model_type": "glm4_moe", "n_routed_experts": 160, "routed_scaling_factor": 2.5}
)
print(config == presets.glm_4_5())
print(presets.deepseek_v3(num_experts=64, top_k=4, num_groups=4, group_top_k=2))
```

`from_hf` never approximates. Keys that a config leaves out have the defaults of the model's class
in transformers 5.24. An unknown `model_type`, an unknown value, an option that RouterConfig lacks,
or a key that looks like a router option and is not known is a `ValueError` with the key, its value
and what is allowed:

```python
try:
    RouterConfig.from_hf({"model_type": "mixtral", "router_jitter_noise": 0.1})
except ValueError as error:
    print(error)  # mixtral: router_jitter_noise must be 0.0, got 0.1
```

Keys that concern losses, expert sizes or shared experts are passed over. Some layers have no
router, and in a few models routers differ by layer: `from_hf(config, layer=5)` reads that layer,
and refuses a dense one. `duomoe.hf.layer_kinds(config)` lists them all.

## Models

s and z as above; sizes and factors are the presets' defaults. Where a bias is named, pass it as
`route(..., bias=)`.

"""

REST = """
Kimi-K3's model_type is `kimi_linear` within `text_config`. A multimodal config is read through its
`text_config`, whatever wraps it.

## Around the router

A learned bias of the gate (GPT-OSS) belongs to the logits, and a table gives the ids of a hash
layer (DeepSeek-V4):

```python
import torch
from duomoe import presets
from torch_frontend import combine, gate, permute, plan_dispatch, route

x, router, router_bias = torch.randn(6, 64), torch.randn(64, 8), torch.randn(8)
print(route(gate(x, router, router_bias), presets.gpt_oss(num_experts=8)).weights.sum(1))

table = torch.stack([torch.randperm(8)[:2] for _ in range(100)])  # a row of ids per token id
token_ids = torch.randint(0, 100, (6,))
config = presets.deepseek_v4(num_experts=8, top_k=2)
print(route(gate(x, router), config, indices=table[token_ids]).weights.sum(1))
```

Llama-4 multiplies what goes into an expert; with K = 1 the token itself can be scaled:

```python
routing = route(gate(x, router), presets.llama4(num_experts=8))
plan = plan_dispatch(routing.indices, 8)
rows = permute(x * routing.weights, plan)  # then the experts
print(combine(rows, plan).shape)  # no weights here
```

## Dtypes of the gate

`route` computes in float32 from logits of any float dtype; `gate(..., gate_dtype=)` rounds as the
model does. The models' own code:

{gates}

## Differences from the models' own code

`tests/test_transformers.py` runs every router class named above from transformers 5.24 and compares
ids, weights and gradients of the logits with both front ends, from the same logits, on small sizes
and on the released ones. Kimi-K2 and Kimi-K3 have no class of their own there: DeepSeek-V3's and
Kimi-Linear's, which have the same router, stand for them.

| the model's gate | weights | gradients |
|---|---|---|
| computes in float32 | 5 float32 ulp | 4 |
| bfloat16, weights rounded once | 1 bfloat16 ulp | 1 |
| bfloat16, rounds at every step | 4 bfloat16 ulp | 3 |

These are bounds. Where the model rounds its weights to bfloat16, ours are rounded for the
comparison; in the second row nearly all are equal. A gradient's difference is divided by the eps of
the logits' dtype and by the token's largest weight and cotangent. Tokens whose choice hangs on a
tie are left out.

What differs, and why:

- **Ties.** `torch.topk` leaves open which of two equal values it takes, and in what order. Here the
  lower id is first, so that a recomputation, the other framework and the GPU select the same. In
  bfloat16 ties are common.
- **Order.** Some models ask `torch.topk` for unsorted ids (DeepSeek, GLM, Kimi, MiniMax-M2,
  Mistral-4). Here ids fall by selection value.
- **Scores in bfloat16.** DeepSeek-V4, LFM2 and Mistral-4 round scores to the gate's dtype before
  they select: two experts closer than that rounding may swap. Here selection sees float32 scores.
  LFM2, DeepSeek-V4, Mistral-4 and GPT-OSS also round within the weights' formula; the weights here
  are float32, to be rounded by whoever wants them so.
- **Bias.** It must be float32. The classes keep it in a float32 buffer, which
  `module.to(torch.bfloat16)` rounds.
- **Excluded groups.** DeepSeek-V2 and Mistral-4 set scores of excluded experts to 0, where they tie
  with experts that underflowed to 0. Here excluded experts are never selected. DeepSeek-V3 and its
  kin use -inf, as here.
- **eps.** As in each model: 0, 1e-20 or 1e-6 added, or a lower bound of 1e-12 (ERNIE). Where every
  selected score underflows and eps is 0 (MiniMax-M2), the model divides 0 by 0; here the weights
  are the limit, and sum to `scale`.
- **Root at 0.** Below a logit of about -104 softplus underflows, and the gradient of DeepSeek-V4's
  square root is NaN. Here scores are handled by their logarithm, and gradients are finite.
- **Keys that a class ignores.** transformers ignores `norm_topk_prob` of DeepSeek-V2, DeepSeek-V4
  and Hunyuan, `scoring_func` and `topk_method` of DeepSeek-V3, and others that the models' first
  code reads. `from_hf` takes them only with the value that the class has built in, since with
  another the two codes disagree.
- **Llama-4.** Its class runs every expert on every token, with input 0 for those not selected; here
  only the selected run.
"""


def _number(value: float) -> str:
    return f"{value:g}"


def _cells(model: Model) -> list[str]:
    config = RouterConfig(**model.options)
    score = {"softmax": "softmax(z)", "sigmoid": "sigmoid(z)", "sqrtsoftplus": "sqrt(softplus(z))"}
    ranked = "z" if config.select_on == "logit" else score[config.score]
    if config.score_scope == "selected":
        weights = "softmax over the selected"
    else:
        weights = score[config.score] + (" / sum" if config.normalize else "")
    eps = "-"
    if config.eps:
        eps = _number(config.eps) if config.eps_mode == "add" else f"max(sum, {config.eps:g})"
    groups = "-"
    if config.num_groups > 1:
        value = "largest" if config.group_score_k == 1 else f"sum of best {config.group_score_k}"
        groups = f"{config.group_top_k} of {config.num_groups} by {value}"
    return [
        model.released,
        f"`{model.name}`",
        f"{config.top_k} of {config.num_experts} by {ranked}" + (" + bias" if model.bias else ""),
        weights,
        eps,
        _number(config.scale),
        groups,
        model.bias or "-",
        " ".join(f"`{family.model_type}`" for family in model.families),
        model.outside or "-",
    ]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def page() -> str:
    """docs/router.md."""
    fields = dataclasses.fields(RouterConfig)
    options = "".join(
        _row(
            [
                f"`{field.name}`",
                "" if field.default is dataclasses.MISSING else f"`{field.default!r}`",
                FORMULAS[field.name],
            ]
        )
        for field in fields
    )
    columns = ["released model", "preset", "selection", "weights", "eps", "scale", "groups"]
    columns += ["bias", "HF model_type", "outside the router"]
    models = _row(columns) + "|" + "---|" * len(columns) + "\n"
    models += "".join(_row(_cells(model)) for model in MODELS.values())
    by_gate: dict[str, list[str]] = {}
    for model in MODELS.values():
        by_gate.setdefault(model.gate, []).append(f"`{model.name}`")
    gates = "\n".join(f"- {', '.join(names)}: {gate}." for gate, names in by_gate.items())
    rest = REST.replace("{gates}", gates)
    return TOP + options + READING + models + rest
