# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Scores of one token, kept as logarithms, and their order."""

from __future__ import annotations

import numpy as np

from duomoe.oracle.float64 import Array


def logsumexp(z: Array) -> Array:
    """log(sum(e^z)) of one row z[E]."""
    peak = z.max()
    return peak + np.log(np.exp(z - peak).sum())


def log_softplus(z: Array) -> Array:
    """log(log(1 + e^z)), which tends to z as z falls."""
    return np.where(z < -40, z, np.log(np.logaddexp(0, np.maximum(z, -40))))


def log_scores(z: Array, score: str) -> Array:
    """The log of s[E], for one token's logits z[E]."""
    if score == "softmax":
        return z - logsumexp(z)
    if score == "sigmoid":
        return -np.logaddexp(0, -z)
    return log_softplus(z) / 2


def log_scores_bwd(grad: Array, z: Array, score: str) -> Array:
    """The gradient of log_scores with respect to z[E], for the cotangent grad[E]."""
    if score == "softmax":
        return grad - np.exp(z - logsumexp(z)) * grad.sum()
    log_sigmoid, log_one_minus_sigmoid = -np.logaddexp(0, -z), -np.logaddexp(0, z)
    if score == "sigmoid":
        return grad * np.exp(log_one_minus_sigmoid)
    return grad * np.where(z < -40, 1, np.exp(log_sigmoid - log_softplus(z))) / 2


def selection_values(z: Array, score: str, select_on: str, bias: Array | float = 0.0) -> Array:
    """v[E]: the score or the logit, plus bias[E]; a logit of -inf stays -inf."""
    chosen_on = z if select_on == "logit" else np.exp(log_scores(z, score))
    return np.where(z == -np.inf, -np.inf, chosen_on + bias)


def ranking(values: Array) -> Array:
    """Positions by falling value; equal values by rising position, NaN last."""
    return np.argsort(-values, kind="stable")


def normalized(z: Array, score: str) -> Array:
    """p[E]: the scores of z[E] over their sum, however small they all are.

    0 where every expert is excluded, but for a softmax.
    """
    log_s = log_scores(z, score)
    if score != "softmax" and np.all(z == -np.inf):
        return np.zeros(len(z))
    shares = np.exp(log_s - log_s.max())
    return shares / shares.sum()


def normalized_bwd(grad: Array, z: Array, score: str) -> Array:
    """The gradient of `normalized` with respect to log s[E], for the cotangent grad[E]."""
    p = normalized(z, score)
    return p * grad - p * (p @ grad)
