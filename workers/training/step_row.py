"""The row of metrics of one step, by the names of the REST contract, and the validation losses that some rows have."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manta.workers.accounting.flops import step_flops
from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.data.batch_plan import BatchPlan
from manta.workers.data.batches import Batches, HeldOut
from manta.workers.engine import Engine
from manta.workers.liveness.expert_load import expert_load
from manta.workers.parallel.data.agreement import StepStatistics
from manta.workers.parallel.data.elastic_sums import of_own_leaves, shared_leaves, sum_of_halves
from manta.workers.training.metric_names import BALANCE_LOSS, EXPERT_LOAD, Z_LOSS


@dataclass(frozen=True)
class StepRows:
    """Constants that the rows of a job are computed from."""

    spec: JobSpec
    plan: BatchPlan
    peak_flops: float
    """Peak FLOP/s of the devices of all ranks together."""

    def row(self, step: int, statistics: StepStatistics, learning_rate: float, seconds: float) -> dict[str, Any]:
        """The row of step `step`, which took `seconds` without its validation. MFU: arXiv:2204.02311, appendix B."""
        plan, length = self.plan, self.spec.model.sequence_length
        more = {name: loss for name in (Z_LOSS, BALANCE_LOSS) if (loss := getattr(statistics, name)) is not None}
        if statistics.expert_tokens is not None:
            more[EXPERT_LOAD] = expert_load(statistics.expert_tokens)
        return {
            "step": step,
            "loss": statistics.loss,
            "grad_norm": statistics.grad_norm,
            "learning_rate": learning_rate,
            "tokens": plan.first_sample(step + 1) * length,
            "tokens_per_second": plan.size(step) * length / seconds,
            "step_seconds": seconds,
            **self._utilisation(plan.size(step), seconds),
            "memory_bytes": statistics.memory_bytes,
            **more,
        }

    def _utilisation(self, sequences: int, seconds: float) -> dict[str, float]:
        """Empty for a model whose FLOPs are unknown."""
        if not self.spec.model.is_counted:
            return {}
        flops, available = step_flops(self.spec, sequences), seconds * self.peak_flops
        return {
            "mfu_full": flops.model_full / available,
            "mfu_causal": flops.model_causal / available,
            "hfu_full": flops.hardware_full / available,
            "hfu_paper": flops.hardware_paper / available,
        }


def mean_part_seconds(comm: Comm, snapshot_seconds: float) -> dict[str, float]:
    """Breakdown of the step being measured: mean seconds over ranks for each part, including `snapshot_seconds`, for
    which the last snapshot held up this rank's training thread; communication along `context` and `expert` only if
    there is any. Ends the measurement; all ranks call it at the same step. Raises PeerLost."""
    seconds: dict[str, float] = dict(comm.step.parts.end().items())
    if comm.size("context") == 1:
        del seconds["context_communication"]
    if comm.size("expert") == 1:
        del seconds["dispatch"], seconds["combine"]
    seconds["snapshot"] = snapshot_seconds
    shared = torch.tensor(list(seconds.values()), dtype=torch.float64, device=comm.device)
    comm.all_reduce("world", shared)
    means = (shared / comm.size("world")).tolist()
    comm.confirm()
    return {f"{part}_seconds": mean for part, mean in zip(seconds, means, strict=True)}


def memory_in_use(device: torch.device) -> int:
    """Bytes of device memory at its peak on a GPU; of resident memory now on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Validation:
    """Measures the validation losses of one rank's engine together with all others."""

    def __init__(self, engine: Engine, batches: Batches, comm: Comm):
        self.engine, self.batches, self.comm = engine, batches, comm
        self._train = engine.spec.train

    def due(self, step: int) -> bool:
        """Whether validation losses are measured after committed step `step`: every few steps, and after the last."""
        every = self._train.validate_every
        return every > 0 and (step % every == 0 or step == self._train.steps)

    def losses(self) -> dict[str, float]:
        """The mean loss over the validation batches of each held-out text, in nats per token, by the name of its
        metric; the same on every rank. Raises PeerLost."""
        texts, (places, mine) = self.batches.held_out, self._loss_places()
        lengths = [1 + text.batches(self.engine.spec) * places for text in texts]
        together = torch.zeros(sum(lengths), dtype=torch.float64, device=self.comm.device)
        with self.comm.step.phase("validation"):
            for text, sums in zip(texts, together.split(lengths), strict=True):
                self._add(text, sums, places, mine)
            self.comm.all_reduce("world", together)
        sums_of_each = zip(texts, together.split(lengths), strict=True)
        losses = {text.metric: float(sum_of_halves(sums[1:]) / sums[0]) for text, sums in sums_of_each}
        self.comm.confirm()
        return losses

    def _add(self, text: HeldOut, sums: torch.Tensor, places: int, mine: range) -> None:
        """Add to `sums` what this rank knows of a text: its tokens, then the losses of each batch."""
        for index, losses in enumerate(sums[1:].split(places)):
            batch = self.batches.validation(text, index)
            losses_m, tokens = self.engine.evaluate(batch, self._train.global_batch_size)
            own = of_own_leaves(losses, mine, self.comm)
            own.copy_(losses_m if len(mine) == len(losses_m) else losses_m.sum())
            sums[0] += tokens

    def _loss_places(self) -> tuple[int, range]:
        """How many numbers make up the loss of a validation batch, and which of them, times the number of context
        ranks, this replica knows: one for every micro-batch and context rank if the result must not depend on the
        number of replicas, otherwise one for each context rank."""
        contexts = self.comm.size("context")
        if self._train.deterministic == "layout":
            return contexts, range(1)
        leaves, own = shared_leaves(self.engine.spec, self._train.global_batch_size, self.comm.index("data"))
        return leaves * contexts, own
