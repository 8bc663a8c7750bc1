# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters from PyTorch to JAX and back, bit for bit, and safetensors files of them.

A key of a torch `state_dict` is the '.'-joined path of the JAX parameter:
"layers.0.moe.experts.w_gate" is {"layers": {"0": {"moe": {"experts": {"w_gate": ...}}}}}. Shapes
and layouts are the same on both sides: nothing is transposed, no dtype changes, and every bit
stays, those of NaN and denormals too. The selection bias of a router (a name that ends in
"expert_bias") is a buffer in torch and lies in the variable collection "router_state" in linen.

Frameworks are recognised, never imported, but for torch in `torch_state_dict`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from duomoe import tensor_file
from duomoe.tensor_file import FilePath

Array = Any  # a NumPy, JAX or torch array

# Collections of linen variables, and the last names of what lies in the second one.
PARAMS = "params"
ROUTER_STATE = "router_state"
ROUTER_STATE_NAMES = ("expert_bias",)

DTYPE_NAMES = tuple(dtype.name for dtype in tensor_file.DTYPES.values())


def to_numpy(array: Array, name: str = "array") -> np.ndarray:
    """The same values, bit for bit, as a NumPy array in native byte order.

    Memory is shared where it can be (NumPy, torch on the CPU, JAX on the CPU): copy before writing.
    A tensor on another device and a JAX array that is spread over this process's devices are
    copied to the host, without a gradient.

    Args:
        array: a NumPy, JAX or torch array of floats (float64, float32, bfloat16, float16), integers
            of 8 to 64 bits, or bool. bfloat16 becomes ml_dtypes.bfloat16.
        name: what errors call it.

    Raises:
        TypeError: if it is no such array, or holds no values (meta, fake or traced).
        ValueError: if part of it lies in other processes.
    """
    torch = _loaded("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _from_torch(torch, name, array)
    if not hasattr(array, "__array__") or not hasattr(array, "dtype"):
        raise TypeError(f"{name} must be a NumPy, JAX or torch array, got {type(array).__name__}")
    _check_dtype(name, getattr(array.dtype, "name", array.dtype))
    jax = _loaded("jax")
    if jax is not None and isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"{name} is being traced and has no values; convert it outside jit and grad"
        )
    whole = getattr(array, "is_fully_addressable", True)
    if not whole and not getattr(array, "is_fully_replicated", False):
        raise ValueError(
            f"{name} lies partly in other processes; gather it first, for instance with "
            "jax.experimental.multihost_utils.process_allgather(array, tiled=True)"
        )
    result = np.asarray(array)
    return result if result.dtype.isnative else result.astype(result.dtype.newbyteorder("="))


def _loaded(framework: str) -> Any:
    """The framework's module if something has imported it; otherwise no array can be its own."""
    module = sys.modules.get(framework)
    return module if hasattr(module, "Tensor" if framework == "torch" else "Array") else None


def _check_dtype(name: str, dtype: Any) -> None:
    if dtype not in DTYPE_NAMES:
        raise TypeError(f"{name} must be one of {', '.join(DTYPE_NAMES)}, got {dtype}")


def _from_torch(torch: Any, name: str, tensor: Any) -> np.ndarray:
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise TypeError(f"{name} is a lazy parameter and has no values before the first call")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {tensor.layout}")
    if hasattr(tensor, "full_tensor"):
        raise ValueError(f"{name} is spread over a device mesh; pass its full_tensor()")
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        raise TypeError(f"{name} has a shape and no values (a meta or fake tensor)")
    dtype = str(tensor.dtype).removeprefix("torch.")
    _check_dtype(name, dtype)
    host = tensor.detach().cpu().resolve_neg()
    if dtype == "bfloat16":
        return host.view(torch.int16).numpy().view(tensor_file.BFLOAT16)
    return host.numpy()


def _unbox(leaf: Any) -> Any:
    """What lies in flax's boxes: nnx.Variable, and nn.Partitioned and its kin in linen."""
    while not isinstance(leaf, Mapping):
        if hasattr(leaf, "get_raw_value"):
            raw = leaf.get_raw_value()  # as stored: get_value runs hooks
            leaf = raw if hasattr(raw, "__array__") else leaf.get_value()  # reads a jax.Ref
        elif hasattr(leaf, "unbox"):
            # unbox() would add a sharding constraint.
            leaf = leaf.value if hasattr(leaf, "value") else leaf.unbox()
        else:
            break
    return leaf


