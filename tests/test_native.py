# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The loops of all instruction sets give the same bits, those of the stated formulas and orders of
sums; no kernel leaves its scratch rows, and tensors may have more than 2^32 elements.
"""

from __future__ import annotations

import ast
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "common" / "csrc"
NEEDED = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq")
NO_ADDRESS_SPACE = 77  # the exit status of large_tensors.cc


def loop_objects() -> list[str]:
    """The built loops of every instruction set; skips where they are missing or cannot run."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    if missing := [f for f in NEEDED if f not in flags]:
        pytest.skip(f"this CPU has no {missing[0]}")
    if not shutil.which("g++"):
        pytest.skip("no g++")
    builds = sorted((ROOT / "build").glob("native-*"), key=lambda p: p.stat().st_mtime)
    if not builds:
        pytest.skip("the core was not built in this tree")
    names = ("base", "avx2", "avx512")
    return [str(builds[-1] / f"common_csrc_cpu_simd_{name}.cc.o") for name in names]


def test_instruction_sets_agree(tmp_path: Path) -> None:
    objects = loop_objects()
    program = tmp_path / "instruction_sets"
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", f"-I{CORE}"]
    source = ROOT / "tests" / "native" / "instruction_sets.cc"
    subprocess.run([*command, str(source), *objects, "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.stdout == "0 different\n", result.stdout


def test_rows_and_statistics_are_as_stated(tmp_path: Path) -> None:
    """Every bit of the router's rows and sums, as the formulas in math/router.h have it."""
    objects = loop_objects()
    library = ROOT / "common" / "duomoe" / "lib" / "libduomoe.so"
    program = tmp_path / "stated_orders"
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", f"-I{CORE}"]
    source = ROOT / "tests" / "native" / "stated_orders.cc"
    linked = [*objects, str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run([*command, str(source), *linked, "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.stdout.endswith(" comparisons, 0 different\n"), result.stdout
    assert int(result.stdout.split()[0]) > 4 * 10**7


def test_more_than_2_to_the_32_elements(tmp_path: Path) -> None:
    library = ROOT / "common" / "duomoe" / "lib" / "libduomoe.so"
    if not library.exists():
        pytest.skip("the core was not built in this tree")
    if not shutil.which("g++"):
        pytest.skip("no g++")
    program = tmp_path / "large_tensors"
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", f"-I{CORE}"]
    source = ROOT / "tests" / "native" / "large_tensors.cc"
    linked = [str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run([*command, str(source), *linked, "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    if result.returncode == NO_ADDRESS_SPACE:
        pytest.skip("this system lends no address space beyond its memory")
    assert result.stdout.endswith(" comparisons, 0 faults\n"), (result.returncode, result.stdout)
    assert int(result.stdout.split()[0]) > 350


SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def setup_tables() -> dict[str, str | dict[str, str]]:
    """The flags in setup.py, which builds when it is imported."""
    statements = ast.parse((ROOT / "setup.py").read_text()).body
    assigned = {ast.unparse(s.targets[0]): s.value for s in statements if isinstance(s, ast.Assign)}
    return {name: ast.literal_eval(assigned[name]) for name in ("CXX_FLAGS", "ISA_FLAGS")}


@pytest.mark.slow
def test_rows_under_sanitizers(tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("no g++")
    probe = tmp_path / "probe.cc"
    probe.write_text("int main() {}")
    command = ["g++", *SANITIZE, str(probe), "-o", str(tmp_path / "probe")]
    if subprocess.run(command).returncode or subprocess.run([str(tmp_path / "probe")]).returncode:
        pytest.skip("g++ has no sanitizers")

    tables = setup_tables()
    flags = [*tables["CXX_FLAGS"].split(), *SANITIZE, "-DDUOMOE_GUARDED_ARENA", f"-I{CORE}"]
    flags.append("-DDUOMOE_STREAMED_BYTES=4096")  # small and large outputs
    # The program stands in for simd.cc.
    left_out = {"simd.cc"}
    if platform.machine() not in ("x86_64", "AMD64"):
        left_out |= set(tables["ISA_FLAGS"])
    sources = [s for s in (*CORE.glob("*.cc"), *CORE.glob("cpu/*.cc")) if s.name not in left_out]

    def build(source: Path) -> str:
        out = str(tmp_path / f"{source.name}.o")
        isa = tables["ISA_FLAGS"].get(source.name, "").split()
        command = ["g++", *flags, '-DDUOMOE_VERSION="0"', *isa, "-c", str(source), "-o", out]
        subprocess.run(command, check=True)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(build, [*sources, ROOT / "tests" / "native" / "guarded_rows.cc"]))
    program = tmp_path / "guarded_rows"
    subprocess.run(["g++", *SANITIZE, *objects, "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith(" 0 faults\n"), result.stdout
