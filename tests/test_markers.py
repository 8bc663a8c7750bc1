# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""`pytest -m cuda` collects files by name, so that it imports nothing that only others need."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import ON_DEVICE

FILES = {path.stem: path.read_text() for path in Path(__file__).parent.glob("test_*.py")}


def test_files_that_run_on_the_gpu_exist() -> None:
    assert set(ON_DEVICE) <= set(FILES)


def test_gpu_tests_are_in_files_that_are_collected() -> None:
    marked = {n for n, text in FILES.items() if re.search(r"mark\.cuda\b|import.*\bMARKS\b", text)}
    assert marked - {"test_markers"} <= {n for n in FILES if n.startswith("test_cuda")}
    assert {"test_cuda", "test_cuda_large", "test_cuda_streams"} <= marked
