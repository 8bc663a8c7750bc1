# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The `te` functions under torch.compile, jit, vmap, export and sharding."""

from __future__ import annotations

import numpy as np
import pytest
from te_checks import distinct_logits

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
from duomoe import ops
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_samples import mesh

pytestmark = [pytest.mark.jax, pytest.mark.torch]


def test_torch_compiles_whole_and_takes_strided_cotangents(rng) -> None:
    from torch_frontend import te as module

    logits = torch.from_numpy(distinct_logits(rng, 24, 16)).requires_grad_()
    counts = torch.arange(16)

    def f(z):
        probs, marks = module.fused_topk_with_score_function(
            z, 2, False, None, None, None, "sigmoid", None
        )
        _, scores = module.fused_compute_score_for_moe_aux_loss(z, 2, "sigmoid")
        loss = module.fused_moe_aux_loss(scores, counts, torch.tensor(24), 16, 2, 0.1)
        return probs.sum() + loss, marks

    eager, marks = f(logits)
    compiled, compiled_marks = torch.compile(f, fullgraph=True, backend="aot_eager")(logits)
    assert torch.equal(eager, compiled) and torch.equal(marks, compiled_marks)
    (grad,) = torch.autograd.grad(eager, logits, retain_graph=True)
    (compiled_grad,) = torch.autograd.grad(compiled, logits)
    assert torch.equal(grad, compiled_grad)
    assert grad.abs().sum() > 0


@pytest.mark.multidevice
@pytest.mark.parametrize("axes", [P("a"), P(("a", "b")), P("b")])
def test_loss_of_sharded_tokens_is_the_loss(rng, axes) -> None:
    """Each shard sees its tokens only; loss and gradient are those of all of them."""
    from jax_frontend import te as module

    probs, counts = rng.random((64, 16)).astype("f4"), np.arange(16, dtype="i4")

    def loss(p):
        return module.fused_moe_aux_loss(p, counts, 2, 1.0)

    value, grad = jax.jit(jax.value_and_grad(loss))(probs)
    sharded = jax.device_put(probs, NamedSharding(mesh((2, 2), ("a", "b")), axes))
    assert not sharded.sharding.is_fully_replicated
    many_value, many_grad = jax.jit(jax.value_and_grad(loss))(sharded)
    assert many_value.shape == ()
    np.testing.assert_allclose(many_value, value, rtol=2.0**-23)
    np.testing.assert_array_equal(many_grad, grad)
    np.testing.assert_allclose(
        value, 16 / (2 * 64**2) * (probs.astype("f8") @ counts).sum(), rtol=2.0**-23
    )


@pytest.mark.multidevice
def test_router_keeps_tokens_sharded_and_gathers_experts(rng) -> None:
    from jax_frontend import te as module

    logits = distinct_logits(rng, 64, 16)
    f = jax.jit(lambda z: module.fused_topk_with_score_function(z, 2, routing_map_format=1))
    want = f(logits)
    for axes in (P("a"), P(None, "b"), P("a", "b")):
        z = jax.device_put(logits, NamedSharding(mesh((2, 2), ("a", "b")), axes))
        got = f(z)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
        assert got[0].sharding.is_equivalent_to(NamedSharding(z.sharding.mesh, P(axes[0])), 2)


def test_functions_under_vmap(rng) -> None:
    from jax_frontend import te as module

    probs, counts = rng.random((3, 10, 8)).astype("f4"), np.arange(8, dtype="i4")
    mapped = jax.vmap(lambda p: module.fused_moe_aux_loss(p, counts, 2, 1.0))(probs)
    single = [module.fused_moe_aux_loss(p, counts, 2, 1.0) for p in probs]
    np.testing.assert_array_equal(mapped, np.stack(single))
    grads = jax.vmap(jax.grad(lambda p: module.fused_moe_aux_loss(p, counts, 2, 1.0)))(probs)
    assert grads.shape == probs.shape and (grads[0] == grads[1]).all()


