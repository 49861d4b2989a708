"""Launching a generation: what each agent is told, what is written, and who is to blame when it fails."""

import asyncio
import dataclasses
from functools import partial
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.sizes import resized
from manta.service.job import hangs_and_stragglers, launch
from manta.service.job.actions import Launch, launch_after
from manta.service.job.context import JobContext
from manta.service.job.launch import (
    CommonOrder,
    LaunchFailed,
    finish_launch,
    launch_generation,
    order_for,
    watch_generation,
)
from manta.service.recovery.decisions import Death, Incident, PastFailure
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.store import events, generations, jobs, ranks
from manta.workers.protocol.messages import AgentDescription, Resume
from manta.workers.protocol.reports import TrainerStatus
from tests.service.support.control_planes import start_training
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.waiting import reached


@pytest.fixture
def cluster(tmp_path):
    return FakeCluster(tmp_path, one=2, two=2)


@pytest.fixture
def job(store, submit, cluster):
    """A job with its agents started, and nothing launched."""
    context = JobContext.of(store, cluster, submit(parallel={"tensor": 2, "data": 2}))
    asyncio.run(context.gang.place(1, context.submitted, ()))
    return context


async def launched(job):
    """The job's next generation begins, and nobody watches it."""
    await (await launch_generation(job, Launch("submitted", counts=False))).close()


def test_launch_order_has_place_resume_point_and_device_peak_of_its_rank(job, cluster):
    cluster.peak_flops["one"] = 1e12
    at = AgentDescription("host", "127.0.0.1", 1, "one")
    order = order_for(job, 3, at, CommonOrder(7, job.submitted, Resume("snapshot", 5), None, [{"step": 4}]))
    assert (order.job, order.rank, order.generation, order.resume.step) == (job.id, 3, 7, 5)
    assert (order.device, order.in_place, order.peak_flops) == ("cpu", True, 1e12)
    assert (order.store_host, order.store_port) == (None, None)
    assert order.roll_backs == ({"step": 4},)
    assert job.id in order.snapshot_folder and job.id in order.checkpoint_folder


def test_launch_order_of_a_gpu_rank_allows_in_place_rest_only_after_a_repair_test(job):
    job.cluster.peak_flops["one"] = 1e12  # what its node's CPU can do is nothing to a GPU
    at = AgentDescription("host", "127.0.0.1", 1, "one", devices=("3",))
    order = order_for(job, 0, at, CommonOrder(1, job.submitted))
    assert (order.device, order.in_place, order.peak_flops) == ("cuda:0", False, None)
    known = ({}, {"tries_repair": True}, {"repair_works": True})
    asked = [order_for(job, 0, at, CommonOrder(1, job.submitted, **each)) for each in known]
    assert [(order.in_place, order.tries_repair) for order in asked] == [
        (False, False), (False, True), (True, False)
    ]  # fmt: skip
    tries = CommonOrder(1, job.submitted, tries_repair=True)
    on_slot = order_for(job, 0, dataclasses.replace(at, devices=()), tries)
    assert (on_slot.in_place, on_slot.tries_repair) == (True, False), "links need not be tried"


async def test_repair_over_nccl_is_tested_in_the_first_generation_and_used_if_it_passed(job, monkeypatch):
    real = [agent.describe for agent in job.gang.agents]

    def with_gpu(describe):
        async def described():
            return dataclasses.replace(await describe(), devices=("0",))

        return described

    for agent, describe in zip(job.gang.agents, real, strict=True):
        monkeypatch.setattr(agent, "describe", with_gpu(describe))

    def say(passed):
        data = {"passed": passed}
        job.record.store.write(lambda s: events.append(s, job.id, "repair_self_test", "tried", data=data))

    said = []
    for result in (None, False, True):
        if result is not None:
            say(result)
        await launched(job)
        said += [(order.tries_repair, order.in_place) for order in [job.gang.agents[0].orders[-1]]]
    assert said == [(True, False), (False, False), (False, True)]


