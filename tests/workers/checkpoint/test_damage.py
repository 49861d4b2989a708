"""A checkpoint that was interrupted at any byte, or damaged later, is named with file and byte and never half-used;
the one before it is used instead."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoint_files import saved as saved_at
from checkpoint_programs import bits, is_still, job, load_damaged, lone, save, save_on_a_full_disk, train_and_save
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.workers.checkpoint import checksums, durable
from manta.workers.checkpoint.catalog import (
    Condition,
    Manifest,
    checkpoint_path,
    complete_checkpoints,
    inspect,
    manifest_of,
    newest_usable,
    seal,
)
from manta.workers.checkpoint.checksums import DamagedCheckpoint, FileSums, SummingFile
from manta.workers.checkpoint.pruning import prune
from manta.workers.comm.shared_work import SharedWork
from manta.workers.config import ParallelConfig
from manta.workers.errors import CheckpointError
from manta.workers.protocol.messages import Resume
from manta.workers.storage.files import LocalFiles
from manta.workers.trainer import Trainer

BLOCK = 4096
MODEL = {"hidden_size": 16}
DATA, CONTENTS, METADATA, MANIFEST = "__0_0.distcp", "contents.json", ".metadata", "manifest.json"
LAYOUT = {"tensor": 2, "pipeline": 2}


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory) -> tuple[Path, list[tuple[float, float]], list[list[torch.Tensor]]]:
    """Checkpoints of steps 1 and 2 in small blocks, by one rank; (loss, norm) of steps 1 to 3; the states 0 to 3."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = lone(job(corpus, {}, model=MODEL), folder)
    trainer.restore(Resume())
    steps, states = [], [bits(trainer)]
    with patch.object(checksums, "BLOCK_BYTES", BLOCK):
        for step in (1, 2, 3):
            statistics = trainer.train_step()
            steps.append((statistics.loss, statistics.grad_norm))
            states.append(bits(trainer))
            if step < 3:
                save(trainer)
    return folder, steps, states


@pytest.fixture(scope="module")
def reader(corpus, tmp_path_factory) -> Trainer:
    """A trainer of the same job that has trained one step of its own."""
    trainer = lone(job(corpus, {}, model=MODEL, train={"seed": 5}), tmp_path_factory.mktemp("reader"))
    trainer.restore(Resume())
    trainer.train_step()
    return trainer


@contextmanager
def copied(folder: Path) -> Iterator[tuple[Path, Path, Path]]:
    """A folder of two checkpoints that may be changed: (folder, the newest one, the one before it)."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "checkpoints"
        shutil.copytree(folder, copy)
        (before, _), (newest, _) = complete_checkpoints(copy)
        yield copy, newest, before


def previous_is_used(folder: Path, before: Path, reason: str) -> bool:
    """Whether the checkpoint before the newest one is used, and that one is skipped for `reason`."""
    used, skipped = newest_usable(folder)
    assert skipped == [reason]
    return used == before


def flip(path: Path, at: int, change: int = 1) -> None:
    """Change one byte."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ change]))


def size_of(folder: Path, name: str) -> int:
    """Bytes of a file of the newest checkpoint."""
    return (complete_checkpoints(folder)[-1][0] / name).stat().st_size


READ = (DATA, CONTENTS, MANIFEST)
"""What a load reads."""


