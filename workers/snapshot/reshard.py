"""Resharding: snapshots of one layout are read by the ranks of another.

The table in a snapshot file gives the position of each rectangle of a layout-independent tensor in its payload. A rank
of any layout reads what it needs from the files of all ranks of the old layout, and verifies each block that it reads.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from manta.workers.checkpoint.checksums import BLOCK_BYTES
from manta.workers.checkpoint.durable import Rectangle, Rectangles
from manta.workers.checkpoint.state_parts import agree, load_parts, needed_rectangles, part_lengths
from manta.workers.comm.comm import Comm
from manta.workers.engine import Engine
from manta.workers.errors import CheckpointError
from manta.workers.parallel.data.state import FROZEN, MODEL, same_state
from manta.workers.snapshot.snapshot_file import SnapshotFile

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangle."""


def describe(job: str, layout: dict[str, Any], engine: Engine, comm: Comm) -> dict[str, Any]:
    """The table of a rank's snapshots, which describes `Engine.parts`; `layout` is the spec's `parallel` as JSON.

    `rank` is the first of the ranks with the same state, which may use each other's files.

    The payload has the parts one after the other. A rectangle of trained parameters is in each part that has elements
    of those, from element `start` on, with its rows `stride` elements apart; one of frozen parameters is in their part.
    """
    parts, at = {}, 0
    for part in engine.parts():
        parts[part.name] = {"at": at, "length": part.length, "dtype": str(part.dtype).removeprefix("torch.")}
        at += part.length * part.dtype.itemsize
    rectangles = needed_rectangles(engine)
    return {
        "job": job,
        "rank": same_state(engine.parts())[0],
        "world_size": comm.size("world"),
        "layout": layout,
        "parts": parts,
        "pieces": [astuple(rectangle) for rectangle in rectangles[MODEL]],
        "frozen": [astuple(rectangle) for rectangle in rectangles.get(FROZEN, ())],
    }


@dataclass(frozen=True)
class ReshardedState:
    """A rank's state read from the snapshots of another layout."""

    parts: dict[str, torch.Tensor]
    """By the parts' names, on the CPU; zero where there is no rectangle."""
    note: bytes
    """The note of rank 0."""


def load_from_snapshots(
    paths: Sequence[str | Path], step: int, rectangles: Rectangles, lengths: Mapping[str, int]
) -> ReshardedState:
    """Read `rectangles` at `step` from the snapshot files at `paths`, of any ranks of one layout, into new parts with
    the given numbers of elements; parts that have no rectangles are small and read as they are. All parts of trained
    parameters have the same rectangles.

    Raises DamagedCheckpoint naming file and byte; CheckpointError if the files do not hold the step, are of another
    model, or lack something, which it names.
    """
    parts = {name: torch.zeros(lengths[name]) for name in rectangles}
    trained = [name for name in rectangles if name != FROZEN]
    with ExitStack() as stack:
        sources = [_Source(stack, Path(path), step) for path in paths]
        if not sources:
            raise CheckpointError(f"no snapshot files to read step {step} from")
        for names in (trained, [FROZEN]):
            for rectangle in rectangles.get(names[0], ()):
                for source, stored, box in _cover(rectangle, sources, step):
                    for name in names:
                        there = _within(stored, source.view(name, stored), box)
                        _within(rectangle, rectangle.view(parts[name]), box).copy_(there)
        first = min(sources, key=lambda source: source.rank)
        parts |= {name: first.tensor(name).clone() for name in lengths if name not in rectangles}
        note = first.note() if first.rank == 0 else b""
        for source in sources:
            source.check_unchanged()
    return ReshardedState(parts, note)


