"""Agents in Ray: where they are started and replaced, and how they end."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from manta.service.cluster import agents as agents_module
from manta.service.cluster import cluster as cluster_module
from manta.service.cluster.agent_client import AgentError, AgentLost
from manta.service.cluster.agents import Agents
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.connection import RayConnection
from manta.service.cluster.nodes import Nodes
from manta.service.cluster.placement import Seat
from manta.service.leases.decisions import LeaseLost
from manta.workers.paths import Paths
from manta.workers.system.sockets import PortRange
from tests.service.support.virtual_time import in_virtual_time

NODES = [
    {"NodeID": node, "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1,
     "NodeManagerHostname": node, "Resources": {"manta_slot": 4}}
    for node in ("a", "b", "c")
]  # fmt: skip

PORTS = PortRange(20000, 20010)


class ActorError(Exception):
    """Ray's."""


class Actor:
    """An actor that was started with these options and arguments."""

    def __init__(self, options, arguments):
        self.options, self.arguments, self.calls, self.dead = SimpleNamespace(**options), arguments, [], False
        self.call = SimpleNamespace(remote=self._call)

    async def _call(self, method, arguments):
        self.calls.append(method)
        if method == "reports":  # which is heard until the actor is dead
            while not self.dead:
                await asyncio.sleep(0)
            raise ActorError("dead")
        return {"code": None, "signal": 9} if method == "stop" else None

    def kill(self):
        self.calls.append("killed")
        self.dead = True


@pytest.fixture
def agents(tmp_path):
    """On three nodes."""
    strategies = SimpleNamespace(
        PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
            group,
            placement_group_bundle_index,
        ),
        NodeAffinitySchedulingStrategy=lambda node_id, soft: (node_id, soft),
    )
    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=ActorError, RayTaskError=ValueError),
        util=SimpleNamespace(scheduling_strategies=strategies, get_placement_group=lambda name: f"group {name}"),
        nodes=lambda: NODES,
        kill=lambda actor, no_restart: actor.kill(),
        remote=lambda cls: SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda *arguments: Actor(options, arguments))
        ),
    )
    connection = RayConnection(ray)
    return Agents(connection, Nodes(connection), Paths.of(tmp_path, installation="installation-1"), PORTS)


def actors(started):
    return [agent.actor for agent in asyncio.run(started)]


@pytest.mark.parametrize("unit", ["manta_slot", "GPU"])
def test_agents_are_started_in_their_bundles_with_the_units_of_a_rank(agents, tmp_path, unit):
    seats = {2: Seat("one", 1), 3: Seat("two", 0)}
    first, second = actors(agents.start("job_1", 4, seats, unit))
    assert (first.options.scheduling_strategy, second.options.scheduling_strategy) == (
        ("group one", 1),
        ("group two", 0),
    )
    assert (first.options.name, first.options.lifetime) == ("agent/job_1/4/2", "detached")
    assert first.options.num_gpus == (1 if unit == "GPU" else 0)
    assert unit == "GPU" or first.options.resources == {"manta_slot": 1}
    assert first.options.max_concurrency == agents_module.CONCURRENCY
    assert second.arguments == ("job_1", 3, str(tmp_path.resolve()), "installation-1", "two", "20000-20010", False)


@pytest.mark.parametrize(("wanted", "lost", "used"), [
    ((), set(), ["a", "b", "c"]),
    (("c", "a", "gone"), set(), ["a", "c"]),
    (("c", "a"), {"a"}, ["c"]),
    ((), {"a", "b"}, []),
])  # fmt: skip
def test_snapshots_are_handed_out_on_the_nodes_that_live(agents, wanted, lost, used):
    """Where there is one node, all that was left is there already."""
    agents._nodes.lost = lost
    holders = actors(agents.start_snapshot_holders("job_1", wanted))
    assert [holder.options.scheduling_strategy for holder in holders] == [(node, False) for node in used]
    assert {(holder.options.num_cpus, holder.options.max_concurrency) for holder in holders} <= {
        (0, agents_module.CONCURRENCY)
    }, "they take nothing that a rank needs, and answer many at a time"
    assert not any(hasattr(holder.options, "name") for holder in holders), "they end with who started them"


