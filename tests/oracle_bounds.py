# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""How far an op's float32 arithmetic may stray from the float64 oracle.

U = 2^-24 is the most that one float32 rounding changes a value, relatively: half an ulp. A bound is
a count of roundings, times U, times the sum of the magnitudes that are added. Where that sum is 0,
so is the bound: the result must be exactly 0. An output of 16 bits is rounded once more. A bound of
NaN says that the value is not finite, and must be met as it is. Integers and flags are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from duomoe import oracle

U = 2.0**-24
DENORMAL = 2.0**-149
# A score this much smaller than the row's largest may be lost.
LOST = 1e-18
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = {"float32": 0.0, "bfloat16": 2.0**-133, "float16": 2.0**-24}

Values = dict[str, Any]


def assert_close(name: str, got: np.ndarray, want: np.ndarray, bound: np.ndarray | float) -> None:
    """Whether `got` is within `bound` of `want`, and one rounding to its own type."""
    assert got.shape == want.shape, f"{name} has shape {got.shape}, not {want.shape}"
    if want.dtype in (np.int32, np.bool_, np.uint8):
        np.testing.assert_array_equal(got, want, err_msg=name, strict=True)
        return
    bound = np.broadcast_to(bound, want.shape)
    special = np.isnan(bound)
    assert (np.isfinite(want) != special).all(), f"the oracle's {name} is not finite"
    np.testing.assert_array_equal(got[special].astype(want.dtype), want[special], err_msg=name)
    kind = got.dtype.name
    with np.errstate(invalid="ignore"):  # inf - inf
        error = np.abs(got.astype(np.float64) - want)
        rounding = ROUNDING[kind] * (np.abs(want) + bound) + SMALLEST[kind] / 2
        tolerance = bound + (bound > 0) * rounding
    bad = ~(error <= tolerance) & ~special
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{name}[{', '.join(map(str, at))}] is {got[at]!r}, not {want[at]!r}: off by "
            f"{error[at]:.3g}, allowed {tolerance[at]:.3g}; {bad.sum()} of {bad.size} are wrong"
        )


def f64(x: Any) -> np.ndarray:
    """Magnitudes as float64."""
    return np.abs(np.asarray(x).astype(np.float64))


# -- route -----------------------------------------------------------------------------------------


def share_count(z: np.ndarray, score: str) -> np.ndarray:
    """Roundings of one token's scores over their sum."""
    # A difference of logits carries U of itself, which exp turns into a relative error.
    reach = z.max() - z if score == "softmax" or z.max() < -50 else np.zeros(len(z))
    return 18 + len(z) / 32 + reach


class Row:
    """One token's float64 quantities, with the roundings that its float32 values may carry."""

    def __init__(self, z: np.ndarray, ids: np.ndarray, a: Values) -> None:
        top_k, experts = a["top_k"], len(z)
        divide = a["normalize"] == "always" or (a["normalize"] == "if_k_gt_1" and top_k > 1)
        log_s = oracle.log_scores(z, a["score"])
        self.z, self.ids, peak = z, ids[ids >= 0], z.max()
        softmax = a["score"] == "softmax"
        reach = np.abs(z - peak)
        self.share_count = share_count(z, a["score"])
        self.softmax_count = 18 + experts / 32 + reach
        self.shares = oracle.normalized(z, a["score"])
        self.softmax = np.exp(z - oracle.logsumexp(z))
        self.logsumexp = oracle.logsumexp(z)
        self.logsumexp_error = U * (
            abs(self.logsumexp) + 2 * abs(self.logsumexp - peak) + 16 + experts / 32
        )
        selected = z[self.ids]
        top = peak if softmax else selected.max(initial=-np.inf)
        spread = np.abs(selected - top) if softmax or top < -50 else np.zeros(len(selected))
        self.weight_count = 18 + top_k / 32 + (divide + 1) * spread
        if softmax and not divide:
            self.weight_count += experts / 32
        weights, through = oracle.selected_weights(log_s[self.ids], divide, a["eps"], a["eps_mode"])
        self.weights = weights * a["scale"]
        self.rest = abs(1 - through.sum()) if softmax else 0.0
        self.own = through
        self.lost = LOST * self.weights.max(initial=0) if divide else 0.0
        self.slope = oracle.log_scores_bwd(np.ones(experts), z, a["score"])
        if softmax:
            self.slope = np.ones(experts)


