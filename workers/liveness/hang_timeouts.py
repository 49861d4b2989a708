"""How long a rank may stand still before its agent reports it: pure functions of what is known about the rank.

A false alarm kills a healthy rank, so every doubt lengthens the timeout: phases that are long by nature have their own
rules, a process that computes gets more time than one that stands still, and time in which the machine gave it no
processor does not count at all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from manta.workers.liveness.progress import Phase
from manta.workers.system.processes import ProcessState

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
