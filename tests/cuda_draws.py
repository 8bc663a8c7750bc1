# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Random calls of the router, the plan and the row ops that between them take every path of the
kernels: sizes around warps, vectors and blocks, all options, extreme data, views at odd addresses.

A call is drawn from one seed and one choice per axis, so that a failure names all it takes to
repeat it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from adapters import DTYPES
from cuda_checks import Rng, Values, plan_attributes

Choice = dict[str, Any]
INT32 = np.iinfo(np.int32)

EXPERTS = [1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 33, 48, 60, 64, 65, 96, 100, 127, 128, 130, 160]
EXPERTS += [192, 255, 256, 257, 320, 384, 500, 512, 516, 640, 896, 1000, 2304]
PLACES = ["plain", "plain", "odd", "columns", "transposed"]


@dataclasses.dataclass(frozen=True)
class Call:
    """One op on NumPy arrays; `places` says how the tensors of the call tested lie in memory."""

    op: str
    inputs: Values
    attributes: Values
    places: dict[str, str] = dataclasses.field(default_factory=dict)


def cover(axes: Mapping[str, Sequence[Any]], count: int, *seed: int) -> list[Choice]:
    """Choices in which every value of an axis comes about equally often, beside any of another."""
    rng = np.random.default_rng([count, *seed])
    orders = {
        name: rng.permutation(np.resize(np.arange(len(v)), count)) for name, v in axes.items()
    }
    return [
        {**{name: v[orders[name][i]] for name, v in axes.items()}, "seed": (*seed, i)}
        for i in range(count)
    ]


def generator(choice: Choice) -> Rng:
    return np.random.default_rng([len(choice), *choice["seed"]])


# --- values --------------------------------------------------------------------------------------

# Magnitudes at which a formula for moderate logits may have to give way to one for all.
EDGES = np.array([1e-3, 8, 10, 15.9, 16, 20, 30, 32, 40, 43, 44, 50, 59.9, 60, 60.1, 64, 80, 86.9])
EDGES = np.append(EDGES, [87, 87.3, 88, 88.7, 89, 100, 103.9, 104, 120, 126, 127, 128, 200, 256])


def extreme(rng: Rng, t: int, e: int) -> np.ndarray:
    """Of every magnitude that float32 has."""
    sign = rng.choice([-1.0, 1.0], (t, e))
    return sign * 10.0 ** rng.uniform(-45, 38, (t, e))


def sprinkled(rng: Rng, t: int, e: int, value: float) -> np.ndarray:
    """Normal values, some replaced: none, a few, or nearly all of a row's."""
    part = rng.choice([0.0, 0.05, 0.5, 0.97], (t, 1))
    return np.where(rng.random((t, e)) < part, value, rng.standard_normal((t, e)))


def tied_at_threshold(rng: Rng, t: int, e: int, k: int) -> np.ndarray:
    """Fewer than K winners, then many equal values of which some are selected."""
    rank = np.argsort(rng.random((t, e)), axis=1)
    winners = rng.integers(0, k, (t, 1))
    ties = rng.integers(k - winners, e - winners + 1)
    tail = -1 - rng.random((t, e))
    return np.where(rank < winners, 2 + rank / 64, np.where(rank < winners + ties, 1.0, tail))


def one_hot(rng: Rng, t: int, e: int) -> np.ndarray:
    hot = rng.integers(0, e, (t, 1)) == np.arange(e)
    return np.where(hot, rng.choice([1.0, 30.0, 1e4], (t, 1)), 0.0)


def edges(rng: Rng, t: int, e: int) -> np.ndarray:
    """Rows whose largest magnitude is one of EDGES."""
    z = rng.uniform(-1, 1, (t, e))
    z[np.arange(t), rng.integers(0, e, t)] = rng.choice([-1.0, 1.0], t)
    return z * rng.choice(EDGES, (t, 1))


def hot_lanes(rng: Rng, t: int, e: int) -> np.ndarray:
    """Large values in the experts that some of a warp's lanes hold, 1, 2, 4 or 8 neighbours each:
    the largest value of a lane then says little about how many others exceed it.
    """
    hot = rng.random((t, 32)) < rng.choice([0.04, 0.2, 0.5], (t, 1))
    lane = np.arange(e) // rng.choice([1, 2, 4, 8], (t, 1)) % 32
    return rng.standard_normal((t, e)) + 8 * np.take_along_axis(hot, lane, axis=1)


