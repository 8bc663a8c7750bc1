# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels on bfloat16 tensors of more than 2^31 elements, and on more slots than a grid's
second axis has blocks. tests/native/large_tensors.cc is the same for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from duomoe import MoEParams, RouterConfig, library, ops

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import torch_frontend as tf

DEVICE = "cuda"
GIB = 2**30
MISSING = [op for op in ops.table() if not library.has_kernel(op, "cuda")]


def free_memory() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


pytestmark = [
    pytest.mark.cuda,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.skipif(bool(MISSING), reason=f"no CUDA kernel for {', '.join(MISSING)}"),
]
large = pytest.mark.skipif(free_memory() < 40 * GIB, reason="needs 40 GiB of GPU memory")

EXPERTS = 8
# Rows and width, just above 2^31 elements.
SIZES = [(524296, 4096), (299604, 7168)]
# Tokens, slots of each and width, just above 2^31 elements of rows.
EIGHT_SLOTS = (37504, 8, 7168)
CHUNK = 8192


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def pattern(rows: int, width: int, a: int, b: int) -> Any:
    """Integers below a + b - 1 <= 256, which bfloat16 holds exactly; no huge temporary."""
    x = torch.empty(rows, width, dtype=torch.bfloat16, device=DEVICE)
    column = torch.arange(width, device=DEVICE) % b
    for i in range(0, rows, CHUNK):
        part = x[i : i + CHUNK]
        row = torch.arange(i, i + len(part), device=DEVICE) % a
        part.copy_(row[:, None] + column)
    return x


def assert_chunks(got: Any, want: Callable[[slice], Any]) -> None:
    """got[s] equals want(s) for slices s of its rows that cover all of them."""
    for i in range(0, len(got), CHUNK):
        s = slice(i, min(i + CHUNK, len(got)))
        assert torch.equal(got[s], want(s)), f"rows {s.start} to {s.stop - 1}"


def reversed_plan(tokens: int) -> Any:
    """One slot a token; the first tokens go to the last expert."""
    ids = EXPERTS - 1 - torch.arange(tokens, device=DEVICE) * EXPERTS // tokens
    plan = tf.plan_dispatch(ids[:, None].int(), EXPERTS)
    rows = plan.row_of_slot[:, 0].long()
    assert rows[0] > rows[-1] and rows.unique().numel() == tokens
    return plan, rows


def factors(tokens: int) -> Any:
    """1, 2 or 4, [T, 1]."""
    exponents = torch.arange(tokens, device=DEVICE) % 3
    return (2.0**exponents)[:, None].requires_grad_()


