# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The router and loss functions of Transformer Engine's users, written once for both front ends.

Each front end's `te` module gives them the signatures and return orders that its users call
(Transformer Engine 2.x: `pytorch.router`, `jax.router`). Numbers follow docs/numerics.md;
docs/te.md lists the differences.

Axis letters: T tokens, E experts, K experts per token, B bins or bytes, S sequences.
"""

from __future__ import annotations

import enum
from typing import Any, TypeVar

from duomoe import arguments
from duomoe.balance import BalanceFunctions
from duomoe.config import RouterConfig
from duomoe.functional import INTEGER_DTYPES
from duomoe.ops import FLOAT_DTYPES
from duomoe.results import Array

Enum = TypeVar("Enum", bound=enum.IntEnum)

# What sigmoid-like weights are divided by besides their sum.
EPS = 1e-20
INDEX_LIMITS = {"int16": 2**15, "int32": 2**31, "int64": 2**63}


class ScoreFunction(enum.IntEnum):
    """How logits become scores."""

    SIGMOID = 0
    SOFTMAX = 1
    SQRTSOFTPLUS = 2


class RoutingMapFormat(enum.IntEnum):
    """How a routing map is laid out: bool [T, E], or bits of uint8 [T, ceil(E / 8)], lowest
    first.
    """

    BYTEMAP = 0
    BITMAP_U8 = 1


class QBHistogramMode(enum.IntEnum):
    """How the histogram of quantile balancing is made; here both give the same counts."""

    TWO_KERNEL = 0
    FUSED_ATOMIC = 1


# By name and by value; plain, since older releases of torch.compile cannot trace a search in an
# enum.
MEMBERS: dict[type[enum.IntEnum], dict[Any, Any]] = {
    kind: {**{m.name: m for m in kind}, **{m.value: m for m in kind}}
    for kind in (ScoreFunction, RoutingMapFormat, QBHistogramMode)
}


def member(name: str, value: Any, kind: type[Enum]) -> Enum:
    """A member of `kind` by itself, its value or its name in any case."""
    key = value.upper() if isinstance(value, str) else value
    other = isinstance(key, (bool, *MEMBERS)) and not isinstance(key, kind)
    if isinstance(key, (str, int)) and not other and key in MEMBERS[kind]:
        return MEMBERS[kind][key]
    allowed = ", ".join(repr(m.name.lower()) for m in kind)
    raise ValueError(f"{name} must be one of {allowed}, or a {kind.__name__}, got {value!r}")


def _positive(name: str, value: Any) -> int | None:
    """A static int, or None where it is None or not positive, which turns an option off."""
    if value is None:
        return None
    value = arguments.integer(name, value)
    return value if value > 0 else None


class RouterFunctions(BalanceFunctions):
    """Transformer Engine's router and loss over one front end."""

    def _config(
        self,
        experts: int,
        topk: Any,
        use_pre_softmax: Any,
        num_groups: Any,
        group_topk: Any,
        scaling_factor: Any,
        score: ScoreFunction,
    ) -> RouterConfig:
        topk = arguments.integer("topk", topk, 1, experts)
        arguments.boolean("use_pre_softmax", use_pre_softmax)
        scale = 1.0
        if scaling_factor is not None:
            scale = arguments.float32("scaling_factor", scaling_factor)
        groups = {}
        if (kept := _positive("group_topk", group_topk)) is not None:
            num_groups = arguments.integer("num_groups", num_groups, 1, experts)
            arguments.integer("group_topk", kept, 1, num_groups)
            if experts % num_groups:
                raise ValueError(
                    f"the experts of logits ({experts}) must be a multiple of num_groups "
                    f"({num_groups})"
                )
            if kept * (experts // num_groups) < topk:
                raise ValueError(
                    f"group_topk = {kept} groups hold {kept * (experts // num_groups)} experts, "
                    f"fewer than topk = {topk}"
                )
            if topk % kept:
                raise ValueError(f"topk ({topk}) must be a multiple of group_topk ({kept})")
            groups = {
                "num_groups": num_groups,
                "group_top_k": kept,
                "group_score_k": topk // kept,
            }
        if score != ScoreFunction.SOFTMAX:
            weights: dict[str, Any] = {"normalize": "if_k_gt_1", "eps": EPS}
        elif use_pre_softmax:
            weights = {"normalize": False}
        else:
            weights = {"score_scope": "selected", "select_on": "logit"}
        name: Any = score.name.lower()
        return RouterConfig(experts, topk, score=name, scale=scale, **groups, **weights)

    def _flat_logits(self, logits: Any) -> Array:
        logits = self._frontend.check_array("logits", logits)
        if len(logits.shape) < 1:
            raise ValueError("logits must have shape [..., E], got []")
        self._float_array("logits", logits, len(logits.shape), "..., E")
        return self._frontend.merge_leading(logits, 1)

    def _map(self, indices: Array, experts: int, layout: RoutingMapFormat) -> Array:
        if layout == RoutingMapFormat.BYTEMAP:
            (routing_map,) = self._call("mark_experts", (indices,), {"num_experts": experts})
        else:
            sizes = {"num_experts": experts, "num_bytes": -(-experts // 8)}
            (routing_map,) = self._call("mark_expert_bits", (indices,), sizes)
        return routing_map

    def route_dense(
        self,
        logits: Array,
        topk: int,
        use_pre_softmax: bool,
        num_groups: int | None,
        group_topk: int | None,
        scaling_factor: float | None,
        score_function: Any,
        expert_bias: Array | None,
        routing_map_format: Any,
        topk_indices: Any,
        qb_histogram: Array | None,
        qb_bin_bounds: Array | None,
        qb_histogram_mode: Any,
    ) -> tuple[Array, Array, Any]:
        """(probs [..., E], routing map or indices, histogram or None)."""
        score = member("score_function", score_function, ScoreFunction)
        layout = member("routing_map_format", routing_map_format, RoutingMapFormat)
        flat = self._flat_logits(logits)
        leading, experts = tuple(logits.shape[:-1]), logits.shape[-1]
        config = self._config(
            experts, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score
        )
        if expert_bias is not None:
            expert_bias = self._bias(expert_bias, "expert_bias")
            arguments.shape("expert_bias", expert_bias.shape, (experts,), "E")
        if topk_indices is not None:
            self._check_index_buffer(topk_indices, (*leading, config.top_k), experts)
        bins = None
        balancing = (qb_histogram, qb_bin_bounds, qb_histogram_mode)
        if any(x is not None for x in balancing):
            if any(x is None for x in balancing):
                raise ValueError(
                    "qb_histogram, qb_bin_bounds and qb_histogram_mode must be given together"
                )
            qb_histogram = self._check_histogram(qb_histogram, experts)
            member("qb_histogram_mode", qb_histogram_mode, QBHistogramMode)
            if config.num_groups > 1:
                raise ValueError(
                    "quantile balancing (qb_histogram) is defined without groups, got "
                    f"num_groups = {num_groups}, group_topk = {group_topk}"
                )
            if config.top_k == experts:
                raise ValueError(
                    f"topk must be below the number of experts with qb_histogram, got {experts}"
                )
            bins = self._quantile_call(
                flat,
                config,
                expert_bias,
                None,
                qb_bin_bounds,
                qb_histogram.shape[1],
                "qb_bin_bounds",
            )
        self._frontend.check_device(
            "fused_topk_with_score_function",
            {
                "logits": flat,
                "expert_bias": expert_bias,
                "topk_indices": topk_indices,
                "qb_histogram": qb_histogram,
                "qb_bin_bounds": qb_bin_bounds,
            },
        )
        routing = self.route(flat, config, bias=expert_bias)
        attributes = {"num_experts": experts, "probs_dtype": self._frontend.dtype(flat)}
        (probs,) = self._call("scatter_weights", (routing.weights, routing.indices), attributes)
        counts = None if bins is None else self._call("count_quantile_bins", *bins)[1]
        # The caller's buffers come last, ids before counts, which must not be added twice.
        if topk_indices is not None:
            chosen = self._split_leading(routing.indices, leading)
            output = self._frontend.write(topk_indices, chosen)
        else:
            output = self._split_leading(self._map(routing.indices, experts, layout), leading)
        if counts is not None:
            qb_histogram = self._frontend.accumulate(qb_histogram, counts)
        return self._split_leading(probs, leading), output, qb_histogram

    @staticmethod
    def _split_leading(x: Array, leading: tuple[Any, ...]) -> Array:
        return x if len(leading) == 1 else x.reshape((*leading, x.shape[-1]))

    def _check_index_buffer(self, buffer: Any, wanted: tuple[int, ...], experts: int) -> None:
        buffer = self._frontend.check_buffer("topk_indices", buffer)
        arguments.shape("topk_indices", buffer.shape, wanted, "..., K")
        dtype = self._frontend.dtype(buffer)
        if dtype not in INDEX_LIMITS:
            raise TypeError(f"topk_indices must be {', '.join(INDEX_LIMITS)}, got {dtype}")
        if experts > INDEX_LIMITS[dtype]:
            raise ValueError(f"topk_indices of {dtype} cannot hold the ids of {experts} experts")

    def _check_histogram(self, histogram: Any, experts: int) -> Array:
        histogram = self._array("qb_histogram", histogram, 2, "E, B")
        if histogram.shape[1] < 1:
            raise ValueError(f"qb_histogram must have at least one bin, got {histogram.shape}")
        arguments.shape("qb_histogram", histogram.shape, (experts, histogram.shape[1]), "E, B")
        if (dtype := self._frontend.dtype(histogram)) != "int32":
            raise TypeError(f"qb_histogram must be int32, got {dtype}")
        return histogram

    def fused_compute_score_for_moe_aux_loss(
        self,
        logits: Array,
        topk: int,
        score_function: str | int | ScoreFunction,
        routing_map_format: str | int | RoutingMapFormat = RoutingMapFormat.BYTEMAP,
    ) -> tuple[Array, Array]:
        """The scores over all experts and the plain top-K that an auxiliary loss counts.

        Without bias, groups and scale: softmax(z), or s / sum(s) for the other scores, also for
        K = 1.

        Args:
            logits: [..., E] float32, bfloat16 or float16; leading axes are tokens.
            topk: K.
            score_function: "softmax", "sigmoid", "sqrtsoftplus" or a ScoreFunction.
            routing_map_format: "bytemap", "bitmap_u8" or a RoutingMapFormat.

        Returns:
            routing map: bool [..., E] or uint8 [..., ceil(E / 8)].
            scores: [..., E] float32; differentiable.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        score = member("score_function", score_function, ScoreFunction)
        layout = member("routing_map_format", routing_map_format, RoutingMapFormat)
        flat = self._flat_logits(logits)
        leading, experts = tuple(logits.shape[:-1]), logits.shape[-1]
        topk = arguments.integer("topk", topk, 1, experts)
        name: Any = score.name.lower()
        plain = RouterConfig(experts, topk, score=name, normalize=False)
        routing = self.route(self._frontend.stop_gradient(flat), plain)
        (scores,) = self._call("normalize_scores", (flat,), {"score": name})
        routing_map = self._map(routing.indices, experts, layout)
        return self._split_leading(routing_map, leading), self._split_leading(scores, leading)

    def aux_loss(
        self,
        probs: Array,
        tokens_per_expert: Array,
        total_num_tokens: Any,
        num_experts: Any,
        topk: int,
        coeff: float,
    ) -> Array:
        """Scalar of rank 0 in probs's dtype; None as a count means that of probs."""
        probs = self._float_array("probs", probs, 2, "T, E or S * E")
        tokens, columns = probs.shape
        num_experts = columns if num_experts is None else num_experts
        num_experts = arguments.integer("num_experts", num_experts, 1)
        if columns % num_experts:
            raise ValueError(
                f"the columns of probs ({columns}) must be a multiple of num_experts "
                f"({num_experts})"
            )
        attributes = {
            "num_experts": num_experts,
            "top_k": arguments.integer("topk", topk, 1, num_experts),
            "coeff": arguments.number("coeff", coeff),
            "num_tokens": 0,
        }
        loads = self._frontend.check_array("tokens_per_expert", tokens_per_expert)
        arguments.shape("tokens_per_expert", loads.shape, (columns,), "E or S * E")
        loads = self._counts("tokens_per_expert", loads, FLOAT_DTYPES)
        if total_num_tokens is None or arguments.is_integer(total_num_tokens):
            count = tokens
            if total_num_tokens is not None:
                count = arguments.integer("total_num_tokens", total_num_tokens, 0)
            live = self._frontend.count(count)
            attributes["num_tokens"] = count if live is None else 0
        else:
            live = self._live_tokens(total_num_tokens)
        (loss,) = self._call("aux_loss", (probs, loads, live), attributes)
        return self._frontend.cast(loss, self._frontend.dtype(probs))

    def _live_tokens(self, total: Any) -> Array:
        """A count that is known on the device, as float32 of rank 0."""
        if not hasattr(total, "shape"):
            raise TypeError(
                "total_num_tokens must be an int or an integer array of rank 0, got "
                f"{type(total).__name__}"
            )
        total = self._frontend.check_array("total_num_tokens", total)
        arguments.shape("total_num_tokens", total.shape, (), "")
        return self._counts("total_num_tokens", total, ())

    def _counts(self, name: str, value: Array, floats: tuple[str, ...]) -> Array:
        """Integers of any size as float32."""
        dtype = self._frontend.dtype(value)
        if dtype not in (*INTEGER_DTYPES, *floats):
            allowed = "integers" + (f", {', '.join(floats)}" if floats else "")
            raise TypeError(f"{name} must be {allowed}, got {dtype}")
        return self._frontend.cast(self._frontend.stop_gradient(value), "float32")