def whole_rows(rng: Rng, t: int, e: int, value: float) -> np.ndarray:
    return np.where(rng.random((t, 1)) < 0.2, value, rng.standard_normal((t, e)))


ROWS = {  # (rng, T, E, K) -> logits
    "normal": lambda r, t, e, k: r.choice([0.5, 2.0, 8.0]) * r.standard_normal((t, e)),
    "extreme": lambda r, t, e, k: extreme(r, t, e),
    "large": lambda r, t, e, k: r.standard_normal((t, e)) * 10 ** r.uniform(1, 30, (t, 1)),
    "tiny": lambda r, t, e, k: r.standard_normal((t, e)) * r.choice([1e-6, 1e-38, 1e-44], (t, 1)),
    "equal": lambda r, t, e, k: np.broadcast_to(r.choice([-100.0, -3, 0, 2, 90], (t, 1)), (t, e)),
    "levels": lambda r, t, e, k: r.integers(0, r.integers(1, 6), (t, e)) / 4,
    "ulps": lambda r, t, e, k: 1 + r.integers(0, 4, (t, e)) * 2.0**-23,
    "ascending": lambda r, t, e, k: np.sort(r.standard_normal((t, e)), axis=1),
    "descending": lambda r, t, e, k: -np.sort(r.standard_normal((t, e)), axis=1),
    "one hot": lambda r, t, e, k: one_hot(r, t, e),
    "threshold": lambda r, t, e, k: tied_at_threshold(r, t, e, k),
    "hot lanes": lambda r, t, e, k: hot_lanes(r, t, e),
    "edges": lambda r, t, e, k: edges(r, t, e),
    "some -inf": lambda r, t, e, k: sprinkled(r, t, e, -np.inf),
    "some inf": lambda r, t, e, k: sprinkled(r, t, e, np.inf),
    "some nan": lambda r, t, e, k: sprinkled(r, t, e, np.nan),
    "rows of -inf": lambda r, t, e, k: whole_rows(r, t, e, -np.inf),
    "rows of inf": lambda r, t, e, k: whole_rows(r, t, e, np.inf),
    "rows of nan": lambda r, t, e, k: whole_rows(r, t, e, np.nan),
    "zeros": lambda r, t, e, k: r.choice([0.0, -0.0], (t, e)),
    "low": lambda r, t, e, k: r.standard_normal((t, e)) - r.choice([60.0, 90, 120, 200], (t, 1)),
}

# Kinds of neighbouring rows. A row of NaN hides what its sequence's sums would be without it.
UNBOUNDED = ["some inf", "some nan", "rows of inf", "rows of nan"]
MIXES = {
    "moderate and large": ["normal", "large"],
    "finite": [kind for kind in ROWS if kind not in UNBOUNDED],
    "any": list(ROWS),
}


def logits(rng: Rng, kind: str, t: int, e: int, k: int, dtype: str) -> np.ndarray:
    if kind in ROWS:
        z = ROWS[kind](rng, t, e, k)
    else:  # neighbours of different kinds
        names = MIXES[kind]
        of_row = rng.integers(0, len(names), t)
        z = np.zeros((t, e))
        for i, name in enumerate(names):
            z[of_row == i] = ROWS[name](rng, int((of_row == i).sum()), e, k)
    with np.errstate(over="ignore", invalid="ignore"):
        return z.astype(np.float32).astype(DTYPES[dtype])


def floats(rng: Rng, kind: str, *shape: int, dtype: str = "float32") -> np.ndarray:
    """Weights, rows and cotangents."""
    x = rng.standard_normal(shape)
    if kind == "zero":
        x = np.zeros(shape)
    elif kind == "wild":
        special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38]
        x = np.where(rng.random(shape) < 0.02, rng.choice(special, shape), x)
    elif kind == "extreme":
        x = x * 10.0 ** rng.integers(-40, 38, shape)
    elif kind == "expanded" and x.size:  # as a sum hands it back: one number, or one row
        part = x[:1] if len(shape) > 1 and rng.random() < 0.5 else x.ravel()[:1].reshape(())
        with np.errstate(over="ignore"):
            return np.broadcast_to(part.astype(np.float32).astype(DTYPES[dtype]), shape)
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(DTYPES[dtype])


def where_to(rng: Rng, choice: Choice, inputs: Values) -> dict[str, str]:
    """The choice for the largest input, any for the others."""
    places = {name: PLACES[rng.integers(len(PLACES))] for name in inputs}
    first = next(iter(inputs))
    return {**places, first: choice.get("place", places[first])}


