"""Snapshots that are damaged, cut off, of another state, or of a process that was killed: what is used of them, and
what is said."""

from __future__ import annotations

import os
import random
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from rank_processes import begin_process
from stepped_snapshots import IDENTITY, bring, holds, opened, parts_of, save, saved, snapshot_each_step, state_at

from manta.workers.checkpoint.checksums import BLOCK_BYTES, DamagedCheckpoint
from manta.workers.errors import CheckpointError
from manta.workers.snapshot.files import remove_other_layouts, snapshot_files, snapshot_path, stored_steps
from manta.workers.snapshot.snapshot_file import SnapshotFile, committed_steps
from manta.workers.snapshot.snapshots import Snapshots
from manta.workers.system.regular_files import put


def test_changed_constant_in_a_snapshot_file_is_found_after_its_slot_is_summed_again(tmp_path):
    constant = torch.arange(3 * BLOCK_BYTES // 4, dtype=torch.float32)
    snapshots = Snapshots(tmp_path, 3, parts_of(state_at(0), constant), IDENTITY)
    for step in (1, 2):
        snapshots.save(step)
        snapshots.wait_for_sums()
    at = snapshots._file.form.payload_at(0) + 2 * BLOCK_BYTES
    snapshots._file.memory[at] ^= 1
    snapshots.save(3)
    snapshots.wait_for_sums()
    assert snapshots._file.step(0) == 3
    fresh = Snapshots(tmp_path, 3, parts_of(state_at(0), constant), IDENTITY)
    with pytest.raises(DamagedCheckpoint, match=f"damaged at byte {at}: these {BLOCK_BYTES} bytes of step 3"):
        fresh.load(3)
    fresh.save(4)
    fresh.save(5)
    fresh.wait_for_sums()
    assert Snapshots(tmp_path, 3, parts_of(state_at(0), constant), IDENTITY).load(5) == b"", "it is written anew"


def test_a_slot_that_is_overwritten_before_its_sums_are_done_is_not_sealed_with_them(tmp_path, monkeypatch):
    snapshots = opened(tmp_path)
    real, reached, released = SnapshotFile.sums, threading.Event(), threading.Event()

    def slow(file, slot, known):
        sums = list(real(file, slot, known))
        reached.set()
        assert released.wait(30)
        yield from sums

    monkeypatch.setattr(SnapshotFile, "sums", slow)
    snapshots.save(1)
    assert reached.wait(30)
    monkeypatch.setattr(SnapshotFile, "sums", real)
    for step in (2, 3):
        bring(snapshots, step)
        snapshots.save(step, f"note of {step}".encode())
    released.set()
    snapshots.wait_for_sums()
    assert holds(tmp_path, 3)
    assert holds(tmp_path, 2)


def test_a_slot_that_is_overwritten_right_after_its_last_sum_is_not_sealed(tmp_path, monkeypatch):
    snapshots = opened(tmp_path)
    real, sealed = SnapshotFile.sums, []

    def then_overwritten(file, slot, known):
        yield from real(file, slot, known)
        snapshots._begin(slot)

    monkeypatch.setattr(SnapshotFile, "sums", then_overwritten)
    monkeypatch.setattr(SnapshotFile, "seal", lambda file, slot, step, sums: sealed.append(step))
    snapshots.save(1)
    snapshots.wait_for_sums()
    assert sealed == []


def test_copy_left_without_sums_is_used_and_then_summed(tmp_path, monkeypatch):
    """What a trainer leaves that was killed right after a copy."""
    snapshots = saved(tmp_path, 5)
    monkeypatch.setattr(snapshots, "_seal", lambda *_: None)
    save(snapshots, 6)
    slot = snapshots._file.slot_of(6)
    assert snapshots._file.sealed_sums(slot) is None
    assert committed_steps(snapshots.path) == [5, 6]
    fresh = opened(tmp_path, 999)
    assert fresh.load(6) == b"note of 6"
    fresh.wait_for_sums()
    assert snapshots._file.sealed_sums(slot) is not None
    assert holds(tmp_path, 6)


def test_snapshot_file_removed_during_the_job_is_made_again(tmp_path):
    snapshots = saved(tmp_path, 1)
    snapshots.path.unlink()
    snapshots.clear()
    save(snapshots, 2)
    assert committed_steps(snapshots.path) == [2]


@pytest.mark.parametrize("change", ["identity", "size", "truncated", "another file"])
def test_snapshot_file_that_does_not_fit_is_replaced_and_the_reason_given(tmp_path, change):
    save(opened(tmp_path), 5)
    path = snapshot_path(tmp_path, 3)
    identity, state, said = IDENTITY, state_at(0), "was of another job or layout"
    if change == "identity":
        identity = b"another identity"
    elif change == "size":
        state = [torch.zeros(7)]
    elif change == "truncated":
        os.truncate(path, 5000)
        said = "damaged at byte 5000: it has 5000 bytes and should have"
    else:
        path.write_bytes(b"something else" * 10)
        said = "damaged at byte 0: its first"
    fresh = Snapshots(tmp_path, 3, parts_of(state), identity)
    assert committed_steps(path) == []
    with pytest.raises(CheckpointError, match=said):
        fresh.load(5)
    save(opened(tmp_path), 6)
    assert holds(tmp_path, 6)


def be_folder(path):
    path.unlink()
    path.mkdir()
    (path / "file").touch()


def be_pipe(path):
    path.unlink()
    os.mkfifo(path)


def be_socket(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


def be_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def be_link_to_itself(path):
    path.unlink()
    path.symlink_to(path)


def be_in_a_file(path):
    shutil.rmtree(path.parent)
    path.parent.touch()


def be_in_a_closed_folder(path):
    path.unlink()
    path.parent.chmod(0o300)


@pytest.mark.parametrize(
    "be", [be_folder, be_pipe, be_socket, be_device, be_link_to_itself, be_in_a_file, be_in_a_closed_folder]
)
def test_anything_but_a_file_in_a_snapshots_place_has_no_steps_and_is_replaced(tmp_path, be):
    folder = tmp_path / "job"
    save(opened(folder), 5)
    path = snapshot_path(folder, 3)
    be(path)
    assert committed_steps(path) == stored_steps(folder, 3) == []
    with pytest.raises(CheckpointError, match=r"cannot be read: |there is no snapshot file"):
        SnapshotFile.open(path)
    save(opened(folder), 6)
    assert holds(folder, 6) and folder.stat().st_mode & 0o777 == 0o700


def test_folders_in_place_of_removed_or_fetched_snapshots_are_removed_too(tmp_path):
    """The snapshot of another layout, and that of a rank which comes from another node."""
    for name in ("rank-00003.0a0a0a0a.snapshot", "rank-00003.0b0b0b0b.snapshot"):
        (tmp_path / name / "folder").mkdir(parents=True)
    save(opened(tmp_path), 5)
    put(snapshot_path(tmp_path, 3), snapshot_path(tmp_path, 3, "0b0b0b0b"))
    remove_other_layouts(tmp_path, "0b0b0b0b")
    assert [(file.layout, committed_steps(file.path)) for file in snapshot_files(tmp_path)] == [("0b0b0b0b", [5])]


@pytest.mark.parametrize("content", [b"", b"MANTASNP", b"x" * 8192], ids=["empty", "short", "foreign"])
def test_file_that_is_not_a_snapshot_has_no_committed_steps(tmp_path, content):
    path = tmp_path / "file"
    assert committed_steps(path) == []
    path.write_bytes(content)
    assert committed_steps(path) == []


def load_or_complain(folder: Path, step: int) -> str | None:
    """The error of loading `step`, None where all of it is right. An error leaves the state as it was."""
    fresh = opened(folder, 999)
    try:
        note = fresh.load(step)
    except CheckpointError as error:
        assert all(torch.equal(a, b) for a, b in zip(fresh.state, state_at(999), strict=True))
        return str(error)
    finally:
        fresh.close()
    assert note == f"note of {step}".encode()
    assert all(torch.equal(a, b) for a, b in zip(fresh.state, state_at(step), strict=True))
    return None


def test_flipped_bit_anywhere_in_a_snapshot_file_is_found_or_harmless(tmp_path):
    snapshots, draw = opened(tmp_path), random.Random(3)
    for step in (5, 6):
        save(snapshots, step)
    form, path = snapshots._file.form, snapshots.path
    slot = snapshots._file.slot_of(6)
    snapshots.close()
    whole = path.read_bytes()
    payload, note, sums = form.payload_at(slot), form.note_at(slot), form.sums_at(slot)
    ranges = {
        "head": (0, 48), "marker": (128 + 8 * slot, 136 + 8 * slot), "seal": (256 + 16 * slot, 272 + 16 * slot),
        "table": (4096, 4096 + len(form.table)), "payload": (payload, note), "note": (note, note + 8 + 9),
        "sums": (sums, sums + 4 * form.blocks),
    }  # fmt: skip
    for name, (start, end) in ranges.items():
        for _ in range(12):
            at = draw.randrange(start, end)
            path.write_bytes(whole)
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([whole[at] ^ 1 << draw.randrange(8)]))
            error = load_or_complain(tmp_path, 6)
            assert error is not None, (name, at)
            assert str(path) in error and " byte " in error
    for _ in range(30):
        path.write_bytes(whole)
        os.truncate(path, draw.randrange(len(whole)))
        assert f"the snapshot file {path} is damaged at byte " in (load_or_complain(tmp_path, 6) or "")
    path.write_bytes(whole)
    assert load_or_complain(tmp_path, 6) is None


def test_damage_is_located_and_the_other_slot_is_offered_instead(tmp_path):
    state = [torch.arange(3 * BLOCK_BYTES // 4, dtype=torch.float32)]
    snapshots = opened(tmp_path, state=state)
    for step in (5, 6):
        state[0].add_(1)
        snapshots.save(step)
        snapshots.wait_for_sums()
    kept = state[0].clone()
    start = snapshots._file.form.payload_at(snapshots._file.slot_of(6)) + BLOCK_BYTES
    snapshots._file.memory[start + 77] ^= 1
    words = f"{snapshots.path} is damaged at byte {start}: these {BLOCK_BYTES} bytes of step 6 are not what was written"
    with pytest.raises(DamagedCheckpoint, match=words):
        snapshots.load(6)
    assert torch.equal(state[0], kept)
    assert committed_steps(snapshots.path) == [5]
    snapshots.load(5)
    assert torch.equal(state[0], kept - 1)


def test_damage_of_both_slots_is_found_at_once(tmp_path):
    snapshots = saved(tmp_path, 5, 6)
    for slot in range(2):
        snapshots._file.memory[snapshots._file.form.payload_at(slot) + 7] ^= 1
    with pytest.raises(DamagedCheckpoint, match="of step 6 are not what was written"):
        snapshots.load(6)
    assert committed_steps(snapshots.path) == [], "the next attempt does not fail with the other step"


def test_a_file_that_is_cut_off_under_a_running_rank_is_reported_and_does_not_kill_it(tmp_path):
    snapshots = saved(tmp_path, 5)
    os.truncate(snapshots.path, 8192)
    with pytest.raises(DamagedCheckpoint, match="damaged at byte 8192"):
        snapshots.load(5)


@pytest.mark.parametrize("times", [2, pytest.param(8, marks=pytest.mark.soak)])
def test_rank_killed_at_any_moment_leaves_only_whole_snapshots(tmp_path, times):
    """A real process, which fills its state with the number of the step, again and again."""
    draw, path = random.Random(5), snapshot_path(tmp_path, 0)
    for _ in range(times):
        path.unlink(missing_ok=True)
        rank, deadline = begin_process(snapshot_each_step, str(tmp_path)), time.monotonic() + 60
        while max(committed_steps(path), default=0) < 5:
            assert rank.is_alive() and time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.02))
        rank.kill()
        rank.join()
        steps = committed_steps(path)
        assert steps, "at least one slot is whole"
        for step in reversed(steps):
            state = [torch.zeros(3_000_000), torch.zeros(7)]
            reopened = Snapshots(tmp_path, 0, parts_of(state), IDENTITY)
            assert reopened.load(step) == str(step).encode()
            assert all(bool((tensor == step).all()) for tensor in state)
            reopened.close()


def test_reason_for_not_using_a_file_is_given_until_the_next_step_is_saved(tmp_path):
    save(opened(tmp_path), 5)
    fresh = opened(tmp_path, identity=b"another identity")
    with pytest.raises(CheckpointError, match="was of another job or layout"):
        fresh.load(5)
    save(fresh, 6)
    with pytest.raises(CheckpointError, match="holds no snapshot of step 5"):
        fresh.load(5)


def test_snapshot_file_that_does_not_fit_is_closed(tmp_path, monkeypatch):
    save(opened(tmp_path), 5)
    closed, close = [], SnapshotFile.close
    monkeypatch.setattr(SnapshotFile, "close", lambda file: closed.append(file.form.identity) or close(file))
    opened(tmp_path, identity=b"another identity")
    assert closed == [IDENTITY]
