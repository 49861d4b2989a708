"""A rank that stands still is found, named with evidence, ended and replaced; the loss curve does not show it."""

import contextlib
import os
import signal
import threading

import psutil
import pytest

from tests.e2e.manta import HOLD_SECONDS, MIDDLE, PAIR


def wake(pid):
    """SIGCONT to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_hang_of_a_stopped_rank_is_blamed_on_it_and_it_is_replaced(manta, pair_undisturbed):
    """One after the other: the last rank, and the one that reports."""
    with manta.starting(manta.spec(layout=PAIR)) as (job, inject):
        for number, rank in enumerate((1, 0)):
            inject("slow", rank, at_step=MIDDLE + 10 * number + 1, seconds=HOLD_SECONDS)
    for number, rank in enumerate((1, 0)):
        manta.until_step(job, MIDDLE + 10 * number)
        process = psutil.Process(manta.pids(job)[rank])
        process.suspend()
        manta.until_recovered(job, number + 1)
        assert not process.is_running(), "nothing is there that could wake up"
    ended = manta.succeeded(job, pair_undisturbed)
    assert (ended.restarts, ended.generation) == (2, 3)
    hangs = manta.events(job, "rank_hung")
    assert [hung.rank for hung in hangs] == [1, 0]
    for hung in hangs:
        assert (hung.data["stopped"], hung.data["process"]["state"]) == (True, "T")
        assert "stopped" in hung.data["stacks"], "what the kernel says of a process that cannot answer"
    assert [(lost.rank, lost.data["kind"]) for lost in manta.events(job, "rank_lost")] == [(1, "hung"), (0, "hung")]
    assert manta.leftovers(job) == []


@pytest.mark.soak  # what is decided: tests/service/recovery/test_hang_culprits.py
def test_hang_of_a_whole_pipeline_is_blamed_on_its_stopped_rank(manta):
    spec = manta.spec(layout=(1, 2, 2))
    clean = manta.submit(spec)
    manta.until_state(clean, "SUCCEEDED")
    job = manta.submit_held(spec, 2)
    os.kill(manta.pids(job)[2], signal.SIGSTOP)
    manta.until_state(job, "SUCCEEDED")
    assert [event.rank for event in manta.events(job, "rank_hung")] == [2]
    assert manta.curve(job) == manta.curve(clean)


@pytest.mark.soak  # what is decided: tests/service/job/test_adoption.py
def test_hang_that_began_while_the_control_plane_was_away_is_found_by_the_next(manta, pair_undisturbed):
    job = manta.submit_held(manta.spec(layout=PAIR), 1)
    pid = manta.pids(job)[1]
    manta.kill_service()
    os.kill(pid, signal.SIGSTOP)
    manta.start()
    manta.until_state(job, "SUCCEEDED")
    assert [event.rank for event in manta.events(job, "rank_hung")] == [1]
    assert manta.curve(job) == pair_undisturbed


def test_clean_run_reports_no_hang_or_straggler(manta, clean_pair):
    assert manta.client.job(clean_pair).generation == 1
    kinds = {event.type for event in manta.events(clean_pair)}
    assert not kinds & {"rank_hung", "gang_hung", "rank_lost", "straggler"}


@contextlib.contextmanager
def slowed_down(pid):
    """Keep a process from running most of the time: in pieces too short to be a standstill, and so close to each other
    that no step's work falls between them."""
    over = threading.Event()

    def hold_up():
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(0.09)
                os.kill(pid, signal.SIGCONT)
                over.wait(0.002)

    thread = threading.Thread(target=hold_up)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        wake(pid)


@pytest.mark.soak  # what is decided: tests/service/job/test_hangs_and_stragglers.py
def test_straggler_is_reported_without_any_other_effect(manta):
    job = manta.submit(manta.spec(steps=400))
    manta.until_step(job, 5)
    with slowed_down(manta.pids(job)[2]):
        (named,) = manta.until("the straggler's event", lambda: manta.events(job, "straggler"))
    assert named.data["straggler"] == 2
    assert named.data["own_seconds"] > 1.5 * named.data["usual_seconds"]
    assert "rank 2 slows the others down" in named.message
    assert manta.client.job(job).generation == 1
    assert manta.events(job, "rank_hung") == []
    manta.cancel(job)


@pytest.mark.soak  # what is decided: tests/service/job/test_hangs_and_stragglers.py
def test_straggler_is_replaced_under_the_replace_policy(manta):
    job = manta.submit(manta.spec(steps=400, recovery={"stragglers": "replace"}))
    manta.until_step(job, 5)
    before = manta.pids(job)
    with slowed_down(before[2]):
        (lost,) = manta.until("its replacement", lambda: manta.events(job, "rank_lost"))
    assert (lost.rank, lost.data["kind"]) == (2, "straggler")
    manta.until("another process", lambda: manta.pids(job)[2] != before[2])
    manta.cancel(job)
