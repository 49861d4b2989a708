"""What a folder of checkpoints says: what is whole, what is known not to be, and what nobody knows."""

from __future__ import annotations

import errno
import io
import os
import shutil
from pathlib import Path

import pytest

from workers.checkpoint.catalog import (
    MANIFEST,
    Condition,
    Listing,
    Manifest,
    checkpoint_path,
    list_checkpoints,
    newest_usable,
    next_generation,
    seal,
    whole_checkpoints,
)
from workers.checkpoint.checksums import UnreadableCheckpoint
from workers.checkpoint.pruning import prune

WHOLE, NOT_WHOLE, UNKNOWN = Condition.WHOLE, Condition.NOT_WHOLE, Condition.UNKNOWN
ERRORS = (errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


def saved(folder: Path, step: int, generation: int = 1) -> Path:
    """A made-up whole checkpoint."""
    path = checkpoint_path(folder, step, generation)
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"12345")
    seal(path, Manifest("j", generation, step, {"data": 5}, {}))
    return path


def conditions(folder: Path) -> list[Condition]:
    return [each.condition for each in list_checkpoints(folder).checkpoints]


@pytest.fixture
def fail(monkeypatch):
    """Makes the system answer with an error for a path and all that lies below it."""

    def start(bad: Path, number: int) -> None:
        def refuse(real):
            def call(path, *args, **kwargs):
                if isinstance(path, str | Path) and Path(path).is_relative_to(bad):
                    raise OSError(number, os.strerror(number), str(path))
                return real(path, *args, **kwargs)

            return call

        calls = ((os, "open"), (os, "listdir"), (os, "scandir"), (os, "stat"), (io, "FileIO"), (Path, "read_bytes"))
        for module, name in calls:
            monkeypatch.setattr(module, name, refuse(getattr(module, name)))

    return start


def test_what_was_saved_is_whole_and_what_was_interrupted_is_not(tmp_path):
    saved(tmp_path, 10)
    (saved(tmp_path, 20) / MANIFEST).unlink()
    (saved(tmp_path, 30) / "data").write_bytes(b"1234")
    (saved(tmp_path, 40) / "data").unlink()
    (saved(tmp_path, 50) / MANIFEST).write_bytes(b"{")
    checkpoint_path(tmp_path, 60, 1).write_bytes(b"no folder")
    assert conditions(tmp_path) == [WHOLE, *[NOT_WHOLE] * 5]
    assert [manifest.step for _, manifest in whole_checkpoints(tmp_path)] == [10]


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("name", ["", MANIFEST, "data"])
def test_what_the_system_does_not_give_out_is_unknown(tmp_path, fail, name, number):
    saved(tmp_path, 10)
    newest = saved(tmp_path, 20)
    fail(newest / name, number)
    assert conditions(tmp_path) == [WHOLE, UNKNOWN]
    problem = list_checkpoints(tmp_path).checkpoints[1].problem
    assert str(newest) in problem and os.strerror(number) in problem
    with pytest.raises(UnreadableCheckpoint):
        newest_usable(tmp_path)
    assert prune(tmp_path, 1, generation=9) == []


@pytest.mark.parametrize("number", ERRORS)
def test_folder_that_cannot_be_listed_says_nothing_about_what_is_in_it(tmp_path, fail, number):
    path = saved(tmp_path, 10)
    fail(tmp_path, number)
    listing = list_checkpoints(tmp_path)
    assert (listing.checkpoints, listing.exists) == ((), True)
    condition, problem = listing.look_up(str(path), [str(path)])
    assert condition is UNKNOWN and os.strerror(number) in problem
    assert listing.look_up(str(path), [])[0] is UNKNOWN
    for ask in (next_generation, newest_usable):
        with pytest.raises(UnreadableCheckpoint):
            ask(tmp_path)


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "an interrupted save"])
def test_folder_that_holds_none_of_what_was_saved_is_not_the_one(tmp_path, left):
    folder = tmp_path / "checkpoints"
    path = str(saved(folder, 10))
    folder.rename(tmp_path / "elsewhere")
    if left != "nothing":
        folder.mkdir()
    if left == "an interrupted save":
        checkpoint_path(folder, 20, 2).mkdir()
    listing = list_checkpoints(folder)
    assert listing.exists == (left != "nothing")
    condition, problem = listing.look_up(path, [path])
    assert condition is UNKNOWN and str(folder) in problem
    assert listing.look_up(path, [])[0] is NOT_WHOLE, "nothing is known to have been saved here"


@pytest.mark.parametrize("other", ["whole", "damaged"])
def test_one_that_is_gone_from_among_others_is_gone(tmp_path, other):
    paths = [saved(tmp_path, step) for step in (10, 20)]
    if other == "damaged":
        (paths[1] / MANIFEST).unlink()
    shutil.rmtree(paths[0])
    everything = [str(path) for path in paths]
    assert list_checkpoints(tmp_path).look_up(everything[0], everything)[0] is NOT_WHOLE


def test_one_that_is_gone_from_among_others_that_cannot_be_read_is_unknown(tmp_path, fail):
    paths = [saved(tmp_path, step) for step in (10, 20)]
    shutil.rmtree(paths[0])
    fail(paths[1], errno.EIO)
    everything = [str(path) for path in paths]
    assert list_checkpoints(tmp_path).look_up(everything[0], everything)[0] is UNKNOWN


def test_file_in_the_place_of_the_folder_is_no_answer(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.write_bytes(b"")
    assert list_checkpoints(folder).look_up("/x", ["/x"])[0] is UNKNOWN
    assert list_checkpoints(tmp_path / "none") == Listing(tmp_path / "none", exists=False)