class _Source:
    """One file, and its contents for one step."""

    def __init__(self, stack: ExitStack, path: Path, step: int):
        self._file, self._step = SnapshotFile.open(path, mmap.ACCESS_COPY), step
        stack.callback(self._file.close)
        self._slot = self._file.slot_of(step)
        self._sums = self._file.sealed_sums(self._slot)
        self._checked: set[int] = set()
        table = self._file.table()
        try:
            self.rank: int = table["rank"]
            self._parts: dict[str, dict[str, Any]] = table["parts"]
            self.rectangles: dict[str, list[Rectangle]] = {}
            for name, shape, offsets, sizes, start, stride in (*table["pieces"], *table.get("frozen", ())):
                rectangle = Rectangle(name, tuple(shape), tuple(offsets), tuple(sizes), start, stride)
                self.rectangles.setdefault(name, []).append(rectangle)
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} does not say what it consists of") from error

    def view(self, part: str, rectangle: Rectangle) -> torch.Tensor:
        """The elements of one of its rectangles, verified."""
        rows, stride = (rectangle.sizes[0], rectangle.stride) if len(rectangle.sizes) == 2 else (1, 0)
        return rectangle.view(
            self.tensor(part, rectangle.start, rectangle.start + (rows - 1) * stride + rectangle.sizes[-1])
        )

    def tensor(self, part: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        """One part, of which the elements from `start` to `end` are verified."""
        entry = self._parts[part]
        dtype = getattr(torch, entry["dtype"])
        self._check(*(entry["at"] + dtype.itemsize * at for at in (start, entry["length"] if end is None else end)))
        at = self._file.form.payload_at(self._slot) + entry["at"]
        return torch.frombuffer(self._file.memory, dtype=dtype, count=entry["length"], offset=at)

    def note(self) -> bytes:
        """The note, verified."""
        self._check_block(self._file.form.blocks - 1)
        return self._file.note(self._slot)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the step was overwritten meanwhile."""
        if self._file.step(self._slot) != self._step:
            raise CheckpointError(f"{self._file.path} was overwritten while step {self._step} was being read")

    def _check(self, start: int, end: int) -> None:
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            self._check_block(block)

    def _check_block(self, block: int) -> None:
        if self._sums is not None and block not in self._checked:
            self._file.check_block(self._slot, block, self._sums)
            self._checked.add(block)


def _cover(rectangle: Rectangle, sources: list[_Source], step: int) -> Iterator[tuple[_Source, Rectangle, Box]]:
    """Which boxes of `rectangle` come from which stored rectangle; together they cover it, each element once."""
    todo: list[Box] = [(rectangle.offsets, rectangle.sizes)]
    for source in sources:
        for stored in source.rectangles.get(rectangle.name, ()):
            if not todo:
                return
            if stored.shape != rectangle.shape:
                raise CheckpointError(
                    f"the snapshots of step {step} are of another model: {rectangle.name} should be {rectangle.shape}, "
                    f"found {stored.shape}"
                )
            left: list[Box] = []
            for box in todo:
                common = intersection(box, (stored.offsets, stored.sizes))
                if common is None:
                    left.append(box)
                else:
                    yield source, stored, common
                    left += rest(box, common)
            todo = left
    if todo:
        offsets, sizes = todo[0]
        raise CheckpointError(
            f"the snapshots of step {step} do not hold all of {rectangle.name}: {sizes} elements from {offsets} on are "
            f"in none of the {len(sources)} files, which are of ranks {sorted(source.rank for source in sources)}"
        )


def intersection(first: Box, second: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    offsets = tuple(max(a, b) for a, b in zip(first[0], second[0], strict=True))
    ends = zip(*first, *second, strict=True)
    sizes = tuple(min(a + m, b + n) - at for at, (a, m, b, n) in zip(offsets, ends, strict=True))
    return (offsets, sizes) if min(sizes) > 0 else None


def rest(box: Box, hole: Box) -> list[Box]:
    """`box` without `hole`, which is within it, as boxes that do not overlap."""
    offsets, sizes = list(box[0]), list(box[1])
    boxes: list[Box] = []
    for dim, (start, length) in enumerate(zip(*hole, strict=True)):
        for at, end in ((offsets[dim], start), (start + length, offsets[dim] + sizes[dim])):
            if at < end:
                before, after = tuple(offsets[:dim]), tuple(offsets[dim + 1 :])
                boxes.append(((*before, at, *after), (*sizes[:dim], end - at, *sizes[dim + 1 :])))
        offsets[dim], sizes[dim] = start, length
    return boxes


def _within(rectangle: Rectangle, values: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (at, length) in enumerate(zip(*box, strict=True)):
        values = values.narrow(dim, at - rectangle.offsets[dim], length)
    return values


def restore_from_snapshots(engine: Engine, comm: Comm, paths: Sequence[str], step: int) -> bytes:
    """Restore the state of `step` of this rank from files of another layout; returns the note of their rank 0.

    Raises CheckpointError on every rank as soon as one of them cannot read its part. No rank's state has changed then.
    """
    problem: CheckpointError | None = None
    try:
        state = load_from_snapshots(paths, step, needed_rectangles(engine), part_lengths(engine))
    except CheckpointError as error:
        problem = error
    agree(comm, problem)
    load_parts(engine, state.parts)
    return state.note
