"""The programs of all ranks of a job: a real trainer for each, one after the other in this process, over recorded
groups."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from group_programs import Program
from recorded_groups import Recorder, labelled, recording

from manta.workers.checkpoint import checkpointer
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.comm.process_groups import ProcessGroups
from manta.workers.comm.shared_work import SharedWork
from manta.workers.config import JobSpec
from manta.workers.protocol.messages import Resume
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter

Programs = list[Program]
CPU = torch.device("cpu")
HOST = "127.0.0.1"
SECRET = "7" * 64


class _AllAlike(SharedWork):
    """As if every other rank said what this one says."""

    def __init__(self, rank: int, size: int):
        super().__init__(None, size)
        self._rank = rank

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._rank

    def together(
        self, part: Callable[[], Any], combine: Callable[[list[Any]], list[Any]], kinds: Any, progress: Any = None
    ) -> Any:
        """What comes out for this rank."""
        return combine([part()] * self._size)[self._rank]


def recorded_rank(
    spec: JobSpec,
    rank: int,
    steps: int,
    folder: Path | None = None,
    bad_agreements: Collection[int] = (),
    recorder: Recorder | None = None,
) -> Program:
    """What one rank of `spec` does from its start to its end after `steps` steps. `folder`: for snapshots and
    checkpoints, without which there are none; `bad_agreements`: see `Recorder`; `recorder`: another one."""
    grid = RankGrid(spec.layout)
    comm = Comm(grid, rank, CPU, backend="process_groups")
    recorder = recorder or Recorder(rank, grid.world_size, bad_agreements)
    places = (
        StatePaths() if folder is None else StatePaths("test", str(folder / "snapshots"), str(folder / "checkpoints"))
    )
    reporter = Reporter(lambda messages: None)
    # A save is waited for, so that no rank finds another one slow.
    patience = mock.patch.object(checkpointer, "PATIENCE_SECONDS", 60.0)
    comm._regroup = recorder
    # Nobody else comes, and of gloo, whose waits are looked after by turns, there is nothing.
    here = mock.patch.object(ProcessGroups, "_wait_for_all", lambda *_: None)
    with recording(recorder), here, mock.patch("manta.workers.comm.comm.Links"), patience:
        with mock.patch("manta.workers.comm.process_groups.GlooWaits", lambda _: None):
            comm.connect(dist.HashStore(), 1, HOST, SECRET)
        comm.shared_work = _AllAlike(rank, grid.world_size)
        if isinstance(comm._backend, ProcessGroups):
            comm._backend._open_channels()  # which on a CPU it has no need to
        labelled(comm, recorder)
        trainer = Trainer(spec, comm, reporter, 1e12, places)
        trainer.restore(Resume())
        trainer.train(steps)
        trainer.close()
        comm.close()
    reporter.close()
    return recorder.program


def recorded_job(spec: JobSpec, steps: int, folder: Path | None = None, **more: Any) -> list[Program]:
    """The programs of all ranks of `spec`, by rank."""
    return [recorded_rank(spec, rank, steps, folder, **more) for rank in range(spec.layout.world_size)]
