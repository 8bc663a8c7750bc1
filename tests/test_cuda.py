# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels against the CPU kernels, which are the specification: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from adapters import BFLOAT16, DTYPES, JaxAdapter, TorchAdapter, bits
from duomoe import library, ops
from duomoe.config import RouterConfig
from duomoe.functional import plan_rows
from duomoe.results import MoEParams
from duomoe.verification import compare
from duomoe.verification import inputs as generators

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


MISSING = [op for op in ops.table() if not library.has_kernel(op, "cuda")]
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.skipif(bool(MISSING), reason=f"no CUDA kernel for {', '.join(MISSING)}"),
]

FLOATS = [DTYPES["float32"], BFLOAT16, DTYPES["float16"]]
Values = dict[str, Any]
Check = Callable[[str, Values, Values], Values]
Rng = np.random.Generator


def name_of(dtype: np.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def assert_same(expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray]) -> None:
    """The same bits, but for the sign and payload of a NaN, which no standard fixes."""
    for name, a in expected.items():
        b = actual[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if a.dtype in FLOATS:
            nan = np.isnan(a.astype(np.float32))
            np.testing.assert_array_equal(nan, np.isnan(b.astype(np.float32)), err_msg=name)
            a, b = (np.where(nan, np.zeros((), x.dtype), x) for x in (a, b))
        np.testing.assert_array_equal(bits(a), bits(b), err_msg=name)


def checker(reference: Any, other: Any) -> Check:
    """Runs an op on two adapters, compares, and returns the outputs."""

    def check(op: str, inputs: Values, attributes: Values) -> Values:
        expected = reference.call(op, inputs, attributes)
        assert_same(expected, other.call(op, inputs, attributes))
        return expected

    return check


@pytest.fixture(scope="module")
def gpu() -> TorchAdapter:
    return TorchAdapter(device="cuda")


@pytest.fixture(scope="module")
def check(gpu: TorchAdapter) -> Check:
    return checker(TorchAdapter(device="cpu"), gpu)


def normal(rng: Rng, *shape: int, dtype: Any = np.float32, spread: float = 1.0) -> np.ndarray:
    return (spread * rng.standard_normal(shape)).astype(np.float32).astype(dtype)


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


# --- dispatch ------------------------------------------------------------------------------------


def random_ids(rng: Rng, t: int, k: int, e: int) -> np.ndarray:
    """Ids with more slots on low experts, some slots unused, some ids out of range."""
    ids = np.minimum(rng.geometric(1 / (1 + e / 3), (t, k)) - 1, e + 1).astype(np.int32)
    return np.where(rng.random((t, k)) < 0.1, -1, ids)


def plan_attributes(t: int, k: int, e: int, **options: Any) -> Values:
    capacity, alignment = options.get("capacity"), options.get("alignment", 1)
    rows = plan_rows(t * k, e, capacity, alignment, options.pop("max_rows", None))
    defaults = {"capacity": -1, "drop_order": "position", "alignment": 1}
    return {"num_experts": e, "num_rows": rows, **defaults, **options}


@pytest.mark.parametrize("t", [0, 1, 7, 130, 1000])
@pytest.mark.parametrize(("e", "k"), [(1, 1), (5, 5), (8, 2), (64, 6), (256, 8), (896, 16)])
def test_plan_dispatch(check: Check, rng: Rng, t: int, e: int, k: int) -> None:
    ids = random_ids(rng, t, k, e)
    weights = np.round(normal(rng, t, k), 1)  # many ties
    weights[:1] = np.nan
    mean = t * k // e
    for options in (
        {},
        {"alignment": 16, "capacity": mean},
        {"capacity": mean + 1, "alignment": 8, "drop_order": "weight"},
        {"capacity": mean // 2 + 1, "drop_order": "weight"},
        {"capacity": 0, "drop_order": "weight"},
        {"capacity": mean + 1, "drop_order": "weight", "max_rows": t * k // 2},
        {"alignment": 4, "max_rows": t * k // 8 * 4},
        {"max_rows": 0},
    ):
        inputs = {"indices": ids, "weights": weights}
        check("plan_dispatch", inputs, plan_attributes(t, k, e, **options))


def test_plan_dispatch_many_slots_one_expert(check: Check, rng: Rng) -> None:
    t, k, e = 90000, 8, 64  # blocks of more than 512 slots
    ids = np.where(rng.random((t, k)) < 0.9, 5, rng.integers(0, e, (t, k))).astype(np.int32)
    inputs = {"indices": ids, "weights": np.round(normal(rng, t, k), 3)}
    for order in ("position", "weight"):
        check("plan_dispatch", inputs, plan_attributes(t, k, e, capacity=20000, drop_order=order))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("t", "k"), [(0, 2), (1, 1), (7, 3), (130, 4)])
@pytest.mark.parametrize("d", [1, 64, 333, 1000])
def test_rows(check: Check, rng: Rng, dtype: Any, t: int, k: int, d: int) -> None:
    indices = {"indices": random_ids(rng, t, k, 9)}
    plan = check("plan_dispatch", indices, plan_attributes(t, k, 9, capacity=t, alignment=4))
    for broken in (False, True):  # a plan from elsewhere, with numbers out of range
        if broken and t:
            plan["row_of_slot"][0, 0] = 2**31 - 1
            plan["slot_of_row"][0] = t * k
        to_rows = {name: plan[name] for name in ("row_of_slot", "slot_of_row")}
        x, y = (normal(rng, n, d, dtype=dtype) for n in (t, len(plan["slot_of_row"])))
        check("permute", {"x": x, **to_rows}, {})
        check("permute_bwd", {"grad_rows": y, "row_of_slot": plan["row_of_slot"]}, {})
        for w in (None, normal(rng, t, k)):
            check("combine", {"rows": y, **to_rows, "weights": w}, {})
            check("combine_bwd", {"grad_y": x, "rows": y, **to_rows, "weights": w}, {})


@pytest.mark.parametrize(
    ("t", "e"), [(0, 3), (1, 1), (7, 33), (31, 64), (130, 5), (5000, 40), (300, 1000)]
)
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_plan_mask(check: Check, rng: Rng, t: int, e: int, density: float) -> None:
    mask = rng.random((t, e)) < density
    total = int(mask.sum())
    for limit, alignment, part in ((-1, 1, 1), (total // 2, 1, 1), (-1, 8, 1), (-1, 5, 0.5)):
        rows = int((total + e * (alignment - 1)) // alignment * alignment * part)
        attributes = {"num_rows": rows, "limit": limit, "alignment": alignment}
        plan = check("plan_mask", {"routing_map": mask}, {**attributes, "map_width": 2 * e + 1})
        for broken in (False, True):
            if broken and t:
                plan["row_id_map"][::2] = rng.integers(-3, e + 3, (t + 1) // 2)[:, None]
                plan["row_id_map"][0, :e] = 2**31 - 1
            given = {"row_id_map": plan["row_id_map"]}
            sizes = {"num_experts": e, "num_rows": rows}
            check("read_row_map", given, sizes)
            check("read_row_map", {**given, "pad_offsets": plan["pad_offsets"]}, sizes)
        check("invert_rows", {"row_of_slot": plan["row_of_slot"]}, {"num_rows": rows // 2 + 1})


@pytest.mark.parametrize(("t", "k"), [(0, 1), (1, 1), (7, 3), (600, 2), (70000, 3)])
@pytest.mark.parametrize("largest", [5, 3000, 2**31 - 1])
def test_sort_slots(check: Check, rng: Rng, t: int, k: int, largest: int) -> None:
    ids = rng.integers(-largest // 4, largest, (t, k)).astype(np.int32)
    for rows in (t * k, t * k // 2, t * k + 5):
        check("sort_slots", {"indices": ids}, {"num_rows": rows})
    repeated = (ids % max(1, t)).astype(np.int32)
    check("invert_rows", {"row_of_slot": repeated}, {"num_rows": t})


@pytest.mark.parametrize(
    ("t", "c"), [(0, 0), (0, 3), (1, 1), (7, 0), (65, 8), (130, 300), (90000, 2000)]
)
def test_place_chunks(check: Check, rng: Rng, t: int, c: int) -> None:
    wild = rng.choice([2**31 - 1, -(2**31), -1, 0, 1], c)
    for total in (t, t // 2, 2 * t + 3):
        sizes = rng.multinomial(total, np.ones(c) / c) if c else np.zeros(0)
        for order in (rng.permutation(c), rng.integers(-2, c + 2, c)):
            for s in (sizes, np.where(rng.random(c) < 0.3, wild, sizes)):
                inputs = {
                    "split_sizes": s.astype(np.int32),
                    "sorted_indices": order.astype(np.int32),
                }
                check("place_chunks", inputs, {"num_tokens": t})


# --- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(0, 0), (1, 1), (2, 1), (0, 2)])
@pytest.mark.parametrize(
    ("t", "k", "e"), [(0, 1, 3), (1, 1, 1), (7, 3, 5), (130, 2, 8), (60, 4, 64)]
)
@pytest.mark.parametrize(("d", "n"), [(1, 1), (33, 65), (300, 100)])
def test_grouped_matmul(
    check: Check, rng: Rng, dtypes: Any, t: int, k: int, e: int, d: int, n: int
) -> None:
    x_dtype, w_dtype = (FLOATS[i] for i in dtypes)
    indices = {"indices": random_ids(rng, t, k, e)}
    plan = check("plan_dispatch", indices, plan_attributes(t, k, e, alignment=8))
    for broken in (False, True):
        if broken:
            plan["expert_offsets"][1:] += 3
            plan["expert_counts"][::2] = -1
        groups = {name: plan[name] for name in ("expert_offsets", "expert_counts")}
        rows = len(plan["slot_of_row"])
        x, w = normal(rng, rows, d, dtype=x_dtype), normal(rng, e, d, n, dtype=w_dtype)
        if not broken:  # what padding rows hold must not matter
            x[plan["slot_of_row"] < 0] = np.nan
        grad = normal(rng, rows, n, dtype=x_dtype)
        for out in FLOATS:
            inputs = {"rows": x, "w": w, **groups}
            check("grouped_matmul", inputs, {"out_dtype": name_of(out)})
            inputs = {"grad_out": grad, "w": w, **groups}
            check("grouped_matmul_bwd_rows", inputs, {"rows_dtype": name_of(out)})
            inputs = {"rows": x, "grad_out": grad, **groups}
            result = check("grouped_matmul_bwd_w", inputs, {"w_dtype": name_of(out)})
            assert not bits(result["grad_w"][plan["expert_counts"] <= 0]).any()


@pytest.mark.parametrize("gate_dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("t", "d"), [(0, 5), (1, 1), (7, 300), (130, 64), (9000, 3)])
@pytest.mark.parametrize("e", [1, 70])
def test_gate(check: Check, rng: Rng, gate_dtype: Any, t: int, d: int, e: int) -> None:
    for x_dtype, w_dtype in zip(FLOATS, FLOATS[::-1], strict=True):
        x, router = normal(rng, t, d, dtype=x_dtype), normal(rng, d, e, dtype=w_dtype)
        grad = normal(rng, t, e, dtype=gate_dtype)
        gate = {"gate_dtype": name_of(gate_dtype)}
        for bias in (None, normal(rng, e, dtype=w_dtype)):
            check("gate", {"x": x, "router": router, "router_bias": bias}, gate)
        inputs = {"grad_logits": grad, "router": router}
        check("gate_bwd_x", inputs, {**gate, "x_dtype": name_of(x_dtype)})
        kinds = {"router_dtype": name_of(w_dtype), "router_bias_dtype": name_of(x_dtype)}
        check("gate_bwd_params", {"grad_logits": grad, "x": x}, {**gate, **kinds})


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("r", "f"), [(0, 3), (1, 1), (130, 333)])
def test_elementwise(check: Check, rng: Rng, dtype: Any, r: int, f: int) -> None:
    a, b, c = (normal(rng, r, f, dtype=dtype, spread=20.0) for _ in range(3))
    check("add", {"a": a, "b": b}, {})
    check("swiglu", {"gate": a, "up": b}, {})
    check("swiglu_bwd", {"grad_out": c, "gate": a, "up": b}, {})
    for out in FLOATS:
        check("cast", {"x": a * a * a}, {"out_dtype": name_of(out)})


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
    assert all(equal(first, run_block(gpu, x, params)) for _ in range(20))


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
