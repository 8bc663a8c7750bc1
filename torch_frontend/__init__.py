# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""duomoe for PyTorch: the functions of duomoe as custom operators with autograd."""

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
    import torch as _torch

    from torch_frontend import bind as _bind

    _bind.register()
except (ImportError, OSError) as error:
    raise library.missing_binding(__name__, "torch", error) from error

from duomoe.results import RECORDS as _RECORDS

from torch_frontend.functional import (
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
from torch_frontend.modules import Experts, MoE, Router, SharedExperts
from torch_frontend.replay import record_routing, replay_routing

for _record in _RECORDS:
    _torch.utils._pytree.register_dataclass(
        _record, serialized_type_name=f"duomoe.{_record.__name__}"
    )

__all__ = [
    "DispatchPlan",
    "ExpertConfig",
    "Experts",
    "MoE",
    "MoEOutput",
    "MoEParams",
    "QuantileBins",
    "Router",
    "RouterConfig",
    "Routing",
    "SharedExperts",
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
    "record_routing",
    "replay_routing",
    "route",
    "scale_rows",
    "update_expert_bias",
    "update_expert_bias_by_quantile",
    "z_loss",
]
