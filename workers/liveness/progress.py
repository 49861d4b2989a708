"""What the training thread is doing right now, in a small shared mapping that its agent reads.

Writing costs almost nothing (one or two stores), and reading needs nothing from the writer, so the record can be read
while the trainer is stopped, or while something holds its interpreter's lock. Every field that changes often is one
aligned 64-bit word, which is written as a whole. Words that belong together are guarded by a sequence number that is
odd while they are being written; a reader repeats until two reads in a row are equal and even, and otherwise reports
the record as torn. New fields are appended, so that a reader of another release finds the others in the same place.
Pure Python without torch, since agents import it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from manta.workers.paths import rank_stem
from manta.workers.system.regular_files import make_folder, open_regular, put

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
PHASES: tuple[Phase, ...] = get_args(Phase)
_COUNTED_FIRST = ("tensor", "pipeline", "data", "embedding", "world", "sent", "received")
_COUNTED_LATER = ("context", "holders", "expert", "expert_holders")
"""Counted at the end of the record, where readers of other releases find nothing else."""
COUNTED = (*_COUNTED_FIRST, *_COUNTED_LATER)
"""What is counted: collectives entered along each axis, and messages of the pipeline."""
CONNECTING_CHANNEL = 255
"""Used in place of an axis's number: the peer is awaited while the generation's links are made."""
RECENT = 32
"""Number of steps whose times are kept."""
NOBODY = -1
"""Used in place of a peer: it is not known that a single peer is awaited."""

MAGIC = 0x4D414E5450524F47  # "MANTPROG"
PHASE_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
PHASE_BITS, MICRO_BATCH_BITS, STEP_BITS = 8, 20, 36
PEER_BITS, CHANNEL_BITS, SENDING_BITS = 32, 8, 1


class _Position(ctypes.Structure):
    """The rank's position in the job: one word, written as a whole."""

    _fields_ = (
        ("phase", ctypes.c_uint64, PHASE_BITS),
        ("micro_batch_plus_1", ctypes.c_uint64, MICRO_BATCH_BITS),
        ("step", ctypes.c_uint64, STEP_BITS),
    )


class _Waiting(ctypes.Structure):
    """Which rank is waited for, and why: one word, written as a whole; all 0 when there is no wait."""

    _fields_ = (
        ("peer_plus_1", ctypes.c_uint64, PEER_BITS),
        ("channel", ctypes.c_uint64, CHANNEL_BITS),
        ("sending", ctypes.c_uint64, SENDING_BITS),
    )


class DeviceWait(ctypes.Structure):
    """What the device waits for: one word, written as a whole; all 0 when there is no wait."""

    _fields_ = (
        ("peer_plus_1", ctypes.c_uint64, PEER_BITS),
        ("channel", ctypes.c_uint64, CHANNEL_BITS),
        ("sending", ctypes.c_uint64, SENDING_BITS),
        ("waits", ctypes.c_uint64, 1),
    )


class Device(ctypes.Structure):
    """How far the device has got; `looked_at` is 0 if it is not followed."""

    _fields_ = (
        ("looked_at", ctypes.c_int64),
        ("moves", ctypes.c_int64),
        ("pending", ctypes.c_int64),
        ("position", _Position),
        ("waiting", DeviceWait),
        ("number", ctypes.c_int64),
        ("counts", ctypes.c_int64 * len(_COUNTED_FIRST)),
    )


class _StepTimes(ctypes.Structure):
    """Nanoseconds of one step: in total, and without the time spent waiting for others."""

    _fields_ = (("all", ctypes.c_int64), ("own", ctypes.c_int64))


class Layout(ctypes.Structure):
    """The record: the reader interprets a copy as this structure, the writer stores single words of it."""

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
        ("counts", ctypes.c_int64 * len(_COUNTED_FIRST)),
        ("step_times", _StepTimes * RECENT),
        ("device", Device),
        ("later_counts", ctypes.c_int64 * len(_COUNTED_LATER)),
        ("device_later_counts", ctypes.c_int64 * len(_COUNTED_LATER)),
    )


RECORD_BYTES = ctypes.sizeof(Layout)
_FEWEST_BYTES = int(Layout.later_counts.offset)
"""Length of the records of releases that do not count the later ones."""


