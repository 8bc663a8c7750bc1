# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmarks share: device times, the budget, machine and versions.

Device time of torch calls. A CUDA graph holds N calls on rotating input sets; its replay is timed
by events and divided by N. Before each replay a spinning kernel keeps the device busy, so that the
host has queued the events and the graph when the first event is reached.

- cold: more than 240 MB of inputs and outputs lie between two uses of a set (four times an L2 of
  60 MB), or every set is used once per replay; and 256 MB of other memory are read before it.
- hot: one input set; outputs alternate between two places.

Outputs are kept until their set's next turn, or the allocator would hand the same (hot) memory to
every call.

Two measurements of at least 20 replays each; the time is the median of all, the spread the
difference of the two medians over the smaller.

On a CPU (a dry run of the code paths) the same functions measure wall time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Run = Callable[..., Any]
MakeSet = Callable[[], Run]  # draws fresh inputs; what it returns calls the op on them

COLD_BYTES = 4 * 60e6  # between two uses of a set
FLUSH_BYTES = 2**28
REPLAYS = 20  # of each of the two measurements
GRAPH_US = 400.0  # a graph should last so long, that launching it does not count
LONGEST_US = 8000.0  # and no longer than this, of an op that is slower than its bytes say
MIN_CALLS, MAX_CALLS = 4, 128
HOST_US = 20_000.0  # at most this long does one sample of host time take
REPORT_SECONDS = 3.0  # for the plot and the tables
SPIN_CYCLES = 300_000  # about 150 us


@dataclasses.dataclass(frozen=True)
class Time:
    """Microseconds a call; spread of two measurements as a fraction."""

    us: float
    spread: float


def of_two(first: Sequence[float], second: Sequence[float], calls: int) -> Time:
    """From the microseconds of two measurements of `calls` calls."""
    a, b = statistics.median(first), statistics.median(second)
    both = statistics.median([*first, *second])
    return Time(both / calls, abs(a - b) / max(min(a, b), 1e-9))


class Skip(Exception):
    """Raised where a measurement takes too long."""


class Budget:
    """Seconds from now on; what does not fit is skipped by name."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.start = seconds, time.perf_counter()
        self.after_phase: Run = lambda: None
        self.skipped: list[str] = []
        self.failed: dict[str, str] = {}
        self.phases: dict[str, float] = {}

    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def left(self) -> float:
        """Seconds until the report should be made."""
        return self.seconds - REPORT_SECONDS - self.spent()

    def allows(self, name: str, need: float = 0.5) -> bool:
        """Whether `need` seconds are left; if not, `name` counts as skipped."""
        if self.left() >= need:
            return True
        self.skipped.append(name)
        return False

    def phase(self, name: str, run: Run, *arguments: Any) -> None:
        """Run a part of the benchmark and note its seconds."""
        start = self.spent()
        run(*arguments)
        self.phases[name] = self.spent() - start
        self.after_phase()

    def guard(self, name: str, run: Run, *arguments: Any) -> Any:
        """What `run` returns; None, and a note, where it raises."""
        try:
            return run(*arguments)
        except Skip as reason:
            self.skipped.append(f"{name} ({reason})")
            return None
        except Exception as error:  # one contestant's failure must not cost the other rows
            # A capture that breaks off reports itself; what broke it is the context.
            chain = [e for e in (error, error.__context__) if e is not None]
            self.failed[name] = "; during ".join(
                " ".join(f"{type(e).__name__}: {e}"[:300].split()) for e in chain
            )
            return None


class Clock:
    """Reads device time on a GPU, wall time on a CPU."""

    def __init__(self, device: str) -> None:
        self.device, self.cuda = device, device == "cuda"
        self.ceiling = 1e3  # bytes per microsecond; measured by measure_ceiling
        if self.cuda:
            self._stream = torch.cuda.Stream()
            self._other = torch.ones(FLUSH_BYTES // 4, device="cuda")

    def flush(self) -> None:
        """Read 256 MB, which leaves nothing else in the L2 cache and no dirty lines."""
        if self.cuda:
            self._other.amax()

    def synchronize(self) -> None:
        """Wait for torch's device."""
        if self.cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give torch's unused memory back."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def measure_ceiling(self) -> float:
        """Bytes per microsecond of an elementwise kernel over 8.6 GB, reads and writes counted."""
        n = 2**30 if self.cuda else 2**20
        a = torch.empty(n, device=self.device).normal_()
        b = torch.empty_like(a)
        took = self.time(lambda: lambda: torch.neg(a, out=b), 8 * n, hot=True)
        self.ceiling = 8 * n / took.us
        return self.ceiling

    def calls(self, nbytes: float, slower: float = 1.0) -> int:
        """Calls a graph should hold of an op that moves `nbytes`, `slower` times the usual."""
        guess = (2 * nbytes / 4e6 + 3) * slower
        return min(max(round(GRAPH_US / guess), MIN_CALLS), MAX_CALLS)

    def time(self, make: MakeSet, nbytes: float, *, hot: bool = False, slower: float = 1.0) -> Time:
        """A call's time. nbytes: of the inputs and outputs of a set."""
        calls = self.calls(nbytes, slower) if self.cuda else 2
        sets = 1 if hot else min(calls, int(COLD_BYTES / max(nbytes, 1)) + 2)
        if not self.cuda:
            return self._wall([make() for _ in range(sets)], calls)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        # Here too what autograd will run: a backward pass runs on its forward's stream.
        with torch.cuda.stream(self._stream):
            runs = [make() for _ in range(sets)]
            runs[0]()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            runs[0]()
            end.record()
        torch.cuda.synchronize()
        slowest = max(start.elapsed_time(end) * 1e3, 1.0)  # the host's part included
        calls = max(min(calls, round(LONGEST_US / slowest)), 1)
        kept: list[Any] = [None] * sets
        # Not torch.cuda.graph, which collects garbage and empties the allocator's cache each time.
        # Thread-local: threads of JAX and of autograd may call what a capture forbids.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(calls):
                    kept[i % sets] = runs[i % sets]()
            finally:
                graph.capture_end()
        for _ in range(3):
            graph.replay()
        first, second = ([self._replay(graph, hot) for _ in range(REPLAYS)] for _ in range(2))
        kept.clear()
        runs.clear()
        graph.reset()
        if sets * nbytes > 1e9:
            torch.cuda.empty_cache()
        return of_two(first, second, calls)

    def _replay(self, graph: torch.cuda.CUDAGraph, hot: bool) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if not hot:
            self.flush()
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def _wall(self, runs: list[Run], calls: int) -> Time:
        def once() -> float:
            start = time.perf_counter()
            for i in range(calls):
                runs[i % len(runs)]()
            return 1e6 * (time.perf_counter() - start)

        once()
        first, second = ([once() for _ in range(2)] for _ in range(2))
        return of_two(first, second, calls)


