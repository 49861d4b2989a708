"""Every second of a real job is accounted for, those of a failure too."""

import contextlib

import pytest

from tests.e2e.conftest import EVERY_STEP, PAIR


def test_clean_job_is_accounted_for_to_the_thousandth(manta, clean_pair):
    ended, ledger = manta.client.job(clean_pair), manta.client.ledger(clean_pair)
    assert ledger.closed
    assert (ledger.began_at, ledger.until) == (ended.created_at, ended.finished_at)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds, rel=1e-3)
    assert ledger.seconds["redo"] == ledger.seconds["restore"] == ledger.seconds["pause"] == 0
    assert ledger.seconds["snapshot_stall"] > 0 and ledger.seconds["checkpoint_stall"] > 0
    assert ended.goodput == ledger.goodput
    step_seconds = manta.client.metrics(clean_pair, names=["step_seconds"], max_points=10_000).series["step_seconds"]
    # Against a second clock, the trainer's own: the classes sum to the wall time even if steps were counted twice.
    steps = sum(ledger.seconds[name] for name in ("compute", "data_wait", "snapshot_stall"))
    assert steps == pytest.approx(sum(step_seconds), rel=0.25)
    assert manta.client.recoveries(clean_pair).items == []


def test_killed_rank_is_accounted_for_by_phase(manta, pair_undisturbed, kill):
    job = manta.submit(manta.spec(layout=PAIR, checkpoint=EVERY_STEP))
    manta.hold(job, 1)
    kill(manta.pids(job)[1])
    ended = manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == pair_undisturbed
    ledger = manta.client.ledger(job)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds, rel=1e-3)
    assert (ledger.closed, ledger.goodput) == (True, ended.goodput)
    assert ledger.seconds["re_form"] > 0 and ledger.seconds["redo"] > 0
    assert ledger.seconds["idle_without_capacity"] == ledger.seconds["pause"] == 0
    (recovery,) = manta.client.recoveries(job).items
    assert (recovery.generation, recovery.kind, recovery.rank) == (2, "killed", 1)
    assert "rank 1 was killed by SIGKILL" in recovery.cause
    assert 1 in recovery.forked
    assert len(recovery.forked) + recovery.kept == 2
    assert recovery.steps_redone in (0, 1)
    assert recovery.wait_seconds == 0
    assert all(seconds is not None for seconds in recovery.seconds.values()), recovery
    assert sum(recovery.seconds.values()) == pytest.approx(recovery.total_seconds)
    assert ledger.seconds["restore"] == pytest.approx(recovery.seconds["restore"], abs=0.1)
    (event,) = manta.events(job, "recovered")
    assert event.data["seconds"] == pytest.approx(recovery.seconds)
    assert manta.client.job(job).restarts == 1


def test_rank_that_dies_at_every_start_is_held_back_and_a_cancel_ends_the_wait(manta, kill):
    job = manta.submit(manta.spec(steps=100_000, layout=(1, 1, 2)))
    manta.until_step(job, 1)
    killed: set[int] = set()

    def held_back() -> bool:
        """Kill each new trainer as soon as it is there, until the next one is kept waiting."""
        for rank in manta.client.ranks(job).items:
            if rank.pid is not None and rank.pid not in killed:
                killed.add(rank.pid)
                with contextlib.suppress(ProcessLookupError):
                    kill(rank.pid)
        return bool(manta.events(job, "held_back"))

    manta.until("a wait", held_back)
    manta.client.cancel(job)
    manta.until_state(job, "CANCELLED")
    assert manta.leftovers(job) == []