def rows_of(inputs: Values, attributes: Values, indices: np.ndarray) -> Any:
    logits = inputs["logits"].astype(np.float64)
    live = oracle.live_tokens(
        len(logits),
        inputs.get("token_mask"),
        inputs.get("first_token"),
        attributes["total_tokens"],
        attributes["num_sequences"],
    )
    with np.errstate(all="ignore"):
        for t, s in live:
            yield t, s, Row(logits[t], indices[t], attributes)


def route(inputs: Values, attributes: Values, want: Values) -> Values:
    bounds = {n: np.zeros(want[n].shape) for n in ("weights", "score_sums", "logsumexp_sq")}
    for t, s, row in rows_of(inputs, attributes, want["indices"]):
        additions = want["num_tokens"][s] / 8 + 8
        used = want["indices"][t] >= 0
        relative = U * row.weight_count * row.weights
        bounds["weights"][t, used] = relative + row.lost + 4 * DENORMAL
        bounds["score_sums"][s] += U * (row.share_count + additions) * row.shares + LOST
        bounds["logsumexp_sq"][s] += 2 * abs(row.logsumexp) * row.logsumexp_error
        bounds["logsumexp_sq"][s] += U * additions * row.logsumexp**2
    return bounds


def route_bwd(inputs: Values, attributes: Values, want: Values) -> Values:
    g_weights, g_shares = f64(inputs["grad_weights"]), f64(inputs["grad_score_sums"])
    g_logsumexp = f64(inputs["grad_logsumexp_sq"])
    bound = np.zeros(want["grad_logits"].shape)
    for t, s, row in rows_of(inputs, attributes, inputs["indices"]):
        experts = len(row.z)
        g = g_weights[t, inputs["indices"][t] >= 0]
        through = row.weights * g
        count = 40 + len(g) / 16 + row.weight_count.max(initial=0)
        selected = (through + row.own * through.sum()) * row.slope[row.ids]
        np.add.at(bound[t], row.ids, U * count * selected)
        bound[t] += U * (count + row.softmax_count) * row.softmax * row.rest * through.sum()
        through_shares = row.shares * (g_shares[s] + row.shares @ g_shares[s]) * row.slope
        bound[t] += U * (20 + experts / 32 + row.share_count) * through_shares
        factor = 2 * g_logsumexp[s] * row.softmax
        bound[t] += U * (4 + row.softmax_count) * factor * abs(row.logsumexp)
        bound[t] += factor * row.logsumexp_error
        bound[t] += row.lost * g.sum() + LOST * g_shares[s].max() + 64 * DENORMAL
    return {"grad_logits": bound}


# -- the other ops ---------------------------------------------------------------------------------


def live(inputs: Values, name: str) -> np.ndarray:
    """Magnitudes of [T, ...], 0 for masked tokens."""
    return np.where(inputs.get("token_mask", np.array([True]))[:, None], f64(inputs[name]), 0.0)


def gate(inputs: Values, attributes: Values, want: Values) -> Values:
    # 1.01 because x and the router are rounded to gate_dtype first.
    x, router = live(inputs, "x") * 1.01, f64(inputs["router"])
    return {"logits": U * (x.shape[1] + 2) * (x @ router + f64(inputs["router_bias"]))}


def gate_bwd_x(inputs: Values, attributes: Values, want: Values) -> Values:
    g, router = live(inputs, "grad_logits") * 1.01, f64(inputs["router"])
    return {"grad_x": U * (router.shape[1] + 1) * (g @ router.T)}


def gate_bwd_params(inputs: Values, attributes: Values, want: Values) -> Values:
    g, x = live(inputs, "grad_logits"), live(inputs, "x") * 1.01
    additions = len(x) + 1
    return {
        "grad_router": U * additions * (x.T @ g),
        "grad_router_bias": U * additions * g.sum(axis=0),
    }


def once(inputs: Values, attributes: Values, want: Values) -> Values:
    """One rounding of the right result."""
    return {n: U * 1.0001 * np.abs(v) for n, v in want.items()}


def magnitudes(inputs: Values) -> Values:
    """Floats as magnitudes; plans and what is absent as they are."""
    return {n: v if v is None or v.dtype == np.int32 else f64(v) for n, v in inputs.items()}


