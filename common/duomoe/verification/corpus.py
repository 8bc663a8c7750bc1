# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Real text that is on every machine: the source files of the Python standard library.

Axis letters: S sequences of a batch, C bytes of context.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
HOLD_OUT = 10  # every tenth file is for evaluation


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The text as bytes.

    Attributes:
        training: [bytes] uint8.
        held_out: [bytes] uint8, of other files.
        files: how many files were read.
        sha256: of everything that was read, so that two runs can be told to have had the same text.
        source: the folder.
    """

    training: np.ndarray
    held_out: np.ndarray
    files: int
    sha256: str
    source: str

    def batches(self, count: int, sequences: int, context: int, seed: int) -> Iterator[np.ndarray]:
        """`count` random batches of the training text, inputs and targets in one: [S, C + 1]."""
        rng = np.random.default_rng(seed)
        for _ in range(count):
            starts = rng.integers(0, len(self.training) - context, sequences)
            yield _windows(self.training, starts, context)

    def evaluation(self, count: int, sequences: int, context: int) -> list[np.ndarray]:
        """`count` batches spread evenly over the held-out text, the same in every run."""
        starts = np.linspace(0, len(self.held_out) - context - 1, count * sequences).astype(int)
        windows = _windows(self.held_out, starts, context)
        return list(windows.reshape(sequences, count, context + 1).swapaxes(0, 1))


def _windows(text: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def standard_library() -> Corpus:
    """Read this interpreter's standard library, by name of file, without its tests.

    Raises:
        FileNotFoundError: this Python comes without its source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(
        p.relative_to(root).as_posix()
        for p in root.rglob("*.py")
        if not EXCLUDED & set(p.relative_to(root).parts)
    )
    if len(names) < HOLD_OUT:
        raise FileNotFoundError(
            f"the demo trains on the standard library's .py files, and {root} has {len(names)}"
        )
    texts = [(root / name).read_bytes() for name in names]
    held_out = b"".join(texts[HOLD_OUT - 1 :: HOLD_OUT])
    training = b"".join(t for i, t in enumerate(texts) if i % HOLD_OUT != HOLD_OUT - 1)
    digest = hashlib.sha256(training)
    digest.update(held_out)
    return Corpus(
        np.frombuffer(training, np.uint8),
        np.frombuffer(held_out, np.uint8),
        len(names),
        digest.hexdigest(),
        str(root),
    )
