"""The parts in which a job's log is stored: objects of complete lines, written once, numbered from 1.

A part begins with a line of JSON, `{"ranks": {"0": [start, end, generation, sequence], ...}}`: for each rank that has
printed anything so far, which bytes of its log are in this part, and with which report they end. Those bytes follow,
rank by rank. Start and end count from the beginning of the rank's log, so they are also the positions in cursors. In
local log files, the marks at the ends of lines say which report they came with.

A control plane that has lost the job without knowing it may have at most one part in progress: before each part it
makes sure that it still has the job. The next owner writes a part with the same number and a higher stamp, which takes
precedence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location

Mark = tuple[int, int]
"""Generation and sequence number of a report. A rank has one agent in a generation, so marks only increase."""
_NAME = re.compile(r"(\d{9})-(\d{9})-(\d{6,})(-end)?\.part")
BLOCK_BYTES = 64 * 1024
PART_BYTES = 4 * 1024 * 1024
SMALL_BYTES = 1024 * 1024
MERGED_BYTES = 8 * 1024 * 1024
"""Maximum size of parts that are merged."""
SMALL_PARTS = 64
"""When this many small parts are at the end of a log, they are merged."""


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
class Segment:
    """A part's share of one rank's log."""

    start: int
    end: int
    """`start` and `end`: the share's first byte in the rank's log, and the one after its last."""
    mark: Mark
    """Mark of the report with which it ends; (0, 0) if that is not known."""


@dataclass(frozen=True)
class Header:
    """The contents of a part's first line."""

    segments: dict[int, Segment]
    """By rank, in the order in which they follow."""
    size: int
    """Bytes of that line."""

    def offset(self, rank: int) -> int:
        """Where in the part the bytes of `rank` begin."""
        before = (segment.end - segment.start for each, segment in self.segments.items() if each < rank)
        return self.size + sum(before)


def encode(chunks: Mapping[int, tuple[Segment, bytes]]) -> bytes:
    """A part with these pieces and their bytes."""
    ordered = sorted(chunks.items())
    about = {str(rank): [segment.start, segment.end, *segment.mark] for rank, (segment, _) in ordered}
    line = json.dumps({"ranks": about}, separators=(",", ":")).encode() + b"\n"
    return b"".join([line, *(content for _, (_, content) in ordered)])


def decode_header(line: bytes) -> Header:
    """The contents of a part's first `line`. Raises NoPart."""
    try:
        about = json.loads(line)["ranks"].items()
        segments = {int(rank): Segment(int(s), int(e), (int(g), int(n))) for rank, (s, e, g, n) in about}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NoPart(f"this is not a header of a part: {line[:60]!r}") from error
    return Header(dict(sorted(segments.items())), len(line))


def decode(content: bytes) -> dict[int, tuple[Segment, bytes]]:
    """The whole part. Raises NoPart."""
    header = decode_header(content[: content.find(b"\n") + 1])
    chunks: dict[int, tuple[Segment, bytes]] = {}
    for rank, segment in header.segments.items():
        begin = header.offset(rank)
        chunks[rank] = segment, content[begin : begin + segment.end - segment.start]
        if len(chunks[rank][1]) != segment.end - segment.start:
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


class PartWriter:
    """Writes the parts of one job's log, for the job's owner. Raises OSError whenever the place does not do what it is
    asked; a request may be repeated."""

    def __init__(self, folder: Location):
        """`folder`: of the job's parts."""
        self._folder, self._files = folder, files_of(folder)
        self._sizes: dict[PartName, int] = {}
        self._stamp = 0
        self.segments: dict[int, Segment] = {}
        """By rank, the last piece of its log."""

    def begin(self, epoch: int) -> None:
        """Find out what is there. `epoch`: of the lease under which parts are written."""
        try:
            names = self._files.names(self._folder)
        except FileNotFoundError:
            names = []
        every = [part for part in map(PartName.parse, names) if part is not None]
        parts = counting(names)
        sizes = dict(self._files.sizes(self._folder, map(str, parts)))
        if unknown := next((size for size in sizes.values() if isinstance(size, OSError)), None):
            raise unknown
        self.segments = {rank: segment for rank, (segment, _) in self._read(parts[-1]).items()} if parts else {}
        self._sizes = {part: int(str(sizes[str(part)])) for part in parts}
        self._stamp = max([epoch, *(part.stamp + 1 for part in every)])

    @property
    def next_number(self) -> int:
        """Number of the next part."""
        return next(reversed(self._sizes)).last + 1 if self._sizes else 1

    @property
    def is_closed(self) -> bool:
        """Whether the last part was written when the job was over."""
        return bool(self._sizes) and next(reversed(self._sizes)).closes

    def mark(self, rank: int) -> Mark:
        """Mark of the last report of `rank` whose lines are stored."""
        return self.segments[rank].mark if rank in self.segments else (0, 0)

    def write(self, chunks: Mapping[int, tuple[Segment, bytes]], closes: bool = False) -> None:
        """Write one more part, of these ranks. If this has failed, it must be repeated with the same bytes."""
        still = {
            rank: (Segment(segment.end, segment.end, segment.mark), b"") for rank, segment in self.segments.items()
        }
        whole = {**still, **chunks}
        content = encode(whole)
        part = PartName(self.next_number, self.next_number, self._stamp, closes)
        self._files.make_folder(self._folder)
        self._files.write_atomically(self._folder / str(part), content)
        self._sizes[part] = len(content)
        self.segments = {rank: segment for rank, (segment, _) in whole.items()}

    def merge(self, at_least: int = SMALL_PARTS) -> None:
        """Merge small parts at the end of the log if there are `at_least` that many. Everything that is merged existed
        when this control plane certainly had the job, so its next owner counts it too."""
        run = self._small_ones()
        if len(run) < at_least:
            return
        merged = _merged([self._read(part) for part in run])
        if merged is None:
            return
        content = encode(merged)
        whole = PartName(run[0].first, run[-1].last, self._stamp, run[-1].closes)
        self._files.write_atomically(self._folder / str(whole), content)
        for part in run:
            del self._sizes[part]
        self._sizes[whole] = len(content)
        for part in filter(None, map(PartName.parse, self._files.names(self._folder))):
            if part != whole and whole.first <= part.first and part.last <= whole.last:
                self._files.remove(self._folder / str(part))

    def _small_ones(self) -> list[PartName]:
        run: list[PartName] = []
        total = 0
        for part, size in reversed(self._sizes.items()):
            total += size
            if size >= SMALL_BYTES or total > MERGED_BYTES:
                break
            run.insert(0, part)
        return run

    def _read(self, part: PartName) -> dict[int, tuple[Segment, bytes]]:
        try:
            return decode(self._files.read(self._folder / str(part)))
        except NoPart as error:
            raise OSError(f"{self._folder / str(part)}: {error}") from error


def _merged(parts: list[dict[int, tuple[Segment, bytes]]]) -> dict[int, tuple[Segment, bytes]] | None:
    """One part with the contents of these consecutive ones; None if bytes are missing in between."""
    merged: dict[int, tuple[Segment, list[bytes]]] = {}
    for part in parts:
        for rank, (segment, content) in part.items():
            before, contents = merged.get(rank, (Segment(segment.start, segment.start, segment.mark), []))
            if segment.start != before.end:
                return None
            merged[rank] = Segment(before.start, segment.end, segment.mark), [*contents, content]
    return {rank: (segment, b"".join(contents)) for rank, (segment, contents) in merged.items()}