async def test_launch_records_where_each_rank_runs(job, cluster):
    await launched(job)
    rows = job.record.store.query(lambda s: ranks.of_job(s, job.id))
    assert [(row.rank, row.tensor, row.data, row.node) for row in rows] == [
        (0, 0, 0, "one"), (1, 1, 0, "one"), (2, 0, 1, "two"), (3, 1, 1, "two")
    ]  # fmt: skip
    assert [row.actor for row in rows] == job.gang.names
    assert all(row.pid and row.state == "running" for row in rows)
    assert [row.device for row in rows] == ["cpu"] * 4
    assert cluster.daemons._daemon("one").stores == [(job.id, 1, False)], "on the node of rank 0"
    assert all(agent.backs_up_to is not None for agent in job.gang.agents)


async def test_launch_begun_by_another_control_plane_is_recorded_and_backed_up(job, cluster):
    await launched(job)
    for agent in job.gang.agents:
        agent.backs_up_to = None
    job.record.store.write(lambda session: ranks.replace(session, job.id, []))
    where = {rank: await agent.describe() for rank, agent in enumerate(job.gang.agents)}
    await finish_launch(job, 1, where)
    rows = job.record.store.query(lambda s: ranks.of_job(s, job.id))
    assert [(row.rank, row.node, row.generation, row.state) for row in rows] == [
        (0, "one", 1, "running"), (1, "one", 1, "running"), (2, "two", 1, "running"), (3, "two", 1, "running")
    ]  # fmt: skip
    assert all(agent.backs_up_to is not None for agent in job.gang.agents)


@pytest.fixture
def with_cores(store, submit, tmp_path):
    """A job of one node with three slots, each agent of which says that there are so many cores."""

    def make(cores, devices=(), **sections):
        context = JobContext.of(store, FakeCluster(tmp_path, one=3), submit(**sections))
        asyncio.run(context.gang.place(1, context.submitted, ()))
        for agent in context.gang.agents:
            agent.description = dataclasses.replace(agent.description, cores=cores, devices=devices)
        return context

    return make


def threads_launched(job):
    """With how many threads each rank is told to compute in the next generation."""
    asyncio.run(launched(job))
    return [agent.orders[-1].spec["resources"]["threads"] for agent in job.gang.agents]


@pytest.mark.parametrize(
    ("cores", "sections", "threads"),
    [
        (8, {"parallel": {"data": 2}}, 4),
        (8, {"elastic": {"max_data": 2}}, 4),
        (9, {"elastic": {"max_data": 4}}, 3),  # no more than its three slots are there
        (3, {"parallel": {"data": 2}}, 1),
        (0, {}, 1),
        (8, {"resources": {"threads": 3}}, 3),
        (8, {"train": {"steps": 10, "deterministic": "elastic"}}, 1),
    ],
)
def test_threads_are_decided_when_a_job_first_starts(with_cores, cores, sections, threads):
    job = with_cores(cores, **sections)
    assert set(threads_launched(job)) == {threads}
    stored = asyncio.run(job.record.job())
    assert stored.spec["resources"]["threads"] == threads


def test_thread_count_of_a_job_stays_after_relaunch_and_resize(with_cores, cluster):
    job = with_cores(8)
    assert threads_launched(job) == [8]
    for agent in job.gang.agents:
        agent.description = dataclasses.replace(agent.description, cores=2)
    assert threads_launched(job) == [8]
    next_one = JobContext.of(job.record.store, job.cluster, asyncio.run(job.record.job()))
    assert next_one.gang.threads == 8
    assert asyncio.run(next_one.record.write(partial(jobs.decide_threads, job_id=job.id, threads=2))) == 8
    larger = resized(job.submitted, 2)  # as a resize makes it, from what was submitted
    at = job.gang.agents[0].description
    assert order_for(job, 0, at, CommonOrder(3, larger)).spec["resources"]["threads"] == 8


def test_ranks_on_gpus_compute_with_one_thread_as_before(with_cores):
    assert threads_launched(with_cores(64, devices=("0",))) == [1]


async def test_launch_orders_include_earlier_roll_backs(job):
    undone = {"step": 4, "samples": [1, 2]}
    job.record.store.write(lambda s: events.append(s, job.id, "rolled_back", "step 4 was undone", data=undone))
    await launched(job)
    assert [agent.orders[-1].roll_backs for agent in job.gang.agents] == [(undone,)] * 4


