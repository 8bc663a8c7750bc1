# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters keep their names and every bit on the way between torch, JAX and files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from duomoe import convert, tensor_file
from hypothesis import given, settings
from hypothesis import strategies as st

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WIDE = [name for name in convert.DTYPE_NAMES if name.endswith("64")]
STATE = {
    "layers.0.moe.experts.w_gate": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "layers.0.moe.router.weight": np.arange(6, dtype=np.float32).reshape(3, 2).astype(BFLOAT16),
    "layers.0.moe.router.expert_bias": np.array([0.5, -0.0], np.float32),
    "norm": np.ones(3, np.float16),
}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def edge_bits(dtype: np.dtype) -> np.ndarray:
    """-0.0, infinities, quiet and signalling NaN with payloads, denormals; largest integers."""
    if dtype == np.bool_:
        return np.array([False, True, True])
    width = dtype.itemsize * 8
    patterns = [0, 1, 2 ** (width - 1), 2 ** (width - 1) + 1, 2**width - 1]
    mantissa = {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10}.get(dtype.name)
    if mantissa:
        infinity = 2 ** (width - 1) - 2**mantissa
        quiet = 2 ** (mantissa - 1)
        patterns += [infinity, infinity + quiet, infinity + quiet + 5, infinity + 1]
        patterns += [2 ** (width - 1) + infinity + 3, 2**mantissa - 1]
    return np.array(patterns, f"uint{width}").view(dtype)


