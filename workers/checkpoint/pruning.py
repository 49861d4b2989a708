"""Which durable checkpoints are deleted. The rules are pure functions of a folder's listing.

Only what could be read is deleted: a checkpoint that may or may not be complete is neither deleted nor counted. And
nothing is deleted in favour of a training that has started again at step 0: `began` is the generation that did, and
checkpoints of earlier generations are older, but may be of later steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path

from manta.workers.checkpoint.catalog import (
    MANIFEST,
    Condition,
    ListedCheckpoint,
    frozen_folders,
    list_checkpoints,
)
from manta.workers.errors import CheckpointError
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location


def to_prune(
    listed: Sequence[ListedCheckpoint], keep: int, generation: int, undoes: int = 0, began: int = 0, step: int = 0
) -> list[ListedCheckpoint]:
    """Of the checkpoints `listed`, in order of creation: all except the newest `keep` complete ones, and those known to
    be incomplete that were begun before `step` of `generation`: remains of what could not be saved, or not be removed.

    `undoes`: number of steps that may yet be undone, with their checkpoints; one from before them is kept too, and the
    one that will replace it. `began`: no checkpoint of an earlier generation is deleted while any of those is complete
    or unknown.
    """
    own = [checkpoint for checkpoint in listed if checkpoint.generation >= began]
    earlier = [checkpoint for checkpoint in listed if checkpoint.generation < began]
    complete = [checkpoint for checkpoint in own if checkpoint.condition is Condition.COMPLETE]
    to_delete = complete[:-keep]
    if undoes:
        safe = [checkpoint for checkpoint in complete if checkpoint.step <= complete[-1].step - undoes]
        successors = [checkpoint for checkpoint in to_delete if checkpoint not in safe]
        to_delete = [checkpoint for checkpoint in to_delete if checkpoint not in (*safe[-1:], *successors[:1])]
    if all(checkpoint.condition is Condition.INCOMPLETE for checkpoint in earlier):
        own = list(listed)
    incomplete = [checkpoint for checkpoint in own if checkpoint.condition is Condition.INCOMPLETE]
    return [
        *to_delete,
        *(checkpoint for checkpoint in incomplete if (checkpoint.generation, checkpoint.step) < (generation, step)),
    ]


def to_undo(listed: Sequence[ListedCheckpoint], step: int, began: int) -> list[ListedCheckpoint]:
    """Of the checkpoints `listed`, the complete ones of steps above `step`, by generation `began` and later."""
    complete = [checkpoint for checkpoint in listed if checkpoint.condition is Condition.COMPLETE]
    return [checkpoint for checkpoint in complete if checkpoint.step > step and checkpoint.generation >= began]


def prune(
    folder: str | Location,
    keep: int,
    generation: int,
    undoes: int = 0,
    began: int = 0,
    step: int = 0,
    job: str | None = None,
) -> list[Location]:
    """Delete what `to_prune` returns of the checkpoints of `job`, and frozen weights that no other refers to. Returns
    the checkpoints that were deleted; the rest stays."""
    listed = list_checkpoints(folder, job).checkpoints
    removed = _removed(to_prune(listed, keep, generation, undoes, began, step))
    remove_unused_frozen(folder, [each for each in listed if each.path not in removed], (generation, step))
    return removed


def remove_unused_frozen(
    folder: str | Location, left: Collection[ListedCheckpoint], before: tuple[int, int] | None = None
) -> None:
    """Delete the frozen weights in `folder` that none of the checkpoints which are `left` refers to; none while one of
    these cannot be read. `before`: generation and step; only those begun earlier are deleted, since others may be
    about to be referred to."""
    if any(each.condition is Condition.UNKNOWN for each in left):
        return
    used = {each.manifest.frozen.folder for each in left if each.manifest is not None and each.manifest.frozen}
    with contextlib.suppress(CheckpointError):
        for path, step, generation in frozen_folders(folder):
            if path.name not in used and (before is None or (generation, step) < before):
                remove(path)


def remove_after(folder: str | Location, step: int, began: int = 0) -> list[Location]:
    """Delete what `to_undo` returns. Returns what was deleted; the rest stays."""
    return _removed(to_undo(list_checkpoints(folder).checkpoints, step, began))


def remove_newer(folder: str | Location, than: str) -> list[Location]:
    """Delete the checkpoints that were created after the one called `than`, complete or not; none if that one does not
    exist. Returns what was deleted; the rest stays."""
    listed = list_checkpoints(folder).checkpoints
    names = [checkpoint.path.name for checkpoint in listed]
    newer = listed[names.index(than) + 1 :] if than in names else ()
    return _removed([checkpoint for checkpoint in newer if checkpoint.condition is not Condition.UNKNOWN])


def remove(checkpoint: Location) -> bool:
    """Delete one checkpoint, its manifest first; returns whether nothing of it is left. Of one that was put elsewhere,
    with a link in its place, only the link is deleted."""
    files = files_of(checkpoint)
    if isinstance(checkpoint, Path) and checkpoint.is_symlink():
        with contextlib.suppress(OSError):
            checkpoint.unlink()
        return _is_gone(checkpoint)
    with contextlib.suppress(OSError):
        files.remove(checkpoint / MANIFEST)  # first, so that a half-deleted one never counts as complete
    files.remove_folder(checkpoint)
    return _is_gone(checkpoint)


def _removed(to_delete: Sequence[ListedCheckpoint]) -> list[Location]:
    return [checkpoint.path for checkpoint in to_delete if remove(checkpoint.path)]


def _is_gone(path: Location) -> bool:
    try:
        return not files_of(path).is_there(path)
    except OSError:
        return False
