"""Trains jobs whose ranks are processes of this machine, without Ray and without the service."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

from manta.workers.calibration import local_ranks
from manta.workers.calibration.local_ranks import SECONDS, RanksFailed
from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.protocol.messages import Resume
from manta.workers.trainer import Trainer
from manta.workers.training.reporter import Reporter

__all__ = ["LocalRanks", "RankResult", "RanksFailed"]


@dataclass(frozen=True)
class RankResult:
    """What one rank knows after its last step."""

    losses: list[float]
    grad_norms: list[float]
    step_seconds: list[float]
    state: str
    """Digest of its parameters and moments."""


class LocalRanks(local_ranks.LocalRanks):
    """Ranks that are processes of this machine, which can also train."""

    def train(self, document: dict[str, Any], seconds: float = SECONDS) -> list[RankResult]:
        """Train a job to its end: results by rank. Raises RanksFailed when that takes more than `seconds`."""
        return self.run(_train, document, seconds=seconds)


def _train(comm: Comm, spec: JobSpec) -> RankResult:
    trainer = Trainer(spec, comm, Reporter(lambda _: None), 1e12)
    trainer.restore(Resume())
    losses, norms, seconds = [], [], []
    while trainer.step < spec.train.steps:
        began = time.perf_counter()
        statistics = trainer.train_step()
        seconds.append(time.perf_counter() - began)
        losses.append(statistics.loss)
        norms.append(statistics.grad_norm)
    comm.barrier()
    state = hashlib.blake2b(digest_size=16)
    for tensor in trainer.engine.state():
        state.update(tensor.numpy().data)
    return RankResult(losses, norms, seconds, state.hexdigest())
