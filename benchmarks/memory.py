# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The memory of a training step (forward and backward) of one block and of a stack of blocks, with
and without recomputation, in both front ends and in plain torch, beside what docs/memory.md
predicts. `python benchmarks/memory.py [--device cuda] [--out FOLDER]`.

Every case runs in a process of its own. On a CPU the peak is that of the resident set
(/proc/self/clear_refs, VmHWM); on a GPU that of the framework's allocator.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from duomoe import MoEParams, RouterConfig
from duomoe.verification.memory import Block, kept_tensors, peak_bytes

THREADS = 2
MIB = 2**20
SHAPES = {
    "cpu": Block(4096, 64, 8, 512, 256),
    # A layer of Qwen3-30B-A3B.
    "cuda": Block(8192, 128, 8, 2048, 768, dtype="bfloat16"),
}
CONTESTANTS = {
    "torch": (False, True),
    "jax": (False, True),
    "plain torch": (False,),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One process: who runs how many blocks of which shape, where."""

    contestant: str
    block: Block
    layers: int
    device: str

    def predicted(self) -> dict[str, int] | None:
        """Bytes beside parameters and inputs: kept for the backward pass, and at the peak."""
        if self.contestant == "plain torch":
            return None
        between = self.block.tokens * self.block.width * item_size(self.block.dtype)
        kept = sum(t.bytes for t in kept_tensors(self.block).values())
        gradients = sum(t.bytes for t in self.block.parameters().values())
        # The backward pass of the last block has what waits for all below, that of the first has
        # the gradients of all above.
        others = (self.layers - 1) * max(kept + between, gradients)
        return {
            "kept": self.layers * kept + (self.layers - 1) * between,
            "peak": peak_bytes(self.block) + others,
        }


def item_size(dtype: str) -> int:
    """Bytes of an element."""
    return 4 if dtype == "float32" else 2


def draw(block: Block, layers: int) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
    """The tokens and the parameters of every block, float32."""
    rng = np.random.default_rng(0)

    def normal(shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-2] ** -0.5)

    shapes = {name: t.shape for name, t in block.parameters().items()}
    parameters = [{name: normal(s) for name, s in shapes.items()} for _ in range(layers)]
    return rng.standard_normal((block.tokens, block.width), dtype=np.float32), parameters


# -- measuring -------------------------------------------------------------------------------------


def status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def resident(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """Bytes that `run` adds to the resident set, the most on the way, and its result."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    result = run()
    return status("VmRSS") - before, status("VmHWM") - before, result


def measure_torch(case: Case) -> dict[str, int]:
    """Bytes beside parameters and inputs: kept after the forward pass, and at the peak."""
    import torch

    torch.set_num_threads(THREADS)
    dtype = getattr(torch, case.block.dtype)
    x, parameters = draw(case.block, case.layers)

    def tensor(a: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(a).to(case.device, dtype, copy=True).requires_grad_()

    x, ps = tensor(x), [{n: tensor(a) for n, a in p.items()} for p in parameters]
    del parameters
    cotangent = torch.ones_like(x).detach()
    inputs = [x, *(a for p in ps for a in p.values())]
    config = RouterConfig(case.block.experts, case.block.top_k)
    if case.contestant == "torch":
        import torch_frontend

        def block(x: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
            params = MoEParams(**p)
            return torch_frontend.moe(x, params, config, recompute=case.block.recompute).output
    else:
        block = plain_torch(case.block.top_k)

    def forward() -> torch.Tensor:
        y = x
        for p in ps:
            y = block(y, p)
        return y

    def step() -> Any:
        return torch.autograd.grad(forward(), inputs, cotangent)

    def on_gpu(run: Callable[[], Any]) -> tuple[int, int, Any]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        return now - before, peak - before, result

    measured = on_gpu if case.device == "cuda" else resident
    step()  # threads, caches and scratch memory are there afterwards
    kept, _, y = measured(forward)
    kept -= y.numel() * y.element_size()
    del y
    _, peak, _ = measured(step)
    return {"kept": kept, "peak": peak, "gradients": sum(a.nbytes for a in inputs)}


def plain_torch(top_k: int) -> Callable[..., Any]:
    """The block as users write it: sort, gather, a loop over the experts, a weighted index_add."""
    import torch

    def block(x: Any, p: dict[str, Any]) -> Any:
        scores = (x.float() @ p["router"].float()).softmax(-1)
        weights, ids = scores.topk(top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = ids.flatten().argsort(stable=True)
        token = order // top_k
        experts = p["w_up"].shape[0]
        counts = torch.bincount(ids.flatten(), minlength=experts).tolist()
        parts = []
        for e, rows in enumerate(x[token].split(counts)):
            hidden = torch.nn.functional.silu(rows @ p["w_gate"][e]) * (rows @ p["w_up"][e])
            parts.append(hidden @ p["w_down"][e])
        weighted = torch.cat(parts) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, weighted)

    return block


def measure_jax(case: Case) -> dict[str, int]:
    """Bytes beside parameters and inputs: at the peak, and what the compiler says."""
    import jax
    import jax.numpy as jnp

    import jax_frontend

    config = RouterConfig(case.block.experts, case.block.top_k)

    def stack(x: jax.Array, ps: list[dict[str, jax.Array]]) -> jax.Array:
        for p in ps:
            options = {"recompute": case.block.recompute}
            x = jax_frontend.moe(x, MoEParams(**p), config, **options).output
        return x

    @jax.jit
    def step(x: jax.Array, ps: list[dict[str, jax.Array]], cotangent: jax.Array) -> Any:
        _, pull = jax.vjp(stack, x, ps)
        return pull(cotangent)

    x, parameters = draw(case.block, case.layers)
    x = jnp.array(x, case.block.dtype)
    ps = [{n: jnp.array(a, case.block.dtype) for n, a in p.items()} for p in parameters]
    del parameters
    arguments = (x, ps, jnp.ones_like(x))
    compiled = step.lower(*arguments).compile()
    analysis = compiled.memory_analysis()

    def run() -> Any:
        return jax.block_until_ready(compiled(*arguments))

    if case.device == "cuda":
        device = jax.local_devices()[0]
        before = device.memory_stats()["bytes_in_use"]
        run()
        peak = device.memory_stats()["peak_bytes_in_use"] - before
    else:
        run()
        _, peak, _ = resident(run)
    gradients = sum(a.nbytes for a in jax.tree.leaves(arguments[:2]))
    temporaries = analysis.temp_size_in_bytes
    return {"peak": peak, "gradients": gradients, "compiler_temporaries": temporaries}


# -- report ----------------------------------------------------------------------------------------


def in_subprocess(case: Case) -> dict[str, int]:
    """What the case measures."""
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",  # freed tensors leave the resident set
        "OMP_NUM_THREADS": str(THREADS),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_PLATFORMS": "cpu" if case.device == "cpu" else "cuda,cpu",
    }
    command = [sys.executable, __file__, "--case", json.dumps(dataclasses.asdict(case))]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(result.stdout.splitlines()[-1])


def machine(device: str) -> dict[str, Any]:
    """Device and versions."""
    import jax
    import torch

    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        name = next(models, platform.machine())
    versions = {"torch": torch.__version__, "jax": jax.__version__, "numpy": np.__version__}
    return {"device": name, "versions": versions, "date": datetime.date.today().isoformat()}


def main() -> None:
    """Runs all cases and prints them; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, help="T, in place of the device's")
    parser.add_argument("--out", type=Path, help="write memory.json into this folder")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        fields = json.loads(options.case)
        case = Case(**{**fields, "block": Block(**fields["block"])})
        print(json.dumps((measure_jax if case.contestant == "jax" else measure_torch)(case)))
        return
    block = SHAPES[options.device]
    block = dataclasses.replace(block, tokens=options.tokens or block.tokens)
    print(f"{block}\nMiB beside parameters, inputs and gradients")
    print(f"{'':32} {'kept':>8} {'predicted':>10} {'peak':>8} {'predicted':>10} {'compiler':>9}")
    records = []
    for layers in options.layers:
        for contestant, recomputes in CONTESTANTS.items():
            for recompute in recomputes:
                shape = dataclasses.replace(block, recompute=recompute)
                case = Case(contestant, shape, layers, options.device)
                found, predicted = in_subprocess(case), case.predicted()
                records.append(
                    {
                        "contestant": contestant,
                        "layers": layers,
                        "recompute": recompute,
                        "bytes": found,
                        "predicted": predicted,
                    }
                )
                cells = (
                    found.get("kept"),
                    predicted and predicted["kept"],
                    found["peak"] - found["gradients"],
                    predicted and predicted["peak"] - found["gradients"],
                    found.get("compiler_temporaries"),
                )
                texts = ["-" if c is None else f"{c / MIB:.0f}" for c in cells]
                label = f"{contestant}, {layers} block{'s' * (layers > 1)}"
                label += ", recomputed" * recompute
                widths = (8, 10, 8, 10, 9)
                row = " ".join(f"{t:>{w}}" for t, w in zip(texts, widths, strict=True))
                print(f"{label:32} {row}", flush=True)
    if options.out:
        record = {**machine(options.device), "block": dataclasses.asdict(block), "cases": records}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "memory.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
