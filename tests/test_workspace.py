# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Memory that CUDA kernels take beside their tensors: declared by each, lent by the caller, in JAX
as one result more. What a kernel really takes shows on a GPU only (tests/test_cuda*.py).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from duomoe import RouterConfig, library, ops

ROOT = Path(__file__).parents[1]
CORE = ROOT / "common" / "csrc"


def test_declared_and_lent(tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("no g++")
    builds = sorted((ROOT / "build").glob("native-*"), key=lambda p: p.stat().st_mtime)
    if not builds:
        pytest.skip("the core was not built in this tree")
    objects = [str(o) for o in builds[-1].glob("common_csrc_*.cc.o")]
    program = tmp_path / "workspace"
    command = ["g++", "-std=c++20", "-O1", f"-I{CORE}"]
    source = ROOT / "tests" / "native" / "workspace.cc"
    linked = [*objects, "-lpthread", "-ldl"]
    subprocess.run([*command, str(source), *linked, "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.stdout == "0 faults\n", result.stdout


def test_every_kernel_that_takes_scratch_memory_declares_it() -> None:
    definition = r"^(?:\w[^\n;{}]*? \**)?(\w+)\(([^;{}]*)\) \{\n(.*?)^\}"
    declared: set[str] = set()
    taking: set[str] = set()
    for path in (CORE / "cuda").glob("*.cu"):
        text = path.read_text()
        declared |= set(re.findall(r"^DUOMOE_WORKSPACE\(kCuda, (\w+)\)", text, re.M))
        takers = {"queue.scratch"}
        while True:
            found = {
                parameters.removeprefix("kCuda, ") if name == "DUOMOE_KERNEL" else name
                for name, parameters, body in re.findall(definition, text, re.M | re.S)
                if any(re.search(rf"\b{re.escape(t)}[(<]", body) for t in takers)
            }
            if found <= takers:
                break
            takers |= found
        taking |= takers & set(ops.table())
    assert taking == declared


# --- JAX -----------------------------------------------------------------------------------------

BYTES = 777


@pytest.fixture
def lending(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """JAX's front end as with CUDA kernels that all take a workspace."""
    jax = pytest.importorskip("jax")
    from jax_frontend import _binding

    monkeypatch.setattr(_binding, "has_workspace", lambda op: True)
    monkeypatch.setattr(_binding, "workspace_bytes", lambda *call: BYTES)
    jax.clear_caches()
    yield jax
    jax.clear_caches()


CONFIG = RouterConfig(num_experts=8, top_k=2, score="sigmoid", scale=1.75)


def routed(logits: Any) -> tuple[Any, ...]:
    import jax_frontend

    routing = jax_frontend.route(logits, CONFIG)
    return routing.weights, routing.indices, routing.expert_counts


@pytest.mark.jax
def test_jax_drops_the_workspace(
    lending: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax_frontend import _binding

    jax = lending
    x = rng.standard_normal((3, 12, 8)).astype(np.float32)
    cotangent = rng.standard_normal((12, 2)).astype(np.float32)

    def gradient(logits: Any) -> Any:
        return jax.grad(lambda z: (routed(z)[0] * cotangent).sum())(logits)

    def results() -> list[np.ndarray]:
        found = [*jax.jit(routed)(x[0]), jax.jit(gradient)(x[0]), *jax.vmap(routed)(x)]
        return [np.asarray(r) for r in found]

    text = jax.jit(routed).lower(x[0]).as_text()
    assert f"tensor<{BYTES}xui8>" in text and "duomoe.route.scratch" not in text
    with_workspace = results()
    jax.clear_caches()
    monkeypatch.setattr(_binding, "has_workspace", lambda op: False)
    assert f"tensor<{BYTES}xui8>" not in jax.jit(routed).lower(x[0]).as_text()
    for a, b in zip(with_workspace, results(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.jax
def test_jax_lends_symbolic_shapes_their_workspace_run_by_run(lending: Any, rng: Any) -> None:
    jax = lending
    from jax import export

    (tokens,) = export.symbolic_shape("T")
    checks = [export.DisabledSafetyCheck.custom_call("duomoe.route.scratch")]
    spec = jax.ShapeDtypeStruct((tokens, 8), np.float32)
    exported = export.export(jax.jit(routed), disabled_checks=checks)(spec)
    assert "duomoe.route.scratch" in exported.mlir_module()
    x = rng.standard_normal((12, 8)).astype(np.float32)
    for a, b in zip(exported.call(x), routed(x), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.jax
@pytest.mark.skipif(not library.has_kernel("route", "cuda"), reason="built without CUDA")
def test_jax_asks_the_core_for_the_size() -> None:
    pytest.importorskip("jax")
    from jax_frontend import _binding

    names = list(ops.table())

    def size(op: str, *shapes: Any, dtypes: Any, attributes: Any = ()) -> int:
        return _binding.workspace_bytes(names.index(op), shapes, dtypes, attributes)

    assert not _binding.has_workspace(names.index("permute"))
    f32, i32 = 0, 3
    matmul = ((40, 16), (50, 16, 8), (51,), (50,), None)
    rows = size("grouped_matmul", *matmul, dtypes=(f32, f32, i32, i32, -1), attributes=(f32,))
    assert rows > 0 and rows % 256 == 0
    quantile = ((300,), (300, 20), (), ())
    options = {"dtypes": (f32, i32, f32, f32), "attributes": (2, 0.5)}
    assert size("update_expert_bias_by_quantile", *quantile, **options) == -(-300 * 8 // 256) * 256
    with pytest.raises(RuntimeError, match="bin_counts must have shape"):
        size("update_expert_bias_by_quantile", (300,), (301, 20), (), (), **options)