def test_options_that_torch_compile_makes_symbolic(rng) -> None:
    """A token count from a shape, and floats that change between calls, in one graph."""
    from torch_frontend import te as module

    def loss(p, coeff):
        return module.fused_moe_aux_loss(p, torch.ones(8), p.shape[0], 8, 2, coeff)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for tokens, coeff in ((6, 0.1), (4, 0.2), (5, 0.3), (9, 0.3)):
        p = torch.from_numpy(rng.random((tokens, 8)).astype("f4"))
        assert torch.equal(compiled(p, coeff), loss(p, coeff))

    def route(z, scale):
        return module.fused_topk_with_score_function(
            z, 2, False, None, None, scale, "sigmoid", None
        )[0]

    compiled = torch.compile(route, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens, scale in ((6, 1.5), (4, 2.5), (5, 3.5)):
        z = torch.from_numpy(distinct_logits(rng, tokens, 8))
        assert torch.equal(compiled(z, scale), route(z, scale))


def test_torch_buffers_on_another_device_are_refused() -> None:
    from torch_frontend import te as module

    def call(**options):
        z = torch.zeros(6, 8)
        return module.fused_topk_with_score_function(
            z, 2, False, None, None, None, "sigmoid", None, **options
        )

    ids = torch.empty(6, 2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="topk_indices is on meta"):
        call(topk_indices=ids)
    with pytest.raises(ValueError, match="qb_histogram is on meta"):
        call(
            qb_histogram=torch.zeros(8, 4, dtype=torch.int32, device="meta"),
            qb_bin_bounds=torch.tensor([-1.0, 1.0]),
            qb_histogram_mode="two_kernel",
        )
    # Ids are written first: a buffer that cannot be written leaves the histogram alone.
    histogram = torch.zeros(8, 4, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        call(
            topk_indices=torch.zeros(1, 2, dtype=torch.int32).expand(6, 2),
            qb_histogram=histogram,
            qb_bin_bounds=torch.tensor([-1.0, 1.0]),
            qb_histogram_mode="two_kernel",
        )
    assert histogram.sum() == 0


def test_jax_exports_with_symbolic_tokens(rng) -> None:
    from jax import export

    from jax_frontend import te as module

    def f(z):
        probs, packed = module.fused_topk_with_score_function(z, 2, routing_map_format=1)
        _, scores = module.fused_compute_score_for_moe_aux_loss(z, 2, "softmax")
        return probs, packed, module.fused_moe_aux_loss(scores, np.ones(8, "f4"), 2, 1.0)

    (tokens,) = export.symbolic_shape("T")
    names = [f"duomoe.{op}{kind}" for op in ops.table() for kind in ("", ".scratch")]
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    exported = export.export(jax.jit(f), disabled_checks=checks)(
        jax.ShapeDtypeStruct((tokens, 8), "float32")
    )
    loaded = export.deserialize(exported.serialize())
    for count in (3, 20):
        z = distinct_logits(rng, count, 8)
        for a, b in zip(loaded.call(z), f(z), strict=True):
            np.testing.assert_array_equal(a, b)


def test_jax_counts_that_change_do_not_compile_anew(rng, caplog) -> None:
    from jax_frontend import te as module

    probs = jax.numpy.asarray(rng.random((10, 8)), "float32")
    module.fused_moe_aux_loss(probs, np.ones(8, "f4"), 2, 1.0, total_num_tokens=5)
    with jax.log_compiles():
        for n in (6, 7):
            module.fused_moe_aux_loss(probs, np.ones(8, "f4"), 2, 1.0, total_num_tokens=n)
        assert not [r for r in caplog.records if "Compiling" in r.message]
        module.fused_moe_aux_loss(probs, np.ones(8, "f4"), 2, 2.0, total_num_tokens=7)
    assert [r for r in caplog.records if "Compiling" in r.message]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_torch_exports_with_symbolic_tokens(rng) -> None:
    """The token count of a shape, symbolic, in either mode of torch.export."""
    from torch_frontend import te as module

    class Loss(torch.nn.Module):
        def forward(self, p):
            return module.fused_moe_aux_loss(p, torch.ones(8), p.shape[0], 8, 2, 0.1)

    p = torch.from_numpy(rng.random((6, 8)).astype("f4"))
    for strict in (True, False):
        tokens = {0: torch.export.Dim("tokens", min=2, max=100)}
        program = torch.export.export(Loss(), (p,), dynamic_shapes=(tokens,), strict=strict)
        for given in (p, p[:3], torch.cat([p, p])):
            assert torch.equal(program.module()(given), Loss()(given))
