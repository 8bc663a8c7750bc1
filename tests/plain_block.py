# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The experts of a block as plain sums in torch's float64. torch must be importable."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from duomoe import ExpertConfig


def activation(config: ExpertConfig, x: Any) -> Any:
    f = torch.nn.functional
    return {
        "silu": lambda: x * torch.sigmoid(config.alpha * x),
        "gelu": lambda: f.gelu(x),
        "gelu_tanh": lambda: f.gelu(x, approximate="tanh"),
        "relu": lambda: f.relu(x),
        "relu_squared": lambda: f.relu(x) ** 2,
    }[config.activation]()


def unit(config: ExpertConfig, gate: Any, up: Any) -> Any:
    if gate is None:
        return activation(config, up)
    if config.limit is not None:
        gate, up = gate.clamp(max=config.limit), up.clamp(-config.limit, config.limit)
    return activation(config, gate) * (up + config.up_offset)


def plain_block(config: ExpertConfig, x: Any, ids: np.ndarray, weights: Any, p: dict[str, Any]):
    """Every slot by itself, in float64, with torch's own functions; ids of -1 are left out."""

    def linear(x, w, b=None):
        return x @ w if b is None else x @ w + b

    def expert(x, e):
        get = lambda name: p[name][e] if name in p else None
        gate = linear(x, p["w_gate"][e], get("b_gate")) if "w_gate" in p else None
        hidden = unit(config, gate, linear(x, p["w_up"][e], get("b_up")))
        return linear(hidden, p["w_down"][e], get("b_down"))

    rows = []
    for t in range(len(ids)):
        y = torch.zeros_like(x[t])
        for k, e in enumerate(ids[t]):
            if e >= 0:
                early = config.weight_on == "input"
                out = expert(x[t] * weights[t, k] if early else x[t], e)
                y = y + (out if early else weights[t, k] * out)
        if "shared_w_up" in p:
            gate = x[t] @ p["shared_w_gate"] if "shared_w_gate" in p else None
            shared = unit(config, gate, x[t] @ p["shared_w_up"]) @ p["shared_w_down"]
            y = y + (
                shared * torch.sigmoid(x[t] @ p["shared_router"])
                if "shared_router" in p
                else shared
            )
        rows.append(y)
    return torch.stack(rows)
