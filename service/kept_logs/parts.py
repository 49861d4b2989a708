"""The parts that a job's log is kept in: objects of whole lines, written once, which number from 1 on.

A part begins with a line of JSON, `{"ranks": {"0": [start, end, generation, sequence], ...}}`: for each rank that has
printed anything so far which bytes of its log are in this part, and with which report they end. Those bytes follow,
rank by rank. Start and end count from the beginning of the rank's log, so they are the positions of cursors too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Mark = tuple[int, int]
"""Generation and sequence of a report. A rank has one agent in a generation, so they only grow."""
_NAME = re.compile(r"(\d{9})-(\d{9})-(\d{6,})(-end)?\.part")


class NoPart(ValueError):
    """The content of an object is not that of a part."""


@dataclass(frozen=True)
class PartName:
    """What is known of a part without reading it."""

    first: int
    """Number of the part."""
    last: int
    """The same, or the last of those of which it was made."""
    stamp: int
    """Grows with each control plane that writes: of two parts with one number the higher stamp counts. The other one
    was under way when its writer had lost the job."""
    closes: bool = False
    """Whether it was written when the job was over."""

    def __str__(self) -> str:
        return f"{self.first:09d}-{self.last:09d}-{self.stamp:06d}{'-end' if self.closes else ''}.part"

    @classmethod
    def parse(cls, name: str) -> PartName | None:
        """The part called `name`; None for what is none."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]), int(match[3]), bool(match[4]))


def counting(names: Iterable[str]) -> list[PartName]:
    """Those of these parts that make up the log, in order: where one was made of several it counts, and where two were
    written with one number the one with the higher stamp."""
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
    """Whether no number is missing. One is where parts are replaced by a larger one while they are listed."""
    return all(
        part.first == before + 1 for part, before in zip(chain, (0, *(each.last for each in chain)), strict=False)
    )


@dataclass(frozen=True)
class Piece:
    """What a part has of one rank's log."""

    start: int
    end: int
    """Its first byte in the rank's log, and the one after the last."""
    mark: Mark
    """Of the report with which it ends; (0, 0) where that is not known."""


@dataclass(frozen=True)
class Header:
    """What the first line of a part says."""

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
    """What the first `line` of a part says. Raises NoPart."""
    try:
        about = json.loads(line)["ranks"].items()
        pieces = {int(rank): Piece(int(s), int(e), (int(g), int(n))) for rank, (s, e, g, n) in about}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NoPart(f"this is not a header of a part: {line[:60]!r}") from error
    return Header(dict(sorted(pieces.items())), len(line))


def decode(content: bytes) -> dict[int, tuple[Piece, bytes]]:
    """All of a part. Raises NoPart."""
    header = decode_header(content[: content.find(b"\n") + 1])
    chunks: dict[int, tuple[Piece, bytes]] = {}
    for rank, piece in header.pieces.items():
        begin = header.offset(rank)
        chunks[rank] = piece, content[begin : begin + piece.end - piece.start]
        if len(chunks[rank][1]) != piece.end - piece.start:
            raise NoPart(f"this part is too short: {len(content)} bytes")
    return chunks
