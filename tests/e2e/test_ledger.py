"""Every second of a real job is accounted for, those of a failure too."""

import pytest

from tests.e2e.manta import EVERY_STEP, PAIR

DEATHS = 8
"""Before the last of them it would wait for half a minute; see `service/recovery/decisions.py`."""


def test_clean_job_is_accounted_for_to_the_thousandth(manta, clean_pair):
    ended, ledger = manta.client.job(clean_pair), manta.client.ledger(clean_pair)
    assert ledger.closed
    assert (ledger.began_at, ledger.until) == (ended.created_at, ended.finished_at)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds, rel=1e-3)
    assert ledger.seconds["redo"] == ledger.seconds["restore"] == ledger.seconds["pause"] == 0
    assert ledger.seconds["snapshot_stall"] > 0 and ledger.seconds["checkpoint_stall"] > 0
    assert ended.goodput == ledger.goodput
    step_seconds = manta.client.metrics(clean_pair, names=["step_seconds"], max_points=10_000).series["step_seconds"]
    # Against a second clock, the trainer's own: the classes sum to the wall time even if steps were counted twice. It
    # leaves out what happens between steps, which a busy machine makes long.
    steps = sum(ledger.seconds[name] for name in ("compute", "data_wait", "snapshot_stall"))
    assert 0.9 < steps / sum(step_seconds) < 1.9
    assert manta.client.recoveries(clean_pair).items == []


def test_killed_rank_is_accounted_for_by_phase(manta, pair_undisturbed, kill):
    job = manta.submit_held(manta.spec(layout=PAIR, checkpoint=EVERY_STEP), 1)
    kill(manta.pids(job)[1])
    ended = manta.succeeded(job, pair_undisturbed)
    ledger = manta.client.ledger(job)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds, rel=1e-3)
    assert (ledger.closed, ledger.goodput) == (True, ended.goodput)
    assert ledger.seconds["re_form"] > 0 and ledger.seconds["redo"] > 0
    assert ledger.seconds["idle_without_capacity"] == ledger.seconds["pause"] == 0
    (recovery,) = manta.client.recoveries(job).items
    assert (recovery.generation, recovery.kind, recovery.rank) == (2, "killed", 1)
    assert "rank 1 was killed (SIGKILL" in recovery.cause
    assert 1 in recovery.forked
    assert len(recovery.forked) + recovery.kept == 2
    assert recovery.steps_redone in (0, 1)
    assert recovery.wait_seconds == 0
    assert all(seconds is not None for seconds in recovery.seconds.values()), recovery
    assert sum(recovery.seconds.values()) == pytest.approx(recovery.total_seconds)
    # Against the clock of rank 0, whose loop begins somewhere before the first step is committed.
    assert ledger.seconds["restore"] == pytest.approx(recovery.seconds["restore"], abs=recovery.seconds["redo"] + 0.1)
    (event,) = manta.events(job, "recovered")
    assert event.data["seconds"] == pytest.approx(recovery.seconds)
    assert manta.client.job(job).restarts == 1


def test_rank_that_dies_at_every_start_is_held_back_and_a_cancel_ends_the_wait(manta, kill):
    with manta.starting(manta.spec(layout=(1, 1, 2))) as (job, inject):
        for _ in range(DEATHS):
            inject("kill", 1, phase="start")
    manta.until("a wait", lambda: manta.events(job, "held_back"))
    manta.cancel(job)
    assert manta.leftovers(job) == []