def host_time(clock: Clock, run: Run, calls: int, wait: Callable[[Any], Any]) -> dict[str, float]:
    """Wall microseconds a call of many asynchronous ones: `us` until the host has issued it, `done`
    until all results are there (`wait` waits for one).

    The device must not be slower than the host, or its full queue makes the host wait; `done` is
    much larger than `us` then.
    """

    def once(calls: int) -> tuple[float, float]:
        clock.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            last = run()
        issued = time.perf_counter()
        wait(last)
        return 1e6 * (issued - start), 1e6 * (time.perf_counter() - start)

    once(1)
    calls = max(min(calls, int(HOST_US / once(1)[1])), 2)
    issued, done = zip(*(once(calls) for _ in range(10)), strict=True)
    took = of_two(issued[::2], issued[1::2], calls)
    return {"us": took.us, "spread": took.spread, "done": statistics.median(done) / calls}


# -- record ----------------------------------------------------------------------------------------


def machine(clock: Clock) -> dict[str, Any]:
    """Device, driver, versions, date."""
    import duomoe
    import jax
    import jaxlib

    device, driver = "cpu, a dry run", None
    if clock.cuda:
        device = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "driver": driver,
        "versions": {
            "duomoe": duomoe.__version__,
            "torch": torch.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "cuda": torch.version.cuda,
        },
    }


def write_json(path: Path, record: Any) -> None:
    """Floats to five digits."""

    def short(x: Any) -> Any:
        if isinstance(x, float):
            return float(f"{x:.5g}")
        if isinstance(x, dict):
            return {k: short(v) for k, v in x.items()}
        return [short(v) for v in x] if isinstance(x, list | tuple) else x

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(short(record), indent=1) + "\n")


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as their cells; the first is flush left."""

    def cell(x: Any) -> str:
        if x is None:
            return "-"
        if isinstance(x, float):
            return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.3g}" if abs(x) < 10 else f"{x:.1f}"
        return str(x)

    cells = [list(heads), *([cell(x) for x in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  "
        + "  ".join(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))
        for row in cells
    )
