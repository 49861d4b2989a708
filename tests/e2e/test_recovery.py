"""Whatever is killed while a job runs, the job ends with the curve that it has when nothing is killed."""

import shutil
from itertools import groupby

import psutil

from api.client import ServiceUnreachable
from service.cluster.ray_head import RayHead
from service.states import is_final

MIDDLE = 20


def test_killed_rank_costs_no_more_steps_than_promised(manta, undisturbed, kill):
    job = manta.submit(manta.spec())
    manta.until_step(job, MIDDLE)
    before, intervals = manta.pids(job), snapshot_intervals(manta, job)
    kill(before[3])
    manta.until_generation(job, 2)
    manta.until_step(job, MIDDLE + 20)
    after = manta.pids(job)
    assert after[:3] == before[:3], "survivors keep their processes, the dead rank's own tensor peer included"
    assert after[3] != before[3]
    ended = manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == undisturbed
    assert (ended.restarts, ended.generation) == (1, 2)
    (lost,) = manta.events(job, "rank_lost")
    assert lost.rank == 3
    (replaced,) = manta.events(job, "ranks_replaced")
    assert replaced.data == {"kept": [0, 1, 2], "started": [3]}
    assert "SIGKILL" in lost.message
    assert_promise_kept(manta, job, intervals)
    states = [event.data["to"] for event in manta.events(job, "state_changed")]
    assert states == ["STARTING", "RUNNING", "RECOVERING", "RUNNING", "SUCCEEDED"]


def snapshot_intervals(manta, job):
    """The interval between snapshots, in steps, that was in force at each step so far."""
    series = manta.client.metrics(job, names=["snapshot_every_steps"], max_points=10_000)
    return dict(zip(series.steps, series.series["snapshot_every_steps"], strict=True))


def assert_promise_kept(manta, job, intervals):
    """The new generation resumed from a snapshot, and redid no more steps than `workers/snapshot/interval.py` promises
    for the intervals in force. `intervals`: as of right before the kill, since redone steps replace their rows; they
    change at steps 16, 32 and so on alone."""
    resumed = manta.events(job, "generation_started")[-1].data
    recovering = [event for event in manta.events(job, "state_changed") if event.data["to"] == "RECOVERING"][-1]
    assert resumed["resume_source"] == "snapshot"
    last, resume_step = recovering.step, resumed["resume_step"]
    known = {step: every for step, every in snapshot_intervals(manta, job).items() if step <= resume_step} | intervals
    in_force = [every for every, _ in groupby(known[step] for step in sorted(known) if resume_step <= step <= last)]
    assert last - resume_step <= sum(every - 1 for every in in_force[:-1]) + in_force[-1], (last, resume_step, known)


def test_killed_reporting_rank_loses_no_row(manta, undisturbed, kill):
    job = manta.submit(manta.spec())
    manta.until_step(job, MIDDLE)
    kill(manta.pids(job)[0])
    ended = manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == undisturbed
    assert ended.restarts == 1


def test_several_killed_ranks_are_one_recovery(manta, undisturbed, kill):
    job = manta.submit(manta.spec())
    manta.until_step(job, MIDDLE)
    for pid in manta.pids(job)[1:]:
        kill(pid)
    ended = manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == undisturbed
    assert ended.restarts == 1


def test_killed_again_while_recovering(manta, undisturbed, kill):
    job = manta.submit(manta.spec())
    manta.until_step(job, MIDDLE)
    kill(manta.pids(job)[2])
    manta.until_generation(job, 2)
    kill(manta.until("a trainer of generation 2", lambda: trainer_of_generation(manta, job, 2)))
    ended = manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == undisturbed
    assert ended.restarts == 2


def trainer_of_generation(manta, job, generation):
    """Process id of any trainer of that generation, as soon as there is one."""
    ranks = [rank for rank in manta.client.ranks(job).items if rank.generation == generation and rank.pid]
    return ranks[0].pid if ranks else None


def test_killed_agent_is_replaced(manta, undisturbed):
    job = manta.submit(manta.spec())
    manta.until_step(job, MIDDLE)
    manta.agents()[1].kill()
    ended = manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == undisturbed
    assert ended.restarts == 1
    assert manta.leftovers(job) == []


