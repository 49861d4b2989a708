"""What the kernel says about a process is read as it means it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil

from manta.workers.liveness.progress import Progress, ProgressReader, progress_path
from manta.workers.protocol.reports import Position, ProcessUse
from manta.workers.system.processes import ProcessState, process_state


def test_a_process_that_computes_runs_and_its_time_is_that_of_all_of_it():
    tick = 1 / os.sysconf("SC_CLK_TCK")
    before = os.times()
    state = process_state(os.getpid())
    after = os.times()
    assert state.letter == "R" and not state.stopped
    assert before.user + before.system - 2 * tick <= state.cpu_seconds <= after.user + after.system + 2 * tick
    assert 0.0 < state.main_cpu_seconds <= state.cpu_seconds + 2 * tick
    assert state.delay_seconds >= 0.0


def test_a_process_whose_name_holds_anything_is_read_all_the_same_until_it_is_gone(tmp_path):
    program = tmp_path / "a) R 7"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "1000"])
    try:
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            continue
        assert process_state(process.pid).stopped
    finally:
        process.kill()
        process.wait()
    assert process_state(process.pid) is None


def test_where_the_kernel_does_not_count_waits_there_are_none(monkeypatch):
    read = Path.read_text

    def without(path, **options):
        if path.name == "schedstat":
            raise FileNotFoundError
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", without)
    state = process_state(os.getpid())
    assert (state.main_cpu_seconds, state.delay_seconds) == (state.cpu_seconds, 0.0)
    assert state.cpu_seconds > 0.0


def test_times_that_the_kernel_counts_in_nanoseconds_are_seconds(monkeypatch):
    read = Path.read_text

    def counted(path, **options):
        return "2500000000 750000000 42\n" if path.name == "schedstat" else read(path, **options)

    monkeypatch.setattr(Path, "read_text", counted)
    state = process_state(os.getpid())
    assert (state.main_cpu_seconds, state.delay_seconds) == (2.5, 0.75)


def test_what_is_known_of_a_process_is_its_time_and_what_it_waited_for_a_processor():
    assert ProcessUse.of(ProcessState("S", 1.234, 9.0, 5.678)) == ProcessUse("S", 1.23, 5.68)


def test_where_a_trainer_stands_is_reported_with_all_that_its_record_says(tmp_path):
    progress = Progress.shared(tmp_path, 2)
    progress.belongs_to(3)
    progress.begin_step(7)
    progress.at("forward", 2)
    progress.entered("data")
    progress.waits_for(1, 4, sending=True)
    progress.commit(6)
    reader = ProgressReader(progress_path(tmp_path, 2))
    record = reader.read()
    reader.close()
    counts = {**dict.fromkeys(record.counts, 0), "data": 1}
    assert Position.of(record) == Position(
        os.getpid(), 3, "forward", 7, 2, 1, 4, True, counts, 6, 1, record.heartbeat, False
    )
