"""Processes: their states and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from manta.workers.liveness.progress import Progress, ProgressReader, progress_path
from manta.workers.protocol.reports import Position, ProcessUse
from manta.workers.system.processes import ProcessState, ended, kill_group, process_state

PARENT = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); input()"


def test_process_group_ends_with_its_leader_even_if_stopped():
    command = [sys.executable, "-c", PARENT]
    leader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    child = psutil.Process(int(leader.stdout.readline()))
    os.kill(leader.pid, signal.SIGSTOP)
    kill_group(leader.pid)
    assert leader.wait(10) == -signal.SIGKILL
    psutil.wait_procs([child], 10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    kill_group(leader.pid)
    leader.communicate()


def _descriptors():
    return {each.name for each in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("given_up", [False, True])
def test_end_of_a_process_is_waited_for_and_leaves_no_descriptor_open(given_up):
    process, open_files = subprocess.Popen(["sleep", "1000"]), []

    async def body():
        open_files.append(_descriptors())
        waiting = asyncio.create_task(ended(process.pid))
        await asyncio.sleep(0)
        assert _descriptors() != open_files[0] and not waiting.done()
        if given_up:
            waiting.cancel()
        else:
            process.kill()
        await asyncio.wait({waiting}, timeout=10)
        assert waiting.done()
        open_files.append(_descriptors())

    asyncio.run(body())
    process.kill()
    process.wait()
    asyncio.run(ended(process.pid))
    assert open_files[0] == open_files[1]


def test_process_state_of_this_process_is_running_with_its_cpu_time():
    tick = 1 / os.sysconf("SC_CLK_TCK")
    before = os.times()
    state = process_state(os.getpid())
    after = os.times()
    assert state.letter == "R" and not state.stopped
    assert before.user + before.system - 2 * tick <= state.cpu_seconds <= after.user + after.system + 2 * tick
    assert 0.0 < state.main_cpu_seconds <= state.cpu_seconds + 2 * tick
    assert state.delay_seconds >= 0.0


def test_process_state_handles_any_program_name_and_a_process_that_is_gone(tmp_path):
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


@pytest.mark.parametrize("schedstat", [None, "2500000000 750000000 42\n"])
def test_process_times_in_nanoseconds_become_seconds_and_have_no_delay_if_unknown(monkeypatch, schedstat):
    read = Path.read_text

    def changed(path, **options):
        if path.name != "schedstat":
            return read(path, **options)
        if schedstat is None:
            raise FileNotFoundError
        return schedstat

    monkeypatch.setattr(Path, "read_text", changed)
    state = process_state(os.getpid())
    assert (state.main_cpu_seconds, state.delay_seconds) == ((2.5, 0.75) if schedstat else (state.cpu_seconds, 0.0))
    assert state.cpu_seconds > 0.0


def test_process_use_has_rounded_cpu_and_delay_seconds():
    assert ProcessUse.of(ProcessState("S", 1.234, 9.0, 5.678)) == ProcessUse("S", 1.23, 5.68)


def test_trainer_position_has_all_fields_of_its_progress_record(tmp_path):
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
