# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routers of transformers against ours: ids, weights and gradients from the same logits, with the
RouterConfig that `from_hf` reads from the real configuration.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from adapters import DTYPES
from duomoe import RouterConfig, hf, oracle, presets

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("transformers")

from transformers_cases import CASES, WIDTH, Case

pytestmark = [pytest.mark.jax, pytest.mark.torch]

TOKENS = 256
# Bounds in ulps of the dtype of the weights: what the model rounds to, ours is rounded to too. In
# float32 a class is up to 6 from float64, since it rounds z - max z, which our moderate rows don't.
WEIGHT_ULPS = {"float32": 8, "bfloat16": 1, "rounds": 4}
OUR_ULPS = 4  # of ours from float64, in float32
# Bounds of the gradient, in units of eps of its dtype times the row's largest weight and cotangent.
GRADIENT_EPS = {"float32": 4, "bfloat16": 1, "rounds": 3}
# Selection values closer than this, relative to the largest, are ties to one of the two sides.
TIE = {"float32": 2.0**-20, "bfloat16": 2.0**-20, "rounds": 2.0**-7}


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().numpy().astype(DTYPES[str(x.dtype).removeprefix("torch.")])


def gap(values: np.ndarray, chosen: int, ordered: bool) -> float:
    """The smallest distance that the choice, or the order of the chosen, hangs on."""
    best = -np.sort(-values)[: chosen + 1]
    distances = best[:-1] - best[1:]
    if len(values) == chosen and not ordered:
        return np.inf
    return (distances if ordered else distances[-1:]).min(initial=np.inf) / np.abs(best).max()


def is_clear(
    z: np.ndarray, config: RouterConfig, bias: np.ndarray | None, tie: float, ordered: bool
) -> bool:
    """No tie decides which experts logits z[E] choose."""
    bias = np.float64(0) if bias is None else bias
    values = oracle.selection_values(z, config.score, config.select_on, bias)
    groups = oracle.group_values(values, config.num_groups, config.group_score_k)
    kept = oracle.ranking(groups)[: config.group_top_k]
    values = values.reshape(config.num_groups, -1)[kept].reshape(-1)
    return gap(groups, config.group_top_k, False) > tie and gap(values, config.top_k, ordered) > tie


def ulps(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """The distance in units in the last place of `theirs`; ours is rounded to its dtype."""
    ours = ours.astype(theirs.dtype).astype(np.float64)
    theirs_64 = theirs.astype(np.float64)
    digits = 24 if theirs.dtype == np.float32 else 8
    _, exponent = np.frexp(np.abs(theirs_64))
    return np.abs(ours - theirs_64) / np.exp2(exponent.astype(np.float64) - digits)


def compare(
    case: Case,
    hf_config: Any,
    config: RouterConfig,
    dtype: str,
    adapters: list[Any],
    rng: np.random.Generator,
) -> tuple[float, float]:
    """The largest difference of a weight in ulps and of a gradient in eps; raises on different ids
    or differences beyond the bounds.
    """
    real = RouterConfig.from_hf(hf_config)
    z, w, ids, bias = case.run(hf_config, getattr(torch, dtype), rng, TOKENS)
    kind = str(w.dtype).removeprefix("torch.")
    kind = "rounds" if case.rounds and kind == "bfloat16" else kind
    bias_array = None if bias is None else bias.numpy()
    z_array = to_numpy(z)
    clear = np.array(
        [
            is_clear(row, real, bias_array, TIE[kind], case.ordered)
            for row in z_array.astype(np.float64)
        ]
    )
    assert clear.sum() >= 16
    per_expert = torch.from_numpy(rng.standard_normal(z.shape)).to(w.dtype)
    per_expert[~torch.from_numpy(clear)] = 0
    (gradient,) = torch.autograd.grad(w, z, per_expert.gather(1, ids))
    theirs, their_ids = to_numpy(w), ids.numpy()

    worst = [0.0, 0.0]
    for adapter in adapters:
        route, options = adapter.functions.route, {}
        if bias is not None:
            options["bias"] = adapter.array(bias_array)
        our_ids = adapter.numpy(route(adapter.array(z_array), config, **options).indices)
        if case.ordered:
            np.testing.assert_array_equal(our_ids[clear], their_ids[clear])
        ours_by_id, theirs_by_id = np.argsort(our_ids, axis=1), np.argsort(their_ids, axis=1)
        np.testing.assert_array_equal(
            np.take_along_axis(our_ids, ours_by_id, 1)[clear],
            np.take_along_axis(their_ids, theirs_by_id, 1)[clear],
        )
        (weights,), pull = adapter.vjp(
            lambda z, route=route, options=options: (route(z, config, **options).weights,), z_array
        )
        distance = ulps(
            np.take_along_axis(weights, ours_by_id, 1)[clear],
            np.take_along_axis(theirs, theirs_by_id, 1)[clear],
        ).max()
        assert distance <= WEIGHT_ULPS[kind], f"weights differ by {distance} ulp"
        if kind == "float32":
            exact = oracle.route(
                logits=z_array.astype(np.float64),
                bias=bias_array,
                given_indices=our_ids,
                **config.attributes(num_sequences=1),
            )["weights"]
            assert ulps(exact[clear], weights[clear]).max() <= OUR_ULPS

        cotangent = np.take_along_axis(per_expert.float().numpy(), our_ids.astype(np.int64), 1)
        (our_gradient,) = pull(cotangent)
        assert our_gradient.dtype == z_array.dtype
        scale = np.abs(cotangent).max(1) * weights.max(1)
        difference = np.abs(our_gradient.astype(np.float64) - to_numpy(gradient).astype(np.float64))
        error = (difference.max(1)[clear] / (torch.finfo(z.dtype).eps * scale[clear])).max()
        bound = GRADIENT_EPS["rounds" if kind == "rounds" else str(z.dtype).removeprefix("torch.")]
        assert error <= bound, f"gradients differ by {error} eps"
        worst = [max(worst[0], distance), max(worst[1], error)]
    return worst[0], worst[1]


@pytest.fixture
def both(jax_adapter, torch_adapter) -> list[Any]:
    return [jax_adapter, torch_adapter]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_small_router(name: str, dtype: str, both, rng) -> None:
    case = CASES[name]
    real = case.config(**case.small)
    compare(case, real, RouterConfig.from_hf(real), dtype, both, rng)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.preset])