@pytest.mark.parametrize(("keep", "asked"), [(True, "stop"), (False, "close")])
async def test_agent_ends_its_trainer_first_and_is_dead_in_the_end(agents, keep, asked):
    (agent,) = await agents.start("job_1", 1, {0: Seat("one", 0)}, "manta_slot")
    await agents.end([agent, None], keep)
    assert agent.actor.calls == [asked, "killed", "reports"]


async def test_agent_that_does_not_answer_is_killed(agents, monkeypatch):
    monkeypatch.setattr(agents_module, "CLOSE_SECONDS", 0.02)
    (agent,) = await on_nodes(agents, "a")
    await agents.end([agent], keep_snapshots=True)
    assert agent.actor.dead


async def on_nodes(agents, *nodes):
    """Agents that have said that they are on these nodes, and do not answer any more."""
    started = await agents.start("job_1", 1, {rank: Seat("one", rank) for rank in range(len(nodes))}, "manta_slot")

    async def silent(method, arguments):
        await asyncio.Event().wait()

    for agent, node in zip(started, nodes, strict=True):
        agent._node, agent.actor.call.remote = node, silent
    return started


def at_once_in_this_thread(agents):
    async def run(function, *arguments, **named):
        return function(*arguments, **named)

    agents._ray.run = run


@pytest.mark.parametrize("seconds", [0, 3], ids=["before", "meanwhile"])
def test_agents_on_a_lost_node_are_killed_without_waiting_for_them(agents, monkeypatch, seconds):
    at_once_in_this_thread(agents)

    async def body():
        started = await on_nodes(agents, "a", "a", "a")
        ending = asyncio.create_task(agents.end(started, keep_snapshots=True))
        await asyncio.sleep(seconds)
        agents._nodes.lost.add("a")
        agents.fail_calls_to("a")
        await ending
        assert asyncio.get_running_loop().time() == seconds
        assert all(agent.actor.dead for agent in started)

    in_virtual_time(monkeypatch, body)


def test_silent_agents_are_waited_for_concurrently(agents, monkeypatch):
    at_once_in_this_thread(agents)

    async def body():
        started = await on_nodes(agents, "a", "b", "b")
        agents._nodes.lost.add("c")
        agents.fail_calls_to("c")
        await agents.end(started, keep_snapshots=True)
        assert asyncio.get_running_loop().time() == 2 * agents_module.CLOSE_SECONDS

    in_virtual_time(monkeypatch, body)


async def test_snapshot_holder_on_a_lost_node_is_never_called(agents):
    holder, _ = await agents.start_snapshot_holders("job_1", ["a", "b"])
    agents._nodes.lost.add("a")
    with pytest.raises(AgentLost):
        await holder.describe()
    assert holder.actor.calls == []


def test_agent_answers_and_silences_are_keyed_by_rank_and_other_errors_raised():
    async def question(rank, agent):
        if agent is None:
            raise AgentError("gone")
        if agent == "broken":
            raise ValueError("our own mistake")
        return f"{agent} of {rank}"

    answers, silent = asyncio.run(agents_module.query({5: "a", 3: None, 1: "b"}, question, 10))
    assert (answers, list(silent)) == ({5: "a of 5", 1: "b of 1"}, [3])
    assert "gone" in silent[3]
    with pytest.raises(ValueError, match="our own mistake"):
        asyncio.run(agents_module.query({0: None, 1: "broken"}, question, 10))


async def test_agents_are_not_asked_if_the_caller_is_cancelled_before_its_turn():
    asked = []

    async def answer():
        return True

    def question(rank, agent):
        asked.append(rank)
        return answer()

    asking = asyncio.create_task(agents_module.query({0: "a", 1: "b"}, question, 10))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asked == [], "their coroutines would never be awaited"


