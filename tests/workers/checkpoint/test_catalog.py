"""What a folder of checkpoints says: what is whole, what is known not to be, and what nobody knows."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest
from checkpoint_files import saved

from manta.workers.checkpoint.catalog import (
    MANIFEST,
    Condition,
    Listing,
    Manifest,
    checkpoint_at,
    checkpoint_path,
    complete_checkpoints,
    generation_of,
    list_checkpoints,
    manifest_of,
    newest_usable,
    next_generation,
    seal,
)
from manta.workers.checkpoint.checksums import DamagedCheckpoint, FileSums, UnreadableCheckpoint
from manta.workers.checkpoint.pruning import prune
from manta.workers.errors import CheckpointError

COMPLETE, INCOMPLETE, UNKNOWN = Condition.COMPLETE, Condition.INCOMPLETE, Condition.UNKNOWN
ERRORS = (errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


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

        calls = ((os, "open"), (os, "listdir"), (os, "scandir"), (os, "stat"), (io, "FileIO"))
        for module, name in calls:
            monkeypatch.setattr(module, name, refuse(getattr(module, name)))

    return start


def test_complete_save_is_whole_and_an_interrupted_or_damaged_one_is_not(tmp_path):
    saved(tmp_path, 10)
    (saved(tmp_path, 20) / MANIFEST).unlink()
    (saved(tmp_path, 30) / "data").write_bytes(b"1234")
    (saved(tmp_path, 40) / "data").unlink()
    (saved(tmp_path, 50) / MANIFEST).write_bytes(b"{")
    checkpoint_path(tmp_path, 60, 1).write_bytes(b"no folder")
    assert conditions(tmp_path) == [COMPLETE, *[INCOMPLETE] * 5]
    assert [manifest.step for _, manifest in complete_checkpoints(tmp_path)] == [10]


def test_checkpoint_copied_under_the_name_of_another_or_from_another_job_is_damaged(tmp_path):
    own, foreign = saved(tmp_path, 10), saved(tmp_path / "other", 30)
    shutil.copytree(foreign, checkpoint_path(tmp_path, 20, 2))
    with pytest.raises(DamagedCheckpoint, match="is that of step-00000030-generation-1 of j: another checkpoint was"):
        manifest_of(checkpoint_path(tmp_path, 20, 2))
    assert newest_usable(tmp_path)[0] == own
    assert [each.condition for each in list_checkpoints(tmp_path, "j").checkpoints] == [COMPLETE, INCOMPLETE]
    assert "is of j, and not of k" in list_checkpoints(tmp_path, "k").checkpoints[0].problem
    assert prune(tmp_path, 1, generation=1, job="j") == [], "what is not its own does not count as newer"


def test_path_means_the_checkpoint_there_or_the_newest_whole_one_in_the_folder(tmp_path):
    older, newer = saved(tmp_path, 5), saved(tmp_path, 6)
    assert [checkpoint_at(place) for place in (older, newer, tmp_path)] == [older, newer, newer]
    (newer / "data").unlink()
    assert checkpoint_at(tmp_path) == older
    copy = older.rename(tmp_path / "copy")
    assert checkpoint_at(copy) == copy
    (newer / MANIFEST).unlink()
    assert checkpoint_at(newer) == newer, "reading it tells what is wrong with it"
    with pytest.raises(CheckpointError, match=r"no complete checkpoint at .*; .*manifest\.json is missing"):
        checkpoint_at(tmp_path)


@pytest.mark.parametrize("number", ERRORS)
def test_path_that_cannot_be_read_is_an_unreadable_checkpoint(tmp_path, fail, number):
    path = saved(tmp_path, 10).rename(tmp_path / "copy")
    fail(path, number)
    with pytest.raises(UnreadableCheckpoint, match=os.strerror(number)):
        checkpoint_at(path)


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("name", ["", MANIFEST, "data"])
def test_checkpoint_with_an_unreadable_file_is_unknown_and_not_pruned(tmp_path, fail, name, number):
    saved(tmp_path, 10)
    newest = saved(tmp_path, 20)
    fail(newest / name, number)
    assert conditions(tmp_path) == [COMPLETE, UNKNOWN]
    problem = list_checkpoints(tmp_path).checkpoints[1].problem
    assert str(newest) in problem and os.strerror(number) in problem
    with pytest.raises(UnreadableCheckpoint):
        newest_usable(tmp_path)
    assert prune(tmp_path, 1, generation=9) == []


@pytest.mark.parametrize("number", ERRORS)
def test_checkpoints_of_a_folder_that_cannot_be_listed_are_unknown(tmp_path, fail, number):
    path = saved(tmp_path, 10)
    fail(tmp_path, number)
    listing = list_checkpoints(tmp_path)
    assert (listing.checkpoints, listing.exists) == ((), True)
    condition, problem = listing.condition_of(str(path), [str(path)])
    assert condition is UNKNOWN and os.strerror(number) in problem
    assert listing.condition_of(str(path), [])[0] is UNKNOWN
    for ask in (next_generation, newest_usable):
        with pytest.raises(UnreadableCheckpoint):
            ask(tmp_path)


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "an interrupted save"])
def test_checkpoint_is_unknown_if_its_folder_has_none_of_the_saved_ones(tmp_path, left):
    folder = tmp_path / "checkpoints"
    path = str(saved(folder, 10))
    folder.rename(tmp_path / "elsewhere")
    if left != "nothing":
        folder.mkdir()
    if left == "an interrupted save":
        checkpoint_path(folder, 20, 2).mkdir()
    listing = list_checkpoints(folder)
    assert listing.exists == (left != "nothing")
    condition, problem = listing.condition_of(path, [path])
    assert condition is UNKNOWN and str(folder) in problem
    assert listing.condition_of(path, [])[0] is INCOMPLETE, "nothing is known to have been saved here"


@pytest.mark.parametrize(
    ("other", "condition"),
    [("whole", INCOMPLETE), ("damaged", INCOMPLETE), ("unrecorded", INCOMPLETE), ("unreadable", UNKNOWN)],
)
def test_checkpoint_missing_among_others_is_gone_unless_they_cannot_be_read(tmp_path, fail, other, condition):
    gone, there = (saved(tmp_path, step) for step in (10, 20))
    shutil.rmtree(gone)
    if other == "damaged":
        (there / MANIFEST).unlink()
    elif other == "unreadable":
        fail(there, errno.EIO)
    everything = [str(gone), *([] if other == "unrecorded" else [str(there)])]
    assert list_checkpoints(tmp_path).condition_of(str(gone), everything)[0] is condition


def test_checkpoints_are_unknown_if_a_file_stands_in_place_of_their_folder(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.write_bytes(b"")
    assert list_checkpoints(folder).condition_of("/x", ["/x"])[0] is UNKNOWN
    assert list_checkpoints(tmp_path / "none") == Listing(tmp_path / "none", exists=False)


def test_manifest_gives_the_total_size_and_the_sums_of_each_of_its_files(tmp_path):
    manifest = Manifest("j", 1, 10, {"a": 5, "b": 7}, {}, blocks={"a": [1, 2], "b": [3]}, block_bytes=4)
    assert manifest.bytes == 12
    assert manifest.sums(tmp_path / "a") == FileSums(5, (1, 2), 4)
    assert Manifest("j", 1, 10, {"a": 5}, {}).sums(tmp_path / "a").blocks is None, "an older one has none"
    with pytest.raises(DamagedCheckpoint, match=r"c is not in manifest\.json"):
        manifest.sums(tmp_path / "c")


def test_checkpoint_that_exists_is_looked_up_with_its_own_condition_and_problem(tmp_path):
    whole, broken = saved(tmp_path, 10), saved(tmp_path, 20)
    (broken / "data").unlink()
    listing, everything = list_checkpoints(tmp_path), [str(whole), str(broken)]
    assert listing.condition_of(str(whole), everything) == (COMPLETE, "")
    condition, problem = listing.condition_of(str(broken), everything)
    assert condition is INCOMPLETE and "data is missing" in problem


def test_missing_checkpoint_folder_is_reported_differently_from_an_empty_one(tmp_path):
    path = str(checkpoint_path(tmp_path / "c", 10, 1))
    assert list_checkpoints(tmp_path / "c").condition_of(path, [path])[1] == f"the folder {tmp_path / 'c'} is not there"
    (tmp_path / "c").mkdir()
    assert "holds none of the checkpoints" in list_checkpoints(tmp_path / "c").condition_of(path, [path])[1]


def test_next_generation_is_above_all_that_names_of_checkpoints_mention(tmp_path):
    assert generation_of(checkpoint_path("/c", 10, 7)) == 7
    assert generation_of("/c/notes") is None
    assert next_generation(tmp_path) == next_generation(tmp_path / "none") == 1
    assert complete_checkpoints(tmp_path / "none") == []
    checkpoint_path(tmp_path, 10, 7).mkdir()
    saved(tmp_path, 20, 3)
    assert next_generation(tmp_path) == 8, "also of one that was interrupted"


def test_checkpoints_are_ordered_by_generation_and_step_numerically(tmp_path):
    made = [saved(tmp_path, *each) for each in ((100_000_000, 9), (99_999_999, 10), (100_000_000, 10), (5, 11))]
    assert [path for path, _ in complete_checkpoints(tmp_path)] == made
    assert newest_usable(tmp_path) == (made[-1], [])
    assert next_generation(tmp_path) == 12


def test_no_file_stays_open_after_sealing_listing_or_reading_checkpoints(tmp_path):
    """A control plane looks at all folders again and again for as long as it runs."""

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    saved(tmp_path, 10)
    (saved(tmp_path, 20) / "data").write_bytes(b"1234")
    assert conditions(tmp_path) == [COMPLETE, INCOMPLETE]
    assert newest_usable(tmp_path)[0] == checkpoint_path(tmp_path, 10, 1)
    assert open_files() == before


@pytest.mark.parametrize("content", [None, b"1234"])
def test_checkpoint_with_missing_or_short_files_is_not_sealed(tmp_path, content):
    path = checkpoint_path(tmp_path, 10, 1)
    path.mkdir()
    if content is not None:
        (path / "data").write_bytes(content)
    with pytest.raises(OSError, match="all nodes must share"):
        seal(path, Manifest("j", 1, 10, {"data": 5}, {}))
    assert not (path / MANIFEST).exists()


def test_manifest_is_synced_before_its_rename_and_both_folders_after_it(tmp_path, monkeypatch):
    done, rename, real = [], Path.rename, os.fsync
    path = checkpoint_path(tmp_path, 10, 1)

    def fsync(descriptor):
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append((place, place.stat().st_size if place.is_file() else None))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", lambda old, new: done.append("renamed") or rename(old, new))
    saved(tmp_path, 10)
    size = (path / MANIFEST).stat().st_size
    assert done == [(path / f".{MANIFEST}", size), "renamed", (path, None), (tmp_path, None)]


def rewritten(path: Path, **changes: object) -> None:
    """A manifest as an older release wrote it, without a checksum, whose fields somebody has changed."""
    document = json.loads((path / MANIFEST).read_bytes())
    del document["crc32"]
    (path / MANIFEST).write_text(json.dumps({**document, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"files": []}, {"spec": []}, {"numbers": []}, {"step": "10"}, {"generation": None}, {"files": {"data": "5"}},
        {"loss_scale": 1.0}, {"loss_scale": [1.0]}, {"loss_scale": [1, 2]}, {"loss_scale": [1.0, float("inf")]},
        {"unknown": 1}, {"block_bytes": 0}, {"block_bytes": "4"}, {"blocks": []}, {"blocks": {"other": [1]}},
        {"blocks": {"data": []}},
    ],
)  # fmt: skip
def test_manifest_without_a_checksum_is_refused_if_a_field_has_a_wrong_type(tmp_path, changes):
    path = saved(tmp_path, 10)
    rewritten(path, loss_scale=[1.0, 2.0], numbers={})
    assert manifest_of(path).loss_scale == [1.0, 2.0]
    saved_again = saved(tmp_path, 20)
    rewritten(saved_again, **changes)
    with pytest.raises(DamagedCheckpoint, match="is not a manifest"):
        manifest_of(saved_again)


def test_folder_in_the_place_of_a_manifest_is_damage_and_no_interrupted_save(tmp_path):
    path = saved(tmp_path, 10) / MANIFEST
    path.unlink()
    path.mkdir()
    with pytest.raises(DamagedCheckpoint) as caught:
        manifest_of(path.parent)
    assert "interrupted" not in str(caught.value)
