"""What the training thread is doing right now, in a small shared mapping that its agent reads.

Writing costs next to nothing (a store or two), and reading needs nothing of the writer, so the record can be read
while the trainer is stopped, or while something holds its interpreter's lock. Every field that changes often is one
aligned 64-bit word, which is written as a whole. Words that belong together are guarded by a sequence number that is
odd while they are written; a reader looks until two looks in a row are equal and even, and otherwise says that the
record is torn. Pure Python without torch: agents import it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workers.paths import rank_stem

Phase = Literal[
    "starting",
    "connecting",
    "restoring",
    "data",
    "forward",
    "backward",
    "reduction",
    "agreement",
    "optimizer",
    "snapshot",
    "checkpoint",
    "validation",
    "resting",
    "compiling",
    "preparing",
    "done",
]
PHASES: tuple[Phase, ...] = Phase.__args__  # type: ignore[attr-defined]
COUNTED = ("tensor", "pipeline", "data", "embedding", "world", "sent", "received")
"""What is counted: collectives entered along each axis, and messages of the pipeline."""
CONNECTING_CHANNEL = 255
"""In place of an axis's number: the peer is awaited while the generation's links are made."""
RECENT = 32
"""Steps whose times are kept."""

_MAGIC = 0x4D414E5450524F47  # "MANTPROG"
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
_PHASE_BITS, _MICRO_BATCH_BITS, _STEP_BITS = 8, 20, 36
_PEER_BITS, _CHANNEL_BITS, _SENDING_BITS = 32, 8, 1
_LOOKS = 64


class _Position(ctypes.Structure):
    """Where in the job the rank is: one word, written as a whole."""

    _fields_ = (
        ("phase", ctypes.c_uint64, _PHASE_BITS),
        ("micro_batch_plus_1", ctypes.c_uint64, _MICRO_BATCH_BITS),
        ("step", ctypes.c_uint64, _STEP_BITS),
    )


class _Waiting(ctypes.Structure):
    """For whom the rank waits, and why: one word, written as a whole; all 0 while it does not wait."""

    _fields_ = (
        ("peer_plus_1", ctypes.c_uint64, _PEER_BITS),
        ("channel", ctypes.c_uint64, _CHANNEL_BITS),
        ("sending", ctypes.c_uint64, _SENDING_BITS),
    )


class _StepTimes(ctypes.Structure):
    """Nanoseconds of one step: all of it, and without the time spent waiting for others."""

    _fields_ = (("all", ctypes.c_int64), ("own", ctypes.c_int64))


class _Layout(ctypes.Structure):
    """The record: the reader takes a copy as this, the writer stores single words of it."""

    _fields_ = (
        ("magic", ctypes.c_int64),
        ("sequence", ctypes.c_int64),
        ("pid", ctypes.c_int64),
        ("generation", ctypes.c_int64),
        ("position", _Position),
        ("changed_at", ctypes.c_int64),
        ("waiting", _Waiting),
        ("moves", ctypes.c_int64),
        ("committed", ctypes.c_int64),
        ("committed_at", ctypes.c_int64),
        ("commits", ctypes.c_int64),
        ("counts", ctypes.c_int64 * len(COUNTED)),
        ("step_times", _StepTimes * RECENT),
    )


RECORD_BYTES = ctypes.sizeof(_Layout)


def _word(field: str) -> int:
    """Number of the word in which `field` begins. The writer stores items of a memoryview: attributes of a Structure
    take up to half as long again."""
    return int(getattr(_Layout, field).offset) // 8


_MAGIC_AT, _SEQUENCE, _PID, _GENERATION = _word("magic"), _word("sequence"), _word("pid"), _word("generation")
_POSITION, _CHANGED_AT, _WAITING, _MOVES = _word("position"), _word("changed_at"), _word("waiting"), _word("moves")
_COMMITTED, _COMMITTED_AT, _COMMITS = _word("committed"), _word("committed_at"), _word("commits")
_COUNTS, _STEP_TIMES = _word("counts"), _word("step_times")


def progress_path(folder: str | Path, rank: int) -> Path:
    """The file of `rank`'s record in the job's folder in shared memory."""
    return Path(folder) / f"{rank_stem(rank)}.progress"


class Progress:
    """The writer's end. One thread writes. Without a file the record is private memory, which nobody reads."""

    __slots__ = ("_began", "_count_at", "_idle_before", "_step_bits", "_words", "idle_seconds", "memory")

    def __init__(self, memory: mmap.mmap | bytearray | None = None):
        self.memory = memory if memory is not None else bytearray(RECORD_BYTES)
        self._words = memoryview(self.memory).cast("q")
        self._count_at = {name: _COUNTS + number for number, name in enumerate(COUNTED)}
        self._step_bits, self._began = 0, time.monotonic_ns()
        self.idle_seconds = self._idle_before = 0.0
        """Time spent waiting for other ranks without anything to move, where the backend tells; not in the record."""
        self._words[_PID] = os.getpid()
        self.at("starting")
        self._words[_MAGIC_AT] = _MAGIC

    @classmethod
    def shared(cls, folder: str | Path, rank: int) -> Progress:
        """A record in a new file of `rank`: a process that had the place before keeps writing into the old one.

        Where shared memory has no room for it the record is private: training matters more than being watched.
        """
        path = progress_path(folder, rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh = path.with_name(f"{path.name}.{os.getpid()}")
            descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RECORD_BYTES)
                memory = mmap.mmap(descriptor, RECORD_BYTES)
            except OSError:
                fresh.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except OSError:
            return cls()
        progress = cls(memory)
        fresh.rename(path)
        return progress

    def belongs_to(self, generation: int) -> None:
        """From now on this rank is one of `generation`. What it enters is counted from there on: by that the ranks of a
        generation are compared, and the processes of some may have lived through others before."""
        words = self._words
        if words[_GENERATION] == generation:
            return
        words[_SEQUENCE] += 1
        words[_GENERATION] = generation
        for at in self._count_at.values():
            words[_MOVES] += words[at]  # so that the heartbeat does not fall
            words[at] = 0
        words[_SEQUENCE] += 1

    @property
    def step(self) -> int:
        """Step that is computed."""
        return self._step_bits >> _PHASE_BITS + _MICRO_BATCH_BITS

    def begin_step(self, step: int) -> None:
        """Step number `step` begins."""
        self._began, self._idle_before = time.monotonic_ns(), self.idle_seconds
        self._step_bits = step << _PHASE_BITS + _MICRO_BATCH_BITS
        self.at("data")

    def at(self, phase: Phase, micro_batch: int = -1) -> None:
        """The rank is in `phase` now, at `micro_batch` where that means something."""
        words = self._words
        words[_POSITION] = self._step_bits | (micro_batch + 1) << _PHASE_BITS | _PHASE_NUMBERS[phase]
        words[_CHANGED_AT] = time.monotonic_ns()
        words[_MOVES] += 1

    def entered(self, what: str) -> None:
        """One more of `what`, a name of COUNTED."""
        self._words[self._count_at[what]] += 1

    def waits_for(self, peer: int, channel: int, sending: bool) -> None:
        """Nothing can go on before `peer` sends on `channel` (the axis's number), or with `sending` before it takes
        what is sent."""
        self._words[_WAITING] = 1 + peer | channel << _PEER_BITS | sending << _PEER_BITS + _CHANNEL_BITS

    def moved(self, waited: float = 0.0) -> None:
        """The wait of `waited` seconds is over, or bytes have moved."""
        self.idle_seconds += waited
        words = self._words
        words[_WAITING] = 0
        words[_MOVES] += 1

    def own_seconds(self) -> float:
        """Time of the step so far that was not spent waiting for others."""
        return (time.monotonic_ns() - self._began) / 1e9 - (self.idle_seconds - self._idle_before)

    def commit(self, step: int) -> None:
        """Step number `step` is committed."""
        words, now = self._words, time.monotonic_ns()
        own = now - self._began - int((self.idle_seconds - self._idle_before) * 1e9)
        slot = _STEP_TIMES + 2 * (words[_COMMITS] % RECENT)
        words[_SEQUENCE] += 1
        words[slot], words[slot + 1] = now - self._began, own
        words[_COMMITTED], words[_COMMITTED_AT] = step, now
        words[_COMMITS] += 1
        words[_SEQUENCE] += 1