def test_agents_are_found_in_order_with_none_for_missing_ones(agents):
    ray = agents._ray.module
    ray.util.list_named_actors = lambda: ["agent/job_2/1/0", "agent/job_1/1/0", "node-a"]
    ray.get_actor = lambda name: f"actor of {name}"
    handles = asyncio.run(agents.find(["agent/job_1/1/0", "agent/job_1/1/1", "agent/job_2/1/0"]))
    assert handles[1] is None
    assert [handles[at].actor for at in (0, 2)] == ["actor of agent/job_1/1/0", "actor of agent/job_2/1/0"]
    assert handles[0]._job == "job_1" and handles[2]._job == "job_2"
    assert asyncio.run(agents.names()) == ["agent/job_2/1/0", "agent/job_1/1/0"]


async def test_agents_are_killed_by_the_owner_of_their_job_alone(agents):
    (ours,) = await agents.start("job_1", 1, {0: Seat("one", 0)}, "manta_slot")
    await agents.kill([None, ours])
    (theirs,) = await agents.start("job_2", 1, {0: Seat("one", 0)}, "manta_slot")
    agents.epoch = theirs._epoch = Mock(side_effect=LeaseLost("job_2"))
    with pytest.raises(LeaseLost):
        await agents.kill([theirs])
    assert (ours.actor.dead, theirs.actor.dead) == (True, False)
    agents.epoch.assert_called_once_with("job_2", None)


def test_agents_are_started_by_the_owner_of_their_job_alone(agents):
    """Who waited for its places may have lost it meanwhile."""
    agents._start, agents.epoch = Mock(), Mock(side_effect=LeaseLost("job_1"))
    with pytest.raises(LeaseLost):
        asyncio.run(agents.start("job_1", 1, {0: Seat("one", 0)}, "manta_slot"))
    agents._start.assert_not_called()


def test_agents_describe_themselves_all_or_not_at_all():
    first, second, gone = (
        SimpleNamespace(describe=AsyncMock(side_effect=[answer] * 2)) for answer in ("a", "b", AgentError("gone"))
    )
    assert asyncio.run(agents_module.describe([first, second])) == ["a", "b"]
    assert asyncio.run(agents_module.describe([first, gone])) is None
    assert asyncio.run(agents_module.describe_all({4: second, 2: gone})) == {4: "b"}


SEATS = {2: Seat("group", 0), 3: Seat("group", 1)}


@pytest.fixture
def started_agents():
    """Start one agent for each seat, and note which are killed."""
    return SimpleNamespace(start=AsyncMock(return_value=["second", "third"]), kill=AsyncMock())


def replaced(tmp_path, started_agents, state="CREATED"):
    groups = SimpleNamespace(states=AsyncMock(return_value={"group": state}))
    cluster = Cluster(Paths.of(tmp_path), None, groups, started_agents, None, None)
    return asyncio.run(cluster.replace_agents("job_1", 4, SEATS, "manta_slot"))


@pytest.mark.parametrize("answer", [["as", "they are"], None])
def test_new_agents_that_do_not_answer_give_their_seats_back(tmp_path, started_agents, monkeypatch, answer):
    describe = AsyncMock(return_value=answer)
    monkeypatch.setattr(cluster_module, "describe", describe)
    assert replaced(tmp_path, started_agents) == (answer and ["second", "third"])
    describe.assert_awaited_once_with(["second", "third"])
    started_agents.start.assert_awaited_once_with("job_1", 4, SEATS, "manta_slot")
    assert [call.args for call in started_agents.kill.await_args_list] == ([] if answer else [(["second", "third"],)])


@pytest.mark.parametrize("state", ["PENDING", "RESCHEDULING"])
def test_agents_are_not_replaced_in_a_placement_group_that_no_longer_stands(tmp_path, started_agents, state):
    assert replaced(tmp_path, started_agents, state) is None
    started_agents.start.assert_not_awaited()