def _children(node: Any) -> Iterator[tuple[Any, Any]] | None:
    if isinstance(node, Mapping):
        return iter(node.items())
    if type(node) in (list, tuple):
        return iter(enumerate(node))
    return None


def _component(path: str, key: Any) -> str:
    """The dotted name of a child."""
    where = f"under {path!r}" if path else "at the top"
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        key = str(key)
    if not isinstance(key, str):
        raise TypeError(f"names must be str or int, got {key!r} {where}")
    if not key or "." in key:
        raise ValueError(f"names must be non-empty and without '.', got {key!r} {where}")
    return f"{path}.{key}" if path else key


def _check_leaf(path: str, leaf: Any) -> None:
    if path and hasattr(type(leaf), "shape") and hasattr(leaf, "dtype"):
        return
    hint = ""
    if hasattr(leaf, "state_dict"):
        hint = "; pass its state_dict()"
    elif hasattr(leaf, "iter_modules"):
        hint = "; pass nnx.state(model)"
    where = f"{path!r} must be an array or a dict" if path else "parameters must be a dict"
    raise TypeError(f"{where}, got {type(leaf).__name__}{hint}")


def _add(flat: dict[str, Array], name: str, leaf: Array) -> None:
    if name in flat:
        raise ValueError(f"two arrays are named {name!r}")
    flat[name] = leaf


def flatten(tree: Any) -> dict[str, Array]:
    """Name the arrays of a nested dict by their '.'-joined paths.

    Args:
        tree: nested dicts (also FrozenDict, nnx.State, and lists and tuples, whose keys are
            numbers) whose leaves are arrays or flax's boxes of them. Empty dicts vanish.

    Returns:
        dict of name to array, in the tree's order: the arrays themselves, out of their boxes.

    Raises:
        TypeError: if a leaf is no array, or a key neither str nor int.
        ValueError: if a key is empty or has a '.', or two paths have one name.
    """
    flat: dict[str, Array] = {}
    _flatten_into(flat, "", tree)
    return flat


def _flatten_into(flat: dict[str, Array], path: str, node: Any) -> None:
    node = _unbox(node)
    children = _children(node)
    if children is None:
        _check_leaf(path, node)
        _add(flat, path, node)
        return
    for key, child in children:
        _flatten_into(flat, _component(path, key), child)


def unflatten(flat: Mapping[str, Array]) -> dict[str, Any]:
    """The nested dict whose leaves have these '.'-joined paths: the inverse of `flatten`.

    Numbers stay strings ("layers.0" becomes {"layers": {"0": ...}}), as in linen; flax's
    `nnx.replace_by_pure_dict` takes them for indices of lists.

    Args:
        flat: dict of name to array, for instance a torch state_dict. The arrays stay as they are.

    Raises:
        TypeError: if a name is no str.
        ValueError: if a part of a name is empty, or a name is both an array and a dict of others.
    """
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        if not isinstance(name, str):
            raise TypeError(f"names must be str, got {name!r}")
        parts = name.split(".")
        if "" in parts:
            raise ValueError(f"the parts of a name must be non-empty, got {name!r}")
        node = tree
        for depth, part in enumerate(parts[:-1], 1):
            path = ".".join(parts[:depth])
            if path in flat:
                raise ValueError(f"{path!r} is an array, and {name!r} lies under it")
            node = node.setdefault(part, {})
        node[parts[-1]] = leaf
    return tree


def _in_router_state(name: str) -> bool:
    return name.rpartition(".")[2] in ROUTER_STATE_NAMES


def _collections(variables: Mapping[Any, Any]) -> dict[str, Array]:
    """The arrays of linen's variables, by name without the collection's."""
    if unknown := [key for key in variables if key not in (PARAMS, ROUTER_STATE)]:
        raise ValueError(
            f"collection {unknown[0]!r} has no place in a state_dict; leave it out: allowed are "
            f"{PARAMS!r} and {ROUTER_STATE!r}"
        )
    flat: dict[str, Array] = {}
    for collection, tree in variables.items():
        for name, leaf in flatten(tree).items():
            # Otherwise the way back would put it into the other collection.
            if _in_router_state(name) != (collection == ROUTER_STATE):
                raise ValueError(
                    f"{name!r} lies in collection {collection!r}; {ROUTER_STATE!r} holds what is "
                    f"named {' or '.join(ROUTER_STATE_NAMES)}, {PARAMS!r} the rest"
                )
            _add(flat, name, leaf)
    return flat


