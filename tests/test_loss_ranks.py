# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Losses over a torch process group of two ranks, and over one rank's own tokens as in data
parallelism, against float64 results of the whole batch.

Averaging gradients over the ranks, as DistributedDataParallel does, gives the gradient of the one
loss. Values: the roundings of one call plus one for each rank's addition.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from oracle_bounds import U
from router_checks import Exact, decided, same_bits
from samples import block_parameters, normal

torch = pytest.importorskip("torch")
from duomoe import MoEParams, RouterConfig

import torch_frontend as tf

pytestmark = [pytest.mark.torch, pytest.mark.multidevice]

WORLD = 2
CONFIG = RouterConfig(8, 2, score="sigmoid")
GROUPED = RouterConfig(8, 2, num_groups=4, group_top_k=2, counts="unbiased", scale=2.5)


@dataclasses.dataclass
class Scenario:
    """A batch, and which of its tokens each rank has, in which order."""

    logits: np.ndarray
    tokens: list[np.ndarray]
    config: RouterConfig = CONFIG
    mask: np.ndarray | None = None
    bias: np.ndarray | None = None
    num_sequences: int = 1
    grouped: bool = True  # whether the losses are over the group

    def options(self, tokens: np.ndarray, array: Any = lambda x: x) -> dict[str, Any]:
        """Options of `route` for some of the tokens."""
        options: dict[str, Any] = {"num_sequences": self.num_sequences}
        if self.mask is not None:
            options["token_mask"] = array(self.mask[tokens])
        if self.bias is not None:
            options["bias"] = array(self.bias)
        return options


@functools.cache
def scenarios() -> dict[str, Scenario]:
    """The same in every process."""
    rng = np.random.default_rng(0)
    z = decided(rng, 24, CONFIG)
    mask = rng.random(24) < 0.7
    mask[0] = True
    second = mask & (np.arange(24) < 12)
    bias = (rng.integers(-8, 8, 8) / 16).astype("f4")
    halves = np.split(np.arange(24), 2)
    # Rank r has the r-th half of each of 3 sequences.
    parts = list(np.arange(24).reshape(3, 2, 4).swapaxes(0, 1).reshape(2, 12))
    poisoned = [np.where(m[:, None], z, np.float32(np.nan)) for m in (mask, second)]
    return {
        "halves": Scenario(z, halves),
        "uneven": Scenario(z, [np.arange(17), np.arange(17, 24)]),
        "a rank without tokens": Scenario(z, [np.arange(24), np.arange(0)]),
        "no tokens at all": Scenario(z[:0], [np.arange(0)] * 2),
        "padding": Scenario(poisoned[0], halves, mask=mask),
        "a rank of padding": Scenario(poisoned[1], halves, mask=second),
        "parts of sequences": Scenario(z, parts, num_sequences=3),
        "parts of padded sequences": Scenario(poisoned[0], parts, mask=mask, num_sequences=3),
        "repeated tokens": Scenario(z, [np.arange(24)] * 2),
        "groups": Scenario(decided(rng, 24, GROUPED, bias), halves, GROUPED, bias=bias),
        "own sequences": Scenario(z, halves, num_sequences=2, grouped=False),
    }


def losses_of(scenario: Scenario, tokens: np.ndarray, group: Any) -> dict[str, np.ndarray]:
    """Both losses on some of the tokens, and the gradient of their sum."""
    leaf = torch.from_numpy(scenario.logits[tokens].copy()).requires_grad_()
    routing = tf.route(leaf, scenario.config, **scenario.options(tokens, torch.from_numpy))
    values = [
        tf.load_balancing_loss(routing, scenario.config, group=group),
        tf.z_loss(routing, group=group),
    ]
    assert all(v.shape == () for v in values)
    (grad,) = torch.autograd.grad(sum(values), leaf)
    return {
        "load_balancing_loss": values[0].detach().numpy(),
        "z_loss": values[1].detach().numpy(),
        "grad": grad.numpy(),
    }


def block_inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [normal(rng, (24, 16)), *block_parameters(rng, 8, 16, 12)]


def block_losses(x: np.ndarray, parameters: list[np.ndarray], group: Any) -> list[np.ndarray]:
    """Both losses of the block, and the gradient of their sum for the router's matrix."""
    leaves = [torch.from_numpy(p.copy()).requires_grad_() for p in parameters]
    out = tf.moe(torch.from_numpy(x.copy()), MoEParams(*leaves), CONFIG, group=group)
    values = [out.load_balancing_loss, out.z_loss]
    (grad,) = torch.autograd.grad(sum(values), leaves[0])
    return [*(v.detach().numpy() for v in values), grad.numpy()]


def biases_of(logits: np.ndarray, group: Any) -> list[np.ndarray]:
    """The bias after a step by the loads' signs, and after one by quantiles."""
    z, bias = torch.from_numpy(logits.copy()), torch.linspace(-0.1, 0.1, 8)
    counts = tf.route(z, CONFIG, bias=bias).expert_counts
    bins = tf.count_quantile_bins(z, CONFIG, bias=bias)
    stepped = tf.update_expert_bias(bias, counts, rate=0.5, center=True, group=group)
    moved = tf.update_expert_bias_by_quantile(bias, bins, CONFIG, group=group)
    return [stepped.numpy(), moved.numpy()]


