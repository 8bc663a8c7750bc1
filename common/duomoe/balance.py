# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Balancing without a loss: the selection bias follows the experts' load, between steps and without
a gradient.

Axis letters: T tokens, E experts, K experts per token, B bins.
"""

from __future__ import annotations

from typing import Any

from duomoe import arguments
from duomoe.config import RouterConfig
from duomoe.functional import Functions
from duomoe.results import Array, QuantileBins

LOAD_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16")


class BalanceFunctions(Functions):
    """The updates of the selection bias of one front end."""

    def _bias(self, bias: Any, name: str = "bias") -> Array:
        bias = self._frontend.stop_gradient(self._array(name, bias, 1, "E"))
        if (dtype := self._frontend.dtype(bias)) != "float32":
            raise TypeError(f"{name} must be float32, got {dtype}")
        if bias.shape[0] < 1:
            raise ValueError(f"{name} must have at least one expert, got {list(bias.shape)}")
        return bias

    def _update_expert_bias(
        self, bias: Array, expert_counts: Array, rate: float, center: bool, over: Any
    ) -> Array:
        bias = self._bias(bias)
        counts = self._frontend.check_array("expert_counts", expert_counts)
        arguments.shape("expert_counts", counts.shape, bias.shape, "E")
        counts = self._excess(counts)
        rate = arguments.float32("rate", rate)
        arguments.boolean("center", center)
        self._frontend.check_over(over)
        if over is not None:
            counts = self._frontend.all_sum(counts, over)
        attributes = {"rate": rate, "center": "yes" if center else "no"}
        (updated,) = self._call("update_expert_bias", (bias, counts), attributes)
        return updated

    def _excess(self, counts: Array) -> Array:
        """Counts less the smallest of them, which the rule does not see, as int32: neither large
        counts nor their sum over ranks leave it.
        """
        if (dtype := self._frontend.dtype(counts)) not in LOAD_DTYPES:
            raise TypeError(f"expert_counts must be one of {', '.join(LOAD_DTYPES)}, got {dtype}")
        if dtype != "int64":
            counts = self._integers("expert_counts", counts)
        return self._integers("expert_counts", counts - counts.min())

    def count_quantile_bins(
        self,
        logits: Array,
        config: RouterConfig,
        *,
        bias: Array | None = None,
        token_mask: Array | None = None,
        bounds: Array | None = None,
        num_bins: int = 1000,
    ) -> QuantileBins:
        """Count, for every expert, the biases with which tokens would just have selected it.

        With the cutoff of a token its (K+1)-th selection value, expert e is among its K best if its
        bias exceeds cutoff - s. The K/E quantile of these differences over the tokens is therefore
        the bias that gives the expert its fair share: `update_expert_bias_by_quantile` reads it off
        (quantile balancing, as in Kimi K3). Without a gradient.

        Args:
            logits: [T, E] float32, bfloat16 or float16.
            config: the RouterConfig, with K < E, without groups.
            bias: [E] float32 that selected; None counts as zeros and needs `bounds`.
            token_mask: [T] bool; a masked token (False) is not counted, its cutoff is 0.
            bounds: [2] float32, the range of the bins; differences beyond it fall into the end
                bins. None means min(bias) - 1 and max(bias) + 1, which holds every difference of
                scores between 0 and 1: for the other scores and for select_on="logit" it must be
                given.
            num_bins: B, equal bins.

        Returns:
            QuantileBins. Counts of several micro-batches with the same bias and bounds may be
            added.

        Raises:
            ValueError, TypeError: on a shape, dtype or option that does not fit.
        """
        inputs, attributes = self._quantile_call(
            logits, config, bias, token_mask, bounds, num_bins, "bounds"
        )
        cutoffs, counts = self._call("count_quantile_bins", inputs, attributes)
        return QuantileBins(cutoffs=cutoffs, counts=counts, lower=inputs[3], upper=inputs[4])

    def _quantile_call(
        self,
        logits: Array,
        config: RouterConfig,
        bias: Array | None,
        token_mask: Array | None,
        bounds: Array | None,
        num_bins: int,
        bounds_name: str,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The checked inputs and attributes of the op."""
        arguments.record("config", config, RouterConfig)
        logits = self._float_array("logits", logits, 2, "T, E")
        tokens, experts = logits.shape
        if experts != config.num_experts:
            raise ValueError(
                f"logits must have shape [T, E] with E = config.num_experts = "
                f"{config.num_experts}, got {list(logits.shape)}"
            )
        if config.top_k == experts:
            raise ValueError(f"config.top_k must be below the number of experts, got {experts}")
        if config.num_groups > 1:
            raise ValueError(
                f"quantile balancing is defined without groups, got config.num_groups = "
                f"{config.num_groups}"
            )
        num_bins = arguments.integer("num_bins", num_bins, 1, arguments.INT32_MAX // experts)
        if bias is not None:
            bias = self._bias(bias)
            arguments.shape("bias", bias.shape, (experts,), "E")
        if token_mask is not None:
            token_mask = self._mask("token_mask", token_mask, (tokens,), "T")
        lower, upper = self._bounds(bounds, bias, config, bounds_name)
        attributes = {
            "top_k": config.top_k,
            "score": config.score,
            "select_on": config.select_on,
            "num_bins": num_bins,
        }
        inputs = (self._frontend.stop_gradient(logits), bias, token_mask, lower, upper)
        return inputs, attributes

    def _bounds(
        self, bounds: Any, bias: Array | None, config: RouterConfig, name: str
    ) -> tuple[Array, Array]:
        if bounds is not None:
            bounds = self._frontend.stop_gradient(self._array(name, bounds, 1, "2"))
            if (dtype := self._frontend.dtype(bounds)) != "float32":
                raise TypeError(f"{name} must be float32, got {dtype}")
            if bounds.shape[0] != 2:
                raise ValueError(f"{name} must have shape [2], got {list(bounds.shape)}")
            return bounds[:1].reshape(()), bounds[1:].reshape(())
        if config.score == "sqrtsoftplus" or config.select_on == "logit":
            raise ValueError(
                f"bounds must be given for score={config.score!r} and "
                f"select_on={config.select_on!r}, whose selection values have no bound"
            )
        if bias is None:
            raise ValueError("bounds must be given where bias is None")
        return (bias.min() - 1).reshape(()), (bias.max() + 1).reshape(())

    def _update_expert_bias_by_quantile(
        self, bias: Array, bins: QuantileBins, config: RouterConfig, decay: float, over: Any
    ) -> Array:
        arguments.record("bins", bins, QuantileBins)
        arguments.record("config", config, RouterConfig)
        bias = self._bias(bias)
        arguments.shape("bias", bias.shape, (config.num_experts,), "E")
        decay = arguments.number("decay", decay)
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be between 0 and 1, got {decay}")
        self._frontend.check_over(over)
        counts = self._integers("bins.counts", bins.counts)
        if over is not None:
            counts = self._frontend.all_sum(counts, over)
        lower, upper = (
            self._frontend.stop_gradient(self._array(f"bins.{name}", getattr(bins, name), 0, ""))
            for name in ("lower", "upper")
        )
        (updated,) = self._call(
            "update_expert_bias_by_quantile",
            (bias, counts, lower, upper),
            {"top_k": config.top_k, "decay": decay},
        )
        return updated
