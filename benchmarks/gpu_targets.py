# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The times that the kernels aim at, and whether a run met them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Mapping[str, Mapping[str, Any]]  # by name of the case, cold


@dataclasses.dataclass(frozen=True)
class Target:
    """At most `us` + `floors` times the floor + `others` times the time of the case `other`."""

    name: str
    us: float = 0.0
    floors: float = 0.0
    other: str = ""

    def limit(self, rows: Rows) -> float | None:
        """In microseconds; None where what it refers to was not measured."""
        limit = self.us
        if self.floors:
            limit += self.floors * rows[self.name]["floor_us"]
        if self.other:
            if self.other not in rows:
                return None
            limit += rows[self.other]["us"]
        return limit

    @property
    def text(self) -> str:
        """The target in words."""
        parts = [f"{self.us:g} us"] * bool(self.us)
        parts += [f"{self.floors:g} floors"] * bool(self.floors)
        return " + ".join(parts + ["float32's time"] * bool(self.other))


TARGETS = [
    Target("route_16384_256_8_sigmoid_bias", us=12),
    Target("route_65536_384_8_sigmoid_bias", us=48),
    Target("route_32768_128_8_softmax", us=16),
    Target("route_8192_8_2_softmax", us=3.5),
    Target("route_16384_256_8_sigmoid_bias_groups", us=16),
    Target("route_16384_896_16_sigmoid_bias", us=10, floors=2.5),
    Target("route_16384_2304_36_sigmoid_bias", us=10, floors=2.5),
    Target("route_bwd_16384_256_8_sigmoid_bias", us=14),
    Target("route_bwd_65536_384_8_sigmoid_bias", us=70),
    *(
        Target(f"{name}_bf16", other=name)
        for op in ("route", "route_bwd")
        for name in (
            f"{op}_16384_256_8_sigmoid_bias",
            f"{op}_65536_384_8_sigmoid_bias",
            f"{op}_32768_128_8_softmax",
        )
    ),
    Target("plan_dispatch_16384_256_8", us=12),
    Target("plan_dispatch_32768_128_8", us=12),
    *(
        Target(f"{op}_{shape}", floors=floors)
        for op, floors in (
            ("permute", 1.10),
            ("permute_bwd", 1.10),
            ("combine", 1.02),
            ("combine_bwd", 1.08),
        )
        for shape in ("16384_256_8_7168", "32768_128_8_4096")
    ),
]
HOST_TARGETS = {"torch: route": 15.0}  # us of the host a call


def judge(
    rows: Rows, host: Mapping[str, Mapping[str, float]], targets: Sequence[Target] = TARGETS
) -> list[dict[str, Any]]:
    """A row for each target; `met` is None where it was not measured."""
    verdicts: list[dict[str, Any]] = []
    for target in targets:
        row = rows.get(target.name)
        limit = target.limit(rows) if row else None
        us = row["us"] if row else None
        verdicts.append(
            {
                "case": target.name,
                "target": target.text,
                "limit_us": limit,
                "us": us,
                "floor_us": row["floor_us"] if row else None,
                "met": None if us is None or limit is None else us <= limit,
            }
        )
    for name, limit in HOST_TARGETS.items():
        us = host[name]["us"] if name in host else None
        verdicts.append(
            {
                "case": f"host overhead, {name}",
                "target": f"{limit:g} us",
                "limit_us": limit,
                "us": us,
                "floor_us": None,
                "met": None if us is None else us <= limit,
            }
        )
    return verdicts
