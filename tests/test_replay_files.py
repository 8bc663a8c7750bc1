# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routing records: made, cut, joined, kept in files."""

from __future__ import annotations

import copy
import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from duomoe import RoutingRecord, tensor_file
from hypothesis import given, settings
from hypothesis import strategies as st

IDS = np.array(
    [[[0, 3], [2, -1]], [[1, 2], [3, 0]], [[3, 3], [0, 1]]], np.int32
)  # [3 tokens, 2 layers, 2]
LAYERS = ("a.moe", "b.moe")
RECORD = RoutingRecord.from_array(
    IDS, 4, layers=LAYERS, mask=np.array([True, False, True]), metadata={"run": "7", "ü": ""}
)


def equal(a: RoutingRecord, b: RoutingRecord) -> bool:
    masks = (a.mask is None) == (b.mask is None) and (a.mask is None or (a.mask == b.mask).all())
    fields = ("layers", "num_experts", "metadata")
    return bool(
        masks
        and all(getattr(a, name) == getattr(b, name) for name in fields)
        and a.indices.dtype == b.indices.dtype == np.int32
        and np.array_equal(a.indices, b.indices)
    )


@st.composite
def records(draw: st.DrawFn) -> RoutingRecord:
    tokens, layers, top_k = (
        draw(st.integers(0, 4)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    num_experts = draw(st.sampled_from([1, 4, 300, 2**31 - 1]))
    shape = (tokens, layers, top_k)
    size = tokens * layers * top_k
    ids = draw(st.lists(st.integers(-1, num_experts - 1), min_size=size, max_size=size))
    names = draw(st.lists(st.text(max_size=3), min_size=layers, max_size=layers, unique=True))
    mask = draw(st.none() | st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    return RoutingRecord(
        np.array(ids, np.int32).reshape(shape),
        names,
        num_experts,
        None if mask is None else np.array(mask, bool),
        draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)),
    )


@given(records())
@settings(max_examples=100, deadline=None)
def test_files_keep_every_record(
    tmp_path_factory: pytest.TempPathFactory, record: RoutingRecord
) -> None:
    path = tmp_path_factory.mktemp("records") / "r"
    record.save(path)
    loaded = RoutingRecord.load(path)
    assert equal(loaded, record)
    cut = record.num_tokens // 2
    assert equal(RoutingRecord.concatenate([loaded[:cut], loaded[cut:]]), record)


def test_file_is_what_the_docs_say(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    RECORD.save(tmp_path / "r")
    with safetensors.safe_open(tmp_path / "r", framework="np") as file:
        assert sorted(file.keys()) == ["indices", "mask"]
        assert np.array_equal(file.get_tensor("indices"), IDS)
        assert file.get_tensor("mask").tolist() == [True, False, True]
        header = file.metadata()
    assert json.loads(header.pop("layers")) == list(LAYERS)
    assert json.loads(header.pop("user")) == {"run": "7", "ü": ""}
    assert header == {"format": "duomoe.routing", "version": "1", "num_experts": "4"}


HEADER = {
    "format": "duomoe.routing",
    "version": "1",
    "num_experts": "4",
    "layers": '["a.moe", "b.moe"]',
}
# What differs from a good file: its tensors, its header, and what the error says.
WRONG_FILES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another format": ({}, {"format": "pt"}, "its format must be 'duomoe.routing', got 'pt'"),
    "no format": ({}, {"format": None}, "its format must be 'duomoe.routing', got None"),
    "a later version": ({}, {"version": "2"}, "its version must be '1', got '2'"),
    "no ids": ({"indices": None}, {}, "tensors must be indices, and mask or none, got mask"),
    "one tensor more": ({"weights": IDS}, {}, "got indices, mask, weights"),
    "int64 ids": ({"indices": IDS.astype(np.int64)}, {}, "indices must be int32, got int64"),
    "rank 2": ({"indices": IDS[0]}, {}, r"indices must have shape \[T, L, K\] .* got \[2, 2\]"),
    "no K": ({"indices": IDS[..., :0]}, {}, r"K at least 1, got \[3, 2, 0\]"),
    "int8 mask": ({"mask": np.ones(3, np.int8)}, {}, "mask must be bool, got int8"),
    "a short mask": (
        {"mask": np.ones(2, bool)},
        {},
        r"mask must have shape \[T\] = \[3\], got \[2",
    ),
    "too few experts": (
        {},
        {"num_experts": "3"},
        "token 0, layer 'a.moe', slot 1 has expert id 3; allowed are 0 to 2, and -1",
    ),
    "an id below -1": ({"indices": IDS - 1}, {}, "token 0, layer 'b.moe', slot 1 has expert id -2"),
    "no experts": ({}, {"num_experts": "0"}, "num_experts must be between 1 and 2147483647, got 0"),
    "experts in words": ({}, {"num_experts": "four"}, "num_experts must be a JSON int, got 'four'"),
    "a bool of experts": ({}, {"num_experts": "true"}, "num_experts must be a JSON int"),
    "experts not given": ({}, {"num_experts": None}, "num_experts must be a JSON int, got None"),
    "one layer": ({}, {"layers": '["a"]'}, r"with L = 1 layers .* got \[3, 2, 2\]"),
    "a layer twice": ({}, {"layers": '["a", "a"]'}, "layers must differ, got 'a' twice"),
    "layers by number": ({}, {"layers": "[0, 1]"}, "layers must be a sequence of str, got 0"),
    "layers in words": ({}, {"layers": '"ab"'}, "layers must be a JSON list, got '\"ab\"'"),
    "a list of metadata": ({}, {"user": "[]"}, r"user must be a JSON dict, got '\[\]'"),
    "numbers as metadata": ({}, {"user": '{"a": 1}'}, "metadata must be a dict of str to str"),
    "deep JSON": ({}, {"user": "[" * 100_000}, "user must be a JSON dict"),
}


@pytest.mark.parametrize("tensors, header, message", WRONG_FILES.values(), ids=WRONG_FILES)
def test_wrong_file(
    tmp_path: Path, tensors: dict[str, Any], header: dict[str, Any], message: str
) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / "r"
    good = {"indices": IDS, "mask": np.ones(3, bool)}
    tensor_file.write(path, good, HEADER)
    assert RoutingRecord.load(path).metadata == {}
    written = {name: array for name, array in (good | tensors).items() if array is not None}
    tensor_file.write(path, written, {k: v for k, v in (HEADER | header).items() if v is not None})
    with pytest.raises(ValueError, match=message) as caught:
        RoutingRecord.load(path)
    assert str(caught.value).startswith(str(path))


def test_truncated_file(tmp_path: Path) -> None:
    RECORD.save(tmp_path / "r")
    (tmp_path / "r").write_bytes((tmp_path / "r").read_bytes()[:-1])
    with pytest.raises(ValueError, match="/r is no complete safetensors file"):
        RoutingRecord.load(tmp_path / "r")


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
def test_from_layers(framework: str, dtype: str) -> None:
    module = pytest.importorskip(framework)
    ids = IDS.copy()
    if dtype == "uint8":
        ids[ids < 0] = 1
    arrays = {name: ids[:, i].astype(dtype).reshape(3, 1, 2) for i, name in enumerate(LAYERS)}
    if framework == "torch":
        arrays = {name: module.from_numpy(array) for name, array in arrays.items()}
    if framework == "jax":
        with module.enable_x64(True):
            arrays = {name: module.numpy.asarray(array) for name, array in arrays.items()}
            assert next(iter(arrays.values())).dtype.name == dtype
    mask = np.array([[True], [True], [False]])
    record = RoutingRecord.from_layers(arrays, 4, mask=mask, metadata={"x": "y"})
    assert record.layers == LAYERS and record.num_experts == 4 and record.metadata == {"x": "y"}
    assert record.indices.dtype == np.int32 and np.array_equal(record.indices, ids)
    assert record.mask is not None and record.mask.tolist() == [True, True, False]


def test_from_array() -> None:
    by_layer = RoutingRecord.from_array(IDS.swapaxes(0, 1).astype(np.int64), 4, layer_axis=0)
    assert by_layer.layers == ("0", "1") and np.array_equal(by_layer.indices, IDS)
    assert by_layer.indices.flags.c_contiguous
    assert by_layer.num_tokens == 3 and by_layer.top_k == 2
    empty = RoutingRecord.from_array(np.zeros((0, 2, 8), np.uint8), 4)
    assert empty.num_tokens == 0 and empty.pad(2).mask.tolist() == [False, False]


WRONG_IDS = {
    "int64 that int32 would wrap": (np.int64, 2**32 + 1),
    "uint64 beyond int64": (np.uint64, 2**64 - 1),
    "255 as uint8": (np.uint8, 255),
    "the number of experts": (np.int16, 200),
    "below -1": (np.int8, -2),
}


@pytest.mark.parametrize("dtype, wrong", WRONG_IDS.values(), ids=WRONG_IDS)
def test_ids_out_of_range(dtype: Any, wrong: int) -> None:
    ids = np.zeros((3, 2, 2), dtype)
    ids[2, 1, 0] = wrong
    where = f"slot 0 has expert id {wrong}; allowed are 0 to 199, and -1 for an unused slot"
    with pytest.raises(ValueError, match=f"token 2, layer 'b.moe', {where}"):
        RoutingRecord.from_array(ids, 200, layers=LAYERS)
    with pytest.raises(ValueError, match=f"token 2, layer '1', {where}"):
        RoutingRecord.from_array(ids.swapaxes(0, 1), 200, layer_axis=0)
    with pytest.raises(ValueError, match=f"token 2, layer 'b.moe', {where}"):
        RoutingRecord.from_layers(dict(zip(LAYERS, ids.swapaxes(0, 1), strict=True)), 200)
    with pytest.raises(ValueError, match=f"token 2, layer 'b.moe', {where}"):
        RoutingRecord(ids, LAYERS, 200)


X = np.zeros((3, 2), np.int32)
WRONG_LAYERS: dict[str, tuple[Any, type[Exception], str]] = {
    "another T": (
        {"a": X, "b": X[:2]},
        ValueError,
        r"layer 'b' has \(T, K\) = \(2, 2\), layer 'a'",
    ),
    "another K": ({"a": X, "b": X[:, :1]}, ValueError, r"layer 'b' has \(T, K\) = \(3, 1\)"),
    "floats": ({"a": X, "b": X + 0.5}, TypeError, "layer 'b' must be integers, got float64"),
    "bools": ({"a": X > 0}, TypeError, "layer 'a' must be integers, got bool"),
    "a list": ({"a": [[0]]}, TypeError, "layer 'a' must be a NumPy, JAX or torch array, got list"),
    "rank 0": ({"a": X[0, 0]}, ValueError, r"layer 'a' must have shape \[..., K\] .* got \[\]"),
    "no K": ({"a": X[:, :0]}, ValueError, r"with K at least 1, got \[3, 0\]"),
    "no layer": ({}, ValueError, "layers must name at least one layer"),
    "numbered": ({0: X}, TypeError, "layers must be a sequence of str, got 0"),
    "no dict": ([X], TypeError, "layers must be a dict of arrays by name, got list"),
}


@pytest.mark.parametrize("layers, error, message", WRONG_LAYERS.values(), ids=WRONG_LAYERS)
def test_layers_that_do_not_fit(layers: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RoutingRecord.from_layers(layers, 4)


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"indices must have 3 axes, \[T, L, K\], got \[3, 2\]"):
        RoutingRecord.from_array(X, 4)
    with pytest.raises(ValueError, match=r"with L = 1 layers and K .* got \[3, 2, 2\]"):
        RoutingRecord.from_array(IDS, 4, layers=["a"])
    with pytest.raises(TypeError, match="layers must be a sequence of str, got 'ab'"):
        RoutingRecord.from_array(IDS, 4, layers="ab")
    with pytest.raises(ValueError, match="layer_axis must be between 0 and 1, got 2"):
        RoutingRecord.from_array(IDS, 4, layer_axis=2)
    with pytest.raises(TypeError, match="num_experts must be an int, got '4'"):
        RoutingRecord.from_array(IDS, "4")
    with pytest.raises(TypeError, match="mask must be bool, got int64"):
        RoutingRecord.from_array(IDS, 4, mask=np.ones(3, np.int64))
    with pytest.raises(TypeError, match="metadata must be a dict of str to str, got 'step': 3"):
        RoutingRecord.from_array(IDS, 4, metadata={"step": 3})
    with pytest.raises(TypeError, match="RoutingRecord cannot be unpacked by position; read its"):
        _indices, *_ = RECORD
    with pytest.raises(AttributeError):
        RECORD.num_experts = 5


def test_records_own_their_ids() -> None:
    ids, mask = IDS.copy(), np.ones(3, bool)
    record = RoutingRecord.from_array(ids, 4, mask=mask)
    layers = RoutingRecord.from_layers({"a": ids[:, 0]}, 4, mask=mask)
    ids[:], mask[:] = 0, False
    for kept in (record, layers):
        assert kept.indices[0, 0].tolist() == [0, 3] and kept.mask.all()
        with pytest.raises(ValueError, match="read-only"):
            kept.indices[0] = 0
        with pytest.raises(ValueError, match="read-only"):
            kept.mask[0] = False
    layer = record.layer("0")
    layer[:] = 9  # a copy
    assert record.indices.max() == 3


@pytest.mark.parametrize(
    "tokens",
    [
        slice(1, None),
        slice(None, None, -2),
        slice(5, 9),
        [2, 0, 2],
        [],
        np.array([-1], np.int8),
        np.array([True, False, True]),
    ],
    ids=str,
)
def test_tokens(tokens: Any) -> None:
    some = RECORD[tokens]
    index = np.array(tokens, int) if isinstance(tokens, list) else tokens
    assert np.array_equal(some.indices, IDS[index])
    assert np.array_equal(some.mask, RECORD.mask[index])
    assert some.layers == LAYERS and some.metadata == RECORD.metadata
    assert np.shares_memory(some.indices, RECORD.indices) == (
        isinstance(tokens, slice) and some.num_tokens > 0
    )


@pytest.mark.parametrize("tokens", [1, (0, 1), [[0]], [0.5], "a", None], ids=repr)
def test_no_tokens(tokens: Any) -> None:
    with pytest.raises(TypeError, match="a record is indexed by tokens: a slice, or a one-dim"):
        RECORD[tokens]


def test_token_out_of_range() -> None:
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        RECORD[[3]]


def test_concatenate_and_pad() -> None:
    plain = RoutingRecord(IDS, LAYERS, 4, metadata={"run": "7", "part": "2"})
    both = RoutingRecord.concatenate([RECORD, plain])
    assert np.array_equal(both.indices, np.concatenate([IDS, IDS]))
    assert both.mask.tolist() == [True, False, True, True, True, True]
    assert both.metadata == {"run": "7"}
    assert RoutingRecord.concatenate(iter([plain, plain])).mask is None
    padded = plain.pad(2)
    assert padded.mask.tolist() == [True, True, True, False, False]
    assert (padded.indices[3:] == -1).all() and np.array_equal(padded.indices[:3], IDS)
    assert padded.metadata == plain.metadata
    assert plain.pad(0) is plain
    assert RECORD.pad(1).mask.tolist() == [True, False, True, False]
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        plain.pad(-1)
    with pytest.raises(ValueError, match="records must hold at least one record"):
        RoutingRecord.concatenate([])
    with pytest.raises(TypeError, match=r"records\[1\] must be a RoutingRecord, got ndarray"):
        RoutingRecord.concatenate([plain, IDS])


@pytest.mark.parametrize(
    "other, message",
    [
        (
            RoutingRecord(IDS, ("a", "b"), 4),
            r"records\[1\] has layers = \('a', 'b'\), records\[0\]",
        ),
        (RoutingRecord(IDS[:, :, :1], LAYERS, 4), r"has top_k = 1, records\[0\] 2; they must be"),
        (RoutingRecord(IDS, LAYERS, 5), r"has num_experts = 5, records\[0\] 4"),
    ],
)
def test_records_of_other_models(other: RoutingRecord, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutingRecord.concatenate([RECORD, other])


def test_layers() -> None:
    assert RECORD.layer("b.moe").tolist() == IDS[:, 1].tolist()
    swapped = RECORD.select_layers(["b.moe", "a.moe"])
    assert swapped.layers == ("b.moe", "a.moe")
    assert np.array_equal(swapped.indices, IDS[:, ::-1])
    for wrong in (lambda: RECORD.layer("c"), lambda: RECORD.select_layers(["a.moe", "c"])):
        with pytest.raises(ValueError, match=r"there is no layer 'c'; there are a\.moe, b\.moe"):
            wrong()
    with pytest.raises(TypeError, match=r"layers must be a sequence of str, got 'a\.moe'"):
        RECORD.select_layers("a.moe")


def test_copies_and_pickles() -> None:
    assert equal(copy.deepcopy(RECORD), RECORD)
    assert equal(pickle.loads(pickle.dumps(RECORD)), RECORD)


def test_large_records_take_little_memory(tmp_path: Path) -> None:
    """Beside the ids given and the int32 ids kept there is no third copy, nor one of int64."""
    ids = np.zeros((100_000, 8, 8), np.uint8)
    kept = ids.size * 4
    tracemalloc.start()
    try:
        record = RoutingRecord.from_array(ids, 4)
        assert tracemalloc.get_traced_memory()[1] < 1.1 * kept
        tracemalloc.reset_peak()
        parts = [record[i : i + 10_000] for i in range(0, record.num_tokens, 10_000)]
        record.save(tmp_path / "r")
        assert tracemalloc.get_traced_memory()[1] < 1.1 * kept
        del record, parts
        tracemalloc.reset_peak()
        RoutingRecord.load(tmp_path / "r")
        assert tracemalloc.get_traced_memory()[1] < 1.1 * kept
    finally:
        tracemalloc.stop()