def test_released_router(name: str, dtype: str, both, rng) -> None:
    """The preset is what from_hf reads from the released model's values, and routes like it."""
    case = CASES[name]
    real = case.config(**case.released)
    preset = getattr(presets, case.preset)()
    assert RouterConfig.from_hf(real) == preset
    compare(case, real, preset, dtype, both, rng)


MORE_WRONG = [
    ("deepseek_v2", {"group_score_k": 2}),
    ("deepseek_v3", {"group_score_k": 1}),
    ("deepseek_v3", {"group_top_k": 2}),
    ("deepseek_v3", {"num_groups": 1, "group_top_k": 1}),
    ("deepseek_v3", {"scale": 1.0}),
    ("deepseek_v4", {"score": "sigmoid"}),
    ("gpt_oss", {"score": "sigmoid", "score_scope": "all"}),
    ("lfm2_moe", {"eps": 1e-4}),
]


@pytest.mark.parametrize(
    ("name", "wrong"), [*((name, case.wrong) for name, case in CASES.items()), *MORE_WRONG]
)
def test_a_wrong_option_is_noticed(name: str, wrong: dict | None, torch_adapter, rng) -> None:
    case = CASES[name]
    real = case.config(**case.small)
    right = RouterConfig.from_hf(real)
    config = dataclasses.replace(right, **(wrong or {"normalize": not right.normalize}))
    with pytest.raises(AssertionError, match=r"differ by|Arrays are not equal"):
        compare(case, real, config, "float32", [torch_adapter], rng)


# -- configurations --------------------------------------------------------------------------------

BY_TYPE = {case.model_type: case for case in CASES.values()}
# What the class itself has no default for.
MISSING = {"deepseek_v2": {"num_experts_per_tok": 6}}


def test_every_family_has_a_case() -> None:
    # Kimi-K2 has no class of its own: DeepSeek-V3's stands for it.
    assert set(hf.BY_TYPE) == set(BY_TYPE) | {"kimi_k2"}
    assert {case.preset for case in CASES.values()} - {None} == set(presets.MODELS)


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_absent_keys_mean_the_defaults_of_the_class(model_type: str) -> None:
    missing = MISSING.get(model_type, {})
    bare = {"model_type": model_type, **missing}
    real = BY_TYPE[model_type].default(**missing)
    assert RouterConfig.from_hf(bare) == RouterConfig.from_hf(real)
    assert hf.layer_kinds(bare) == hf.layer_kinds(real)


