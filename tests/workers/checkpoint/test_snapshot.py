"""Snapshots: whatever moment a rank dies at, the file holds at least one whole step, and says which."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.checkpoint import snapshot
from workers.checkpoint.snapshot import Snapshots, committed_steps, fingerprint, snapshot_path
from workers.errors import CheckpointError, SharedMemoryError

IDENTITY = b"0123456789abcdef"


def state_at(step: int) -> list[torch.Tensor]:
    """A rank's state that tells its step: three tensors of odd sizes."""
    return [torch.full((size,), 100.0 * step + size) for size in (5, 1025, 3)]


def opened(
    folder: Path, step: int = 0, identity: bytes = IDENTITY, state: list[torch.Tensor] | None = None
) -> Snapshots:
    """The snapshots of rank 3, over a state of `step`."""
    return Snapshots(folder, 3, state if state is not None else state_at(step), identity)


def save(snapshots: Snapshots, step: int) -> None:
    """Bring the state to `step` and save it."""
    for tensor, value in zip(snapshots.state, state_at(step), strict=True):
        tensor.copy_(value)
    snapshots.save(step, lambda: f"note of {step}".encode())


def holds(folder: Path, step: int) -> bool:
    """Whether another process, opening the file, loads exactly the state of `step`."""
    fresh = opened(folder, 999)
    note = fresh.load(step)
    return note == f"note of {step}".encode() and all(
        torch.equal(a, b) for a, b in zip(fresh.state, state_at(step), strict=True)
    )


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


class Died(Exception):
    """The rank was killed here."""


class DyingTensor:
    """Stands for the memory of a slot; the n-th copy into it never happens."""

    def __init__(self, lives: list[int], real: torch.Tensor, half: bool):
        self.lives, self.real, self.half = lives, real, half

    def copy_(self, other: torch.Tensor) -> None:
        if self.lives[0] == 0:
            if self.half:
                self.real[: len(self.real) // 2].copy_(other[: len(other) // 2])
            raise Died
        self.lives[0] -= 1
        self.real.copy_(other)


@pytest.mark.parametrize("half", [False, True], ids=["before", "in the middle of"])
@pytest.mark.parametrize("copies", [0, 1, 2])
def test_death_at_any_copy_leaves_the_step_before(tmp_path, copies, half):
    snapshots = opened(tmp_path)
    for step in (5, 6):
        save(snapshots, step)
    mapping, lives = snapshots._mapping, [copies]
    mapping.slots[:] = [[DyingTensor(lives, view, half) for view in views] for views in mapping.slots]
    with pytest.raises(Died):
        save(snapshots, 7)
    assert committed_steps(snapshots.path) == [6], "the slot being written is never taken for whole"
    assert holds(tmp_path, 6)
    save(opened(tmp_path), 7)
    assert committed_steps(snapshots.path) == [6, 7]
    assert holds(tmp_path, 7)


def test_death_before_the_marker_leaves_the_step_before(tmp_path):
    snapshots = opened(tmp_path)
    for step in (5, 6):
        save(snapshots, step)
    mark = snapshots._marker

    def die_at_the_commit(slot: int, value: int) -> None:
        if value:
            raise Died
        mark(slot, value)

    snapshots._marker = die_at_the_commit
    with pytest.raises(Died):
        save(snapshots, 7)
    assert committed_steps(snapshots.path) == [6]
    assert holds(tmp_path, 6)


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


@pytest.mark.parametrize("change", ["identity", "size", "truncated", "another file"])
def test_a_file_that_does_not_fit_is_made_anew(tmp_path, change):
    save(opened(tmp_path), 5)
    path = snapshot_path(tmp_path, 3)
    identity, state = IDENTITY, state_at(0)
    if change == "identity":
        identity = b"another identity"
    elif change == "size":
        state = [torch.zeros(7)]
    elif change == "truncated":
        os.truncate(path, 5000)
    else:
        path.write_bytes(b"something else")
    Snapshots(tmp_path, 3, state, identity)
    assert committed_steps(path) == []
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


def test_no_room_is_one_clear_sentence_and_leaves_no_file(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshot.os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError) as caught:
        opened(tmp_path / "job")
    message = str(caught.value)
    assert message.startswith(f"no room in shared memory for the snapshots: {tmp_path / 'job'} has ")
    assert "bytes free, this rank needs " in message
    assert list((tmp_path / "job").iterdir()) == []


def test_room_in_shared_memory_that_the_machine_does_not_have_is_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "memory_available", lambda: 1000)
    with pytest.raises(SharedMemoryError, match=f"{tmp_path} has 1000 bytes free, this rank needs "):
        opened(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_snapshots_are_private(tmp_path):
    snapshots = opened(tmp_path / "job")
    assert snapshots.path.stat().st_mode & 0o777 == 0o600
    assert snapshots.path.parent.stat().st_mode & 0o777 == 0o700


def test_committed_steps_needs_no_torch(tmp_path):
    save(opened(tmp_path), 5)
    program = (
        "import sys; from workers.checkpoint.snapshot import committed_steps\n"
        "print(committed_steps(sys.argv[1]), 'torch' in sys.modules)"
    )
    path = str(snapshot_path(tmp_path, 3))
    found = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60)
    assert found.stdout.split("\n")[0] == "[5] False", found.stderr


def test_fingerprints_tell_apart_what_does_not_fit():
    spec = {
        "model": {"layers": 2},
        "parallel": {"tensor": 1},
        "data": {"source": "text"},
        "train": {"precision": "fp32"},
    }
    prints = {
        fingerprint(spec, 0),
        fingerprint(spec, 1),
        fingerprint({**spec, "model": {"layers": 3}}, 0),
        fingerprint({**spec, "parallel": {"tensor": 2}}, 0),
        fingerprint({**spec, "train": {"precision": "bf16"}}, 0),
    }
    assert len(prints) == 5
    assert all(len(each) == 16 for each in prints)
