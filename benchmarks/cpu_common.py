# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the CPU benchmarks share: two threads, contestants that take turns, the record of a run.

To be imported before the frameworks: XLA sizes its pool by the CPUs that it may run on.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

THREADS = 2
WARM_UP, REPEATS = 2, 5  # calls of a contestant in its turn
SLOW = 0.4  # seconds; a contestant that takes longer is called once and timed once
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
os.environ["OMP_NUM_THREADS"] = str(THREADS)

Run = Callable[[], Any]
Times = dict[str, dict[str, float]]


def milliseconds(runs_of: Mapping[str, Mapping[str, Run]], rounds: int) -> dict[str, Times]:
    """{case: {run: fastest and median}}.

    All take turns in every round, so that a slow phase of the machine spoils a round rather than
    a case; each run first wakes its own threads and fills the caches.
    """
    samples: dict[str, dict[str, list[float]]] = {
        case: {name: [] for name in runs} for case, runs in runs_of.items()
    }
    for _ in range(rounds):
        for case, runs in runs_of.items():
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                slow = time.perf_counter() - start > SLOW
                for _ in range(0 if slow else WARM_UP - 1):
                    run()
                for _ in range(1 if slow else REPEATS):
                    start = time.perf_counter()
                    run()
                    samples[case][name].append(1e3 * (time.perf_counter() - start))
    return {
        case: {n: {"fastest": min(s), "median": statistics.median(s)} for n, s in runs.items()}
        for case, runs in samples.items()
    }


def cpu_model() -> str:
    """As /proc/cpuinfo has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def write_record(path: Path, rounds: int, results: Mapping[str, Any]) -> None:
    """Results with date, CPU, threads and versions, as JSON."""
    record = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "threads": THREADS,
        "versions": {name: version(name) for name in ("torch", "jax", "jaxlib")},
        "rounds": rounds,
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