def test_rank_is_written_down_with_its_device_and_place(job):
    at = AgentDescription("machine-b", "10.0.0.2", 1, "two", devices=["3"])
    row = launch._row(job, 3, at, 5, 4242, "running")
    assert (row["rank"], row["tensor"], row["pipeline"], row["data"]) == (3, 1, 0, 1)
    assert (row["node"], row["device"], row["pid"], row["generation"]) == ("machine-b", "GPU 3", 4242, 5)
    assert (row["state"], row["actor"]) == ("running", job.gang.names[3])


@pytest.mark.parametrize(
    ("nodes", "expected"), [(("n1", "n1", "n2", "n2"), ["n1", "n1", "n2", "n2"]), ((None,) * 4, ["a", "a", "b", "b"])]
)
def test_launch_places_backups_on_other_nodes_or_hosts(job, monkeypatch, nodes, expected):
    asked = []

    async def begin(ranks, at):
        asked.append((ranks, at))

    monkeypatch.setattr(launch.rank_backups, "begin", begin)
    where = {rank: AgentDescription("aabb"[rank], "10.0.0.1", 1, node) for rank, node in enumerate(nodes)}
    asyncio.run(launch._begin_backups(job, where, 6))
    ranks = launch.rank_backups.Ranks(list(job.gang.by_rank.values()), 6, job.gang.tag, job.gang.peers)
    assert asked == [(ranks, expected)]


def test_launch_without_snapshots_begins_no_backups(store, submit, cluster, monkeypatch):
    job = JobContext.of(store, cluster, submit(checkpoint={"snapshots": "off"}))
    monkeypatch.delattr(launch.rank_backups, "begin")
    asyncio.run(launch._begin_backups(job, {0: AgentDescription("a", "10.0.0.1", 1, "n1")}, 6))


async def test_ranks_of_a_generation_get_a_secret_of_its_own(job):
    def given():
        return {agent.orders[-1].secret for agent in job.gang.agents}

    secrets = []
    for _ in range(2):
        await launched(job)
        (secret,) = given()
        assert len(bytes.fromhex(secret)) == 32
        secrets.append(secret)
    assert secrets[0] != secrets[1]


async def test_order_says_with_which_generation_the_state_began(job):
    began = []
    for _ in range(2):
        await launched(job)
        (order, *_) = [agent.orders[-1] for agent in job.gang.agents]
        began.append((order.generation, order.resume.source, order.resume.began))
        for agent in job.gang.agents:
            agent.steps = [3]
    assert began == [(1, "start", 0), (2, "snapshot", 1)]


async def test_launch_on_one_machine_uses_a_loopback_store(store, submit, tmp_path):
    cluster = FakeCluster(tmp_path, one=4)
    context = JobContext.of(store, cluster, submit(parallel={"tensor": 2, "data": 2}))
    await context.gang.place(1, context.submitted, ())
    await launched(context)
    assert cluster.daemons._daemon("one").stores == [(context.id, 1, True)]


async def test_launch_fails_before_it_begins_if_an_agent_does_not_describe_itself(job):
    job.gang.agents[2].lose()
    with pytest.raises(LaunchFailed, match=r"rank 2 could not be launched \(the actor is dead\)") as caught:
        await launch_generation(job, Launch("submitted", counts=False))
    assert list(caught.value.unresponsive) == [2]
    assert job.record.store.query(lambda s: generations.of_job(s, job.id)) == []
    assert job.gang.nodes == {0: "one", 1: "one", 2: "two", 3: "two"}, "a place is known of those that are silent too"


async def test_launch_needs_no_ray_call_if_the_daemon_answered_before(job, cluster, monkeypatch):
    async def away():
        raise ClusterUnavailable(TimeoutError("no answer"))

    monkeypatch.setattr(cluster.daemons, "ensure", away)
    with pytest.raises(ClusterUnavailable):
        await launch_generation(job, Launch("submitted", counts=False))
    cluster.daemons.remembered.add("one")
    await launched(job)
    assert cluster.daemons._daemon("one").stores == [(job.id, 1, False)]


async def test_daemon_that_does_not_answer_fails_the_ranks_on_its_node(job, cluster):
    cluster.daemons.silent.add("one")
    with pytest.raises(LaunchFailed, match=r"rank 0 and 1 others .*the daemon of node one does not answer"):
        await launch_generation(job, Launch("submitted", counts=False))


