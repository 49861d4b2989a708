"""Which changes of size and place are planned, what is prepared for them, and when a smaller job may grow: on a real
database and a cluster that exists on paper."""

import asyncio
import math
import re
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster.agents import describe
from manta.service.cluster.placement import Capacity
from manta.service.cluster.sizes import resized, shapes_of
from manta.service.job import resize_and_drain
from manta.service.job.changes import Grow, Move, Relocate, Shrink
from manta.service.job.context import JobContext
from manta.service.job.gang import AgentSet
from manta.service.job.generation import RunningGeneration
from manta.service.job.inbox import Cancel, Pause, Resize, TimeUp
from manta.service.job.resize_and_drain import ElasticityPlanner
from manta.service.states import JobState
from manta.service.store import events, generations, jobs
from manta.workers.config import JobSpec
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.queue import LARGE
from tests.service.support.waiting import reached


@pytest.fixture
def may_grow(store, submit, tmp_path):
    """Whether a job that runs with one of two replicas sees room for the other, on two nodes with two slots each."""

    def look(shape=0, **changes):
        job = submit(**{"parallel": {"tensor": 2, "data": 2}, "elastic": {"min_data": 1, "max_data": 2}, **changes})
        submitted, cluster = JobSpec.model_validate(job.spec), FakeCluster(tmp_path, one=2, two=2)
        cluster.nodes.used["one"] = 2
        store.write(lambda s: jobs.transition(s, job.id, JobState.STARTING))
        context = JobContext.of(store, cluster, job)
        context.gang.spec = resized(shapes_of(submitted)[shape], 1)
        context.gang.nodes = dict.fromkeys(range(context.gang.layout.world_size), "one")
        return asyncio.run(ElasticityPlanner(context).may_change())

    return look


@pytest.mark.parametrize(
    ("waiting", "grows"),
    [
        (None, True),
        ({"tensor": 2}, False),
        ({"tensor": 2, "data": 2}, False),  # it needs more units than are free, which are kept for it
        ({"tensor": 2, "data": 4}, True),  # it never fits
    ],
)
def test_elastic_job_grows_into_room_that_no_queued_job_waits_for(may_grow, submit, waiting, grows):
    if waiting:
        submit(parallel=waiting)
    assert may_grow() is grows


def test_elastic_job_at_its_wanted_size_does_not_read_the_queue(may_grow, submit, monkeypatch):
    """Every job looks every two seconds, and the queue may be long."""
    submit(parallel={"tensor": 2})
    monkeypatch.setattr(jobs, "queued", lambda session: pytest.fail("the queue is read"))
    assert not may_grow(parallel={"tensor": 2, "data": 1})


def test_queued_gpu_job_does_not_stop_a_cpu_job_from_growing(may_grow, submit):
    submit(parallel={"tensor": 2}, resources={"accelerator": "gpu"})
    assert may_grow(resources={"accelerator": "cpu"})
    assert not may_grow(resources={"accelerator": "gpu"})


WHOLE = {"parallel": {"tensor": 2, "pipeline": 2}, "elastic": {"reshape": True}}


def test_reshaped_job_returns_to_its_layout_when_it_fits_with_what_it_holds(may_grow):
    assert not may_grow(shape=0, **WHOLE)
    assert may_grow(shape=1, **WHOLE), "it holds two units, and two are free"


def test_reshaped_job_keeps_its_layout_while_others_wait(may_grow, submit):
    submit(parallel={"tensor": 2})
    assert not may_grow(shape=1, **WHOLE)


def test_queued_job_with_an_unreadable_spec_is_skipped_when_growing(may_grow, submit, store):
    strange = submit(parallel={"tensor": 2})
    store.write(lambda s: setattr(jobs.get(s, strange.id), "spec", {**strange.spec, "train": "as ever"}))
    assert may_grow()
    submit(parallel={"tensor": 2})
    assert not may_grow()


ELASTIC = {"elastic": {"min_data": 1, "max_data": 4}}
THREE = {"one": 2, "two": 2, "three": 2}


