# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Route forward and backward on two CPU threads against the same maths in torch and JAX: times,
growth with the number of tokens, and memory. `python benchmarks/cpu_route.py [--json FILE]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpu_common import REPEATS, THREADS, Run, Times, cpu_model, milliseconds, write_record

# isort: split

import jax
import jax.numpy as jnp
import numpy as np
import torch
from duomoe import RouterConfig
from peers import jax_router, torch_router

import jax_frontend
import torch_frontend

torch.set_num_threads(THREADS)
DEEPSEEK = RouterConfig(
    256, 8, score="sigmoid", num_groups=8, group_top_k=4, group_score_k=2, eps=1e-20, scale=2.5
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """T tokens, the router's options, the dtype of the logits, whether there is a bias."""

    config: RouterConfig
    bias: bool = False
    dtype: str = "float32"
    tokens: int = 4096

    @property
    def name(self) -> str:
        """T, E, K and what the options say."""
        c = self.config
        parts = [f"{self.tokens},{c.num_experts},{c.top_k}", c.score + "+bias" * self.bias]
        if c.num_groups > 1:
            parts.append(f"groups {c.num_groups}/{c.group_top_k}")
        return " ".join([*parts, self.dtype])

    def draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Normal logits, and a bias that is 0 where the case has none."""
        rng = np.random.default_rng(7)
        z = rng.standard_normal((self.tokens, self.config.num_experts)).astype(np.float32)
        b = rng.standard_normal(self.config.num_experts).astype(np.float32)
        return z, 0.1 * self.bias * b

    def cotangents(self, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        """Of weights, score_sums and logsumexp_sq; the same for an expert in any slot."""
        rng = np.random.default_rng(8)
        g = rng.standard_normal((self.tokens, self.config.num_experts)).astype(np.float32)
        sums = rng.standard_normal(self.config.num_experts).astype(np.float32)
        return np.take_along_axis(g, ids.astype(np.int64), axis=1), sums, np.array(0.3, np.float32)


MAIN = Shape(DEEPSEEK, bias=True)
SHAPES = [
    MAIN,
    dataclasses.replace(MAIN, dtype="bfloat16"),
    Shape(RouterConfig(256, 8, score="sigmoid", eps=1e-20), bias=True),
    Shape(RouterConfig(256, 8, score="sqrtsoftplus", eps=1e-20), bias=True),
    Shape(RouterConfig(256, 1, normalize=False)),
    Shape(RouterConfig(256, 32)),
    Shape(RouterConfig(8, 2)),
    Shape(RouterConfig(64, 6)),
    Shape(RouterConfig(128, 8)),
    Shape(RouterConfig(384, 8, score="sigmoid", eps=1e-20), bias=True),
    Shape(RouterConfig(896, 16, score="sigmoid", eps=1e-20), bias=True),
]


# -- ours, with the outputs of the peers -----------------------------------------------------------


def torch_ours(z: torch.Tensor, bias: torch.Tensor | None, c: RouterConfig) -> tuple[Any, ...]:
    """What torch_router returns."""
    r = torch_frontend.route(z, c, bias=bias)
    return r.weights, r.score_sums[0], r.logsumexp_sq[0], r.indices, r.expert_counts


def jax_ours(z: jax.Array, bias: jax.Array | None, c: RouterConfig) -> tuple[Any, ...]:
    """What jax_router returns."""
    r = jax_frontend.route(z, c, bias=bias)
    return r.weights, r.score_sums[0], r.logsumexp_sq[0], r.indices, r.expert_counts


# -- what is timed ---------------------------------------------------------------------------------


def torch_runs(shape: Shape, compiled: bool) -> dict[str, Run]:
    """{contestant and direction: run}."""
    z, b = (torch.from_numpy(x) for x in shape.draw())
    z = z.to(getattr(torch, shape.dtype))
    routers: dict[str, tuple[Callable[..., Any], Any]] = {
        "ours, torch": (torch_ours, b if shape.bias else None),
        "torch eager": (torch_router, b),
    }
    if compiled:
        routers["torch.compile"] = torch.compile(torch_router, dynamic=False), b
    runs: dict[str, Run] = {}
    for name, (router, bias) in routers.items():

        def forward(router: Any = router, bias: Any = bias) -> Any:
            with torch.no_grad():
                return router(z, bias, shape.config)

        x = z.clone().requires_grad_()
        *outputs, ids, _ = router(x, bias, shape.config)
        cotangents = [torch.from_numpy(g) for g in shape.cotangents(ids.numpy())]

        def backward(x: Any = x, outputs: Any = outputs, cotangents: Any = cotangents) -> Any:
            return torch.autograd.grad(outputs, x, cotangents, retain_graph=True)

        runs[f"{name}: forward"], runs[f"{name}: backward"] = forward, backward
    return runs


def jax_runs(shape: Shape) -> dict[str, Run]:
    """{contestant and direction: run}.

    `vjp` is forward and backward in one jitted function; `backward` is the pullback alone, whose
    residuals are its inputs.
    """
    z, b = (jnp.asarray(x) for x in shape.draw())
    z = z.astype(shape.dtype)
    runs: dict[str, Run] = {}
    for name, router, bias in (
        ("ours, JAX", jax_ours, b if shape.bias else None),
        ("jitted JAX", jax_router, b),
    ):

        def all_outputs(z: Any, bias: Any, router: Any = router) -> Any:
            return router(z, bias, shape.config)

        def floats(z: Any, bias: Any, router: Any = router) -> Any:
            return router(z, bias, shape.config)[:3]

        forward = jax.jit(all_outputs)
        _, pull = jax.jit(lambda z, b, f=floats: jax.vjp(lambda x: f(x, b), z))(z, bias)
        g = tuple(map(jnp.asarray, shape.cotangents(np.asarray(forward(z, bias)[3]))))
        backward = jax.jit(lambda pull, g: pull(g))
        both = jax.jit(lambda z, b, g, f=floats: jax.vjp(lambda x: f(x, b), z)[1](g))
        runs[f"{name}: forward"] = lambda f=forward, b=bias: jax.block_until_ready(f(z, b))
        runs[f"{name}: backward"] = lambda f=backward, p=pull, g=g: jax.block_until_ready(f(p, g))
        runs[f"{name}: vjp"] = lambda f=both, b=bias, g=g: jax.block_until_ready(f(z, b, g))
    return runs


def check(name: str, got: Any, want: Any) -> None:
    """Ours against a peer: ids but where rounding orders near ties, then the floats."""
    ids = [np.sort(np.asarray(x[3]), axis=1) for x in (got, want)]
    same = (ids[0] == ids[1]).all(axis=1)
    if same.mean() < 0.999:
        raise SystemExit(f"{name}: {(~same).sum()} of {len(same)} tokens have other experts")
    for got_x, want_x in zip(got[:3], want[:3], strict=True):
        a, b = np.asarray(got_x, np.float64), np.asarray(want_x, np.float64)
        if a.ndim == 2:
            a, b = np.sort(a, axis=1)[same], np.sort(b, axis=1)[same]
        np.testing.assert_allclose(a, b, rtol=1e-4, err_msg=name)


def check_gradients(name: str, got: Any, want: Any, tolerance: float) -> None:
    """Ours against a peer, relative to the largest; near ties move a few tokens."""
    a, b = (np.asarray(x, np.float64) for x in (got, want))
    near = np.abs(a - b) <= tolerance * np.abs(b).max()
    if near.all(axis=1).mean() < 0.999:
        raise SystemExit(f"{name}: gradients differ by up to {np.abs(a - b).max():.2g}")


def checked_runs(shape: Shape, compiled: bool) -> dict[str, Run]:
    """All runs of a shape, after their results were compared."""
    runs = torch_runs(shape, compiled) | jax_runs(shape)
    tolerance = 1e-4 if shape.dtype == "float32" else 1e-2
    for ours, peers in (
        ("ours, torch", ["torch eager", *["torch.compile"] * compiled]),
        ("ours, JAX", ["jitted JAX"]),
    ):
        for peer in peers:
            check(f"{shape.name}, {peer}", runs[f"{ours}: forward"](), runs[f"{peer}: forward"]())
    grads = [runs[f"{n}: backward"]()[0].float() for n in ("ours, torch", "torch eager")]
    check_gradients(f"{shape.name}, torch", *grads, tolerance)
    grads = [runs[f"{n}: vjp"]()[0].astype("float32") for n in ("ours, JAX", "jitted JAX")]
    check_gradients(f"{shape.name}, JAX", *grads, tolerance)
    return runs


# -- growth and memory -----------------------------------------------------------------------------


def growth(rounds: int) -> list[dict[str, float]]:
    """Nanoseconds per token of the main case for a growing number of tokens."""
    runs_of = {}
    for tokens in (256, 1024, 4096, 16384, 65536):
        runs = torch_runs(dataclasses.replace(MAIN, tokens=tokens), compiled=False)
        runs_of[str(tokens)] = {n.split(": ")[1]: r for n, r in runs.items() if "ours" in n}
    return [
        {"tokens": int(case), **{n: t["fastest"] * 1e6 / int(case) for n, t in times.items()}}
        for case, times in milliseconds(runs_of, rounds).items()
    ]


def status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def extra_memory(shape: Shape) -> dict[str, int]:
    """Bytes by which a call raises the peak of the resident set, less its outputs."""
    extra = {}
    for name, run in torch_runs(shape, compiled=False).items():
        if not name.startswith("ours"):
            continue
        run()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = status("VmRSS")
        outputs = run()
        peak = status("VmHWM")
        size = sum(o.numel() * o.element_size() for o in outputs)
        extra[name.split(": ")[1]] = max(0, peak - before - size)
    return extra


def memory_in_subprocess(shape: Shape) -> dict[str, int]:
    """extra_memory in a process that has done nothing else."""
    command = [sys.executable, __file__, "--memory", str(shape.tokens)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


# -- report ----------------------------------------------------------------------------------------


def print_shape(name: str, t: Times) -> None:
    """One row per direction: times, and how many times as fast ours are."""
    for direction in ("forward", "backward", "vjp"):
        cells = []
        for peer, ours in (
            ("torch eager", "ours, torch"),
            ("torch.compile", "ours, torch"),
            ("jitted JAX", "ours, JAX"),
        ):
            a, b = t.get(f"{ours}: {direction}"), t.get(f"{peer}: {direction}")
            cells.append(
                f"{b['fastest']:8.2f} {b['fastest'] / a['fastest']:5.1f}x" if a and b else " " * 15
            )
        own = [t.get(f"{o}: {direction}", {}).get("fastest") for o in ("ours, torch", "ours, JAX")]
        ours_cells = " ".join(f"{x:7.3f}" if x else " " * 7 for x in own)
        print(f"{name:46} {direction:8} {ours_cells}  {'  '.join(cells)}", flush=True)
        name = ""


def main() -> None:
    """Runs everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(extra_memory(dataclasses.replace(MAIN, tokens=options.memory))))
        return
    warnings.filterwarnings("ignore", module="torch")
    print(f"{cpu_model()}, {THREADS} threads; ms, fastest of {REPEATS * options.rounds}; T,E,K")
    print(
        f"{'':46} {'':8} {'ours':>7} {'ours':>7}  {'torch eager':>15}  {'torch.compile':>15}"
        f"  {'jitted JAX':>15}\n{'':46} {'':8} {'torch':>7} {'JAX':>7}"
    )
    runs_of = {shape.name: checked_runs(shape, compiled=shape == MAIN) for shape in SHAPES}
    shapes = milliseconds(runs_of, options.rounds)
    for name, times in shapes.items():
        print_shape(name, times)
    rows = growth(options.rounds)
    print(
        "ns per token: "
        + ", ".join(f"T={r['tokens']} {r['forward']:.0f}/{r['backward']:.0f}" for r in rows)
    )
    memory = {t: memory_in_subprocess(dataclasses.replace(MAIN, tokens=t)) for t in (4096, 65536)}
    print(f"bytes beyond inputs and outputs: {memory}")
    if options.json:
        write_record(
            options.json,
            options.rounds,
            {"milliseconds": shapes, "nanoseconds_per_token": rows, "extra_bytes": memory},
        )


if __name__ == "__main__":
    main()