def _word(field: str) -> int:
    """Index of the word in which `field` begins. The writer assigns items of a memoryview, since assigning attributes
    of a Structure takes up to half as long again."""
    return int(getattr(Layout, field).offset) // 8


def _device_word(field: str) -> int:
    return _word("device") + int(getattr(Device, field).offset) // 8


MAGIC_AT, SEQUENCE, PID, GENERATION = _word("magic"), _word("sequence"), _word("pid"), _word("generation")
POSITION, CHANGED_AT, WAITING, MOVES = _word("position"), _word("changed_at"), _word("waiting"), _word("moves")
COMMITTED, COMMITTED_AT, COMMITS = _word("committed"), _word("committed_at"), _word("commits")
STEP_TIMES = _word("step_times")
DEVICE_CHECKED_AT, DEVICE_MOVES, DEVICE_PENDING = map(_device_word, ("looked_at", "moves", "pending"))
DEVICE_POSITION, DEVICE_WAITING, DEVICE_NUMBER = map(_device_word, ("position", "waiting", "number"))


def _counts_at(first: int, later: int) -> dict[str, int]:
    """Words of the counts, by the names in COUNTED, from those of both arrays."""
    words = [*range(first, first + len(_COUNTED_FIRST)), *range(later, later + len(_COUNTED_LATER))]
    return dict(zip(COUNTED, words, strict=True))


COUNTS_AT = _counts_at(_word("counts"), _word("later_counts"))
DEVICE_COUNTS_AT = _counts_at(_device_word("counts"), _word("device_later_counts"))


_READ_ATTEMPTS = 64


def progress_path(folder: str | Path, rank: int) -> Path:
    """The file of `rank`'s record in the job's folder in shared memory."""
    return Path(folder) / f"{rank_stem(rank)}.progress"