@pytest.fixture
def planned(store, submit, tmp_path):
    """A job of tensor 2 x data 2 ranks that has committed its first step: its planner, generation and context."""

    @asynccontextmanager
    async def made(slots, wanted=None, shape=0, **sections):
        job = submit(**{"parallel": {"tensor": 2, "data": 2}, **sections})
        store.write(lambda s: jobs.transition(s, job.id, JobState.STARTING))
        store.write(lambda s: setattr(jobs.get(s, job.id), "wanted_replicas", wanted))
        store.write(lambda s: generations.begin(s, job.id, "submitted", False))
        store.write(lambda s: generations.mark_first_step(s, job.id, 1))
        context = JobContext.of(store, FakeCluster(tmp_path, **slots), job)
        gang = context.gang
        await gang.place(1, shapes_of(context.submitted)[shape], ())
        gang.record_placements(dict(enumerate(await describe(gang.agents))))
        running = RunningGeneration(gang.agents, 1, {}, AsyncMock())
        try:
            yield ElasticityPlanner(context), running, context
        finally:
            await running.close()

    return made


def count_of(context, kind):
    """How often an event of this type was written."""
    with context.record.store.read() as session:
        return sum(event.type == kind for event in events.page(session, context.id).items)


def nothing_is_left_of_the_standby(context):
    cluster = context.cluster
    return len(cluster.agents.living) == 4 and len(cluster.groups.held) == 2 and sum(cluster.nodes.used.values()) == 4


async def test_standby_of_a_moving_replica_is_ready_and_leaves_snapshots_alone(planned):
    """The node may be of the same machine: the one that trains has files under the same names there."""
    async with planned(THREE) as (planner, running, context):
        context.cluster.nodes.draining.add("two")
        before = list(context.gang.agents)
        change = await planner.plan(running)
        assert isinstance(change, Move) and change.replicas == (1,)
        assert [agent.node for agent in change.standby.agents] == ["three", "three"]
        prepared = [order for agent in change.standby.agents for order in agent.prepared]
        assert [(order.rank, order.generation, order.snapshot_folder) for order in prepared] == [
            (2, 2, None), (3, 2, None)
        ]  # fmt: skip
        assert context.gang.agents == before, "they train on"


@pytest.mark.parametrize(("left", "replicas"), [("one", (0,)), ("two", (1,)), ("both", (0, 1))])
async def test_standby_has_the_ranks_of_the_leaving_replicas(planned, left, replicas):
    async with planned({"one": 2, "two": 2, "three": 2, "four": 2}, parallel={"pipeline": 2, "data": 2}) as (
        planner,
        running,
        context,
    ):
        context.cluster.nodes.draining |= {"one", "two"} if left == "both" else {left}
        change = await planner.plan(running)
        assert isinstance(change, Move) and change.replicas == replicas
        standby = change.standby.agents
        assert [order.rank for agent in standby for order in agent.prepared] == context.gang.ranks_in(replicas)
        assert [agent.rank for agent in standby] == context.gang.ranks_in(replicas)


async def test_additional_ranks_are_prepared_for_the_larger_layout_with_snapshots_of_their_own(planned):
    async with planned(THREE, wanted=4, **ELASTIC) as (planner, running, context):
        change = await planner.plan(running)
        assert isinstance(change, Grow) and change.target.layout.data == 3
        prepared = [order for agent in change.standby.agents for order in agent.prepared]
        folder = str(context.cluster.paths.snapshot_folder(context.id))
        assert [(order.rank, order.snapshot_folder) for order in prepared] == [(4, folder), (5, folder)]
        assert [order.spec["parallel"]["data"] for order in prepared] == [3, 3]
        assert change.cause == "resized from 2 to 3 replicas"


async def test_nodes_on_which_the_machine_keeps_failing_the_job_get_no_standby(planned):
    async with planned({"one": 2, "two": 2, "three": 2, "four": 2}, wanted=3, **ELASTIC) as (planner, running, context):

        async def avoided():
            return {"three"}

        context.record.avoided_nodes = avoided
        change = await planner.plan(running)
        assert [agent.node for agent in change.standby.agents] == ["four", "four"]


async def test_job_that_shrinks_keeps_its_first_replicas(planned):
    async with planned({"one": 4}, wanted=1, **ELASTIC) as (planner, running, _):
        assert await planner.may_change()
        assert await planner.plan(running) == Shrink((0,), "resized from 2 to 1 replicas")


async def test_elastic_job_at_its_wanted_size_plans_no_change(planned):
    async with planned({"one": 8}, wanted=2, **ELASTIC) as (planner, running, context):
        assert not await planner.may_change()
        assert await planner.plan(running) is None
        assert not count_of(context, "resize_waiting")


async def test_job_does_not_plan_a_resize_while_there_is_no_room(planned):
    """Each plan that comes to nothing says so."""
    async with planned({"one": 4}, wanted=3, **ELASTIC) as (planner, _, context):
        assert not await planner.may_change()
        context.cluster.nodes.used["one"] -= 2
        assert await planner.may_change()


