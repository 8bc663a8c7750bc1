# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Router, losses, plan and row movement on a GPU from both front ends, beside the memory floor and
what one writes in torch and JAX: `python benchmarks/gpu_bench.py --out DIR`.

Prints tables and writes gpu_bench.json, gpu_bench.txt (all rows) and bandwidth.svg. `--quick`: the
targets alone. `--seconds`, from the end of the imports: what does not fit is skipped by name.
`--one route_16384_256_8`: that call five times, for a profiler (`ncu --profile-from-start off`).
`--device cpu --tiny`: the code paths without a GPU; its times say nothing of one. How times are
taken stands in gpu_common.py and gpu_jax.py.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU's memory is shared

import dataclasses

import gpu_dispatch
import gpu_host
import gpu_jax
import gpu_router
import gpu_scaling
import torch
from gpu_common import Budget, Clock, Skip, Time, machine, table, write_json
from gpu_targets import judge
from peers import torch_router

EAGER, COMPILED, JAX_OURS, JAX_PEER = "torch eager", "torch.compile", "ours, JAX", "JAX's own ops"
COMPILE_SECONDS = 30.0  # of one function


class Bench:
    """One run: the rows so far, by name and state of the L2 cache."""

    def __init__(self, clock: Clock, budget: Budget, tiny: bool) -> None:
        self.clock, self.budget, self.tiny = clock, budget, tiny
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        self.names: dict[str, str] = {}

    def scaled(self, case: Any) -> Any:
        """The case, or a small one in its place."""
        if not self.tiny:
            return case
        small = {"tokens": min(case.tokens, 48)}
        if getattr(case, "width", 0):
            small["width"] = 16
        return dataclasses.replace(case, **small)

    def row(self, case: Any, l2: str = "cold") -> dict[str, Any]:
        """The case's row, made where there is none."""
        return self.rows.setdefault(
            (case.name, l2),
            {
                "name": case.name,
                "op": case.op,
                "shape": case.shape,
                "dtype": case.dtype,
                "values": case.values,
                "l2": l2,
                "floor_us": self.scaled(case).floor_bytes / self.clock.ceiling,
            },
        )

    def ours(self, cases: Sequence[Any], l2: str = "cold") -> None:
        """Our times through torch."""
        for case in cases:
            label = f"{case.name} {l2}"
            if (case.name, l2) in self.rows or not self.budget.allows(label):
                continue
            took = self.budget.guard(label, self._torch, case, l2)
            if took:
                row = self.row(case, l2)
                row.update({"us": took.us, "spread": took.spread})
                if row["floor_us"]:
                    row["ours/floor"] = took.us / row["floor_us"]
                    row["GB/s"] = self.scaled(case).floor_bytes / took.us / 1e3

    def _torch(self, case: Any, l2: str) -> Time:
        case = self.scaled(case)

        def make() -> Any:
            return case.torch_ours(*case.inputs(self.clock.device))

        return self.clock.time(make, case.set_bytes, hot=l2 == "hot")

    def other(self, column: str, cases: Sequence[Any], need: float, timer: Any) -> None:
        """Times of another contestant, cold; `timer` takes a case."""
        for case in cases:
            label = f"{case.name}, {column}"
            if not self.budget.allows(label, need):
                continue
            took = self.budget.guard(label, timer, self.scaled(case))
            if took:
                self.row(case).update({column: took.us, f"{column} spread": took.spread})
        self.clock.free()

    def eager(self, case: Any, router: Any = torch_router) -> Time:
        """Torch's own ops."""

        def make() -> Any:
            return case.torch_peer(*case.inputs(self.clock.device), router=router)

        return self.clock.time(make, case.set_bytes, slower=20)

    def compiled(self, case: Any) -> Time:
        """The same compiled.

        Raises:
            Skip: compiling took too long.
        """
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False  # the backward pass runs many times
        router = torch.compile(torch_router, dynamic=False)
        limit, late = max(min(COMPILE_SECONDS, self.budget.left() - 4), 1), []

        def stop(*_: Any) -> None:
            late.append(True)
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, stop)
        # Again and again, since an exception in a finaliser is dropped.
        signal.setitimer(signal.ITIMER_REAL, limit, 1.0)
        try:
            case.torch_peer(*case.inputs(self.clock.device), router=router)()
        except Exception:
            if late:  # dynamo may have wrapped what `stop` raised
                raise Skip(f"not compiled in {limit:.0f} s") from None
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return self.eager(case, router)


# -- phases ----------------------------------------------------------------------------------------


def target_cases() -> list[Any]:
    """What the targets are about."""
    return [
        *gpu_router.main_cases(),
        *gpu_dispatch.plan_cases(),
        *gpu_dispatch.move_cases(),
        *gpu_dispatch.loss_cases(),
    ]