class Progress:
    """The writer's end. One thread writes, except for the device's fields, which the thread that follows the device
    (`device_trail.py`) writes. Without a file the record is private memory, which nothing reads."""

    __slots__ = ("_began", "_count_at", "_idle_before", "_step_bits", "_words", "idle_seconds", "memory")

    def __init__(self, memory: mmap.mmap | bytearray | None = None):
        self.memory = memory if memory is not None else bytearray(RECORD_BYTES)
        self._words = memoryview(self.memory).cast("q")
        self._count_at = COUNTS_AT
        self._step_bits, self._began = 0, time.monotonic_ns()
        self.idle_seconds = self._idle_before = 0.0
        """Time spent waiting for other ranks while nothing moved, if the backend reports it; not in the record."""
        self._words[PID] = os.getpid()
        self.at("starting")
        self._words[MAGIC_AT] = MAGIC

    @classmethod
    def shared(cls, folder: str | Path, rank: int) -> Progress:
        """A record in a new file of `rank`: a process that had the rank before keeps writing into the old file.

        If shared memory has no room for it the record is private: training matters more than being watched.
        """
        path = progress_path(folder, rank)
        try:
            make_folder(path.parent)
            fresh = path.with_name(f"{path.name}.{os.getpid()}")
            descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RECORD_BYTES)
                memory = mmap.mmap(descriptor, RECORD_BYTES)
                progress = cls(memory)
                put(fresh, path)
            except OSError:
                fresh.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except OSError:
            return cls()
        return progress

    def belongs_to(self, generation: int) -> None:
        """From now on this rank belongs to `generation`, and counts start there: the ranks of a generation are compared
        by their counts, and some of the processes may have lived through other generations before."""
        words = self._words
        if words[GENERATION] == generation:
            return
        words[SEQUENCE] += 1
        words[GENERATION] = generation
        for at in self._count_at.values():
            words[MOVES] += words[at]  # so that the heartbeat does not decrease
            words[at] = 0
        words[SEQUENCE] += 1

    @property
    def step(self) -> int:
        """The current step."""
        return self._step_bits >> PHASE_BITS + MICRO_BATCH_BITS

    def begin_step(self, step: int) -> None:
        """Step number `step` begins."""
        self._began, self._idle_before = time.monotonic_ns(), self.idle_seconds
        self._step_bits = step << PHASE_BITS + MICRO_BATCH_BITS
        self.at("data")

    def at(self, phase: Phase, micro_batch: int = -1) -> None:
        """The rank is now in `phase`, at `micro_batch` if that applies."""
        words = self._words
        words[POSITION] = self._step_bits | (micro_batch + 1) << PHASE_BITS | PHASE_NUMBERS[phase]
        words[CHANGED_AT] = time.monotonic_ns()
        words[MOVES] += 1

    @property
    def position(self) -> int:
        """Step, phase and micro-batch as one word, for `device_at`."""
        return self._words[POSITION]

    def entered(self, what: str) -> None:
        """One more of `what`, a name in COUNTED, was entered."""
        self._words[self._count_at[what]] += 1

    def count(self, what: str) -> int:
        """How many of `what` were entered in this generation."""
        return self._words[self._count_at[what]]

    def waits_for(self, peer: int, channel: int, sending: bool) -> None:
        """Nothing can continue until `peer` sends on `channel` (the axis's number), or with `sending` until it takes
        what is sent."""
        self._words[WAITING] = 1 + peer | channel << PEER_BITS | sending << PEER_BITS + CHANNEL_BITS

    def moved(self, waited: float = 0.0) -> None:
        """The wait, of `waited` seconds, is over, or bytes have moved."""
        self.idle_seconds += waited
        words = self._words
        words[WAITING] = 0
        words[MOVES] += 1

    def seconds(self) -> float:
        """Time of the step so far."""
        return (time.monotonic_ns() - self._began) / 1e9

    def own_seconds(self) -> float:
        """Time of the step so far that was not spent waiting for others."""
        return self.seconds() - (self.idle_seconds - self._idle_before)

    def commit(self, step: int, measured: tuple[float, float] | None = None) -> None:
        """Step number `step` is committed. `measured`: seconds of a step on the device, in total and its own
        (`DeviceTrail.step_seconds`), used in place of the host's."""
        words, now = self._words, time.monotonic_ns()
        took = now - self._began
        own = took - int((self.idle_seconds - self._idle_before) * 1e9)
        if measured is not None:
            took, own = (int(seconds * 1e9) for seconds in measured)
        slot = STEP_TIMES + 2 * (words[COMMITS] % RECENT)
        words[SEQUENCE] += 1
        words[slot], words[slot + 1] = took, own
        words[COMMITTED], words[COMMITTED_AT] = step, now
        words[COMMITS] += 1
        words[SEQUENCE] += 1

    def device_at(self, position: int) -> None:
        """The device has reached `position`."""
        self._words[DEVICE_POSITION] = position

    def device_arrived(self, what: str, number: int) -> None:
        """The device has finished everything before communication `number` of `what`, a name in COUNTED."""
        self._words[DEVICE_COUNTS_AT[what]] = number

    def device_waits(self, channel: int, number: int, peer: int, sending: bool) -> None:
        """The device does nothing until communication `number` along the axis with number `channel` is over; `peer`:
        the only rank that this requires, or NOBODY."""
        waiting = 1 + peer | channel << PEER_BITS | sending << PEER_BITS + CHANNEL_BITS
        self._words[DEVICE_NUMBER] = number
        self._words[DEVICE_WAITING] = waiting | 1 << PEER_BITS + CHANNEL_BITS + SENDING_BITS

    def device_wait_ended(self) -> None:
        """The device's wait is over."""
        self._words[DEVICE_WAITING] = 0

    def device_polled(self, moves: int, pending: int) -> None:
        """The device was looked at: it has passed `moves` more marks, and has `pending` left."""
        words = self._words
        words[DEVICE_MOVES] += moves
        words[DEVICE_PENDING] = pending
        words[DEVICE_CHECKED_AT] = time.monotonic_ns()

    def device_unknown(self) -> None:
        """The device is not followed any more, and its record is reset."""
        words = self._words
        words[DEVICE_CHECKED_AT] = words[DEVICE_PENDING] = words[DEVICE_WAITING] = 0
        for at in DEVICE_COUNTS_AT.values():
            words[at] = 0


@dataclass(frozen=True)
class DeviceRecord:
    """How far the device of a process has got with what its host has queued; see `device_trail.py`."""

    phase: Phase
    step: int
    """Phase and step that it is in."""
    micro_batch: int | None
    pending: int
    """Marks that were set and that it has not passed: with 0 it has nothing left to do."""
    waits: bool
    """Whether it does nothing until a communication is over."""
    channel: int | None
    """Number of that communication's axis; None while it does not wait."""
    number: int
    """Number of the communication within its axis, or within messages sent or received."""
    waits_for: int | None
    """The rank without which it cannot continue, if that is a single one."""
    sending: bool
    """Whether it waits for its message to be taken."""
    counts: dict[str, int]
    """By the names in COUNTED, the communications of this generation that it was ready for."""
    fresh: bool = True
    """Whether it was looked at recently. Otherwise the process may be unable to look, and the device may be further
    on."""


