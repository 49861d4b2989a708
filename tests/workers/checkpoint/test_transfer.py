"""A copy of a checkpoint is whole and the same, or there is none."""

import json
from dataclasses import asdict

import pytest
from checkpoint_files import CONTENT, made

from manta.workers.checkpoint.catalog import MANIFEST, Condition, RemovedCheckpoint, inspect, verify
from manta.workers.checkpoint.checksums import CheckedFile, DamagedCheckpoint
from manta.workers.checkpoint.pruning import remove
from manta.workers.checkpoint.transfer import LocationExists, copy
from manta.workers.storage.files import files_of


@pytest.mark.parametrize("way", ["from here to here", "up", "down"])
def test_copied_checkpoint_has_every_file_and_byte_of_its_source(way, tmp_path, request):
    source = made(tmp_path / "a") if way != "down" else made(request.getfixturevalue("bucket") / "a")
    target = tmp_path / "b" if way != "up" else request.getfixturevalue("bucket") / "b"
    progress = []
    manifest = copy(source, target / source.name, lambda done, of: progress.append((done, of)))
    assert verify(target / source.name) == verify(source) == manifest
    assert progress[-1] == (len(CONTENT), len(CONTENT)) and [done for done, _ in progress] == sorted(
        done for done, _ in progress
    )
    assert sorted(files_of(target).names(target / source.name)) == ["data", "empty", MANIFEST]


@pytest.mark.parametrize("block_bytes", [1_000_000, 5_000_000, 8_000_000])
def test_copied_checkpoint_keeps_the_checksum_block_size_of_its_source(tmp_path, block_bytes):
    manifest = copy(made(tmp_path / "a", block_bytes=block_bytes), tmp_path / "b")
    assert manifest.block_bytes == block_bytes and verify(tmp_path / "b") == manifest


@pytest.mark.parametrize("blocks", [None, {}])
def test_copy_of_a_checkpoint_without_checksums_has_none_either(tmp_path, blocks):
    source = made(tmp_path / "a")
    document = {**asdict(verify(source)), "blocks": blocks}
    files_of(source).write_atomically(source / MANIFEST, json.dumps(document).encode())
    assert copy(source, tmp_path / "b").blocks == blocks
    assert (tmp_path / "b" / "data").read_bytes() == CONTENT


def test_copy_onto_an_existing_checkpoint_is_refused_and_leaves_it(tmp_path):
    source, other = made(tmp_path / "a"), made(tmp_path / "b", 20)
    with pytest.raises(LocationExists, match=f"{other} already exists: choose another folder, or remove it"):
        copy(source, other)
    assert verify(other).step == 20


def test_interrupted_copy_of_a_checkpoint_is_started_over(tmp_path):
    source, target = made(tmp_path / "a"), tmp_path / "b"
    target.mkdir()
    (target / "data").write_bytes(b"half")
    assert inspect(target)[0] is Condition.INCOMPLETE
    copy(source, target)
    assert inspect(target)[0] is Condition.COMPLETE


@pytest.mark.parametrize("name", ["thesis.tex", "folder"])
def test_copy_into_a_folder_with_other_files_is_refused_and_clears_nothing(tmp_path, name):
    source, theirs = made(tmp_path / "a"), tmp_path / "theirs"
    (theirs / "folder").mkdir(parents=True)
    (theirs / "thesis.tex").write_text("years of work")
    (theirs / "data").write_bytes(b"half")
    with pytest.raises(LocationExists, match=f"{theirs} already exists: choose another folder"):
        copy(source, theirs)
    assert (theirs / name).exists() and (theirs / "data").read_bytes() == b"half"


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/b", "..", ""])
def test_manifest_that_names_files_outside_its_folder_is_refused(tmp_path, name):
    source = made(tmp_path / "a")
    manifest = verify(source)
    files_of(source).write_atomically(
        source / MANIFEST, json.dumps({**asdict(manifest), "files": {name: 1}, "blocks": None}).encode()
    )
    with pytest.raises(DamagedCheckpoint, match=f"{MANIFEST} is not a manifest"):
        copy(source, tmp_path / "b" / "c")
    assert not (tmp_path / "b").exists()


def test_copy_of_a_damaged_checkpoint_is_refused_and_leaves_no_target(tmp_path):
    source, target = made(tmp_path / "a"), tmp_path / "b"
    with (source / "data").open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"\xff\xff")
    with pytest.raises(DamagedCheckpoint, match=f"the checkpoint at {source} is damaged: data is not what was written"):
        copy(source, target)
    assert not target.exists()
    with pytest.raises(DamagedCheckpoint, match=f"{MANIFEST} is missing"):
        copy(tmp_path / "a", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_copy_whose_bytes_change_on_the_way_is_refused_and_removed(tmp_path, monkeypatch):
    source, target, read = made(tmp_path / "a"), tmp_path / "b", CheckedFile.readinto

    def flipped(stream, buffer):
        count = read(stream, buffer)
        if count:
            memoryview(buffer).cast("B")[0] ^= 1
        return count

    monkeypatch.setattr(CheckedFile, "readinto", flipped)
    with pytest.raises(DamagedCheckpoint, match=f"the checkpoint at {target} is damaged: data is not what was read"):
        copy(source, target)
    assert not target.exists()


def test_copy_of_a_checkpoint_pruned_meanwhile_says_it_is_removed_and_leaves_no_part(tmp_path):
    source, target = made(tmp_path / "a"), tmp_path / "b"
    with pytest.raises(RemovedCheckpoint, match=f"the checkpoint at {source} is not there any more: it was removed"):
        copy(source, target, lambda done, of: remove(source))
    assert not target.exists()
    source = made(tmp_path / "a")
    with pytest.raises(RemovedCheckpoint):
        copy(source, target, lambda done, of: [(source / name).unlink(missing_ok=True) for name in ("empty", MANIFEST)])


def test_copy_that_a_store_refuses_in_part_is_not_whole_and_can_be_repeated(tmp_path, wired_bucket, wire):
    source = made(tmp_path / "a")
    wire.meddle = lambda head: "cut" if head.startswith(b"PUT") and b"empty" in head else None
    with pytest.raises(OSError, match="empty"):
        copy(source, wired_bucket / "b")
    wire.meddle = lambda head: None
    assert inspect(wired_bucket / "b")[0] is Condition.INCOMPLETE
    copy(source, wired_bucket / "b")
    assert inspect(wired_bucket / "b")[0] is Condition.COMPLETE