def all_cases() -> list[Any]:
    """Every case, those of the targets first."""
    return [
        *target_cases(),
        *gpu_router.other_values(),
        *gpu_router.size_cases(),
        *gpu_dispatch.other_values(),
        *(case for cases in gpu_scaling.lines().values() for case in cases),
    ]


def with_peers() -> dict[str, list[Any]]:
    """Cases by contestant; of those that must compile, the main shapes."""

    def routes(op: str, *numbers: int, dtype: str = "float32") -> list[Any]:
        return [gpu_router.RouteCase(op, *gpu_router.MAIN[n], dtype=dtype) for n in numbers]

    half = routes("route", 0, dtype="bfloat16")  # the peers widen bfloat16 first
    route = [*routes("route", 0, 1, 2, 3, 4), *half, *routes("route_bwd", 0, 1, 2, 3)]
    plans, moves = gpu_dispatch.plan_cases(), gpu_dispatch.move_cases()
    return {
        EAGER: [*route, *plans, *moves, *gpu_dispatch.loss_cases()],
        JAX_OURS: [*route, *plans, *moves],
        JAX_PEER: [
            *routes("route", 0, 2),
            *plans[:2],
            *moves[:4],
            *routes("route_bwd", 0),
            *moves[-4:],
            *routes("route", 3, 4),
        ],
        COMPILED: [
            *routes("route", 0),
            *routes("route_bwd", 0),
            *routes("route", 2, 3, 1),
            *half,
            *routes("route_bwd", 1, 2, 3),
        ],
    }


def measure(bench: Bench, found: dict[str, Any], quick: bool) -> None:
    """All phases, what matters most first; what is no row goes into `found`."""
    budget, clock = bench.budget, bench.clock
    budget.phase("copy ceiling", clock.measure_ceiling)
    budget.phase("targets", bench.ours, target_cases())
    budget.phase("host", lambda: found["host"].update(gpu_host.measure(clock, budget)))
    if quick:
        return
    peers = with_peers()
    largest = 64 if bench.tiny else gpu_scaling.TOKENS[-1]
    budget.phase(
        "scaling", lambda: found["scaling"].extend(gpu_scaling.measure(clock, budget, largest))
    )
    hot = [*gpu_router.main_cases(), *gpu_dispatch.plan_cases()]
    budget.phase("hot", bench.ours, hot, "hot")
    values = [*gpu_router.other_values(), *gpu_dispatch.other_values()]
    budget.phase("values", bench.ours, values)
    budget.phase("sizes", bench.ours, gpu_router.size_cases())
    for column, need, timer in (  # `need` seconds must be left: some for the phases after it
        (EAGER, 1.0, bench.eager),
        (JAX_OURS, 2.0, functools.partial(gpu_jax.ours, clock)),
        (JAX_PEER, 45.0, functools.partial(gpu_jax.peer, clock)),
        (COMPILED, 8.0, bench.compiled),
    ):
        budget.phase(column, bench.other, column, peers[column], need, timer)


def one(name: str, clock: Clock, tiny: bool) -> None:
    """Five calls on fresh inputs, and nothing else, between profiler start and stop."""
    cases = all_cases()
    fits = [c for c in cases if c.name == name] or [
        c for c in cases if c.name.startswith(f"{name}_")
    ]
    if not fits:
        raise SystemExit(f"no case {name!r}; --list names them")
    case = Bench(clock, Budget(60), tiny).scaled(fits[0])
    runs = [case.torch_ours(*case.inputs(clock.device)) for _ in range(5)]
    clock.synchronize()
    if clock.cuda:
        torch.cuda.profiler.start()
    for run in runs:
        run()
    clock.synchronize()
    if clock.cuda:
        torch.cuda.profiler.stop()
    print(f"{case.name}: five calls")


# -- report ----------------------------------------------------------------------------------------


CONTESTANTS = {JAX_OURS: "JAX", EAGER: "eager", COMPILED: "compile", JAX_PEER: "JAX ops"}


def label(row: dict[str, Any]) -> str:
    """A row's case in few words."""
    dtype = {"float32": "f32", "bfloat16": "bf16"}.get(row["dtype"], "")
    values = row["values"] if row["values"] != "normal" else ""
    return " ".join(filter(None, (row["op"], row["shape"], dtype, values)))


