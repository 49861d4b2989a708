"""An agent's health check of its trainer: it notices when the trainer stands still, reports that once, and reports when
the trainer moves on. It reads the shared record a few times a second; nothing is reported while all is well.

How long a rank may stand still is a pure function of what is known about it. A false alarm kills a healthy rank, so
every doubt lengthens the timeout: phases that are long by nature have their own rules, a process that computes gets
more time than one that stands still, and time in which the machine gave it no processor does not count at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from manta.workers.liveness.progress import DeviceRecord, Phase, ProgressReader, Record, progress_path
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


MIN_SECONDS = 1.5
"""Seconds allowed for an ordinary phase, however quick the steps are."""
STEPS = 6
"""An ordinary phase may take this many times as long as the slowest ordinary step."""
BURNING_FACTOR = 10
"""Factor for a process that uses the processor."""
WAITING_FACTOR = 3
"""Factor for a rank that waits for another one, which is also watched by its own agent."""
STOPPED_SECONDS = 1.0
"""Seconds for a process that was stopped by a signal: it will not continue by itself, whatever its phase."""
LONG: Mapping[str, float] = {
    "starting": 60.0,
    "connecting": 60.0,
    "restoring": 300.0,
    "snapshot": 30.0,
    "checkpoint": 300.0,
    "compiling": 600.0,
    "preparing": 300.0,
    "resting": math.inf,
    "done": math.inf,
}
"""Seconds allowed for phases that are long by nature. Preparing data, also in another process, reports progress all the
time; building a model reports nothing, and allocating the memory of a large state takes minutes. Rest has no timeout of
its own: the process that ordered it watches over it."""
SNAPSHOT_BYTES_PER_SECOND = 200e6
"""Lower bound for copying a snapshot, with eight GPUs copying at the same time from memory that is not pinned."""
REST_BYTES_PER_SECOND = 1e9
"""Lower bounds for copying and for checksumming a snapshot before its rank rests: one core of a busy machine reaches 8
GB/s and 3 GB/s."""
SET_UP = frozenset({"connecting", "restoring"})
"""Phases in which ranks meet for the first time."""
SET_UP_SECONDS_A_RANK = 0.25
"""Added to those, and to a process's first step, for each rank but one: setting up a large gang's communicators takes
minutes, and some are created on first use."""
FIRST_STEP_SECONDS = 60.0
"""Seconds for each phase of a process's first step, in which everything happens for the first time."""
COMPILED = frozenset({"forward", "backward", "validation"})
"""Phases in which a compiled model may be compiled or recompiled."""


def hang_timeout(
    phase: Phase,
    step_seconds: Collection[float],
    compiles: bool,
    burning: bool,
    waiting: bool,
    ranks: int = 1,
    snapshot_bytes: int = 0,
) -> float:
    """Seconds that a rank of a gang of `ranks` may stand still in `phase`.

    `step_seconds`: durations of the process's last steps, empty before the first; `compiles`: the job's model is
    compiled; `burning`: the process uses the processor; `waiting`: it, or its device, waits for another rank;
    `snapshot_bytes`: size of one of its snapshots.
    """
    if compiles and phase in COMPILED and (burning or not step_seconds):
        return LONG["compiling"]
    set_up = SET_UP_SECONDS_A_RANK * (ranks - 1)
    if phase in LONG:
        copying = snapshot_bytes / SNAPSHOT_BYTES_PER_SECOND if phase == "snapshot" else 0.0
        return LONG[phase] + (set_up if phase in SET_UP else 0.0) + copying
    if step_seconds:
        allowed = max(MIN_SECONDS, STEPS * slowest_ordinary(step_seconds))
    else:
        allowed = FIRST_STEP_SECONDS + set_up
    if compiles and phase in COMPILED:
        allowed = max(allowed, FIRST_STEP_SECONDS)  # the compiler's helper processes use the processor, not this one
    return allowed * (BURNING_FACTOR if burning else WAITING_FACTOR if waiting else 1)


def slowest_ordinary(step_seconds: Collection[float]) -> float:
    """The longest of `step_seconds` (not empty), ignoring outliers, which are those above three medians."""
    bound = 3 * statistics.median(step_seconds)
    return max(seconds for seconds in step_seconds if seconds <= bound)


@dataclass
class Standstill:
    """How long a process has been standing still, look by look. Only time in which it could have moved counts."""

    longest_between: float
    """The most seconds that count between two looks: an observer that looks less often was held up, and so was the
    process."""
    seconds: float = 0.0
    """Counted seconds since the last change."""
    stopped_seconds: float = 0.0
    """The part of these in which the process was stopped by a signal."""
    _burned: float = 0.0
    _heartbeat: int | None = None
    _time: float | None = None
    _process: ProcessState | None = None

    @property
    def burning(self) -> bool:
        """Whether the process used the processor, or waited for a device, during most of the standstill."""
        return self._burned > 0.5 * self.seconds

    def update(self, now: float, heartbeat: int, process: ProcessState | None) -> None:
        """Record the state at `now`, in seconds of any clock. `process` is None if it cannot be inspected."""
        passed = min(now - self._time, self.longest_between) if self._time is not None else 0.0
        stopped = process is not None and process.stopped and heartbeat == self._heartbeat
        self.stopped_seconds = self.stopped_seconds + passed if stopped else 0.0
        if heartbeat != self._heartbeat:
            self.seconds = self._burned = 0.0
        elif process is not None and self._process is not None:
            able = passed - _starved(passed, self._process, process)
            self.seconds += able
            busy = passed if process.letter == "D" else process.cpu_seconds - self._process.cpu_seconds
            self._burned += min(max(0.0, busy), able)
        self._heartbeat, self._time, self._process = heartbeat, now, process


def _starved(passed: float, before: ProcessState, now: ProcessState) -> float:
    """How many of `passed` seconds the process was kept from running, by a lack of processors or by a debugger."""
    if now.letter == "t":
        return passed  # a debugger is attached
    delayed = now.delay_seconds - before.delay_seconds
    # The kernel accounts for a delay only when it is over.
    if now.letter == "R" and now.main_cpu_seconds - before.main_cpu_seconds < 0.2 * passed:
        return passed
    return min(passed, max(0.0, delayed))