@dataclass(frozen=True)
class Record:
    """A record as it was read."""

    pid: int
    """Process that wrote it."""
    generation: int
    """Generation that the process is in; 0 before the first."""
    phase: Phase
    """What it does."""
    step: int
    """Step that it computes."""
    micro_batch: int | None
    """Micro-batch of the action of the pipeline that it runs."""
    waits_for: int | None
    """Rank without which it cannot go on; None while it computes, or where the backend does not tell."""
    channel: int | None
    """Number of the axis along which it waits, CONNECTING_CHANNEL while links are made."""
    sending: bool
    """Whether it waits for its message to be taken, instead of for one to come."""
    counts: dict[str, int]
    """Collectives entered and messages started in this generation, by the names of COUNTED."""
    committed: int
    """Last step that this process committed; 0: none yet."""
    commits: int
    """Steps that this process has committed."""
    changed_at: float
    """CLOCK_MONOTONIC of the last change of phase, in seconds."""
    committed_at: float
    """CLOCK_MONOTONIC of the last commit, in seconds."""
    step_seconds: tuple[float, ...]
    """Durations of the last steps, at most RECENT, in no order."""
    own_seconds: tuple[float, ...]
    """Of the same steps, without the time spent waiting for others."""
    heartbeat: int
    """Grows with every change."""
    torn: bool
    """Whether the process was in the middle of a change during every look: fields may not fit each other."""

    def to_json(self) -> dict[str, Any]:
        """For events and for the control plane: without the single steps' times."""
        return {
            "pid": self.pid,
            "generation": self.generation,
            "phase": self.phase,
            "step": self.step,
            "micro_batch": self.micro_batch,
            "waits_for": self.waits_for,
            "channel": self.channel,
            "sending": self.sending,
            "counts": self.counts,
            "committed": self.committed,
            "commits": self.commits,
            "heartbeat": self.heartbeat,
            "torn": self.torn,
        }