def rows_table(rows: Sequence[dict[str, Any]], full: bool) -> str:
    """Ours through torch, cold and hot, the floor, and who else was measured."""
    hot = {r["name"]: r.get("us") for r in rows if r["l2"] == "hot"}
    cold = [r for r in rows if r["l2"] == "cold"]
    others = {c: head for c, head in CONTESTANTS.items() if any(c in r for r in cold)}
    keys = ["us", *["spread"] * full, "floor_us", "ours/floor", "GB/s", *others]
    names = {"us": "torch", "floor_us": "floor", "ours/floor": "x floor", **others}
    heads = ["us, of a cold L2 but for `hot`", *(names.get(k, k) for k in keys)]
    body = [[label(r), *(r.get(k) for k in keys)] for r in cold]
    for line, row in zip(body, cold, strict=True):
        line.insert(2, hot.get(row["name"]))
    return table([*heads[:2], "hot", *heads[2:]], body)


def report(record: dict[str, Any], full: bool) -> str:
    """The record as text: all rows where `full`, else those with a peer, and no spreads."""
    versions = ", ".join(f"{n} {v}" for n, v in record["versions"].items())
    parts = [
        f"{record['device']}, driver {record['driver']}; {versions}; {record['date']}; "
        f"copy ceiling {record['copy ceiling GB/s']:.0f} GB/s; us"
    ]
    rows = record["rows"]
    main = {case.name for case in target_cases()}
    shown = rows if full else [r for r in rows if r["name"] in main]
    parts.append(rows_table(shown, full))
    if spreads := sorted((r["spread"], r["name"]) for r in rows if "spread" in r):
        (middle, _), (largest, name) = spreads[len(spreads) // 2], spreads[-1]
        parts.append(
            f"spread of two measurements: median {middle:.1%}, largest {largest:.1%} ({name})"
        )
    if full and record["scaling"]:
        keys = ("what", "tokens", "us", "spread", "floor_us", "GB/s")
        parts.append(table(keys, [[r[k] for k in keys] for r in record["scaling"]]))
    host = [[n, t["us"], t["done"], t["spread"]] for n, t in record["host"].items()]
    heads = [f"host us a call, {gpu_host.SHAPE}", "issued", "done", "spread"]
    parts.append(table(heads, host))
    columns = ("target", "limit_us", "us", "floor_us")
    words = {True: "yes", False: "NO", None: "not measured"}
    verdicts = [[v["case"], *(v[k] for k in columns), words[v["met"]]] for v in record["targets"]]
    parts.append(table(["target", "", "limit", "ours", "floor", "met"], verdicts))
    if record["failed"]:
        parts.append("failed:\n" + "\n".join(f"  {k}: {v}" for k, v in record["failed"].items()))
    if record["skipped"]:
        text = "; ".join(record["skipped"][: None if full else 8])
        parts.append(f"{len(record['skipped'])} skipped for want of time: {text}")
    phases = ", ".join(f"{n} {s:.1f}" for n, s in record["seconds"].items())
    parts.append(f"seconds: {phases}")
    return "\n\n".join(parts)


def main() -> int:
    """Runs everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="the targets alone")
    parser.add_argument("--seconds", type=float, help="skip what does not fit (140; quick: 24)")
    parser.add_argument("--one", help="a case's name: call it five times and leave")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few tokens, to try the code paths")
    options = parser.parse_args()
    if options.list:
        print("\n".join(dict.fromkeys(case.name for case in all_cases())))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; --device cpu --tiny tries the code paths")
    warnings.filterwarnings("ignore", module="torch")
    torch.manual_seed(20260)
    clock = Clock(options.device)
    if options.one:
        one(options.one, clock, options.tiny)
        return 0
    budget = Budget(options.seconds or (24 if options.quick else 140))
    bench = Bench(clock, budget, options.tiny)
    gc.collect()
    gc.freeze()
    found: dict[str, Any] = {"host": {}, "scaling": []}

    def record() -> dict[str, Any]:
        rows = list(bench.rows.values())
        cold = {r["name"]: r for r in rows if r["l2"] == "cold" and "us" in r}
        return {
            **about,
            "copy ceiling GB/s": clock.ceiling / 1e3,
            "rows": rows,
            **found,
            # A dry run judges nothing.
            "targets": judge(cold, found["host"]) if clock.cuda else judge({}, {}),
            "failed": budget.failed,
            "skipped": budget.skipped,
            "seconds": budget.phases,
        }

    about, path = machine(clock), options.out / "gpu_bench.json"
    budget.after_phase = lambda: write_json(path, record())  # so that a killed run leaves something
    measure(bench, found, options.quick)
    (options.out / "gpu_bench.txt").write_text(report(record(), full=True) + "\n")
    if found["scaling"]:
        gpu_scaling.plot(options.out / "bandwidth.svg", found["scaling"], record())
    print(report(record(), full=False))
    return int(any(not name.endswith((EAGER, COMPILED, JAX_PEER)) for name in budget.failed))


if __name__ == "__main__":
    raise SystemExit(main())
