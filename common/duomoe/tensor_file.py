# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Named NumPy arrays in safetensors files, bit for bit.

Only safetensors' own checks and writer are used, not its NumPy views: those know bfloat16 in some
releases alone. https://github.com/huggingface/safetensors describes the format: 8 bytes with the
length of a JSON header, the header, the tensors' bytes; little-endian, as is every machine that the
core is built for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# By the format's tag; what torch and JAX both have.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "BF16": BFLOAT16,
    "F16": np.dtype("float16"),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U64": np.dtype("uint64"),
    "U32": np.dtype("uint32"),
    "U16": np.dtype("uint16"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
HEADER_NAME = "__metadata__"  # the format's own entry beside the tensors

FilePath = str | os.PathLike


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise ImportError(
            "duomoe's files need safetensors, which is not installed; "
            "install it: pip install 'safetensors>=0.4'"
        ) from None
    return safetensors


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """A plain dict of str to str; TypeError for anything else."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict of str to str, got {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must be a dict of str to str, got {key!r}: {value!r}")
    return dict(metadata)


def write(path: FilePath, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays of the dtypes above; OSError if the file cannot be written."""
    library = _safetensors()
    if HEADER_NAME in tensors:
        raise ValueError(f"{HEADER_NAME!r} is safetensors' own name; no tensor may have it")
    # The writer takes a pointer and a length: strides would be lost.
    dense = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    try:
        library.numpy.save_file(dense, path, metadata=dict(metadata) or None)
    except library.SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None


def read(path: FilePath) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """A file's arrays by name, sorted, and its metadata.

    The arrays own their memory: the file may be overwritten afterwards.

    Raises:
        ValueError: that names the file, if it is no safetensors file, is cut short, or holds a
            dtype other than those above.
        OSError: if it cannot be opened.
    """
    library = _safetensors()
    with open(path, "rb") as file:
        try:
            # Checks the header: offsets without gaps or overlaps, sizes that fit shapes and file.
            with library.safe_open(path, framework="np"):
                pass
        except library.SafetensorError as error:
            raise ValueError(f"{path} is no complete safetensors file: {error}") from None
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        metadata = header.pop(HEADER_NAME, None) or {}
        return {name: _array(file, start, name, header[name]) for name in sorted(header)}, metadata


def _array(file: Any, start: int, name: str, entry: Mapping[str, Any]) -> np.ndarray:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(
            f"{file.name}: tensor {name!r} has dtype {entry['dtype']}; allowed: {', '.join(DTYPES)}"
        )
    begin, end = entry["data_offsets"]
    file.seek(start + begin)
    raw = np.empty(end - begin, np.uint8)
    if file.readinto(raw) != raw.size:
        raise ValueError(f"{file.name} is no complete safetensors file: tensor {name!r} is cut")
    if dtype == np.bool_ and raw.size and raw.max() > 1:
        raise ValueError(f"{file.name}: tensor {name!r} is BOOL and holds bytes other than 0 and 1")
    return raw.view(dtype).reshape(entry["shape"])
