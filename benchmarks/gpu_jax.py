# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Device time of calls under JAX, whose stream takes no events of ours.

Two jitted functions hold M and M + N independent calls, each on an input set of its own. The
difference of their wall times, from the call until the results are ready, over N has no cost of
dispatch and waiting in it. What it has besides the device's time is the host's handling of one
call's arrays; and where XLA takes longer to launch a call than the device to run it, the launch is
what it measures. So it is an upper bound of device time, and loose only for the shortest calls.

Command buffers are off in both, since calls that do not depend on each other may overlap in one;
XLA then launches them one after another on one stream. Cold as in gpu_common.py: each set is used
once, and other memory is read before each run.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import torch
from gpu_common import Clock, Time

NO_COMMAND_BUFFERS: tuple[dict[str, Any], ...] = (
    {"xla_gpu_graph_min_graph_size": 10**6},
    {"xla_gpu_enable_command_buffer": ""},
)
ROUNDS = 8  # of each of the two measurements
MAX_CALLS = 16


def to_jax(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same memory as JAX arrays."""
    return tuple(x if x is None else jax.dlpack.from_dlpack(x) for x in inputs)


@functools.cache
def serial() -> dict[str, Any]:
    """The compiler option of this XLA that turns command buffers off."""
    for options in NO_COMMAND_BUFFERS:
        try:
            jax.jit(lambda x: x + 1, compiler_options=options)(1.0)
        except jax.errors.JaxRuntimeError:
            continue
        return options
    raise RuntimeError("XLA knows none of the options that turn command buffers off")


def compiled(f: Callable[..., Any], sets: list[tuple[Any, ...]]) -> Callable[[], Any]:
    """One program of a call on each set."""

    def calls(sets: list[tuple[Any, ...]]) -> list[Any]:
        return [f(*s) for s in sets]

    program = jax.jit(calls, compiler_options=serial())
    return lambda: jax.block_until_ready(program(sets))


def jax_time(
    clock: Clock,
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]],
    nbytes: float,
    slower: float = 1.0,
) -> Time:
    """A call's time; `make` draws (function, arguments on fresh inputs)."""
    calls = min(max(clock.calls(nbytes, slower) // 2, 2), MAX_CALLS) if clock.cuda else 2
    first = calls // 2
    made = [make() for _ in range(first + calls)]
    clock.free()
    sets = [arguments for _, arguments in made]
    f = made[0][0]
    programs = compiled(f, sets[:first]), compiled(f, sets)

    def once(run: Callable[[], Any]) -> float:
        clock.flush()
        clock.synchronize()
        start = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - start)

    for program in programs:
        program()
        program()
    measurements = []
    for _ in range(2):
        few, many = zip(*([once(p) for p in programs] for _ in range(ROUNDS)), strict=True)
        measurements.append((statistics.median(many) - statistics.median(few)) / calls)
    a, b = measurements
    return Time((a + b) / 2, abs(a - b) / max(min(a, b), 1e-9))


def ours(clock: Clock, case: Any) -> Time:
    """Our JAX front end on a case."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        return case.jax_ours, to_jax(fresh(clock, case))

    return jax_time(clock, make, case.set_bytes)


def peer(clock: Clock, case: Any) -> Time:
    """JAX's own ops on a case."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        return case.jax_peer(*to_jax(fresh(clock, case)))

    return jax_time(clock, make, case.set_bytes, slower=20)


def fresh(clock: Clock, case: Any) -> tuple[torch.Tensor | None, ...]:
    """Inputs that torch has finished writing."""
    inputs = case.inputs(clock.device)
    clock.synchronize()
    return inputs
