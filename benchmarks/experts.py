"""A layer of experts, forward and backward, against the loop over experts of `transformers` on the same tensors, and
against a dense MLP that computes as much for each token.

All kinds are timed in turns, and the median counts: the machine may do other things.

With `--balance` no time is measured, but how evenly a small model spreads its tokens over experts with neither means
against it, the loss, the bias: tokens of the busiest expert over the mean, the mean of the last steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks.support.faked_comm import FakedComm
from benchmarks.support.jobs import SHAKESPEARE
from benchmarks.support.report import Report, deliver, parser
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import ModelConfig, MoeConfig, ParallelConfig
from manta.workers.liveness.expert_load import expert_load
from manta.workers.model.llama import SwiGLU
from manta.workers.parallel.data.flat import FlatParameters
from manta.workers.parallel.experts.layer import ExpertMLP, Spreads
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.parallel.tensor.products import TorchProducts
from manta.workers.parallel.tensor.sequence_parallel import Region
from manta.workers.parallel.tensor.shards import named_shards
from manta.workers.parallel.tensor.weight_gradients import forget
from manta.workers.protocol.messages import Resume
from manta.workers.spec.reading import parse_job_spec
from manta.workers.trainer import Trainer
from manta.workers.training.reporter import Reporter

CPU = torch.device("cpu")
RATIOS = {("experts", "transformers"): 0.8, ("experts", "dense"): 1.5}
"""Pairs of kinds whose times are compared, and the most that the ratio should be."""
BALANCES: dict[str, dict[str, Any]] = {
    "none": {"loss": "none"},
    "loss_0.001": {"weight": 0.001},
    "loss_0.01": {"weight": 0.01},
    "bias_0.001": {"loss": "none", "bias_rate": 0.001},
    "bias_0.01": {"loss": "none", "bias_rate": 0.01},
}
"""Of `--balance`: `model.moe.balance` by name."""
EVEN = 1.5
"""The most that the busiest expert should have of the mean."""
LAST = 20
"""Steps that count."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("experts", __doc__)
    options.add_argument("--experts", type=int, default=64, help="experts (default: 64)")
    options.add_argument("--per-token", type=int, default=8, help="experts per token (default: 8)")
    options.add_argument("--hidden", type=int, default=512, help="hidden size (default: 512)")
    options.add_argument("--inner", type=int, default=256, help="inner width of an expert (default: 256)")
    options.add_argument("--rows", type=int, default=128, help="mean rows of an expert (default: 128)")
    options.add_argument("--turns", type=int, default=9, help="turns (default: 9)")
    options.add_argument("--balance", action="store_true", help="measure how evenly tokens are spread")
    options.add_argument("--text", type=Path, default=SHAKESPEARE, help="with --balance: the text")
    options.add_argument("--steps", type=int, default=300, help="with --balance: steps (default: 300)")
    options.add_argument("--seeds", type=int, default=3, help="with --balance: seeds from --seed on (default: 3)")
    chosen = options.parse_args(arguments)
    return deliver(measure_balance if chosen.balance else measure, chosen)


def measure_balance(options: argparse.Namespace) -> Report:
    """Train the small model in every way. Raises DataError when the text is not there."""
    report = Report("experts_balance", options.seed)
    torch.set_num_threads(1)
    for name, balance in BALANCES.items():
        runs = [trained(_job(balance, options, seed)) for seed in range(options.seed, options.seed + options.seeds)]
        loads = [load for load, _, _ in runs]
        report.add(f"{name}_load", round(statistics.mean(loads), 3), "ratio", None if name == "none" else EVEN)
        report.add(f"{name}_load_in_the_worst_layer", round(statistics.mean(worst for _, worst, _ in runs), 3), "ratio")
        report.add(f"{name}_loss", round(statistics.mean(loss for _, _, loss in runs), 4), "nats/token")
        report.samples[name] = [[round(number, 4) for number in run] for run in runs]
    report.settings = {"job": _job({}, options, options.seed), "counted_steps": LAST, "seeds": options.seeds}
    report.settings["job"]["data"]["paths"] = [options.text.name]
    return report


def _job(balance: dict[str, Any], options: argparse.Namespace, seed: int) -> dict[str, Any]:
    moe = {"experts": 8, "per_token": 2, "ffn_hidden_size": 64, "balance": balance}
    shape = {"family": "llama", "layers": 4, "hidden_size": 64, "heads": 4, "sequence_length": 64}
    optimizer = {"learning_rate": 2e-3, "min_learning_rate": 2e-4, "warmup_steps": min(20, options.steps)}
    return {
        "model": {**shape, "moe": moe},
        "data": {"source": "text", "paths": [str(options.text)]},
        "train": {
            "steps": options.steps, "global_batch_size": 16, "micro_batch_size": 16, "seed": seed,
            "optimizer": optimizer,
        },
        "checkpoint": {"every_steps": 0},
    }  # fmt: skip