@st.composite
def places(draw: st.DrawFn, folder: Path, names: tuple[str, ...] = (*READ, METADATA)) -> tuple[str, int]:
    """A file of the newest checkpoint and a byte in it, often at an edge."""
    name = draw(st.sampled_from(names))
    last = size_of(folder, name) - 1
    edges = {0, 1, last // 2, last - 1, last, *range(0, last, BLOCK), *range(BLOCK - 1, last, BLOCK)}
    return name, draw(st.sampled_from(sorted(edges)) | st.integers(0, last))


class Killed(Exception):
    """The process died here."""


@contextmanager
def dying_after(budget: int) -> Iterator[None]:
    """The process writes that many bytes more."""
    left, write = [budget], SummingFile.write

    def cut(self: SummingFile, data: Any) -> int:
        content = memoryview(data).cast("B")
        part = content[: left[0]]
        left[0] -= write(self, part)
        if len(part) < len(content):
            raise Killed
        return len(part)

    with patch.object(SummingFile, "write", cut):
        yield


@pytest.fixture(scope="module")
def lengths(saved, reader) -> tuple[int, int]:
    """Bytes of data and in all that a save of generation 2 writes before its manifest."""
    with copied(saved[0]) as (folder, _, _):
        sums = write(reader, checkpoint_path(folder, 2, 2))
        return sums[DATA].size, sum(each.size for each in sums.values())


def write(trainer: Trainer, path: Path) -> dict[str, FileSums]:
    """All of a save but its manifest."""
    checkpoints = trainer.state.checkpoints
    parts = partial(checkpoints._copied_state, None, threading.Event())
    return durable.save(str(path), checkpoints._owned, parts, SharedWork())


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_save_interrupted_at_any_byte_leaves_the_previous_checkpoint_as_the_newest_usable(saved, reader, lengths, data):
    """The real writes, in their order, of the data, of what lies where and of `.metadata`, cut at any byte."""
    size, total = lengths
    last_bytes = st.sampled_from([0, 1, size - 1, size, size + 1, total - 1])
    budget = data.draw(last_bytes | st.integers(0, total - 1), "bytes written")
    with copied(saved[0]) as (folder, newest, before):
        shutil.rmtree(newest)
        path = checkpoint_path(folder, 2, 2)
        with dying_after(budget), pytest.raises(Killed):
            write(reader, path)
        assert sum(file.stat().st_size for file in path.iterdir()) == budget
        reason = f"the checkpoint at {path} is damaged: {MANIFEST} is missing, so its save was interrupted"
        assert previous_is_used(folder, before, reason)
        assert [each for each, _ in complete_checkpoints(folder)] == [before]


@pytest.mark.parametrize("moment", ["fsync", "rename"])
def test_checkpoint_with_an_unfinished_manifest_is_not_used(saved, moment):
    with copied(saved[0]) as (folder, newest, before):
        manifest = manifest_of(newest)
        (newest / MANIFEST).unlink()

        def die(*_: object) -> None:
            raise Killed

        with patch.object(*{"fsync": (os, "fsync"), "rename": (Path, "rename")}[moment], die), pytest.raises(Killed):
            seal(newest, manifest)
        assert (newest / f".{MANIFEST}").exists()
        reason = f"the checkpoint at {newest} is damaged: {MANIFEST} is missing, so its save was interrupted"
        assert previous_is_used(folder, before, reason)
        seal(newest, manifest)
        assert newest_usable(folder) == (newest, [])


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_checkpoint_with_a_truncated_file_is_damaged_and_the_one_before_is_used(saved, data):
    with copied(saved[0]) as (folder, newest, before):
        name, at = data.draw(places(saved[0]))
        size = (newest / name).stat().st_size
        os.truncate(newest / name, at)
        used, (reason,) = newest_usable(folder)
        assert used == before
        assert reason.startswith(f"the checkpoint at {newest} is damaged: {name} ")
        if name != MANIFEST:
            assert reason.endswith(f"{name} is cut off at byte {at}: it should have {size} bytes")
        assert [path for path, _ in complete_checkpoints(folder)] == [before], "the sizes tell a listing too"


@pytest.mark.parametrize("name", [*READ, METADATA])
def test_checkpoint_with_a_missing_file_is_damaged_and_the_one_before_is_used(saved, name):
    with copied(saved[0]) as (folder, newest, before):
        (newest / name).unlink()
        tail = ", so its save was interrupted" if name == MANIFEST else ""
        assert previous_is_used(folder, before, f"the checkpoint at {newest} is damaged: {name} is missing{tail}")
        assert [path for path, _ in complete_checkpoints(folder)] == [before]


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_restore_locates_a_changed_byte_and_leaves_the_state_unchanged(saved, reader, data):
    with copied(saved[0]) as (folder, newest, before):
        (name, at), change = data.draw(places(saved[0], READ)), data.draw(st.integers(1, 255))
        flip(newest / name, at, change)
        state = bits(reader)
        with pytest.raises(DamagedCheckpoint) as caught:
            reader.state.checkpoints.restore(str(newest))
        assert is_still(reader, state)
        reason = str(caught.value)
        start = f"the checkpoint at {newest} is damaged: {name} "
        if name == MANIFEST:
            assert reason.startswith(start)
        else:
            first, size = at // BLOCK * BLOCK, (newest / name).stat().st_size
            block = f"in the {min(BLOCK, size - first)} bytes from byte {first}"
            assert reason == f"{start}is not what was written, {block}"
        assert previous_is_used(folder, before, reason), "a reading of the whole says the same"


def test_cut_or_changed_byte_anywhere_in_a_manifest_is_found(saved):
    """Each of its beginnings, and each change of one of its bytes, is no manifest."""
    with copied(saved[0]) as (_, newest, _):
        file = newest / MANIFEST
        content = file.read_bytes()
        reason = f"is damaged: {MANIFEST} (makes no sense from byte [0-9]+|is not (what was written.*|a manifest))$"
        changed = [content[:end] for end in range(len(content))]
        for at in range(len(content)):
            for bit in (1 << at % 8, 0x20, 0xFF):
                changed.append(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        for each in changed:
            reading = patch.object(LocalFiles, "read", lambda *_, each=each: each)
            with reading, pytest.raises(DamagedCheckpoint, match=reason):
                manifest_of(newest)
        with patch.object(LocalFiles, "read", lambda *_: content):
            assert manifest_of(newest).step == 2


@pytest.mark.parametrize("change", ["flipped", "cut off", "gone", "interrupted"])
def test_run_resumed_from_the_checkpoint_before_a_damaged_one_equals_an_unbroken_one(saved, reader, corpus, change):
    _, steps, states = saved
    with copied(saved[0]) as (folder, newest, before):
        if change == "flipped":
            flip(newest / DATA, 5 * BLOCK)
        elif change == "cut off":
            os.truncate(newest / CONTENTS, 100)
        elif change == "gone":
            (newest / DATA).unlink()
        else:
            (newest / MANIFEST).unlink()
        trainer = lone(job(corpus, {}, model=MODEL), folder, generation=2)

        def use(path: Path, step: int) -> None:
            trainer.restore(Resume("checkpoint", step, str(path)))

        used, (_,) = newest_usable(folder, use)
        assert used == before
        assert trainer.step == 1
        assert is_still(trainer, states[1])
        for step in (2, 3):
            statistics = trainer.train_step()
            assert (statistics.loss, statistics.grad_norm) == steps[step - 1]
            assert is_still(trainer, states[step])


def test_no_checkpoint_is_found_if_all_are_damaged(saved, tmp_path):
    with copied(saved[0]) as (folder, newest, before):
        flip(newest / DATA, 0)
        (before / METADATA).unlink()
        used, reasons = newest_usable(folder)
        assert used is None
        assert [newest.name in reasons[0], before.name in reasons[1]] == [True, True]
    assert newest_usable(tmp_path / "none") == (None, [])


def test_damage_met_by_one_rank_is_reported_by_all_and_changes_no_state(ranks, corpus, tmp_path):
    """The damage lies in the file of a rank of the second stage, which ranks of the first do not read."""
    layout, document = ParallelConfig(**LAYOUT), job(corpus, LAYOUT, model=MODEL)
    ranks.run(layout, train_and_save, document, str(tmp_path), 2)
    ((path, manifest),) = complete_checkpoints(tmp_path)
    assert [name for name in manifest.files if name.endswith("distcp")] == [f"__{rank}_0.distcp" for rank in range(4)]
    assert ranks.run(layout, load_damaged, document, str(path)) == [("none", "", False)] * 4
    flip(path / "__3_0.distcp", 1234)
    size = manifest.files["__3_0.distcp"]
    reason = (
        f"the checkpoint at {path} is damaged: __3_0.distcp is not what was written, in the {size} bytes from byte 0"
    )
    assert ranks.run(layout, load_damaged, document, str(path)) == [("DamagedCheckpoint", reason, True)] * 4
    for rank in range(4):
        (path / f"__{rank}_0.distcp").unlink()
    reason = f"the checkpoint at {path} is damaged: __0_0.distcp is missing"
    assert ranks.run(layout, load_damaged, document, str(path)) == [("DamagedCheckpoint", reason, True)] * 4


def test_save_that_fails_on_one_rank_leaves_no_checkpoint(ranks, corpus, tmp_path):
    """Nothing is sealed before every rank has handed in what it wrote."""
    document = job(corpus, LAYOUT, model=MODEL)
    (first, *others) = ranks.run(ParallelConfig(**LAYOUT), save_on_a_full_disk, document, str(tmp_path))
    assert [kind for kind, _ in first] == [
        "checkpoint_saving", "checkpoint_failed", "checkpoint_saving", "checkpoint_saved"
    ]  # fmt: skip
    assert (
        "the checkpoint of step 1 could not be saved: rank 3: OSError: [Errno 28] No space left on device"
        in first[1][1]
    )
    assert others == [[]] * 3
    ((path, manifest),) = complete_checkpoints(tmp_path)
    assert manifest.step == 2
    assert list(tmp_path.iterdir()) == [path], "what was left of the first one is gone"
    assert newest_usable(tmp_path) == (path, [])


def test_checkpoint_of_another_model_is_an_error_and_no_older_one_is_tried(saved, corpus):
    with copied(saved[0]) as (folder, newest, _):
        trainer = lone(job(corpus, {}, model={**MODEL, "ffn_hidden_size": 32}), folder)

        def use(path: Path, step: int) -> None:
            trainer.restore(Resume("checkpoint", step, str(path)))

        with pytest.raises(CheckpointError, match=f"^the checkpoint at {newest} is of another model: ") as caught:
            newest_usable(folder, use)
        assert type(caught.value) is CheckpointError


def without_sums(path: Path) -> None:
    """Make the manifest one of before there were checksums, and before there was `contents.json`."""
    document = json.loads((path / MANIFEST).read_text())
    for key in ("blocks", "block_bytes", "loss_scale", "crc32"):
        del document[key]
    del document["files"][CONTENTS]
    (path / CONTENTS).unlink()
    (path / MANIFEST).write_text(json.dumps(document))


def test_checkpoint_without_checksums_is_restored(saved, reader):
    with copied(saved[0]) as (folder, newest, _):
        without_sums(newest)
        state = bits(reader)
        assert manifest_of(newest).blocks is None
        assert newest_usable(folder) == (newest, [])
        trainer = lone(json.loads(json.dumps(reader.spec.model_dump(mode="json"))), folder)
        trainer.restore(Resume("checkpoint", 2, str(newest)))
        assert is_still(trainer, saved[2][2])
        os.truncate(newest / DATA, 1000)
        with pytest.raises(DamagedCheckpoint, match=f"{DATA} is cut off at byte 1000: it should have "):
            reader.state.checkpoints.restore(str(newest))
        assert is_still(reader, state)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([DATA, METADATA]), st.floats(0, 0.99))
def test_zeros_in_a_checkpoint_without_sums_are_reported_with_file_and_byte(saved, reader, name, where):
    """As a file system may leave after a power cut, in a checkpoint of before there were sums."""
    with copied(saved[0]) as (_, newest, _):
        without_sums(newest)
        content = (newest / name).read_bytes()
        at = int(len(content) * where)
        (newest / name).write_bytes(content[:at].ljust(len(content), b"\0"))
        state = bits(reader)
        with pytest.raises(DamagedCheckpoint) as caught:
            reader.state.checkpoints.restore(str(newest))
        assert f"the checkpoint at {newest}" in str(caught.value)
        assert f"{name} makes no sense at byte " in str(caught.value)
        assert "\n" not in str(caught.value)
        assert is_still(reader, state)


def test_checkpoint_made_after_a_fall_back_counts_as_newer_than_the_skipped_one(tmp_path):
    """Else pruning would keep the damaged one, and delete each new one as soon as it is there."""
    good, bad = saved_at(tmp_path, 4, 1), saved_at(tmp_path, 6, 1)
    new = saved_at(tmp_path, 5, 2)
    assert [path for path, _ in complete_checkpoints(tmp_path)] == [good, bad, new]
    assert newest_usable(tmp_path) == (new, [])
    assert prune(tmp_path, 1, generation=2) == [good, bad]
    assert newest_usable(tmp_path) == (new, [])


def test_checkpoint_in_a_folder_that_nodes_do_not_share_is_not_sealed(tmp_path):
    (tmp_path / "data").write_bytes(b"12345")
    with pytest.raises(OSError, match=r"__1_0\.distcp is not here as it was written: all nodes must share "):
        seal(tmp_path, Manifest("j", 1, 2, {"data": 5, "__1_0.distcp": 5}, {}))
    assert inspect(tmp_path)[0] is Condition.INCOMPLETE


def test_checkpoint_that_cannot_be_deleted_is_pruned_the_next_time(tmp_path):
    old, new = saved_at(tmp_path, 4, 1), saved_at(tmp_path, 6, 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError

    with patch.object(Path, "unlink", refuse), patch.object(shutil, "rmtree", lambda path, ignore_errors: None):
        assert prune(tmp_path, 1, generation=1) == []
    assert prune(tmp_path, 1, generation=1) == [old]
    assert newest_usable(tmp_path) == (new, [])


@pytest.mark.parametrize("content", [
    "[]", "{}", "7", '{"job": "j", "generation": 1, "step": 2, "files": [], "spec": {}}',
    '{"job": "j", "generation": "1", "step": 2, "files": {}, "spec": {}}',
    '{"job": "j", "generation": 1, "step": 2, "files": {}, "spec": {}, "loss_scale": [1.0]}',
    '{"job": "j", "generation": 1, "step": 2, "files": {}, "spec": {}, "loss_scale": [NaN, 0.0]}',
])  # fmt: skip
def test_json_that_is_not_a_manifest_is_reported_as_damage(tmp_path, content):
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(DamagedCheckpoint, match=f"{MANIFEST} is not a manifest$"):
        manifest_of(tmp_path)


def test_byte_of_a_manifest_that_is_not_text_is_located(tmp_path):
    (tmp_path / MANIFEST).write_bytes(b'{"job": "\xff"}')
    with pytest.raises(DamagedCheckpoint, match=f"{MANIFEST} makes no sense from byte 9$"):
        manifest_of(tmp_path)
