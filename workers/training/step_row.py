"""The row of metrics of one step, by the names of the REST contract."""

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
from manta.workers.parallel.data.agreement import StepStatistics


@dataclass(frozen=True)
class StepRows:
    """Constants that the rows of a job are computed from."""

    spec: JobSpec
    plan: BatchPlan
    peak_flops: float
    """Peak FLOP/s of the devices of all ranks together."""

    def row(self, step: int, statistics: StepStatistics, learning_rate: float, seconds: float) -> dict[str, Any]:
        """The row of step `step`, which took `seconds`. MFU: arXiv:2204.02311, appendix B."""
        plan, length = self.plan, self.spec.model.sequence_length
        more = {} if statistics.z_loss is None else {"z_loss": statistics.z_loss}
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
    which the last snapshot held up this rank's training thread. Ends the measurement; all ranks call it at the same
    step. Raises PeerLost."""
    seconds: dict[str, float] = dict(comm.step.parts.end().items())
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
