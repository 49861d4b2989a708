"""How long a rank may stand still before its agent reports that: pure functions of what is known about it.

A false alarm kills a healthy rank, so every doubt lengthens the wait: phases that are long by nature have rules of
their own, a process that computes gets more time than one that stands still, and time in which the machine gave it no
processor does not count at all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from workers.liveness.process_state import ProcessState
from workers.liveness.progress import Phase

LEAST_SECONDS = 1.5
"""Of an ordinary phase, however quick the steps are."""
STEPS = 6
"""An ordinary phase may take as long as so many of the slowest ordinary steps."""
BURNING_FACTOR = 10
"""A process that uses the processor gets so many times that."""
WAITING_FACTOR = 3
"""So does a rank that waits for another one, whose own agent looks too."""
STOPPED_SECONDS = 1.0
"""A process that a signal stopped will not move by itself, whatever its phase."""
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
"""Seconds of phases that are long by nature. Data that is prepared, also by another process, says so all the time; a
model is built without a word, and the memory of a large state takes minutes to be had. Rest has no end of its own:
the process that ordered it watches over it."""
SNAPSHOT_BYTES_A_SECOND = 200e6
"""At least so many of a snapshot are copied, also by eight GPUs at the same time from memory that is not pinned."""
KEPT_BYTES_A_SECOND = 1e9
"""At least so many of a snapshot are copied and summed before its rank rests: 8 GB/s and 3 GB/s are what one core of a
busy machine does."""
SET_UP = frozenset({"connecting", "restoring"})
"""Phases in which ranks meet for the first time."""
SET_UP_SECONDS_A_RANK = 0.25
"""Of those, and of a process's first step, for each rank but one: a large gang's communicators take minutes to set up,
and some are made when they are used first."""
FIRST_STEP_SECONDS = 60.0
"""Of each phase of a process's first step, in which everything is done for the first time."""
COMPILED = frozenset({"forward", "backward", "validation"})
"""Phases in which a compiled model may be compiled, also again."""


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

    `step_seconds`: durations of the process's last steps, none before its first; `compiles`: the job's model is
    compiled; `burning`: the process uses the processor; `waiting`: it, or its device, waits for another rank;
    `snapshot_bytes`: of one of its snapshots.
    """
    if compiles and phase in COMPILED and (burning or not step_seconds):
        return LONG["compiling"]
    set_up = SET_UP_SECONDS_A_RANK * (ranks - 1)
    if phase in LONG:
        copying = snapshot_bytes / SNAPSHOT_BYTES_A_SECOND if phase == "snapshot" else 0.0
        return LONG[phase] + (set_up if phase in SET_UP else 0.0) + copying
    if step_seconds:
        allowed = max(LEAST_SECONDS, STEPS * slowest_ordinary(step_seconds))
    else:
        allowed = FIRST_STEP_SECONDS + set_up
    if compiles and phase in COMPILED:
        allowed = max(allowed, FIRST_STEP_SECONDS)  # the compiler's helpers burn, not the process
    return allowed * (BURNING_FACTOR if burning else WAITING_FACTOR if waiting else 1)


def slowest_ordinary(step_seconds: Collection[float]) -> float:
    """The longest of `step_seconds` (not empty) that is no outlier, which are those above three medians."""
    bound = 3 * statistics.median(step_seconds)
    return max(seconds for seconds in step_seconds if seconds <= bound)


@dataclass
class Standstill:
    """How long a process has been standing still, look by look. Only time counts in which it could have moved."""

    longest_between: float
    """Seconds that count at most between two looks: who looks less often was held up itself, and so was the process."""
    seconds: float = 0.0
    """Time that counts since the last change."""
    stopped_seconds: float = 0.0
    """Of that, the time in which a signal had stopped the process."""
    _burned: float = 0.0
    _heartbeat: int | None = None
    _time: float | None = None
    _process: ProcessState | None = None

    @property
    def burning(self) -> bool:
        """Whether the process used the processor, or waited for a device, most of the time that it stands still."""
        return self._burned > 0.5 * self.seconds

    def look(self, now: float, heartbeat: int, process: ProcessState | None) -> None:
        """Note how things are at `now`, in seconds of any clock. `process` is None where it cannot be looked at."""
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
    """In how many of `passed` seconds the process was kept from running: for want of a processor, or by a debugger."""
    if now.letter == "t":
        return passed  # a debugger is attached
    delayed = now.delay_seconds - before.delay_seconds
    # The kernel books a delay only when it is over.
    if now.letter == "R" and now.main_cpu_seconds - before.main_cpu_seconds < 0.2 * passed:
        return passed
    return min(passed, max(0.0, delayed))
