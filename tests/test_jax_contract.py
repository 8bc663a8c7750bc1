# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""JAX's transformations but for sharding: vmap, scan, remat, export, x64, second derivatives."""

from __future__ import annotations

import numpy as np
import pytest
from samples import block, block_parameters, normal

jax = pytest.importorskip("jax")
jnp = jax.numpy
from duomoe import MoEParams
from jax_samples import CONFIG, statistics_loss

import jax_frontend as jf

pytestmark = [pytest.mark.jax]


@pytest.mark.parametrize("in_axes", [0, 1, -1])
def test_vmap_of_grad(in_axes: int, rng) -> None:
    z = normal(rng, (3, 6, 8))
    moved = np.moveaxis(z, 0, in_axes)
    got = jax.vmap(jax.grad(statistics_loss), in_axes)(moved)
    np.testing.assert_array_equal(got, np.stack([jax.grad(statistics_loss)(s) for s in z]))


def test_vmap_with_unbatched_arguments_and_of_the_block(rng) -> None:
    parameters, x = block_parameters(rng, 8, 16, 32), normal(rng, (3, 5, 16))
    f = lambda x, *p: sum(o.sum() for o in block(jf, CONFIG)(x, *p))
    got = jax.jit(jax.vmap(jax.grad(f, (0, 1)), (0, None, None, None, None)))(x, *parameters)
    for i in range(3):
        for a, b in zip(got, jax.grad(f, (0, 1))(x[i], *parameters), strict=True):
            np.testing.assert_array_equal(a[i], b)


def test_scan_and_remat(rng) -> None:
    z = normal(rng, (3, 6, 8))
    want = np.stack([jax.grad(statistics_loss)(s) for s in z])

    def total(z):
        body = jax.checkpoint(lambda carry, s: (carry + statistics_loss(s), None))
        return jax.lax.scan(body, 0.0, z)[0]

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(z), want)


def test_integer_inputs_and_outputs_under_grad(rng) -> None:
    """Ids take no gradient, counts come back beside the loss."""
    parameters, x = block_parameters(rng, 8, 16, 32), normal(rng, (6, 16))
    ids = rng.integers(0, 8, (6, 2)).astype(np.int32)

    def loss(x, ids):
        out = jf.moe(x, MoEParams(*map(jnp.asarray, parameters)), CONFIG, indices=ids)
        return out.output.sum() + out.load_balancing_loss, out.expert_counts

    (_, counts), grad = jax.value_and_grad(loss, has_aux=True)(x, ids)
    np.testing.assert_array_equal(counts, np.bincount(ids.ravel(), minlength=8))
    assert np.isfinite(grad).all() and np.abs(grad).max() > 0
    _, (_, grad_ids) = jax.value_and_grad(loss, (0, 1), has_aux=True, allow_int=True)(x, ids)
    assert grad_ids.dtype == jax.dtypes.float0
    with pytest.raises(
        (TypeError, ValueError), match="expert_counts of route is an integer and takes no cotangent"
    ):
        jax.vjp(lambda x: loss(x, ids), x)[1]((jnp.float32(1), jnp.ones(8)))


def test_unused_outputs(rng) -> None:
    """Gradients of two losses alone add up to that of both."""
    parameters, x = block_parameters(rng, 8, 16, 32), normal(rng, (6, 16))
    outputs = lambda r: block(jf, CONFIG)(x, r, *parameters[1:])
    only_y = jax.grad(lambda r: outputs(r)[0].sum())(parameters[0])
    only_aux = jax.grad(lambda r: outputs(r)[1])(parameters[0])
    both = jax.grad(lambda r: outputs(r)[0].sum() + outputs(r)[1])(parameters[0])
    assert np.abs(only_y).max() > 0 and np.abs(only_aux).max() > 0
    np.testing.assert_allclose(only_y + only_aux, both, rtol=1e-4, atol=1e-6)


