"""A control plane died, and the next one takes its jobs over: from the rows, and from agents that never noticed."""

import asyncio

import pytest

from manta.service.job.inbox import Resize
from manta.service.job.record import JobRecord
from manta.service.job.report_writer import ReportWriter
from manta.service.states import JobState
from manta.service.store import generations, jobs
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.supervised_job import AGAIN, UP


async def run_and_lose_control(job, *steps):
    """The job commits `steps`, and then its control plane dies."""
    await job.train(*steps)
    await job.die_with_control_plane()


async def test_adopted_running_job_is_undisturbed(job, cluster):
    await run_and_lose_control(job, 1, 2)
    next(iter(cluster.agents.living.values())).commit(3)  # nobody listens
    job.supervise(None)
    await job.watched(1)
    assert [len(agent.orders) for agent in job.ranks] == [1] * 4
    assert all(agent.running for agent in job.ranks)
    await job.finish(4)
    assert job.log == [*UP, "adopted", "SUCCEEDED"]
    assert (job.row.generation, job.row.restarts, job.row.step) == (1, 0, 10)
    assert cluster.nothing_held


async def test_report_that_was_handled_but_not_acknowledged_is_not_stored_twice(job, cluster):
    await run_and_lose_control(job, 1, 2)
    cursor = job.store.query(lambda session: jobs.get(session, job.id).report_cursor["0"])
    job.supervise(None)
    await job.watched(1)
    asked = len(job.ranks[0].acknowledged)
    await cluster.agents.until(lambda: len(job.ranks[0].acknowledged) >= asked)
    assert job.ranks[0].acknowledged[-1] == cursor
    await job.finish()
    assert [entry for entry in job.log if entry == "first_step"] == ["first_step"]


@pytest.mark.parametrize("last", ["finished", "killed"])
async def test_reports_from_while_no_control_plane_ran_are_handled_on_adoption(job, cluster, last):
    await run_and_lose_control(job, 1)
    agents = list(cluster.agents.living.values())
    if last == "finished":
        agents[0].commit(10)
        for agent in agents:
            agent.finish(10)
    else:
        agents[1].die()
    job.supervise(None)
    if last == "killed":
        await job.finish(2, generation=2)
    await job.task
    recovered = [] if last == "finished" else ["RECOVERING", "rank_lost", *AGAIN]
    assert job.log == [*UP, "adopted", *recovered, "SUCCEEDED"]


async def test_agent_that_was_lost_meanwhile_is_replaced(job, cluster):
    await run_and_lose_control(job, 1)
    name, agent = list(cluster.agents.living.items())[3]
    agent.lose()
    del cluster.agents.living[name]
    job.supervise(None)
    await job.finish(2, generation=2)
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN, "SUCCEEDED"]
    assert job.message("rank_lost") == "rank 3 was given up: its agent does not answer"
    assert cluster.nothing_held


def lose(cluster, agents):
    for agent in agents:
        agent.lose()
        del cluster.agents.living[agent.name]


async def test_adopted_replica_without_agents_is_placed_anew_and_others_continue(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2, three=2)
    job = two_replicas(cluster, parallel={"tensor": 2, "data": 2, "zero": 0})
    await run_and_lose_control(job, 1)
    agents = list(cluster.agents.living.values())
    lose(cluster, agents[2:])
    job.supervise(None)
    await job.watched(2)
    assert job.ranks[:2] == agents[:2]
    assert [agent.running for agent in job.ranks] == 4 * [True]
    assert len(cluster.groups.held) == 2, "the places that nobody knew are free again"
    await job.finish(2)
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN, "SUCCEEDED"]
    assert next(event.data for event in job.events if event.type == "ranks_replaced") == {
        "kept": [0, 1],
        "started": [2, 3],
    }
    assert cluster.nothing_held


async def test_adopted_job_without_agents_is_placed_anew(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2, three=2)
    job = two_replicas(cluster, parallel={"tensor": 2, "data": 2, "zero": 0})
    await run_and_lose_control(job, 1)
    lose(cluster, list(cluster.agents.living.values()))
    job.supervise(None)
    await job.watched(2)
    assert len(cluster.agents.living) == 4
    await job.finish(2)
    assert job.log == [*UP, "RECOVERING", "generation_started", "RUNNING", "first_step", "SUCCEEDED"]
    assert job.generations[1] == ("the control plane was restarted and its agents were lost", "snapshot", 1)
    assert job.row.restarts == 1
    assert cluster.nothing_held


async def test_job_that_was_placed_but_never_launched_is_placed_again(job):
    await job.store.write_async(lambda s: jobs.transition(s, job.id, JobState.STARTING))
    job.supervise(None)
    await job.finish(1, generation=1)
    assert job.log == [*UP, "SUCCEEDED"]
    assert job.generations == [("the control plane was restarted", "start", 0)]
    assert job.row.restarts == 0


async def test_adopted_launch_that_was_not_recorded_continues(two_replicas, cluster, monkeypatch):
    """The last agent has its order, and its control plane dies: the gang trains from then on."""
    job, noting = two_replicas(cluster), asyncio.Event()

    async def never(*arguments):
        noting.set()
        await asyncio.Event().wait()

    async def unheard(*arguments):
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(JobRecord, "launched", never)
        patch.setattr(ReportWriter, "take", unheard)  # else a rank may say that it has started before that
        await job.start()
        await noting.wait()
        await job.die_with_control_plane()
    assert job.rank_states == ["starting"] * 4
    agents = list(cluster.agents.living.values())
    job.supervise(None)
    await job.watched(1)
    assert job.ranks == agents
    assert job.rank_states == ["running"] * 4
    assert job.pids == [agent._pid for agent in agents]
    await job.finish(1)
    assert job.log == ["STARTING", "generation_started", "adopted", "RUNNING", "first_step", "SUCCEEDED"]
    assert (job.row.generation, job.row.restarts) == (1, 0)
    assert cluster.nothing_held


