"""What of a job's state one rank has: rectangles of layout-free tensors, by the kinds of state."""

from __future__ import annotations

from workers.checkpoint.durable import FROZEN, KINDS, Rectangles
from workers.checkpoint.rectangles import rectangles_of
from workers.engine import Engine
from workers.parallel.data.flat import Range


def needed_rectangles(engine: Engine) -> Rectangles:
    """All that the rank keeps."""
    optimizer = engine.optimizer
    return _of_ranges(engine, optimizer.held, optimizer.frozen_held, owned_only=False)


def owned_rectangles(engine: Engine) -> Rectangles:
    """What the rank saves: over all ranks each element once."""
    optimizer = engine.optimizer
    return _of_ranges(engine, optimizer.owned, optimizer.frozen_owned, owned_only=True)


def part_lengths(engine: Engine) -> dict[str, int]:
    """Elements that the rank keeps."""
    return dict.fromkeys(KINDS, len(engine.optimizer.exp_avg)) | {FROZEN: len(engine.optimizer.frozen)}


def _of_ranges(engine: Engine, trained: list[Range], frozen: Range, owned_only: bool) -> Rectangles:
    optimizer, index = engine.optimizer, engine.comm.index("tensor")
    of_trained = rectangles_of(optimizer.flat, optimizer.held, trained, owned_only, index)
    of_frozen = rectangles_of(optimizer.flat, [optimizer.frozen_held], [frozen], owned_only, index)
    return dict.fromkeys(KINDS, of_trained) | {FROZEN: of_frozen}