@dataclass(frozen=True)
class Record:
    """A record as it was read."""

    pid: int
    """The process that wrote it."""
    generation: int
    """Generation that the process is in; 0 before the first."""
    phase: Phase
    """What it is doing."""
    step: int
    """The current step."""
    micro_batch: int | None
    """Micro-batch of the current pipeline action."""
    waits_for: int | None
    """Rank without which it cannot continue; None while it computes, or if the backend does not report it."""
    channel: int | None
    """Number of the axis along which it waits, CONNECTING_CHANNEL while links are made."""
    sending: bool
    """Whether it waits for its message to be taken, rather than for one to arrive."""
    counts: dict[str, int]
    """By the names in COUNTED, collectives entered and messages started in this generation."""
    committed: int
    """Last step that this process committed; 0: none yet."""
    commits: int
    """Number of steps that this process has committed."""
    changed_at: float
    """CLOCK_MONOTONIC of the last change of phase, in seconds."""
    committed_at: float
    """CLOCK_MONOTONIC of the last commit, in seconds."""
    step_seconds: tuple[float, ...]
    """Durations of the last steps, at most RECENT, in no particular order."""
    own_seconds: tuple[float, ...]
    """Durations of the same steps without the time spent waiting for others."""
    heartbeat: int
    """Increases with every change."""
    torn: bool
    """Whether the process was in the middle of a change during every read: fields may not match each other."""
    device: DeviceRecord | None = None
    """None if no device is followed."""
    looked_at: float = 0.0
    """CLOCK_MONOTONIC of the last look at the device, in seconds."""


class ProgressReader:
    """The agent's end: the mapping of one process's record, which outlives its file's name."""

    def __init__(self, path: Path):
        """Raises OSError while there is no file, ValueError if the file is not a record."""
        with open_regular(path) as file:
            size = min(RECORD_BYTES, max(_FEWEST_BYTES, os.fstat(file.fileno()).st_size))
            self._memory = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)

    def close(self) -> None:
        """Release the mapping."""
        self._memory.close()

    def read(self) -> Record | None:
        """The current record; None until its writer has begun."""
        before = self._copied()
        for _ in range(_READ_ATTEMPTS):
            now = self._copied()
            if now == before and not Layout.from_buffer_copy(now).sequence % 2:
                return _parse(now, torn=False)
            before = now
        return _parse(before, torn=True)

    def _copied(self) -> bytes:
        return self._memory[:].ljust(RECORD_BYTES, b"\0")


def _parse(memory: bytes, torn: bool) -> Record | None:
    layout = Layout.from_buffer_copy(memory)
    if layout.magic != MAGIC:
        return None
    position, waiting = layout.position, layout.waiting
    waits = waiting.peer_plus_1 > 0
    recent = layout.step_times[: min(layout.commits, RECENT)]
    counts = dict(zip(COUNTED, (*layout.counts, *layout.later_counts), strict=True))
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
        step_seconds=tuple(times.all / 1e9 for times in recent),
        own_seconds=tuple(times.own / 1e9 for times in recent),
        heartbeat=layout.moves + layout.sequence // 2 + sum(counts.values()) + layout.device.moves,
        torn=torn,
        device=_parse_device(layout) if layout.device.looked_at else None,
        looked_at=layout.device.looked_at / 1e9,
    )


def _parse_device(layout: Layout) -> DeviceRecord:
    device = layout.device
    position, waiting = device.position, device.waiting
    return DeviceRecord(
        phase=PHASES[position.phase],
        step=position.step,
        micro_batch=position.micro_batch_plus_1 - 1 if position.micro_batch_plus_1 else None,
        pending=device.pending,
        waits=bool(waiting.waits),
        channel=waiting.channel if waiting.waits else None,
        number=device.number if waiting.waits else 0,
        waits_for=waiting.peer_plus_1 - 1 if waiting.peer_plus_1 else None,
        sending=bool(waiting.sending),
        counts=dict(zip(COUNTED, (*device.counts, *layout.device_later_counts), strict=True)),
    )
