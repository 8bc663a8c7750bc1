# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The memory of a block, from its calls of ops and what their gradient plans keep: which tensors
wait for the backward pass, and the most that a training step needs at a time.

Axis letters: T tokens, E experts, K experts per token, D model width, F expert hidden width,
R permuted rows.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from duomoe import ops
from duomoe.dispatch import plan_rows

ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "bool": 1, "uint8": 1}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Shape and dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]


@dataclasses.dataclass(frozen=True)
class Call:
    """One op, the names of its inputs and outputs, and the part of the block that is computed again
    with it; "" for a call that never is.
    """

    op: ops.Op
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    part: str

    def keeps(self) -> list[str]:
        """The tensors that its gradient takes from the forward pass."""
        plan = self.op.gradient_plan(tuple(name is not None for name in self.inputs))
        names = [
            self.inputs[i] if kind == "input" else self.outputs[i] for kind, i in plan.residuals
        ]
        return [name for name in names if name is not None]


@dataclasses.dataclass(frozen=True)
class Block:
    """The shapes and options of a block.

    `dtype` is that of x and of all parameters; `shared` is the hidden width of shared experts, 0
    for none. The other names are those of `moe`.
    """

    tokens: int
    experts: int
    top_k: int
    width: int
    hidden: int
    dtype: str = "float32"
    gate_dtype: str = "float32"
    gated: bool = True
    biases: bool = False
    weight_on: str = "output"
    shared: int = 0
    shared_router: bool = False
    token_mask: bool = False
    capacity: int | None = None
    alignment: int = 1
    max_rows: int | None = None
    recompute: bool = False

    @property
    def rows(self) -> int:
        """R."""
        slots = self.tokens * self.top_k
        return plan_rows(slots, self.experts, self.capacity, self.alignment, self.max_rows)

    def parameters(self) -> dict[str, Tensor]:
        """The parameters by their names in MoEParams."""
        e, d, f, s = self.experts, self.width, self.hidden, self.shared
        shapes: dict[str, tuple[int, ...]] = {"router": (d, e)}
        gates = ("gate",) if self.gated else ()
        for name in (*gates, "up"):
            shapes[f"w_{name}"] = (e, d, f)
            if self.biases:
                shapes[f"b_{name}"] = (e, f)
            if s:
                shapes[f"shared_w_{name}"] = (d, s)
        shapes["w_down"] = (e, f, d)
        if self.biases:
            shapes["b_down"] = (e, d)
        if s:
            shapes["shared_w_down"] = (s, d)
        if self.shared_router:
            shapes["shared_router"] = (d, 1)
        return {name: Tensor(shape, self.dtype) for name, shape in shapes.items()}


class Trace:
    """The calls of a block in their order, and all tensors by name."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.arguments = {"x": Tensor((block.tokens, block.width), block.dtype)}
        self.arguments |= block.parameters()
        if block.token_mask:
            self.arguments["token_mask"] = Tensor((block.tokens,), "bool")
        self.tensors = dict(self.arguments)
        self.calls: list[Call] = []
        self._trace()

    # -- the calls, as duomoe.block and duomoe.experts make them -----------------------------------

    def _call(
        self,
        op: str,
        inputs: Sequence[str | None],
        outputs: Sequence[str],
        part: str,
        **options: Any,
    ) -> None:
        """An input that is no tensor of this block is left out."""
        spec = ops.table()[op]
        names = [name if name in self.tensors else None for name in inputs]
        given = [None if name is None else self.tensors[name] for name in names]
        results = spec.infer(
            [None if t is None else t.shape for t in given],
            [None if t is None else t.dtype for t in given],
            options,
        )
        for name, (shape, dtype) in zip(outputs, results, strict=True):
            self.tensors[name] = Tensor(shape, dtype)
        self.calls.append(Call(spec, tuple(names), tuple(outputs), part))

    def _route(self, prefix: str, top_k: int) -> None:
        # The plan has expert_counts too.
        names = {"expert_counts": "used_counts"}
        outputs = [prefix + names.get(o.name, o.name) for o in ops.table()["route"].outputs]
        inputs = [f"{prefix}logits", None, None, "token_mask", None]
        self._call("route", inputs, outputs, "", top_k=top_k, num_sequences=1)

    def _trace(self) -> None:
        block = self.block
        self._call(
            "gate", ["x", "router", None, "token_mask"], ["logits"], "", gate_dtype=block.gate_dtype
        )
        self._route("", block.top_k)
        plan = [spec.name for spec in ops.table()["plan_dispatch"].outputs]
        sizes = {"num_experts": block.experts, "num_rows": block.rows}
        self._call("plan_dispatch", ["indices", None], plan, "", **sizes)
        early = block.weight_on == "input"

        def product(rows: str, name: str, out: str) -> None:
            inputs = [rows, f"w_{name}", "expert_offsets", "expert_counts", f"b_{name}"]
            self._call("grouped_matmul", inputs, [out], "routed", out_dtype=block.dtype)

        slots = ["row_of_slot", "slot_of_row"]
        self._call("permute", ["x", *slots, "weights" if early else None], ["rows"], "routed")
        if block.gated:
            product("rows", "gate", "gate")
        product("rows", "up", "up")
        self._activation("", "routed")
        product("hidden", "down", "results")
        weights = None if early else "weights"
        self._call("combine", ["results", *slots, weights], ["y"], "routed")
        if block.shared:
            self._shared()

    def _activation(self, prefix: str, part: str) -> None:
        inputs = [f"{prefix}gate", f"{prefix}up"] if self.block.gated else [f"{prefix}up"]
        op = "glu" if self.block.gated else "activate"
        self._call(op, inputs, [f"{prefix}hidden"], part)

    def _shared(self) -> None:
        def product(a: str, name: str, out: str) -> None:
            inputs = [a, f"shared_w_{name}", None, "token_mask"]
            self._call("gate", inputs, [out], "shared", gate_dtype=self.block.dtype)

        if self.block.shared_router:
            inputs = ["x", "shared_router", None, "token_mask"]
            self._call("gate", inputs, ["shared_logits"], "", gate_dtype=self.block.gate_dtype)
            self._route("shared_", 1)
            # scale_rows takes the weights as [T].
            self.tensors["shared_weights"] = Tensor((self.block.tokens,), "float32")
        if self.block.gated:
            product("x", "gate", "shared_gate")
        product("x", "up", "shared_up")
        self._activation("shared_", "shared")
        product("shared_hidden", "down", "shared_y")
        last = "shared_y"
        if self.block.shared_router:
            last = "shared_scaled"
            self._call("scale_rows", ["shared_y", "shared_weights"], [last], "")
        self._call("add", ["y", last], ["output"], "")

    # -- memory ------------------------------------------------------------------------------------

    @property
    def output(self) -> str:
        """The name of the block's output."""
        return self.calls[-1].outputs[0]

    def again(self, call: Call) -> bool:
        """Whether the backward pass computes a call again."""
        return self.block.recompute and call.part != ""

    def part(self, call: Call) -> tuple[list[Call], set[str]]:
        """The calls that are computed again together with this one, and what they make."""
        calls = [c for c in self.calls if c.part == call.part]
        return calls, {name for c in calls for name in c.outputs}

    def keepers(self) -> list[list[str]]:
        """For every call what waits for its backward pass, the arguments left out. A part that is
        computed again needs its inputs until its first call's turn, which is the last.
        """
        kept = []
        for call in self.calls:
            names: list[str | None] = list(call.keeps())
            if self.again(call):
                calls, made = self.part(call)
                every = [n for c in calls for n in c.inputs if n not in made]
                names = every if call is calls[0] else []
            kept.append([n for n in dict.fromkeys(names) if n and n not in self.arguments])
        return kept