@pytest.mark.parametrize("has_gpus", [False, True])
async def test_queued_job_is_judged_by_the_unit_it_waits_for(planned, submit, has_gpus):
    async with planned({"one": 8}) as (planner, _, context):
        nodes, real = context.cluster.nodes, context.cluster.nodes.capacity

        async def capacity(unit):
            return await real(unit) if unit == "GPU" else Capacity(unit, 0, 0, {})

        async def answer():
            return has_gpus

        nodes.capacity, nodes.has_gpus = capacity, answer
        submit(parallel={"tensor": 2})
        assert await planner._other_jobs_wait() is has_gpus


async def test_queued_job_that_never_fits_is_read_again_only_after_a_change(planned, submit, store, monkeypatch):
    """There may be thousands, and whoever could grow looks at the queue every other second."""
    read, get = [], jobs.get
    async with planned({"one": 8}) as (planner, _, context):
        never = submit(parallel={"data": 12}, train=LARGE).id
        monkeypatch.setattr(
            jobs, "get", lambda session, job_id, **how: read.append(job_id) or get(session, job_id, **how)
        )

        async def reads():
            read.clear()
            for _ in range(3):
                assert not await planner._other_jobs_wait()
            return read.count(never)

        assert await reads() == 1
        store.write(lambda session: jobs.edit(session, never, name="another"))
        assert await reads() == 1
        context.cluster.nodes.slots |= {"two": 3}
        context.cluster.nodes.used |= {"two": 0}
        assert await reads() == 1
        context.cluster.nodes.slots["two"] = 4
        assert await planner._other_jobs_wait()


async def test_drain_without_room_is_reported_once_per_node(planned):
    async with planned({"one": 2, "two": 2, "three": 0}) as (planner, running, context):
        context.cluster.nodes.draining.add("two")
        assert await planner.may_change(), "to say so"
        for _ in range(2):
            assert await planner.plan(running) is None
        assert count_of(context, "drain_waiting") == 1
        assert len(context.cluster.groups.acquired) == 1, "no places are asked for where there is no room"
        assert not await planner.may_change()
        planner.reconsider()
        assert context.inbox.has(Resize)
        assert await planner.plan(running) is None
        assert count_of(context, "drain_waiting") == 2
        context.cluster.nodes.slots["three"] = 2
        assert await planner.may_change(), "there is room now"


async def test_drained_job_stays_as_long_as_its_first_draining_node(planned):
    async with planned({"one": 2, "two": 2, "three": 0}) as (planner, running, context):
        now = time.monotonic()
        context.cluster.nodes.draining |= {"one", "two", "three"}
        context.cluster.nodes.leave_by |= {"one": now + 9000.0, "two": now + 5000.0, "three": now + 600.0}
        assert await planner.plan(running) is None
        with context.record.store.read() as session:
            (said,) = [each.message for each in events.page(session, context.id).items if each.type == "drain_waiting"]
        seconds = int(re.search(r"for (\d+) s;", said)[1])
        assert 4000 < seconds < 5000


async def test_drained_job_that_cannot_move_or_shrink_changes_its_layout(planned):
    reshaped = {"parallel": {"tensor": 2, "pipeline": 2}, "elastic": {"reshape": True}}
    async with planned({"one": 4, "two": 2}, **reshaped) as (planner, running, context):
        context.cluster.nodes.used["two"] = 2
        context.cluster.nodes.draining.add("one")
        assert await planner.plan(running) is None
        context.cluster.nodes.used["two"] = 0
        assert await planner.may_change(), "though it was said that there is no room"
        change = await planner.plan(running)
        assert isinstance(change, Relocate) and change.why == "its nodes are being drained"
        assert (change.target.layout.tensor, change.target.layout.pipeline) == (2, 1)
        assert change.cause == "placed again as tensor 2 x pipeline 1 x data 1: its nodes are being drained"


async def test_reshaped_job_does_not_grow_while_others_wait(planned, submit, store):
    async with planned({"one": 4}, shape=1, **WHOLE) as (planner, running, _):
        waiting = submit(parallel={"tensor": 2})
        assert await planner.plan(running) is None
        store.write(lambda s: jobs.request_cancel(s, waiting.id))
        change = await planner.plan(running)
        assert isinstance(change, Relocate) and change.why == "slots are free again"
        assert (change.target.layout.tensor, change.target.layout.pipeline) == (2, 2)


