# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the public functions take and return: records with named fields, the same in both front
ends.

Axis letters: T tokens, E experts, K experts per token, D model width, F expert hidden width,
R permuted rows, S sequences, B bins.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

Array = Any  # a JAX or torch array, after the front end


class _Named:
    """A record that refuses to be unpacked by position, so that a new field breaks no caller."""

    def __iter__(self) -> NoReturn:
        names = ", ".join(field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        raise TypeError(
            f"{type(self).__name__} cannot be unpacked by position; read its fields: {names}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Routing(_Named):
    """Which experts each token goes to, with what weight, and the statistics of both losses.

    That of moe_from_routing has no statistics; they are None.

    Attributes:
        indices: [T, K] int32, expert ids by falling selection value; -1 is an unused slot.
        weights: [T, K] float32; 0 in unused slots.
        expert_counts: [E] int32, slots really used.
        sequence_counts: [S, E] int32, what the load-balancing loss counts.
        score_sums: [S, E] float32, sums over the tokens of normalised scores.
        logsumexp_sq: [S] float32, sums over the tokens of logsumexp(logits)^2.
        num_tokens: [S] int32, tokens that are not masked.
        mismatched_tokens: scalar int32 of rank 0 with `compare`, else None: tokens whose given
            experts are not those that they would have selected.
        mismatched_slots: scalar int32 of rank 0 with `compare`, else None: given slots whose expert
            would not have been selected.
    """

    indices: Array
    weights: Array
    expert_counts: Array
    sequence_counts: Array = None
    score_sums: Array = None
    logsumexp_sq: Array = None
    num_tokens: Array = None
    mismatched_tokens: Array = None
    mismatched_slots: Array = None


@dataclasses.dataclass(frozen=True, eq=False)
class DispatchPlan(_Named):
    """Where each slot's row lies when rows are sorted by expert.

    Attributes:
        row_of_slot: [T, K] int32, -1 for a slot that is unused or dropped.
        slot_of_row: [R] int32, t * K + k, or -1 for a padding row.
        expert_counts: [E] int32, rows kept.
        routed_counts: [E] int32, rows asked for.
        expert_offsets: [E + 1] int32, first row of each expert's block.
    """

    row_of_slot: Array
    slot_of_row: Array
    expert_counts: Array
    routed_counts: Array
    expert_offsets: Array


@dataclasses.dataclass(frozen=True, eq=False)
class QuantileBins(_Named):
    """How much bias each expert lacks for each token, as a histogram.

    Attributes:
        cutoffs: [T] float32, the (K+1)-th selection value of each token.
        counts: [E, B] int32, tokens by the bias at which they would just have selected the expert.
        lower: scalar float32 of rank 0, where the first bin begins.
        upper: scalar float32 of rank 0, where the last bin ends.
    """

    cutoffs: Array
    counts: Array
    lower: Array
    upper: Array


@dataclasses.dataclass(frozen=True, eq=False)
class MoEParams(_Named):
    """The parameters of a block, in one layout for both frameworks.

    Attributes:
        router: [D, E]; None for moe_from_routing.
        w_gate: [E, D, F]; None for experts that are no gated linear units.
        w_up: [E, D, F].
        w_down: [E, F, D].
        router_bias: [E], added to the logits, or None.
        expert_bias: [E] float32, added for selection only and never trained by a gradient, or None.
        b_gate: [E, F], added to the product with w_gate, or None.
        b_up: [E, F], added to the product with w_up, or None.
        b_down: [E, D], added to the product with w_down, or None.
        shared_w_gate: [D, F'], as w_gate for the shared experts, which every token goes to, or
            None. Several shared experts are one of their joint width F'.
        shared_w_up: [D, F'], or None for no shared experts.
        shared_w_down: [F', D], or None.
        shared_router: [D, 1], or None; the sigmoid of the product with it is the factor of the
            shared experts' output.
    """

    router: Array
    w_gate: Array
    w_up: Array
    w_down: Array
    router_bias: Array = None
    expert_bias: Array = None
    b_gate: Array = None
    b_up: Array = None
    b_down: Array = None
    shared_w_gate: Array = None
    shared_w_up: Array = None
    shared_w_down: Array = None
    shared_router: Array = None


@dataclasses.dataclass(frozen=True, eq=False)
class MoEOutput(_Named):
    """What a block returns. What is made from logits is None after moe_from_routing.

    Attributes:
        output: [..., D], as x.
        routing: the Routing of its tokens.
        expert_counts: [E] int32, slots asked for: those of `routing`.
        kept_counts: [E] int32, slots that capacity or max_rows let through.
        load_balancing_loss: scalar float32 of rank 0, with coefficient 1.
        z_loss: scalar float32 of rank 0, with coefficient 1.
        aux_loss: scalar float32 of rank 0: load_balancing_coeff * load_balancing_loss +
            z_loss_coeff * z_loss.
        logits: [T, E] in gate_dtype, differentiable.
    """

    output: Array
    routing: Routing
    expert_counts: Array
    kept_counts: Array
    load_balancing_loss: Array = None
    z_loss: Array = None
    aux_loss: Array = None
    logits: Array = None


RECORDS = (Routing, DispatchPlan, QuantileBins, MoEParams, MoEOutput)
