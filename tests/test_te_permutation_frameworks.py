# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The permutation of the `te` modules under torch.compile, jit, vmap, sharding, any strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from te_moves import NAMES, ROWS, D, E, K, T, drawn

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_samples import mesh

pytestmark = [
    pytest.mark.jax,
    pytest.mark.torch,
    # torch's own, from inside torch.compile.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def everything(module: Any, x, p, w, ids, mask, sizes, order) -> tuple[Any, ...]:
    """Every function of the permutation; one array."""
    a, maps = module.moe_permute(x, mask, ROWS)
    a = module.moe_unpermute(a * 2, maps, p, (T, D))
    b, permuted, maps = module.moe_permute_with_probs(x, p, mask, ROWS)
    b = module.token_combine(b * permuted[:, None], maps)
    c, permuted, maps, pads, _ = module.token_dispatch(x, mask, ROWS, p, 4)
    c = module.token_combine(c * permuted[:, None], maps, p, pads)
    d, places = module.moe_permute(x, ids, ROWS - 3, map_type="index")
    d = module.moe_unpermute(d * 3, places, w, map_type="index")
    counts = mask.sum(0)
    e, permuted, maps, pads, _ = module.moe_permute_and_pad_with_probs(
        x, p, mask, counts, 4, num_out_tokens=ROWS
    )
    e = module.moe_unpermute(e * permuted[:, None], maps, pad_offsets=pads)
    f = module.moe_sort_chunks_by_index(x, sizes, order)
    g, sorted_probs = module.moe_sort_chunks_by_index_with_probs(x, p[:, 0], sizes, order)
    h, _ = module.sort_chunks_by_index(x, sizes, order)
    i, state, _ = module.pure_jax_token_dispatch(x, ids, E, K, 4, 1)
    i = module.pure_jax_token_combine(i, state, w, K, 3, T // 3).reshape((T, D))
    return a + b + c + d + e + f + g * sorted_probs[:, None] + h + i


def test_torch_compiles_whole(rng) -> None:
    from torch_frontend import te as module

    given = [torch.from_numpy(drawn(rng)[n]) for n in NAMES]
    leaves = [g.requires_grad_() for g in given[:3]]
    eager = everything(module, *given)
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")(module, *given)
    assert torch.equal(eager, compiled)
    want = torch.autograd.grad(eager.sum(), leaves, retain_graph=True)
    got = torch.autograd.grad(compiled.sum(), leaves)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b) and a.abs().sum() > 0


def test_torch_compiles_with_symbolic_tokens(rng) -> None:
    from torch_frontend import te as module

    def f(x, mask, p):
        out, permuted, maps = module.moe_permute_with_probs(x, p, mask, 2 * x.shape[0])
        return module.moe_unpermute(out * permuted[:, None], maps, None, x.shape)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (12, 7, 30):
        mask = torch.from_numpy(rng.random((tokens, 4)) < 0.4)
        x, p = torch.randn(tokens, 3), torch.rand(tokens, 4)
        assert torch.equal(compiled(x, mask, p), f(x, mask, p))


def test_jit_grad_and_vmap(rng) -> None:
    from jax_frontend import te as module

    given = [drawn(rng)[n] for n in NAMES]

    def loss(*a):
        y = everything(module, *a)
        return (y * np.arange(D, dtype="f4")).sum(), y

    step = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (_, eager), grads = step(*given)
    compiled = jax.jit(step)
    (_, jitted), jitted_grads = compiled(*given)
    np.testing.assert_allclose(eager, jitted, rtol=1e-6, atol=1e-6)
    for a, b in zip(grads, jitted_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert np.abs(a).sum() > 0

    many = [np.stack([g, np.roll(g, 1, axis=0)]) for g in given]
    many[5], many[6] = np.stack([given[5]] * 2), np.stack([given[6]] * 2)
    (_, mapped), mapped_grads = jax.jit(jax.vmap(step))(*many)
    for i in range(2):
        (_, one), one_grads = compiled(*[m[i] for m in many])
        np.testing.assert_allclose(mapped[i], one, rtol=1e-6, atol=1e-6)
        for a, b in zip(mapped_grads, one_grads, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)


def test_torch_func(rng) -> None:
    from torch_frontend import te as module

    given = [torch.from_numpy(drawn(rng)[n]) for n in NAMES]

    def loss(x, p, w):
        return everything(module, x, p, w, *given[3:]).square().sum()

    got = torch.func.grad(loss, argnums=(0, 1, 2))(*given[:3])
    leaves = [g.clone().requires_grad_() for g in given[:3]]
    want = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_strided_and_expanded(rng) -> None:
    """Inputs and cotangents of any strides."""
    from torch_frontend import te as module

    data = drawn(rng)
    x = torch.from_numpy(data["x"].T.copy()).T.requires_grad_()
    mask = torch.from_numpy(np.asfortranarray(data["mask"]))
    p = torch.from_numpy(data["p"]).flip(1).requires_grad_()
    assert not x.is_contiguous()
    out, permuted, maps = module.moe_permute_with_probs(x, p, mask, ROWS)
    grad_x, grad_p = torch.autograd.grad(
        [out, permuted],
        [x, p],
        [torch.ones(1, 1).expand(ROWS, D), torch.ones(()).expand(ROWS)],
        retain_graph=True,
    )
    np.testing.assert_array_equal(grad_x, np.full((T, D), float(K)))
    np.testing.assert_array_equal(grad_p, data["mask"])
    rows = torch.randn(D, ROWS).T.requires_grad_()
    back = module.moe_unpermute(rows, maps.T.contiguous().T, p)
    (grad,) = torch.autograd.grad(back, rows, torch.ones(1, 1).expand(T, D))
    want = module.moe_unpermute(rows.contiguous(), maps, p.contiguous())
    assert torch.equal(back, want)
    np.testing.assert_array_equal(grad, permuted.detach()[:, None].expand(ROWS, D))


def test_padding_under_jit(rng) -> None:
    """Counts that are not known yet need num_out_tokens; known ones do not."""
    from jax_frontend import te as module

    data = drawn(rng)
    counts = data["mask"].sum(axis=0).astype("i4")

    def f(mask, counts, **options):
        return module.moe_permute_and_pad_with_probs(
            data["x"], data["p"], mask, counts, 4, **options
        )

    eager = f(data["mask"], counts)
    for a, b in zip(jax.jit(lambda m: f(m, counts))(data["mask"]), eager, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"tokens_per_expert must be known .* num_out_tokens"):
        jax.jit(f)(data["mask"], counts)
    static = jax.jit(lambda m, c: f(m, c, num_out_tokens=ROWS))(data["mask"], counts)
    rows = len(eager[0])
    assert static[0].shape == ((ROWS + 3 * E) // 4 * 4, D)
    np.testing.assert_array_equal(static[0][:rows], eager[0])
    assert not np.any(static[0][rows:])


@pytest.mark.multidevice
def test_sharded_rows(rng) -> None:
    """The width may be sharded; tokens and experts are gathered. The numbers are the same."""
    from jax_frontend import te as module

    data = drawn(rng)
    x = rng.normal(size=(T, 8)).astype("f4")

    def f(x, p, mask):
        out, _, maps, pads, _ = module.token_dispatch(x, mask, ROWS, p, 4)
        return out, module.token_combine(out, maps, p, pads)

    want = jax.jit(f)(x, data["p"], data["mask"])
    devices = mesh((2, 2), ("a", "b"))
    for axes in (P("a"), P(None, "b"), P("a", "b")):
        sharded = [
            jax.device_put(a, NamedSharding(devices, axes)) for a in (x, data["p"], data["mask"])
        ]
        for a, b in zip(jax.jit(f)(*sharded), want, strict=True):
            np.testing.assert_array_equal(a, b)
