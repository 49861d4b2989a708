"""Snapshots in memory that a node's daemon holds: they outlive who made them, and end with the daemon."""

import errno
import mmap
import os
import signal
from pathlib import Path

import pytest
import torch
from held_memory import held_bytes
from rank_processes import begin_process
from stepped_snapshots import parts_of, snapshot_and_be_killed

from manta.workers.errors import SharedMemoryError
from manta.workers.snapshot import node_memory, snapshot_file
from manta.workers.snapshot.files import remove_other_layouts, snapshot_files, snapshot_path, stored_steps
from manta.workers.snapshot.node_memory import MemoryServer, SnapshotMemory, in_node_memory, register_file
from manta.workers.snapshot.snapshot_file import Form, SnapshotFile, committed_steps
from manta.workers.snapshot.snapshots import Snapshots

FORM = Form(b"0123456789abcdef", 5000, b"{}")


@pytest.fixture
def server(tmp_path):
    held = MemoryServer(tmp_path / "memory.sock", tmp_path / "snapshots")
    yield held
    held.close()


@pytest.fixture
def folder(tmp_path):
    """Of a job."""
    path = tmp_path / "snapshots" / "job"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def memory(tmp_path, server):
    return SnapshotMemory("node_memory", tmp_path / "memory.sock")


@pytest.fixture
def full(monkeypatch):
    """Shared memory without room; memory that is in no folder has some."""
    reserve = os.posix_fallocate

    def refused(descriptor, start, size):
        if "memfd" not in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, start, size)

    monkeypatch.setattr(snapshot_file.os, "posix_fallocate", refused)


def test_a_process_that_is_killed_leaves_its_snapshot(tmp_path, folder, server):
    process = begin_process(snapshot_and_be_killed, str(folder), str(tmp_path / "memory.sock"))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert stored_steps(folder, 3) == [7] and in_node_memory(snapshot_path(folder, 3))
    state = [torch.zeros(9)]
    assert Snapshots(folder, 3, parts_of(state), b"0123456789abcdef").load(7) == b"note"
    assert state[0].tolist() == list(range(9))
    server.close()
    assert stored_steps(folder, 3) == [], "with the daemon they are gone"


def test_memory_keeper_whose_socket_is_removed_keeps_its_files_and_takes_more(folder, memory, server, monkeypatch):
    monkeypatch.setattr(node_memory, "ABSENT_SECONDS", 60.0)
    for rank in (0, 1):
        memory.create(snapshot_path(folder, rank), FORM).close()
        memory.server.unlink()
    memory.create(snapshot_path(folder, 2), FORM).close()
    assert held_bytes(server) == 3 * FORM.size and len(snapshot_files(folder)) == 3


def test_snapshot_memory_is_freed_once_no_file_links_to_it(folder, memory, server):
    for rank in (0, 1):
        memory.create(snapshot_path(folder, rank), FORM).close()
    assert held_bytes(server) == 2 * FORM.size
    snapshot_path(folder, 0).rename(snapshot_path(folder, 5))  # as what was fetched gets its name
    server.free_unlinked()
    assert held_bytes(server) == 2 * FORM.size and [file.rank for file in snapshot_files(folder)] == [1, 5]
    snapshot_path(folder, 1).unlink()
    server.free_unlinked()
    assert held_bytes(server) == FORM.size


def test_memory_of_a_removed_layout_is_given_back_at_once(folder, memory, server):
    for tag in ("0a0a0a0a", "0b0b0b0b"):
        memory.create(snapshot_path(folder, 0, tag), FORM).close()
    assert remove_other_layouts(folder, "0b0b0b0b")
    assert held_bytes(server) == 2 * FORM.size
    memory.free_unlinked()
    assert held_bytes(server) == FORM.size and not remove_other_layouts(folder, "0b0b0b0b")
    server.close()
    memory.free_unlinked()  # there is nobody to ask, and nothing to be given


