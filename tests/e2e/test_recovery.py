"""Whatever is killed while a job runs, the job ends with the curve that it has when nothing is killed."""

import os
import shutil
import signal
from itertools import groupby

import pytest

from manta.api.client import ServiceUnreachable
from manta.service.cluster.processes import children_named
from manta.service.cluster.ray_head import RayHead
from manta.service.cluster.ray_private import HEAD_PROCESSES
from manta.service.states import is_final
from tests.e2e.manta import EVERY_STEP, HOLD_SECONDS, LONG_HOLD_SECONDS, MIDDLE, OFTEN_SECONDS, PAIR
from tests.service.support.otlp_collector import attributes, seconds

AFTER_A_CHANGE = 33
"""The interval between snapshots changes after steps 16, 32 and so on alone (`workers/snapshot/interval.py`)."""


def test_killed_rank_costs_no_more_steps_than_promised_also_after_a_recovery(manta, undisturbed, kill, collector):
    with manta.starting(manta.spec()) as (job, inject):
        inject("slow", 3, at_step=MIDDLE + 1, seconds=HOLD_SECONDS)
        inject("slow", 2, at_step=AFTER_A_CHANGE + 1, seconds=HOLD_SECONDS)
    manta.until_step(job, MIDDLE)
    before = manta.pids(job)
    kill(before[3])
    manta.until_recovered(job, 1)
    manta.until_step(job, AFTER_A_CHANGE)
    after, intervals = manta.pids(job), snapshot_intervals(manta, job)
    assert after[:3] == before[:3], "survivors keep their processes, the dead rank's own tensor peer included"
    assert after[3] != before[3]
    kill(after[2])
    ended = manta.succeeded(job, undisturbed)
    assert (ended.restarts, ended.generation) == (2, 3)
    lost = manta.events(job, "rank_lost")
    assert [event.rank for event in lost] == [3, 2]
    assert all("SIGKILL" in event.message for event in lost)
    replaced = [event.data for event in manta.events(job, "ranks_replaced")]
    assert replaced == [{"kept": [0, 1, 2], "started": [3]}, {"kept": [0, 1, 3], "started": [2]}]
    assert_promise_kept(manta, job, intervals)
    states = [event.data["to"] for event in manta.events(job, "state_changed")]
    assert states == ["STARTING", *2 * ["RUNNING", "RECOVERING"], "RUNNING", "SUCCEEDED"]
    assert_traced(manta, collector, job)


def assert_traced(manta, collector, job):
    """The start and the two recoveries of a job of 4 ranks are in its trace, with the times of their records."""

    def traced():
        spans = collector.of(job)
        return spans if ("job.recovery.redo", 3) in spans else None

    spans, records = manta.until("the trace of the last recovery", traced), manta.client.recoveries(job).items
    parts = {name for name, generation in spans if generation == 1}
    assert parts == {"job.start", *(f"job.start.{phase}" for phase in ("queued", "placing", "launching", "first_step"))}
    assert attributes(spans["job.start", 1])["manta.ranks"] == 4
    for record in records:
        recovery = spans["job.recovery", record.generation]
        values = attributes(recovery)
        assert seconds(recovery) == pytest.approx(record.total_seconds, abs=1e-3)
        assert (values["manta.recovery.rank"], values["manta.recovery.ranks_replaced"]) == (record.rank, record.forked)
        for phase, length in record.seconds.items():
            part = spans.get((f"job.recovery.{phase}", record.generation))
            assert (0 if part is None else seconds(part)) == pytest.approx(length, abs=1e-3)
    assert len(records) == 2 and len({span.trace_id for span in spans.values()}) == 1


def snapshot_intervals(manta, job):
    """The interval between snapshots, in steps, that was in force at each step so far."""
    series = manta.client.metrics(job, names=["snapshot_every_steps"], max_points=10_000)
    return dict(zip(series.steps, series.series["snapshot_every_steps"], strict=True))


