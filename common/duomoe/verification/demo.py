# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""`duomoe demo`: the comparison, then one language model on real text in both frameworks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from duomoe.verification import compare, corpus, environment, inputs, models, report
from duomoe.verification.adapters import JaxAdapter, TorchAdapter

if TYPE_CHECKING:
    from duomoe.verification.train import Run

DTYPES = ("float32", "bfloat16")
HELD_OUT_BATCHES = 8
HELD_OUT_SEQUENCES = 32


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """What the demo can be asked for.

    Attributes:
        out: the folder for demo.png and demo.json.
        steps: optimizer steps in each framework.
        batch: sequences of a batch.
        seed: of weights, batches and the comparison's inputs.
        model: sizes of the language model.

    Raises:
        ValueError: on an option that is out of range.
    """

    out: Path
    steps: int = 400
    batch: int = 32
    seed: int = 0
    model: models.ModelConfig = dataclasses.field(default_factory=models.ModelConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")


def trained_block(
    model: models.LanguageModel, batch: np.ndarray, config: models.ModelConfig, layer: int
) -> inputs.BlockCase:
    """A layer's block with its trained weights and the activations of real text."""
    parameters = model.parameters()
    return inputs.BlockCase(
        x=model.evaluate(batch).moe_inputs[layer],
        parameters={name: parameters[f"{layer}.{name}"] for name in models.EXPERTS},
        expert_bias=None,
        config=config.router(),
    )


def compare_trained(
    model: models.LanguageModel, batch: np.ndarray, options: DemoOptions
) -> list[compare.Comparison]:
    """The trained blocks in both front ends, on the activations of one batch."""
    torch = TorchAdapter()
    adapters: dict[str, compare.Adapter] = {"eager": JaxAdapter(), "jit": JaxAdapter(jit=True)}
    comparisons: list[compare.Comparison] = []
    for layer in range(options.model.blocks):
        case = trained_block(model, batch, options.model, layer)
        rng = np.random.default_rng([options.seed, layer])
        label = f"trained layer {layer + 1}"
        comparisons += compare.compare_block(case, adapters, torch, rng, label)
    return comparisons


def demo(options: DemoOptions) -> bool:
    """Run everything, print the table, write demo.png and demo.json; return whether all went well.

    Raises:
        environment.CannotRun: a front end or a package is missing.
    """
    environment.require_front_ends()
    environment.require_demo()
    from duomoe.verification import demo_report, figure, train
    from duomoe.verification.jax_model import JaxModel
    from duomoe.verification.torch_model import TorchModel

    started = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    print("comparing every op and the MoE block in float32 and bfloat16 ...", flush=True)
    results = {
        dtype: compare.compare_all(inputs.Options(dtype=dtype, seed=options.seed))
        for dtype in DTYPES
    }
    compare_seconds = time.perf_counter() - started

    text = corpus.standard_library()
    print(
        f"text: {text.files} source files of {text.source}, {len(text.training):,} bytes to train "
        f"on and {len(text.held_out):,} held out",
        flush=True,
    )
    config = options.model
    weights = models.initial_parameters(config, options.seed)
    both: tuple[models.LanguageModel, ...] = (
        JaxModel(config, weights),
        TorchModel(config, weights),
    )
    held_out = text.evaluation(HELD_OUT_BATCHES, HELD_OUT_SEQUENCES, config.context)

    def batches() -> Any:
        return text.batches(options.steps, options.batch, config.context, options.seed)

    gradients = [model.gradients(next(batches())) for model in both]
    difference = train.gradient_difference(*gradients)
    runs: Sequence[Run] = [train.train(m, batches(), options.steps, held_out) for m in both]
    trained = compare_trained(both[1], held_out[0], options)

    seconds = {"comparison": compare_seconds, "total": time.perf_counter() - started}
    outcome = demo_report.Outcome(options, text, results, trained, difference, runs, seconds)
    print("\n" + outcome.text())
    figure.draw(options.out / "demo.png", *runs)
    report.write_json(options.out / "demo.json", outcome.json())
    print(f"\nwrote {options.out / 'demo.png'} and {options.out / 'demo.json'}")
    for problem in outcome.problems():
        print(f"FAILED: {problem}")
    if not outcome.problems():
        print("PASSED: every op and block is bit-identical, and both models learned")
    return not outcome.problems()
