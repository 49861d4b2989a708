"""The service as a process: kill -9 and back again, taken ports, and what is left behind."""

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from benchmarks.support import own_processes
from manta.api.serving.local_service import running_service
from manta.workers.snapshot.files import stored_steps
from tests.e2e.manta import MIDDLE, PAIR
from tests.e2e.traces import traces_of


def snapshot_step(manta, job):
    """The newest step in rank 0's shared memory."""
    return max(stored_steps(manta.paths.snapshot_folder(job), 0))


def test_training_is_undisturbed_by_the_end_of_the_service(manta):
    job = manta.submit(manta.spec(steps=10_000, layout=PAIR))
    manta.leave_room(job)
    manta.until_step(job, 5)
    before = manta.pids(job)
    for times, how in enumerate((signal.SIGKILL, signal.SIGTERM), start=1):
        manta.kill_service(how)
        seen = snapshot_step(manta, job)
        manta.until("five steps without a service", lambda seen=seen: snapshot_step(manta, job) >= seen + 5)
        manta.start()
        manta.until("the take-over", lambda times=times: len(manta.events(job, "adopted")) == times)
        manta.until_step(job, manta.client.job(job).step + 5)
        adopted = manta.client.job(job)
        assert (adopted.state, adopted.generation, adopted.restarts) == ("RUNNING", 1, 0)
        assert manta.pids(job) == before
    steps = [step for step, _, _ in manta.curve(job)]
    assert steps == list(range(1, len(steps) + 1))
    manta.cancel(job)
    assert manta.leftovers(job) == []


def test_rank_that_died_while_the_service_was_away(manta, pair_undisturbed, kill):
    job = manta.submit_held(manta.spec(layout=PAIR), 1)
    victim = manta.pids(job)[1]
    manta.kill_service()
    kill(victim)
    manta.start()
    ended = manta.succeeded(job, pair_undisturbed)
    assert ended.restarts == 1


def test_user_packages_named_like_folders_of_manta_are_never_imported(manta, users_packages):
    job = manta.submit_held(manta.spec(layout=PAIR), 1)
    ranks, zygotes = map(psutil.Process, manta.pids(job)), own_processes.zygotes(manta.paths)
    for process in (*ranks, *zygotes, *manta.agents(), psutil.Process(int(running_service(manta.home)["pid"]))):
        assert str(users_packages) in process.environ()["PYTHONPATH"], "this process would not find them"
    manta.release_job(job, 1)
    manta.until_state(job, "SUCCEEDED")
    assert not (users_packages / "imported").exists()


@pytest.mark.soak  # what is decided: tests/service/job/test_adoption.py
def test_agent_that_died_while_the_service_was_away_costs_no_other_process(manta):
    job = manta.submit(manta.spec(layout=PAIR, steps=10_000))
    manta.leave_room(job)
    manta.until_step(job, MIDDLE)
    before = manta.pids(job)
    manta.kill_service()
    seen = snapshot_step(manta, job)
    manta.until("five steps without a service", lambda: snapshot_step(manta, job) >= seen + 5)
    lost = manta.agents()[1]
    lost.kill()
    lost.wait()
    manta.start()
    manta.until_generation(job, 2)
    manta.until_step(job, seen + 20)
    after = manta.pids(job)
    assert len(set(before) & set(after)) == len(before) - 1
    (recovery,) = manta.until("its record", lambda: manta.client.recoveries(job).items)
    assert recovery.kind == "agent_lost"
    manta.cancel(job)
    steps = [step for step, _, _ in manta.curve(job)]
    assert steps == list(range(1, len(steps) + 1)), "what was committed while nobody listened is there"
    assert manta.leftovers(job) == []


def test_jobs_are_taken_over_in_every_state(manta, pair_undisturbed, kill):
    cancelled = manta.submit_held(manta.spec(10_000, PAIR), 1)
    recovering = manta.submit_held(manta.spec(layout=PAIR), 1)
    with manta.zygote_stopped():
        kill(manta.pids(recovering)[1])
        manta.until_state(recovering, "RECOVERING")
        starting = manta.submit(manta.spec(layout=PAIR))
        manta.until_state(starting, "STARTING")
        manta.client.cancel(cancelled)
        manta.kill_service()
    manta.start()
    manta.until_state(cancelled, "CANCELLED")
    for job in (starting, recovering):
        manta.succeeded(job, pair_undisturbed)
    assert manta.events(recovering, "recovered") and not manta.events(starting, "recovered")
    for job in (starting, recovering, cancelled):
        assert manta.leftovers(job) == []


@pytest.mark.soak  # what is decided: tests/service/job/test_adoption.py
def test_change_of_size_is_carried_on_by_the_next_service(manta):
    spec = manta.spec(20_000, PAIR, train={"deterministic": "elastic"}, elastic={"min_data": 1, "max_data": 2})
    job = manta.submit_held(spec, 1, 5)  # a rank that leaves
    before = manta.pids(job)
    manta.client.resize(job, 1)
    manta.until_state(job, "RESIZING")
    manta.kill_service()
    manta.start()
    manta.until("one replica", lambda: manta.client.job(job).parallel["data"] == 1)
    manta.until_state(job, "RUNNING")
    resized = manta.client.job(job)
    manta.until_step(job, resized.step + 5)
    assert manta.pids(job) == before[:1], "those who stay keep their processes"
    assert resized.restarts == 0
    assert manta.events(job, "rank_lost") == []
    manta.cancel(job)
    steps = [step for step, _, _ in manta.curve(job)]
    assert steps == list(range(1, len(steps) + 1))
    assert manta.leftovers(job) == []


def manta_command(home, *words):
    """Run `manta` with `home`; its exit code and what it printed."""
    command = [sys.executable, "-m", "manta.api.cli", *words]
    environment = {**os.environ, "MANTA_HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_second_up_says_that_the_service_runs_already(manta):
    code, said = manta_command(manta.home, "up", "--port", "0")
    assert code == 0
    assert manta.url in said
    code, said = manta_command(manta.home, "serve", "--port", "0")
    assert code != 0
    assert "runs already" in said.splitlines()[-1], "the last line says what is wrong"
    assert "Traceback" not in said


@pytest.mark.soak  # the sentence itself: tests/api/test_server.py
def test_up_on_a_port_in_use_is_one_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = manta_command(tmp_path / "home", "up", "--port", str(port))
    assert code != 0
    assert f"127.0.0.1:{port}" in said.replace("\n", "")
    assert "Traceback" not in said
    assert traces_of(tmp_path / "home") == []
