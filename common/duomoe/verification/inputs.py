# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Random valid inputs for every op of the table and for the MoE block.

Axis letters: T tokens, E experts, K experts per token, D model width, F expert hidden width,
R permuted rows, S sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from duomoe import ops
from duomoe.config import ACTIVATIONS, ExpertConfig, RouterConfig
from duomoe.verification.adapters import DTYPES


@dataclasses.dataclass(frozen=True)
class Options:
    """Shapes, dtype and score of a comparison.

    Attributes:
        tokens: T.
        experts: E.
        top_k: K.
        width: D.
        hidden: F.
        dtype: of activations and weights: "float32", "bfloat16" or "float16".
        score: the router's score, as in RouterConfig.
        device: "cpu" or "cuda".
        seed: of the random inputs.

    Raises:
        ValueError: on an option that is out of range or contradicts another.
    """

    tokens: int = 512
    experts: int = 16
    top_k: int = 2
    width: int = 64
    hidden: int = 128
    dtype: str = "float32"
    score: Any = "softmax"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "experts", "top_k", "width", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.dtype not in ops.FLOAT_DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(ops.FLOAT_DTYPES)}, got {self.dtype}"
            )
        self.config()

    def config(self) -> RouterConfig:
        """The router of these options."""
        return RouterConfig(self.experts, self.top_k, score=self.score)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an op. `inputs` lacks the absent ones; `label` tells cases of an op apart."""

    label: str
    inputs: Mapping[str, np.ndarray]
    attributes: Mapping[str, Any]


RunOp = Callable[[str, Mapping[str, np.ndarray], Mapping[str, Any]], dict[str, np.ndarray]]


class Draw:
    """Random arrays of the wanted shapes.

    Args:
        options: shapes and dtypes.
        rng: where the numbers come from.
        run: runs an op of the table on NumPy arrays; it makes the plans.
    """

    def __init__(self, options: Options, rng: np.random.Generator, run: RunOp) -> None:
        self.options, self.rng, self.run = options, rng, run

    def normal(self, *shape: int, dtype: str | None = None, scale: float = 1.0) -> np.ndarray:
        """Normal numbers in `dtype`, or the options' dtype."""
        values = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        return values.astype(DTYPES[dtype or self.options.dtype])

    def uniform(self, *shape: int) -> np.ndarray:
        """Numbers between 0 and 1, float32: weights."""
        return self.rng.random(shape, dtype=np.float32)

    def indices(self) -> np.ndarray:
        """[T, K] int32 distinct expert ids, a tenth of them -1: unused slots."""
        o = self.options
        order = np.argsort(self.rng.random((o.tokens, o.experts)), axis=1)[:, : o.top_k]
        unused = self.rng.random((o.tokens, o.top_k)) < 0.1
        return np.where(unused, -1, order).astype(np.int32)

    def mask(self) -> np.ndarray:
        """[T, E] bool, the experts of `indices`."""
        return np.any(self.indices()[..., None] == np.arange(self.options.experts), axis=1)

    def planned(self, *, alignment: int, capacity: bool) -> Case:
        """Inputs of plan_dispatch; `capacity` drops the lightest slots beyond the mean load."""
        o = self.options
        slots = o.tokens * o.top_k
        rows = slots + o.experts * (alignment - 1)
        attributes = {
            "num_experts": o.experts,
            "num_rows": rows // alignment * alignment,
            "capacity": -(-slots // o.experts) if capacity else -1,
            "drop_order": "weight" if capacity else "position",
            "alignment": alignment,
        }
        label = f"capacity, alignment {alignment}" if capacity else "dropless"
        inputs = {"indices": self.indices()}
        if capacity:
            inputs["weights"] = self.uniform(o.tokens, o.top_k)
        return Case(label, inputs, attributes)

    def plan(self) -> dict[str, np.ndarray]:
        """A plan with padding rows, unused slots and dropped ones."""
        case = self.planned(alignment=8, capacity=True)
        return self.run("plan_dispatch", case.inputs, case.attributes)


Generator = Callable[[Draw], Iterator[Case]]
GENERATORS: dict[str, Generator] = {}


def generates(op: str) -> Callable[[Generator], Generator]:
    """Register the input generator of an op."""

    def register(generator: Generator) -> Generator:
        GENERATORS[op] = generator
        return generator

    return register


@generates("gate")
def _gate(draw: Draw) -> Iterator[Case]:
    o = draw.options
    inputs = {
        "x": draw.normal(o.tokens, o.width),
        "router": draw.normal(o.width, o.experts, scale=o.width**-0.5),
    }
    bias = {"router_bias": draw.normal(o.experts)}
    yield Case("float32 gate, bias", inputs | bias, {"gate_dtype": "float32"})
    mask = {"token_mask": draw.rng.random(o.tokens) < 0.9}
    yield Case(f"{o.dtype} gate, mask", inputs | mask, {"gate_dtype": o.dtype})


@generates("route")
def _route(draw: Draw) -> Iterator[Case]:
    o = draw.options
    attributes = o.config().attributes(num_sequences=1)
    two = o.config().attributes(num_sequences=2 if o.tokens % 2 == 0 else 1)
    inputs = {"logits": draw.normal(o.tokens, o.experts, scale=2.0)}
    steered = {
        "bias": draw.normal(o.experts, dtype="float32", scale=0.1),
        "token_mask": draw.rng.random(o.tokens) < 0.9,
    }
    yield Case("plain", inputs, attributes)
    yield Case("bias, mask", inputs | steered, two)
    yield Case("given indices", inputs | {"given_indices": draw.indices()}, attributes)


@generates("load_balancing_loss")
def _load_balancing_loss(draw: Draw) -> Iterator[Case]:
    o = draw.options
    shares = draw.rng.dirichlet(np.ones(o.experts), size=2)
    inputs = {
        "sequence_counts": draw.rng.multinomial(o.tokens * o.top_k, shares).astype(np.int32),
        "score_sums": (draw.rng.dirichlet(np.ones(o.experts), size=2) * o.tokens).astype(
            np.float32
        ),
        "num_tokens": np.full(2, o.tokens, np.int32),
    }
    yield Case("", inputs, {"top_k": o.top_k, "coeff": 0.01})


@generates("z_loss")
def _z_loss(draw: Draw) -> Iterator[Case]:
    tokens = draw.options.tokens
    inputs = {
        "logsumexp_sq": draw.uniform(2) * np.float32(8 * tokens),
        "num_tokens": np.full(2, tokens, np.int32),
    }
    yield Case("", inputs, {"coeff": 0.001})


@generates("update_expert_bias")
def _update_expert_bias(draw: Draw) -> Iterator[Case]:
    o = draw.options
    counts = draw.rng.multinomial(o.tokens * o.top_k, draw.rng.dirichlet(np.ones(o.experts)))
    inputs = {
        "bias": draw.normal(o.experts, dtype="float32", scale=0.1),
        "expert_counts": counts.astype(np.int32),
    }
    for center in ("no", "yes"):
        yield Case(f"center {center}", inputs, {"rate": 0.001, "center": center})


@generates("count_quantile_bins")
def _count_quantile_bins(draw: Draw) -> Iterator[Case]:
    o = draw.options
    if o.experts == 1:  # the cutoff is the value of the (K+1)-th expert
        return
    attributes = {"top_k": min(o.top_k, o.experts - 1), "score": o.score, "num_bins": 100}
    inputs = {"logits": draw.normal(o.tokens, o.experts, scale=2.0)}
    inputs |= {n: np.array(x, np.float32) for n, x in (("lower", -1.5), ("upper", 1.5))}
    steered = {
        "bias": draw.normal(o.experts, dtype="float32", scale=0.1),
        "token_mask": draw.rng.random(o.tokens) < 0.9,
    }
    yield Case("bias, mask", inputs | steered, attributes | {"select_on": "score"})
    yield Case("logits", inputs, attributes | {"select_on": "logit"})


@generates("update_expert_bias_by_quantile")
def _update_expert_bias_by_quantile(draw: Draw) -> Iterator[Case]:
    o = draw.options
    shares = draw.rng.dirichlet(np.ones(100), size=o.experts)
    inputs = {
        "bias": draw.normal(o.experts, dtype="float32", scale=0.1),
        "bin_counts": draw.rng.multinomial(o.tokens, shares).astype(np.int32),
        "lower": np.array(-1.5, np.float32),
        "upper": np.array(1.5, np.float32),
    }
    yield Case("", inputs, {"top_k": o.top_k, "decay": 0.9})


@generates("scatter_weights")
def _scatter_weights(draw: Draw) -> Iterator[Case]:
    o = draw.options
    inputs = {"weights": draw.uniform(o.tokens, o.top_k), "indices": draw.indices()}
    for dtype in dict.fromkeys((o.dtype, "float32")):
        yield Case(f"{dtype} result", inputs, {"num_experts": o.experts, "probs_dtype": dtype})


@generates("mark_experts")
def _mark_experts(draw: Draw) -> Iterator[Case]:
    yield Case("", {"indices": draw.indices()}, {"num_experts": draw.options.experts})


@generates("mark_expert_bits")
def _mark_expert_bits(draw: Draw) -> Iterator[Case]:
    experts = draw.options.experts
    attributes = {"num_experts": experts, "num_bytes": -(-experts // 8)}
    yield Case("", {"indices": draw.indices()}, attributes)


@generates("normalize_scores")
def _normalize_scores(draw: Draw) -> Iterator[Case]:
    o = draw.options
    yield Case("", {"logits": draw.normal(o.tokens, o.experts, scale=2.0)}, {"score": o.score})


@generates("aux_loss")
def _aux_loss(draw: Draw) -> Iterator[Case]:
    o = draw.options
    attributes = {"num_experts": o.experts, "top_k": o.top_k, "coeff": 0.01}
    plain = {
        "probs": draw.uniform(o.tokens, o.experts).astype(DTYPES[o.dtype]),
        "expert_loads": draw.uniform(o.experts) * np.float32(o.tokens),
    }
    yield Case("", plain, attributes | {"num_tokens": o.tokens})
    sequences = {
        "probs": draw.uniform(o.tokens, 3 * o.experts).astype(DTYPES[o.dtype]),
        "expert_loads": draw.uniform(3 * o.experts) * np.float32(o.tokens),
        "live_tokens": np.array(o.tokens, np.float32),
    }
    yield Case("3 sequences, live tokens", sequences, attributes | {"num_tokens": 0})


@generates("plan_dispatch")
def _plan_dispatch(draw: Draw) -> Iterator[Case]:
    yield draw.planned(alignment=1, capacity=False)
    yield draw.planned(alignment=8, capacity=True)


@generates("count_mismatches")
def _count_mismatches(draw: Draw) -> Iterator[Case]:
    indices, others = draw.indices(), draw.indices()
    same = draw.rng.random(len(indices)) < 0.5
    yield Case("", {"indices": indices, "others": np.where(same[:, None], indices, others)}, {})


@generates("permute")
def _permute(draw: Draw) -> Iterator[Case]:
    o, plan = draw.options, draw.plan()
    inputs = {name: plan[name] for name in ("row_of_slot", "slot_of_row")}
    inputs["x"] = draw.normal(o.tokens, o.width)
    yield Case("", inputs, {})
    yield Case("weighted", inputs | {"weights": draw.uniform(o.tokens, o.top_k)}, {})


@generates("combine")
def _combine(draw: Draw) -> Iterator[Case]:
    o, plan = draw.options, draw.plan()
    inputs = {name: plan[name] for name in ("row_of_slot", "slot_of_row")}
    inputs["rows"] = draw.normal(len(plan["slot_of_row"]), o.width)
    yield Case("weighted", inputs | {"weights": draw.uniform(o.tokens, o.top_k)}, {})
    yield Case("sum", inputs, {})


@generates("plan_mask")
def _plan_mask(draw: Draw) -> Iterator[Case]:
    o = draw.options
    mask = {"routing_map": draw.mask()}
    routed = int(mask["routing_map"].sum())
    for label, limit, alignment in (("padded", -1, 8), ("limit", routed * 3 // 4, 4)):
        rows = (routed if limit < 0 else limit) + o.experts * (alignment - 1)
        attributes = {"num_rows": rows // alignment * alignment, "map_width": 2 * o.experts + 1}
        yield Case(label, mask, attributes | {"limit": limit, "alignment": alignment})


@generates("read_row_map")
def _read_row_map(draw: Draw) -> Iterator[Case]:
    o = draw.options
    mask = draw.mask()
    rows = (int(mask.sum()) + 7 * o.experts) // 8 * 8
    attributes = {"num_rows": rows, "limit": -1, "alignment": 8, "map_width": 2 * o.experts + 1}
    plan = draw.run("plan_mask", {"routing_map": mask}, attributes)
    sizes = {"num_experts": o.experts, "num_rows": rows}
    inputs = {"row_id_map": plan["row_id_map"]}
    yield Case("", inputs, sizes)
    yield Case("padding", inputs | {"pad_offsets": plan["pad_offsets"]}, sizes)


@generates("invert_rows")
def _invert_rows(draw: Draw) -> Iterator[Case]:
    plan = draw.plan()
    rows = len(plan["slot_of_row"])
    yield Case("", {"row_of_slot": plan["row_of_slot"]}, {"num_rows": rows})


@generates("sort_slots")
def _sort_slots(draw: Draw) -> Iterator[Case]:
    o = draw.options
    ids = draw.indices()
    yield Case("", {"indices": ids}, {"num_rows": o.tokens * o.top_k})
    large = np.where(ids < 0, -1, ids * np.int64(12345) % 2**31).astype(np.int32)
    yield Case("large ids, drops", {"indices": large}, {"num_rows": o.tokens * o.top_k // 2})


@generates("place_chunks")
def _place_chunks(draw: Draw) -> Iterator[Case]:
    o = draw.options
    chunks = 2 * o.experts
    shares = draw.rng.dirichlet(np.ones(chunks))
    inputs = {
        "split_sizes": draw.rng.multinomial(o.tokens * 9 // 10, shares).astype(np.int32),
        "sorted_indices": draw.rng.permutation(chunks).astype(np.int32),
    }
    yield Case("", inputs, {"num_tokens": o.tokens})


@generates("cast")
def _cast(draw: Draw) -> Iterator[Case]:
    o = draw.options
    x = {"x": draw.normal(o.tokens, o.width)}
    for dtype in ops.FLOAT_DTYPES:
        yield Case(f"to {dtype}", x, {"out_dtype": dtype})


@generates("grouped_matmul")
def _grouped_matmul(draw: Draw) -> Iterator[Case]:
    o, plan = draw.options, draw.plan()
    inputs = {
        "rows": draw.normal(len(plan["slot_of_row"]), o.width),
        "w": draw.normal(o.experts, o.width, o.hidden, scale=o.width**-0.5),
        "expert_offsets": plan["expert_offsets"],
        "expert_counts": plan["expert_counts"],
    }
    for dtype in dict.fromkeys((o.dtype, "float32")):
        yield Case(f"{dtype} result", inputs, {"out_dtype": dtype})
    bias = {"bias": draw.normal(o.experts, o.hidden)}
    yield Case("bias", inputs | bias, {"out_dtype": o.dtype})


@generates("activate")
def _activate(draw: Draw) -> Iterator[Case]:
    o = draw.options
    x = draw.normal(o.tokens * o.top_k, o.hidden, scale=3.0)
    for activation in ACTIVATIONS:
        alpha = 1.702 if activation == "silu" else 1.0
        yield Case(activation, {"x": x}, {"activation": activation, "alpha": alpha})


@generates("glu")
def _glu(draw: Draw) -> Iterator[Case]:
    o = draw.options
    shape = (o.tokens * o.top_k, o.hidden)
    inputs = {"gate": draw.normal(*shape, scale=3.0), "up": draw.normal(*shape, scale=3.0)}
    plain = ExpertConfig().glu_attributes()
    for activation in ACTIVATIONS:
        yield Case(activation, inputs, plain | {"activation": activation})
    clamped = ExpertConfig("silu", alpha=1.702, limit=7.0, up_offset=1.0)
    yield Case("limit, offset", inputs, clamped.glu_attributes())


@generates("scale_rows")
def _scale_rows(draw: Draw) -> Iterator[Case]:
    o = draw.options
    yield Case("", {"x": draw.normal(o.tokens, o.width), "scale": draw.uniform(o.tokens)}, {})


@generates("add")
def _add(draw: Draw) -> Iterator[Case]:
    o = draw.options
    shape = (o.tokens, o.width)
    yield Case("", {"a": draw.normal(*shape), "b": draw.normal(*shape)}, {})


def forward_ops() -> list[ops.Op]:
    """The ops of the table that are no other op's backward."""
    backward = {name for op in ops.table().values() for name in op.backward}
    return [op for op in ops.table().values() if op.name not in backward]


@dataclasses.dataclass(frozen=True)
class BlockCase:
    """Inputs of `moe`.

    Attributes:
        x: [T, D].
        parameters: the differentiated arrays of MoEParams by name.
        expert_bias: [E] float32, or None.
        config: the router.
    """

    x: np.ndarray
    parameters: Mapping[str, np.ndarray]
    expert_bias: np.ndarray | None
    config: RouterConfig


def block_case(options: Options, rng: np.random.Generator) -> BlockCase:
    """Random inputs of the whole block, with both biases."""
    o = options
    draw = Draw(o, rng, lambda *_: {})
    wide, narrow = o.width**-0.5, o.hidden**-0.5
    parameters = {
        "router": draw.normal(o.width, o.experts, scale=wide),
        "w_gate": draw.normal(o.experts, o.width, o.hidden, scale=wide),
        "w_up": draw.normal(o.experts, o.width, o.hidden, scale=wide),
        "w_down": draw.normal(o.experts, o.hidden, o.width, scale=narrow),
        "router_bias": draw.normal(o.experts, scale=0.1),
    }
    bias = draw.normal(o.experts, dtype="float32", scale=0.1)
    return BlockCase(draw.normal(o.tokens, o.width), parameters, bias, o.config())