def assert_promise_kept(manta, job, intervals):
    """The new generation resumed from a snapshot, and redid no more steps than `workers/snapshot/interval.py` promises
    for the intervals in force. `intervals`: as of right before the kill, since redone steps replace their rows; they
    change after steps 16, 32 and so on alone."""
    resumed = manta.events(job, "generation_started")[-1].data
    recovering = [event for event in manta.events(job, "state_changed") if event.data["to"] == "RECOVERING"][-1]
    assert resumed["resume_source"] == "snapshot"
    last, resume_step = recovering.step, resumed["resume_step"]
    known = {step: every for step, every in snapshot_intervals(manta, job).items() if step <= resume_step} | intervals
    in_force = [every for every, _ in groupby(known[step] for step in sorted(known) if resume_step <= step <= last)]
    assert last - resume_step <= sum(every - 1 for every in in_force[:-1]) + in_force[-1], (last, resume_step, known)


def test_job_loses_nothing_when_ranks_are_killed_repeatedly(manta, undisturbed, kill):
    """The rank that reports, all others at once, and one while it still recovers from the death of another."""
    job = manta.submit_held(manta.spec(), 0, seconds=LONG_HOLD_SECONDS)
    manta.hold(job, 1, seconds=LONG_HOLD_SECONDS)  # it survives the first
    kill(manta.pids(job)[0])
    manta.until_recovered(job, 1)
    manta.hold(job, 0, seconds=LONG_HOLD_SECONDS)  # it survives all that follow
    pids = manta.pids(job)
    with manta.zygote_stopped():  # nobody is replaced before all have ended
        for pid in pids[1:]:
            kill(pid)
        manta.until_ended(*pids[1:])
    manta.until_recovered(job, 2)
    kill(manta.pids(job)[2])
    manta.until_generation(job, 4)
    kill(manta.until("a trainer of generation 4", lambda: trainer_of_generation(manta, job, 4), every=OFTEN_SECONDS))
    manta.release_job(job, 0)
    ended = manta.succeeded(job, undisturbed)
    assert ended.restarts == 4, "several that are killed together are one recovery"


def trainer_of_generation(manta, job, generation):
    """Process id of a trainer of that generation, as soon as there is one, but not of rank 0's."""
    ranks = [rank for rank in manta.client.ranks(job).items if rank.generation == generation and rank.rank and rank.pid]
    return ranks[0].pid if ranks else None


def test_agent_zygote_and_daemon_are_replaced_when_killed(manta, pair_undisturbed):
    """An agent, the zygote that all trainers are forked from, and the node's daemon, one after the other."""
    job = manta.submit_held(manta.spec(layout=PAIR), 0)  # it survives the first
    manta.agent_of(job, 1).kill()
    manta.until_recovered(job, 1)
    manta.hold_from_the_next(job, 0)
    zygote = manta.zygote()
    zygote.kill()
    manta.until_recovered(job, 2)
    assert manta.zygote().pid != zygote.pid
    manta.zygote().parent().kill()
    ended = manta.succeeded(job, pair_undisturbed)
    assert ended.restarts == 3
    manta.until("nothing being left", lambda: not manta.leftovers(job))  # a new daemon measures its node in a process


def test_rendezvous_store_is_needed_only_at_the_start_of_a_generation(manta, pair_undisturbed, kill):
    job = manta.submit_held(manta.spec(layout=PAIR), 1)
    pids = set(manta.pids(job))
    (store,) = manta.until(
        "its store alone", lambda: alone([each for each in manta.trainers() if each.pid not in pids])
    )
    store.kill()
    manta.until_step(job, manta.client.job(job).step + 3)
    kill(manta.pids(job)[1])
    ended = manta.succeeded(job, pair_undisturbed)
    assert ended.restarts == 1


def alone(processes):
    """The only process; None while there are others: a node that has just started measures how fast it computes."""
    return processes if len(processes) == 1 else None


def test_killed_rank_resumes_from_the_newest_checkpoint_if_snapshots_are_gone(manta, pair_undisturbed, kill):
    job = manta.submit_held(manta.spec(layout=PAIR, checkpoint={"every_steps": 10}), 1)
    manta.until("a complete checkpoint", lambda: complete_checkpoints(manta, job))
    shutil.rmtree(manta.paths.snapshot_folder(job))
    newest = max(complete_checkpoints(manta, job))
    kill(manta.pids(job)[1])
    ended = manta.succeeded(job, pair_undisturbed)
    assert ended.restarts == 1
    resumed = manta.events(job, "generation_started")[-1].data
    assert resumed["resume_source"] == "checkpoint"
    assert resumed["resume_step"] >= newest


