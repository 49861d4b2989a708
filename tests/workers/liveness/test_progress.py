"""The record of progress: readable whatever the writer does, and next to free to write."""

import asyncio
import errno
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from manta.workers.liveness import progress
from manta.workers.liveness.progress import (
    COUNTED,
    PHASES,
    RECENT,
    RECORD_BYTES,
    Progress,
    ProgressReader,
    progress_path,
)
from manta.workers.liveness.stacks import STACKS_SIGNAL, answer_with_stacks, capture_stacks, stacks_path

ROOT = Path(__file__).parents[3]


@pytest.fixture
def pair(tmp_path):
    """A writer and a reader of one record."""
    writer = Progress.shared(tmp_path, 3)
    reader = ProgressReader(progress_path(tmp_path, 3))
    yield writer, reader
    reader.close()


def test_progress_record_is_read_as_it_was_written(pair):
    writer, reader = pair
    assert reader.read().phase == "starting"
    assert reader.read().pid == os.getpid()
    writer.belongs_to(7)
    writer.begin_step(41)
    writer.at("backward", 5)
    writer.entered("tensor")
    writer.entered("sent")
    writer.waits_for(2, 1, sending=True)
    record = reader.read()
    assert (record.generation, record.step, record.phase, record.micro_batch) == (7, 41, "backward", 5)
    assert (record.waits_for, record.channel, record.sending) == (2, 1, True)
    assert record.counts == {**dict.fromkeys(COUNTED, 0), "tensor": 1, "sent": 1}
    assert not record.torn
    writer.moved()
    writer.at("optimizer")
    record = reader.read()
    assert (record.waits_for, record.phase, record.micro_batch, record.step) == (None, "optimizer", None, 41)


@pytest.mark.parametrize("peer", [0, 1, 16_383])
@pytest.mark.parametrize("channel", [0, 4, 255])
@pytest.mark.parametrize("sending", [False, True])
def test_every_wait_comes_back_as_it_was(pair, peer, channel, sending):
    writer, reader = pair
    writer.waits_for(peer, channel, sending)
    record = reader.read()
    assert (record.waits_for, record.channel, record.sending) == (peer, channel, sending)


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_comes_back_as_it_was(pair, phase):
    writer, reader = pair
    writer.begin_step(10**9)
    writer.at(phase, 2**20 - 2)
    record = reader.read()
    assert (record.step, record.phase, record.micro_batch) == (10**9, phase, 2**20 - 2)


def test_each_change_moves_the_heartbeat(pair):
    writer, reader = pair
    changes = [
        lambda: writer.begin_step(1),
        lambda: writer.at("forward", 0),
        lambda: writer.entered("world"),
        lambda: writer.moved(),
        lambda: writer.commit(1),
        lambda: writer.belongs_to(2),
    ]
    last = reader.read().heartbeat
    for change in changes:
        change()
        now = reader.read().heartbeat
        assert now > last
        last = now


def test_progress_counts_restart_with_each_generation(pair):
    """Else a new process beside others that have lived through more would seem to be behind them all."""
    writer, reader = pair
    writer.belongs_to(1)
    for what in COUNTED:
        writer.entered(what)
    writer.belongs_to(2)
    assert reader.read().counts == dict.fromkeys(COUNTED, 0)
    writer.entered("world")
    writer.belongs_to(2)  # said again when its state is restored
    assert reader.read().counts == {**dict.fromkeys(COUNTED, 0), "world": 1}


def test_times_of_the_last_steps_are_kept(pair):
    writer, reader = pair
    for step in range(1, RECENT + 6):
        writer.moved(waited=10.0)  # before the step
        writer.begin_step(step)
        writer.commit(step)
    record = reader.read()
    assert (record.committed, record.commits) == (RECENT + 5, RECENT + 5)
    assert len(record.step_seconds) == len(record.own_seconds) == RECENT
    assert all(0 <= own <= whole for own, whole in zip(record.own_seconds, record.step_seconds, strict=True))


def test_times_are_those_of_each_step_in_nanoseconds_of_its_clock(pair, monkeypatch):
    writer, reader = pair
    now = [5_000_000_000]
    monkeypatch.setattr(progress.time, "monotonic_ns", lambda: now[0])
    for step, seconds in ((1, 2), (2, 3)):
        writer.begin_step(step)
        now[0] += 1_000_000_000
        writer.moved(waited=0.5)
        writer.at("backward")
        now[0] += (seconds - 1) * 1_000_000_000
        assert writer.own_seconds() == seconds - 0.5
        writer.commit(step)
    record = reader.read()
    assert record.step_seconds == (2.0, 3.0), "and no more than there were steps"
    assert record.own_seconds == (1.5, 2.5)
    assert (record.changed_at, record.committed_at) == (8.0, 10.0)


def test_the_oldest_of_the_last_steps_makes_room(pair, monkeypatch):
    writer, reader = pair
    now = [0]
    monkeypatch.setattr(progress.time, "monotonic_ns", lambda: now[0])
    for step in range(1, RECENT + 3):
        writer.begin_step(step)
        now[0] += step * 1_000_000_000
        writer.commit(step)
    assert sorted(reader.read().step_seconds) == [float(step) for step in range(3, RECENT + 3)]