def test_killed_zygote_takes_all_trainers_along_and_is_replaced(manta, undisturbed):
    job = manta.submit(manta.spec())
    manta.until_step(job, MIDDLE)
    zygote = manta.zygote()
    zygote.kill()
    ended = manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == undisturbed
    assert ended.restarts == 1
    assert manta.zygote().pid != zygote.pid


def test_killed_node_daemon_is_replaced(manta, undisturbed):
    job = manta.submit(manta.spec())
    manta.until_step(job, MIDDLE)
    manta.zygote().parent().kill()
    ended = manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == undisturbed
    assert ended.restarts == 1


def test_rendezvous_store_is_needed_at_the_start_only(manta, undisturbed, kill):
    job = manta.submit(manta.spec())
    manta.until_step(job, MIDDLE)
    pids = set(manta.pids(job))
    (store,) = [process for process in manta.trainers() if process.pid not in pids]
    store.kill()
    manta.until_step(job, MIDDLE + 10)
    kill(manta.pids(job)[1])
    ended = manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == undisturbed
    assert ended.restarts == 1


def test_without_snapshots_the_newest_durable_checkpoint_is_used(manta, undisturbed, kill):
    job = manta.submit(manta.spec(checkpoint={"every_steps": 10}))
    manta.until("a complete checkpoint", lambda: complete_checkpoints(manta, job))
    manta.until_step(job, MIDDLE)
    shutil.rmtree(manta.paths.snapshot_folder(job))
    newest = max(complete_checkpoints(manta, job))
    kill(manta.pids(job)[1])
    ended = manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == undisturbed
    assert ended.restarts == 1
    resumed = manta.events(job, "generation_started")[-1].data
    assert resumed["resume_source"] == "checkpoint"
    assert resumed["resume_step"] >= newest


def complete_checkpoints(manta, job):
    """Steps of the complete durable checkpoints."""
    return [row.step for row in manta.client.checkpoints(job).items if row.state == "complete"]


def test_without_its_own_snapshot_a_rank_goes_on_from_a_peers(manta, kill):
    document = manta.spec(parallel={"zero": 0})
    clean = manta.submit(document)
    manta.until_state(clean, "SUCCEEDED")
    job = manta.submit(document)
    manta.until_step(job, MIDDLE)
    intervals = snapshot_intervals(manta, job)
    for file in manta.paths.snapshot_folder(job).glob("rank-00000.*snapshot"):
        file.unlink()
    kill(manta.pids(job)[0])
    manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == manta.curve(clean), "with the rows that the killed rank had not shipped"
    assert_promise_kept(manta, job, intervals)
    (recovered,) = manta.events(job, "recovered")
    assert recovered.data["source"].endswith("peer")
    seconds = manta.client.ledger(job).seconds
    assert seconds["redo"] < seconds["compute"] / 4, "rows that a peer kept too are not of steps done again"


def test_job_that_may_not_be_restarted_fails_and_says_why(manta, kill):
    job = manta.submit(manta.spec(recovery={"max_restarts": 0}))
    manta.until_step(job, 1)
    kill(manta.pids(job)[1])
    ended = manta.until("the end", lambda: (found := manta.client.job(job)) and is_final(found.state) and found)
    assert (ended.state, ended.reason) == ("FAILED", "restarts_exhausted")
    assert "rank 1 was killed by SIGKILL" in ended.message
    assert manta.leftovers(job) == []


def test_agent_lost_at_the_very_end_leaves_no_snapshot(manta):
    job = manta.submit(manta.spec(recovery={"max_restarts": 0}))
    manta.until_step(job, 1)
    manta.agents()[0].kill()
    ended = manta.until("the end", lambda: (found := manta.client.job(job)) and is_final(found.state) and found)
    assert (ended.state, ended.reason) == ("FAILED", "restarts_exhausted")
    assert manta.leftovers(job) == []


def test_killed_ray_is_replaced_and_the_snapshots_survive_it(manta, undisturbed):
    job = manta.submit(manta.spec())
    manta.until_step(job, MIDDLE)
    psutil.Process(RayHead(manta.home).record().pid).kill()

    def taken_up() -> bool:
        try:
            return manta.client.job(job).generation == 2
        except ServiceUnreachable:  # it is starting anew
            return False

    manta.until("the service having taken the job up again", taken_up)
    ended = manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == undisturbed
    assert manta.events(job, "generation_started")[-1].data["resume_source"] == "snapshot"
    assert ended.restarts == 1
