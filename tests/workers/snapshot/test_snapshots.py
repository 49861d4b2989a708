"""Snapshots: whatever moment a rank dies at, the file holds at least one whole step, and says which."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from workers.checkpoint.checksums import BLOCK_BYTES, DamagedCheckpoint
from workers.errors import CheckpointError, SharedMemoryError
from workers.snapshot import snapshot_file
from workers.snapshot.files import snapshot_path
from workers.snapshot.snapshot_file import NOTE_BYTES, SnapshotFile, committed_steps
from workers.snapshot.snapshots import Snapshots

IDENTITY = b"0123456789abcdef"
ROOT = Path(__file__).parents[3]


def state_at(step: int) -> list[torch.Tensor]:
    """A rank's state that tells its step: three tensors of odd sizes."""
    return [torch.full((size,), 100.0 * step + size) for size in (5, 1025, 3)]


def opened(
    folder: Path, step: int = 0, identity: bytes = IDENTITY, state: list[torch.Tensor] | None = None
) -> Snapshots:
    """The snapshots of rank 3, over a state of `step`."""
    return Snapshots(folder, 3, state if state is not None else state_at(step), identity, table={"a": "table"})


def bring(snapshots: Snapshots, step: int) -> None:
    """Bring the state to `step`."""
    for tensor, value in zip(snapshots.state, state_at(step), strict=True):
        tensor.copy_(value)


def save(snapshots: Snapshots, step: int) -> None:
    """Bring the state to `step`, save it and wait for its sums."""
    bring(snapshots, step)
    snapshots.save(step, f"note of {step}".encode())
    snapshots.wait_for_sums()


def holds(folder: Path, step: int) -> bool:
    """Whether another process, opening the file, loads exactly the state of `step`."""
    fresh = opened(folder, 999)
    note = fresh.load(step)
    return note == f"note of {step}".encode() and all(
        torch.equal(a, b) for a, b in zip(fresh.state, state_at(step), strict=True)
    )


