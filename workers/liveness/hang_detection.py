"""An agent's health check of its trainer: notices that it stands still, reports so once, and when it moves on.

It reads the shared record a few times a second; nothing is reported while all is well.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from workers.liveness.hang_timeouts import STOPPED_SECONDS, Standstill, hang_timeout
from workers.liveness.process_state import ProcessState, process_state
from workers.liveness.progress import DeviceRecord, ProgressReader, Record, progress_path
from workers.liveness.trainer_status import Position, ProcessUse, TrainerStatus
from workers.snapshot.files import snapshot_files
from workers.snapshot.snapshot_file import SLOTS

LOOK_SECONDS = 0.25
COMMIT_LOOK_SECONDS = 0.01
COMMIT_SECONDS = 60.0
DEVICE_SECONDS = 2.0
"""What was seen of a device is believed so long: a process whose interpreter is held up looks no more."""

ReportStatus = Callable[[TrainerStatus], None]
"""Takes the payload of a `stalled` report."""


class TrainerWatch:
    """Watches one trainer process, through all generations that it lives through."""

    def __init__(self, pid: int, rank: int, folder: str | Path, compiles: bool, report: ReportStatus):
        """`folder`: the job's in shared memory; `compiles`: whether its model is compiled."""
        self.ranks = 1
        """Of the generation that it belongs to."""
        self._pid, self._path, self._compiles, self._report = pid, progress_path(folder, rank), compiles, report
        self._rank = rank
        self._reader: ProgressReader | None = None
        self._record: Record | None = None
        self._process: ProcessState | None = None
        self._still = Standstill(2 * LOOK_SECONDS)
        self._reported_overdue = False

    def enter_generation(self, ranks: int) -> None:
        """The process continues in a generation of so many ranks: who watches that has heard nothing that was reported
        before."""
        self.ranks, self._reported_overdue = ranks, False

    async def run(self) -> None:
        """Look again and again until the process is gone: a process that stands still causes no event."""
        try:
            while self.look():
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    def look(self) -> bool:
        """Look once, and report whether it is overdue when that has changed; False when the process is gone."""
        self._process = process_state(self._pid)
        if self._process is None or self._process.letter in "ZX":
            return False
        self._record = self._read()
        heartbeat = self._record.heartbeat if self._record is not None else -1
        self._still.look(time.monotonic(), heartbeat, self._process)
        if self.overdue != self._reported_overdue:
            self._reported_overdue = self.overdue
            self._report(self.describe())
        return True

    def _read(self) -> Record | None:
        if self._reader is None:
            try:
                reader = ProgressReader(self._path)
            except (OSError, ValueError):
                return None  # it has not come so far, or has no room for it
            record = reader.read()
            if record is None or record.pid != self._pid:
                reader.close()  # of the process before this one
                return None
            self._reader = reader
        return self._reader.read()

    async def next_commit(self) -> bool:
        """Wait for the process to commit a step; False when it does not within COMMIT_SECONDS."""
        before = self._record.commits if self._record is not None else 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMIT_SECONDS):
                while self._record is None or self._record.commits == before:
                    await asyncio.sleep(COMMIT_LOOK_SECONDS)
                    self._record = self._read()
                return True
        return False

    @property
    def allowed(self) -> float:
        """Seconds that the process may stand still where it is now."""
        record, burning, device = self._record, self._still.burning, self._device
        if record is None:
            return hang_timeout("starting", (), self._compiles, burning, waiting=False)
        waits = record.waits_for is not None
        if device is not None and device.fresh and device.pending:
            # The host is ahead, and may well spin until its device is done: what the device does counts.
            burning, waits = False, device.waits
        copied = self.snapshot_bytes() if record.phase == "snapshot" else 0
        return hang_timeout(record.phase, record.step_seconds, self._compiles, burning, waits, self.ranks, copied)

    def snapshot_bytes(self) -> int:
        """Of one of the rank's snapshots; 0 where it has none."""
        sizes = [0]
        with contextlib.suppress(OSError):  # files go when a new layout has its own
            own = (each for each in snapshot_files(self._path.parent) if each.rank == self._rank)
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
        """Whether the process has stood still for longer than it may."""
        if self._still.stopped_seconds >= STOPPED_SECONDS:
            return self._record is None or self._record.phase != "done"
        return self._still.seconds > self.allowed

    def describe(self) -> TrainerStatus:
        """Where the trainer stands."""
        return TrainerStatus(
            pid=self._pid,
            overdue=self.overdue,
            stopped=self._still.stopped_seconds >= STOPPED_SECONDS,
            standing_seconds=round(max(self._still.seconds, self._still.stopped_seconds), 2),
            burning=self._still.burning,
            record=Position.of(self._record, self._device) if self._record is not None else None,
            process=ProcessUse.of(self._process) if self._process is not None else None,
        )