# --- the router ----------------------------------------------------------------------------------

ROUTER = {
    "experts": EXPERTS,
    "top_k": [1, 2, 2, 3, 4, 6, 8, 8, 8, 10, 16, 32, 33, 36, 64, "E", "E - 1"],
    "tokens": [0, 1, 2, 31, 32, 33, 70, 97, 129, 257, 331, 500, 700],
    "sequences": [1, 1, 2, 3, 5, "T"],
    "slice": [None] * 6 + ["start", "middle", "end", "beyond", "before", "past"],
    "dtype": ["float32", "float32", "bfloat16", "float16"],
    "kind": [*ROWS, *MIXES, *MIXES, "normal", "normal"],
    "score": ["softmax", "sigmoid", "sqrtsoftplus"],
    "select_on": ["score", "score", "logit"],
    "bias": [None, None, "small", "large", "closed", "wild"],
    "groups": [1, 1, 1, 2, 3, 4, 8, 16, 32, "E"],
    "kept": ["fewest", "some", "all"],
    "group_score_k": [1, 2, 3, "E"],
    "normalize": ["always", "always", "never", "if_k_gt_1"],
    "eps": [0.0, 0.0, 1e-20, 1e-6, 0.25, 1e3],
    "eps_mode": ["add", "clamp"],
    "scale": [1.0, 2.5, -0.3],
    "counts": ["actual", "unbiased"],
    "mask": [None, None, "random", "blocks", "none left"],
    "given": [None, None, None, "random", "repeated", "wild"],
    "backward_ids": [None, None, None, "wild", "repeated"],
    "cotangents": ["normal", "zero", "wild", "extreme", "expanded", "weights", "sums", "squares"],
    "place": PLACES,
}
MOST_LOGITS = 200_000


def bias_of(rng: Rng, kind: str | None, e: int) -> np.ndarray | None:
    if kind is None:
        return None
    bias = rng.standard_normal(e) * {"small": 0.1, "large": 50.0}.get(kind, 1.0)
    if kind == "closed":
        bias[rng.random(e) < 0.3] = -np.inf
    elif kind == "wild":
        special = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30], e)
        bias = np.where(rng.random(e) < 0.3, special, bias)
    return bias.astype(np.float32)


def mask_of(rng: Rng, kind: str | None, t: int) -> np.ndarray | None:
    return {
        None: lambda: None,
        "random": lambda: rng.random(t) < 0.7,
        "blocks": lambda: np.arange(t) // 40 % 2 == 0,
        "none left": lambda: np.zeros(t, bool),
    }[kind]()


def ids_of(rng: Rng, kind: str | None, t: int, k: int, e: int) -> np.ndarray | None:
    """Expert ids of slots."""
    if kind is None:
        return None
    ids = {
        "random": lambda: rng.integers(0, e, (t, k)),
        "distinct": lambda: (rng.integers(0, max(e, k), (t, 1)) + np.arange(k)) % max(e, k),
        "skewed": lambda: np.minimum(rng.geometric(1 / (1 + e / 8), (t, k)) - 1, e),
        "equal": lambda: np.full((t, k), rng.integers(0, e)),
        "sorted": lambda: np.sort(rng.integers(0, e, t * k)).reshape(t, k),
        "reversed": lambda: -np.sort(-rng.integers(0, e, t * k)).reshape(t, k),
        "repeated": lambda: rng.integers(0, min(e, 3), (t, k)),
        "unused": lambda: np.full((t, k), -1),
    }.get(kind, lambda: rng.integers(-2, e + 2, (t, k)))()
    if kind in ("skewed", "random", "holes", "wild"):
        ids = np.where(rng.random((t, k)) < 0.1, -1, ids)
    if kind == "wild":
        far = rng.choice([INT32.min, INT32.max, e, -e, e + 31], (t, k))
        ids = np.where(rng.random((t, k)) < 0.3, far, ids)
    return ids.astype(np.int32)


def divisor(n: int, wanted: int) -> int:
    return next(d for d in range(min(n, wanted), 0, -1) if n % d == 0)


