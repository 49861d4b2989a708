"""Traces of a job's steps: what one rank did in them, and its form for transfer, which is compressed JSON. Pure Python.

Times are those of CLOCK_MONOTONIC on the rank's machine, in seconds; the code that merges several ranks knows the
offsets between the clocks of their machines (`workers/step_traces/assembly.py`).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from manta.workers.protocol.json_codec import MalformedMessage

SliceKind = Literal[
    "loader",
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "recompute",
    "send",
    "receive",
    "collective",
    "reduction",
    "agreement",
    "optimizer",
    "gather",
    "snapshot",
    "checkpoint",
    "validation",
]
"""The kinds of slices; docs/tracing.md explains each."""
KINDS: tuple[SliceKind, ...] = get_args(SliceKind)
INTERRUPTED = "the recording was interrupted"
"""Problem of a recording that ends with its generation: the code that ends the generation knows why."""
_TICK = 1e-7
"""Seconds: times are transferred as whole multiples of this."""
_ABOUT = ("clock", "device", "error_seconds", "problem", "peak_flops")
"""Fields that are transferred with steps and slices unchanged."""


class Slice(NamedTuple):
    """One thing that a rank did; any two slices of a rank are nested or disjoint."""

    kind: SliceKind
    start: float
    """Seconds."""
    end: float
    step: int
    stage: int | None = None
    """Virtual stage, in the model's order."""
    micro_batch: int | None = None
    """Within the replica's step, from 0."""
    operation: str | None = None
    """Of a collective: all_reduce, all_gather, reduce_scatter or all_to_all."""
    bytes: int | None = None
    """Size of a message; for a collective, of the whole tensor that all of its ranks have together."""
    axis: str | None = None
    """Axis along which its ranks are."""
    wait: float | None = None
    """Seconds of it in which nothing was transferred, since others had not joined yet; None if that is not known."""
    issued: float | None = None
    """When this rank began the communication, before it waited for it."""
    peer: int | None = None
    """Rank to which a message goes, or from which it comes."""
    number: int | None = None
    """Number of the collective along the axis, or of the message between these two ranks in this direction."""


class TracedStep(NamedTuple):
    """A step of a recording."""

    step: int
    start: float
    end: float


@dataclass(frozen=True)
class PackedRecording:
    """A recording in the form in which it is transferred and stored."""

    packed: str
    """Steps and slices."""
    count: int = 0
    """Number of slices."""
    clock: str = ""
    device: bool = False
    error_seconds: float = 0.0
    problem: str = ""
    peak_flops: float | None = None
    """Peak FLOP/s of the rank's device; None: not known. The fields from `clock` on are those of `Recording`."""

    def unpack(self) -> Recording:
        """Raises MalformedMessage."""
        try:
            content = json.loads(zlib.decompress(base64.b85decode(self.packed)))
            slices = tuple(_slice(row, content["base"]) for row in content["slices"])
            steps = tuple(TracedStep(*each) for each in content["steps"])
        except (KeyError, TypeError, ValueError, IndexError, zlib.error) as error:
            raise MalformedMessage(f"a recording that cannot be read ({type(error).__name__}: {error})") from error
        return Recording(steps, slices, **{name: getattr(self, name) for name in _ABOUT})


@dataclass(frozen=True)
class Recording:
    """What one rank did."""

    steps: tuple[TracedStep, ...]
    """Complete steps."""
    slices: tuple[Slice, ...]
    """Slices of these steps, by start, outer ones first."""
    clock: str = ""
    """Names the clock of the times: it is the same for ranks whose times can be compared directly."""
    device: bool = False
    """Whether the times are those of the device, from its events; otherwise of the host."""
    error_seconds: float = 0.0
    """By how much all times may be early or late compared to the clock."""
    problem: str = ""
    """Why steps are missing; empty if none is."""
    peak_flops: float | None = None
    """Peak FLOP/s of the rank's device; None: not known."""

    def pack(self) -> PackedRecording:
        """Takes a twentieth of the space of plain JSON."""
        base = self.steps[0].start if self.steps else 0.0
        rows = [_row(each, base) for each in self.slices]
        text = json.dumps({"base": base, "steps": self.steps, "slices": rows}, separators=(",", ":"))
        packed = base64.b85encode(zlib.compress(text.encode(), 1)).decode()
        return PackedRecording(packed, len(rows), **{name: getattr(self, name) for name in _ABOUT})


def _row(each: Slice, base: float) -> list[Any]:
    """A slice in few characters: times as ticks since `base`, or since its start."""
    ticks = [
        KINDS.index(each.kind),
        round((each.start - base) / _TICK),
        round((each.end - each.start) / _TICK),
        None if each.wait is None else round(each.wait / _TICK),
        None if each.issued is None else round((each.start - each.issued) / _TICK),
    ]
    rest = [each.step, each.stage, each.micro_batch, each.operation, each.bytes, each.axis, each.peer, each.number]
    return [*ticks, *rest]


def _slice(row: Sequence[Any], base: float) -> Slice:
    kind, start, length, wait, before, step, stage, micro_batch, operation, size, axis, peer, number = row
    return Slice(
        KINDS[kind],
        base + start * _TICK,
        base + (start + length) * _TICK,
        step,
        stage,
        micro_batch,
        operation,
        size,
        axis,
        None if wait is None else wait * _TICK,
        None if before is None else base + (start - before) * _TICK,
        peer,
        number,
    )


def clock_of_machine() -> str:
    """Name of this machine's clock, the same in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


MAX_STEPS = 20
"""Of one trace."""
