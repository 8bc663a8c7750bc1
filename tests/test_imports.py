# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What an import loads, and what it says when something is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_shared_package_imports_no_framework() -> None:
    loaded = run(
        "import duomoe, duomoe.functional, duomoe.oracle, duomoe.cli, duomoe.convert\n"
        "import duomoe.replay, duomoe.hf_weights, sys; print(*sys.modules)"
    ).split()
    assert not {"jax", "torch", "flax", "safetensors"} & set(loaded)


@pytest.mark.parametrize(
    ("package", "other"), [("jax_frontend", "torch"), ("torch_frontend", "jax")]
)
def test_front_end_does_not_import_the_other_framework(package: str, other: str) -> None:
    pytest.importorskip(package.split("_")[0])
    assert other not in run(f"import {package}, sys; print(*sys.modules)").split()


def test_front_end_does_not_import_flax() -> None:
    pytest.importorskip("jax")
    assert "flax" not in run("import jax_frontend, sys; print(*sys.modules)").split()


@pytest.mark.parametrize("module", ["jax_frontend.linen", "jax_frontend.nnx"])
def test_missing_flax(module: str) -> None:
    pytest.importorskip("jax")
    message = run(
        f"""
import sys
sys.modules["flax"] = None
try:
    import {module}
except ImportError as error:
    print(error)
"""
    )
    wanted = f"{module} needs flax 0.12.8 or newer: pip install 'flax>=0.12.8'"
    assert message.strip() == wanted


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_missing_framework(framework: str) -> None:
    message = run(
        f"""
import sys
sys.modules[{framework!r}] = None
try:
    import {framework}_frontend
except ImportError as error:
    print(error)
"""
    )
    expected = (
        f"{framework}_frontend needs {framework}, which is not installed; install it, then run in "
        "duomoe's source folder: pip install --force-reinstall --no-deps --no-build-isolation ."
    )
    assert message.strip() == expected


def test_files_need_safetensors() -> None:
    message = run(
        """
import sys
sys.modules["safetensors"] = None
from duomoe import convert
try:
    convert.save_file({}, "never.safetensors")
except ImportError as error:
    print(error)
"""
    )
    assert message.strip() == (
        "duomoe's files need safetensors, which is not installed; "
        "install it: pip install 'safetensors>=0.4'"
    )


HIDE_BINDING = {
    "jax": "sys.modules['jax_frontend._binding'] = None",
    "torch": """
import torch
def gone(path): raise OSError(f"{path}: cannot open shared object file")
torch.ops.load_library = gone
""",
}


@pytest.mark.parametrize("framework", HIDE_BINDING)
def test_missing_binding(framework: str) -> None:
    pytest.importorskip(framework)
    hide = HIDE_BINDING[framework]
    message = run(
        f"import sys\n{hide}\n"
        f"try:\n    import {framework}_frontend\nexcept ImportError as e:\n    print(e)"
    )
    assert f"{framework}_frontend was installed without a {framework} binding that fits" in message
    assert "pip install --force-reinstall --no-deps --no-build-isolation ." in message


def test_version_mismatch_and_missing_library() -> None:
    message = run(
        """
from importlib import metadata
metadata.version = lambda name: "9.9.9"
try:
    import jax_frontend
except ImportError as error:
    print(error)
from duomoe import library
import pathlib
library.load.cache_clear()
library.PATH = pathlib.Path("libduomoe.so")
try:
    library.load()
except ImportError as error:
    print(error)
"""
    )
    assert "duomoe 9.9.9 found a core library of version" in message
    assert "duomoe's core library is missing (libduomoe.so); reinstall duomoe with pip" in message
