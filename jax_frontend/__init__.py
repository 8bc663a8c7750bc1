# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""duomoe for JAX: the functions of duomoe as XLA FFI calls with gradients, batching and sharding
rules.
"""

import dataclasses as _dataclasses

from duomoe import (
    DispatchPlan,
    ExpertConfig,
    MoEOutput,
    MoEParams,
    QuantileBins,
    RouterConfig,
    Routing,
    library,
)

library.load()
try:
    import jax as _jax

    from jax_frontend import frontend as _frontend

    _frontend.register()
except ImportError as error:
    raise library.missing_binding(__name__, "jax", error) from error

from duomoe.results import RECORDS as _RECORDS

from jax_frontend.functional import (
    activate,
    combine,
    count_mismatches,
    count_quantile_bins,
    gate,
    glu,
    grouped_matmul,
    load_balancing_loss,
    moe,
    moe_from_routing,
    permute,
    plan_dispatch,
    route,
    scale_rows,
    update_expert_bias,
    update_expert_bias_by_quantile,
    z_loss,
)

for _record in _RECORDS:
    _jax.tree_util.register_dataclass(
        _record, data_fields=[_f.name for _f in _dataclasses.fields(_record)], meta_fields=[]
    )

__all__ = [
    "DispatchPlan",
    "ExpertConfig",
    "MoEOutput",
    "MoEParams",
    "QuantileBins",
    "RouterConfig",
    "Routing",
    "activate",
    "combine",
    "count_mismatches",
    "count_quantile_bins",
    "gate",
    "glu",
    "grouped_matmul",
    "load_balancing_loss",
    "moe",
    "moe_from_routing",
    "permute",
    "plan_dispatch",
    "route",
    "scale_rows",
    "update_expert_bias",
    "update_expert_bias_by_quantile",
    "z_loss",
]