def begin_another(job):
    """The row of another generation is written, but no agent gets an order for it."""
    job.store.write(lambda s: generations.begin(s, job.id, "test", False))


async def test_adopted_launch_that_was_incomplete_is_repeated(job):
    await run_and_lose_control(job, 1)
    begin_another(job)
    job.supervise(None)
    await job.finish(2, generation=3)
    assert job.generations[2] == ("the control plane was restarted during a launch", "snapshot", 1)
    assert job.log == [*UP, "generation_started", "first_step", "SUCCEEDED"]
    assert job.row.restarts == 1


async def test_launch_that_was_cut_in_two_by_a_lost_agent(job, cluster):
    await run_and_lose_control(job, 1)
    begin_another(job)
    agent = list(cluster.agents.living.values())[1]
    agent.lose()
    del cluster.agents.living[agent.name]
    job.supervise(None)
    await job.finish(2, generation=3)
    assert job.log == [*UP, "RECOVERING", "rank_lost", *UP[1:], "recovered", "SUCCEEDED"]
    assert job.message("rank_lost") == "rank 1 lost its agent while the control plane was away"
    assert job.recoveries == [(3, "agent_lost", "snapshot", 1)]


async def test_change_of_size_that_was_cut_in_two_is_planned_again(two_replicas, cluster):
    job = two_replicas(cluster, elastic={"min_data": 1, "max_data": 2})

    async def after_another_step(agent):
        if agent.running and agent.generation == 1:
            agent.rest_by_itself(2, "was told to rest")

    await run_and_lose_control(job, 1)
    job.store.write(lambda s: jobs.request_resize(s, job.id, 1))
    job.store.write(lambda s: jobs.transition(s, job.id, JobState.RESIZING))
    await after_another_step(next(iter(cluster.agents.living.values())))
    cluster.agents.before_rest = after_another_step
    job.supervise(None)
    await job.watched(2)
    assert job.generations[1][1:] == ("snapshot", 2), "processes at rest hold more than their snapshots"
    await job.commit(3)
    job.supervisor.tell(Resize())
    await job.finish(4, generation=3)
    assert [cause for cause, *_ in job.generations[1:]] == [
        "the control plane was restarted during a resize",
        "resized from 2 to 1 replicas",
    ]
    assert (job.row.replicas, job.row.restarts) == (1, 0)
    assert cluster.nothing_held


async def test_adopted_job_ends_stray_agents_of_an_unrecorded_change(job, cluster):
    await run_and_lose_control(job, 1)
    await cluster.groups.acquire(job.id, 2, job.spec.layout, "manta_slot", replicas=[1])
    seats = {2: _Seat(f"replica/{job.id}/2/1")}
    (stray,) = await cluster.agents.start(job.id, 2, seats, "manta_slot")
    job.supervise(None)
    await job.watched(1)
    assert stray in cluster.agents.ended
    assert len(cluster.groups.held) == 2
    await job.finish()


class _Seat:
    def __init__(self, group):
        self.group, self.bundle = group, 0


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "CANCELLED"])
async def test_adopted_job_with_a_recorded_outcome_ends_accordingly(job, cluster, state):
    await run_and_lose_control(job, 1)
    if state == "CANCELLED":
        job.store.write(lambda s: jobs.request_cancel(s, job.id))
    await JobRecord(job.store, job.id).record_outcome(JobState(state), "a reason", "a message")
    job.supervise(None)
    await job.task
    more = {"CANCELLED": ["CANCELLING", state], "FAILED": [state, "memory_kept"]}.get(state, [state])
    assert job.log == [*UP, *more]
    assert (job.row.state, job.row.reason, job.row.message) == (state, "a reason", "a message")
    assert cluster.nothing_held == (state != "FAILED"), "what failed may be tried again"
    assert not cluster.agents.living and not cluster.groups.held


async def test_finished_job_stays_ended_if_its_control_plane_dies_during_release(two_replicas, cluster):
    """Once agents and snapshots are gone, only what was written before that says that nothing is left to do."""
    job, with_freed_units, end_job = two_replicas(cluster), asyncio.Event(), cluster.end_job

    async def end_and_hang(*arguments, **more):
        await end_job(*arguments, **more)
        with_freed_units.set()
        await asyncio.Event().wait()

    await job.train(10)
    cluster.end_job = end_and_hang
    for agent in job.ranks:
        agent.finish(10)
    await with_freed_units.wait()
    await job.die_with_control_plane()
    cluster.end_job = end_job
    job.supervise(None)
    await job.task
    assert job.log == [*UP, "SUCCEEDED"]
    assert len(job.generations) == 1
    assert cluster.nothing_held


@pytest.mark.parametrize("has_outcome", [False, True])
async def test_cancel_during_adoption_wins_also_over_an_unrecorded_outcome(job, cluster, has_outcome):
    await run_and_lose_control(job, 1)
    job.store.write(lambda s: jobs.request_cancel(s, job.id))
    if has_outcome:
        await JobRecord(job.store, job.id).record_outcome(JobState.FAILED, "a reason", "a message")
    job.supervise(None)
    await job.task
    assert job.log == [*UP, "CANCELLING", "CANCELLED"]
    assert cluster.nothing_held or has_outcome, "what failed may be tried again"