SIX = {"num_hidden_layers": 6}
STEP = SIX | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
LEADING = SIX | {"first_k_dense_replace": 2}
TYPED = SIX | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense", "sparse"]}
LAYERS = [
    ("qwen2_moe", STEP),
    ("qwen3_moe", STEP),
    ("qwen3_next", STEP),
    ("deepseek_v2", LEADING | {"num_experts_per_tok": 2}),
    ("deepseek_v3", LEADING),
    ("deepseek_v32", LEADING),
    ("deepseek_v32", TYPED),
    ("glm4_moe", LEADING),
    ("glm4v_moe_text", LEADING),
    ("glm4_moe_lite", SIX),
    ("glm4_moe_lite", TYPED),
    ("glm_moe_dsa", LEADING),
    ("kimi_linear", LEADING),
    ("kimi_linear", TYPED),
    ("bailing_hybrid", LEADING),
    ("mistral4", LEADING),
    ("llama4_text", SIX | {"interleave_moe_layer_step": 2}),
    ("llama4_text", SIX | {"moe_layers": [1, 4]}),
    (
        "ernie4_5_moe",
        SIX | {"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2},
    ),
    ("lfm2_moe", SIX | {"num_dense_layers": 3, "layer_types": ["conv"] * 6}),
    ("deepseek_v4", SIX | {"num_hash_layers": 2}),
    ("deepseek_v4", SIX | {"mlp_layer_types": ["moe", "hash_moe", *["moe"] * 4]}),
    ("mixtral", SIX),
]


@pytest.mark.parametrize(("model_type", "options"), LAYERS)
def test_layers_with_a_router(model_type: str, options: dict) -> None:
    """Whether the model's own decoder layer has a router, layer by layer."""
    case = BY_TYPE[model_type]
    real = case.config(**options)
    kinds = hf.layer_kinds(real)
    assert hf.layer_kinds({"model_type": model_type, **options}) == kinds
    assert len(kinds) == 6
    text = "Text" if case.package == "llama4" else ""
    for layer, kind in enumerate(kinds):
        with torch.device("meta"):
            block = case.modeling(f"{case.prefix}{text}DecoderLayer")(real, layer)
        names = {type(module).__name__.removeprefix(case.prefix) for module in block.modules()}
        has = {"moe": case.router in names, "hash_moe": "HashRouter" in names}
        assert has == {"moe": kind == "moe", "hash_moe": kind == "hash_moe"}
        if kind == "dense":
            with pytest.raises(ValueError, match=f"layer {layer} is dense and has no router"):
                RouterConfig.from_hf(real, layer=layer)
        else:
            assert RouterConfig.from_hf(real, layer=layer) == RouterConfig.from_hf(real)


LAYERS_OF_NEMOTRON = [
    {"layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"]},
    {"layers_block_type": ["linear_attention", "moe", "full_attention"], "num_hidden_layers": 7},
    {"hybrid_override_pattern": "MEM*-E"},
]


@pytest.mark.parametrize("options", LAYERS_OF_NEMOTRON)
def test_layers_of_nemotron_h(options: dict) -> None:
    case = BY_TYPE["nemotron_h"]
    real = case.config(**options)
    kinds = ["moe" if name == "moe" else "dense" for name in real.layers_block_type]
    assert hf.layer_kinds(real) == kinds
    assert hf.layer_kinds({"model_type": "nemotron_h", **options}) == kinds
    for layer, kind in enumerate(kinds):
        with torch.device("meta"):
            mixer = case.modeling("NemotronHBlock")(real, layer).mixer
        assert isinstance(mixer, case.modeling("NemotronHMoE")) == (kind == "moe")
    wrong = {"layers_block_type": ["mamba", "x"], "hybrid_override_pattern": "MX"}
    for key, value in wrong.items():
        with pytest.raises(ValueError, match=f"{key} must hold .*, got '[xX]'"):
            hf.layer_kinds({"model_type": "nemotron_h", key: value})


def test_routers_that_differ_by_layer() -> None:
    real = CASES["hunyuan_v1_moe"].config(num_experts=8, moe_topk=[1, 2, 3], num_hidden_layers=3)
    gate = CASES["hunyuan_v1_moe"].modeling("HunYuanMoEV1Gate")
    for layer in range(3):
        assert RouterConfig.from_hf(real, layer=layer).top_k == gate(real, layer).top_k
    with pytest.raises(ValueError, match="moe_topk must be the same in every layer unless layer"):
        RouterConfig.from_hf(real)
    same = CASES["hunyuan_v1_moe"].config(num_experts=8, moe_topk=[2, 2, 2], num_hidden_layers=3)
    assert RouterConfig.from_hf(same).top_k == 2


