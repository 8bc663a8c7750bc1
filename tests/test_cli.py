# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The command `duomoe`: options, exit codes, and that it finds a difference of one bit."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from adapters import BFLOAT16
from duomoe import cli, ops

pytest.importorskip("jax", reason="JAX is not installed")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from duomoe.verification import compare, corpus, inputs

pytestmark = [pytest.mark.jax, pytest.mark.torch]

SMALL = ["--tokens", "24", "--experts", "6", "--top-k", "2", "--width", "8", "--hidden", "12"]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command, words",
    [
        ([], ("verify", "demo", "--version")),
        (["verify"], ("--tokens", "--top-k", "--dtype", "--device", "--json", "exit code")),
        (["demo"], ("--out", "--steps", "--seed", "standard library", "exit code")),
    ],
)
def test_help(command, words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "COMMAND"),
        (["compare"], "invalid choice: 'compare'"),
        (["verify", "--tokens", "many"], "--tokens: invalid int value: 'many'"),
        (["verify", "--tokens", "0"], "tokens must be at least 1, got 0"),
        (["verify", "--experts", "4", "--top-k", "5"], "top_k must be between 1 and the number"),
        (["verify", "--dtype", "float64"], "--dtype: invalid choice: 'float64'"),
        (["verify", "--score", "relu"], "--score: invalid choice: 'relu'"),
        (["verify", "--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["verify", "--seed", "-1"], "seed must not be negative, got -1"),
        (["verify", "--json", "/no/such/folder/a.json"], "in an existing folder"),
        (["demo", "--steps", "0"], "steps must be at least 1, got 0"),
        (["demo", "--width", "30"], "width (30) must be divisible by 4 heads"),
        (["demo", "--out", __file__], "--out must name a folder"),
    ],
)
def test_bad_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_parsing_imports_no_framework():
    code = (
        "import sys; from duomoe import cli\n"
        "try: cli.main(['verify', '--tokens', '0'])\n"
        "except SystemExit: pass\n"
        "assert not {'jax', 'torch', 'matplotlib'} & set(sys.modules)"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize("command", ["verify", "demo"])
def test_missing_framework(framework, command):
    result = run_python(
        f"import sys; sys.modules[{framework!r}] = None\n"
        f"from duomoe.cli import main; sys.exit(main([{command!r}]))"
    )
    assert result.returncode == 2
    sentence = f"{framework}_frontend needs {framework}, which is not installed"
    assert result.stderr.startswith(f"duomoe: {sentence}")
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_missing_package_of_the_demo(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "optax", None)
    assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert "the demo needs optax, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys):
    assert cli.main(["verify", "--device", "cuda"]) == 2
    assert "PyTorch sees no CUDA device" in capsys.readouterr().err


# -- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, score", [("float32", "softmax"), ("bfloat16", "sigmoid")])
def test_verify_agrees_and_reports_every_op(dtype, score, tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = ["verify", *SMALL, "--dtype", dtype, "--score", score, "--json", str(path)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    report = json.loads(path.read_text())
    comparisons = report["comparisons"]
    assert report["passed"] and all(c["identical"] for c in comparisons)
    assert {c["kernel"] for c in comparisons} - {""} == set(ops.table())
    assert report["options"] == {
        "tokens": 24,
        "experts": 6,
        "top_k": 2,
        "width": 8,
        "hidden": 12,
        "dtype": dtype,
        "score": score,
        "device": "cpu",
        "seed": 0,
    }
    assert {"duomoe", "jax", "torch", "numpy", "python", "device"} <= set(report["environment"])
    block = {(c["case"], c["quantity"]) for c in comparisons if c["op"] == "moe"}
    for case in ("eager", "jit"):
        for name in ("x", "router", "w_gate", "w_up", "w_down", "router_bias"):
            assert (case, f"grad {name}") in block
        for name in ("output", "load_balancing_loss", "z_loss"):
            assert (case, f"output {name}") in block
    assert all(f"\n{op.name} " in printed for op in inputs.forward_ops())
    assert f"all {len(comparisons)} arrays are bit-identical" in printed


@pytest.mark.parametrize(
    "perturbed, op, quantity",
    [("glu", "glu", "output out"), ("gate_bwd_params", "gate", "grad router")],
)
def test_verify_finds_one_flipped_bit(perturbed, op, quantity, monkeypatch, tmp_path, capsys):
    from torch_frontend import bind

    original = bind.run

    def flipping(spec, inputs, values):
        outputs = original(spec, inputs, values)
        if spec.name == perturbed:
            outputs[0].detach().view(torch.int32).view(-1)[3] ^= 1
        return outputs

    monkeypatch.setattr(bind, "run", flipping)
    path = tmp_path / "report.json"
    assert cli.main(["verify", *SMALL, "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert not report["passed"]
    alone = [c for c in report["comparisons"] if c["op"] == op and not c["identical"]]
    assert {c["quantity"] for c in alone} == {quantity}
    assert all(c["differing"] == 1 and c["max_ulp"] == 1 for c in alone)
    assert {c["op"] for c in report["comparisons"] if not c["identical"]} == {op, "moe"}
    printed = capsys.readouterr().out
    assert "1 of " in printed and "differ by up to 1 ulp" in printed


def test_verify_refuses_an_op_without_generator(monkeypatch, capsys):
    monkeypatch.delitem(inputs.GENERATORS, "glu")
    assert cli.main(["verify", *SMALL]) == 1
    assert "error: glu is in the op table" in capsys.readouterr().out


def test_verify_names_what_has_no_kernel(monkeypatch, capsys):
    monkeypatch.setattr(compare, "missing_kernels", lambda device: ["combine_bwd"])
    assert cli.main(["verify", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "not compared, because this build has no CPU kernel for it: combine, moe" in printed
    assert "\ncombine " not in printed


def test_no_comparison_is_vacuous(torch_adapter):
    """Zeros are easily identical: every output and every true gradient has something in it."""
    for op in inputs.forward_ops():
        rng = np.random.default_rng(0)
        draw = inputs.Draw(inputs.Options(), rng, torch_adapter.call)
        for case in inputs.GENERATORS[op.name](draw):
            cotangents = compare.draw_cotangents(op, case, rng)
            for name, value in compare.run_op(torch_adapter, op, case, cotangents).items():
                constant = (op.name, name) in (
                    ("route", "grad bias"),
                    ("aux_loss", "grad expert_loads"),
                    ("aux_loss", "grad live_tokens"),
                )
                assert value.astype(np.float32).any() != constant, (op.name, case.label, name)


@pytest.mark.parametrize("dtype", [np.dtype("float32"), np.dtype("float16"), BFLOAT16])
def test_ulp_distance(dtype):
    one = np.ones(1, dtype)
    unsigned = np.uint32 if dtype.itemsize == 4 else np.uint16
    tiny = np.ones(1, unsigned).view(dtype)
    assert compare.ulp_distance((one.view(unsigned) + 5).view(dtype), one) == 5
    assert compare.ulp_distance(tiny, -tiny) == 2
    assert compare.ulp_distance(one, one) == 0


def test_every_difference_is_seen():
    def verdict(a, b):
        return compare.compare_arrays(a, b, op="", case="", quantity="", kernel="")

    zero = np.zeros(3, np.float32)
    nan = np.array([0, np.nan, 0], np.float32)
    assert verdict(nan, nan).identical
    assert verdict(zero, nan).verdict == "1 of 3 differ (NaN among them)"
    assert verdict(zero, -zero).verdict == "3 of 3 differ by up to 0 ulp"
    assert verdict(np.arange(2), np.arange(2) + 1).verdict == "2 of 2 differ"
    assert not verdict(zero, zero[:2]).identical
    assert not verdict(zero[:0], zero[:0].astype(np.float16)).identical
    assert "float32[3] in JAX, float16[3] in PyTorch" in verdict(zero, zero.astype("f2")).verdict


# -- demo ----------------------------------------------------------------------------------------


def test_demo_writes_its_report_and_picture(tmp_path, capsys):
    out = tmp_path / "new" / "demo"
    sizes = ["--batch", "4", "--context", "16", "--width", "8", "--hidden", "8", "--experts", "4"]
    assert cli.main(["demo", "--out", str(out), "--steps", "5", *sizes]) == 0
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((out / "demo.json").read_text())
    assert report["passed"] and report["problems"] == []
    assert set(report["comparison"]) == {"float32", "bfloat16"}
    for run in report["runs"]:
        assert len(run["loss_nats_per_byte"]) == len(run["expert_load"]) == 5
        assert np.allclose(np.sum(run["expert_load"], axis=-1), 1, atol=1e-4)
        assert run["held_out_nats_per_byte"] < run["held_out_nats_per_byte_before"]
    assert report["routed_identically"]["step"][0] == 0
    assert report["routed_identically"]["all_layers"][0] == 1
    assert all(c["identical"] for c in report["trained_blocks"])
    assert report["first_batch_gradients"]["largest_relative_difference"] < 1e-4
    printed = capsys.readouterr().out
    for words in ("moe block, JAX jit", "trained layer 2", "PyTorch loss", "held-out loss after"):
        assert words in printed


def test_demo_model_is_the_same_in_every_run_of_torch():
    from duomoe.verification.models import ModelConfig, initial_parameters
    from duomoe.verification.torch_model import TorchModel

    config = ModelConfig(context=16)
    batch = np.random.default_rng(0).integers(0, 256, (16, 17)).astype(np.int32)
    model = TorchModel(config, initial_parameters(config, 0))
    first, second = model.gradients(batch), model.gradients(batch)
    assert all((first[name] == second[name]).all() for name in first)


def test_a_run_that_did_not_learn_is_told():
    from duomoe.verification.train import Run

    run = Run("JAX", np.ones(3), np.ones((3, 1, 2)), [0], [], 2.0, 1.0, 0.0, 0.0)
    assert run.learned
    assert not dataclasses.replace(run, held_out=2.0).learned
    assert not dataclasses.replace(run, held_out=np.nan).learned
    assert not dataclasses.replace(run, losses=np.array([1, np.nan])).learned


def test_corpus_is_split_by_file_and_reproducible():
    text = corpus.standard_library()
    assert text.sha256 == corpus.standard_library().sha256
    assert 0.02 < len(text.held_out) / len(text.training) < 0.5
    (a,), (b,) = (list(text.batches(1, 4, 16, seed=3)) for _ in range(2))
    assert a.shape == (4, 17) and (a == b).all()
    batches = text.evaluation(2, 3, 16)
    assert [x.shape for x in batches] == [(3, 17)] * 2
