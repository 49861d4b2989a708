"""Which durable checkpoints are deleted. The rules are pure functions of what a folder holds.

Deleted is only what was read: a checkpoint of which it is not known whether it is whole is neither deleted nor counted.
And nothing is deleted for the sake of a training that began at step 0 meanwhile: `began` is the generation that did,
and what generations before it have saved is older, but may be further.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from workers.checkpoint.catalog import MANIFEST, Condition, ListedCheckpoint, list_checkpoints
from workers.storage.files import files_of
from workers.storage.places import Place


def to_prune(
    listed: Sequence[ListedCheckpoint], keep: int, generation: int, undoes: int = 0, began: int = 0
) -> list[ListedCheckpoint]:
    """Of the checkpoints `listed`, in the order of their making: all but the newest `keep` whole ones, and those of
    generations before `generation` that are known not to be whole.

    `undoes`: how many steps may yet be undone, with their checkpoints; one from before those is kept too, and one that
    takes its place in time. `began`: nothing of generations before this one goes while any of it is whole or unknown.
    """
    own = [each for each in listed if each.generation >= began]
    earlier = [each for each in listed if each.generation < began]
    whole = [each for each in own if each.condition is Condition.WHOLE]
    to_delete = whole[:-keep]
    if undoes and whole:
        safe = [each for each in whole if each.step <= whole[-1].step - undoes]
        successors = [each for each in to_delete if each not in safe]
        to_delete = [each for each in to_delete if each not in (*safe[-1:], *successors[:1])]
    if all(each.condition is Condition.NOT_WHOLE for each in earlier):
        own = list(listed)
    not_whole = [each for each in own if each.condition is Condition.NOT_WHOLE]
    return [*to_delete, *(each for each in not_whole if each.generation < generation)]


def to_undo(listed: Sequence[ListedCheckpoint], step: int, began: int) -> list[ListedCheckpoint]:
    """Of the checkpoints `listed` the whole ones of steps above `step`, by generation `began` and those after it."""
    whole = [each for each in listed if each.condition is Condition.WHOLE]
    return [each for each in whole if each.step > step and each.generation >= began]


def prune(folder: str | Place, keep: int, generation: int, undoes: int = 0, began: int = 0) -> list[Place]:
    """Delete what `to_prune` says. Returns what was deleted; what cannot be stays."""
    return _removed(to_prune(list_checkpoints(folder).checkpoints, keep, generation, undoes, began))


def remove_after(folder: str | Place, step: int, began: int = 0) -> list[Place]:
    """Delete what `to_undo` says. Returns what was deleted; what cannot be stays."""
    return _removed(to_undo(list_checkpoints(folder).checkpoints, step, began))


def remove_newer(folder: str | Place, than: str) -> list[Place]:
    """Delete the checkpoints that were made after the one called `than`, whole or not; none where that is not there.
    Returns what was deleted; what cannot be stays."""
    listed = list_checkpoints(folder).checkpoints
    names = [each.path.name for each in listed]
    newer = listed[names.index(than) + 1 :] if than in names else ()
    return _removed([each for each in newer if each.condition is not Condition.UNKNOWN])


def remove(checkpoint: Place) -> bool:
    """Delete one checkpoint, its manifest first; whether nothing of it is left."""
    files = files_of(checkpoint)
    with contextlib.suppress(OSError):
        files.remove(checkpoint / MANIFEST)  # first, so that a half-deleted one is never taken for whole
    files.remove_folder(checkpoint)
    return _is_gone(checkpoint)


def _removed(to_delete: Sequence[ListedCheckpoint]) -> list[Place]:
    return [each.path for each in to_delete if remove(each.path)]


def _is_gone(path: Place) -> bool:
    try:
        return not files_of(path).is_there(path)
    except OSError:
        return False