def _named(tree: Any) -> dict[str, Array]:
    """The arrays of a state_dict, of linen's variables or of any other tree."""
    if isinstance(tree, Mapping) and tree:
        nested = [_children(_unbox(value)) is not None for value in tree.values()]
        if all(nested) and (PARAMS in tree or ROUTER_STATE in tree):
            return _collections(tree)
        if not any(nested):  # a state_dict, whose names have dots
            flat: dict[str, Array] = {}
            for key, boxed in tree.items():
                name = key if isinstance(key, str) else _component("", key)
                leaf = _unbox(boxed)
                _check_leaf(name, leaf)
                _add(flat, name, leaf)
            return flat
    return flatten(tree)


def numpy_state_dict(*trees: Any) -> dict[str, np.ndarray]:
    """Parameters of either framework as NumPy arrays, by their names in a torch state_dict.

    Args:
        trees: one or more of: a torch state_dict; linen's variables ({"params": ...,
            "router_state": ...}, told by these keys at the top); a nested dict; an nnx.State (each
            of those that nnx.split returns). Leaves may be boxed as flax does.

    Returns:
        dict of name to array, which may share memory with what was given.

    Raises:
        TypeError: if a leaf is no array of a supported dtype, or has no values.
        ValueError: if a name is empty, has a '.', comes twice or is both an array and a dict; if a
            collection of linen's is neither params nor router_state, or an array lies in the wrong
            one; if an array lies partly in other processes.
    """
    flat: dict[str, Array] = {}
    for tree in trees:
        for name, leaf in _named(tree).items():
            _add(flat, name, leaf)
    unflatten(flat)  # refuses names that no nested dict could have
    return {name: to_numpy(leaf, repr(name)) for name, leaf in flat.items()}


def torch_state_dict(*trees: Any) -> dict[str, Any]:
    """The state_dict of a torch module with the parameters of a JAX model: for `load_state_dict`.

    Args:
        trees: as in `numpy_state_dict`, for instance linen's variables or `load_file(path)`.

    Returns:
        dict of name to torch.Tensor on the CPU, copies with the same bits.

    Raises:
        TypeError, ValueError: as `numpy_state_dict`.
        ImportError: if torch is not installed.
    """
    import torch

    tensors = {}
    for name, array in numpy_state_dict(*trees).items():
        copy = np.array(array, order="C")
        if copy.dtype == tensor_file.BFLOAT16:
            tensors[name] = torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
        else:
            tensors[name] = torch.from_numpy(copy)
    return tensors


def jax_variables(*trees: Any) -> dict[str, Any]:
    """The variables of a linen module with the parameters of a torch model: for `apply`.

    For nnx, use `unflatten(numpy_state_dict(...))` with `nnx.replace_by_pure_dict`. Without x64,
    jax.numpy makes float64 and int64 narrower; here they stay as they are.

    Args:
        trees: as in `numpy_state_dict`, for instance a torch state_dict or `load_file(path)`.

    Returns:
        {"params": nested dict, "router_state": nested dict} of NumPy arrays, copies with the same
        bits. As in what linen's `init` returns, a collection without members is left out.

    Raises:
        TypeError, ValueError: as `numpy_state_dict`.
    """
    collections: dict[str, dict[str, np.ndarray]] = {PARAMS: {}, ROUTER_STATE: {}}
    for name, array in numpy_state_dict(*trees).items():
        collection = ROUTER_STATE if _in_router_state(name) else PARAMS
        collections[collection][name] = np.array(array, order="C")
    return {name: unflatten(flat) for name, flat in collections.items() if flat}


def save_file(tree: Any, path: FilePath, metadata: Mapping[str, str] | None = None) -> None:
    """Write parameters of either framework to a safetensors file, by their torch names.

    What two names share (tied parameters) is written under both.

    Args:
        tree: as one of those of `numpy_state_dict`.
        path: the file, overwritten if it exists.
        metadata: dict of str to str for the file's header.

    Raises:
        TypeError, ValueError: as `numpy_state_dict`, or if metadata is something else.
        OSError: if the file cannot be written.
        ImportError: if safetensors is not installed.
    """
    tensor_file.write(path, numpy_state_dict(tree), tensor_file.check_metadata(metadata))


def load_file(path: FilePath) -> dict[str, np.ndarray]:
    """Read a safetensors file, whoever wrote it.

    Returns:
        dict of name to NumPy array, sorted by name; for `torch_state_dict` or `jax_variables`.

    Raises:
        ValueError: that names the file, if it is no safetensors file, is cut short, or holds a
            dtype that `to_numpy` does not know.
        OSError: if it cannot be opened.
        ImportError: if safetensors is not installed.
    """
    return tensor_file.read(path)[0]