class Held:
    """Holds the copies of a snapshot up until it is told to let them go, or to make them fail."""

    def __init__(self, snapshots: Snapshots, after: int = 0):
        """The first `after` copies of tensors are made at once."""
        self.reached, self.released = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self._left, self._real = after, snapshots._slots
        snapshots._slots = [[_Slow(self, view) for view in views] for views in self._real]

    def copy(self, real: torch.Tensor, other: torch.Tensor) -> None:
        if self._left == 0:
            real[: len(real) // 2].copy_(other[: len(other) // 2])
            self.reached.set()
            assert self.released.wait(30)
            if self.error is not None:
                raise self.error
        else:
            self._left -= 1
        real.copy_(other)


class _Slow:
    def __init__(self, held: Held, real: torch.Tensor):
        self._held, self._real = held, real

    def copy_(self, other: torch.Tensor) -> None:
        self._held.copy(self._real, other)


def test_what_is_constant_is_copied_into_each_slot_once_and_comes_back(tmp_path):
    """Whole blocks of it are summed once, too."""
    constant = torch.arange(3 * BLOCK_BYTES // 4, dtype=torch.float32)
    first = constant.clone()

    def with_constant():
        return Snapshots(tmp_path, 3, state_at(0), IDENTITY, constant=[constant])

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


def test_what_is_constant_and_changes_in_the_file_is_found_though_the_slot_was_summed_again_since(tmp_path):
    constant = torch.arange(3 * BLOCK_BYTES // 4, dtype=torch.float32)
    snapshots = Snapshots(tmp_path, 3, state_at(0), IDENTITY, constant=[constant])
    for step in (1, 2):
        snapshots.save(step)
        snapshots.wait_for_sums()
    at = snapshots._file.form.payload_at(0) + 2 * BLOCK_BYTES
    snapshots._file.memory[at] ^= 1
    snapshots.save(3)
    snapshots.wait_for_sums()
    assert snapshots._file.step(0) == 3
    fresh = Snapshots(tmp_path, 3, state_at(0), IDENTITY, constant=[constant])
    with pytest.raises(DamagedCheckpoint, match=f"damaged at byte {at}: these {BLOCK_BYTES} bytes of step 3"):
        fresh.load(3)
    fresh.save(4)
    fresh.save(5)
    fresh.wait_for_sums()
    assert Snapshots(tmp_path, 3, state_at(0), IDENTITY, constant=[constant]).load(5) == b"", "it is written anew"


def test_the_last_two_steps_are_kept(tmp_path):
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
def test_start_returns_while_the_copy_is_under_way_and_finish_makes_sure_of_it(tmp_path, copies):
    snapshots = opened(tmp_path)
    for step in (5, 6):
        save(snapshots, step)
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


def test_what_keeps_the_copy_from_being_made_comes_out_of_finish(tmp_path):
    snapshots = opened(tmp_path)
    for step in (5, 6):
        save(snapshots, step)
    held = Held(snapshots)
    held.error = RuntimeError("the device is gone")
    held.released.set()
    snapshots.start(7)
    with pytest.raises(RuntimeError, match="the device is gone"):
        snapshots.finish()
    assert committed_steps(snapshots.path) == [6]
    assert holds(tmp_path, 6)


def test_finish_without_a_start_says_so(tmp_path):
    snapshots = opened(tmp_path)
    assert snapshots.finish() is False
    snapshots.start(1)
    assert snapshots.finish() is True
    assert snapshots.finish() is False


def test_the_stall_is_the_time_that_the_training_thread_waits_and_no_other(tmp_path, monkeypatch):
    """By a clock that moves while nobody waits (100 s), and while `finish` waits for the copy (7 s)."""
    snapshots, held = opened(tmp_path), None
    now, started, waiting = [50.0], threading.Event(), threading.Event()

    def clock():
        reading = now[0]
        if started.is_set() and threading.current_thread() is threading.main_thread():
            waiting.set()
        return reading

    def let_go():
        assert waiting.wait(30)
        now[0] += 7.0
        held.released.set()

    for module in ("snapshots", "state_copy"):
        monkeypatch.setattr(f"workers.snapshot.{module}.time", SimpleNamespace(perf_counter=clock))
    held = Held(snapshots)
    releasing = threading.Thread(target=let_go)
    releasing.start()
    snapshots.start(1)
    now[0] += 100.0
    started.set()
    assert snapshots.finish() is True
    releasing.join(30)
    assert snapshots.stall_seconds == 7.0


def test_a_step_whose_note_cannot_be_written_is_not_committed(tmp_path, monkeypatch):
    snapshots = opened(tmp_path)
    for step in (5, 6):
        save(snapshots, step)

    def broken(*_):
        raise OSError("the note is not written")

    monkeypatch.setattr(SnapshotFile, "write_note", broken)
    snapshots.start(7, b"note of 7")
    with pytest.raises(OSError, match="the note is not written"):
        snapshots.finish()
    assert committed_steps(snapshots.path) == [6], "a marker promises all of the slot"


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


def test_a_copy_without_sums_is_used_and_gets_them_then(tmp_path, monkeypatch):
    """What a trainer leaves that was killed right after a copy."""
    snapshots = opened(tmp_path)
    save(snapshots, 5)
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


def test_a_file_that_was_removed_meanwhile_is_made_anew(tmp_path):
    snapshots = opened(tmp_path)
    save(snapshots, 1)
    snapshots.path.unlink()
    snapshots.clear()
    save(snapshots, 2)
    assert committed_steps(snapshots.path) == [2]


def test_loading_forgets_a_newer_step_that_not_all_committed(tmp_path):
    snapshots = opened(tmp_path)
    for step in (5, 6):
        save(snapshots, step)
    assert holds(tmp_path, 5)
    assert committed_steps(snapshots.path) == [5]
    again = opened(tmp_path)
    save(again, 6)
    assert committed_steps(snapshots.path) == [5, 6], "the older one is not overwritten while the newer is invalid"


def test_a_step_that_is_not_there_is_named(tmp_path):
    snapshots = opened(tmp_path)
    save(snapshots, 5)
    with pytest.raises(CheckpointError, match=f"{snapshots.path} holds no snapshot of step 4"):
        snapshots.load(4)


def test_clear_forgets_all(tmp_path):
    snapshots = opened(tmp_path)
    save(snapshots, 5)
    snapshots.clear()
    assert committed_steps(snapshots.path) == []


def test_a_note_that_is_too_long_is_refused_before_anything_is_overwritten(tmp_path):
    snapshots = opened(tmp_path)
    for step in (5, 6):
        save(snapshots, step)
    with pytest.raises(ValueError, match="does not fit"):
        snapshots.start(7, b"x" * (NOTE_BYTES + 1))
    assert committed_steps(snapshots.path) == [5, 6]


@pytest.mark.parametrize("change", ["identity", "size", "truncated", "another file"])
def test_a_file_that_does_not_fit_is_made_anew(tmp_path, change):
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
    fresh = Snapshots(tmp_path, 3, state, identity)
    assert committed_steps(path) == []
    with pytest.raises(CheckpointError, match=said):
        fresh.load(5)
    save(opened(tmp_path), 6)
    assert holds(tmp_path, 6)


def test_a_file_that_fits_is_kept(tmp_path):
    save(opened(tmp_path), 5)
    opened(tmp_path)
    assert committed_steps(snapshot_path(tmp_path, 3)) == [5]


@pytest.mark.parametrize("content", [b"", b"MANTASNP", b"x" * 8192], ids=["empty", "short", "foreign"])
def test_committed_steps_of_a_file_that_is_none(tmp_path, content):
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


def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(tmp_path):
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


def test_a_file_that_is_cut_off_under_a_running_rank_is_told_and_does_not_kill_it(tmp_path):
    snapshots = opened(tmp_path)
    save(snapshots, 5)
    os.truncate(snapshots.path, 8192)
    with pytest.raises(DamagedCheckpoint, match="damaged at byte 8192"):
        snapshots.load(5)


@pytest.mark.parametrize("times", [2, pytest.param(8, marks=pytest.mark.soak)])
def test_killed_at_any_moment_a_rank_leaves_whole_steps(tmp_path, times):
    """A real process, which fills its state with the number of the step, again and again."""
    program = (
        "import sys, torch; from workers.snapshot.snapshots import Snapshots\n"
        "state = [torch.zeros(3_000_000), torch.zeros(7)]\n"
        "snapshots, step = Snapshots(sys.argv[1], 0, state, b'0123456789abcdef'), 0\n"
        "while True:\n"
        "    step += 1\n"
        "    for tensor in state: tensor.fill_(step)\n"
        "    snapshots.start(step, str(step).encode())\n"
        "    snapshots.finish()\n"
    )
    draw, path = random.Random(5), snapshot_path(tmp_path, 0)
    for _ in range(times):
        path.unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT) as rank:
            deadline = time.monotonic() + 60
            while max(committed_steps(path), default=0) < 5:
                assert rank.poll() is None and time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.02))
            rank.send_signal(signal.SIGKILL)
        steps = committed_steps(path)
        assert steps, "at least one slot is whole"
        for step in reversed(steps):
            state = [torch.zeros(3_000_000), torch.zeros(7)]
            reopened = Snapshots(tmp_path, 0, state, IDENTITY)
            assert reopened.load(step) == str(step).encode()
            assert all(bool((tensor == step).all()) for tensor in state)
            reopened.close()


