# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every op of the table in plain NumPy float64: the specification the core is measured against.

A function has the name of its op, takes the op's inputs and attributes by keyword, and returns the
outputs by name: floats as float64 that is never rounded, integers and flags in the table's dtype.

Axis letters: T tokens, E experts, K experts per token, D model width, N width of a product or
columns of scores, F expert hidden width, R permuted rows, S sequences, G groups, B bins or bytes.
"""

from duomoe.oracle.dense_routing import (
    mark_expert_bits,
    mark_experts,
    normalize_scores,
    normalize_scores_bwd,
    scatter_weights,
    scatter_weights_bwd,
    used_slots,
)
from duomoe.oracle.dispatch import (
    combine,
    combine_bwd,
    count_mismatches,
    permute,
    permute_bwd,
    permute_bwd_weights,
    plan_dispatch,
)
from duomoe.oracle.expert_bias import (
    bin_positions,
    bin_quantile,
    count_quantile_bins,
    update_expert_bias,
    update_expert_bias_by_quantile,
)
from duomoe.oracle.experts import (
    activate,
    activate_bwd,
    activation_of,
    add,
    expert_rows,
    glu,
    glu_bwd,
    grouped_matmul,
    grouped_matmul_bwd_bias,
    grouped_matmul_bwd_rows,
    grouped_matmul_bwd_w,
    scale_rows,
    scale_rows_bwd,
)
from duomoe.oracle.float64 import Array, Outputs
from duomoe.oracle.losses import (
    aux_factor,
    aux_loss,
    aux_loss_bwd,
    load_balancing_loss,
    load_balancing_loss_bwd,
    z_loss,
    z_loss_bwd,
)
from duomoe.oracle.router import (
    gate,
    gate_bwd_params,
    gate_bwd_x,
    group_values,
    live_tokens,
    route,
    route_bwd,
    select,
    selected_weights,
    unmasked,
)
from duomoe.oracle.scores import (
    log_scores,
    log_scores_bwd,
    log_softplus,
    logsumexp,
    normalized,
    normalized_bwd,
    ranking,
    selection_values,
)

__all__ = [
    "Array",
    "Outputs",
    "activate",
    "activate_bwd",
    "activation_of",
    "add",
    "aux_factor",
    "aux_loss",
    "aux_loss_bwd",
    "bin_positions",
    "bin_quantile",
    "combine",
    "combine_bwd",
    "count_mismatches",
    "count_quantile_bins",
    "expert_rows",
    "gate",
    "gate_bwd_params",
    "gate_bwd_x",
    "glu",
    "glu_bwd",
    "group_values",
    "grouped_matmul",
    "grouped_matmul_bwd_bias",
    "grouped_matmul_bwd_rows",
    "grouped_matmul_bwd_w",
    "live_tokens",
    "load_balancing_loss",
    "load_balancing_loss_bwd",
    "log_scores",
    "log_scores_bwd",
    "log_softplus",
    "logsumexp",
    "mark_expert_bits",
    "mark_experts",
    "normalize_scores",
    "normalize_scores_bwd",
    "normalized",
    "normalized_bwd",
    "permute",
    "permute_bwd",
    "permute_bwd_weights",
    "plan_dispatch",
    "ranking",
    "route",
    "route_bwd",
    "scale_rows",
    "scale_rows_bwd",
    "scatter_weights",
    "scatter_weights_bwd",
    "select",
    "selected_weights",
    "selection_values",
    "unmasked",
    "update_expert_bias",
    "update_expert_bias_by_quantile",
    "used_slots",
    "z_loss",
    "z_loss_bwd",
]
