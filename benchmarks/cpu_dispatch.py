# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and the experts' products on two CPU threads from both front ends, against what one
writes in torch and in JAX. `python benchmarks/cpu_dispatch.py [--json FILE]`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpu_common import REPEATS, THREADS, Run, Times, cpu_model, milliseconds, write_record

# isort: split

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_frontend
import torch_frontend

torch.set_num_threads(THREADS)


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """T tokens of width D to K of E experts and back, weighted."""

    tokens: int
    experts: int
    top_k: int
    width: int
    dtype: str

    @property
    def name(self) -> str:
        """T, E, K, D and the dtype."""
        return f"{self.tokens},{self.experts},{self.top_k},{self.width} {self.dtype}"

    def draw(self) -> tuple[np.ndarray, ...]:
        """x, weights, distinct ids and the cotangent of y."""
        rng = np.random.default_rng(7)
        x, grad = rng.standard_normal((2, self.tokens, self.width)).astype(np.float32)
        weights = rng.random((self.tokens, self.top_k)).astype(np.float32)
        order = rng.random((self.tokens, self.experts)).argsort(axis=1)
        return x, weights, order[:, : self.top_k].astype(np.int32), grad


@dataclasses.dataclass(frozen=True)
class Products:
    """R rows of width D by E matrices of D x N, the rows in equal or in skewed groups."""

    rows: int
    experts: int
    width: int
    columns: int
    dtype: str
    skewed: bool = False
    ragged_dot: bool = False  # which takes a second a call where the others take milliseconds

    @property
    def name(self) -> str:
        """R, E, D, N, the dtype and the groups."""
        size = f"{self.rows},{self.experts},{self.width},{self.columns}"
        return f"{size} {self.dtype}" + " skewed" * self.skewed

    def counts(self) -> list[int]:
        """The experts' rows; skewed, they fall by a sixth from one expert to the next busiest."""
        share = 0.85 ** np.arange(self.experts) if self.skewed else np.ones(self.experts)
        share = np.random.default_rng(6).permutation(share / share.sum())
        counts = np.floor(share * self.rows).astype(int)
        counts[counts.argmax()] += self.rows - counts.sum()
        return counts.tolist()

    def draw(self) -> tuple[np.ndarray, ...]:
        """Rows, matrices and the cotangent of the result."""
        rng = np.random.default_rng(7)
        shape = self.experts, self.width, self.columns
        return (
            rng.standard_normal((self.rows, self.width), np.float32),
            rng.standard_normal(shape, np.float32) / np.float32(self.width) ** 0.5,
            rng.standard_normal((self.rows, self.columns), np.float32),
        )


DISPATCHES = [
    Dispatch(tokens, experts, top_k, width, dtype)
    for tokens, experts, top_k, width in ((4096, 64, 8, 1024), (4096, 8, 2, 512))
    for dtype in ("float32", "bfloat16")
]
PRODUCTS = [
    Products(4096, 64, 256, 512, "float32", ragged_dot=True),
    Products(4096, 64, 256, 512, "float32", skewed=True),
    Products(4096, 16, 512, 1024, "float32", ragged_dot=True),
    Products(32768, 64, 1024, 512, "float32"),
    Products(32768, 64, 1024, 512, "float32", skewed=True),
    Products(4096, 64, 256, 512, "bfloat16"),
    Products(4096, 16, 512, 1024, "bfloat16"),
    Products(32768, 64, 1024, 512, "bfloat16"),
]


# -- dispatch --------------------------------------------------------------------------------------