async def test_resize_takes_no_units_that_queued_jobs_wait_for(planned, submit, store):
    async with planned(THREE, wanted=3, **ELASTIC) as (planner, running, context):
        waiting = submit(parallel={"tensor": 2, "data": 3})
        assert await planner.plan(running) is None
        assert await planner.plan(running) is None
        assert count_of(context, "resize_waiting") == 1, "once, though REST and the database tell of a request"
        assert not context.cluster.groups.acquired[1:]
        store.write(lambda s: jobs.request_cancel(s, waiting.id))
        assert isinstance(await planner.plan(running), Grow)


async def test_resize_to_fewer_replicas_ignores_the_queue(planned, submit):
    async with planned({"one": 4}, wanted=1, **ELASTIC) as (planner, running, _):
        submit(parallel={"tensor": 2, "data": 2})
        assert isinstance(await planner.plan(running), Shrink)


def cannot(agent):
    agent.refuse("prepare", "no memory left")


def is_not_ready(agent):
    agent.prepare = AsyncMock(side_effect=lambda order: agent.rank != 4)


def is_slow(agent):
    agent.prepare = lambda order: asyncio.Event().wait()


def is_not_described(agent):
    """Is lost before its order, which the test says."""


@pytest.mark.parametrize("trouble", [cannot, is_not_ready, is_slow, is_not_described])
async def test_standby_with_an_unready_lost_or_slow_agent_is_dismissed(planned, monkeypatch, trouble):
    async with planned(THREE, wanted=3, **ELASTIC) as (planner, running, context):
        if trouble is is_slow:
            monkeypatch.setattr(resize_and_drain, "PREPARE_SECONDS", 0.01)
        elif trouble is is_not_described:
            monkeypatch.setattr(resize_and_drain, "describe", AsyncMock(return_value=None))
        context.cluster.agents.on_start = trouble
        assert await planner.plan(running) is None
        assert nothing_is_left_of_the_standby(context)


@pytest.mark.parametrize("happens", [Cancel(), Pause(), TimeUp()])
@pytest.mark.parametrize("late", [False, True], ids=["while_it_starts", "when_it_is_ready"])
async def test_standby_of_a_job_that_ends_is_dismissed(planned, happens, late):
    async with planned(THREE, wanted=3, **ELASTIC) as (planner, running, context):

        def end_it(agent):
            async def prepare(order):
                context.inbox.put(happens)
                return late or await asyncio.Event().wait()

            agent.prepare = prepare

        context.cluster.agents.on_start = end_it
        assert await planner.plan(running) is None
        assert nothing_is_left_of_the_standby(context)


async def test_drained_job_keeps_its_replica_if_a_rank_dies_meanwhile(planned):
    """What follows from the death comes first."""
    async with planned(THREE, **ELASTIC) as (planner, running, context):

        def dies(agent):
            async def prepare(order):
                context.gang.agents[0].die()
                await asyncio.Event().wait()

            agent.prepare = prepare

        context.cluster.nodes.draining.add("two")
        context.gang.agents[0].generation = 1
        context.cluster.agents.on_start = dies
        assert await planner.plan(running) is None
        assert nothing_is_left_of_the_standby(context)


async def test_look_for_room_is_repeated_after_an_error(planned, monkeypatch):
    monkeypatch.setattr(resize_and_drain, "ROOM_SECONDS", 0.001)
    async with planned({"one": 8}, wanted=3, **ELASTIC) as (planner, _, context):
        context.cluster.nodes.error = RuntimeError("Ray does not answer")
        looking = asyncio.create_task(planner.check_for_room())
        await reached(lambda: context.inbox.has(Resize))
        assert context.cluster.nodes.error is None, "the first look has failed"
        looking.cancel()


@pytest.mark.parametrize(
    ("left", "spare", "seconds"),
    [(60.0, 50.0, 50.0), (60.0, -10.0, 30.0), (60.0, 20.0, 30.0), (math.inf, math.inf, math.inf)],
)
def test_move_off_a_drained_node_may_take_the_spare_time_or_half_the_time_left(left, spare, seconds):
    planner, asked = object.__new__(ElasticityPlanner), []

    async def spare_seconds():
        return spare

    async def start_standby(spec, running, replicas, seconds):
        asked.append(seconds)
        return AgentSet([])

    planner._gang = SimpleNamespace(spec=None)
    planner._seconds_left, planner._spare_seconds, planner._start_standby = lambda: left, spare_seconds, start_standby
    assert asyncio.run(planner._leave(None, (1,))) == Move((1,), AgentSet([]))
    assert asked == [seconds]
