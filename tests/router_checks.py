# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The public router and losses on NumPy arrays, and the float64 results that they are held
against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from adapters import DTYPES, bits
from duomoe import RouterConfig, Routing, oracle
from oracle_bounds import BOUNDS, U, assert_close
from oracle_cases import is_decided

Array = np.ndarray
FLOATS = ("weights", "score_sums", "logsumexp_sq")
INTEGERS = ("indices", "expert_counts", "sequence_counts", "num_tokens")
# Options of `route` that only the selection reads, which the backward op has no use for.
FORWARD_ONLY = ("select_on", "num_groups", "group_top_k", "group_score_k", "counts")


def as_dtype(values: Any, dtype: str = "float32") -> Array:
    return np.asarray(values).astype(DTYPES[dtype])


def same_bits(a: Array, b: Array, name: str = "") -> None:
    if a is None or b is None:  # a field that was not asked for
        assert a is b, name
        return
    assert a.dtype == b.dtype and a.shape == b.shape, name
    np.testing.assert_array_equal(bits(a), bits(b), err_msg=name)


def options_of(adapter: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `route`, arrays as the framework's own."""
    return {n: adapter.array(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}


def run(adapter: Any, logits: Array, config: RouterConfig, **options: Any) -> Routing:
    """`route` from NumPy arrays to NumPy arrays."""
    out = adapter.functions.route(adapter.array(logits), config, **options_of(adapter, options))
    return Routing(**{n: adapter.numpy(v) for n, v in vars(out).items() if v is not None})


def pull_back(
    adapter: Any,
    logits: Array,
    config: RouterConfig,
    cotangents: Sequence[Array | None],
    **options: Any,
) -> Array:
    """The gradient with respect to the logits for cotangents of weights, score_sums and
    logsumexp_sq; None counts as zeros."""
    given = options_of(adapter, options)

    def floats(z: Any) -> list[Any]:
        out = adapter.functions.route(z, config, **given)
        return [getattr(out, n) for n in FLOATS]

    outputs, pull = adapter.vjp(floats, logits)
    filled = [
        np.zeros(o.shape, np.float32) if g is None else as_dtype(g).reshape(o.shape)
        for o, g in zip(outputs, cotangents, strict=True)
    ]
    (grad,) = pull(*filled)
    assert grad.dtype == logits.dtype and grad.shape == logits.shape
    return grad


def losses(
    adapter: Any,
    logits: Array,
    config: RouterConfig,
    *,
    balance: float = 1.0,
    z: float = 1.0,
    upstream: tuple[float, float] = (1.0, 1.0),
    **options: Any,
) -> tuple[Array, Array, Array]:
    """load_balancing_loss with coefficient `balance`, z_loss with coefficient `z`, and the gradient
    of both with respect to the logits."""
    given, f = options_of(adapter, options), adapter.functions

    def both(logits: Any) -> list[Any]:
        routing = f.route(logits, config, **given)
        return [f.load_balancing_loss(routing, config, coeff=balance), f.z_loss(routing, coeff=z)]

    values, pull = adapter.vjp(both, logits)
    assert all(v.shape == () and v.dtype == np.float32 for v in values)
    (grad,) = pull(*(np.float32(g).reshape(()) for g in upstream))
    return values[0], values[1], grad


class Exact:
    """Float64 results of a call, with bounds on what float32 arithmetic may add.

    `roundings` more of them than one call has come from sums over shards.
    """

    def __init__(
        self, logits: Array, config: RouterConfig, *, roundings: int = 0, **options: Any
    ) -> None:
        names = {"bias": "bias", "indices": "given_indices", "token_mask": "token_mask"}
        self.config, self.roundings = config, roundings
        self.inputs = {"logits": logits, **{n: options.get(o) for o, n in names.items()}}
        self.attributes = config.attributes(num_sequences=options.get("num_sequences", 1))
        self.out = oracle.route(**self.inputs, **self.attributes)
        self.bounds = BOUNDS["route"](self.inputs, self.attributes, self.out)
        for name in ("score_sums", "logsumexp_sq"):
            self.bounds[name] = self.bounds[name] + roundings * U * np.abs(self.out[name])

    def check(self, routing: Routing) -> None:
        """Every field of a routing."""
        for name, want in self.out.items():
            assert_close(name, getattr(routing, name), want, self.bounds.get(name, 0.0))

    def gradient(self, cotangents: Sequence[Array | None]) -> tuple[Array, Array]:
        """The gradient with respect to the logits, and its bound."""
        shapes = [self.out[n].shape for n in FLOATS]
        inputs = {
            "logits": self.inputs["logits"],
            "indices": self.out["indices"],
            "token_mask": self.inputs["token_mask"],
            **{
                f"grad_{n}": np.zeros(s) if g is None else np.reshape(g, s)
                for n, g, s in zip(FLOATS, cotangents, shapes, strict=True)
            },
        }
        attributes = {k: v for k, v in self.attributes.items() if k not in FORWARD_ONLY}
        want = oracle.route_bwd(**inputs, **attributes)
        inputs["token_mask"] = (
            np.ones(len(inputs["logits"]), bool)
            if inputs["token_mask"] is None
            else inputs["token_mask"]
        )
        bound = BOUNDS["route_bwd"](inputs, attributes, want)["grad_logits"]
        # Cotangents that come from a loss carry two roundings of their own.
        return want["grad_logits"], bound * 1.1

    def check_gradient(self, got: Array, cotangents: Sequence[Array | None]) -> None:
        want, bound = self.gradient(cotangents)
        assert_close("gradient", got, want, bound)

    def losses(self, balance: float = 1.0, z: float = 1.0) -> dict[str, tuple[float, float]]:
        """(value, bound) of each loss: the bounds of the sums go through a linear form, and the
        loss is rounded once."""
        out, k = self.out, self.config.top_k
        counts = {n: out[n] for n in ("sequence_counts", "num_tokens")}
        tokens = out["num_tokens"]

        def lb(sums: Array) -> float:
            loss = oracle.load_balancing_loss(**counts, score_sums=sums, top_k=k, coeff=balance)
            return float(loss["loss"])

        def squares(sums: Array) -> float:
            return float(oracle.z_loss(logsumexp_sq=sums, num_tokens=tokens, coeff=z)["loss"])

        return {
            name: (f(out[of]), abs(f(self.bounds[of])) + 1.01 * U * abs(f(out[of])))
            for name, f, of in (
                ("load_balancing_loss", lb, "score_sums"),
                ("z_loss", squares, "logsumexp_sq"),
            )
        }

    def loss_cotangents(self, balance: float = 1.0, z: float = 1.0) -> list[Array | None]:
        """What both losses hand to the router's backward pass."""
        counts = {n: self.out[n] for n in ("sequence_counts", "num_tokens")}
        grad_sums = oracle.load_balancing_loss_bwd(
            **counts, grad_loss=np.float64(balance), top_k=self.config.top_k, coeff=1.0
        )["grad_score_sums"]
        grad_squares = oracle.z_loss_bwd(
            num_tokens=counts["num_tokens"], grad_loss=np.float64(z), coeff=1.0
        )["grad_logsumexp_sq"]
        return [None, grad_sums, grad_squares]

    def check_losses(
        self,
        values: Sequence[Any],
        gradient: Array | None = None,
        balance: float = 1.0,
        z: float = 1.0,
    ) -> None:
        """Both losses, and the gradient of their sum."""
        wanted = self.losses(balance, z)
        for (name, (want, bound)), got in zip(wanted.items(), values, strict=True):
            assert_close(name, np.asarray(got), np.array(want), bound)
        if gradient is not None:
            self.check_gradient(gradient, self.loss_cotangents(balance, z))


def decided(
    rng: np.random.Generator,
    tokens: int,
    config: RouterConfig,
    bias: Array | None = None,
    draw: Callable[[], Array] | None = None,
) -> Array:
    """Logits [T, E] whose order does not hang on a rounding, exact in every dtype."""
    attributes = config.attributes(num_sequences=1)
    draw = draw or (lambda: rng.integers(-32, 32, config.num_experts) / 8)
    rows = []
    while len(rows) < tokens:
        row = draw().astype(np.float32)
        if is_decided(row.astype(np.float64), attributes, bias):
            rows.append(row)
    return np.array(rows, np.float32).reshape(tokens, config.num_experts)
