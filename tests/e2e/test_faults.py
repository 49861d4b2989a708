"""Faults on request: each strikes where it was asked for, is told in events, and the loss curve does not show it."""

import pytest

from manta.api.client import ApiError
from manta.service.states import is_final
from tests.e2e.manta import HOLD_SECONDS, MIDDLE, PAIR


def announced(manta, job, fault):
    """The event that says that this fault was asked for."""
    (event,) = [event for event in manta.events(job, "fault_injected") if event.data["id"] == fault.id]
    return event


def struck(manta, job):
    """(rank, step, message) of the faults that have struck."""
    return [(event.rank, event.step, event.message) for event in manta.events(job, "fault_struck")]


def lost(manta, job):
    """(rank, kind) of every culprit."""
    return [(event.rank, event.data["kind"]) for event in manta.events(job, "rank_lost")]


def test_rank_killed_in_each_phase_of_a_step(manta, pair_undisturbed):
    """One job, six deaths: each strikes the successor of the one before."""
    phases = ("data", "forward", "backward", "reduction", "optimizer", "snapshot")
    strikes = [(1, MIDDLE + 7 * number, f"kill in {phase}") for number, phase in enumerate(phases)]
    with manta.starting(manta.spec(layout=PAIR, checkpoint={"snapshot_every_steps": 1})) as (job, inject):
        for phase, (rank, step, _) in zip(phases, strikes, strict=True):
            event = announced(manta, job, inject("kill", rank, at_step=step, phase=phase))
            assert (event.rank, event.step, event.data["kind"]) == (rank, step, "kill")
    ended = manta.until_state(job, "SUCCEEDED")
    assert struck(manta, job) == strikes
    assert lost(manta, job) == [(1, "killed")] * len(phases)
    assert manta.curve(job) == pair_undisturbed
    assert ended.restarts == len(phases)


def test_ranks_failing_by_exception_oom_or_hang_are_recovered(manta, pair_undisturbed):
    """An exception, an out-of-memory error and a standstill that holds the GIL, one after the other."""
    strikes = [
        (1, MIDDLE, "exception in backward"),
        (1, MIDDLE + 15, "oom in backward"),
        (1, MIDDLE + 30, "hang in backward"),
    ]
    with manta.starting(manta.spec(layout=PAIR)) as (job, inject):
        for rank, step, said in strikes:
            kind, _, phase = said.split()
            inject(kind, rank, at_step=step, phase=phase, hold_gil=kind == "hang")
    ended = manta.until_state(job, "SUCCEEDED")
    assert struck(manta, job) == strikes
    assert lost(manta, job) == [(1, "exception"), (1, "exception"), (1, "hung")]
    assert manta.curve(job) == pair_undisturbed
    assert ended.restarts == len(strikes)


def test_cut_connections_end_no_process(manta, pair_undisturbed):
    with manta.starting(manta.spec(layout=PAIR)) as (job, inject):
        inject("partition", 1, at_step=MIDDLE, phase="reduction", seconds=0.3)
    manta.until_generation(job, 2)
    ended = manta.until_state(job, "SUCCEEDED")
    (replaced,) = manta.events(job, "ranks_replaced")
    assert replaced.data == {"kept": [0, 1], "started": []}
    assert manta.curve(job) == pair_undisturbed
    assert ended.restarts == 1


def test_faults_of_a_beginning_strike_in_the_next_generation(manta, pair_undisturbed):
    """Ranks are killed while they recover from another's death: one that survived it, and its replacement."""
    job = manta.submit_held(manta.spec(layout=PAIR), 1, 1)
    manta.inject(job, "kill", 0, phase="recovery")
    manta.inject(job, "kill", 1, phase="start")
    manta.inject(job, "kill", 1, at_step=8)
    ended = manta.until_state(job, "SUCCEEDED")
    assert sorted(entry[2] for entry in struck(manta, job)) == [
        "kill in data",
        "kill in recovery",
        "kill in start",
        "slow in data",
    ]
    assert manta.curve(job) == pair_undisturbed
    assert ended.restarts >= 2


def test_killed_rendezvous_store_is_restarted_by_the_next_recovery(manta, pair_undisturbed):
    with manta.starting(manta.spec(layout=PAIR)) as (job, inject):
        inject("store", 0, at_step=MIDDLE)
        inject("slow", 1, at_step=MIDDLE + 3, seconds=HOLD_SECONDS)
    manta.until_step(job, MIDDLE + 2)
    pids = set(manta.pids(job))
    manta.until("only the store being gone", lambda: {process.pid for process in manta.trainers()} == pids)
    manta.inject(job, "kill", 1, at_step=MIDDLE + 8)
    manta.until_state(job, "SUCCEEDED")
    assert lost(manta, job) == [(1, "killed")]
    assert manta.curve(job) == pair_undisturbed


@pytest.mark.soak  # a real one: test_compose.py
def test_lost_node_costs_no_committed_step(manta, pair_undisturbed):
    zygote = manta.zygote().pid
    with manta.starting(manta.spec(layout=PAIR)) as (job, inject):
        inject("node", 1, at_step=MIDDLE)
    manta.until_state(job, "SUCCEEDED")
    assert manta.zygote().pid != zygote
    assert manta.curve(job) == pair_undisturbed
    assert manta.leftovers(job) == []


def test_fault_for_a_missing_rank_or_a_finished_job_is_refused(manta):
    job = manta.submit(manta.spec(steps=10_000, layout=(1, 1, 2)))
    manta.until_step(job, 1)
    with pytest.raises(ApiError, match="no rank 2") as refused:
        manta.client.inject(job, "kill", 2)
    assert refused.value.problem.code == "fault_not_possible"
    manta.client.cancel(job)
    manta.until("the end", lambda: is_final(manta.client.job(job).state))
    with pytest.raises(ApiError, match="faults need a running job"):
        manta.client.inject(job, "kill", 0)
    assert manta.events(job, "fault_injected") == []