def torch_dispatch(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted by expert, gathered, weighted, added back: y and where the experts' rows begin."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    offsets = torch.bincount(flat, minlength=experts).cumsum(0)
    tokens = order // ids.shape[1]
    rows = x.index_select(0, tokens)
    weighted = rows * weights.flatten()[order].unsqueeze(1).to(rows.dtype)
    return torch.zeros_like(x).index_add(0, tokens, weighted), offsets


def jax_dispatch(
    x: jax.Array, weights: jax.Array, ids: jax.Array, experts: int
) -> tuple[jax.Array, jax.Array]:
    """The same. The barrier stands for the experts: without it the rows would not be made."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    offsets = jnp.bincount(flat, length=experts).cumsum()
    tokens = order // ids.shape[1]
    rows = jax.lax.optimization_barrier(jnp.take(x, tokens, axis=0))
    weighted = rows * weights.reshape(-1)[order][:, None].astype(rows.dtype)
    return jnp.zeros_like(x).at[tokens].add(weighted), offsets


def ours(frontend: Any, barrier: Callable[[Any], Any]) -> Callable[..., tuple[Any, Any]]:
    """The same from duomoe."""

    def dispatch(x: Any, weights: Any, ids: Any, experts: int) -> tuple[Any, Any]:
        plan = frontend.plan_dispatch(ids, experts)
        rows = barrier(frontend.permute(x, plan))
        return frontend.combine(rows, plan, weights), plan.expert_offsets[1:]

    return dispatch


def dispatch_runs(case: Dispatch) -> dict[str, Run]:
    """{contestant: direction: run}; `both` is forward and backward, to x and the weights."""
    x, weights, ids, grad = case.draw()
    runs: dict[str, Run] = {}
    tx, tg = (torch.from_numpy(a).to(getattr(torch, case.dtype)) for a in (x, grad))
    tw, leaf = torch.from_numpy(weights), tx.clone().requires_grad_()
    leaf_weights = tw.clone().requires_grad_()
    for name, dispatch, tids in (
        ("ours, torch", ours(torch_frontend, lambda rows: rows), torch.from_numpy(ids)),
        ("torch eager", torch_dispatch, torch.from_numpy(ids).long()),
    ):

        def forward(dispatch: Any = dispatch, ids: Any = tids) -> Any:
            with torch.no_grad():
                return dispatch(tx, tw, ids, case.experts)

        def both(dispatch: Any = dispatch, ids: Any = tids) -> Any:
            y, _ = dispatch(leaf, leaf_weights, ids, case.experts)
            return y, *torch.autograd.grad(y, (leaf, leaf_weights), tg)

        runs |= {f"{name}: forward": forward, f"{name}: both": both}

    jx, jg = (jnp.asarray(a).astype(case.dtype) for a in (x, grad))
    jw, jids = jnp.asarray(weights), jnp.asarray(ids)
    for name, dispatch in (
        ("ours, JAX", ours(jax_frontend, jax.lax.optimization_barrier)),
        ("jitted JAX", jax_dispatch),
    ):

        def jax_both(x: Any, w: Any, ids: Any, g: Any, dispatch: Any = dispatch) -> Any:
            y, pull = jax.vjp(lambda x, w: dispatch(x, w, ids, case.experts)[0], x, w)
            return y, *pull(g)

        f, b = jax.jit(dispatch, static_argnums=3), jax.jit(jax_both)
        runs[f"{name}: forward"] = lambda f=f: jax.block_until_ready(f(jx, jw, jids, case.experts))
        runs[f"{name}: both"] = lambda b=b: jax.block_until_ready(b(jx, jw, jids, jg))
    return runs


# -- products --------------------------------------------------------------------------------------


def torch_products(case: Products) -> dict[str, Run]:
    """Ours, and a product per expert into its part of a new tensor."""
    dtype = getattr(torch, case.dtype)
    rows, w, grad = (torch.from_numpy(a).to(dtype) for a in case.draw())
    counts = case.counts()
    ids = torch.arange(case.experts).repeat_interleave(torch.tensor(counts))
    plan = torch_frontend.plan_dispatch(ids[:, None], case.experts)
    place = plan.expert_offsets, plan.expert_counts
    ops = torch.ops.duomoe

    def loop(out: torch.Tensor, per_expert: bool, a: Any, b: Any) -> torch.Tensor:
        parts = out if per_expert else out.split(counts)
        for e, part in enumerate(parts):
            torch.mm(a[e], b[e], out=part)
        return out

    def with_gradients(f: Callable[[Any, Any], Any]) -> Run:
        leaves = rows.clone().requires_grad_(), w.clone().requires_grad_()

        def both() -> Any:
            out = f(*leaves)
            return out, *torch.autograd.grad(out, leaves, grad)

        return both

    def cat(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cat([part @ m for part, m in zip(rows.split(counts), w.unbind(), strict=True)])

    x_of, g_of = rows.split(counts), grad.split(counts)
    empty = torch.empty_like
    return {
        "ours, torch: forward": lambda: ops.grouped_matmul(rows, w, *place, case.dtype),
        "torch loop: forward": lambda: loop(empty(grad), False, x_of, w),
        "ours, torch: bwd_rows": lambda: ops.grouped_matmul_bwd_rows(grad, w, *place, case.dtype),
        "torch loop: bwd_rows": lambda: loop(empty(rows), False, g_of, w.mT),
        "ours, torch: bwd_w": lambda: ops.grouped_matmul_bwd_w(rows, grad, *place, case.dtype),
        "torch loop: bwd_w": lambda: loop(empty(w), True, [x.T for x in x_of], g_of),
        "ours, torch: both": with_gradients(
            lambda rows, w: torch_frontend.grouped_matmul(rows, w, plan)
        ),
        "torch loop: both": with_gradients(cat),
    }


def jax_products(case: Products) -> dict[str, Run]:
    """Ours, and lax.ragged_dot."""
    rows, w, grad = (jnp.asarray(a).astype(case.dtype) for a in case.draw())
    sizes = jnp.array(case.counts(), jnp.int32)
    ids = jnp.repeat(jnp.arange(case.experts, dtype=jnp.int32), sizes)
    plan = jax_frontend.plan_dispatch(ids[:, None], case.experts)
    peers: dict[str, Callable[[Any, Any], Any]] = {
        "ours, JAX": lambda rows, w: jax_frontend.grouped_matmul(rows, w, plan)
    }
    if case.ragged_dot:
        peers["ragged_dot"] = lambda rows, w: jax.lax.ragged_dot(rows, w, sizes)
    runs: dict[str, Run] = {}
    for name, f in peers.items():

        def both(rows: Any, w: Any, grad: Any, f: Any = f) -> Any:
            out, pull = jax.vjp(f, rows, w)
            return out, *pull(grad)

        forward, with_gradients = jax.jit(f), jax.jit(both)
        runs[f"{name}: forward"] = lambda f=forward: jax.block_until_ready(f(rows, w))
        runs[f"{name}: both"] = lambda f=with_gradients: jax.block_until_ready(f(rows, w, grad))
    return runs


# -- checks and report -----------------------------------------------------------------------------


def check(runs: dict[str, Run], case: str, dtype: str) -> None:
    """Every contestant against ours through torch, relative to the largest of a result."""

    def arrays(result: Any) -> list[np.ndarray]:
        parts = result if isinstance(result, tuple) else (result,)
        return [
            np.asarray(p.detach().double() if isinstance(p, torch.Tensor) else p, np.float64)
            for p in parts
        ]

    tolerance = 1e-5 if dtype == "float32" else 4e-2
    wanted: dict[str, list[np.ndarray]] = {}
    for name, run in runs.items():
        direction = name.split(": ")[1]
        got = arrays(run())
        want = wanted.setdefault(direction, got)
        for a, b in zip(got, want, strict=True):
            if not np.abs(a - b).max() <= tolerance * np.abs(b).max():
                raise SystemExit(f"{case}, {name}: differs by {np.abs(a - b).max():.2g}")


PEERS = {
    "torch eager": "ours, torch",
    "torch loop": "ours, torch",
    "jitted JAX": "ours, JAX",
    "ragged_dot": "ours, JAX",
}


def ratio(times: Times, peer: str, direction: str) -> float | None:
    """How many times as fast as a peer ours is."""
    own, other = (times.get(f"{n}: {direction}") for n in (PEERS[peer], peer))
    return other["fastest"] / own["fastest"] if own and other else None


def print_case(case: str, times: Times) -> None:
    """One row per direction: ours through both, each peer and how many times as fast ours is."""
    for direction in ("forward", "bwd_rows", "bwd_w", "both"):
        if f"ours, torch: {direction}" not in times:
            continue
        cells = [
            f"{t['fastest']:8.2f}" if (t := times.get(f"{n}: {direction}")) else " " * 8
            for n in ("ours, torch", "ours, JAX")
        ]
        for peer in PEERS:
            if r := ratio(times, peer, direction):
                other = times[f"{peer}: {direction}"]["fastest"]
                cells.append(f"{peer} {other:8.2f} {r:5.2f}x")
        print(f"{case:36} {direction:8} {'  '.join(cells)}", flush=True)
        case = ""


def main() -> None:
    """Runs everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    print(
        f"{cpu_model()}, {THREADS} threads; ms, fastest of up to {REPEATS * options.rounds}\n"
        f"T,E,K,D or R,E,D,N{'':28} {'ours':>8}  {'ours':>8}\n{'':45} {'torch':>8}  {'JAX':>8}"
    )
    results: dict[str, dict[str, Times]] = {}
    for group, cases in (("dispatch", DISPATCHES), ("products", PRODUCTS)):
        runs_of = {}
        for case in cases:
            if isinstance(case, Dispatch):
                runs = dispatch_runs(case)
            else:
                runs = torch_products(case) | jax_products(case)
            check(runs, case.name, case.dtype)
            runs_of[case.name] = runs
        results[group] = milliseconds(runs_of, options.rounds)
        for name, times in results[group].items():
            print_case(name, times)
    if options.json:
        write_record(options.json, options.rounds, {"milliseconds": results})


if __name__ == "__main__":
    main()