def test_progress_record_that_was_never_begun_reads_as_none(tmp_path):
    path = progress_path(tmp_path, 0)
    path.write_bytes(bytes(RECORD_BYTES))
    reader = ProgressReader(path)
    assert reader.read() is None
    reader.close()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="length"):
        ProgressReader(path)


def test_record_of_a_release_that_counts_less_is_read_with_zeros(tmp_path):
    writer, path = Progress.shared(tmp_path, 0), progress_path(tmp_path, 0)
    for what in COUNTED:
        writer.entered(what)
    path.write_bytes(path.read_bytes()[: progress.Layout.later_counts.offset])
    reader = ProgressReader(path)
    assert reader.read().counts == {**dict.fromkeys(COUNTED, 1), **dict.fromkeys(COUNTED[-4:], 0)}
    reader.close()


def test_time_spent_waiting_in_a_step_is_not_the_ranks_own(pair, monkeypatch):
    writer, reader = pair
    monkeypatch.setattr(progress.time, "monotonic_ns", lambda: 5_000_000_000)
    writer.begin_step(1)
    writer.moved(waited=0.25)
    assert writer.own_seconds() == -0.25, "the clock has not moved at all"
    writer.commit(1)
    record = reader.read()
    assert record.step_seconds[0] - record.own_seconds[0] == pytest.approx(0.25)


def test_a_record_under_change_is_never_read_half(pair):
    """Step and committed step are always one apart in what the writer writes under its sequence number."""
    writer, reader = pair
    over = threading.Event()

    def write():
        step = 0
        while not over.is_set():
            step += 1
            writer.commit(step)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        whole = [record for record in (reader.read() for _ in range(300)) if not record.torn]
    finally:
        over.set()
        thread.join()
    assert all(record.committed == record.commits for record in whole)


def test_a_writer_that_stops_in_the_middle_of_a_change_is_seen_as_torn(pair):
    writer, reader = pair
    writer.commit(1)
    words = memoryview(writer.memory).cast("q")
    words[1] += 1  # the sequence number: odd while words are written
    assert reader.read().torn
    assert reader.read().committed == 1


def test_a_new_process_of_the_rank_writes_elsewhere(tmp_path):
    old = Progress.shared(tmp_path, 0)
    Progress.shared(tmp_path, 0).begin_step(5)
    old.begin_step(99)  # it was stopped, and wakes up after it was replaced
    reader = ProgressReader(progress_path(tmp_path, 0))
    assert reader.read().step == 5
    reader.close()
    assert [file.name for file in tmp_path.iterdir()] == ["rank-00000.progress"]


def test_a_folder_that_cannot_be_written_turns_the_record_off(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    private = Progress.shared(tmp_path / "file" / "job", 0)
    private.begin_step(1)
    assert len(private.memory) == RECORD_BYTES and (tmp_path / "file").is_file()


@pytest.mark.parametrize("be", [Path.mkdir, os.mkfifo])
def test_pipe_or_folder_in_the_place_of_a_progress_record_is_replaced(tmp_path, be):
    path, stacks = progress_path(tmp_path, 3), stacks_path(tmp_path, 3)
    for each in (path, stacks):
        be(each)
    with pytest.raises(OSError, match="not a regular file"):
        ProgressReader(path)
    Progress.shared(tmp_path, 3)
    reader = ProgressReader(path)
    assert reader.read().pid == os.getpid()
    reader.close()
    try:
        answer_with_stacks(tmp_path, 3)
        assert stacks.is_file() and "test_progress" in asyncio.run(capture_stacks(os.getpid(), stacks))
        stacks.unlink()
        be(stacks)
        assert "State:" in asyncio.run(capture_stacks(os.getpid(), stacks)), "what the kernel says"
    finally:
        faulthandler.unregister(STACKS_SIGNAL)


def test_shared_memory_without_room_turns_the_record_off_and_is_left_as_it_was(tmp_path, monkeypatch):
    closed, close = [], os.close
    monkeypatch.setattr(
        progress.os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    )
    monkeypatch.setattr(progress.os, "close", lambda descriptor: closed.append(descriptor) or close(descriptor))
    Progress.shared(tmp_path, 0).begin_step(1)
    assert list(tmp_path.iterdir()) == []
    assert len(closed) == 1


def test_progress_tells_its_own_process_the_current_step():
    own = Progress()
    own.begin_step(41)
    own.at("backward", 7)
    assert own.step == 41


def test_reading_needs_nothing_of_a_stopped_process(tmp_path):
    program = (
        "import sys; from manta.workers.liveness.progress import Progress\n"
        f"p = Progress.shared({str(tmp_path)!r}, 1); p.begin_step(12); p.at('forward', 2)\n"
        "print('up', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "up\n"
        os.kill(child.pid, signal.SIGSTOP)
        reader = ProgressReader(progress_path(tmp_path, 1))
        record = reader.read()
        reader.close()
        assert (record.pid, record.step, record.phase, record.micro_batch) == (child.pid, 12, "forward", 2)
    finally:
        child.kill()
        child.communicate()


def test_agents_can_read_it_without_torch():
    program = (
        "import sys, manta.workers.liveness.progress, manta.workers.liveness.stacks; print('torch' in sys.modules)"
    )
    program_run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert program_run.stdout.strip() == "False"
