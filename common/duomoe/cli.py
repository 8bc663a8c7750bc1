# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The command `duomoe`: verify the two front ends against each other, or run the demo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import duomoe
from duomoe.config import SCORES
from duomoe.ops import FLOAT_DTYPES

VERIFY = """\
Run every op of duomoe, and the whole MoE block, in JAX and in PyTorch on the same random inputs,
and compare all outputs and all gradients bit for bit. The block runs eagerly in PyTorch, and both
eagerly and jitted in JAX. On a GPU, what this build has no CUDA kernel for is named and left out.
"""
DEMO = """\
Run the comparison of `duomoe verify` in float32 and bfloat16, then train the same small byte-level
MoE language model in JAX and in PyTorch on the CPU: same first weights, same batches of the Python
standard library's source files. Print one table; write demo.png and demo.json.
"""
EXIT_CODES = """\
exit code: 0 everything agrees bit for bit; 1 something differs{more}; 2 a bad option, or a missing
framework or device.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="duomoe", description="Mixture-of-Experts for JAX and PyTorch from one core."
    )
    parser.add_argument("--version", action="version", version=f"duomoe {duomoe.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, summary: str, description: str, more: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=EXIT_CODES.format(more=more),
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.set_defaults(parser=command)
        return command

    def integers(command: argparse.ArgumentParser, **options: tuple[int, str]) -> None:
        for name, (default, text) in options.items():
            flag = f"--{name.replace('_', '-')}"
            command.add_argument(flag, type=int, default=default, metavar="N", help=text)

    verify = add("verify", "compare both front ends bit for bit", VERIFY, "")
    integers(
        verify,
        tokens=(512, "tokens T"),
        experts=(16, "experts E"),
        top_k=(2, "experts per token K"),
        width=(64, "model width D"),
        hidden=(128, "hidden width F of an expert"),
    )
    verify.add_argument(
        "--dtype", choices=FLOAT_DTYPES, default="float32", help="of activations and weights"
    )
    verify.add_argument("--score", choices=SCORES, default="softmax", help="the router's score")
    verify.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run")
    integers(verify, seed=(0, "seed of the random inputs"))
    verify.set_defaults(json=None)
    verify.add_argument(
        "--json",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="also write all results to FILE",
    )

    demo = add("demo", "compare, then train one model in both", DEMO, ", or training did not learn")
    demo.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="DIR", help="where the files go"
    )
    integers(
        demo,
        steps=(400, "optimizer steps in each framework"),
        batch=(32, "sequences per batch"),
        context=(64, "bytes per sequence"),
        experts=(8, "experts of a layer E"),
        top_k=(2, "experts per token K"),
        width=(64, "model width D, a multiple of 4"),
        hidden=(128, "hidden width F of an expert"),
        seed=(0, "seed of weights, batches and the comparison's inputs"),
    )
    return parser


Job = Callable[[], bool]


def _verify(arguments: argparse.Namespace) -> Job:
    from duomoe.verification.inputs import Options
    from duomoe.verification.verify import verify

    names = ("tokens", "experts", "top_k", "width", "hidden", "dtype", "score", "device", "seed")
    options = Options(**{name: getattr(arguments, name) for name in names})
    path = arguments.json
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"--json must name a file in an existing folder, got {path}")
    return lambda: verify(options, path)


def _demo(arguments: argparse.Namespace) -> Job:
    from duomoe.verification.demo import DemoOptions, demo
    from duomoe.verification.models import ModelConfig

    names = ("context", "experts", "top_k", "width", "hidden")
    model = ModelConfig(**{name: getattr(arguments, name) for name in names})
    out, steps, batch, seed = arguments.out, arguments.steps, arguments.batch, arguments.seed
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must name a folder, got {out}")
    options = DemoOptions(out, steps=steps, batch=batch, seed=seed, model=model)
    return lambda: demo(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    from duomoe.verification.environment import CannotRun

    arguments = _parser().parse_args(argv)
    try:
        job = {"verify": _verify, "demo": _demo}[arguments.command](arguments)
    except ValueError as error:
        arguments.parser.error(str(error))
    try:
        return 0 if job() else 1
    except (CannotRun, MemoryError) as error:
        print(f"duomoe: {error or 'out of memory'}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
