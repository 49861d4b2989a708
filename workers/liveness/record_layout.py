"""The words of a progress record (`progress.py`), which its writer stores and its readers decode. Pure Python.

Every field that changes often is one aligned 64-bit word. New fields are appended, so that a reader of another release
finds the others in the same place.
"""

from __future__ import annotations

import ctypes
from typing import Literal, get_args

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
COUNTED = ("tensor", "pipeline", "data", "embedding", "world", "sent", "received")
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
        ("counts", ctypes.c_int64 * len(COUNTED)),
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
        ("counts", ctypes.c_int64 * len(COUNTED)),
        ("step_times", _StepTimes * RECENT),
        ("device", Device),
    )


RECORD_BYTES = ctypes.sizeof(Layout)


def _word(field: str) -> int:
    """Index of the word in which `field` begins. The writer assigns items of a memoryview, since assigning attributes
    of a Structure takes up to half as long again."""
    return int(getattr(Layout, field).offset) // 8


def _device_word(field: str) -> int:
    return _word("device") + int(getattr(Device, field).offset) // 8


MAGIC_AT, SEQUENCE, PID, GENERATION = _word("magic"), _word("sequence"), _word("pid"), _word("generation")
POSITION, CHANGED_AT, WAITING, MOVES = _word("position"), _word("changed_at"), _word("waiting"), _word("moves")
COMMITTED, COMMITTED_AT, COMMITS = _word("committed"), _word("committed_at"), _word("commits")
COUNTS, STEP_TIMES = _word("counts"), _word("step_times")
DEVICE_CHECKED_AT, DEVICE_MOVES, DEVICE_PENDING = map(_device_word, ("looked_at", "moves", "pending"))
DEVICE_POSITION, DEVICE_WAITING, DEVICE_NUMBER = map(_device_word, ("position", "waiting", "number"))
DEVICE_COUNTS = _device_word("counts")