def run_rank(rank: int, meeting_point: str, queue: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=WORLD, init_method=f"file://{meeting_point}"
    )
    group = torch.distributed.group.WORLD
    results: dict[str, Any] = {}
    for name, scenario in scenarios().items():
        over = group if scenario.grouped else None
        results[name] = losses_of(scenario, scenario.tokens[rank], over)
    x, *parameters = block_inputs()
    results["block"] = block_losses(np.split(x, WORLD)[rank], parameters, group)
    scenario = scenarios()["groups"]
    results["biases"] = biases_of(scenario.logits[scenario.tokens[rank]], group)
    # Loads that int32 cannot add up.
    loads = torch.tensor([2**30 + 10, 2**30 - 1, 2**30, 2**30], dtype=torch.int32)
    stepped = tf.update_expert_bias(torch.zeros(4), loads, rate=1.0, group=group)
    results["large loads"] = stepped.numpy()
    queue.put((rank, results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank computed of all scenarios, in one pair of processes."""
    meeting_point = str(tmp_path_factory.mktemp("ranks") / "store")
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=run_rank, args=(r, meeting_point, queue)) for r in range(WORLD)
    ]
    for process in processes:
        process.start()
    results = dict(queue.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return [results[r] for r in range(WORLD)]


def averaged(scenario: Scenario, results: list[dict[str, np.ndarray]]) -> np.ndarray:
    """The gradient of the mean of the ranks' losses. Halving is exact."""
    total = np.zeros_like(scenario.logits)
    for tokens, result in zip(scenario.tokens, results, strict=True):
        np.add.at(total, tokens, result["grad"])
    return total / np.float32(WORLD)


@pytest.mark.parametrize("name", [n for n, s in scenarios().items() if s.grouped])
def test_every_rank_has_the_loss_of_all_tokens(name: str, ranks) -> None:
    """Ranks with uneven or no tokens, with nothing but padding, with parts of every sequence
    (context parallelism), with the same tokens (tensor parallelism)."""
    scenario, results = scenarios()[name], [r[name] for r in ranks]
    for loss in ("load_balancing_loss", "z_loss"):
        same_bits(results[0][loss], results[1][loss], loss)
    everything = np.arange(len(scenario.logits))
    exact = Exact(scenario.logits, scenario.config, roundings=WORLD, **scenario.options(everything))
    values = [results[0][loss] for loss in ("load_balancing_loss", "z_loss")]
    exact.check_losses(values, averaged(scenario, results))
    # The gradient is that of one process, in its bits: none depends on an order of summation.
    whole = losses_of(scenario, everything, None)
    same_bits(averaged(scenario, results), whole["grad"])
    if name == "no tokens at all":
        assert values == [0, 0]


def test_each_ranks_own_sequences_average_to_the_batchs_loss(ranks) -> None:
    """Per-sequence losses need no group: the mean over ranks is the loss of all sequences."""
    scenario, results = scenarios()["own sequences"], [r["own sequences"] for r in ranks]
    whole = dataclasses.replace(scenario, num_sequences=2 * WORLD)
    exact = Exact(whole.logits, CONFIG, num_sequences=2 * WORLD)
    values = [
        np.float32(np.mean([r[n] for r in results], dtype="f8"))
        for n in ("load_balancing_loss", "z_loss")
    ]
    for got, (want, bound) in zip(values, exact.losses().values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=bound + 2 * U * abs(want))
    want = losses_of(whole, np.arange(24), None)["grad"]
    same_bits(averaged(scenario, results), want)


def test_the_router_of_a_block_gets_the_gradient_of_the_one_loss(ranks) -> None:
    x, *parameters = block_inputs()
    *values, grad = block_losses(x, parameters, None)
    results = [r["block"] for r in ranks]
    for i, want in enumerate(values):
        same_bits(results[0][i], results[1][i])
        np.testing.assert_allclose(results[0][i], want, rtol=32 * U)
    got = sum(r[2] for r in results) / np.float32(WORLD)
    np.testing.assert_allclose(got, grad, rtol=1e-5, atol=64 * U * np.abs(grad).max())


def test_every_rank_has_the_bias_of_all_tokens(ranks) -> None:
    """Counts are integers: the same bits as on one process with all tokens."""
    want = biases_of(scenarios()["groups"].logits, None)
    for result in ranks:
        for got, exact in zip(result["biases"], want, strict=True):
            same_bits(got, exact)
        np.testing.assert_array_equal(result["large loads"], np.float32([-1, 1, 1, 1]))
    alone = biases_of(np.split(scenarios()["groups"].logits, WORLD)[0], None)
    assert any((a != b).any() for a, b in zip(alone, want, strict=True))


@pytest.mark.jax
@pytest.mark.parametrize("name", ["halves", "a rank of padding", "parts of sequences", "groups"])
def test_psum_and_all_reduce_give_the_same_bits(name: str, ranks) -> None:
    """Two shards in JAX, two ranks in torch: losses and gradients."""
    jax = pytest.importorskip("jax")
    from jax.sharding import PartitionSpec as P
    from jax_samples import mesh

    import jax_frontend as jf

    scenario, results = scenarios()[name], [r[name] for r in ranks]
    order = np.concatenate(scenario.tokens)
    options = scenario.options(order)
    mask, num_sequences = options.pop("token_mask", np.ones(24, bool)), options["num_sequences"]

    def local(z, mask):
        routing = jf.route(
            z, scenario.config, token_mask=mask, bias=scenario.bias, num_sequences=num_sequences
        )
        return (
            jf.load_balancing_loss(routing, scenario.config, axis_name="d"),
            jf.z_loss(routing, axis_name="d"),
        )

    grid = mesh((WORLD,), ("d",))
    f = jax.shard_map(local, mesh=grid, in_specs=(P("d"), P("d")), out_specs=(P(), P()))
    values, pull = jax.vjp(jax.jit(lambda z: f(z, mask)), scenario.logits[order])
    (grad,) = pull((jax.numpy.float32(1), jax.numpy.float32(1)))
    for value, loss in zip(values, ("load_balancing_loss", "z_loss"), strict=True):
        same_bits(np.asarray(value), results[0][loss], loss)
    same_bits(np.asarray(grad), averaged(scenario, results)[order])
