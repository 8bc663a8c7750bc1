# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a wheel installs, that versions agree, and that tools are pinned alike."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import duomoe
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(out), str(ROOT)],
        env=os.environ | {"DUOMOE_CUDA": "0"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("*.whl")
    return built


def test_wheel_installs_exactly_three_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {
        "duomoe",
        "jax_frontend",
        "torch_frontend",
    }
    assert "duomoe/lib/libduomoe.so" in names
    assert "torch_frontend/_binding.so" in names
    assert any(n.startswith("jax_frontend/_binding.") and n.endswith(".so") for n in names)
    assert {"duomoe/py.typed", "jax_frontend/py.typed", "torch_frontend/py.typed"} <= set(names)
    assert not [n for n in names if n.endswith((".cc", ".h", ".cu"))]
    assert wheel.stat().st_size < 5e6


def test_installed_wheel_works(wheel: Path, tmp_path: Path) -> None:
    """From the wheel's own files, without the source tree."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """
import duomoe, jax_frontend, torch, torch_frontend, pathlib
assert pathlib.Path(duomoe.__file__).is_relative_to(pathlib.Path.cwd()), duomoe.__file__
routing = torch_frontend.route(torch.zeros(2, 4), duomoe.RouterConfig(4, 2))
print(routing.indices.tolist())
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "[[0, 1], [0, 1]]", result.stderr


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == duomoe.__version__
    assert f"## {duomoe.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_tools_are_pinned_alike() -> None:
    pins = dict(
        re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    )
    hooks = re.findall(r"\[(\w[\w-]*)==([\w.]+)\]", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks
    for tool, version in hooks:
        assert pins[tool] == version


def test_every_source_file_has_a_licence_line() -> None:
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    sources = [f for f in files if f.endswith((".py", ".pyi", ".cc", ".h", ".cu", ".cuh"))]
    assert len(sources) > 20
    missing = [
        f
        for f in sources
        if "SPDX-License-Identifier: Apache-2.0" not in (ROOT / f).read_text()[:300]
    ]
    assert missing == []