def kept_tensors(block: Block) -> dict[str, Tensor]:
    """The tensors that the backward pass keeps beside x, the parameters and the mask, for a loss of
    the block's output alone. (Its own losses add sequence_counts[S, E] and num_tokens[S], int32.)
    """
    trace = Trace(block)
    names = dict.fromkeys(name for names in trace.keepers() for name in names)
    return {name: trace.tensors[name] for name in names}


class _Live:
    """Bytes in use and the most that there were."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.now = self.peak = 0

    def take(self, *names: str) -> None:
        self.now += sum(self.tensors[n].bytes for n in names)
        self.peak = max(self.peak, self.now)

    def free(self, *names: str) -> None:
        self.now -= sum(self.tensors[n].bytes for n in names)


def peak_bytes(block: Block) -> int:
    """The most bytes that forward and backward of a block have in use at a time, beside x, the
    parameters and the output's cotangent; the gradients that are made by then are counted.

    Every tensor lives from the call that makes it to the last that reads it, as in eager torch. XLA
    has the gradients' memory from the start, but puts other tensors into it until they are made.
    """
    trace = Trace(block)
    tensors, calls, kept = trace.tensors, trace.calls, trace.keepers()
    live = _Live(tensors)
    waiting = collections.Counter(name for names in kept for name in names)

    def forward(some: Sequence[Call], needed: Mapping[str, int]) -> None:
        reads = collections.Counter(n for c in some for n in c.inputs)
        made = {n for c in some for n in c.outputs}
        for call in some:
            live.take(*call.outputs)
            for name in dict.fromkeys((*call.inputs, *call.outputs)):
                reads[name] -= name in call.inputs
                if name in made and reads[name] <= 0 and not needed.get(name):
                    live.free(name)

    forward(calls, waiting | collections.Counter([trace.output]))
    cotangents: set[str] = set()
    done: set[str] = set()
    for call, keeps in zip(reversed(calls), reversed(kept), strict=True):
        if trace.again(call) and call.part not in done:
            done.add(call.part)
            inside, made = trace.part(call)
            again = collections.Counter(n for c in inside for n in c.keeps() if n in made)
            forward(inside, again)
            waiting += again
        if call.op.name == "add":  # its cotangent goes to both as it is
            continue
        plan = call.op.gradient_plan(tuple(n is not None for n in call.inputs))
        found = [n for step in plan.steps for t in step.targets if (n := call.inputs[t])]
        joined = [n for n in found if n in cotangents]
        live.take(*found)
        cotangents.update(found)
        live.free(*(n for n in call.outputs if n in cotangents))
        if trace.again(call):
            keeps = [*keeps, *(n for n in call.keeps() if n in trace.part(call)[1])]
        for name in keeps:
            waiting[name] -= 1
            if waiting[name] == 0:
                live.free(name)
        for name in joined:  # both cotangents, and then their sum
            live.take(name)
            live.free(name, name)
    return live.peak