def dot_roundings(width: int) -> float:
    """Roundings of a dot product: 256 columns, joined by eights and then in a butterfly."""
    return width / 256 + 9


def permute(inputs: Values, attributes: Values, want: Values) -> Values:
    copies = inputs.get("weights") is None
    return {"rows": 0.0 if copies else U * 1.0001 * np.abs(want["rows"])}


def permute_bwd(inputs: Values, attributes: Values, want: Values) -> Values:
    sums = oracle.permute_bwd(**magnitudes(inputs))["grad_x"]
    return {"grad_x": U * inputs["row_of_slot"].shape[1] * sums}


def permute_bwd_weights(inputs: Values, attributes: Values, want: Values) -> Values:
    sums = oracle.permute_bwd_weights(**magnitudes(inputs))["grad_weights"]
    return {"grad_weights": U * dot_roundings(inputs["x"].shape[1]) * sums}


def combine(inputs: Values, attributes: Values, want: Values) -> Values:
    return {"y": U * inputs["row_of_slot"].shape[1] * oracle.combine(**magnitudes(inputs))["y"]}


def combine_bwd(inputs: Values, attributes: Values, want: Values) -> Values:
    sums = oracle.combine_bwd(**magnitudes(inputs))["grad_weights"]
    return {
        "grad_rows": U * np.abs(want["grad_rows"]),
        "grad_weights": U * dot_roundings(inputs["rows"].shape[1]) * sums,
    }


def scale_rows_bwd(inputs: Values, attributes: Values, want: Values) -> Values:
    sums = oracle.scale_rows_bwd(**magnitudes(inputs))["grad_scale"]
    return {
        "grad_x": U * 1.0001 * np.abs(want["grad_x"]),
        "grad_scale": U * dot_roundings(inputs["x"].shape[1]) * sums,
    }


def product(op: str, output: str, depth: Callable[[Values], Any]) -> Callable[..., Values]:
    def bounds(inputs: Values, attributes: Values, want: Values) -> Values:
        sums = getattr(oracle, op)(**magnitudes(inputs), **attributes)[output]
        return {output: U * (depth(inputs) + 1) * sums}

    return bounds


# -- expert bias -----------------------------------------------------------------------------------


def update_expert_bias(inputs: Values, attributes: Values, want: Values) -> Values:
    # The rate rounds, and with a mean of steps the mean, the difference and the product.
    of_step, of_mean = (3, 1) if attributes["center"] == "yes" else (1, 0)
    unit = {**inputs, "bias": np.zeros(len(inputs["bias"]))}
    steps = oracle.update_expert_bias(**unit, **{**attributes, "rate": 1.0})["updated_bias"]
    moved = abs(attributes["rate"]) * (of_step * np.abs(steps) + of_mean)
    return {"updated_bias": U * 1.0001 * (moved + np.abs(want["updated_bias"]))}


def score_error(z: np.ndarray, score: str, select_on: str) -> np.ndarray:
    """How far one token's s[E] may be from the oracle's; 3 ulp are at most 6 U."""
    if select_on == "logit":
        return np.zeros(len(z))
    s = oracle.selection_values(z, score, select_on)
    with np.errstate(invalid="ignore"):
        error = U * s * (share_count(z, score) if score == "softmax" else 6)
    return np.where(s > 0, error + 4 * DENORMAL, 0.0)


def count_quantile_bins(inputs: Values, attributes: Values, want: Values) -> Values:
    top_k, score, select_on = (attributes[n] for n in ("top_k", "score", "select_on"))
    bias = inputs.get("bias")
    bound = np.zeros(len(want["cutoffs"]))
    for t, z in enumerate(inputs["logits"].astype(np.float64)):
        if inputs.get("token_mask") is None or inputs["token_mask"][t]:
            with np.errstate(all="ignore"):
                values = oracle.selection_values(z, score, select_on, 0.0 if bias is None else bias)
                e = oracle.ranking(values)[top_k]
                bound[t] = score_error(z, score, select_on)[e]
            bound[t] += U * 1.0001 * abs(values[e]) if bias is not None else 0
            bound[t] = bound[t] if np.isfinite(values[e]) else np.nan
    return {"cutoffs": bound}


def update_expert_bias_by_quantile(inputs: Values, attributes: Values, want: Values) -> Values:
    sizes = [np.abs(inputs[n]).max(initial=0) for n in ("bias", "lower", "upper")]
    return {
        "updated_bias": U * 1.0001 * np.abs(want["updated_bias"]) + 2.0**-48 * float(sum(sizes))
    }


