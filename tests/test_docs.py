# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The docs' Python blocks run, links lead somewhere, and generated pages are up to date."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from duomoe import ops, reference

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples() -> list:
    """The Python blocks of a page; consecutive blocks without an import continue each other."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            if "import" in block or not found:
                found.append((page.name, block))
            else:
                found[-1] = (page.name, found[-1][1] + block)
    return [pytest.param(code, id=f"{name}-{i}") for i, (name, code) in enumerate(found)]


@pytest.mark.parametrize("code", examples())
def test_example_runs(code: str) -> None:
    for framework in ("jax", "torch"):
        if f"{framework}_frontend" in code:
            pytest.importorskip(framework)
    if "transformers" in code:
        pytest.importorskip("transformers")
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "4"},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (page.parent / target).exists(), target


@pytest.mark.torch
@pytest.mark.parametrize("page", reference.PAGES)
def test_reference_is_up_to_date(page: str) -> None:
    pytest.importorskip("torch")
    assert (ROOT / "docs" / page).read_text() == reference.PAGES[page](), "run: make reference"


def test_adding_an_op_names_existing_files() -> None:
    text = (ROOT / "docs" / "adding_an_op.md").read_text()
    names = set(re.findall(r"`((?:common|docs|tests)/[\w/]+\.\w+)`", text))
    assert len(names) >= 6
    assert [n for n in names if not (ROOT / n).exists()] == []


def test_changelog_names_every_op() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert [op for op in ops.table() if "_bwd" not in op and f"`{op}`" not in text] == []


# What docs/numerics.md says of the core's constants: the phrase, the header, the name.
CONSTANTS = (
    (r"(\d+) strided lanes", "math/router.h", "kLanes"),
    (r"(\d+) neighbours", "math/router.h", "kAdjacent"),
    (r"about (\d+) chunks a call", "math/router.h", "kChunks"),
    (r"(\d+) strided streams", "math/router.h", "kStreams"),
    (r"(\d+) strided strands", "math/router.h", "kStrands"),
    (r"±(\d+) for the other scores", "math/scalar.h", "kModerate"),
    (r"log score is below (-\d+)", "math/router.h", "kRescueBelow"),
    (r"the depth of a product: blocks of (\d+)", "cpu/simd.h", "kTileDepth"),
)


@pytest.mark.parametrize("phrase, header, name", CONSTANTS)
def test_numerics_states_the_core_s_constants(phrase: str, header: str, name: str) -> None:
    text = " ".join((ROOT / "docs" / "numerics.md").read_text().split())
    code = (ROOT / "common" / "csrc" / header).read_text()
    (said,) = re.findall(phrase, text)
    (value,) = re.findall(rf"constexpr \w+ {name} = (-?\d+)", code)
    assert said == value
