"""An agent's health check of its trainer: it notices when the trainer stands still, reports that once, and reports when
the trainer moves on.

It reads the shared record a few times a second; nothing is reported while all is well.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from manta.workers.liveness.hang_timeouts import STOPPED_SECONDS, Standstill, hang_timeout
from manta.workers.liveness.progress import DeviceRecord, ProgressReader, Record, progress_path
from manta.workers.protocol.reports import Position, ProcessUse, TrainerStatus
from manta.workers.snapshot.files import snapshot_files
from manta.workers.snapshot.snapshot_file import SLOTS
from manta.workers.system.processes import ProcessState, process_state

POLL_SECONDS = 0.25
COMMIT_POLL_SECONDS = 0.01
COMMIT_SECONDS = 60.0
DEVICE_SECONDS = 2.0
"""Seconds that an observation of a device stays valid: a process whose interpreter is blocked does not look any
more."""

ReportStatus = Callable[[TrainerStatus], None]
"""Takes the payload of a `stalled` report."""


class TrainerWatch:
    """Watches one trainer process through all its generations."""

    def __init__(self, pid: int, rank: int, folder: str | Path, compiles: bool, report: ReportStatus):
        """`folder`: the job's folder in shared memory; `compiles`: whether its model is compiled."""
        self.ranks = 1
        """Ranks of the generation that the process belongs to."""
        self._pid, self._path, self._compiles, self._report = pid, progress_path(folder, rank), compiles, report
        self._rank = rank
        self._reader: ProgressReader | None = None
        self._record: Record | None = None
        self._process: ProcessState | None = None
        self._still = Standstill(2 * POLL_SECONDS)
        self._reported_overdue = False

    def enter_generation(self, ranks: int) -> None:
        """The process continues in a generation of `ranks` ranks: the receiver of reports in that generation has not
        received any of the earlier ones."""
        self.ranks, self._reported_overdue = ranks, False

    async def run(self) -> None:
        """Look repeatedly until the process is gone; polling, since a process that stands still causes no event."""
        try:
            while self.poll():
                await asyncio.sleep(POLL_SECONDS)
        finally:
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    def poll(self) -> bool:
        """Look once, and report whether the process is overdue if that has changed; False if the process is gone."""
        self._process = process_state(self._pid)
        if self._process is None or self._process.letter in "ZX":
            return False
        self._record = self._read()
        heartbeat = self._record.heartbeat if self._record is not None else -1
        self._still.update(time.monotonic(), heartbeat, self._process)
        if self.overdue != self._reported_overdue:
            self._reported_overdue = self.overdue
            self._report(self.describe())
        return True

    def _read(self) -> Record | None:
        if self._reader is None:
            try:
                reader = ProgressReader(self._path)
            except (OSError, ValueError):
                return None  # it has not got that far, or there is no room for a record
            record = reader.read()
            if record is None or record.pid != self._pid:
                reader.close()  # of the previous process
                return None
            self._reader = reader
        return self._reader.read()

    async def next_commit(self) -> bool:
        """Wait for the process to commit a step; False if it does not within COMMIT_SECONDS."""
        before = self._record.commits if self._record is not None else 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMIT_SECONDS):
                while self._record is None or self._record.commits == before:
                    await asyncio.sleep(COMMIT_POLL_SECONDS)
                    self._record = self._read()
                return True
        return False

    @property
    def allowed(self) -> float:
        """Seconds that the process may stand still in its current place."""
        record, burning, device = self._record, self._still.burning, self._device
        if record is None:
            return hang_timeout("starting", (), self._compiles, burning, waiting=False)
        waits = record.waits_for is not None
        if device is not None and device.fresh and device.pending:
            # The host is ahead, and may well spin until its device is done: the device's progress counts.
            burning, waits = False, device.waits
        copied = self.snapshot_bytes() if record.phase == "snapshot" else 0
        return hang_timeout(record.phase, record.step_seconds, self._compiles, burning, waits, self.ranks, copied)

    def snapshot_bytes(self) -> int:
        """Size of one of the rank's snapshots; 0 if it has none."""
        sizes = [0]
        with contextlib.suppress(OSError):  # files disappear when a new layout creates its own
            own = (
                snapshot_file for snapshot_file in snapshot_files(self._path.parent) if snapshot_file.rank == self._rank
            )
            sizes += [each.path.stat().st_size // SLOTS for each in own if not each.is_backup]
        return max(sizes)

    @property
    def _device(self) -> DeviceRecord | None:
        record = self._record
        if record is None or record.device is None:
            return None
        return replace(record.device, fresh=time.monotonic() - record.looked_at < DEVICE_SECONDS)

    @property
    def overdue(self) -> bool:
        """Whether the process has stood still for longer than allowed."""
        if self._still.stopped_seconds >= STOPPED_SECONDS:
            return self._record is None or self._record.phase != "done"
        return self._still.seconds > self.allowed

    def describe(self) -> TrainerStatus:
        """The trainer's position and state."""
        return TrainerStatus(
            pid=self._pid,
            overdue=self.overdue,
            stopped=self._still.stopped_seconds >= STOPPED_SECONDS,
            standing_seconds=round(max(self._still.seconds, self._still.stopped_seconds), 2),
            burning=self._still.burning,
            record=Position.of(self._record, self._device) if self._record is not None else None,
            process=ProcessUse.of(self._process) if self._process is not None else None,
        )
