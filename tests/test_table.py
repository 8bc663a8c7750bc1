# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Nothing of the op table is missing on a side: kernels, schemas, gradients, handlers,
functions."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import numpy as np
import pytest
from duomoe import RouterConfig, library, ops, results

TABLE = ops.table()
FORWARD = [op for op in TABLE.values() if "_bwd" not in op.name]
BACKWARD = [op for op in TABLE.values() if "_bwd" in op.name]


@pytest.mark.parametrize("op", TABLE.values(), ids=TABLE)
def test_every_op_has_a_cpu_kernel(op: ops.Op) -> None:
    assert library.has_kernel(op.name, "cpu")


@pytest.mark.parametrize("op", TABLE.values(), ids=TABLE)
def test_every_op_has_a_cuda_kernel_in_the_sources(op: ops.Op) -> None:
    """A build without nvcc holds none, so this reads the files."""
    folder = Path(__file__).parents[1] / "common" / "csrc" / "cuda"
    sources = [path.read_text() for path in folder.glob("*.cu")]
    assert sum(f"DUOMOE_KERNEL(kCuda, {op.name})" in text for text in sources) == 1


def test_every_backward_op_belongs_to_one_op() -> None:
    owners = [name for op in FORWARD for name in op.backward]
    assert sorted(owners) == sorted(op.name for op in BACKWARD)
    for op in FORWARD:
        assert all(name.startswith(f"{op.name}_bwd") for name in op.backward)


# Float inputs without a gradient, and why.
NO_GRADIENT = {
    "route": {"bias": "steers selection only"},
    "plan_dispatch": {"weights": "ranks drops only"},
    "add": dict.fromkeys(("a", "b"), "used in backward passes only"),
    "update_expert_bias": {"bias": "follows the load between steps"},
    "count_quantile_bins": {
        "logits": "integers come out, and a cutoff that steers only",
        **dict.fromkeys(("bias", "lower", "upper"), "steer only"),
    },
    "update_expert_bias_by_quantile": dict.fromkeys(
        ("bias", "lower", "upper"), "follow the load between steps"
    ),
    "aux_loss": dict.fromkeys(("expert_loads", "live_tokens"), "counts"),
}
# Axes along which a gradient is the same, so that its backward op leaves them out.
UNIFORM = {("aux_loss", "probs"): ("T",)}


@pytest.mark.parametrize("op", FORWARD, ids=lambda op: op.name)
def test_every_float_input_has_a_gradient_or_is_said_to_have_none(op: ops.Op) -> None:
    covered = {op.inputs[i].name for step in op.gradient_steps for i in step.targets}
    without = set(NO_GRADIENT.get(op.name, ()))
    assert not covered & without
    assert covered | without == {t.name for t in op.inputs if t.is_float}


def test_what_is_said_of_gradients_names_ops_of_the_table() -> None:
    assert set(NO_GRADIENT) | {op for op, _ in UNIFORM} <= {op.name for op in FORWARD}


@pytest.mark.parametrize("op", FORWARD, ids=lambda op: op.name)
def test_backward_ops_take_what_the_forward_op_has(op: ops.Op) -> None:
    for step in op.gradient_steps:
        for spec, (kind, i) in zip(step.op.inputs, step.sources, strict=True):
            source = op.inputs[i] if kind == "input" else op.outputs[i]
            assert spec.axes == source.axes
        for spec, i in zip(step.op.outputs, step.targets, strict=True):
            left_out = UNIFORM.get((op.name, op.inputs[i].name), ())
            assert left_out + spec.axes == op.inputs[i].axes
        forward_options = {a.name: a for a in op.attributes}
        for a in step.op.attributes:
            assert a.dtype_of or a == forward_options[a.name]


@pytest.mark.torch
@pytest.mark.parametrize("op", TABLE.values(), ids=TABLE)
def test_torch_has_schema_fake_gradient_and_vmap(op: ops.Op) -> None:
    torch = pytest.importorskip("torch")
    import torch_frontend  # noqa: F401

    overload = getattr(torch.ops.duomoe, op.name).default
    arguments = [a.name for a in overload._schema.arguments]
    assert arguments == [t.name for t in op.inputs] + [a.name for a in op.attributes]
    assert len(overload._schema.returns) == len(op.outputs)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = f"duomoe::{op.name}"
    for key in ("CPU", "CUDA", "Meta", "FuncTorchBatched"):
        assert has(name, key), key
    if any(o.is_float for o in op.outputs):
        assert has(name, "Autograd")


@pytest.mark.jax
def test_jax_has_a_handler_for_every_op() -> None:
    pytest.importorskip("jax")
    from jax_frontend import _binding

    assert list(_binding.handlers()) == list(TABLE)


@pytest.mark.jax
@pytest.mark.torch
def test_front_ends_have_the_same_functions_and_arguments() -> None:
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    import jax_frontend
    import torch_frontend

    # JAX's modules are in jax_frontend.linen and jax_frontend.nnx, of which neither is required.
    modules = {"Experts", "MoE", "Router", "SharedExperts", "record_routing", "replay_routing"}
    assert modules < set(torch_frontend.__all__)
    assert jax_frontend.__all__ == [n for n in torch_frontend.__all__ if n not in modules]
    reduction = {"axis_name": "over", "group": "over"}
    for name in jax_frontend.__all__:
        ours, theirs = getattr(jax_frontend, name), getattr(torch_frontend, name)
        assert ours.__doc__, name
        if inspect.isclass(ours):
            assert ours is theirs
            continue
        parameters = [
            [
                (reduction.get(p.name, p.name), p.kind, p.default)
                for p in signature.parameters.values()
            ]
            for signature in map(inspect.signature, (ours, theirs))
        ]
        assert parameters[0] == parameters[1], name


def test_router_options_match_the_table() -> None:
    config = RouterConfig(8, 2)
    attributes = config.attributes(num_sequences=1)
    assert set(attributes) == {a.name for a in TABLE["route"].attributes}
    options = {f.name for f in dataclasses.fields(RouterConfig)}
    # num_experts is an axis of the logits; score_scope is expressed through `normalize`.
    assert options - {"num_experts", "score_scope"} == set(attributes) - {
        "num_sequences",
        "total_tokens",
    }
    for a in TABLE["route"].attributes:
        if a.kind == "choice":
            assert attributes[a.name] in a.choices


def test_records_have_the_names_of_the_ops_outputs() -> None:
    made_by = {
        results.Routing: ("route", "count_mismatches"),
        results.DispatchPlan: ("plan_dispatch",),
    }
    for record, makers in made_by.items():
        names = {f.name for f in dataclasses.fields(record)}
        assert names == {o.name for op in makers for o in TABLE[op].outputs}


@pytest.mark.parametrize("record", results.RECORDS)
def test_records_refuse_to_be_unpacked(record: type) -> None:
    fields = [f.name for f in dataclasses.fields(record)]
    value = record(**dict.fromkeys(fields, 0))
    with pytest.raises(TypeError, match="read its fields: " + ", ".join(fields)):
        list(value)


def test_infer_matches_the_core(adapter) -> None:
    """The shapes that Python computes are those that the core checks."""
    spec = TABLE["plan_dispatch"]
    attributes = {
        "num_experts": 5,
        "num_rows": 9,
        "capacity": -1,
        "drop_order": "position",
        "alignment": 1,
    }
    out = adapter.call("plan_dispatch", {"indices": np.zeros((3, 2), np.int32)}, attributes)
    inferred = spec.infer([(3, 2), None], ["int32", None], attributes)
    assert [(tuple(x.shape), x.dtype.name) for x in out.values()] == inferred