def test_text_config_of_multimodal_configurations() -> None:
    from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config
    from transformers.models.llama4.configuration_llama4 import Llama4Config
    from transformers.models.mistral3.configuration_mistral3 import Mistral3Config

    text = {"num_local_experts": 128, "num_experts_per_tok": 1}
    assert RouterConfig.from_hf(Llama4Config(text_config=text)) == presets.llama4(num_experts=128)
    assert RouterConfig.from_hf({"model_type": "llama4"}) == presets.llama4()
    assert RouterConfig.from_hf(Kimi_K25Config()) == presets.deepseek_v3()
    wrapped = Mistral3Config(text_config={"model_type": "mistral4"})
    assert RouterConfig.from_hf(wrapped) == presets.mistral_4()


# -- what differs from the models' own code --------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hash_layers_of_deepseek_v4(dtype: str, both, rng) -> None:
    case = dataclasses.replace(CASES["deepseek_v4"], router="HashRouter", bias=None)
    vocabulary = 50
    real = case.config(**case.small, vocab_size=vocabulary)
    config = RouterConfig.from_hf(real, layer=0)
    module, _ = case.make(real, getattr(torch, dtype), rng)
    table = np.stack([rng.permutation(config.num_experts)[: config.top_k] for _ in range(50)])
    module.tid2eid.data = torch.from_numpy(table)
    tokens = rng.integers(0, vocabulary, TOKENS)
    x = torch.from_numpy(rng.standard_normal((TOKENS, WIDTH))).to(module.weight.dtype)
    z, w, ids = module(x, torch.from_numpy(tokens))
    cotangent = torch.from_numpy(rng.standard_normal(w.shape)).to(w.dtype)
    (gradient,) = torch.autograd.grad(w, z, cotangent)
    np.testing.assert_array_equal(ids.numpy(), table[tokens])
    kind = "rounds" if dtype == "bfloat16" else dtype
    for adapter in both:
        (weights,), pull = adapter.vjp(
            lambda z, adapter=adapter: (
                adapter.functions.route(z, config, indices=adapter.array(table[tokens])).weights,
            ),
            to_numpy(z),
        )
        assert ulps(weights, to_numpy(w)).max() <= WEIGHT_ULPS[kind]
        (ours,) = pull(cotangent.float().numpy())
        difference = np.abs(ours.astype(np.float64) - to_numpy(gradient).astype(np.float64))
        scale = cotangent.float().abs().amax(1).numpy() * weights.max(1)
        assert (difference.max(1) / scale).max() <= GRADIENT_EPS[kind] * torch.finfo(w.dtype).eps


def test_scores_that_underflow(torch_adapter) -> None:
    """Where all scores are 0, the models divide 0 by 0 or differentiate a root at 0."""
    route = torch_adapter.functions.route
    logits = torch.full((1, 8), -200.0) - torch.arange(8)
    for name, broken in (("minimax_m2", "weights"), ("deepseek_v4", "gradient")):
        case = CASES[name]
        real = case.config(**case.small)
        module, bias = case.make(real, torch.float32, np.random.default_rng(0))
        bias.zero_()
        experts = module.num_experts
        module.weight.data = torch.eye(experts, WIDTH)
        x = torch.zeros(1, WIDTH)
        x[:, :experts] = -200.0 - torch.arange(experts)
        z, w, _ = case.call(module, x, bias)
        (gradient,) = torch.autograd.grad(w[:, 0].sum(), z)
        assert torch.isnan(w if broken == "weights" else gradient).any()
        config = RouterConfig.from_hf(real)
        ours = z.detach().requires_grad_()
        weights = route(ours, config).weights
        (our_gradient,) = torch.autograd.grad(weights[:, 0].sum(), ours)
        assert torch.isfinite(weights).all() and torch.isfinite(our_gradient).all()
    assert route(logits, presets.minimax_m2(num_experts=8, top_k=2)).weights.sum() == 1


@pytest.mark.parametrize("name", ["deepseek_v2", "mistral4"])
def test_excluded_groups_never_win(name: str, torch_adapter) -> None:
    """The models set excluded experts to 0, which ties with kept experts that underflow to 0."""
    case = CASES[name]
    options = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}
    config = RouterConfig.from_hf(case.config(**{**case.small, **options}))
    logits = torch.full((1, 8), -150.0)
    logits[0, 5] = 0.0
    routing = torch_adapter.functions.route(logits, config)
    assert routing.indices.tolist() == [[5, 4, 6]]
