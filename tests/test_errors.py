# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Bad input gets one clear error before any kernel runs, in the same words from both front ends."""

from __future__ import annotations

import numpy as np
import pytest
from duomoe import MoEParams, RouterConfig, ops
from samples import block_parameters

CONFIG = RouterConfig(8, 2)
Z = np.zeros((6, 8), np.float32)
X = np.zeros((6, 16), np.float32)
IDS = np.zeros((6, 2), np.int32)


def params(adapter, **changes) -> MoEParams:
    arrays = block_parameters(np.random.default_rng(0), 8, 16, 32)
    values = dict(zip(("router", "w_gate", "w_up", "w_down"), arrays, strict=True)) | changes
    return MoEParams(
        **{k: adapter.array(v) if isinstance(v, np.ndarray) else v for k, v in values.items()}
    )


NO_EXPERTS = {
    "w_gate": None,
    "w_up": np.zeros((0, 16, 32), np.float32),
    "w_down": np.zeros((0, 32, 16), np.float32),
}


def plan(f, a):
    return f.plan_dispatch(a.array(IDS), 8)


def wide(a):
    """Float64 logits; JAX takes NumPy arrays, of which it would make float32 without x64."""
    return Z.astype("f8") if a.name == "jax" else a.array(Z.astype("f8"))


