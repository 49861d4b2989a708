"""An agent's health check of real processes: stopped, holding their interpreter's lock, computing, at rest."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manta.workers.liveness import hang_detection
from manta.workers.liveness.hang_detection import (
    BURNING_FACTOR,
    DEVICE_SECONDS,
    MIN_SECONDS,
    POLL_SECONDS,
    STOPPED_SECONDS,
    WAITING_FACTOR,
    Standstill,
    TrainerWatch,
)
from manta.workers.liveness.progress import DEVICE_CHECKED_AT, NOBODY, Progress
from manta.workers.liveness.stacks import capture_stacks, stacks_path
from manta.workers.snapshot.files import snapshot_path
from manta.workers.system.processes import ProcessState, process_state

ROOT = Path(__file__).parents[3]
BEGIN = """
import ctypes, sys, time
from manta.workers.liveness.progress import Progress
from manta.workers.liveness.stacks import answer_with_stacks
from manta.workers.rank.faults import hang
folder = sys.argv[1]
answer_with_stacks(folder, 2)
progress = Progress.shared(folder, 2)
for step in range(1, 5):
    progress.begin_step(step)
    time.sleep(0.01)
    progress.commit(step)
progress.begin_step(5)
def stuck():
    hang(hold_gil=True)
"""


@pytest.fixture
def child(tmp_path):
    """Starts a process that writes the record of rank 2 and then runs a piece of Python; it is up when this returns."""
    started = []

    def start(then):
        program = f"{BEGIN}\nprogress.at('backward', 3)\nprint('up', flush=True)\n{then}\n"
        command = [sys.executable, "-c", program, str(tmp_path)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def watched(tmp_path, go):
    """What a watch tells about a process until it has told `count` times; `meanwhile` runs beside it."""

    def watch(process, count, meanwhile=None):
        async def body():
            standstills, enough = [], asyncio.Event()

            def tell(data):
                standstills.append(data)
                if len(standstills) >= count:
                    enough.set()

            eye = TrainerWatch(process.pid, 2, tmp_path, False, tell)
            looking = asyncio.create_task(eye.run())
            if meanwhile is not None:
                await meanwhile(eye, standstills)
            if count:
                await enough.wait()
            looking.cancel()
            return standstills

        return go(body)

    return watch


def test_stopped_process_is_reported_once_and_again_when_it_continues(child, watched):
    process = child("for n in range(10**9): progress.at('backward', n % 4); time.sleep(0.01)")
    os.kill(process.pid, signal.SIGSTOP)

    async def wake(eye, standstills):
        while not standstills:
            await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGCONT)
        while eye.describe().record.heartbeat == standstills[0].record.heartbeat:
            await asyncio.sleep(0.05)

    stopped, moving = watched(process, 2, wake)
    assert (stopped.overdue, stopped.stopped, stopped.process.state) == (True, True, "T")
    assert (stopped.record.phase, stopped.record.step) == ("backward", 5)
    assert (moving.overdue, moving.stopped) == (False, False)


@pytest.fixture
def patient(monkeypatch):
    """Whoever asks for stacks waits for them, however long a busy machine keeps the process from answering."""
    monkeypatch.setattr("manta.workers.liveness.stacks._ANSWER_SECONDS", 30.0)


def test_deadlocked_process_is_noticed_and_its_stacks_are_reported(child, watched, tmp_path, go, patient):
    process = child("stuck()")
    (standstill,) = watched(process, 1)
    assert (standstill.overdue, standstill.stopped, standstill.burning) == (True, False, False)
    assert standstill.standing_seconds >= MIN_SECONDS
    assert (standstill.record.phase, standstill.record.micro_batch) == ("backward", 3)
    stacks = go(lambda: capture_stacks(process.pid, stacks_path(tmp_path, 2)))
    assert "in stuck" in stacks
    assert "in hang" in stacks


IN_PIECES = """
import signal, sys, time
def answer(number, frame):
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})  # as in a handler that is written in C
    for piece in ("one ", "two"):
        print(piece, end="", flush=True)
        time.sleep(0.3)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
signal.signal(signal.SIGUSR2, answer)
print("up", file=sys.stderr, flush=True)
while True:
    signal.pause()
