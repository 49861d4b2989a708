"""The parts in which a job's log is stored: objects of complete lines, written once, numbered from 1.

A part begins with a line of JSON, `{"ranks": {"0": [start, end, generation, sequence], ...}}`: for each rank that has
printed anything so far, which bytes of its log are in this part, and with which report they end. Those bytes follow,
rank by rank. Start and end count from the beginning of the rank's log, so they are also the positions in cursors. In
local log files, the marks at the ends of lines say which report they came with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

Mark = tuple[int, int]
"""Generation and sequence number of a report. A rank has one agent in a generation, so marks only increase."""
_NAME = re.compile(r"(\d{9})-(\d{9})-(\d{6,})(-end)?\.part")
BLOCK_BYTES = 64 * 1024


class NoPart(ValueError):
    """The content of an object is not that of a part."""


@dataclass(frozen=True)
class PartName:
    """What is known about a part without reading it."""

    first: int
    """Number of the part."""
    last: int
    """Number of the last part that was merged into it; equal to `first` if none was."""
    stamp: int
    """Increases with each control plane that writes: of two parts with one number, the one with the higher stamp
    counts. The other one was in progress when its writer had lost the job."""
    closes: bool = False
    """Whether it was written when the job was over."""

    def __str__(self) -> str:
        return f"{self.first:09d}-{self.last:09d}-{self.stamp:06d}{'-end' if self.closes else ''}.part"

    @classmethod
    def parse(cls, name: str) -> PartName | None:
        """The part called `name`; None if it is not a part."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]), int(match[3]), bool(match[4]))


def counting(names: Iterable[str]) -> list[PartName]:
    """The parts of these names that make up the log, in order: a merged part takes precedence over those that it was
    made of, and of two with one number the one with the higher stamp counts."""
    best: dict[int, PartName] = {}
    for part in filter(None, map(PartName.parse, names)):
        known = best.get(part.first)
        if known is None or (part.last, part.stamp, part.closes) > (known.last, known.stamp, known.closes):
            best[part.first] = part
    chain: list[PartName] = []
    for first in sorted(best):
        if not chain or first > chain[-1].last:
            chain.append(best[first])
    return chain


def is_gapless(chain: list[PartName]) -> bool:
    """Whether no number is missing. A gap appears if parts are replaced by a larger one while they are listed."""
    return all(
        part.first == before + 1 for part, before in zip(chain, (0, *(each.last for each in chain)), strict=False)
    )


@dataclass(frozen=True)
class Piece:
    """A part's share of one rank's log."""

    start: int
    end: int
    """`start` and `end`: the share's first byte in the rank's log, and the one after its last."""
    mark: Mark
    """Mark of the report with which it ends; (0, 0) if that is not known."""


@dataclass(frozen=True)
class Header:
    """The contents of a part's first line."""

    pieces: dict[int, Piece]
    """By rank, in the order in which they follow."""
    size: int
    """Bytes of that line."""

    def offset(self, rank: int) -> int:
        """Where in the part the bytes of `rank` begin."""
        before = (piece.end - piece.start for each, piece in self.pieces.items() if each < rank)
        return self.size + sum(before)


def encode(chunks: Mapping[int, tuple[Piece, bytes]]) -> bytes:
    """A part with these pieces and their bytes."""
    ordered = sorted(chunks.items())
    about = {str(rank): [piece.start, piece.end, *piece.mark] for rank, (piece, _) in ordered}
    line = json.dumps({"ranks": about}, separators=(",", ":")).encode() + b"\n"
    return b"".join([line, *(content for _, (_, content) in ordered)])


def decode_header(line: bytes) -> Header:
    """The contents of a part's first `line`. Raises NoPart."""
    try:
        about = json.loads(line)["ranks"].items()
        pieces = {int(rank): Piece(int(s), int(e), (int(g), int(n))) for rank, (s, e, g, n) in about}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NoPart(f"this is not a header of a part: {line[:60]!r}") from error
    return Header(dict(sorted(pieces.items())), len(line))


def decode(content: bytes) -> dict[int, tuple[Piece, bytes]]:
    """The whole part. Raises NoPart."""
    header = decode_header(content[: content.find(b"\n") + 1])
    chunks: dict[int, tuple[Piece, bytes]] = {}
    for rank, piece in header.pieces.items():
        begin = header.offset(rank)
        chunks[rank] = piece, content[begin : begin + piece.end - piece.start]
        if len(chunks[rank][1]) != piece.end - piece.start:
            raise NoPart(f"this part is too short: {len(content)} bytes")
    return chunks


def lines_backwards(file: IO[bytes], end: int) -> Iterator[tuple[int, bytes]]:
    """(First byte, line with its end) of all complete lines before byte `end`, the last one first. Raises OSError."""
    rest = b""
    while end > 0:
        begin = max(0, end - BLOCK_BYTES)
        file.seek(begin)
        lines = (file.read(end - begin) + rest).splitlines(keepends=True)
        if not lines:  # it was cut short in the meantime
            return
        rest = lines.pop(0) if begin else b""  # it may begin before
        end, at = begin, begin + len(rest) + sum(map(len, lines))
        for line in reversed(lines):
            at -= len(line)
            if line.endswith(b"\n"):
                yield at, line


def mark_of(line: bytes) -> Mark | None:
    """Mark of the report that `line` came with; None if it is not a line of a log."""
    try:
        entry = json.loads(line)
        return int(entry["generation"]), int(entry.get("sequence") or 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def left_after(line: bytes) -> int:
    """How many lines of the same report follow."""
    try:
        return int(json.loads(line).get("left") or 0)
    except (ValueError, TypeError, AttributeError):
        return 0


def end_of_reports(file: IO[bytes], end: int) -> int:
    """The byte before `end` up to which all reports are complete. Raises OSError."""
    return next((at + len(line) for at, line in lines_backwards(file, end) if not left_after(line)), 0)


def last_mark(file: IO[bytes], end: int) -> Mark:
    """Mark of the last report before byte `end`; (0, 0) if there is none. Raises OSError."""
    marks = (mark_of(line) for _, line in lines_backwards(file, end))
    return next((mark for mark in marks if mark is not None), (0, 0))


def end_of(file: IO[bytes], end: int, last: Mark) -> int:
    """The byte before `end` after the last line of the report `last`, or of an earlier one. Raises OSError."""
    for at, line in lines_backwards(file, end):
        mark = mark_of(line)
        if mark is not None and mark <= last:
            return at + len(line)
    return 0