@st.composite
def raw_arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from(list(tensor_file.DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    data = data & 1 if dtype == np.bool_ else data
    array = data.view(dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


NAME = st.text(st.characters(exclude_characters=".", codec="utf-8"), min_size=1, max_size=4)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    node = st.recursive(
        raw_arrays(), lambda child: st.dictionaries(NAME, child, min_size=1, max_size=3)
    )
    return draw(st.dictionaries(NAME, st.dictionaries(NAME, node, min_size=1, max_size=3)))


@given(trees())
@settings(max_examples=60, deadline=None)
def test_unflatten_is_the_inverse_of_flatten(tree: dict[str, Any]) -> None:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
        return a is b

    assert equal(convert.unflatten(convert.flatten(tree)), tree)


@pytest.mark.torch
@given(st.dictionaries(st.lists(NAME, min_size=1, max_size=2).map(tuple), raw_arrays(), max_size=4))
@settings(max_examples=100, deadline=None)
def test_raw_bits_survive_torch_linen_and_files(
    tmp_path_factory: pytest.TempPathFactory, parts: dict[tuple[str, ...], np.ndarray]
) -> None:
    pytest.importorskip("torch")
    flat = {".".join(path): array for path, array in parts.items()}
    try:
        convert.unflatten(flat)
    except ValueError:
        return  # a name under another one
    flat.pop(tensor_file.HEADER_NAME, None)
    variables = convert.jax_variables(convert.torch_state_dict(flat))
    assert same(convert.numpy_state_dict(variables), flat)
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    convert.save_file(variables, path)
    assert same(convert.load_file(path), flat)
    assert same(convert.numpy_state_dict(convert.torch_state_dict(convert.load_file(path))), flat)


@pytest.mark.parametrize("name", convert.DTYPE_NAMES)
def test_edge_bits_survive_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    array = edge_bits(np.dtype(name))
    with jax.enable_x64(name in WIDE):
        given = jax.device_put(array)
        assert given.dtype.name == name
        assert same_bits(convert.to_numpy(given), array)


@pytest.mark.torch
@pytest.mark.parametrize("name", convert.DTYPE_NAMES)
def test_edge_bits_survive_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    array = edge_bits(np.dtype(name))
    (tensor,) = convert.torch_state_dict({"x": array}).values()
    assert tensor.dtype == getattr(torch, name)
    assert tensor.view(torch.uint8).numpy().tobytes() == array.tobytes()
    assert same_bits(convert.to_numpy(tensor), array)


def test_foreign_byte_order_and_strides_keep_values(tmp_path: Path) -> None:
    swapped = np.arange(6, dtype=">f4").reshape(2, 3).T
    assert same_bits(convert.to_numpy(swapped), np.arange(6, dtype=np.float32).reshape(2, 3).T)
    convert.save_file({"x": swapped, "step": np.float32(3)}, tmp_path / "x")
    loaded = convert.load_file(tmp_path / "x")
    assert loaded["x"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert loaded["step"].shape == () and loaded["step"] == 3


def test_linen_variables() -> None:
    def kinds(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: kinds(child) for name, child in tree.items()}
        return type(tree)

    variables = convert.jax_variables(STATE)
    array = np.ndarray
    assert kinds(variables) == {
        "params": {
            "layers": {"0": {"moe": {"experts": {"w_gate": array}, "router": {"weight": array}}}},
            "norm": array,
        },
        "router_state": {"layers": {"0": {"moe": {"router": {"expert_bias": array}}}}},
    }
    assert same(convert.numpy_state_dict(variables), STATE)
    assert same(convert.numpy_state_dict(variables["params"], variables["router_state"]), STATE)
    assert list(convert.jax_variables({"w": np.ones(1)})) == ["params"]
    assert list(convert.jax_variables({"expert_bias": np.ones(1)})) == ["router_state"]
    assert convert.jax_variables({}) == {}


def test_variables_and_state_dicts_are_copies() -> None:
    torch = pytest.importorskip("torch")
    source = {"w": torch.ones(3), "b": torch.ones(3, dtype=torch.bfloat16)}
    variables = convert.jax_variables(source)
    back = convert.torch_state_dict(variables)
    for tensor in source.values():
        tensor.zero_()
    assert variables["params"]["w"].tolist() == [1, 1, 1]
    variables["params"]["b"][:] = 5
    assert back["b"].tolist() == [1, 1, 1]


@pytest.mark.torch
def test_torch_module(tmp_path: Path) -> None:
    """Trained parameters, buffers, tied weights and non-contiguous tensors."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4).bfloat16())
    module[0].register_buffer("expert_bias", torch.randn(8)[::2])
    module.tied = module[0].weight
    state = module.state_dict()
    variables = convert.jax_variables(state)
    assert variables["router_state"]["0"]["expert_bias"].tolist() == state["0.expert_bias"].tolist()
    convert.save_file(state, tmp_path / "x")
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4).bfloat16())
    other[0].register_buffer("expert_bias", torch.zeros(4))
    other.tied = other[0].weight
    other.load_state_dict(convert.torch_state_dict(convert.load_file(tmp_path / "x")))
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, state[name])
    parameters = dict(module.named_parameters())  # need gradients
    assert same(
        convert.numpy_state_dict(parameters),
        {name: convert.to_numpy(state[name]) for name in parameters},
    )


@pytest.mark.jax
def test_linen_module_with_boxes() -> None:
    jax, linen = pytest.importorskip("jax"), pytest.importorskip("flax.linen")
    from flax.core import freeze

    class Router(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            init = linen.initializers.normal()
            boxed = linen.with_partitioning(init, ("data", None))
            logical = linen.with_logical_partitioning(init, ("embed", None))
            w = self.param("weight", boxed, (4, 2)) + self.param("extra", logical, (4, 2))
            zeros = jax.numpy.zeros
            bias = self.variable("router_state", "expert_bias", lambda: zeros(2))
            return x @ w + bias.value

    x = jax.numpy.ones((3, 4))
    boxed = Router().init(jax.random.key(0), x)
    assert isinstance(boxed["params"]["weight"], linen.Partitioned)
    plain = linen.meta.unbox(boxed)
    wanted = {n: np.asarray(v) for n, v in plain["params"].items()}
    wanted["expert_bias"] = np.zeros(2, np.float32)
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):  # where unbox() would constrain "embed", which no mesh has
        assert same(convert.numpy_state_dict(boxed), wanted)
    assert same(convert.numpy_state_dict(freeze(boxed)), wanted)
    back = convert.jax_variables(wanted)
    assert jax.tree.structure(back) == jax.tree.structure(plain)
    assert (Router().apply(back, x) == Router().apply(plain, x)).all()


@pytest.mark.jax
def test_nnx_module() -> None:
    jax, nnx = pytest.importorskip("jax"), pytest.importorskip("flax.nnx")

    class RouterState(nnx.Variable):
        pass

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
            self.expert_bias = RouterState(jax.numpy.zeros(3))
            self.drop = nnx.Dropout(0.1, rngs=rngs)

    model = Model(nnx.Rngs(0))
    _, params, biases, rest = nnx.split(model, nnx.Param, RouterState, ...)
    flat = convert.numpy_state_dict(params, biases)
    assert sorted(flat) == [
        "expert_bias",
        *(f"layers.{i}.{name}" for i in (0, 1) for name in ("bias", "kernel")),
    ]
    assert same_bits(flat["layers.1.kernel"], np.asarray(model.layers[1].kernel[...]))
    assert same(convert.numpy_state_dict(nnx.to_pure_dict(params), biases), flat)

    other = Model(nnx.Rngs(1))
    state = nnx.state(other, (nnx.Param, RouterState))
    flat["expert_bias"] = np.arange(3, dtype=np.float32)
    nnx.replace_by_pure_dict(state, convert.unflatten(flat))
    nnx.update(other, state)
    assert same(convert.numpy_state_dict(nnx.state(other, (nnx.Param, RouterState))), flat)

    with pytest.raises(TypeError, match=r"must be one of .*, got key<"):
        convert.numpy_state_dict(rest)
    with pytest.raises(TypeError, match=r"got Model; pass nnx.state\(model\)"):
        convert.numpy_state_dict(model)
    by_reference = {"w": nnx.Param(jax.numpy.ones(2), ref=True)}
    assert convert.numpy_state_dict(by_reference)["w"].tolist() == [1, 1]


@pytest.mark.jax
@pytest.mark.multidevice
def test_array_spread_over_devices_is_gathered() -> None:
    jax = pytest.importorskip("jax")
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    spread = jax.sharding.NamedSharding(mesh, jax.P("data"))
    values = np.arange(8, dtype=np.float32).astype(BFLOAT16)
    array = jax.device_put(values, spread)
    assert len({shard.device for shard in array.addressable_shards}) == 4
    assert same_bits(convert.to_numpy(array), values)


class Elsewhere:
    """What an array of several processes looks like."""

    shape, dtype = (4,), np.dtype("float32")
    is_fully_addressable = False

    def __init__(self, replicated: bool) -> None:
        self.is_fully_replicated = replicated

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.ones(4, np.float32)


def test_array_of_several_processes() -> None:
    assert convert.to_numpy(Elsewhere(True)).tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"'a\.w' lies partly in other processes; gather it first"):
        convert.numpy_state_dict({"a": {"w": Elsewhere(False)}})


def test_tracer() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="array is being traced and has no values"):
        jax.jit(convert.to_numpy)(1.0)
    with pytest.raises(TypeError, match="'w' must be a NumPy, JAX or torch array, got ShapeDtype"):
        convert.numpy_state_dict({"w": jax.ShapeDtypeStruct((2,), np.float32)})


@pytest.mark.torch
def test_tensors_without_values_or_counterpart() -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    for tensor in (torch.ones(2, device="meta"), fake):
        with pytest.raises(TypeError, match=r"'w' has a shape and no values \(a meta or fake"):
            convert.jax_variables({"w": tensor})
    with pytest.raises(TypeError, match=r"'0\.weight' is a lazy parameter and has no values"):
        convert.jax_variables(torch.nn.Sequential(torch.nn.LazyLinear(2)).state_dict())
    with pytest.raises(TypeError, match=r"array must be a dense tensor, got torch.sparse_coo"):
        convert.to_numpy(torch.eye(2).to_sparse())
    for dtype in (torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=r"array must be one of float64, .*, got (comp|float8)"):
            convert.to_numpy(torch.ones(2).to(dtype))
    with pytest.raises(TypeError, match=r"got Linear; pass its state_dict\(\)"):
        convert.jax_variables(torch.nn.Linear(2, 2))
    negative = torch.ones(2, dtype=torch.complex64).conj().imag
    assert negative.is_neg() and convert.to_numpy(negative).tolist() == [0, 0]


@pytest.mark.torch
def test_tensor_of_a_device_mesh() -> None:
    torch = pytest.importorskip("torch")

    class Spread(torch.Tensor):  # what a DTensor looks like
        def full_tensor(self) -> Any:
            return None

    with pytest.raises(ValueError, match=r"'w' is spread over a device mesh; pass its full_tensor"):
        convert.jax_variables({"w": torch.ones(2).as_subclass(Spread)})


ARRAY = np.ones(2, np.float32)
REFUSED = {
    "dot": ({"a": {"b.c": ARRAY}}, ValueError, r"without '\.', got 'b\.c' under 'a'"),
    "empty": ({"a": {"": ARRAY}}, ValueError, "non-empty and without .*, got '' under 'a'"),
    "empty part": ({"a..b": ARRAY}, ValueError, r"must be non-empty, got 'a\.\.b'"),
    "key": ({"a": {None: ARRAY}}, TypeError, "names must be str or int, got None under 'a'"),
    "flat key": ({None: ARRAY}, TypeError, "names must be str or int, got None at the top"),
    "bool key": ({"a": {True: ARRAY}}, TypeError, "names must be str or int, got True"),
    "twice": ({"a": {0: ARRAY, "0": ARRAY}}, ValueError, r"two arrays are named 'a\.0'"),
    "both": ({"a.b": ARRAY, "a": ARRAY}, ValueError, r"'a' is an array, and 'a\.b' lies under it"),
    "both, later": ({"a": ARRAY, "a.b.c": ARRAY}, ValueError, r"'a' is an array, and 'a\.b\.c'"),
    "none": ({"a": {"b": None}}, TypeError, r"'a\.b' must be an array or a dict, got NoneType"),
    "float": ({"a": 1.0}, TypeError, "'a' must be an array or a dict, got float"),
    "array": (ARRAY, TypeError, "parameters must be a dict, got ndarray"),
    "object": ({"a": np.array([None])}, TypeError, "'a' must be one of float64, .*, got object"),
    "complex": ({"a": 1j * ARRAY}, TypeError, "'a' must be one of .*, got complex64"),
    "float8": ({"a": ARRAY.astype(ml_dtypes.float8_e5m2)}, TypeError, "got float8_e5m2"),
    "collection": (
        {"params": {"w": ARRAY}, "batch_stats": {"mean": ARRAY}},
        ValueError,
        "collection 'batch_stats' has no place in a state_dict",
    ),
    "bias in params": (
        {"params": {"router": {"expert_bias": ARRAY}}},
        ValueError,
        r"'router.expert_bias' lies in collection 'params'; 'router_state' holds",
    ),
    "weight in state": (
        {"params": {}, "router_state": {"w": ARRAY}},
        ValueError,
        "'w' lies in collection 'router_state'",
    ),
}


@pytest.mark.parametrize("tree, error, message", REFUSED.values(), ids=REFUSED)
def test_refused(tree: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    for function in (convert.numpy_state_dict, convert.jax_variables):
        with pytest.raises(error, match=message):
            function(tree)
    with pytest.raises(error, match=message):
        convert.save_file(tree, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_one_name_in_two_trees() -> None:
    with pytest.raises(ValueError, match=r"two arrays are named 'a\.b'"):
        convert.numpy_state_dict({"a": {"b": ARRAY}}, {"a.b": ARRAY})
    with pytest.raises(ValueError, match=r"'a' is an array, and 'a\.b' lies under it"):
        convert.numpy_state_dict({"a": ARRAY}, {"a": {"b": ARRAY}})


def test_lists_and_numbers_are_names() -> None:
    tree = {"layers": [{"w": ARRAY}, {"w": ARRAY, "b": ()}], 3: ARRAY}
    assert list(convert.flatten(tree)) == ["layers.0.w", "layers.1.w", "3"]
    assert list(convert.numpy_state_dict({0: ARRAY})) == ["0"]


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    """What others read is what was written, and the other way round."""
    safetensors = pytest.importorskip("safetensors")
    torch = pytest.importorskip("torch")
    from safetensors import numpy as for_numpy
    from safetensors import torch as for_torch

    flat = {
        name: edge_bits(dtype).reshape(1, -1)
        for name, dtype in zip(convert.DTYPE_NAMES, tensor_file.DTYPES.values(), strict=True)
    }
    flat |= STATE | {"empty": np.zeros((0, 3), BFLOAT16), "scalar": np.array(2, np.int64)}
    path = tmp_path / "ours"
    convert.save_file(convert.jax_variables(flat), path, {"note": "grün"})
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata() == {"note": "grün"}
    read = for_torch.load_file(path)
    assert same(convert.numpy_state_dict(read), flat)
    assert read["bfloat16"].dtype == torch.bfloat16
    assert same(for_numpy.load_file(path), flat)
    for_torch.save_file(read, tmp_path / "theirs", {"format": "pt"})
    assert same(convert.load_file(tmp_path / "theirs"), flat)
    assert list(convert.load_file(path)) == sorted(flat)


@pytest.mark.jax
def test_flax_reads_files(tmp_path: Path) -> None:
    for_flax = pytest.importorskip("safetensors.flax")
    convert.save_file(STATE, tmp_path / "x")
    assert same(convert.numpy_state_dict(for_flax.load_file(tmp_path / "x")), STATE)
    for_flax.save_file(for_flax.load_file(tmp_path / "x"), tmp_path / "y")
    assert same(convert.load_file(tmp_path / "y"), STATE)


def test_file_may_be_overwritten_by_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    convert.save_file(STATE, path)
    loaded = convert.load_file(path)
    convert.save_file({"norm": np.zeros(1, np.int8)}, path)
    assert same(loaded, dict(sorted(STATE.items())))
    loaded["norm"][:] = 2  # writable
    convert.save_file({}, path)
    assert convert.load_file(path) == {}


@pytest.mark.parametrize("kept", [0, 7, 8, 40, -1])
def test_truncated_file(tmp_path: Path, kept: int) -> None:
    convert.save_file(STATE, tmp_path / "x")
    (tmp_path / "y").write_bytes((tmp_path / "x").read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"/y is no complete safetensors file: "):
        convert.load_file(tmp_path / "y")


def raw_file(path: Path, header: Any, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"PK\x03\x04 a zip file, not safetensors" * 9)
    with pytest.raises(ValueError, match=r"/x is no complete safetensors file: "):
        convert.load_file(path)
    raw_file(path, {"a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}, b"ab")
    with pytest.raises(ValueError, match=r"/x: tensor 'a' has dtype F8_E4M3; allowed: F64, .*BOOL"):
        convert.load_file(path)
    raw_file(path, {"a": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}, b"\0\2")
    with pytest.raises(ValueError, match="'a' is BOOL and holds bytes other than 0 and 1"):
        convert.load_file(path)
    with pytest.raises(FileNotFoundError):
        convert.load_file(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        convert.load_file(tmp_path)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none/x"):
        convert.save_file(STATE, tmp_path / "none" / "x")
    with pytest.raises(ValueError, match="'__metadata__' is safetensors' own name"):
        convert.save_file({"__metadata__": ARRAY}, tmp_path / "x")
    with pytest.raises(TypeError, match="metadata must be a dict of str to str, got 'step': 3"):
        convert.save_file(STATE, tmp_path / "x", {"step": 3})
    with pytest.raises(TypeError, match="metadata must be a dict of str to str, got list"):
        convert.save_file(STATE, tmp_path / "x", ["step"])