async def test_launch_order_refused_by_an_agent_is_a_death_and_stops_backups(job):
    job.gang.agents[1].refuse("launch", "no")
    running = await launch_generation(job, Launch("submitted", counts=False))
    assert [(death.rank, death.kind, death.message) for death in running.deaths] == [
        (1, "agent_lost", "could not be launched (no)")
    ]
    await running.close()
    assert [row.state for row in job.record.store.query(lambda s: ranks.of_job(s, job.id))] == [
        "running",
        "exited",
        "running",
        "running",
    ]
    assert all(agent.backs_up_to is None for agent in job.gang.agents)


async def test_takeover_of_a_generation_finds_a_rank_that_already_hangs(job, monkeypatch):
    """The report that it does may have gone to the control plane before."""
    monkeypatch.setattr(hangs_and_stragglers, "CONFIRM_SECONDS", 0.0)
    hung = job.gang.agents[2]
    for agent in job.gang.agents:
        agent.generation, agent.status = 1, TrainerStatus(100, overdue=agent is hung)
    running = watch_generation(job, 1, 0, taken_over=True)
    await reached(lambda: hung.kills)
    await running.close()
    assert [reason.kind for _, reason, _ in hung.kills] == ["hung"]


async def test_straggler_that_was_replaced_is_not_replaced_again_in_the_next_generation(store, submit, cluster):
    spec = {"parallel": {"tensor": 2, "data": 2}, "recovery": {"stragglers": "replace"}}
    job = JobContext.of(store, cluster, submit(**spec))
    await job.gang.place(1, job.submitted, ())
    agents = job.gang.agents
    for generation in (1, 2):
        running = watch_generation(job, generation, 0)
        for agent in agents:
            agent.generation, agent.status = generation, TrainerStatus(100, overdue=False)
        for straggler in (1, 1 + generation):
            agents[0].event("straggler", 1, straggler=straggler)
        await reached(lambda second=agents[1 + generation]: second.kills)
        await running.close()
    assert [len(agent.kills) for agent in agents] == [0, 1, 1, 1]


async def test_launch_that_breaks_off_leaves_no_task_running(job, monkeypatch):
    monkeypatch.setattr(job.record, "launched", AsyncMock(side_effect=OSError("the disk is full")))
    with pytest.raises(OSError, match="disk"):
        await launch_generation(job, Launch("submitted", counts=False))
    assert len(asyncio.all_tasks()) == 1
    (*_, last) = job.record.store.query(lambda s: events.page(s, job.id).items)
    assert last.type == "generation_started"


async def test_first_step_is_recorded_after_the_launch_is(job, monkeypatch):
    launched, steps_before = job.record.launched, []

    async def launched_late(*arguments):
        await asyncio.sleep(0.1)  # a first step would be recorded within a few milliseconds
        steps_before.append((await job.record.job()).step)
        await launched(*arguments)

    monkeypatch.setattr(job.record, "launched", launched_late)
    for agent in job.gang.agents:
        agent.on_launch = start_training
    running = await launch_generation(job, Launch("submitted", counts=False))
    while (await job.record.job()).step < 1:
        await asyncio.sleep(0.01)
    await running.close()
    assert steps_before == [0]


def incident(kind="killed"):
    return Incident(Death(1, kind), PastFailure(kind, 1.0), RecoveryTimeline(1.0))


def test_launch_after_a_death_counts_as_a_restart():
    killed = incident()
    assert launch_after(killed, "rank 1 was killed", None, first=False) == Launch("rank 1 was killed", True, killed)


@pytest.mark.parametrize("first", [True, False])
def test_launch_that_failed_is_repeated_unchanged(first):
    failed = Launch("rank 1 was killed", True, incident())
    assert launch_after(incident("agent_lost"), "silent", failed, first) is failed
    fresh = Launch("submitted", counts=False)
    assert launch_after(incident("agent_lost"), "silent", fresh, first=True) is fresh


def test_launch_for_a_resize_that_fails_names_both_causes():
    change, lost = Launch("resized from 1 to 2 replicas", counts=False), incident("agent_lost")
    assert launch_after(lost, "rank 0 was silent", change, first=False) == Launch(
        "resized from 1 to 2 replicas, and rank 0 was silent", True, lost
    )
