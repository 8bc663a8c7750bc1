# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""torch's contracts over every op: opcheck, compile, export, strides, autocast, vmap."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from samples import PARAMETER_NAMES, block, block_parameters, normal

torch = pytest.importorskip("torch")
from duomoe import MoEParams, RouterConfig, ops
from duomoe.verification import inputs

import torch_frontend as tf

pytestmark = [
    pytest.mark.torch,
    # torch's own, from inside torch.compile.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]

CONFIG = RouterConfig(8, 2, score="sigmoid")


def leaf(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(x)).requires_grad_()


@pytest.fixture
def parameters(rng) -> list[torch.Tensor]:
    return [leaf(p) for p in block_parameters(rng, 8, 16, 32)]


def total(x: torch.Tensor, parameters: list[torch.Tensor], **options) -> torch.Tensor:
    y, lb, z = block(tf, CONFIG, **options)(x, *parameters)
    return y.pow(2).sum() + lb + z


# -- operators -------------------------------------------------------------------------------------


def test_gradient_through_unused_outputs(parameters, rng) -> None:
    """Each loss alone reaches the router, and they add up."""
    x = leaf(normal(rng, (6, 16)))
    router = parameters[0]

    def grad(loss):
        return torch.autograd.grad(loss, router)[0]

    out = lambda: tf.moe(x, MoEParams(*parameters), CONFIG)
    only_y, only_aux = grad(out().output.sum()), grad(out().load_balancing_loss)
    assert only_y.abs().max() > 0 and only_aux.abs().max() > 0
    both = out()
    torch.testing.assert_close(
        grad(both.output.sum() + both.load_balancing_loss), only_y + only_aux
    )


def test_second_derivative_is_an_error(rng) -> None:
    """An error that says so, rather than a silent constant."""
    z = leaf(normal(rng, (4, 8)))
    weights = tf.route(z, CONFIG).weights
    (grad,) = torch.autograd.grad((weights**2).sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="duomoe: route_bwd has no derivative"):
        grad.sum().backward()


def test_degenerate_calls_return_fresh_tensors(rng) -> None:
    """With one expert every op could hand back its input."""
    config = RouterConfig(1, 1)
    x = torch.from_numpy(normal(rng, (5, 4)))
    with torch.no_grad():
        routing = tf.route(x[:, :1], config)
        plan = tf.plan_dispatch(routing.indices, 1)
        rows = tf.permute(x, plan)
        y = tf.combine(rows, plan)
    assert rows.data_ptr() != x.data_ptr() and y.data_ptr() != rows.data_ptr()
    torch.testing.assert_close(y, x, rtol=0, atol=0)


# -- strides ---------------------------------------------------------------------------------------


def test_expanded_and_strided_cotangents(parameters, rng) -> None:
    """The gradient of a sum arrives with strides (0, 0), that of a slice with gaps."""
    x = leaf(normal(rng, (6, 16)))
    wanted = [x, *parameters]
    y = tf.moe(x, MoEParams(*parameters), CONFIG).output
    dense = torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True)
    for got, want in zip(
        torch.autograd.grad(y.sum(), wanted, retain_graph=True), dense, strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    g = torch.from_numpy(normal(rng, (6, 40)))
    dense = torch.autograd.grad(y, wanted, g[:, 3:35:2].contiguous(), retain_graph=True)
    assert not g[:, 3:35:2].is_contiguous()
    for got, want in zip(torch.autograd.grad(y, wanted, g[:, 3:35:2]), dense, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_strided_inputs(rng) -> None:
    wide = torch.from_numpy(normal(rng, (8, 12)))
    for z in (wide[:, 2:10], wide[:, :8].t(), wide[:, :1].expand(8, 8)):
        assert not z.is_contiguous()
        got, want = tf.route(z, CONFIG), tf.route(z.contiguous(), CONFIG)
        torch.testing.assert_close(got.weights, want.weights, rtol=0, atol=0)
        torch.testing.assert_close(got.indices, want.indices, rtol=0, atol=0)


# -- empty and single ------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int, parameters, rng) -> None:
    """Empty and single batches: gradients of the right shape, finite losses, and the next call
    works."""
    x = leaf(normal(rng, (tokens, 16)))
    out = tf.moe(x, MoEParams(*parameters), CONFIG)
    (out.output.sum() + out.load_balancing_loss + out.z_loss).backward()
    assert out.output.shape == x.grad.shape == (tokens, 16)
    assert torch.isfinite(out.load_balancing_loss) and torch.isfinite(out.z_loss)
    assert int(out.expert_counts.sum()) == 2 * tokens
    assert all(torch.isfinite(p.grad).all() for p in parameters)
    assert int(tf.moe(torch.zeros(3, 16), MoEParams(*parameters), CONFIG).expert_counts.sum()) == 6


# -- torch.compile, export, vmap -------------------------------------------------------------------


def test_compile_fullgraph(parameters, rng) -> None:
    """One graph for all T; the second size may recompile once, a third may not."""
    torch._dynamo.reset()
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    for i, tokens in enumerate((8, 9, 15)):
        x = leaf(normal(rng, (tokens, 16)))
        with torch._dynamo.config.patch(error_on_recompile=i == 2):
            got = torch.autograd.grad(compiled(x, parameters), [x, *parameters])
        want = torch.autograd.grad(total(x, parameters), [x, *parameters])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_compile_with_inductor(parameters, rng) -> None:
    torch._dynamo.reset()
    x = leaf(normal(rng, (8, 16)))
    got = torch.autograd.grad(torch.compile(total, fullgraph=True)(x, parameters), x)
    torch.testing.assert_close(got, torch.autograd.grad(total(x, parameters), x))


def test_export(parameters, rng) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, p in zip(PARAMETER_NAMES, parameters, strict=True):
                self.register_buffer(name, p.detach())

        def forward(self, x):
            return tf.moe(x, MoEParams(*(getattr(self, n) for n in PARAMETER_NAMES)), CONFIG)

    x = torch.from_numpy(normal(rng, (6, 16)))
    got, want = torch.export.export(Block(), (x,)).module()(x), Block()(x)
    torch.testing.assert_close(got.output, want.output, rtol=0, atol=0)
    assert torch.equal(got.expert_counts, want.expert_counts)


def test_vmap(rng) -> None:
    z = torch.from_numpy(normal(rng, (6, 3, 8)))
    routing = torch.func.vmap(lambda z: tf.route(z, CONFIG), in_dims=1)(z)
    for i in range(3):
        want = tf.route(z[:, i], CONFIG)
        torch.testing.assert_close(routing.weights[i], want.weights, rtol=0, atol=0)
        torch.testing.assert_close(routing.expert_counts[i], want.expert_counts, rtol=0, atol=0)


def test_checkpoint_recomputes_the_same_ties() -> None:
    """All-zero logits: forward and recomputation select the same ids."""
    z = torch.zeros(64, 8, requires_grad=True)
    f = lambda z: (tf.route(z, CONFIG).weights * torch.tensor([1.0, 2.0])).sum()
    (want,) = torch.autograd.grad(f(z), z)
    ids = tf.route(z, CONFIG).indices
    assert torch.equal(ids, torch.tensor([[0, 1]], dtype=torch.int32).expand(64, 2))
    for _ in range(20):
        loss = torch.utils.checkpoint.checkpoint(f, z, use_reentrant=False)
        assert torch.equal(torch.autograd.grad(loss, z)[0], want)


# -- dtypes ----------------------------------------------------------------------------------------


def test_autocast(parameters, rng) -> None:
    """Router maths stays float32, gradients have the parameters' dtype."""
    x = leaf(normal(rng, (6, 16)))
    with torch.autocast("cpu", torch.bfloat16):
        out = tf.moe(torch.nn.functional.linear(x, torch.eye(16)), MoEParams(*parameters), CONFIG)
    assert out.output.dtype == torch.bfloat16
    assert out.routing.weights.dtype == out.load_balancing_loss.dtype == torch.float32
    out.output.float().sum().backward()
    assert all(p.grad.dtype == p.dtype == torch.float32 for p in parameters)


def test_bias_of_another_dtype_is_refused(rng) -> None:
    """A bias that became bfloat16 collapses neighbouring values, so it is an error."""
    z = torch.zeros(1, 8)
    bias = 6.817 + 0.001 * torch.arange(8.0)
    config = RouterConfig(8, 1, score="sigmoid")
    assert tf.route(z, config, bias=bias).indices.item() == 7
    with pytest.raises(TypeError, match="route: bias must be float32, got bfloat16"):
        tf.route(z, config, bias=bias.bfloat16())


def test_records_are_copied_and_pickled(rng) -> None:
    routing = tf.route(torch.from_numpy(normal(rng, (4, 8))), CONFIG)
    for other in (copy.deepcopy(routing), pickle.loads(pickle.dumps(routing))):
        assert torch.equal(other.weights, routing.weights)
    assert pickle.loads(pickle.dumps(CONFIG)) == CONFIG


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads: int, rng) -> None:
    """Work is cut the same way for any number of threads where it changes a sum."""
    x, parameters = (
        leaf(normal(rng, (700, 16))),
        [leaf(p) for p in block_parameters(rng, 8, 16, 32)],
    )
    want = torch.autograd.grad(total(x, parameters), [x, *parameters])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = torch.autograd.grad(total(x, parameters), [x, *parameters])
    finally:
        torch.set_num_threads(before)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# -- every op --------------------------------------------------------------------------------------


def calls_of(op: ops.Op, adapter, rng) -> list[tuple[ops.Op, list, dict]]:
    """Calls of an op and of its backward ops on small valid inputs."""
    options = inputs.Options(tokens=7, experts=6, top_k=2, width=5, hidden=9)
    calls = []
    for case in inputs.GENERATORS[op.name](inputs.Draw(options, rng, adapter.call)):
        given = [case.inputs.get(t.name) for t in op.inputs]
        calls.append((op, given, dict(case.attributes)))
        outputs = list(adapter.call(op.name, case.inputs, case.attributes).values())
        cotangents = [rng.standard_normal(o.shape).astype(o.dtype) for o in outputs]
        pool = {"input": given, "output": outputs, "grad": cotangents}
        dtypes = [None if g is None else g.dtype.name for g in given]
        for step in op.gradient_steps:
            attributes = op.gradient_attributes(step, case.attributes, dtypes)
            calls.append((step.op, [pool[kind][i] for kind, i in step.sources], attributes))
    return calls


@pytest.mark.parametrize("op", inputs.forward_ops(), ids=lambda op: op.name)
def test_opcheck(op: ops.Op, torch_adapter, rng) -> None:
    """Schema, fake kernel, autograd and aliasing, of every op and its backward ops."""
    for spec, given, attributes in calls_of(op, torch_adapter, rng):
        differentiable = {spec.inputs[i].name for step in spec.gradient_steps for i in step.targets}
        tensors = [
            None if g is None else torch_adapter.array(g).requires_grad_(t.name in differentiable)
            for g, t in zip(given, spec.inputs, strict=True)
        ]
        torch.library.opcheck(
            getattr(torch.ops.duomoe, spec.name).default,
            (*tensors, *spec.attribute_values(attributes)),
        )


@pytest.mark.parametrize("op", inputs.forward_ops(), ids=lambda op: op.name)
def test_vmap_of_every_op(op: ops.Op, torch_adapter, rng) -> None:
    for spec, given, attributes in calls_of(op, torch_adapter, rng):
        tensors = [None if g is None else torch_adapter.array(g) for g in given]
        twice = [None if t is None else torch.stack([t, t]) for t in tensors]
        overload = getattr(torch.ops.duomoe, spec.name).default
        values = spec.attribute_values(attributes)
        axes = tuple(None if t is None else 0 for t in tensors)
        batched = torch.func.vmap(lambda *t: overload(*t, *values), in_dims=axes)(*twice)  # noqa: B023
        want = overload(*tensors, *values)
        for a, b in zip(
            *((r if isinstance(r, tuple) else (r,)) for r in (batched, want)), strict=True
        ):
            torch.testing.assert_close(a[1], b, rtol=0, atol=0)


# -- torch.func and forward-mode AD ----------------------------------------------------------------


def test_func_transforms(parameters, rng) -> None:
    """grad, vjp, jacrev and vmap of grad give autograd's bits."""
    x = torch.from_numpy(normal(rng, (3, 6, 16)))
    plain = [p.detach() for p in parameters]
    want = [torch.autograd.grad(total(leaf, parameters), leaf)[0] for leaf in map(leaf_of, x)]
    f = lambda x: total(x, plain)
    got = torch.func.vmap(torch.func.grad(f))(x)
    assert torch.equal(torch.func.grad(f)(x[1]), want[1])
    assert torch.equal(torch.func.vjp(f, x[2])[1](torch.tensor(1.0))[0], want[2])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    z = torch.from_numpy(normal(rng, (3, 8)))
    jacobian = torch.func.jacrev(lambda z: tf.route(z, CONFIG).weights)(z)
    single = leaf_of(z)
    (row,) = torch.autograd.grad(tf.route(single, CONFIG).weights[1, 0], single)
    assert torch.equal(jacobian[1, 0], row)


def leaf_of(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def test_forward_mode_is_an_error(parameters, rng) -> None:
    z = torch.from_numpy(normal(rng, (3, 8)))
    for transform in (
        lambda: torch.func.jvp(lambda z: tf.glu(z, z), (z,), (z,)),
        lambda: torch.func.jacfwd(lambda z: tf.route(z, CONFIG).weights)(z),
        lambda: torch.func.hessian(lambda z: tf.z_loss(tf.route(z, CONFIG)))(z),
    ):
        with pytest.raises(RuntimeError, match=r"no forward-mode derivative|no derivative"):
            transform()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        tf.glu(torch.autograd.forward_ad.make_dual(z, z), z)
    x = torch.from_numpy(normal(rng, (3, 16)))
    plain = [p.detach() for p in parameters]
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(lambda x: total(x, plain), (x,), (x,))


def test_vmap_over_nothing() -> None:
    assert torch.func.vmap(tf.glu)(torch.zeros(0, 5, 8), torch.zeros(0, 5, 8)).shape == (0, 5, 8)
    assert torch.func.vmap(lambda z: tf.route(z, CONFIG).weights)(torch.zeros(0, 4, 8)).shape == (
        0,
        4,
        2,
    )


def test_options_from_shapes_under_compile(parameters, rng) -> None:
    torch._dynamo.reset()
    plain = [p.detach() for p in parameters]

    def f(x):
        p = MoEParams(*plain)
        out = tf.moe(x, p, CONFIG, num_sequences=x.shape[0], capacity=x.shape[0] * x.shape[1] // 2)
        return out.output

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (8, 12, 6, 10):
        x = torch.from_numpy(normal(rng, (n, 3, 16)))
        assert torch.equal(compiled(x), f(x))


def test_residual_in_place(parameters, rng) -> None:
    """The input may be changed in place after the block has read it."""
    x = leaf(normal(rng, (6, 16)))
    plain = [p.detach() for p in parameters]
    y = x * 1.0
    y.add_(tf.moe(y, MoEParams(*plain), CONFIG).output.detach())
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_masked_tokens_may_hold_anything(parameters, rng) -> None:
    """NaN in a masked token reaches no loss and no gradient."""
    values = normal(rng, (6, 16))
    mask = torch.tensor([True, True, False, True, False, True])
    results = []
    for poison in (0.0, float("nan"), float("inf")):
        x = values.copy()
        x[~mask.numpy()] = poison
        x = leaf(x)
        out = tf.moe(x, MoEParams(*parameters), CONFIG, token_mask=mask)
        loss = out.output[mask].square().sum() + out.load_balancing_loss + out.z_loss
        results.append([loss, *torch.autograd.grad(loss, [x, *parameters])])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
    assert torch.all(results[0][1][~mask] == 0)