def test_new_file_replaces_the_old_one_which_stays_readable_for_its_holder(folder, memory, server):
    path = snapshot_path(folder, 0)
    before = memory.create(path, FORM)
    before.commit(0, 4)
    memory.create(path, FORM).close()
    assert held_bytes(server) == FORM.size
    assert before.step(0) == 4 and committed_steps(path) == []
    file = SnapshotFile.open(path, mmap.ACCESS_WRITE)
    assert file.form == FORM
    file.close()
    before.close()


def test_snapshots_go_to_the_daemon_if_shared_memory_has_no_room(tmp_path, folder, server, full, capsys):
    path, address = snapshot_path(folder, 0), tmp_path / "memory.sock"
    SnapshotMemory("auto", address).create(path, FORM).close()
    assert in_node_memory(path)
    assert f"this rank needs {FORM.size}" in capsys.readouterr().out
    for place, keeping in (("shared_memory", address), ("auto", None)):
        with pytest.raises(SharedMemoryError, match=rf"needs {FORM.size}; .* to node_memory or off"):
            SnapshotMemory(place, keeping).create(path, FORM)


def test_snapshots_stay_in_shared_memory_if_it_has_room(tmp_path, folder, server):
    path = snapshot_path(folder, 0)
    SnapshotMemory("auto", tmp_path / "memory.sock").create(path, FORM).close()
    assert path.is_file() and not path.is_symlink() and held_bytes(server) == 0


def test_snapshot_larger_than_the_machines_memory_is_refused_in_one_sentence(folder, memory, server, monkeypatch):
    for module in (snapshot_file, node_memory):
        monkeypatch.setattr(module, "memory_available", lambda: 1000)
    with pytest.raises(SharedMemoryError, match=f"1000 bytes can be had, this rank needs {FORM.size}; use a node"):
        memory.create(snapshot_path(folder, 0), FORM)
    assert held_bytes(server) == 0 and snapshot_files(folder) == []


def test_missing_daemon_is_reported_with_what_shared_memory_lacks(tmp_path, folder, full, monkeypatch):
    monkeypatch.setattr(node_memory, "ABSENT_SECONDS", 0.0)
    with pytest.raises(SharedMemoryError, match="no node's daemon here"):
        SnapshotMemory("node_memory").create(snapshot_path(folder, 0), FORM)
    with pytest.raises(SharedMemoryError, match=r"no room in shared memory .*; the node's daemon does not accept"):
        SnapshotMemory("auto", tmp_path / "nobody.sock").create(snapshot_path(folder, 0), FORM)


@pytest.mark.parametrize("path", ["elsewhere/job/rank", "snapshots/rank", "snapshots/../job/rank"])
def test_links_are_made_among_the_files_of_jobs_only(tmp_path, folder, memory, server, path):
    descriptor = os.memfd_create("manta-snapshot")
    with pytest.raises(OSError, match="is not a file of a job"):
        register_file(tmp_path / "memory.sock", tmp_path / path, descriptor)
    os.close(descriptor)


def test_links_of_an_earlier_daemon_are_ignored_and_removed(tmp_path, folder):
    """Its number, and those of its descriptors, may be anybody's by now."""
    other, read_end = os.pipe()
    of_nobody, of_a_pipe, of_this_number = (snapshot_path(folder, rank) for rank in range(3))
    of_nobody.symlink_to("/proc/999999999/fd/3")
    of_a_pipe.symlink_to(f"/proc/{os.getppid()}/fd/0")
    of_this_number.symlink_to(f"/proc/{os.getpid()}/fd/{other}")
    assert snapshot_files(folder) == [] and not in_node_memory(of_this_number)
    MemoryServer(tmp_path / "memory.sock", tmp_path / "snapshots").close()
    assert list(folder.iterdir()) == []
    for descriptor in (other, read_end):
        os.close(descriptor)