def test_second_derivative_is_an_error(rng) -> None:
    """An error that says so, rather than a silent constant."""
    z = normal(rng, (2, 8))
    with pytest.raises(NotImplementedError, match=r"duomoe: .*_bwd has no derivative"):
        jax.grad(lambda z: (jax.grad(statistics_loss)(z) ** 2).sum())(z)


def test_forward_mode_is_an_error(rng) -> None:
    z = normal(rng, (2, 8))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(statistics_loss, (z,), (z,))


def test_vmap_over_nothing() -> None:
    weights = jax.vmap(lambda z: jf.route(z, CONFIG).weights)(jnp.zeros((0, 4, 8)))
    assert weights.shape == (0, 4, 2)


def test_donation_leaves_results_right(rng) -> None:
    z = normal(rng, (64, 8))
    donated = jnp.asarray(z.copy())
    got = jax.jit(jf.glu, donate_argnums=0)(donated, z)
    assert donated.is_deleted()
    np.testing.assert_array_equal(got, jf.glu(z, z))


def test_x64(rng) -> None:
    z, ids = normal(rng, (6, 8)), rng.integers(0, 8, (6, 2))
    want = jf.route(z, CONFIG, indices=ids.astype(np.int32))
    with jax.enable_x64(True):
        got = jf.route(jnp.asarray(z), CONFIG, indices=jnp.asarray(ids))
        assert got.weights.dtype == jnp.float32 and got.indices.dtype == jnp.int32
        np.testing.assert_array_equal(got.weights, want.weights)
        with pytest.raises(
            TypeError, match="logits must be float32, bfloat16 or float16, got float64"
        ):
            jf.route(jnp.asarray(z, jnp.float64), CONFIG)
        jax.grad(statistics_loss)(jnp.asarray(z))


def test_export(rng) -> None:
    from jax import export

    z = normal(rng, (6, 8))
    checks = [
        export.DisabledSafetyCheck.custom_call(f"duomoe.{n}")
        for n in ("route", "load_balancing_loss", "z_loss")
    ]
    exported = export.export(jax.jit(statistics_loss), disabled_checks=checks)(z)
    np.testing.assert_array_equal(
        export.deserialize(exported.serialize()).call(z), statistics_loss(z)
    )


def test_eager_vmap_compiles_once(rng) -> None:
    """A fresh closure per call would compile, and leak, every time."""
    z = jnp.asarray(normal(rng, (2, 6, 8)))
    route = jax.vmap(lambda z: jf.route(z, CONFIG).weights)
    start = jax_compiles()
    route(z)
    before = jax_compiles()
    assert before > start
    for _ in range(3):
        route(z)
    assert jax_compiles() == before


def jax_compiles() -> int:
    """How many programs this process has compiled."""
    return COMPILES[0]


COMPILES = [0]


def _count(event: str, *_: object, **__: object) -> None:
    COMPILES[0] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


def test_masked_tokens_may_hold_anything(rng) -> None:
    """NaN in a masked token reaches no loss and no gradient."""
    parameters, values = block_parameters(rng, 8, 16, 32), normal(rng, (6, 16))
    mask = np.array([True, True, False, True, False, True])

    def loss(x, *p):
        out = jf.moe(x, MoEParams(*p), CONFIG, token_mask=mask)
        return (jnp.where(mask[:, None], out.output, 0) ** 2).sum() + out.load_balancing_loss

    results = []
    for poison in (0.0, np.nan, np.inf):
        x = np.where(mask[:, None], values, np.float32(poison))
        results.append(jax.value_and_grad(loss, range(5))(x, *parameters))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)
    assert np.all(results[0][1][0][~mask] == 0)


def test_wild_numpy_ids_do_not_wrap(rng) -> None:
    """Without x64 JAX would keep the low 32 bits of an id."""
    z = normal(rng, (1, 8))
    routing = jf.route(z, CONFIG, indices=np.array([[2**40, 2**40 + 3]]))
    assert np.all(np.asarray(routing.indices) == -1) and int(routing.expert_counts.sum()) == 0
