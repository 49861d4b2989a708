"""Snapshots: whatever moment a rank dies at, the file holds at least one whole step, and says which."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from held_memory import held_bytes
from stepped_snapshots import IDENTITY, Held, bring, holds, opened, parts_of, save, saved, state_at

from manta.workers.checkpoint.checksums import BLOCK_BYTES
from manta.workers.errors import CheckpointError, SharedMemoryError
from manta.workers.snapshot import snapshot_file
from manta.workers.snapshot.files import snapshot_path
from manta.workers.snapshot.node_memory import MemoryServer, SnapshotMemory, in_node_memory
from manta.workers.snapshot.snapshot_file import NOTE_BYTES, SnapshotFile, committed_steps
from manta.workers.snapshot.snapshots import Snapshots


def test_constant_state_is_copied_into_each_slot_once_and_restored(tmp_path):
    """Whole blocks of it are summed once, too."""
    constant = torch.arange(3 * BLOCK_BYTES // 4, dtype=torch.float32)
    first = constant.clone()

    def with_constant():
        return Snapshots(tmp_path, 3, parts_of(state_at(0), constant), IDENTITY)

    snapshots = with_constant()
    for step in (1, 2):
        for tensor, value in zip(snapshots.state, state_at(step), strict=False):
            tensor.copy_(value)
        snapshots.save(step)
    constant.zero_()  # nobody does: if it is copied again it shows
    for step in (3, 4):
        for tensor, value in zip(snapshots.state, state_at(step), strict=False):
            tensor.copy_(value)
        snapshots.save(step)
        snapshots.wait_for_sums()
    fresh = with_constant()
    fresh.load(4)
    assert torch.equal(constant, first)
    assert all(torch.equal(a, b) for a, b in zip(fresh.state, [*state_at(4), first], strict=True))
    constant.fill_(5.0)
    fresh.clear()  # the job begins from another state
    for step in (7, 8):
        fresh.save(step)
    fresh.wait_for_sums()
    constant.zero_()
    with_constant().load(8)
    assert (constant == 5.0).all()


def test_snapshots_keep_the_last_two_steps(tmp_path):
    snapshots = opened(tmp_path)
    path = snapshot_path(tmp_path, 3)
    assert committed_steps(path) == []
    seen = []
    for step in range(4):
        save(snapshots, step)
        seen.append(committed_steps(path))
    assert seen == [[0], [0, 1], [1, 2], [2, 3]]
    assert holds(tmp_path, 2)
    save(opened(tmp_path), 3)
    assert holds(tmp_path, 3)


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_start_returns_during_the_copy_and_finish_waits_and_commits_it(tmp_path, copies):
    snapshots = saved(tmp_path, 5, 6)
    held = Held(snapshots, copies)
    bring(snapshots, 7)
    commits: list[list[int]] = []
    snapshots.start(7, b"note of 7", lambda: commits.append(committed_steps(snapshots.path)))
    assert held.reached.wait(30)
    assert committed_steps(snapshots.path) == [6], "the slot being written is never taken for whole"
    assert commits == []
    finishing = threading.Thread(target=snapshots.finish)
    finishing.start()
    finishing.join(0.05)
    assert finishing.is_alive(), "it waits for the copy"
    held.released.set()
    finishing.join(30)
    assert committed_steps(snapshots.path) == [6, 7]
    assert commits == [[6, 7]], "what hangs on the snapshot comes once it is whole"
    assert holds(tmp_path, 7)


def test_error_during_the_copy_is_raised_by_finish(tmp_path):
    snapshots = saved(tmp_path, 5, 6)
    held = Held(snapshots)
    held.error = RuntimeError("the device is gone")
    held.released.set()
    snapshots.start(7)
    with pytest.raises(RuntimeError, match="the device is gone"):
        snapshots.finish()
    assert committed_steps(snapshots.path) == [6]
    assert holds(tmp_path, 6)


def test_finish_of_a_snapshot_that_was_not_started_returns_false(tmp_path):
    snapshots = opened(tmp_path)
    assert snapshots.finish() is False
    snapshots.start(1)
    assert snapshots.finish() is True
    assert snapshots.finish() is False


def test_stall_counts_only_the_time_that_the_training_thread_waits(tmp_path, monkeypatch):
    """By a clock that moves while nobody waits (100 s), and while `finish` waits for the copy (7 s)."""
    snapshots, held = opened(tmp_path), None
    now, started, waiting = [50.0], threading.Event(), threading.Event()

    def clock():
        reading = now[0]
        if started.is_set() and threading.current_thread() is threading.main_thread():
            waiting.set()
        return reading

    def unprotect():
        assert waiting.wait(30)
        now[0] += 7.0
        held.released.set()

    for module in ("snapshots", "state_copy"):
        monkeypatch.setattr(f"manta.workers.snapshot.{module}.time", SimpleNamespace(perf_counter=clock))
    held = Held(snapshots)
    releasing = threading.Thread(target=unprotect)
    releasing.start()
    snapshots.start(1)
    now[0] += 100.0
    started.set()
    assert snapshots.finish() is True
    releasing.join(30)
    assert snapshots.stall_seconds == 7.0


def test_a_step_whose_note_cannot_be_written_is_not_committed(tmp_path, monkeypatch):
    snapshots = saved(tmp_path, 5, 6)
    monkeypatch.setattr(SnapshotFile, "write_note", Mock(side_effect=OSError("the note is not written")))
    snapshots.start(7, b"note of 7")
    with pytest.raises(OSError, match="the note is not written"):
        snapshots.finish()
    assert committed_steps(snapshots.path) == [6], "a marker promises all of the slot"


def test_loading_forgets_a_newer_step_that_not_all_committed(tmp_path):
    snapshots = saved(tmp_path, 5, 6)
    assert holds(tmp_path, 5)
    assert committed_steps(snapshots.path) == [5]
    again = opened(tmp_path)
    save(again, 6)
    assert committed_steps(snapshots.path) == [5, 6], "the older one is not overwritten while the newer is invalid"


def test_load_of_a_step_without_a_snapshot_is_refused_with_file_and_step(tmp_path):
    snapshots = saved(tmp_path, 5)
    with pytest.raises(CheckpointError, match=f"{snapshots.path} holds no snapshot of step 4"):
        snapshots.load(4)


def test_cleared_snapshots_have_no_committed_steps(tmp_path):
    snapshots = saved(tmp_path, 5)
    snapshots.clear()
    assert committed_steps(snapshots.path) == []


def test_a_note_that_is_too_long_is_refused_before_anything_is_overwritten(tmp_path):
    snapshots = saved(tmp_path, 5, 6)
    with pytest.raises(ValueError, match="does not fit"):
        snapshots.start(7, b"x" * (NOTE_BYTES + 1))
    assert committed_steps(snapshots.path) == [5, 6]


def test_snapshot_file_that_fits_keeps_its_steps_when_reopened(tmp_path):
    save(opened(tmp_path), 5)
    opened(tmp_path)
    assert committed_steps(snapshot_path(tmp_path, 3)) == [5]


@pytest.mark.parametrize(
    ("module", "name", "answer", "free"),
    [
        (snapshot_file.os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "")), ""),
        (snapshot_file, "memory_available", Mock(return_value=1000), "1000 "),
    ],
    ids=["shared memory", "memory of the machine"],
)
def test_lack_of_memory_is_one_clear_sentence_and_leaves_no_file(tmp_path, monkeypatch, module, name, answer, free):
    monkeypatch.setattr(module, name, answer)
    needs = f"^no room in shared memory for the snapshots: {tmp_path / 'job'} has .*{free}bytes free, this rank needs "
    with pytest.raises(SharedMemoryError, match=needs):
        opened(tmp_path / "job")
    assert list((tmp_path / "job").iterdir()) == []


def test_snapshots_are_accessible_to_their_user_only(tmp_path):
    snapshots = opened(tmp_path / "job")
    assert snapshots.path.stat().st_mode & 0o777 == 0o600
    assert snapshots.path.parent.stat().st_mode & 0o777 == 0o700


def test_note_of_the_maximum_length_reads_back_from_its_snapshot(tmp_path):
    snapshots = opened(tmp_path)
    note = b"x" * NOTE_BYTES
    snapshots.save(1, note)
    snapshots.wait_for_sums()
    assert opened(tmp_path, 999).load(1) == note


def test_snapshot_file_holds_the_table_of_its_state(tmp_path):
    opened(tmp_path)
    file = SnapshotFile.open(snapshot_path(tmp_path, 3))
    assert file.table() == {"a": "table"}
    file.close()
    Snapshots(tmp_path, 4, parts_of(state_at(0)), IDENTITY)
    file = SnapshotFile.open(snapshot_path(tmp_path, 4))
    assert file.table() == {}
    file.close()


def test_seconds_of_a_copy_and_its_sums_are_measured(tmp_path, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("manta.workers.snapshot.snapshots.time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    snapshots = opened(tmp_path)
    assert (snapshots.stall_seconds, snapshots.copy_seconds, snapshots.sum_seconds) == (0.0, 0.0, 0.0)
    snapshots.save(1)
    snapshots.wait_for_sums()
    assert 0.0 < snapshots.copy_seconds < 10.0
    assert 0.0 < snapshots.sum_seconds < 10.0


def test_copied_parts_are_those_of_the_step_asked_for_or_none(tmp_path):
    snapshots = saved(tmp_path, 5, 6)
    for step in (5, 6):
        copied = [tensor for (tensor,) in snapshots.copied_parts(step).values()]
        assert all(torch.equal(a, b) for a, b in zip(copied, state_at(step), strict=True))
    assert snapshots.copied_parts(4) is None
    snapshots.forget_after(5)
    assert snapshots.copied_parts(6) is None
    assert committed_steps(snapshots.path) == [5]
    snapshots.close()


def test_fetched_backup_is_loaded_and_the_earlier_snapshot_file_is_closed(tmp_path):
    """And the file of before is let go of."""
    snapshots = saved(tmp_path, 5)
    before = snapshots._file
    snapshots.path.rename(tmp_path / "aside")
    save(opened(tmp_path), 7)
    assert snapshots.load(7) == b"note of 7"
    assert snapshots._file is not before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(before.descriptor)
    snapshots.close()


LOSSES = {
    "file removed": Path.unlink,
    "folder removed": lambda path: shutil.rmtree(path.parent),
    "folders removed": lambda path: shutil.rmtree(path.parent.parent),
    "another file": lambda path: path.unlink() or path.write_bytes(b"x" * 99),
    "a copy of it": lambda path: shutil.copy(path, path.with_name("copy")) and path.with_name("copy").rename(path),
    "a folder": lambda path: path.unlink() or path.mkdir(),
}


@pytest.mark.parametrize("again", ["next snapshot", "rest"])
@pytest.mark.parametrize("place", ["shared_memory", "node_memory"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_file_lost_while_a_job_trains_is_made_anew_with_all_it_held(tmp_path, capsys, loss, place, again):
    """Peers may be a step behind, and so need the step before the newest one."""
    root = tmp_path / "snapshots"
    keeper = MemoryServer(tmp_path / "memory.sock", root)
    memory = SnapshotMemory(place, tmp_path / "memory.sock")
    snapshots = Snapshots(root / "job", 3, parts_of(state_at(0)), IDENTITY, table={"a": "table"}, memory=memory)
    for step in (5, 6):
        save(snapshots, step)
    LOSSES[loss](snapshots.path)
    steps = [5, 6]
    if again == "rest":
        snapshots.ensure_at_path()
    else:
        save(snapshots, 7)
        steps = [6, 7]
    assert committed_steps(snapshots.path) == steps and in_node_memory(snapshots.path) == (place == "node_memory")
    assert all(snapshots._file.check(slot) for slot in (0, 1)), "the sums came with it"
    assert root.stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().out.count("has been recreated") == 1
    assert held_bytes(keeper) == (snapshots._file.form.size if place == "node_memory" else 0)
    assert holds(root / "job", steps[1]) and holds(root / "job", steps[0])
    snapshots.close()
    keeper.close()


def test_a_lost_file_is_made_anew_after_the_checkpoint_that_is_read_from_it(tmp_path):
    snapshots = saved(tmp_path, 5)
    held = snapshots.protect(5, bytes)
    snapshots.path.unlink()
    save(snapshots, 6)
    assert not snapshots.path.exists() and torch.equal(held.part("1"), state_at(5)[1])
    before = snapshots.memory_file
    snapshots.unprotect()
    save(snapshots, 7)
    assert committed_steps(snapshots.path) == [6, 7] and snapshots.memory_file is not before
    snapshots.close()


def test_without_room_to_make_a_lost_file_anew_training_goes_on_and_it_is_made_later(tmp_path, capsys, monkeypatch):
    snapshots = opened(tmp_path)
    snapshots.path.unlink()
    monkeypatch.setattr(snapshot_file, "memory_available", lambda: 1000)
    for step in (5, 6):
        save(snapshots, step)
    said = capsys.readouterr().out
    assert said.count("cannot be recreated yet: no room in shared memory") == said.count("\n") == 1
    assert torch.equal(snapshots.copied_parts(6)["0"][0], state_at(6)[0]) and not snapshots.path.exists()
    monkeypatch.undo()
    snapshots._retry_at = 0.0
    save(snapshots, 7)
    assert committed_steps(snapshots.path) == [6, 7]
    snapshots.close()
