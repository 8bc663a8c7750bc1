# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Behind `duomoe verify` and `duomoe demo`: both front ends, compared bit for bit.

    inputs -> compare -> report              each op of the table, and the whole MoE block
    corpus -> jax_model, torch_model -> train -> figure, report     the same language model twice

Only jax_model and torch_model import a framework, and train and figure what the demo needs beyond
them; all others import these inside functions, so that `duomoe` needs neither framework.
"""
