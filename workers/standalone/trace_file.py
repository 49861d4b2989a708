"""Traces of the engine alone: with `python -m workers.run CONFIG.yaml --trace FILE` all ranks record some steps, and
rank 0 writes them."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from workers.errors import MantaError
from workers.protocol.json_codec import from_json
from workers.protocol.messages import TraceOrder
from workers.step_traces.assembly import StepTrace, assembled
from workers.step_traces.document import analysis_document, rank_documents
from workers.step_traces.perfetto import perfetto
from workers.timing.recording import PackedRecording, Recording
from workers.trainer import Trainer
from workers.training.tracing import Make

NUMBER = 1
SUFFIXES = (".json", ".pftrace")
"""Suffixes of our own format, and of Perfetto's."""


class TraceFile:
    """The file of one trace."""

    def __init__(self, path: Path, steps: int = 1, first_step: int = 0):
        """`steps`: how many to record, not before `first_step`, or the job's second step. Raises MantaError."""
        if steps < 1:
            raise MantaError(f"--trace-steps must be at least 1, not {steps}")
        if path.suffix not in SUFFIXES:
            raise MantaError(f"--trace: {path} must end with {' or '.join(SUFFIXES)}")
        if path.is_dir() or not path.parent.is_dir():
            problem = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
            raise MantaError(f"--trace: {path} {problem}")
        self._path, self._steps, self._first_step = path, steps, first_step
        self._recording: Recording | None = None

    def begin(self, trainer: Trainer, last: int) -> None:
        """Have `trainer`, of one of the ranks, record steps, the last one being `last`. Raises MantaError if no step is
        left to record."""
        if max(self._first_step, trainer.step + 2) > last:  # ranks agree on it one step earlier
            raise self._nothing_recorded()
        trainer.tracing.take = self._take
        if trainer.comm.rank == 0:
            order = TraceOrder(NUMBER, trainer.comm.generation, self._steps, self._first_step)
            trainer.comm.trace_orders.ask(order)

    def _nothing_recorded(self) -> MantaError:
        return MantaError(f"no step is traced: from step {max(2, self._first_step)} on there is none to record")

    def _take(self, _number: int, make: Make) -> None:
        self._recording = make()

    def end(self, trainer: Trainer, store: dist.Store | None) -> None:
        """Write the file, on rank 0, after the last step. `store`: where the ranks have met. Raises MantaError if no
        step was recorded, OSError."""
        if self._recording is None:
            raise self._nothing_recorded()
        recordings = {trainer.comm.rank: self._recording}
        if store is not None:
            recordings = self._exchanged(trainer.comm.rank, trainer.comm.size("world"), store)
        if trainer.comm.rank == 0:
            trace = assembled(recordings, trainer.comm.grid)
            self._path.write_bytes(perfetto(trace) if self._path.suffix == ".pftrace" else _as_json(trace))
            for problem in sorted({each.problem for each in recordings.values()} - {""}):
                print(f"the trace in {self._path} is not whole: {problem}", file=sys.stderr)

    def _exchanged(self, rank: int, world: int, store: dist.Store) -> dict[int, Recording]:
        """All ranks' recordings, on rank 0 only."""
        assert self._recording is not None
        store.set(f"manta/trace/{rank}", json.dumps(asdict(self._recording.pack())))
        if rank != 0:
            return {}
        texts = {each: store.get(f"manta/trace/{each}").decode() for each in range(world)}
        return {each: from_json(PackedRecording, json.loads(text)).unpack() for each, text in texts.items()}


def _as_json(trace: StepTrace) -> bytes:
    nodes = {each.rank: platform.node() for each in trace.ranks}
    return json.dumps({**analysis_document(trace), "ranks": rank_documents(trace, nodes)}).encode()