def trained(document: dict[str, Any]) -> tuple[float, float, float]:
    """Means of the last steps: tokens of the busiest expert over the mean, the mean of all layers and in the worst;
    loss."""
    spec = parse_job_spec(document)
    trainer = Trainer(spec, Comm(RankGrid(spec.layout), 0, CPU), Reporter(lambda _: None), 1e12)
    trainer.restore(Resume())
    steps = [trainer.train_step() for _ in range(spec.train.steps)][-LAST:]
    trainer.close()
    means, worst = [], []
    for step in steps:
        assert step.expert_tokens is not None
        by_layer = [expert_load([layer]) for layer in step.expert_tokens]
        means.append(statistics.mean(by_layer))
        worst.append(max(by_layer))
    return statistics.mean(means), statistics.mean(worst), statistics.mean(step.loss for step in steps)


def measure(options: argparse.Namespace) -> Report:
    """Time a forward and a backward of every kind."""
    report, generator = Report("experts", options.seed), torch.Generator().manual_seed(options.seed)
    tokens = options.experts * options.rows // options.per_token
    x_sbh = torch.randn((tokens, 1, options.hidden), generator=generator)
    grad_sbh = torch.randn(x_sbh.shape, generator=generator)
    kinds = _kinds(options)
    results = {kind: run(x_sbh, grad_sbh) for kind, run in kinds.items()}  # also the first, slow time
    for ours, theirs in zip(results["experts"], results["transformers"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.turns):
        for kind, run in kinds.items():
            began = time.perf_counter()
            run(x_sbh, grad_sbh)
            seconds[kind].append(time.perf_counter() - began)
    medians = {kind: statistics.median(taken) for kind, taken in seconds.items()}
    for kind, median in medians.items():
        report.add(kind, round(median, 4), "s")
    for (kind, other), target in RATIOS.items():
        report.add(f"{kind}_to_{other}", round(medians[kind] / medians[other], 3), "ratio", target)
    report.settings = {name: value for name, value in vars(options).items() if isinstance(value, int)}
    report.samples = {kind: [round(each, 4) for each in taken] for kind, taken in seconds.items()}
    return report


Run = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Forward of x and backward of its result's gradient: the result, and the gradient of x."""


def _kinds(options: argparse.Namespace) -> dict[str, Run]:
    moe = MoeConfig(experts=options.experts, per_token=options.per_token, ffn_hidden_size=options.inner)
    shape = {"layers": 1, "hidden_size": options.hidden, "heads": 1, "sequence_length": 8, "family": "llama"}
    width = options.per_token * options.inner
    model = ModelConfig.model_validate({**shape, "ffn_hidden_size": width, "moe": moe.model_dump()})
    region = Region(FakedComm(RankGrid(ParallelConfig()), 0, CPU), False, TorchProducts())
    experts = ExpertMLP(model, 0, region, Spreads(0.02, 0.02))
    ours, dense = _engine_run(experts, options.seed), _engine_run(SwiGLU(model, region), options.seed)
    return {"experts": ours, "transformers": _their_run(experts, options), "dense": dense}


def _engine_run(mlp: nn.Module, seed: int) -> Run:
    flat = FlatParameters(named_shards(mlp), 1, CPU)
    flat.parameters.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
    parameters = list(mlp.parameters())

    def run(x_sbh: torch.Tensor, grad_sbh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        forget(parameters)
        x = x_sbh.clone().requires_grad_()
        y = mlp(x, ForwardPass(Positions.of(len(x))), None, None)
        y.backward(grad_sbh)
        assert x.grad is not None
        return y.detach(), x.grad

    return run


def _their_run(experts: ExpertMLP, options: argparse.Namespace) -> Run:
    """Of their block with the weights of ours."""
    config = Qwen3MoeConfig(
        hidden_size=options.hidden,
        moe_intermediate_size=options.inner,
        num_experts=options.experts,
        num_experts_per_tok=options.per_token,
        norm_topk_prob=True,
        experts_implementation="eager",
    )
    block = Qwen3MoeSparseMoeBlock(config)
    weights = experts.experts
    with torch.no_grad():
        block.gate.weight.copy_(experts.router.weight)
        both = [torch.cat(list(pair)) for pair in zip(weights.gates, weights.ups, strict=True)]
        block.experts.gate_up_proj.copy_(torch.stack(both))
        block.experts.down_proj.copy_(torch.stack([*weights.downs]))

    def run(x_sbh: torch.Tensor, grad_sbh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block.zero_grad()
        x = x_sbh.clone().requires_grad_()
        y = block(x)
        y.backward(grad_sbh)
        assert x.grad is not None
        return y.detach(), x.grad

    return run


if __name__ == "__main__":
    sys.exit(main())