def route_call(choice: Choice) -> Call:
    rng, e = generator(choice), choice["experts"]
    k = {"E": e, "E - 1": max(1, e - 1)}.get(choice["top_k"], choice["top_k"])
    k = min(k, e)
    t = min(choice["tokens"], MOST_LOGITS // e)
    sequences = max(1, t) if choice["sequences"] == "T" else min(choice["sequences"], max(1, t))
    total = -(-t // sequences) * sequences
    inputs: Values = {}
    if choice["slice"] is None:
        t = total
    else:  # the batch is longer than what this call has of it
        total = -(-2 * t // sequences) * sequences
        first = {"start": 0, "middle": t // 3, "end": total - t, "beyond": total - t // 2}
        first |= {"before": -5, "past": INT32.max}
        inputs["first_token"] = np.array(first[choice["slice"]], np.int32)
    inputs = {"logits": logits(rng, choice["kind"], t, e, k, choice["dtype"]), **inputs}
    inputs["bias"] = bias_of(rng, choice["bias"], e)
    inputs["token_mask"] = mask_of(rng, choice["mask"], t)
    inputs["given_indices"] = ids_of(rng, choice["given"], t, k, e)
    groups = divisor(e, e if choice["groups"] == "E" else choice["groups"])
    fewest = -(-k * groups // e)
    kept = {"fewest": fewest, "some": (fewest + groups) // 2, "all": groups}[choice["kept"]]
    names = ("score", "select_on", "normalize", "eps", "eps_mode", "scale", "counts")
    attributes = {
        **{name: choice[name] for name in names},
        "top_k": k,
        "num_sequences": sequences,
        "total_tokens": 0 if choice["slice"] is None else total,
        "num_groups": groups,
        "group_top_k": kept,
        "group_score_k": e if choice["group_score_k"] == "E" else choice["group_score_k"],
    }
    return Call("route", inputs, attributes, where_to(rng, choice, inputs))


FORWARD_ONLY = ("select_on", "num_groups", "group_top_k", "group_score_k", "counts")


def route_bwd_call(choice: Choice, forward: Call, outputs: Values) -> Call:
    """The backward call of a forward one and its outputs."""
    rng, kind = generator({**choice, "backward": True}), choice["cotangents"]
    inputs = {n: forward.inputs.get(n) for n in ("logits", "token_mask", "first_token")}
    t, k = outputs["indices"].shape
    other = ids_of(rng, choice["backward_ids"], t, k, choice["experts"])
    inputs["indices"] = outputs["indices"] if other is None else other
    parts = {"weights": "weights", "sums": "score_sums", "squares": "logsumexp_sq"}
    for name in parts.values():
        own = ("normal" if parts[kind] == name else "zero") if kind in parts else kind
        inputs["grad_" + name] = floats(rng, own, *outputs[name].shape)
    attributes = {n: v for n, v in forward.attributes.items() if n not in FORWARD_ONLY}
    return Call("route_bwd", inputs, attributes, where_to(rng, choice, inputs))


# --- the plan ------------------------------------------------------------------------------------

IDS = ["random", "distinct", "skewed", "equal", "sorted", "reversed", "repeated", "holes", "wild"]
PLAN = {
    "experts": [*EXPERTS, 1023, 1024, 1025, 5000],
    "top_k": [1, 2, 3, 6, 8, 8, 10, 16, 36],
    "tokens": [0, 1, 2, 31, 33, 130, 331, 700, 2048, 5001],
    "ids": [*IDS, "unused"],
    "weights": [None, "normal", "ties", "wild", "zero"],
    "capacity": [None, None, 0, 1, "mean", "mean + 1", "half", "double", INT32.max],
    "alignment": [1, 1, 2, 5, 8, 16, 128],
    "max_rows": [None, None, None, 0, "half", "eighth"],
    "more_rows": [0, 0, 0, 13],
    "drop_order": ["position", "weight"],
    "place": PLACES,
}


def plan_call(choice: Choice) -> Call:
    rng, e, t, k = generator(choice), *(choice[n] for n in ("experts", "tokens", "top_k"))
    inputs: Values = {"indices": ids_of(rng, choice["ids"], t, k, e)}
    order, kind = choice["drop_order"], choice["weights"]
    if kind is None and order == "weight":
        kind = "ties"
    if kind is not None:
        w = floats(rng, "normal" if kind == "ties" else kind, t, k)
        inputs["weights"] = np.round(w, 1) if kind == "ties" else w
    mean, alignment = t * k // e, choice["alignment"]
    sizes = {"mean": mean, "mean + 1": mean + 1, "half": mean // 2 + 1, "double": 2 * mean}
    capacity = sizes.get(choice["capacity"], choice["capacity"])
    parts = {"half": t * k // 2, "eighth": t * k // 8}
    rows = parts.get(choice["max_rows"], choice["max_rows"])
    options = {
        "capacity": capacity,
        "alignment": alignment,
        "max_rows": rows if rows is None else rows // alignment * alignment,
    }
    attributes = plan_attributes(t, k, e, drop_order=order, **options)
    attributes["capacity"] = -1 if capacity is None else capacity
    attributes["num_rows"] += choice["more_rows"]
    return Call("plan_dispatch", inputs, attributes, where_to(rng, choice, inputs))


# --- rows ----------------------------------------------------------------------------------------

MOVES = {
    "width": [1, 2, 3, 7, 8, 16, 33, 64, 100, 128, 256, 257, 1000, 1024, 2048, 4096, 7168],
    "tokens": [0, 1, 2, 7, 33, 130, 331],
    "top_k": [1, 2, 3, 4, 6, 8, 8, 10, 16, 33],
    "experts": [1, 4, 9, 64, 256],
    "dtype": ["float32", "bfloat16", "bfloat16", "float16"],
    "weights": [None, "normal", "normal", "wild", "extreme", "zero"],
    "values": ["normal", "normal", "wild", "extreme", "expanded"],
    "plan": ["whole", "capacity", "aligned", "cut", "spoilt", "random", "swapped", "one row"],
    "place": PLACES,
}
MOST_ELEMENTS = 500_000


def maps_of(rng: Rng, kind: str, plan: Values) -> dict[str, np.ndarray]:
    """row_of_slot and slot_of_row, which need not be inverse to each other."""
    rows, slots = plan["row_of_slot"].copy(), plan["slot_of_row"].copy()
    r, n = slots.size, rows.size
    far = [INT32.min, INT32.max, -1, -2]
    if kind == "spoilt":  # some out of range, some of another slot or row
        for ids, size in ((rows, r), (slots, n)):
            wrong = rng.choice([*far, size, size + 1, max(0, size - 1), 0], ids.shape)
            ids[...] = np.where(rng.random(ids.shape) < 0.2, wrong, ids)
    elif kind == "random":
        rows = rng.integers(-1, r + 1, rows.shape)
        slots = rng.integers(-1, n + 1, slots.shape)
    elif kind == "swapped":  # both are permutations, of which one is not the other's inverse
        slots = rng.permutation(slots)
    elif kind == "one row":
        rows, slots = np.full(rows.shape, r // 2), np.full(slots.shape, n // 2)
    return {"row_of_slot": rows.astype(np.int32), "slot_of_row": slots.astype(np.int32)}


def move_calls(choice: Choice, make_plan: Any) -> list[Call]:
    """Permute, combine and their gradients. `make_plan` runs plan_dispatch."""
    rng, d, k, e = generator(choice), *(choice[n] for n in ("width", "top_k", "experts"))
    t = min(choice["tokens"], max(1, MOST_ELEMENTS // (d * k)))
    kind, values, dtype = choice["plan"], choice["values"], choice["dtype"]
    options = {
        "capacity": {"capacity": t * k // (2 * e) + 1},
        "aligned": {"alignment": 8},
        "cut": {"max_rows": t * k // 2},
    }.get(kind, {})
    attributes = plan_attributes(t, k, e, **options)
    ids = ids_of(rng, "random", t, k, e)
    maps = maps_of(rng, kind, make_plan("plan_dispatch", {"indices": ids}, attributes))
    r = len(maps["slot_of_row"])
    x, rows, grad = (floats(rng, values, n, d, dtype=dtype) for n in (t, r, t))
    if values == "normal":  # what a row without a slot holds must not matter
        rows[(maps["slot_of_row"] < 0) & ~np.isin(np.arange(r), maps["row_of_slot"])] = np.nan
    weights = None if choice["weights"] is None else floats(rng, choice["weights"], t, k)
    rows_of = {"row_of_slot": maps["row_of_slot"]}
    calls = {
        "permute": {"x": x, **maps, "weights": weights},
        "permute_bwd": {"grad_rows": rows, **rows_of, "weights": weights},
        "permute_bwd_weights": {"grad_rows": rows, "x": x, **rows_of},
        "combine": {"rows": rows, **maps, "weights": weights},
        "combine_bwd": {"grad_y": grad, "rows": rows, **maps, "weights": weights},
    }
    return [Call(op, inputs, {}, where_to(rng, choice, inputs)) for op, inputs in calls.items()]
