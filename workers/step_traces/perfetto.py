"""A trace in Perfetto's format: its TrackEvent messages (protos/perfetto/trace of the Perfetto project), in the wire
format of protocol buffers. There is a track for each rank, below one for its replica, and an arrow from each message to
its receipt."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from manta.workers.step_traces.analysis import name_of
from manta.workers.step_traces.assembly import StepTrace, TracedRank, nested
from manta.workers.timing.recording import Slice

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_PACKET = 1
_TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _TRACK = 8, 10, 11, 60
_UUID, _NAME, _PARENT = 1, 2, 5
_ANNOTATIONS, _TYPE, _TRACK_UUID, _CATEGORIES, _EVENT_NAME, _FLOWS = 4, 9, 11, 22, 23, 47
_UINT_VALUE, _DOUBLE_VALUE, _STRING_VALUE, _ANNOTATION_NAME = 3, 5, 6, 10
_BEGIN, _END = 1, 2
_OUR_SEQUENCE = 1
_REPLICAS = 1 << 32
"""Ids of replicas' tracks begin here, those of ranks at 1."""


def perfetto(trace: StepTrace) -> bytes:
    """The whole file."""
    replicas = sorted({trace.grid.coordinates(each.rank).data for each in trace.ranks})
    packets = [_track(_REPLICAS + replica, f"replica {replica}") for replica in replicas]
    for rank in trace.ranks:
        at = trace.grid.coordinates(rank.rank)
        name = f"rank {rank.rank} (tensor {at.tensor}, pipeline {at.pipeline}, data {at.data})"
        packets.append(_track(1 + rank.rank, name, _REPLICAS + at.data))
        packets += _events(rank)
    return b"".join(_message(_PACKET, packet) for packet in packets)


def _track(uuid: int, name: str, parent: int | None = None) -> bytes:
    content = _number(_UUID, uuid) + _text(_NAME, name)
    if parent is not None:
        content += _number(_PARENT, parent)
    return _number(_SEQUENCE, _OUR_SEQUENCE) + _message(_TRACK, content)


def _events(rank: TracedRank) -> Iterator[bytes]:
    """The begin and end of each slice of a rank, in order. Each step is a slice around what happens in it."""
    steps = [Slice("loader", step.start, step.end, step.step) for step in rank.steps]
    names = {id(step): f"step {step.step}" for step in steps}
    everything = sorted([*steps, *rank.slices], key=lambda each: (each.start, -each.end, id(each) not in names))
    ends: list[float] = []
    for each, around in nested(everything):
        while len(ends) > len(around):
            yield _end(rank.rank, ends.pop())
        ends.append(min([each.end, *ends[-1:]]))  # rounding must not let it end after the slice around it
        yield _begin(rank.rank, each, names.get(id(each)))
    while ends:
        yield _end(rank.rank, ends.pop())


def _begin(rank: int, each: Slice, name: str | None) -> bytes:
    content = _number(_TYPE, _BEGIN) + _number(_TRACK_UUID, 1 + rank)
    content += _text(_CATEGORIES, "step" if name else each.kind) + _text(_EVENT_NAME, name or name_of(each))
    if name is None:
        about = {"step": each.step, "stage": each.stage, "micro_batch": each.micro_batch, "bytes": each.bytes}
        content += b"".join(_annotation(key, value) for key, value in about.items() if value is not None)
        if each.axis is not None:
            content += _message(_ANNOTATIONS, _text(_ANNOTATION_NAME, "axis") + _text(_STRING_VALUE, each.axis))
        if each.wait is not None:
            waited = _key(_DOUBLE_VALUE, _FIXED64) + struct.pack("<d", each.wait)
            content += _message(_ANNOTATIONS, _text(_ANNOTATION_NAME, "wait_seconds") + waited)
        if each.kind in ("send", "receive") and each.peer is not None and each.number is not None:
            source, to = (rank, each.peer) if each.kind == "send" else (each.peer, rank)
            content += _key(_FLOWS, _FIXED64) + struct.pack("<Q", source << 44 | to << 24 | each.number & 0xFFFFFF)
    return _packet(each.start, content)


def _end(rank: int, at: float) -> bytes:
    return _packet(at, _number(_TYPE, _END) + _number(_TRACK_UUID, 1 + rank))


def _packet(at: float, event: bytes) -> bytes:
    nanoseconds = max(0, round(at * 1e9))
    return _number(_TIMESTAMP, nanoseconds) + _number(_SEQUENCE, _OUR_SEQUENCE) + _message(_TRACK_EVENT, event)


def _annotation(name: str, value: int) -> bytes:
    return _message(_ANNOTATIONS, _text(_ANNOTATION_NAME, name) + _number(_UINT_VALUE, value))


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _number(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _message(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Seven bits per byte, the lowest first; the eighth bit says that more bytes follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