# -- dense routing ---------------------------------------------------------------------------------


def scatter_weights(inputs: Values, attributes: Values, want: Values) -> Values:
    """The first addition, to 0, does not round."""
    magnitudes, ones = f64(inputs["weights"]), np.ones(inputs["weights"].shape)
    given = {"indices": inputs["indices"], **attributes}
    sums = oracle.scatter_weights(weights=magnitudes, **given)["probs"]
    slots = oracle.scatter_weights(weights=ones, **given)["probs"]
    return {"probs": U * np.maximum(slots - 1, 0) * sums + DENORMAL * (slots > 0)}


def normalize_scores(inputs: Values, attributes: Values, want: Values) -> Values:
    counts = [share_count(z, attributes["score"]) for z in inputs["logits"].astype(np.float64)]
    with np.errstate(invalid="ignore"):  # inf * 0
        relative = U * np.reshape(counts, want["scores"].shape) * want["scores"]
    return {"scores": np.where(want["scores"] > 0, relative + 4 * DENORMAL, 0.0)}


@np.errstate(all="ignore")
def normalize_scores_bwd(inputs: Values, attributes: Values, want: Values) -> Values:
    score, g = attributes["score"], f64(inputs["grad_scores"])
    bound = np.zeros(want["grad_logits"].shape)
    for t, z in enumerate(inputs["logits"].astype(np.float64)):
        p, experts = oracle.normalized(z, score), len(z)
        slope = 1.0 if score == "softmax" else oracle.log_scores_bwd(np.ones(experts), z, score)
        through = p * (g[t] + p @ g[t]) * slope
        count = 20 + experts / 32 + share_count(z, score)
        bound[t] = np.where(p > 0, U * count * through + 64 * DENORMAL, 0.0)
    return {"grad_logits": bound}


