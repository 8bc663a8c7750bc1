# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Behind `duomoe verify` and `duomoe demo`: both front ends on the same inputs, compared bit for bit.

    inputs -> compare -> report              each op of the table, and the whole MoE block
    corpus -> jax_model, torch_model -> train -> figure, report     the same language model twice

Modules import JAX, torch and their front ends inside functions only, so that `duomoe` needs neither.
"""