def assert_dots(got: Any, a: Any, b: Callable[[int], Any]) -> None:
    for t in (0, 1, len(got) // 2, len(got) - 2, len(got) - 1):
        want = float(a[t].double() @ b(t).double())
        assert abs(float(got[t, 0]) - want) <= 1e-5 * abs(want), t


@large
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_permute(tokens: int, width: int, weighted: bool) -> None:
    plan, row = reversed_plan(tokens)
    x = pattern(tokens, width, 61, 3).requires_grad_()
    weights = factors(tokens) if weighted else None
    scale = weights.detach().bfloat16() if weighted else torch.ones((), device=DEVICE).bfloat16()
    rows = tf.permute(x, plan, weights)
    token = plan.slot_of_row.long()
    at = lambda s, i: scale[i[s]] if weighted else scale
    assert_chunks(rows.detach(), lambda s: x.detach()[token[s]] * at(s, token))
    grad_rows = pattern(tokens, width, 59, 5)
    inputs = [x, weights] if weighted else [x]
    grads = torch.autograd.grad(rows, inputs, grad_rows)
    every = torch.arange(tokens, device=DEVICE)
    assert_chunks(grads[0], lambda s: grad_rows[row[s]] * at(s, every))
    if weighted:
        assert_dots(grads[1], x.detach(), lambda t: grad_rows[row[t]])


@large
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_combine(tokens: int, width: int, weighted: bool) -> None:
    plan, row = reversed_plan(tokens)
    token = plan.slot_of_row.long()
    rows = pattern(tokens, width, 61, 3).requires_grad_()
    weights = factors(tokens) if weighted else None
    scale = weights.detach().bfloat16() if weighted else torch.ones((), device=DEVICE).bfloat16()
    at = lambda s, i: scale[i[s]] if weighted else scale
    y = tf.combine(rows, plan, weights)
    every = torch.arange(tokens, device=DEVICE)
    assert_chunks(y.detach(), lambda s: rows.detach()[row[s]] * at(s, every))
    grad_y = pattern(tokens, width, 59, 5)
    grads = torch.autograd.grad(y, [rows, weights] if weighted else [rows], grad_y)
    assert_chunks(grads[0], lambda s: grad_y[token[s]] * at(s, token))
    if weighted:
        assert_dots(grads[1], grad_y, lambda t: rows.detach()[row[t]])


@large
@pytest.mark.parametrize("weighted", [False, True])
def test_eight_slots_a_token(weighted: bool) -> None:
    """Rows past 2^31 elements of tokens that have far fewer; every sum is of small integers."""
    tokens, top_k, width = EIGHT_SLOTS
    torch.manual_seed(0)
    ids = torch.rand(tokens, 4 * EXPERTS, device=DEVICE).topk(top_k).indices
    plan = tf.plan_dispatch(ids.int(), 4 * EXPERTS)
    slot, row = plan.slot_of_row.long(), plan.row_of_slot.long()
    exponents = torch.arange(tokens * top_k, device=DEVICE) % 3
    weights = (2.0**exponents).view(tokens, top_k).requires_grad_() if weighted else None
    flat = weights.detach().view(-1) if weighted else torch.ones(tokens * top_k, device=DEVICE)
    # float32 [rows, D]: the row's token of v, times the slot's weight.
    spread = lambda v, s: flat[slot[s], None] * v[slot[s] // top_k]
    gathered = lambda v, s: sum(
        flat.view(row.shape)[s, k, None] * v[row[s, k]] for k in range(top_k)
    )

    def assert_weight_gradients(got: Any, of_token: Any, of_row: Any) -> None:
        for t in (0, 1, tokens // 2, tokens - 1):
            want = of_row[row[t]].double() @ of_token[t].double()
            assert torch.equal(got[t].double(), want), t

    x, grad_rows = pattern(tokens, width, 3, 2).requires_grad_(), pattern(len(slot), width, 2, 3)
    rows = tf.permute(x, plan, weights)
    assert_chunks(rows.detach(), lambda s: spread(x.detach(), s).bfloat16())
    grads = torch.autograd.grad(rows, [x, weights] if weighted else [x], grad_rows)
    assert_chunks(grads[0], lambda s: gathered(grad_rows, s).bfloat16())
    if weighted:
        assert_weight_gradients(grads[1], x.detach(), grad_rows)
    del rows, grads

    leaf, grad_y = grad_rows.requires_grad_(), x.detach()
    y = tf.combine(leaf, plan, weights)
    assert_chunks(y.detach(), lambda s: gathered(leaf.detach(), s).bfloat16())
    grads = torch.autograd.grad(y, [leaf, weights] if weighted else [leaf], grad_y)
    assert_chunks(grads[0], lambda s: spread(grad_y, s).bfloat16())
    if weighted:
        assert_weight_gradients(grads[1], grad_y, leaf.detach())


@large
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_glu(tokens: int, width: int) -> None:
    """Relu, whose products of small integers float32 holds exactly."""
    gate, up = (pattern(tokens, width, a, b) for a, b in ((61, 3), (7, 11)))
    gate.sub_(30).requires_grad_()
    up.requires_grad_()
    out = tf.glu(gate, up, activation="relu")
    g, u = gate.detach(), up.detach()
    assert_chunks(out.detach(), lambda s: (g[s].float().relu() * u[s].float()).bfloat16())
    grad = pattern(tokens, width, 5, 3)
    grad_gate, grad_up = torch.autograd.grad(out, [gate, up], grad)
    on = lambda s: (g[s] > 0).float() * grad[s].float()
    assert_chunks(grad_gate, lambda s: (on(s) * u[s].float()).bfloat16())
    assert_chunks(grad_up, lambda s: (grad[s].float() * g[s].float().relu()).bfloat16())


@large
def test_add_and_scale_rows() -> None:
    tokens, width = SIZES[0]
    x = pattern(tokens, width, 61, 3).requires_grad_()
    scale = factors(tokens)[:, 0].detach().requires_grad_()
    y = tf.scale_rows(x, scale)
    assert_chunks(y.detach(), lambda s: x.detach()[s] * scale.detach()[s, None].bfloat16())
    grad = pattern(tokens, width, 59, 5)
    grad_x, grad_scale = torch.autograd.grad(y, [x, scale], grad)
    assert_chunks(grad_x, lambda s: grad[s] * scale.detach()[s, None].bfloat16())
    assert_dots(grad_scale[:, None], x.detach(), lambda t: grad[t])
    total = torch.ops.duomoe.add(grad, grad_x)
    assert_chunks(total, lambda s: grad[s] + grad_x[s])


@large
@pytest.mark.parametrize("wide", ["rows", "out"])
def test_grouped_matmul(wide: str) -> None:
    """A side of 4 keeps simple kernels fast. Some rows of every expert are compared."""
    tokens, width = SIZES[0]
    d, n = (width, 4) if wide == "rows" else (4, width)
    plan, _ = reversed_plan(tokens)
    rows = pattern(tokens, d, 13, 7).requires_grad_()
    w = (pattern(EXPERTS * d, n, 5, 3) - 3).reshape(EXPERTS, d, n).requires_grad_()
    bias = pattern(EXPERTS, n, 5, 3).requires_grad_()
    out = tf.grouped_matmul(rows, w, plan, bias, out_dtype="float32" if n == 4 else None)
    grad_out = torch.empty_like(out)
    for i in range(0, tokens, CHUNK):
        grad_out[i : i + CHUNK] = pattern(min(CHUNK, tokens - i), n, 5, 2)
    grad_rows, grad_w, grad_bias = torch.autograd.grad(out, [rows, w, bias], grad_out)
    ends = plan.expert_offsets.tolist()
    for e in range(EXPERTS):
        begin, end = ends[e], ends[e + 1]
        for r in (begin, begin + 1, (begin + end) // 2, end - 1):
            x, g = rows.detach()[r].double(), grad_out[r].double()
            matrix = w.detach()[e].double()
            want = x @ matrix + bias.detach()[e].double()
            assert torch.equal(out.detach()[r], want.to(out.dtype)), (e, r)
            assert torch.equal(grad_rows[r], (matrix @ g).to(grad_rows.dtype)), (e, r)
        # First and last column of the sums over the expert's rows, all integers below 2^24.
        for k, j in ((0, 0), (d - 1, n - 1)):
            a, b = rows.detach()[begin:end, k].double(), grad_out[begin:end, j].double()
            assert grad_w[e, k, j] == (a @ b).to(grad_w.dtype), (e, k, j)
            assert grad_bias[e, j] == b.sum().to(grad_bias.dtype), (e, j)


@pytest.mark.parametrize("tokens", [8191, 8192])
def test_more_slots_than_65535(tokens: int) -> None:
    """T * K around 2^16, the whole block: the bits of the CPU."""
    top_k, width, hidden = 8, 16, 12
    config = RouterConfig(32, top_k)
    rng = np.random.default_rng(tokens)
    shapes = {
        "router": (width, 32),
        "w_gate": (32, width, hidden),
        "w_up": (32, width, hidden),
        "w_down": (32, hidden, width),
        "b_down": (32, width),
    }
    draw = lambda s: torch.from_numpy(rng.standard_normal(s).astype(np.float32))
    x, g, p = draw((tokens, width)), draw((tokens, width)), {n: draw(s) for n, s in shapes.items()}
    results = []
    for device in ("cpu", DEVICE):
        here = lambda a, device=device: a.detach().to(device).requires_grad_()
        mine, ps = here(x), {n: here(a) for n, a in p.items()}
        out = tf.moe(mine, MoEParams(**ps), config)
        grads = torch.autograd.grad(out.output, [mine, *ps.values()], g.to(device))
        found = [out.output, out.routing.indices, out.kept_counts, *grads]
        results.append([a.detach().cpu() for a in found])
    assert results[0][2].sum() == tokens * top_k
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