"""


def test_stacks_that_arrive_in_pieces_are_read_to_their_end(tmp_path, go, patient):
    """As that of a process that has to wait for a processor after each line."""
    path = stacks_path(tmp_path, 2)
    with path.open("w") as answers:
        command = [sys.executable, "-c", IN_PIECES]
        process = subprocess.Popen(command, stdout=answers, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr.readline() == "up\n"
        assert go(lambda: capture_stacks(process.pid, path)) == "one two"
    finally:
        process.kill()
        process.communicate()


def test_stacks_of_a_stopped_process_come_from_the_kernel(child, tmp_path, go):
    process = child("stuck()")
    os.kill(process.pid, signal.SIGSTOP)
    while not process_state(process.pid).stopped:  # before that it may still answer
        continue
    stacks = go(lambda: capture_stacks(process.pid, stacks_path(tmp_path, 2)))
    assert "stopped" in stacks


def test_stacks_of_a_silent_process_come_from_the_kernel_after_a_while(go, tmp_path, monkeypatch):
    monkeypatch.setattr("manta.workers.liveness.stacks._ANSWER_SECONDS", 0.1)
    path = stacks_path(tmp_path, 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("what it said an hour ago")
    deaf = "trap '' USR2; echo deaf; exec sleep 1000"
    with subprocess.Popen(["sh", "-c", deaf], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"deaf\n"
            answer = go(lambda: capture_stacks(process.pid, path))
            assert "State" in answer
            assert "an hour ago" not in answer
        finally:
            process.kill()


def test_stacks_of_a_process_that_is_gone_are_empty(go, tmp_path):
    process = subprocess.Popen(["true"])
    process.wait()
    stacks_path(tmp_path, 2).touch()
    assert go(lambda: capture_stacks(process.pid, stacks_path(tmp_path, 2))) == ""


@pytest.mark.parametrize("before", [False, True], ids=["first", "after another"])
def test_a_process_that_never_offered_its_stacks_is_not_killed_by_the_question(go, tmp_path, before):
    """What the process before it has left in its place is no offer."""
    process = subprocess.Popen(["sleep", "1000"])
    if before:
        stacks_path(tmp_path, 2).write_text("what it said an hour ago")
    try:
        stacks = go(lambda: capture_stacks(process.pid, stacks_path(tmp_path, 2)))
        assert "State" in stacks
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.soak
@pytest.mark.parametrize("then", ["progress.at('resting')\ntime.sleep(1000)", "while True: pass"])
def test_resting_or_computing_process_is_not_reported(child, watched, then):
    process = child(then)

    async def look_on(eye, standstills):
        while eye.describe().standing_seconds < 2 * MIN_SECONDS:
            await asyncio.sleep(0.05)
        assert standstills == []
        assert not eye.overdue

    assert watched(process, 0, look_on) == []


@pytest.fixture
def look_at(tmp_path, monkeypatch):
    """A watch over a process whose record this test writes, and whose state and clock it sets: (record, look)."""
    clock, state = [100.0], ["S"]

    def process_state(pid):
        used = clock[0] if state[0] == "R" else 1.0
        return ProcessState(state[0], used, used, 0.0)

    monkeypatch.setattr(hang_detection, "process_state", process_state)
    monkeypatch.setattr(hang_detection.time, "monotonic", lambda: clock[0])
    progress = Progress.shared(tmp_path, 2)
    for step in range(1, 5):
        progress.begin_step(step)
        progress.commit(step)
    progress.begin_step(5)
    watch = TrainerWatch(os.getpid(), 2, tmp_path, False, lambda status: None)

    def poll(seconds, letter="S"):
        """Look as often as the watch does for so many seconds, and return the watch."""
        state[0] = letter
        for _ in range(round(seconds / POLL_SECONDS) + 1):
            assert watch.poll()
            clock[0] += POLL_SECONDS
        return watch

    return progress, poll


def test_progress_record_of_another_process_is_ignored(tmp_path):
    Progress.shared(tmp_path, 2).at("done")
    other = subprocess.Popen(["sleep", "1000"])
    try:
        watch = TrainerWatch(other.pid, 2, tmp_path, False, lambda status: None)
        assert watch.poll()
        assert watch.describe().record is None
    finally:
        other.kill()
        other.wait()


def test_stopped_process_is_overdue_after_a_second_unless_it_is_done(look_at):
    progress, look = look_at
    progress.at("checkpoint")
    assert not look(STOPPED_SECONDS / 2, "T").overdue
    assert look(2 * STOPPED_SECONDS, "T").overdue
    progress.at("done")
    watch = look(2 * STOPPED_SECONDS, "T")
    assert watch.describe().stopped
    assert not watch.overdue


def test_process_stopped_at_rest_is_reported_again_in_the_next_generation(look_at):
    """Whose others wait for it: nobody heeds what was said while all rested."""
    progress, look = look_at
    progress.at("resting")
    watch, said = look(0.0), []
    watch._report = said.append
    look(2 * STOPPED_SECONDS, "T")
    assert [each.overdue for each in said] == [True]
    watch.enter_generation(ranks=4)
    look(0.0, "T")
    assert [each.overdue for each in said] == [True, True]


@pytest.mark.parametrize(
    ("phase", "letter", "overdue"), [("backward", "S", True), ("backward", "R", False), ("resting", "S", False)]
)
def test_rest_and_computing_are_allowed_to_last_longer_than_ordinary_phases(look_at, phase, letter, overdue):
    progress, look = look_at
    progress.at(phase)
    watch = look(2 * MIN_SECONDS, letter)
    assert watch.describe().standing_seconds == 2 * MIN_SECONDS
    assert watch.describe().burning == (letter == "R")
    assert watch.overdue == overdue


@pytest.mark.parametrize("peer", [0, 1])
def test_rank_waiting_for_another_may_stand_still_for_longer(look_at, peer):
    progress, look = look_at
    progress.at("forward")
    assert look(0).allowed == MIN_SECONDS
    progress.waits_for(peer, 2, sending=False)
    assert look(0).allowed == WAITING_FACTOR * MIN_SECONDS
    assert not look(2 * MIN_SECONDS).overdue
    assert look(2 * MIN_SECONDS).overdue


def test_hang_timeout_of_a_snapshot_grows_with_its_size(tmp_path, look_at):
    progress, look = look_at
    progress.at("snapshot")
    assert look(0).allowed == 30.0
    for rank, size in ((2, 80e9), (3, 500e9)):
        with snapshot_path(tmp_path, rank, "0" * 8).open("wb") as file:
            file.truncate(int(size))  # nothing of it takes room
    assert look(0).allowed == 30.0 + 40e9 / 200e6
    progress.at("forward")
    assert look(0).allowed == MIN_SECONDS


def test_hang_watch_closes_the_record_of_a_gone_process(tmp_path, go, monkeypatch):
    Progress.shared(tmp_path, 2).commit(7)
    watch = TrainerWatch(os.getpid(), 2, tmp_path, False, lambda status: None)
    assert watch.poll() and watch.describe().record.committed == 7
    memory = watch._reader._memory
    monkeypatch.setattr(hang_detection, "process_state", lambda pid: None)
    go(watch.run)
    assert memory.closed and watch._reader is None


def test_progress_record_of_a_former_process_is_ignored(tmp_path):
    """Its step may be far from where the new process begins, and it never changes again."""
    before = Progress.shared(tmp_path, 2)
    memoryview(before.memory).cast("q")[2] = os.getppid()
    watch = TrainerWatch(os.getpid(), 2, tmp_path, False, lambda status: None)
    assert watch.poll() and watch.describe().record is None
    Progress.shared(tmp_path, 2).commit(7)
    assert watch.poll() and watch.describe().record.committed == 7


async def test_watch_for_a_commit_waits_for_a_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(hang_detection, "COMMIT_POLL_SECONDS", 0.0)
    monkeypatch.setattr(hang_detection, "COMMIT_SECONDS", 0.01)
    progress = Progress.shared(tmp_path, 2)
    progress.commit(7)
    watch = TrainerWatch(os.getpid(), 2, tmp_path, False, lambda status: None)
    watch.poll()
    assert not await watch.next_commit()
    progress.commit(7)  # the same step, done again
    monkeypatch.setattr(hang_detection, "COMMIT_SECONDS", 20.0)
    assert await watch.next_commit()


@pytest.fixture
def device_of(look_at):
    """Has the record say that the device was looked at just now, with so many marks before it."""
    progress, _ = look_at

    def tell(pending, moves=0):
        progress.device_polled(moves, pending)
        clock = memoryview(progress.memory).cast("q")
        clock[DEVICE_CHECKED_AT] = round(hang_detection.time.monotonic() * 1e9)

    return tell


def test_hang_timeout_is_not_extended_for_a_host_spinning_on_its_device(look_at, device_of, monkeypatch):
    progress, look = look_at
    monkeypatch.setattr(Standstill, "burning", True)
    progress.at("agreement")
    device_of(pending=0)
    assert look(0).allowed == BURNING_FACTOR * MIN_SECONDS, "the device has nothing to do: the host computes"
    device_of(pending=3)
    assert look(0).allowed == MIN_SECONDS
    progress.device_waits(2, 7, NOBODY, sending=False)
    assert look(0).allowed == WAITING_FACTOR * MIN_SECONDS
    assert look(0).describe().record.device.number == 7


def test_stale_device_record_is_not_used_by_the_hang_watch(look_at, device_of, monkeypatch):
    progress, look = look_at
    monkeypatch.setattr(Standstill, "burning", True)
    device_of(pending=3)
    progress.device_waits(2, 7, 1, sending=False)
    assert look(DEVICE_SECONDS / 2).describe().record.device.fresh
    watch = look(DEVICE_SECONDS)
    assert not watch.describe().record.device.fresh
    assert watch.allowed == BURNING_FACTOR * MIN_SECONDS


def test_moving_device_keeps_its_host_from_being_overdue(look_at, device_of):
    progress, look = look_at
    progress.at("agreement")
    for _ in range(8):
        device_of(pending=3, moves=1)
        assert not look(MIN_SECONDS / 2).overdue
    device_of(pending=3)
    assert look(2 * MIN_SECONDS).overdue
