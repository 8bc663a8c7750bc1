# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The permutation of the `te` modules: signatures, errors, and faults in data."""

from __future__ import annotations

import inspect
from typing import Any

import duomoe
import numpy as np
import pytest
from te_checks import te
from te_moves import ROWS, D, E, K, T, drawn

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

pytestmark = [pytest.mark.jax, pytest.mark.torch]

SIGNATURES = {
    "moe_permute": "inp routing_map num_out_tokens=-1 max_token_num=-1 map_type='mask'",
    "moe_permute_with_probs": "inp probs routing_map num_out_tokens=-1",
    "moe_permute_and_pad_with_probs": "inp probs routing_map tokens_per_expert align_size",
    "moe_unpermute": "inp row_id_map merging_probs=None restore_shape=None map_type='mask' "
    "probs=None pad_offsets=None",
    "moe_sort_chunks_by_index": "inp split_sizes sorted_index",
    "moe_sort_chunks_by_index_with_probs": "inp probs split_sizes sorted_index",
    "token_dispatch": "inp routing_map num_out_tokens probs=None align_size=None",
    "token_combine": "inp row_id_map merging_probs=None pad_offsets=None",
    "sort_chunks_by_index": "inp split_sizes sorted_indices",
    "pure_jax_token_dispatch": "inputs selected_experts num_experts num_experts_per_tok "
    "align_size=0 roll_to_expert_id=None",
    "pure_jax_token_combine": "expert_outputs perm_state routing_weights num_experts_per_tok "
    "batch_size sequence_length",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_originals(adapter, name: str) -> None:
    parameters = inspect.signature(getattr(te(adapter), name)).parameters.values()
    shown = " ".join(
        p.name + ("" if p.default is p.empty else f"={p.default!r}")
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    )
    assert shown == SIGNATURES[name]
    assert name in te(adapter).__all__ and getattr(te(adapter), name).__doc__


def given(adapter) -> dict[str, Any]:
    data = drawn(np.random.default_rng(0))
    arrays = {n: adapter.array(a) for n, a in data.items()}
    arrays["maps"] = te(adapter).moe_permute(arrays["x"], arrays["mask"], ROWS)[1]
    arrays["rows"] = adapter.array(np.zeros((ROWS, D), "f4"))
    arrays["counts"] = adapter.array(data["mask"].sum(0).astype("i4"))
    arrays["a"] = adapter.array
    return arrays


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "map type": (
        lambda m, g: m.moe_permute(g["x"], g["mask"], 4, map_type="bits"),
        ValueError,
        "map_type must be one of 'mask', 'index', got 'bits'",
    ),
    "no array": (
        lambda m, g: m.moe_permute([[1.0]], g["mask"], 4),
        TypeError,
        "inp must be a (jax.Array|torch.Tensor), got list",
    ),
    "no map": (
        lambda m, g: m.moe_permute_with_probs(g["x"], g["p"], [[True]], 4),
        TypeError,
        "routing_map must be a (jax.Array|torch.Tensor), got list",
    ),
    "no probs": (
        lambda m, g: m.token_dispatch(g["x"], g["mask"], ROWS, probs=1.0),
        TypeError,
        "probs must be a (jax.Array|torch.Tensor), got float",
    ),
    "rank": (
        lambda m, g: m.moe_permute(g["x"][0], g["mask"], 4),
        ValueError,
        r"inp must have shape \[..., D\], got \[5\]",
    ),
    "integer rows": (
        lambda m, g: m.moe_permute(g["a"](np.zeros((T, D), "u1")), g["mask"], 4),
        TypeError,
        "inp must be float32, bfloat16 or float16, got uint8",
    ),
    "float map": (
        lambda m, g: m.moe_permute(g["x"], g["p"], 4),
        TypeError,
        "routing_map must be an integer array, got float32",
    ),
    "tokens": (
        lambda m, g: m.moe_permute(g["x"][1:], g["mask"], 4),
        ValueError,
        r"routing_map must have shape .* = \[11, 6\], got \[12, 6\]",
    ),
    "index tokens": (
        lambda m, g: m.moe_permute(g["x"][1:], g["ids"], 4, map_type="index"),
        ValueError,
        r"routing_map must have shape .* = \[11, 2\], got \[12, 2\]",
    ),
    "rows": (
        lambda m, g: m.moe_permute(g["x"], g["mask"], 4.0),
        TypeError,
        "num_out_tokens must be an int, got 4.0",
    ),
    "too many rows": (
        lambda m, g: m.token_dispatch(g["x"], g["mask"], 2**31),
        ValueError,
        "fewer than 2.31 rows, got 2147483648",
    ),
    "probs": (
        lambda m, g: m.moe_permute_with_probs(g["x"], g["w"], g["mask"], 4),
        ValueError,
        r"probs must have shape \[..., E\] = \[12, 6\], got \[12, 2\]",
    ),
    "align": (
        lambda m, g: m.token_dispatch(g["x"], g["mask"], 4, None, 0),
        ValueError,
        "align_size must be between 1 and",
    ),
    "counts": (
        lambda m, g: m.moe_permute_and_pad_with_probs(
            g["x"], g["p"], g["mask"], g["counts"][1:], 4
        ),
        ValueError,
        r"tokens_per_expert must have shape \[E\] = \[6\], got \[5\]",
    ),
    "negative counts": (
        lambda m, g: m.moe_permute_and_pad_with_probs(g["x"], g["p"], g["mask"], -g["counts"], 4),
        ValueError,
        "tokens_per_expert must not be negative",
    ),
    "row map": (
        lambda m, g: m.moe_unpermute(g["rows"], g["maps"][:, 1:]),
        ValueError,
        r"row_id_map must have shape \[T, 2 E \+ 1\], got \[12, 12\]",
    ),
    "float row map": (
        lambda m, g: m.token_combine(g["rows"], g["p"]),
        TypeError,
        "row_id_map must be an integer array, got float32",
    ),
    "merging probs": (
        lambda m, g: m.moe_unpermute(g["rows"], g["maps"], g["w"]),
        ValueError,
        r"merging_probs must have shape \[..., E\] = \[12, 6\], got \[12, 2\]",
    ),
    "both names": (
        lambda m, g: m.moe_unpermute(g["rows"], g["maps"], g["p"], probs=g["p"]),
        ValueError,
        "probs is the deprecated name of merging_probs",
    ),
    "width": (
        lambda m, g: m.moe_unpermute(g["rows"], g["maps"], None, (T, D + 1)),
        ValueError,
        r"restore_shape must be \[..., D\] with D = 5, got \[12, 6\]",
    ),
    "restored tokens": (
        lambda m, g: m.moe_unpermute(g["rows"], g["maps"], None, (2, T, D)),
        ValueError,
        r"restore_shape must hold 12 tokens, got \[2, 12, 5\]",
    ),
    "pads": (
        lambda m, g: m.token_combine(g["rows"], g["maps"], None, g["counts"][1:]),
        ValueError,
        r"pad_offsets must have shape \[E\] = \[6\], got \[5\]",
    ),
    "index pads": (
        lambda m, g: m.moe_unpermute(
            g["rows"], g["ids"][:, 0], map_type="index", pad_offsets=g["counts"]
        ),
        ValueError,
        "pad_offsets are for map_type='mask'",
    ),
    "index map": (
        lambda m, g: m.moe_unpermute(g["rows"], g["ids"][:, 0], g["w"], map_type="index"),
        ValueError,
        r"row_id_map must hold K \* T = 2 \* 12 numbers, got 12",
    ),
    "order": (
        lambda m, g: m.moe_sort_chunks_by_index(g["x"], g["sizes"], g["order"][1:]),
        ValueError,
        r"sorted_index must have shape \[C\] = \[4\], got \[3\]",
    ),
    "chunk probs": (
        lambda m, g: m.moe_sort_chunks_by_index_with_probs(
            g["x"], g["p"][1:, 0], g["sizes"], g["order"]
        ),
        ValueError,
        r"probs must have shape \[T\] = \[12\], got \[11\]",
    ),
    "sizes": (
        lambda m, g: m.sort_chunks_by_index(g["x"], g["p"][0], g["order"]),
        TypeError,
        "split_sizes must be an integer array, got float32",
    ),
    "slots": (
        lambda m, g: m.pure_jax_token_dispatch(g["x"], g["ids"], E, K + 1),
        ValueError,
        r"selected_experts must have shape .* = \[12, 3\], got \[12, 2\]",
    ),
    "state": (
        lambda m, g: m.pure_jax_token_combine(g["rows"], (1, 2, 3), g["w"], K, 1, T),
        TypeError,
        "perm_state must be a PureJaxPermState, got tuple",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_argument_given_and_allowed(adapter, case: str) -> None:
    call, kind, words = ERRORS[case]
    with pytest.raises(kind, match=words):
        call(te(adapter), given(adapter))


def test_fp8_rows_are_refused() -> None:
    from jax_frontend import te as jax_module
    from torch_frontend import te as torch_module

    words = "inp must be float32, bfloat16 or float16, got float8_e4m3fn"
    mask = np.ones((2, 2), bool)
    with pytest.raises(TypeError, match=words):
        rows = torch.zeros(2, 4).to(torch.float8_e4m3fn)
        torch_module.moe_permute(rows, torch.from_numpy(mask), 4)
    with pytest.raises(TypeError, match=words):
        jax_module.token_dispatch(jax.numpy.zeros((2, 4), "float8_e4m3fn"), mask, 4)


def test_the_old_name_of_merging_probs(adapter) -> None:
    g = given(adapter)
    with pytest.warns(FutureWarning, match="probs is deprecated, use merging_probs"):
        old = te(adapter).moe_unpermute(g["rows"] + 1, g["maps"], probs=g["p"])
    new = te(adapter).moe_unpermute(g["rows"] + 1, g["maps"], g["p"])
    np.testing.assert_array_equal(adapter.numpy(old), adapter.numpy(new))


def test_another_device_is_named() -> None:
    from torch_frontend import te as module

    x, mask = torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"moe_permute: .* routing_map is on meta"):
        module.moe_permute(x, mask.to("meta"), 4)
    with pytest.raises(ValueError, match=r"token_combine: .* pad_offsets is on meta"):
        maps = module.moe_permute(x, mask, 6)[1]
        module.token_combine(torch.zeros(6, 2), maps, None, torch.zeros(2, device="meta").int())


FAULTS = {
    "counts": (
        "plan_mask: the rows leave expert 0 4 of the 12 that routing_map asks for",
        lambda m, a: m.moe_permute_and_pad_with_probs(
            a(np.ones((T, D), "f4")),
            a(np.ones((T, 2), "f4")),
            a(np.ones((T, 2), bool)),
            a(np.array([4, 0], "i4")),
            4,
        ),
    ),
    "listed": (
        "read_row_map: row_id_map of token 1 lists 9 rows, allowed: 0 to 2",
        lambda m, a: m.token_combine(
            a(np.ones((3, D), "f4")), a(np.array([[0, 1, 0, 1, 2], [0, 0, 0, 0, 9]], "i4"))
        ),
    ),
    "expert": (
        "read_row_map: row_id_map of token 0 names expert 2, allowed: 0 to 1",
        lambda m, a: m.token_combine(
            a(np.ones((3, D), "f4")), a(np.array([[0, 1, 0, 2, 2]], "i4"))
        ),
    ),
    "row": (
        "read_row_map: row_id_map of token 0 leads to row 7 of 3",
        lambda m, a: m.token_combine(
            a(np.ones((3, D), "f4")),
            a(np.array([[0, 5, 0, 1, 2]], "i4")),
            None,
            a(np.array([0, 2], "i4")),
        ),
    ),
    "sizes": (
        "place_chunks: split_sizes sum to 5, more than the 4 tokens",
        lambda m, a: m.moe_sort_chunks_by_index(
            a(np.ones((4, D), "f4")), a(np.array([2, 3], "i4")), a(np.array([1, 0], "i4"))
        ),
    ),
    "order": (
        "place_chunks: the order of the chunks is no permutation: place 1 holds 1",
        lambda m, a: m.moe_sort_chunks_by_index(
            a(np.ones((4, D), "f4")), a(np.array([2, 2], "i4")), a(np.array([1, 1], "i4"))
        ),
    ),
    "id": (
        "sort_slots: indices of token 0, slot 0 is -3, allowed",
        lambda m, a: m.moe_permute(a(np.ones((1, D), "f4")), a(np.array([[-3]])), map_type="index"),
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_in_data_are_dropped_or_named(adapter, case: str) -> None:
    words, call = FAULTS[case]

    def run() -> Any:
        return jax.block_until_ready(call(te(adapter), adapter.array))

    run()
    duomoe.debug_checks(True)
    try:
        # On a GPU, JAX finds out while it waits, and raises the runtime's own error.
        with pytest.raises((ValueError, RuntimeError), match=words):
            run()
    finally:
        duomoe.debug_checks(False)
