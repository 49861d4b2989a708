"""The part of a job's state that one rank has: rectangles of layout-free tensors, by kinds of state."""

from __future__ import annotations

from workers.checkpoint.durable import FROZEN, KINDS, Rectangles
from workers.checkpoint.rectangles import rectangles_of
from workers.engine import Engine
from workers.parallel.data.flat import Range


def needed_rectangles(engine: Engine) -> Rectangles:
    """Rectangles of all that the rank keeps."""
    optimizer = engine.optimizer
    return _of_ranges(engine, optimizer.held, optimizer.frozen_held, owned_only=False)


def owned_rectangles(engine: Engine) -> Rectangles:
    """Rectangles that the rank saves; over all ranks each element is saved once."""
    optimizer = engine.optimizer
    return _of_ranges(engine, optimizer.owned, optimizer.frozen_owned, owned_only=True)


def part_lengths(engine: Engine) -> dict[str, int]:
    """Number of elements that the rank keeps, by kind of state."""
    return dict.fromkeys(KINDS, len(engine.optimizer.exp_avg)) | {FROZEN: len(engine.optimizer.frozen)}


def _of_ranges(engine: Engine, trained: list[Range], frozen: Range, owned_only: bool) -> Rectangles:
    optimizer, index = engine.optimizer, engine.comm.index("tensor")
    of_trained = rectangles_of(optimizer.flat, optimizer.held, trained, owned_only, index)
    of_frozen = rectangles_of(optimizer.flat, [optimizer.frozen_held], [frozen], owned_only, index)
    return dict.fromkeys(KINDS, of_trained) | {FROZEN: of_frozen}