@pytest.mark.soak  # what is read: the test before this one
def test_job_without_snapshots_resumes_from_its_newest_checkpoint(manta, pair_undisturbed, kill):
    job = manta.submit_held(manta.spec(layout=PAIR, checkpoint={"every_steps": 10, "snapshots": "off"}), 1, MIDDLE + 4)
    assert list(manta.paths.snapshot_folder(job).glob("*.snapshot")) == []
    manta.until("the checkpoint being complete", lambda: MIDDLE in complete_checkpoints(manta, job))
    kill(manta.pids(job)[1])
    manta.succeeded(job, pair_undisturbed)
    resumed = manta.events(job, "generation_started")[-1].data
    assert (resumed["resume_source"], resumed["resume_step"]) == ("checkpoint", MIDDLE)


def complete_checkpoints(manta, job):
    """Steps of the complete durable checkpoints."""
    return [row.step for row in manta.client.checkpoints(job).items if row.state == "complete"]


def test_killed_rank_without_its_snapshot_resumes_from_that_of_a_peer(manta, pair_undisturbed, kill):
    job = manta.submit_held(manta.spec(layout=PAIR, parallel={"zero": 0}, checkpoint=EVERY_STEP), 0)
    for file in manta.paths.snapshot_folder(job).glob("rank-00000.*snapshot"):
        file.unlink()
    kill(manta.pids(job)[0])
    manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == pair_undisturbed, "with the rows that the killed rank had not shipped"
    (recovered,) = manta.events(job, "recovered")
    assert recovered.data["source"].endswith("peer")
    assert recovered.data["steps_redone"] <= 1, "rows that a peer kept too are not of steps done again"


def test_job_without_allowed_restarts_fails_and_resumes_on_retry(manta, pair_undisturbed, kill):
    job = manta.submit_held(manta.spec(layout=PAIR, recovery={"max_restarts": 0}, checkpoint=EVERY_STEP), 1)
    kill(manta.pids(job)[1])
    failed = manta.until("the end", lambda: (seen := manta.client.job(job)) and is_final(seen.state) and seen)
    assert (failed.state, failed.reason) == ("FAILED", "restarts_exhausted")
    assert "rank 1 was killed (SIGKILL" in failed.message
    manta.until("the end of its processes", lambda: manta.keeps_only_snapshots(job))
    assert failed.memory_kept_until is not None
    manta.client.retry(job)
    ended = manta.succeeded(job, pair_undisturbed)
    assert (ended.generation, ended.restarts, ended.memory_kept_until) == (2, 0, None)
    second = manta.events(job, "generation_started")[1]
    assert second.data["resume_source"] == "snapshot" and second.data["resume_step"] >= failed.step - 1 > 0
    assert manta.leftovers(job) == []


def test_lost_agent_of_a_job_without_restarts_leaves_no_process(manta):
    job = manta.submit_held(manta.spec(layout=(1, 1, 2), recovery={"max_restarts": 0}), 0, 1)
    manta.agent_of(job, 0).kill()
    ended = manta.until("the end", lambda: (seen := manta.client.job(job)) and is_final(seen.state) and seen)
    assert (ended.state, ended.reason) == ("FAILED", "restarts_exhausted")
    manta.until("the end of its processes", lambda: manta.keeps_only_snapshots(job))


@pytest.mark.parametrize(
    ("process", "with_signal"),
    [
        ("raylet", signal.SIGTERM),
        pytest.param("gcs_server", signal.SIGTERM, marks=pytest.mark.soak),
        pytest.param("start", signal.SIGKILL, marks=pytest.mark.soak),
    ],
)
def test_ray_head_with_a_dead_process_is_replaced_and_snapshots_survive(manta, pair_undisturbed, process, with_signal):
    """The first process of a head stays when another one ends by SIGTERM, or without an error."""
    job = manta.submit_held(manta.spec(layout=PAIR), 1)
    head = RayHead(manta.home).record().pid
    os.kill({"start": head, **children_named(head, HEAD_PROCESSES)}[process], with_signal)

    def taken_up() -> bool:
        try:
            return manta.client.job(job).generation == 2
        except ServiceUnreachable:  # it is starting anew
            return False

    manta.until("the service having taken the job up again", taken_up)
    ended = manta.succeeded(job, pair_undisturbed)
    assert manta.events(job, "generation_started")[-1].data["resume_source"] == "snapshot"
    assert ended.restarts == 1