def aux_loss(inputs: Values, attributes: Values, want: Values) -> Values:
    # Chunks of `length` tokens are summed in 8 streams, then the streams, then the chunks in 16
    # strands, then the strands; each sum's first addition is to 0. The sum over the columns is in
    # float64.
    tokens = max(1, len(inputs["probs"]))
    length = 8 * max(2, -(-tokens // 2**11))
    chunks = -(-tokens // length)
    additions = -(-min(tokens, length) // 8) + min(tokens, 8) + -(-chunks // 16) + min(chunks, 16)
    additions -= 4
    absolute = {**inputs, **{n: f64(inputs[n]) for n in ("probs", "expert_loads")}}
    sums = oracle.aux_loss(**absolute, **attributes)["loss"]
    return {"loss": U * 1.0001 * (additions + 1) * sums}


# -- row maps --------------------------------------------------------------------------------------


def cast(inputs: Values, attributes: Values, want: Values) -> Values:
    """One rounding to the result's type; infinities stay."""
    return {n: np.where(np.isfinite(x), 2.0**-1000, np.nan) for n, x in want.items()}


# -- experts ---------------------------------------------------------------------------------------


# Roundings of f(x) and, of the magnitudes that f'(x) adds, of f'(x). The sum of the roundings on
# the way: e^v 2, 1 + e^v 1, the division 1, v's own error 1 (left over of it in e^(v + error)), the
# two products 2, and the same for the normal distribution function with 4.5 for its argument t and
# 2 for its polynomial. test_activations.py measures them.
ROUNDINGS = {
    "silu": (9, 9),
    "gelu": (13, 10),
    "gelu_tanh": (9, 9),
    "relu": (0, 0),
    "relu_squared": (1, 0),
}


def activation_errors(x: np.ndarray, attributes: Values) -> tuple[np.ndarray, np.ndarray]:
    """How far f(x) and f'(x) may be from the oracle's, for any x in float64."""
    name = attributes["activation"]
    value, slope = oracle.activation_of(name, x, attributes["alpha"])
    # f'(x) = f(x) / x + a term that may cancel it.
    with np.errstate(invalid="ignore"):
        share = np.where(x == 0, slope, value / x)
    size = np.abs(share) + np.abs(slope - share)
    of_value, of_slope = ROUNDINGS[name]
    return (
        U * of_value * np.abs(value) + DENORMAL * (value != 0),
        U * of_slope * size + 2 * DENORMAL * (slope != 0),
    )


def activate(inputs: Values, attributes: Values, want: Values) -> Values:
    return {"out": activation_errors(inputs["x"].astype(np.float64), attributes)[0]}


def activate_bwd(inputs: Values, attributes: Values, want: Values) -> Values:
    size = np.abs(want["grad_x"])
    _, of_slope = activation_errors(inputs["x"].astype(np.float64), attributes)
    rounding = U * size + DENORMAL * (size > 0)
    return {"grad_x": f64(inputs["grad_out"]) * of_slope + rounding}


def glu_parts(inputs: Values, attributes: Values) -> tuple[np.ndarray, np.ndarray]:
    """min(gate, limit) and the magnitude of what multiplies f of it."""
    bound = attributes["limit"] or np.inf
    gate, up = (inputs[n].astype(np.float64) for n in ("gate", "up"))
    return np.minimum(gate, bound), np.abs(np.clip(up, -bound, bound) + attributes["up_offset"])


def glu(inputs: Values, attributes: Values, want: Values) -> Values:
    gate, factor = glu_parts(inputs, attributes)
    of_value, _ = activation_errors(gate, attributes)
    size = np.abs(want["out"])
    # The factor and the product round.
    return {"out": factor * of_value + 2 * U * size + DENORMAL * (size > 0)}


def glu_bwd(inputs: Values, attributes: Values, want: Values) -> Values:
    gate, factor = glu_parts(inputs, attributes)
    of_value, of_slope = activation_errors(gate, attributes)
    g, of_gate, of_up = f64(inputs["grad_out"]), *(np.abs(v) for v in want.values())
    through_slope = g * factor * of_slope + 3 * U * of_gate + DENORMAL
    through_value = g * of_value + U * of_up + DENORMAL
    return {
        "grad_gate": np.where(of_gate > 0, through_slope, 0.0),
        "grad_up": np.where(of_up > 0, through_value, 0.0),
    }


BOUNDS: dict[str, Callable[..., Values]] = {
    "gate": gate,
    "gate_bwd_x": gate_bwd_x,
    "gate_bwd_params": gate_bwd_params,
    "route": route,
    "route_bwd": route_bwd,
    "load_balancing_loss": once,
    "load_balancing_loss_bwd": once,
    "z_loss": once,
    "z_loss_bwd": once,
    "update_expert_bias": update_expert_bias,
    "count_quantile_bins": count_quantile_bins,
    "update_expert_bias_by_quantile": update_expert_bias_by_quantile,
    "scatter_weights": scatter_weights,
    "scatter_weights_bwd": lambda *_: {"grad_weights": 0.0},
    "mark_experts": lambda *_: {},
    "mark_expert_bits": lambda *_: {},
    "normalize_scores": normalize_scores,
    "normalize_scores_bwd": normalize_scores_bwd,
    "aux_loss": aux_loss,
    "aux_loss_bwd": once,
    "plan_dispatch": lambda *_: {},
    "count_mismatches": lambda *_: {},
    "permute": permute,
    "permute_bwd": permute_bwd,
    "permute_bwd_weights": permute_bwd_weights,
    "combine": combine,
    "combine_bwd": combine_bwd,
    **dict.fromkeys(
        ("plan_mask", "read_row_map", "invert_rows", "sort_slots", "place_chunks"), lambda *_: {}
    ),
    "cast": cast,
    "cast_bwd": cast,
    "grouped_matmul": product("grouped_matmul", "out", lambda i: i["rows"].shape[1]),
    "grouped_matmul_bwd_rows": product(
        "grouped_matmul_bwd_rows", "grad_rows", lambda i: i["grad_out"].shape[1]
    ),
    "grouped_matmul_bwd_w": product(
        "grouped_matmul_bwd_w",
        "grad_w",
        lambda i: i["expert_counts"].astype(float)[:, None, None],
    ),
    "grouped_matmul_bwd_bias": product(
        "grouped_matmul_bwd_bias",
        "grad_bias",
        lambda i: i["expert_counts"].astype(float)[:, None],
    ),
    "activate": activate,
    "activate_bwd": activate_bwd,
    "glu": glu,
    "glu_bwd": glu_bwd,
    "scale_rows": once,
    "scale_rows_bwd": scale_rows_bwd,
    "add": once,
}