def test_no_room_is_one_clear_sentence_and_leaves_no_file(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshot_file.os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError) as caught:
        opened(tmp_path / "job")
    message = str(caught.value)
    assert message.startswith(f"no room in shared memory for the snapshots: {tmp_path / 'job'} has ")
    assert "bytes free, this rank needs " in message
    assert list((tmp_path / "job").iterdir()) == []


def test_room_in_shared_memory_that_the_machine_does_not_have_is_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_file, "memory_available", lambda: 1000)
    with pytest.raises(SharedMemoryError, match=f"{tmp_path} has 1000 bytes free, this rank needs "):
        opened(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_snapshots_are_private(tmp_path):
    snapshots = opened(tmp_path / "job")
    assert snapshots.path.stat().st_mode & 0o777 == 0o600
    assert snapshots.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_note_may_be_as_long_as_there_is_room_for(tmp_path):
    snapshots = opened(tmp_path)
    note = b"x" * NOTE_BYTES
    snapshots.save(1, note)
    snapshots.wait_for_sums()
    assert opened(tmp_path, 999).load(1) == note


def test_a_file_says_what_its_state_consists_of(tmp_path):
    opened(tmp_path)
    file = SnapshotFile.open(snapshot_path(tmp_path, 3))
    assert file.table() == {"a": "table"}
    file.close()
    Snapshots(tmp_path, 4, state_at(0), IDENTITY)
    file = SnapshotFile.open(snapshot_path(tmp_path, 4))
    assert file.table() == {}
    file.close()


def test_why_a_file_was_not_used_is_said_only_until_there_is_another_step(tmp_path):
    save(opened(tmp_path), 5)
    fresh = opened(tmp_path, identity=b"another identity")
    with pytest.raises(CheckpointError, match="was of another job or layout"):
        fresh.load(5)
    save(fresh, 6)
    with pytest.raises(CheckpointError, match="holds no snapshot of step 5"):
        fresh.load(5)


def test_a_file_that_does_not_fit_is_let_go_of(tmp_path, monkeypatch):
    save(opened(tmp_path), 5)
    closed, close = [], SnapshotFile.close
    monkeypatch.setattr(SnapshotFile, "close", lambda file: closed.append(file.form.identity) or close(file))
    opened(tmp_path, identity=b"another identity")
    assert closed == [IDENTITY]


def test_what_a_copy_and_its_sums_took_is_known_once_they_are_made(tmp_path, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("workers.snapshot.snapshots.time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    snapshots = opened(tmp_path)
    assert (snapshots.stall_seconds, snapshots.copy_seconds, snapshots.sum_seconds) == (0.0, 0.0, 0.0)
    snapshots.save(1)
    snapshots.wait_for_sums()
    assert 0.0 < snapshots.copy_seconds < 10.0
    assert 0.0 < snapshots.sum_seconds < 10.0


def test_what_is_kept_is_of_that_step_and_no_other(tmp_path):
    snapshots = opened(tmp_path)
    for step in (5, 6):
        save(snapshots, step)
    for step in (5, 6):
        assert all(torch.equal(a, b) for a, b in zip(snapshots.kept(step), state_at(step), strict=True))
    assert snapshots.kept(4) is None
    snapshots.forget_after(5)
    assert snapshots.kept(6) is None
    assert committed_steps(snapshots.path) == [5]
    snapshots.close()


def test_a_backup_that_came_is_used_though_a_copy_was_being_summed(tmp_path):
    """And the file of before is let go of."""
    snapshots = opened(tmp_path)
    save(snapshots, 5)
    before = snapshots._file
    snapshots.path.rename(tmp_path / "aside")
    save(opened(tmp_path), 7)
    assert snapshots.load(7) == b"note of 7"
    assert snapshots._file is not before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(before.descriptor)
    snapshots.close()
