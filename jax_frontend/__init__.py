# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""duomoe for JAX: the functions of duomoe as XLA FFI calls with gradients, batching and sharding
rules.
"""

import dataclasses as _dataclasses

from duomoe import (
    DispatchPlan,
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
    combine,
    count_quantile_bins,
    gate,
    grouped_matmul,
    load_balancing_loss,
    moe,
    permute,
    plan_dispatch,
    route,
    swiglu,
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
    "MoEOutput",
    "MoEParams",
    "QuantileBins",
    "RouterConfig",
    "Routing",
    "combine",
    "count_quantile_bins",
    "gate",
    "grouped_matmul",
    "load_balancing_loss",
    "moe",
    "permute",
    "plan_dispatch",
    "route",
    "swiglu",
    "update_expert_bias",
    "update_expert_bias_by_quantile",
    "z_loss",
]
