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

    Attributes:
        indices: [T, K] int32, expert ids by falling selection value; -1 is an unused slot.
        weights: [T, K] float32; 0 in unused slots.
        expert_counts: [E] int32, slots really used.
        sequence_counts: [S, E] int32, what the load-balancing loss counts.
        score_sums: [S, E] float32, sums over the tokens of normalised scores.
        logsumexp_sq: [S] float32, sums over the tokens of logsumexp(logits)^2.
        num_tokens: [S] int32, tokens that are not masked.
    """

    indices: Array
    weights: Array
    expert_counts: Array
    sequence_counts: Array
    score_sums: Array
    logsumexp_sq: Array
    num_tokens: Array


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
        router: [D, E].
        w_gate: [E, D, F].
        w_up: [E, D, F].
        w_down: [E, F, D].
        router_bias: [E], added to the logits, or None.
        expert_bias: [E] float32, added for selection only and never trained by a gradient, or None.
    """

    router: Array
    w_gate: Array
    w_up: Array
    w_down: Array
    router_bias: Array = None
    expert_bias: Array = None


@dataclasses.dataclass(frozen=True, eq=False)
class MoEOutput(_Named):
    """What a block returns.

    Attributes:
        output: [..., D], as x.
        routing: the Routing of its tokens.
        load_balancing_loss: scalar float32 of rank 0, with coefficient 1.
        z_loss: scalar float32 of rank 0, with coefficient 1.
        expert_counts: [E] int32, slots asked for: those of `routing`.
        kept_counts: [E] int32, slots that capacity or max_rows let through.
    """

    output: Array
    routing: Routing
    load_balancing_loss: Array
    z_loss: Array
    expert_counts: Array
    kept_counts: Array


RECORDS = (Routing, DispatchPlan, QuantileBins, MoEParams, MoEOutput)
