"""Reads Perfetto's traces without knowing how they were written: protocol buffers by their wire format alone."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Track:
    """One track, and the slices on it."""

    name: str
    parent: int | None
    slices: list[dict[str, Any]] = field(default_factory=list)
    """`name`, `begin` and `end` in nanoseconds, `about` by name, `flows`, and `depth`."""


def fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message: integers, or bytes."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(content, at)
        elif kind == 1:
            value, at = content[at : at + 8], at + 8
        elif kind == 2:
            length, at = _varint(content, at)
            value, at = content[at : at + length], at + length
            assert len(value) == length, "cut off"
        else:
            raise AssertionError(f"wire type {kind}")
        yield number, value


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def read_trace(content: bytes) -> list[Track]:
    """All tracks, in the order in which they are described. Fails where a slice does not end, or ends before it has
    begun, or where one has no track."""
    tracks: dict[int, Track] = {}
    open_slices: dict[int, list[dict[str, Any]]] = {}
    for number, packet in fields(content):
        assert number == 1, "a trace is made of packets"
        known = dict(fields(packet))
        assert known[10] > 0, "a sequence of trusted packets"
        if 60 in known:
            about = dict(fields(known[60]))
            tracks[about[1]] = Track(about[2].decode(), about.get(5))
            continue
        event = list(fields(known[11]))
        only = dict(event)
        around = open_slices.setdefault(only[11], [])
        if only[9] == 1:
            flows = [struct.unpack("<Q", value)[0] for number, value in event if number == 47]
            begun = {"name": only[23].decode(), "begin": known[8], "depth": len(around), "flows": flows}
            begun["about"] = dict(_annotation(value) for number, value in event if number == 4)
            tracks[only[11]].slices.append(begun)
            around.append(begun)
        else:
            assert only[9] == 2
            around.pop()["end"] = known[8]
    assert not any(open_slices.values()), "every slice ends"
    for track in tracks.values():
        assert all(each["begin"] <= each["end"] for each in track.slices)
        assert track.parent is None or track.parent in tracks
    return list(tracks.values())


def _annotation(content: bytes) -> tuple[str, Any]:
    known = dict(fields(content))
    name = known.pop(10).decode()
    ((number, value),) = known.items()
    return name, struct.unpack("<d", value)[0] if number == 5 else value.decode() if number == 6 else value
