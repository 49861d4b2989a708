"""Program for ranks: a job's plain model in torch's own pipelining, as an oracle."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from plain_gpt import PlainGPT, PlainStage
from rank_processes import join_default_group
from rank_programs import Weights, default_dtype

from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.spec.reading import parse_job_spec


def torch_pipeline(
    comm: Comm, port: int, kind: str, jobs: list[dict[str, Any]], weights: list[Weights], windows: list[torch.Tensor]
) -> list[tuple[float, Weights]]:
    """For each job: its plain model run by torch.distributed.pipelining in fp64 over the ranks of the pipeline: (sum of
    the losses, gradients of that sum), this rank's parts of both."""
    join_default_group(comm, port)
    with default_dtype(torch.float64):
        return [
            _torch_pipeline(comm, kind, parse_job_spec(document), start, tokens)
            for document, start, tokens in zip(jobs, weights, windows, strict=True)
        ]


def _torch_pipeline(
    comm: Comm, kind: str, spec: JobSpec, weights: Weights, windows: torch.Tensor
) -> tuple[float, Weights]:
    from torch.distributed import pipelining  # two seconds, which the other programs need not wait

    rank, ranks, chunks = comm.index("pipeline"), comm.size("pipeline"), spec.layout.virtual_stages
    numbers = [chunk * ranks + rank for chunk in range(chunks)]
    if kind == "ZBVZeroBubble":
        numbers[1] = 2 * ranks - 1 - rank
    count, layers = ranks * chunks, spec.model.layers
    whole = PlainGPT(spec).load(weights)
    stages = [
        pipelining.PipelineStage(
            PlainStage(whole, range(number * layers // count, (number + 1) * layers // count)),
            number,
            count,
            torch.device("cpu"),
        )
        for number in numbers
    ]

    def sum_of_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    # Scaling would divide the gradients of all micro-batches so far, once a step.
    schedule = pipelining.schedules.get_schedule_class(kind)(
        stages if chunks > 1 else stages[0], spec.micro_batches, loss_fn=sum_of_losses, scale_grads=False
    )
    losses: list[torch.Tensor] = []
    inputs = [windows[:, :-1]] if 0 in numbers else []
    if count - 1 in numbers:
        schedule.step(*inputs, target=windows[:, 1:], losses=losses, return_outputs=False)
    else:
        schedule.step(*inputs, return_outputs=False)
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    return sum(loss.item() for loss in losses), gradients
