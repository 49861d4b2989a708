"""A job's size and place change while it runs: what is planned, what is carried out, and what is left of it."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster.agents import describe
from manta.service.cluster.placement_groups import NotPlaced
from manta.service.cluster.sizes import resized, shapes_of
from manta.service.job.changes import Move, Relocate, Stay, carry_out, standby_of
from manta.service.job.context import JobContext
from manta.service.job.inbox import NodeDraining, Resize
from manta.service.store import generations, jobs
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.supervised_job import UP
from tests.service.support.waiting import reached

CHANGED = ["RESIZING", "generation_started", "ranks_replaced", "RUNNING", "first_step"]
"""What a change is seen as in which some rank keeps its process."""
ELASTIC = {"parallel": {"tensor": 2, "data": 2, "zero": 0}, "elastic": {"min_data": 1, "max_data": 3}}


async def test_job_shrinks_and_keeps_the_processes_that_stay(two_replicas, cluster):
    job = two_replicas(cluster, **ELASTIC)
    await job.train(1, 2)
    staying = job.ranks[:2]
    job.resize(1)
    await job.watched(2)
    assert job.ranks == staying
    await cluster.agents.until(lambda: len(cluster.agents.living) == 2)
    assert len(cluster.groups.held) == 1
    await job.finish(3)
    assert job.log == [*UP, "resize_requested", *CHANGED, "SUCCEEDED"]
    assert job.generations[1] == ("resized from 2 to 1 replicas", "memory", 2)
    assert (job.row.replicas, job.row.restarts, job.recoveries) == (1, 0, [])
    assert cluster.nothing_held


async def test_job_grows_by_agents_whose_trainers_are_ready_before_anybody_rests(two_replicas, cluster):
    job = two_replicas(cluster, **ELASTIC)
    prepared_at_rest = []

    async def before_rest(agent):
        prepared_at_rest.append([len(each.prepared) for each in cluster.agents.living.values()])

    await job.train(1)
    cluster.agents.before_rest = before_rest
    job.resize(3)
    await job.watched(2)
    assert [agent.rank for agent in job.ranks] == [0, 1, 2, 3, 4, 5]
    assert [order.generation for agent in job.ranks[4:] for order in agent.prepared] == [2, 2]
    await job.finish(2)
    assert prepared_at_rest[0] == [0, 0, 0, 0, 1, 1]
    assert job.log == [*UP, "resize_requested", *CHANGED, "SUCCEEDED"]
    assert job.generations[1][0] == "resized from 2 to 3 replicas"
    assert job.row.replicas == 3
    assert cluster.nothing_held


async def test_resize_without_room_is_reported_and_changes_nothing(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=4)
    job = two_replicas(cluster, **ELASTIC)

    async def waiting():
        await reached(lambda: "resize_waiting" in job.log)

    await job.train(1)
    job.resize(3)
    await waiting()
    await job.finish()
    assert job.log == [*UP, "resize_requested", "resize_waiting", "SUCCEEDED"]
    assert job.message("resize_waiting") == "no slots are free for more than 2 replicas; the job keeps waiting"
    assert len(job.generations) == 1


async def test_resize_requested_before_the_first_step_waits_for_it(two_replicas, cluster):
    job, planned = two_replicas(cluster, **ELASTIC), []

    def noted(plan):
        async def note(running):
            planned.append(await plan(running))
            return planned[-1]

        return note

    await job.train()
    job.supervisor._planner.plan = noted(job.supervisor._planner.plan)
    job.resize(1)
    await reached(lambda: planned)
    assert planned == [None], "ranks may still read what others left"
    await job.commit(1)
    job.resize(1)
    await job.finish(2, generation=2)
    assert len(job.ranks) == 2
    assert job.generations[1][0] == "resized from 2 to 1 replicas"


async def test_standby_that_never_gets_ready_is_dismissed_when_a_rank_dies(two_replicas, cluster):
    job = two_replicas(cluster, **ELASTIC)
    starting = asyncio.Event()

    def start_silent(agent):
        async def prepare(order):
            starting.set()
            await asyncio.Event().wait()

        agent.prepare = prepare

    await job.train(1)
    cluster.agents.on_start = start_silent
    job.resize(3)
    await starting.wait()
    job.ranks[0].die()
    await job.watched(2)
    assert len(cluster.agents.living) == 4
    assert len(cluster.groups.held) == 2
    await job.finish(2)
    recovered = ["generation_started", "ranks_replaced", "RUNNING", "first_step", "recovered"]
    assert job.log == [*UP, "resize_requested", "RECOVERING", "rank_lost", *recovered, "SUCCEEDED"]
    assert cluster.nothing_held


async def test_resize_is_abandoned_if_an_agent_is_lost_while_coming_to_rest(two_replicas, cluster):
    job = two_replicas(cluster, **ELASTIC)

    async def before_rest(agent):
        if agent.rank == 3:
            agent.lose()

    await job.train(1)
    cluster.agents.before_rest = before_rest
    job.resize(3)
    await job.watched(2)
    assert len(job.ranks) == len(cluster.agents.living) == 4
    await job.finish(2)
    recovered = ["generation_started", "ranks_replaced", "RUNNING", "first_step", "recovered"]
    assert job.log == [*UP, "resize_requested", "RESIZING", "RECOVERING", "rank_lost", *recovered, "SUCCEEDED"]
    assert cluster.nothing_held


async def test_rank_that_does_not_rest_in_time_is_killed_and_the_resize_goes_on(two_replicas, cluster):
    """It was killed on purpose, so nothing has failed: its rank goes on from its snapshot."""
    job = two_replicas(cluster, **ELASTIC)

    async def before_rest(agent):
        if agent.rank == 1:
            agent.be_stopped()

    await job.train(1, 2)
    cluster.agents.before_rest = before_rest
    job.resize(1)
    await job.watched(2)
    assert [len(agent.orders) for agent in job.ranks] == [2, 2]
    await job.finish(3)
    assert job.log == [*UP, "resize_requested", *CHANGED, "SUCCEEDED"]
    assert job.generations[1] == ("resized from 2 to 1 replicas", "memory", 2)
    assert (job.row.restarts, job.recoveries) == (0, [])


async def test_job_that_ends_while_coming_to_rest_is_not_resized(two_replicas, cluster):
    job = two_replicas(cluster, **ELASTIC)

    async def before_rest(agent):
        if agent.rank == 0:
            agent.commit(10)
        agent.finish(10)

    await job.train(9)
    cluster.agents.before_rest = before_rest
    job.resize(3)
    await job.task
    assert job.log == [*UP, "resize_requested", "RESIZING", "SUCCEEDED"]
    assert (len(job.generations), job.row.step) == (1, 10)
    assert cluster.nothing_held


@pytest.mark.parametrize("dies", [False, True])
async def test_job_cancelled_during_a_resize_ends_cancelled(two_replicas, cluster, dies):
    job = two_replicas(cluster, **ELASTIC)

    async def before_rest(agent):
        if agent.rank == 0 and job.row.state == "RESIZING":
            job.cancel()
        if dies and agent.rank == 1:
            agent.die()

    await job.train(1)
    cluster.agents.before_rest = before_rest
    job.resize(3)
    await job.task
    assert job.log == [*UP, "resize_requested", "RESIZING", "CANCELLING", "CANCELLED"]
    assert cluster.nothing_held


async def test_replica_on_a_drained_node_moves_with_its_state(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2, three=2)
    job = two_replicas(cluster)
    await job.train(1, 2)
    staying = job.ranks[:2]
    cluster.nodes.draining.add("two")
    job.supervisor.tell(NodeDraining("two", 60.0))
    await job.watched(2)
    assert job.ranks[:2] == staying
    assert [agent.node for agent in job.ranks] == ["one", "one", "three", "three"]
    assert [agent.orders[-1].resume.step for agent in job.ranks] == [2, 2, 2, 2]
    await cluster.agents.until(lambda: len(cluster.agents.living) == 4)
    await job.finish(3)
    assert job.log == [*UP, "node_draining", *CHANGED, "SUCCEEDED"]
    assert job.message("node_draining") == "node two is being drained within 60 s; it runs 2 ranks of the job"
    assert job.generations[1] == ("replicas [1] moved: their nodes are being drained", "snapshot", 2)
    assert not cluster.agents.living and not cluster.groups.held


async def test_moved_replica_loses_what_only_its_process_held(two_replicas, tmp_path):
    """It may hold a newer step than its snapshots, which are all that the process gets that takes its rank."""
    cluster = FakeCluster(tmp_path, one=2, two=2, three=2)
    job = two_replicas(cluster)
    await job.train(1)
    cluster.agents.before_rest = AsyncMock(side_effect=lambda agent: agent.rest_by_itself(2, "was told to rest"))
    cluster.nodes.draining.add("two")
    job.supervisor.tell(NodeDraining("two", 60.0))
    await job.watched(2)
    assert [agent.orders[-1].resume.step for agent in job.ranks] == [1, 1, 1, 1]
    await job.finish(2)
    assert job.generations[1] == ("replicas [1] moved: their nodes are being drained", "snapshot", 1)


async def test_elastic_job_drops_the_replica_on_a_drained_node(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2)
    job = two_replicas(cluster, **ELASTIC)
    await job.train(1)
    cluster.nodes.draining.add("one")
    job.supervisor.tell(NodeDraining("one", 60.0, "it is sold"))
    await job.watched(2)
    assert [(agent.rank, agent.node) for agent in job.ranks] == [(0, "two"), (1, "two")]
    await job.finish(2)
    assert job.log == [*UP, "node_draining", *CHANGED, "SUCCEEDED"]
    assert job.generations[1] == ("continued without replicas [0]: their nodes are being drained", "memory", 1)
    assert (
        job.message("node_draining") == "node one is being drained within 60 s (it is sold); it runs 2 ranks of the job"
    )


async def test_job_without_room_elsewhere_stays_on_a_drained_node_and_says_so_once(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2)
    job = two_replicas(cluster)

    async def looked():
        job.supervisor.tell(Resize())
        await reached(lambda: not job.inbox.has(Resize))

    await job.train(1)
    cluster.nodes.draining.add("two")
    job.supervisor.tell(NodeDraining("two", 60.0))
    await reached(lambda: "drain_waiting" in job.log)
    await looked()
    await looked()
    await job.finish()
    assert job.log == [*UP, "node_draining", "drain_waiting", "SUCCEEDED"]


@pytest.mark.parametrize("taken", [False, True], ids=["room", "others_were_faster"])
async def test_reshaped_job_is_placed_anew_when_there_is_room_for_the_larger_layout(two_replicas, tmp_path, taken):
    cluster = FakeCluster(tmp_path, one=2, two=2)
    job = two_replicas(cluster, parallel={"tensor": 2, "pipeline": 2}, elastic={"reshape": True})

    def others_are_faster():
        cluster.nodes.used["two"] = 2

    cluster.nodes.used["two"] = 2  # others have it
    job.spec = job.spec.model_copy(update={"parallel": job.spec.parallel.model_copy(update={"pipeline": 1})})
    await job.train(1)
    cluster.nodes.used["two"] = 0
    if taken:
        cluster.groups.refuse = others_are_faster
    job.supervisor.tell(Resize())
    await job.finish(2, generation=2)
    assert len(job.ranks) == (2 if taken else 4)
    cause, _, resume_step = job.generations[1]
    assert (cause, resume_step) == ("placed again as tensor 2 x pipeline 2 x data 1: slots are free again", 1)
    holders = cluster.agents.holders
    assert {holder.node for holder in holders} == {"one"}, "who hands out the snapshots that were left there"
    assert all(holder in cluster.agents.ended for holder in holders)
    assert (job.row.tensor, job.row.pipeline) == (2, 1 if taken else 2)
    assert [each for each in job.log if each != "ranks_replaced"] == [
        *UP, *(each for each in CHANGED if each != "ranks_replaced"), "SUCCEEDED"
    ]  # fmt: skip


def test_change_that_started_no_agents_has_no_standby():
    assert standby_of(Stay("nothing")) is None


async def test_resize_begins_a_generation_that_is_not_counted_as_a_restart(two_replicas, cluster):
    job = two_replicas(cluster, **ELASTIC)
    await job.train(1)
    job.resize(1)
    await job.finish(2, generation=2)
    rows = job.store.query(generations.of_job, job.id)
    assert [(row.data or {}).get("failure") for row in rows] == [None, None]
    assert job.row.restarts == 0


@pytest.fixture
def context(store, submit, tmp_path):
    """A job of two ranks, one on each of two nodes; it has had three generations."""
    job = submit(parallel={"data": 2}, elastic={"min_data": 1, "max_data": 4})
    context = JobContext.of(store, FakeCluster(tmp_path, one=1, two=1, three=1, four=1), job)
    asyncio.run(context.gang.place(3, context.submitted, ()))
    context.gang.record_placements(dict(enumerate(asyncio.run(describe(context.gang.agents)))))
    return context


async def test_resting_ranks_keep_their_held_steps_if_a_change_is_abandoned(context):
    resting = {0: 4, 1: None}
    before = list(context.gang.agents)
    await carry_out(Stay("why"), context, 3, resting)
    assert (context.gang.resting_steps, context.gang.agents, context.gang.departing) == (resting, before, [])
    resting.clear()
    assert context.gang.resting_steps, "the next generation fills its own"


async def test_staying_ranks_keep_their_held_steps_when_others_move(context):
    """Else a step that their snapshots do not have yet would be done again."""
    standby = await context.gang.start_standby(4, context.gang.layout, (1,), ())
    await carry_out(Move((1,), standby), context, 3, {0: 4, 1: 4})
    assert context.gang.resting_steps == {0: 4}
    assert [agent.node for agent in context.gang.agents] == ["one", "three"]


async def avoided():
    return {"three"}


async def test_relocated_gang_avoids_failing_nodes_and_fetches_state_from_its_old_agents(context):
    context.record.avoided_nodes = avoided
    before = list(context.gang.agents)
    target = resized(context.submitted, 3)
    await carry_out(Relocate(target, "slots are free again"), context, 3, {})
    assert context.cluster.groups.acquired[-1] == (context.id, 4, (0, 1, 2), frozenset({"three"}))
    assert [agent.node for agent in context.gang.agents] == ["one", "two", "four"]
    assert all(agent.lost for agent in before)
    (departing,) = context.gang.departing
    assert {agent.node for agent in departing.agents} == {"one", "two"}


@pytest.mark.parametrize(
    ("taken", "replicas"),
    [(["three"], (0, 1, 2)), (["three", "four"], (0, 1)), (["one", "two", "three", "four"], (0, 1))],
    ids=lambda value: str(len(value)),
)
async def test_gang_whose_new_places_were_taken_falls_back_to_what_is_left(context, store, taken, replicas):
    nodes, groups = context.cluster.nodes, context.cluster.groups
    context.record.avoided_nodes = avoided

    def others_are_faster():
        groups.refuse = lambda: None
        for node in taken:
            nodes.used[node] = 1
        raise NotPlaced("not in time")

    groups.refuse = others_are_faster
    again = Relocate(resized(shapes_of(context.submitted)[0], 4), "slots are free again")
    store.write(lambda s: setattr(jobs.get(s, context.id), "wanted_replicas", 4))
    if len(taken) == 4:
        with pytest.raises(NotPlaced):
            await carry_out(again, context, 3, {})
    else:
        await carry_out(again, context, 3, {})
        assert context.gang.layout.data == len(replicas)
    assert groups.acquired[-1] == (context.id, 4, replicas, frozenset({"three"}))
