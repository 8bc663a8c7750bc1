# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The core's inner loops give the same bits on every instruction set that the build compiled."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDED = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq")


def test_instruction_sets_agree(tmp_path: Path) -> None:
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    if missing := [f for f in NEEDED if f not in flags]:
        pytest.skip(f"this CPU has no {missing[0]}")
    if not shutil.which("g++"):
        pytest.skip("no g++")
    builds = sorted((ROOT / "build").glob("native-*"), key=lambda p: p.stat().st_mtime)
    if not builds:
        pytest.skip("the core was not built in this tree")
    objects = [
        str(builds[-1] / f"common_csrc_cpu_simd_{name}.cc.o") for name in ("base", "avx2", "avx512")
    ]
    program = tmp_path / "instruction_sets"
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", f"-I{ROOT / 'common' / 'csrc'}"]
    source = ROOT / "tests" / "native" / "instruction_sets.cc"
    subprocess.run([*command, str(source), *objects, "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.stdout == "0 different\n", result.stdout