class ProgressReader:
    """The agent's end: the mapping of one process's record, which outlives its file's name."""

    def __init__(self, path: Path):
        """Raises FileNotFoundError while there is none, ValueError for a file that is none."""
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), RECORD_BYTES, prot=mmap.PROT_READ)

    def close(self) -> None:
        """Let go of the mapping."""
        self._memory.close()

    def read(self) -> Record | None:
        """The record as it is now; None before its writer has begun."""
        before = self._memory[:]
        for _ in range(_LOOKS):
            now = self._memory[:]
            if now == before and not _Layout.from_buffer_copy(now).sequence % 2:
                return _parse(now, torn=False)
            before = now
        return _parse(before, torn=True)


def _parse(memory: bytes, torn: bool) -> Record | None:
    layout = _Layout.from_buffer_copy(memory)
    if layout.magic != _MAGIC:
        return None
    position, waiting = layout.position, layout.waiting
    waits = waiting.peer_plus_1 > 0
    kept = layout.step_times[: min(layout.commits, RECENT)]
    counts = dict(zip(COUNTED, layout.counts, strict=True))
    return Record(
        pid=layout.pid,
        generation=layout.generation,
        phase=PHASES[position.phase],
        step=position.step,
        micro_batch=position.micro_batch_plus_1 - 1 if position.micro_batch_plus_1 else None,
        waits_for=waiting.peer_plus_1 - 1 if waits else None,
        channel=waiting.channel if waits else None,
        sending=bool(waiting.sending),
        counts=counts,
        committed=layout.committed,
        commits=layout.commits,
        changed_at=layout.changed_at / 1e9,
        committed_at=layout.committed_at / 1e9,
        step_seconds=tuple(times.all / 1e9 for times in kept),
        own_seconds=tuple(times.own / 1e9 for times in kept),
        heartbeat=layout.moves + layout.sequence // 2 + sum(counts.values()),
        torn=torn,
    )
