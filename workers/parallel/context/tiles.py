"""Attention of a part of the sequence, cut into tiles: some queries attend to some keys, within a document and a
window. Pure Python.

Positions are those of tokens in the sequence; rows are where a rank has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from manta.workers.data.batches import Documents
from manta.workers.spec.sequence_runs import Run


@dataclass(frozen=True)
class Tile:
    """Queries that attend to keys; each of them sees at least one."""

    samples: slice
    queries: slice
    """Rows of the rank's queries."""
    keys: slice
    """Rows of the keys."""
    first_query: int
    first_key: int
    """Positions of the first query and of the first key."""
    causal: bool
    """Whether queries and keys are the same tokens, each of which sees itself and those before it; otherwise all keys
    come before all queries."""
    window: int | None
    """Number of tokens that a query sees, itself included, where that hides some keys; else None."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens, at consecutive rows."""

    first: int
    end: int
    """Positions: the first, and one past the last."""
    row: int
    """Row of the first."""

    def rows(self, first: int, end: int) -> slice:
        """Rows of the positions from `first` up to `end`."""
        return slice(self.row + first - self.first, self.row + end - self.first)


def segments(runs: Iterable[Run]) -> list[Segment]:
    """The runs of one rank, whose rows follow each other."""
    found, row = [], 0
    for first, end in runs:
        found.append(Segment(first, end, row))
        row += end - first
    return found


def tiles(
    queries: Sequence[Segment],
    keys: Sequence[Segment],
    documents: Documents | None,
    window: int | None = None,
    rows: int | None = None,
) -> Iterator[Tile]:
    """All pairs that attend to each other. A segment of keys is either one of queries too, or it does not overlap
    with any. `documents`: that attention does not cross; `window`: number of tokens that a query sees, itself included,
    None: all before it; `rows`: most queries of a tile."""
    for query, key in ((query, key) for query in queries for key in keys if key.first <= query.first):
        for samples, first, end in _bounds(documents, query.end):
            queried, known = _within(query, first, end), _within(key, first, end)
            if queried[0] < queried[1] and known[0] < known[1]:
                step = rows or queried[1] - queried[0]
                for at in range(*queried, step):
                    yield from _tiles_of((query, key), samples, (at, min(at + step, queried[1])), known, window)


def _bounds(documents: Documents | None, before: int) -> Iterator[tuple[slice, int, int]]:
    """Samples, and the range of positions within which they attend; of documents those that begin before `before`."""
    if documents is None:
        yield slice(None), 0, before
        return
    for sample, starts in enumerate(documents.starts):
        for first, end in zip(starts, (*starts[1:], documents.length), strict=True):
            if first < before:
                yield slice(sample, sample + 1), first, end


def _within(segment: Segment, first: int, end: int) -> Run:
    return max(segment.first, first), min(segment.end, end)


def _tiles_of(
    pair: tuple[Segment, Segment], samples: slice, queries: Run, keys: Run, window: int | None
) -> Iterator[Tile]:
    """Tiles of the queries at these positions: with the keys before them, and with themselves if these are among the
    keys."""
    (query, key), (first, end) = pair, queries
    seen, before = keys[0], min(keys[1], first)
    last_reached = end
    if window is not None:
        seen, last_reached = max(seen, first - window + 1), min(end, before - 1 + window)
    if seen < before and first < last_reached:
        hides = window if window is not None and last_reached - seen > window else None
        rows = query.rows(first, last_reached), key.rows(seen, before)
        yield Tile(samples, *rows, first, seen, causal=False, window=hides)
    if first < keys[1]:
        hides = window if window is not None and end - first > window else None
        yield Tile(samples, query.rows(first, end), key.rows(first, end), first, first, causal=True, window=hides)
