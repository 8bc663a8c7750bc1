# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels against the CPU kernels, which are the specification: the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from adapters import BFLOAT16, JaxAdapter, TorchAdapter, bits
from cuda_checks import FLOATS, MARKS, Check, Rng, Values, assert_same, checker, name_of, normal
from duomoe import ops
from duomoe.config import RouterConfig
from duomoe.results import MoEParams
from duomoe.verification import compare
from duomoe.verification import inputs as generators

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = MARKS

# --- route ---------------------------------------------------------------------------------------


def router_attributes(top_k: int, **options: Any) -> Values:
    defaults = RouterConfig(num_experts=top_k, top_k=top_k).attributes(num_sequences=1)
    return {**defaults, **options}


def router_cases(rng: Rng, t: int, e: int, k: int) -> Iterator[tuple[Values, Values]]:
    """Inputs and options that between them take every path of the router."""
    bias = normal(rng, e, spread=0.2)
    mask = rng.random(t) < 0.7
    given = rng.integers(-2, e + 1, (t, k)).astype(np.int32)
    sequences = next(s for s in (8, 5, 7, 1) if t % s == 0)
    groups = next(g for g in (8, 4, 5, 1) if e % g == 0 and g <= e)
    kept = -(-k * groups // e)
    grouped = {"num_groups": groups, "group_top_k": kept, "group_score_k": 2}
    yield {}, {}
    yield {"bias": bias, "token_mask": mask}, {"score": "sigmoid", "scale": 2.5, "eps": 1e-6}
    cut = {"num_sequences": sequences}
    yield {"bias": bias}, {"score": "sqrtsoftplus", "normalize": "never", **cut}
    yield {"bias": bias}, {"score": "sigmoid", **grouped, "counts": "unbiased"}
    yield {"bias": bias, "token_mask": mask}, {"select_on": "logit", **grouped, "group_score_k": e}
    yield {"given_indices": given}, {"counts": "unbiased", **cut}
    clamp = {"score": "sigmoid", "eps": 0.3, "eps_mode": "clamp", "normalize": "if_k_gt_1"}
    yield {"given_indices": given, "token_mask": mask}, clamp
    if t:  # a slice of tokens in the middle of a batch, and one that ends in padding
        for first, total in ((t // 2 + 1, 3 * t), (2 * t - t // 3, 2 * t)):
            inputs = {"first_token": np.array(first, np.int32), "token_mask": mask}
            for s in (1, sequences, t):
                yield inputs, {"num_sequences": s, "total_tokens": total}


def check_router(check: Check, rng: Rng, inputs: Values, attributes: Values) -> None:
    """Forward and backward."""
    routing = check("route", inputs, attributes)
    backward = {name: inputs.get(name) for name in ("logits", "token_mask", "first_token")}
    backward["indices"] = routing["indices"]
    for name in ("weights", "score_sums", "logsumexp_sq"):
        backward["grad_" + name] = normal(rng, *routing[name].shape)
    names = [a.name for a in ops.table()["route_bwd"].attributes]
    check("route_bwd", backward, {name: attributes[name] for name in names})


@pytest.mark.parametrize("t", [0, 1, 7, 130, 1000])
@pytest.mark.parametrize(
    ("e", "k"), [(1, 1), (5, 2), (5, 5), (8, 2), (64, 6), (64, 64), (256, 8), (896, 16), (896, 896)]
)
def test_route(check: Check, rng: Rng, t: int, e: int, k: int) -> None:
    for i, (inputs, options) in enumerate(router_cases(rng, t, e, k)):
        logits = normal(rng, t, e, dtype=FLOATS[(i + t) % 3], spread=2.0)
        check_router(check, rng, {"logits": logits, **inputs}, router_attributes(k, **options))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_route_extremes(check: Check, rng: Rng, dtype: Any, score: str) -> None:
    e, inf, nan = 40, np.inf, np.nan
    rows = normal(rng, 24, e, spread=30.0)
    rows[1:8] = np.array([[nan, -inf, inf, 0.0, -150.0, -3e4, 1e-40]]).T
    rows[8, ::2], rows[9, :30], rows[10, 3], rows[11, 7] = -inf, -inf, nan, inf
    rows[12] = np.where(np.arange(e) % 2, -0.0, 0.0)
    rows[13], rows[14] = np.linspace(-3e4, 3e4, e), np.linspace(-90, -88, e)
    rows[15:18] -= 200.0
    logits = rows.astype(dtype)
    bias = normal(rng, e, spread=50.0)
    bias[5] = -0.0
    given = rng.integers(0, e, (24, 6)).astype(np.int32)
    given[:, 3] = given[:, 1]
    for options in ({}, {"eps": 1e-20}, {"normalize": "never"}, {"eps": 1e-3, "eps_mode": "clamp"}):
        for inputs in ({}, {"bias": bias}, {"given_indices": given}):
            for groups in ({}, {"num_groups": 8, "group_top_k": 3, "group_score_k": 2}):
                attributes = router_attributes(6, score=score, **options, **groups)
                check_router(check, rng, {"logits": logits, **inputs}, attributes)


@pytest.mark.parametrize(("t", "e", "k"), [(20, 2304, 8), (9, 8192, 32), (40000, 8, 2)])
def test_route_sizes(check: Check, rng: Rng, t: int, e: int, k: int) -> None:
    """Rows that leave room for few warps, sums in scratch memory, chunks of more than 64 tokens."""
    logits = normal(rng, t, e, dtype=BFLOAT16)
    options = {"num_groups": 8, "group_top_k": 4, "group_score_k": 1}
    check_router(check, rng, {"logits": logits}, router_attributes(k, **options))


def test_route_names_its_limit(gpu: Any) -> None:
    with pytest.raises(RuntimeError, match=r"route: 100000 experts need .* bytes of shared memory"):
        gpu.call("route", {"logits": np.zeros((1, 100000), np.float32)}, router_attributes(1))


# --- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("s", "e"), [(1, 8), (1, 256), (3, 5), (33, 64), (100, 896)])
def test_losses(check: Check, rng: Rng, s: int, e: int) -> None:
    tokens = rng.integers(0, 4, s).astype(np.int32)
    counts = rng.integers(0, 100, (s, e)).astype(np.int32)
    sums = normal(rng, s, e)
    grad = np.array(1.7, np.float32)
    balance, z = {"top_k": 3, "coeff": 0.01}, {"coeff": 0.001}
    for n in (tokens, 0 * tokens):
        inputs = {"sequence_counts": counts, "score_sums": sums, "num_tokens": n}
        check("load_balancing_loss", inputs, balance)
        inputs = {"sequence_counts": counts, "num_tokens": n, "grad_loss": grad}
        check("load_balancing_loss_bwd", inputs, balance)
        check("z_loss", {"logsumexp_sq": sums[:, 0], "num_tokens": n}, z)
        check("z_loss_bwd", {"num_tokens": n, "grad_loss": grad}, z)


# --- every op ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", generators.forward_ops(), ids=lambda op: op.name)
def test_every_op_and_its_gradients(gpu: Any, rng: Rng, op: ops.Op, dtype: str) -> None:
    """From the table, so that a new op is tested here too."""
    cpu = TorchAdapter("cpu")
    options = generators.Options(tokens=70, experts=12, top_k=3, width=37, hidden=21, dtype=dtype)
    for case in generators.GENERATORS[op.name](generators.Draw(options, rng, cpu.call)):
        cotangents = compare.draw_cotangents(op, case, rng)
        expected, actual = (compare.run_op(a, op, case, cotangents) for a in (cpu, gpu))
        assert_same(expected, actual)


# --- the frameworks ------------------------------------------------------------------------------


@pytest.mark.jax
def test_jax_equals_torch(gpu: Any, rng: Rng) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX runs on the CPU here; set DUOMOE_TEST_DEVICE=cuda")
    check = checker(gpu, JaxAdapter())
    for t, e, k in ((7, 8, 2), (130, 64, 6), (1000, 256, 8)):
        for inputs, options in router_cases(rng, t, e, k):
            logits = normal(rng, t, e, dtype=BFLOAT16)
            check_router(check, rng, {"logits": logits, **inputs}, router_attributes(k, **options))


E, K, D, F = 16, 4, 40, 24
CONFIG = RouterConfig(num_experts=E, top_k=K, score="sigmoid", num_groups=4, group_top_k=2)


def block_params(gpu: TorchAdapter, rng: Rng) -> MoEParams:
    shapes = {"router": (D, E), "w_gate": (E, D, F), "w_up": (E, D, F), "w_down": (E, F, D)}
    params = {n: gpu.array(normal(rng, *shape)).requires_grad_() for n, shape in shapes.items()}
    return MoEParams(**params, expert_bias=gpu.array(normal(rng, E)))


def run_block(gpu: TorchAdapter, x: Any, params: MoEParams, order: str = "weight") -> list[Any]:
    """Every op of the table: the outputs of a whole block and its gradients."""
    out = gpu.functions.moe(x, params, CONFIG, capacity=40, alignment=8, drop_order=order)
    loss = out.output.square().mean() + out.load_balancing_loss + out.z_loss
    leaves = [x, params.router, params.w_gate, params.w_up, params.w_down]
    grads = torch.autograd.grad(loss, leaves)
    routing = out.routing
    results = [out.output, routing.indices, routing.weights, out.kept_counts, loss, *grads]
    return [r.detach() for r in results]  # none keeps the graph, and so its stream, alive


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_repeats(gpu: Any, rng: Rng) -> None:
    params, x = block_params(gpu, rng), gpu.array(normal(rng, 200, D)).requires_grad_()
    first = run_block(gpu, x, params)
    assert all(equal(first, run_block(gpu, x, params)) for _ in range(100))


def test_poisoned_memory(gpu: Any, rng: Rng) -> None:
    """Outputs don't depend on what memory held before."""
    params, x = block_params(gpu, rng), gpu.array(normal(rng, 200, D)).requires_grad_()
    clean = run_block(gpu, x, params)
    sizes = [1 << n for n in (8, 12, 16, 20, 25) for _ in range(16)]
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    try:
        for byte in (0xFF, 0x7F):  # and the memory that the allocator holds, freed, for scratch
            held = [torch.full((n,), byte, dtype=torch.uint8, device="cuda") for n in sizes]
            del held
            assert equal(clean, run_block(gpu, x, params))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("order", ["position", "weight"])
def test_graph(gpu: Any, rng: Rng, order: str) -> None:
    """A graph captured on one routing gives another's results when replayed on its input."""
    params, x = block_params(gpu, rng), gpu.array(normal(rng, 200, D)).requires_grad_()
    other = gpu.array(normal(rng, 200, D)).requires_grad_()
    expected = run_block(gpu, other, params, order)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_block(gpu, x, params, order)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run_block(gpu, x, params, order)
    with torch.no_grad():
        x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert equal(expected, captured)


def test_eager_calls_go_straight_to_the_backend(gpu: Any, rng: Rng) -> None:
    from torch_frontend import bind

    x = gpu.array(normal(rng, 4, 8))
    assert bind.is_plain((x, None, x.clone().requires_grad_(), x.bfloat16().t()))
    assert not bind.is_plain((x, x.to_sparse()))


def test_side_stream(gpu: Any, rng: Rng) -> None:
    """Kernels run on the current stream: they see an input that this stream writes late."""
    params, values = block_params(gpu, rng), gpu.array(normal(rng, 200, D))
    expected = run_block(gpu, values.clone().requires_grad_(), params)
    x = torch.zeros_like(values)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.copy_(values)
        results = run_block(gpu, x.requires_grad_(), params)
    stream.synchronize()
    assert equal(expected, results)


def test_jitted_program_replayed(gpu: Any, rng: Rng) -> None:
    """One compiled JAX program on batch after batch: what XLA records is right on replay."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX runs on the CPU here; set DUOMOE_TEST_DEVICE=cuda")
    import jax_frontend as jf

    shapes = ((D, E), (E, D, F), (E, D, F), (E, F, D))
    params = [normal(rng, *shape) for shape in shapes]

    def outputs(functions: Any, x: Any, *p: Any) -> tuple[Any, ...]:
        out = functions.moe(x, MoEParams(*p), CONFIG)
        return out.output, out.load_balancing_loss, out.z_loss

    def step(x: Any, grad: Any, *p: Any) -> tuple[Any, Any]:
        values, pull = jax.vjp(lambda *a: outputs(jf, *a), x, *p)
        return values, pull((grad, np.float32(1), np.float32(1)))

    jitted = jax.jit(step)
    for _ in range(5):
        x, grad = normal(rng, 200, D), normal(rng, 200, D)
        got = [np.asarray(a) for part in jitted(x, grad, *params) for a in part]
        values, pull = gpu.vjp(lambda *a: outputs(gpu.functions, *a), x, *params)
        want = [*values, *pull(grad, np.float32(1), np.float32(1))]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


COMMAND_BUFFERS = """
import jax, jax.numpy as jnp, numpy as np
import jax_frontend as jf
from duomoe import RouterConfig

config = RouterConfig(num_experts=16, top_k=4, score="sigmoid", num_groups=4, group_top_k=2)

@jax.jit
def step(logits, x, w):
    def loss(logits, x, w):
        routing = jf.route(logits, config, num_sequences=4)
        plan = jf.plan_dispatch(routing.indices, 16, weights=routing.weights, capacity=40,
                                drop_order="weight")
        rows = jf.grouped_matmul(jf.permute(x, plan), w, plan)
        y = jf.combine(rows, plan, routing.weights)
        total = y.sum() + jf.load_balancing_loss(routing, config)
        return total, (y, routing.indices, plan.slot_of_row, routing.score_sums)
    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(logits, x, w)

rng = np.random.default_rng(0)
for i in range(10):
    inputs = [rng.standard_normal(s).astype("f4") for s in ((200, 16), (200, 24), (16, 24, 8))]
    on_gpu, on_cpu = ([np.asarray(a) for a in jax.tree.leaves(step(*jax.device_put(inputs, d)))]
                      for d in (jax.devices("gpu")[0], jax.devices("cpu")[0]))
    for a, b in zip(on_gpu, on_cpu, strict=True):
        np.testing.assert_array_equal(a, b)
print("replayed")
"""


@pytest.mark.jax
def test_command_buffers(gpu: Any) -> None:
    """With every call that may be recorded in a command buffer, even alone, in one."""
    pytest.importorskip("jax", reason="JAX is not installed")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": "--xla_gpu_graph_min_graph_size=1 "
        "--xla_gpu_enable_command_buffer=+CUSTOM_CALL",
    }
    result = subprocess.run(
        [sys.executable, "-c", COMMAND_BUFFERS], env=environment, capture_output=True, text=True
    )
    if "Unable to initialize backend 'cuda'" in result.stderr:
        pytest.skip("JAX sees no GPU")
    assert result.stdout == "replayed\n", result.stderr