# (error, words that the message must hold, call of (functions, adapter))
CASES = {
    "logits rank": (
        ValueError,
        r"logits must have shape \[T, E\], got \[8\]",
        lambda f, a: f.route(a.array(Z[0]), CONFIG),
    ),
    "logits experts": (
        ValueError,
        r"logits must have shape \[T, E\] with E = config.num_experts = 8, got \[6, 4\]",
        lambda f, a: f.route(a.array(Z[:, :4]), CONFIG),
    ),
    "logits dtype": (
        TypeError,
        "route: logits must be float32, bfloat16 or float16, got int32",
        lambda f, a: f.route(a.array(Z.astype(np.int32)), CONFIG),
    ),
    "logits no array": (
        TypeError,
        "logits must be a .*, got list",
        lambda f, a: f.route([[0.0] * 8], CONFIG),
    ),
    "config": (
        TypeError,
        "config must be a RouterConfig, got dict",
        lambda f, a: f.route(a.array(Z), {}),
    ),
    "bias length": (
        ValueError,
        r"route: bias must have shape \[E\], E = 8, got \[7\]",
        lambda f, a: f.route(a.array(Z), CONFIG, bias=a.array(Z[0, :7])),
    ),
    "bias rank": (
        ValueError,
        r"bias must have shape \[E\], got \[6, 8\]",
        lambda f, a: f.route(a.array(Z), CONFIG, bias=a.array(Z)),
    ),
    "bias dtype": (
        TypeError,
        "route: bias must be float32, got float16",
        lambda f, a: f.route(a.array(Z), CONFIG, bias=a.array(Z[0].astype(np.float16))),
    ),
    "indices shape": (
        ValueError,
        r"indices must have shape \[T, K\] = \[6, 2\], got \[6, 3\]",
        lambda f, a: f.route(a.array(Z), CONFIG, indices=a.array(np.zeros((6, 3), np.int32))),
    ),
    "indices dtype": (
        TypeError,
        "indices must be an integer array, got float32",
        lambda f, a: f.route(a.array(Z), CONFIG, indices=a.array(Z[:, :2])),
    ),
    "mask length": (
        ValueError,
        r"token_mask must have shape \[T\] = \[6\], got \[5\]",
        lambda f, a: f.route(a.array(Z), CONFIG, token_mask=a.array(np.ones(5, bool))),
    ),
    "mask dtype": (
        TypeError,
        "token_mask must be bool, got int32",
        lambda f, a: f.route(a.array(Z), CONFIG, token_mask=a.array(np.ones(6, np.int32))),
    ),
    "sequences": (
        ValueError,
        r"the number of tokens \(6\) must be divisible by num_sequences \(4\)",
        lambda f, a: f.route(a.array(Z), CONFIG, num_sequences=4),
    ),
    "float64 logits": (
        TypeError,
        "logits must be float32, bfloat16 or float16, got float64",
        lambda f, a: f.route(wide(a), CONFIG),
    ),
    "plan": (
        TypeError,
        "plan must be a DispatchPlan, got NoneType",
        lambda f, a: f.permute(a.array(X), None),
    ),
    "plan kind": (
        TypeError,
        "plan must be a DispatchPlan, got Routing",
        lambda f, a: f.combine(a.array(X), f.route(a.array(Z), CONFIG)),
    ),
    "routing": (TypeError, "routing must be a Routing, got NoneType", lambda f, a: f.z_loss(None)),
    "loss config": (
        ValueError,
        "routing is of 8 experts, config.num_experts is 16",
        lambda f, a: f.load_balancing_loss(f.route(a.array(Z), CONFIG), RouterConfig(16, 2)),
    ),
    "loss top_k": (
        ValueError,
        "routing is of 2 experts per token, config.top_k is 4",
        lambda f, a: f.load_balancing_loss(f.route(a.array(Z), CONFIG), RouterConfig(8, 4)),
    ),
    "coeff type": (
        TypeError,
        "coeff must be a float, got '0.1'",
        lambda f, a: f.z_loss(f.route(a.array(Z), CONFIG), coeff="0.1"),
    ),
    "coeff array": (
        TypeError,
        "coeff must be a float, got (ArrayImpl|Tensor)",
        lambda f, a: f.z_loss(f.route(a.array(Z), CONFIG), coeff=a.array(np.ones((), np.float32))),
    ),
    "coeff nan": (
        ValueError,
        "coeff must be finite, got nan",
        lambda f, a: f.z_loss(f.route(a.array(Z), CONFIG), coeff=float("nan")),
    ),
    "too many rows": (
        ValueError,
        "the plan must have fewer than 2\\^31 rows, got 8589934592",
        lambda f, a: f.plan_dispatch(a.array(IDS), 8, alignment=2**30),
    ),
    "capacity array": (
        TypeError,
        "capacity must be an int, got ndarray",
        lambda f, a: f.plan_dispatch(a.array(IDS), 8, capacity=np.array(3)),
    ),
    "gate dtype object": (
        ValueError,
        "gate_dtype must be one of 'float32', 'bfloat16', 'float16', got Float32DType",
        lambda f, a: f.moe(a.array(X), params(a), CONFIG, gate_dtype=np.dtype("float32")),
    ),
    "expert bias dtype": (
        TypeError,
        "params.expert_bias must be float32, got float16",
        lambda f, a: f.moe(a.array(X), params(a, expert_bias=Z[0].astype(np.float16)), CONFIG),
    ),
    "moe rows": (
        ValueError,
        "the plan must have fewer than 2\\^31 rows, got 8589934592",
        lambda f, a: f.moe(a.array(X), params(a), CONFIG, alignment=2**30),
    ),
    "sequences range": (
        ValueError,
        "num_sequences must be at least 1, got 0",
        lambda f, a: f.route(a.array(Z), CONFIG, num_sequences=0),
    ),
    "drop order": (
        ValueError,
        "drop_order must be one of 'position', 'weight', got 'probs'",
        lambda f, a: f.plan_dispatch(a.array(IDS), 8, drop_order="probs"),
    ),
    "drop order without weights": (
        ValueError,
        "drop_order='weight' needs weights, got None",
        lambda f, a: f.plan_dispatch(a.array(IDS), 8, capacity=2, drop_order="weight"),
    ),
    "capacity": (
        ValueError,
        "capacity must be at least 0, got -1",
        lambda f, a: f.plan_dispatch(a.array(IDS), 8, capacity=-1),
    ),
    "capacity type": (
        TypeError,
        "capacity must be an int, got 1.5",
        lambda f, a: f.plan_dispatch(a.array(IDS), 8, capacity=1.5),
    ),
    "alignment": (
        ValueError,
        "alignment must be between 1 and 2147483647, got 0",
        lambda f, a: f.plan_dispatch(a.array(IDS), 8, alignment=0),
    ),
    "max_rows": (
        ValueError,
        r"max_rows \(6\) must be a multiple of alignment \(4\)",
        lambda f, a: f.plan_dispatch(a.array(IDS), 8, alignment=4, max_rows=6),
    ),
    "permute tokens": (
        ValueError,
        r"permute: row_of_slot must have shape \[T, K\], T = 5, got \[6, 2\]",
        lambda f, a: f.permute(a.array(X[:5]), plan(f, a)),
    ),
    "combine rows": (
        ValueError,
        r"combine: slot_of_row must have shape \[R\], R = 11, got \[12\]",
        lambda f, a: f.combine(a.array(np.zeros((11, 16), np.float32)), plan(f, a)),
    ),
    "combine weights dtype": (
        TypeError,
        "combine: weights must be float32, got float16",
        lambda f, a: f.combine(
            a.array(np.zeros((12, 16), np.float32)),
            plan(f, a),
            a.array(np.zeros((6, 2), np.float16)),
        ),
    ),
    "matmul width": (
        ValueError,
        r"grouped_matmul: w must have shape \[E, D, N\], D = 16, E = 8, got \[8, 15, 4\]",
        lambda f, a: f.grouped_matmul(
            a.array(np.zeros((12, 16), np.float32)),
            a.array(np.zeros((8, 15, 4), np.float32)),
            plan(f, a),
        ),
    ),
    "matmul dtype": (
        ValueError,
        "out_dtype must be one of 'float32', 'bfloat16', 'float16', got 'float64'",
        lambda f, a: f.grouped_matmul(
            a.array(np.zeros((12, 16), np.float32)),
            a.array(np.zeros((8, 16, 4), np.float32)),
            plan(f, a),
            out_dtype="float64",
        ),
    ),
    "glu dtypes": (
        TypeError,
        "glu: up must be float32, got float16",
        lambda f, a: f.glu(a.array(X), a.array(X.astype(np.float16))),
    ),
    "params type": (
        TypeError,
        "params must be a MoEParams, got tuple",
        lambda f, a: f.moe(a.array(X), (), CONFIG),
    ),
    "params layout": (
        ValueError,
        r"params.w_down must have shape \[E, F, D\] = \[8, 32, 16\], got \[8, 16, 32\]",
        lambda f, a: f.moe(a.array(X), params(a, w_down=np.zeros((8, 16, 32), np.float32)), CONFIG),
    ),
    "params missing": (
        TypeError,
        "params.w_up must be a .*, got NoneType",
        lambda f, a: f.moe(a.array(X), params(a, w_up=None), CONFIG),
    ),
    "params kind": (
        TypeError,
        "params.router must be a .*, got list",
        lambda f, a: f.moe(a.array(X), params(a, router=[0.0]), CONFIG),
    ),
    "params of no expert": (
        ValueError,
        "params.w_up must be of at least one expert, got E = 0",
        lambda f, a: f.moe_from_routing(
            a.array(X), a.array(IDS), a.array(Z[:, :2]), params(a, **NO_EXPERTS)
        ),
    ),
    "moe mask kind": (
        TypeError,
        "token_mask must be a .*, got list",
        lambda f, a: f.moe(a.array(X), params(a), CONFIG, token_mask=[True] * 6),
    ),
    "moe indices kind": (
        TypeError,
        "indices must be a .*, got list",
        lambda f, a: f.moe(a.array(X), params(a), CONFIG, indices=IDS.tolist()),
    ),
    "moe replay mask kind": (
        TypeError,
        "replay_mask must be a .*, got bool",
        lambda f, a: f.moe(a.array(X), params(a), CONFIG, indices=a.array(IDS), replay_mask=True),
    ),
    "limit that float32 rounds to none": (
        ValueError,
        "limit must be above 0 or None, got 1e-50",
        lambda f, a: f.glu(a.array(X), a.array(X), limit=1e-50),
    ),
    "gate dtype": (
        ValueError,
        "gate_dtype must be one of 'float32', 'bfloat16', 'float16', got 'fp32'",
        lambda f, a: f.moe(a.array(X), params(a), CONFIG, gate_dtype="fp32"),
    ),
    "moe mask": (
        ValueError,
        r"token_mask must have shape \[...\] = \[6\], got \[5\]",
        lambda f, a: f.moe(a.array(X), params(a), CONFIG, token_mask=a.array(np.ones(5, bool))),
    ),
    "moe indices": (
        ValueError,
        r"indices must have shape \[..., K\] = \[6, 2\], got \[6\]",
        lambda f, a: f.moe(a.array(X), params(a), CONFIG, indices=a.array(IDS[:, 0])),
    ),
    "moe scalar": (
        ValueError,
        r"x must have shape \[..., D\], got \[\]",
        lambda f, a: f.moe(a.array(X[0, 0]), params(a), CONFIG),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_arguments(case: str, adapter) -> None:
    error, words, call = CASES[case]
    with pytest.raises(error, match=words):
        call(adapter.functions, adapter)


@pytest.mark.jax
@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_both_front_ends_use_the_same_words(case: str, jax_adapter, torch_adapter) -> None:
    error, _, call = CASES[case]
    messages = []
    for adapter in (jax_adapter, torch_adapter):
        with pytest.raises(error) as caught:
            call(adapter.functions, adapter)
        messages.append(
            str(caught.value)
            .replace("jax.Array", "array")
            .replace("torch.Tensor", "array")
            .replace("got ArrayImpl", "got Tensor")
        )
    assert messages[0] == messages[1]


CONFIGS = {
    "eps float32": (ValueError, "eps must be a float32 number, got 1e[+]39", dict(eps=1e39)),
    "scale huge": (ValueError, "scale must be finite, got inf", dict(scale=10**400)),
    "top_k above": (
        ValueError,
        r"top_k must be between 1 and the number of experts \(4\), got 5",
        dict(num_experts=4, top_k=5),
    ),
    "top_k zero": (
        ValueError,
        r"top_k must be between 1 and the number of experts \(4\), got 0",
        dict(num_experts=4, top_k=0),
    ),
    "top_k type": (TypeError, "top_k must be an int, got 2.0", dict(num_experts=4, top_k=2.0)),
    "experts": (ValueError, "num_experts must be at least 1, got 0", dict(num_experts=0, top_k=1)),
    "score": (
        ValueError,
        "score must be one of 'softmax', 'sigmoid', 'sqrtsoftplus', got 'relu'",
        dict(score="relu"),
    ),
    "normalize": (
        ValueError,
        "normalize must be one of True, False, 'if_k_gt_1', got 1",
        dict(normalize=1),
    ),
    "eps": (ValueError, "eps must not be negative, got -1.0", dict(eps=-1.0)),
    "eps nan": (ValueError, "eps must be finite, got nan", dict(eps=float("nan"))),
    "scale": (TypeError, "scale must be a float, got '1'", dict(scale="1")),
    "groups": (
        ValueError,
        r"num_experts \(8\) must be divisible by num_groups \(3\)",
        dict(num_groups=3),
    ),
    "group_top_k": (
        ValueError,
        "group_top_k must be between 1 and 4, got 5",
        dict(num_groups=4, group_top_k=5),
    ),
    "groups too small": (
        ValueError,
        "group_top_k = 1 keeps 1 experts, fewer than top_k = 2",
        dict(num_groups=8, group_top_k=1),
    ),
    "scope score": (
        ValueError,
        "score_scope='selected' is for score='softmax' only, got 'sigmoid'",
        dict(score="sigmoid", score_scope="selected", select_on="logit"),
    ),
    "scope select": (
        ValueError,
        "score_scope='selected' needs select_on='logit'",
        dict(score_scope="selected"),
    ),
    "counts": (
        ValueError,
        "counts must be one of 'actual', 'unbiased', got 'all'",
        dict(counts="all"),
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_bad_configs(case: str) -> None:
    error, words, options = CONFIGS[case]
    with pytest.raises(error, match=words):
        RouterConfig(**({"num_experts": 8, "top_k": 2} | options))


def test_config_json() -> None:
    config = RouterConfig(8, 2, score="sigmoid", eps=1e-20, scale=2.5, normalize="if_k_gt_1")
    assert RouterConfig.from_json(config.to_json()) == config
    assert hash(RouterConfig.from_json(config.to_json())) == hash(config)
    for text in ("null", "[]", "{}"):
        with pytest.raises(ValueError, match="a JSON object with num_experts and top_k"):
            RouterConfig.from_json(text)
    assert RouterConfig(np.int64(8), np.int32(2)) == RouterConfig(8, 2)
    with pytest.raises(ValueError, match="unknown router option 'jitter'; allowed: counts, eps"):
        RouterConfig.from_json('{"num_experts": 8, "top_k": 2, "jitter": 0.1}')


# -- the core's own guard, for calls that go around the public functions ---------------------------


@pytest.mark.torch
def test_core_checks_calls_that_bypass_python(torch_adapter) -> None:
    torch = pytest.importorskip("torch")
    z = torch.zeros(6, 8)
    values = ops.table()["route"].attribute_values(CONFIG.attributes(num_sequences=1))

    def call(logits=z, bias=None, changes=()):
        changed = {
            a.name: v for a, v in zip(ops.table()["route"].attributes, values, strict=True)
        } | dict(changes)
        return torch.ops.duomoe.route(logits, bias, None, None, None, *changed.values())

    for words, arguments in {
        r"duomoe route: bias must have shape \[E\] in agreement with .*, got \[7\]": dict(
            bias=torch.zeros(7)
        ),
        "duomoe route: bias must be float32, got float16": dict(bias=torch.zeros(8).half()),
        "duomoe route: logits has a dtype that no op takes": dict(logits=z.double()),
        r"duomoe route: top_k must be between 1 and the number of experts \(8\), got 9": dict(
            changes={"top_k": 9}
        ),
        "duomoe route: top_k must be at least 1, got 0": dict(changes={"top_k": 0}),
        "duomoe route: score has no choice 'relu'": dict(changes={"score": "relu"}),
        r"the kept groups hold 1 experts, fewer than top_k \(2\)": dict(changes={"num_groups": 8}),
        r"the number of tokens \(6\) must be divisible by num_sequences \(4\)": dict(
            changes={"num_sequences": 4}
        ),
    }.items():
        with pytest.raises(RuntimeError, match=words):
            call(**arguments)


@pytest.mark.torch
def test_mixed_devices_and_groups(torch_adapter) -> None:
    torch = pytest.importorskip("torch")
    import torch_frontend as tf

    words = "moe: all arguments must be on one device, but params.w_down is on meta and others are"
    with pytest.raises(ValueError, match=words):
        tf.moe(
            torch.zeros(6, 16),
            params(torch_adapter, w_down=torch.zeros(8, 32, 16, device="meta")),
            CONFIG,
        )
    with pytest.raises(TypeError, match=r"group must be a torch.distributed.ProcessGroup, got str"):
        tf.moe(torch.zeros(6, 16), params(torch_adapter), CONFIG, group="x")

    with pytest.raises(
        ValueError,
        match="route: all arguments must be on one device, but bias is on meta and others",
    ):
        tf.route(torch.zeros(6, 8), CONFIG, bias=torch.zeros(8, device="meta"))


def test_slot_numbers_are_int32(adapter) -> None:
    """Also where max_rows makes the rows few."""

    def call(ids):
        return adapter.functions.plan_dispatch(ids, 8, max_rows=1024)

    message = r"slot numbers are int32: T \* K must stay below 2\^31, got 2147483648"
    with pytest.raises(ValueError, match=message):
        if adapter.name == "jax":
            import jax

            jax.eval_shape(call, jax.ShapeDtypeStruct((2**28, 8), np.int32))
        else:
            import torch

            call(torch.empty((2**28, 8), dtype=torch.int32, device="meta"))
