"""A node whose daemon does not answer takes nothing until it does; what Ray does not tell closes no node."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster import node_daemons
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.connection import RayConnection
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.node_daemons import HeartbeatSource, NodeDaemons
from manta.service.cluster.node_shapes import shapes_in
from manta.service.cluster.nodes import Nodes
from manta.service.cluster.placement import agent_name, node_daemon_name
from manta.workers.paths import Paths
from manta.workers.protocol.json_codec import to_json
from manta.workers.protocol.messages import PROTOCOL, NodeDescription

NODES = [
    {"NodeID": node, "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1,
     "NodeManagerHostname": node, "Resources": {"manta_slot": 4}}
    for node in ("sick", "well")
]  # fmt: skip


class ActorError(Exception):
    """Ray's."""


class FakeDaemonActor:
    """An actor whose every answer is `answer`; None: none at all."""

    def __init__(self, node, **options):
        self.answer = to_json(NodeDescription(node, node, "127.0.0.1", 1, 2, **options))
        self.call = SimpleNamespace(remote=self._call)
        self.calls, self.given, self.killed = [], [], False
        self.answers = {}
        """By method where it is another one."""

    async def _call(self, method, arguments):
        self.calls.append(method)
        self.given.append((method, arguments))
        answer = self.answers.get(method, self.answer)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


def outdate(actor):
    """From now on it is of another release."""
    actor.answer = {**actor.answer, "protocol": -1}


@pytest.fixture
def others():
    """What else is in Ray: the node of each agent, the nodes whose daemon was killed, protocol and code of new daemons
    and what all their answers are, if it is an error, and (name, options, arguments) of each that was started."""
    return SimpleNamespace(agents={}, killed=[], protocol=PROTOCOL, code="", error=None, started=[])


@pytest.fixture
def made(monkeypatch, others):
    """(Daemons, nodes, the actors by node)."""
    monkeypatch.setattr(node_daemons, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(node_daemons, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(
        "manta.service.cluster.nodes.free_resources", lambda ray: {"sick": {"manta_slot": 4}, "well": {}}
    )
    monkeypatch.setattr(node_daemons, "node_of_actor", lambda ray, actor: actor.node)
    actors = {node: FakeDaemonActor(node) for node in ("sick", "well")}

    def get_actor(name):
        if name in others.agents:
            return SimpleNamespace(node=others.agents[name])
        return actors[name.removeprefix(node_daemon_name(""))]

    def kill(actor, no_restart):
        (node,) = [node for node, each in actors.items() if each is actor]
        others.killed.append(node)
        actor.killed = True

    def options(name, **more):
        node = name.removeprefix(node_daemon_name(""))
        actors[node] = FakeDaemonActor(node, protocol=others.protocol, code=others.code)
        if others.error is not None:
            actors[node].answer = others.error

        def remote(*arguments):
            others.started.append((name, more, arguments))
            return actors[node]

        return SimpleNamespace(remote=remote)

    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=ActorError, RayTaskError=ValueError),
        util=SimpleNamespace(
            list_named_actors=lambda: [*map(node_daemon_name, actors), *others.agents],
            scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda **where: where),
        ),
        nodes=lambda: NODES,
        get_actor=get_actor,
        kill=kill,
        remote=lambda cls: SimpleNamespace(options=options),
    )
    connection = RayConnection(ray)
    nodes = Nodes(connection)
    return NodeDaemons(connection, nodes, Paths.of("/nowhere", installation="installation-1"), "aws"), nodes, actors


async def test_node_with_a_silent_daemon_is_closed_until_it_answers(made):
    daemons, nodes, actors = made
    answer, actors["sick"].answer = actors["sick"].answer, None
    assert list(await daemons.ensure()) == ["well"]
    assert nodes.closed == {"sick"} and actors["sick"].calls == ["start"], "one that is silent is not asked twice"
    assert (await nodes.capacity("manta_slot")).nodes == {"well": (4, 0)}
    assert (await nodes.capacity("manta_slot", all_living=True)).nodes == {"sick": (4, 0), "well": (4, 0)}
    actors["sick"].answer = answer
    assert list(await daemons.ensure()) == ["sick", "well"]
    assert nodes.closed == set() and nodes.unswept == {"sick"}
    assert (await nodes.capacity("manta_slot")).nodes["sick"] == (4, 4)


async def test_daemon_that_answered_is_known_without_asking_ray(made, monkeypatch):
    daemons, nodes, actors = made
    assert await daemons.known("well") is None, "nobody has asked for it"
    await daemons.ensure()
    monkeypatch.setattr(nodes, "living", None)
    monkeypatch.setattr(daemons._ray, "find", None)
    assert await daemons.known("well") is not None
    for answer in (None, ActorError("it is dead"), {**actors["well"].answer, "protocol": -1}):
        actors["well"].answer = answer
        assert await daemons.known("well") is None


@pytest.mark.parametrize("where", ["sick", None])
async def test_daemon_of_another_release_stays_while_its_zygote_has_trainers(made, others, caplog, where):
    daemons, nodes, actors = made
    outdate(actors["sick"])
    others.agents[agent_name("job_1", 1, 0)] = where
    for _ in range(3):
        assert list(await daemons.ensure()) == ["well"]
    assert nodes.closed == {"sick"} and others.killed == []
    assert caplog.text.count("node sick is excluded from placement: the daemon of node sick speaks protocol -1") == 1
    others.agents.clear()
    assert list(await daemons.ensure()) == ["well"], "it is not looked at all agents every second"
    daemons._next_check.clear()
    assert list(await daemons.ensure()) == ["sick", "well"]
    assert others.killed == ["sick"] and nodes.closed == set()


def test_daemon_of_another_release_is_replaced_on_a_node_without_agents(made, others):
    daemons, nodes, actors = made
    outdate(actors["sick"])
    others.agents[agent_name("job_1", 1, 0)] = "well"
    before = actors["sick"]
    assert list(asyncio.run(daemons.ensure())) == ["sick", "well"]
    assert others.killed == ["sick"] and nodes.closed == set()
    assert before.calls == ["start"], "it is not shut down, which would remove the snapshots of jobs that wait"


async def test_node_with_another_release_installed_stays_closed(made, others):
    daemons, nodes, actors = made
    others.protocol = -1
    outdate(actors["sick"])
    for _ in range(3):
        assert list(await daemons.ensure()) == ["well"]
        daemons._next_check.clear()
    assert others.killed == ["sick"], "once: the next one would be the same"
    assert nodes.closed == {"sick"}


async def test_daemon_that_missed_the_end_of_a_job_marks_its_node_for_a_sweep(made):
    daemons, nodes, actors = made
    await daemons.ensure()
    actors["sick"].answers["end_job"] = None
    await daemons.end_job("job")
    assert nodes.unswept == {"sick"} and nodes.closed == set()
    assert actors["well"].calls[-1] == "end_job"


async def test_all_nodes_are_marked_for_a_sweep_if_ray_failed_during_a_release(made):
    daemons, nodes, _ = made
    await daemons.of("well")
    agents = SimpleNamespace(names=AsyncMock(side_effect=ClusterUnavailable("Ray does not answer")))
    with pytest.raises(ClusterUnavailable):
        await Cluster(Paths.of("/nowhere"), nodes, None, agents, daemons, None).end_job("job")
    assert nodes.unswept == {"well"}


async def test_daemon_that_misses_a_drain_request_is_told_from_one_that_hears_it(made):
    daemons, _, actors = made
    assert await daemons.drain("well", 30.0)
    assert actors["well"].calls == ["start", "drain"]
    actors["sick"].answer = None
    assert not await daemons.drain("sick", 30.0)
    actors["well"].answers = {"drain": None, "undrain": None}
    assert not await daemons.drain("well", 30.0)
    assert await daemons.undrain("well") is None and await daemons.undrain("sick") is None


async def test_nodes_that_are_gone_are_forgotten_by_the_cluster(made, others, tmp_path):
    """Nodes may come and go for weeks."""
    daemons, nodes, actors = made
    cluster = Cluster(Paths.of(tmp_path), nodes, None, None, daemons, None)
    about = (*vars(daemons).values(), *vars(nodes).values(), cluster.peak_flops)

    def known():
        return [each for each in about if isinstance(each, dict | set) and "well" in each]

    for node in ("sick", "well"):
        others.protocol, others.code = PROTOCOL + 7, ""
        actors[node].answer = to_json(NodeDescription(node, node, "127.0.0.1", 1, 2, protocol=PROTOCOL + 7))
        await daemons.of(node)
        others.protocol, others.code = PROTOCOL, "another"
        del actors[node]
        await daemons.of(node)
        nodes.drain(node, 30.0)
        cluster.peak_flops[node] = 1e12
    assert len(known()) >= 8
    cluster.keep_only(["sick"])
    assert known() == [] and "sick" in daemons.used and "sick" in nodes.draining


def test_heartbeat_address_is_the_one_its_daemon_gives(made):
    daemons, nodes, actors = made
    assert asyncio.run(daemons.heartbeat_source("well")) == HeartbeatSource("127.0.0.1", 2, "")
    actors["sick"].answer = None
    assert asyncio.run(daemons.heartbeat_source("sick")) is None
    assert nodes.closed == {"sick"}


def test_daemons_of_all_nodes_but_lost_ones_are_shut_down_and_killed(made):
    daemons, nodes, actors = made
    nodes.lost.add("sick")
    asyncio.run(daemons.end_all())
    assert (actors["well"].calls, actors["well"].killed) == (["shutdown"], True)
    assert (actors["sick"].calls, actors["sick"].killed) == ([], False)
    for node in ("sick", "gone"):  # where there is nothing to be done
        asyncio.run(daemons.kill(node))
    assert actors["sick"].killed
    nodes.lost.clear()
    actors["sick"].answer, actors["sick"].killed = None, False
    asyncio.run(daemons.end_all())
    assert actors["sick"].killed, "though it does not end in time"


def test_daemon_is_started_on_its_node_with_all_its_arguments(made, others, tmp_path):
    daemons, nodes, actors = made
    del actors["sick"]
    assert list(asyncio.run(daemons.ensure(["-X", "frozen"], {"A": "b"}))) == ["sick", "well"]
    ((name, options, arguments),) = others.started
    assert name == node_daemon_name("sick")
    assert arguments == ("sick", "/nowhere", ["-X", "frozen"], {"A": "b"}, "aws", "installation-1", ["/nowhere"], None)
    assert options["scheduling_strategy"] == {"node_id": "sick", "soft": False}
    assert options["get_if_exists"], "another control plane may start it at the same time"
    assert (options["lifetime"], options["max_concurrency"]) == ("detached", node_daemons.CONCURRENCY)
    assert nodes.closed == set()


def test_daemon_that_died_since_its_lookup_is_restarted_once(made, others):
    daemons, nodes, actors = made
    actors["sick"].answer = ActorError("died")
    assert list(asyncio.run(daemons.ensure())) == ["sick", "well"]
    assert [name for name, _, _ in others.started] == [node_daemon_name("sick")]
    assert (nodes.closed, nodes.unswept) == (set(), set())


async def test_new_daemon_gets_more_time_to_answer_than_a_running_one(made, monkeypatch):
    """A node that is known to be sick does not hold up what asks all nodes."""
    daemons, nodes, actors = made
    limits = []

    async def within(seconds, answer):
        limits.append(seconds)
        return await answer

    monkeypatch.setattr(node_daemons, "within", within)
    await daemons.of("sick")
    del actors["sick"]
    await daemons.of("sick")
    del actors["sick"]
    nodes.unresponsive.add("sick")
    await daemons.of("sick")
    assert limits == [node_daemons.ANSWER_SECONDS, node_daemons.START_SECONDS, node_daemons.ANSWER_SECONDS]


async def test_daemon_calls_pass_on_whether_snapshots_of_a_job_are_kept(made):
    daemons, _, actors = made
    actors["well"].answers["undrain"] = "it is sold"
    await daemons.end_job("job_1", keep_snapshots=True)
    await daemons.end_job("job_2")
    await daemons.drain("well", 45.0)
    assert await daemons.undrain("well") == "it is sold"
    assert [each for each in actors["well"].given if each[0] != "start"] == [
        ("end_job", {"job": "job_1", "keep_snapshots": True}),
        ("end_job", {"job": "job_2", "keep_snapshots": False}),
        ("drain", {"seconds": 45.0}),
        ("undrain", {}),
    ]


async def test_node_that_does_not_share_the_checkpoints_is_closed_until_it_does(made):
    daemons, nodes, actors = made
    answer = actors["sick"].answer
    actors["sick"].answer = {**answer, "unshared": ["/nowhere"]}
    assert list(await daemons.ensure()) == ["sick", "well"], "what lies there is looked after"
    assert nodes.closed == {"sick"} and "does not share /nowhere" in nodes.problems["sick"]
    actors["sick"].answer = answer
    await daemons.ensure()
    assert nodes.closed == set()


async def test_node_with_other_code_is_closed_unless_its_daemon_predates_an_upgrade(made, others):
    daemons, nodes, actors = made
    actors["well"].answer = {**actors["well"].answer, "code": "of an older release"}
    del actors["sick"]
    others.code = "something else"
    for _ in range(2):
        await daemons.ensure()
        assert nodes.closed == {"sick"} and "runs another release of Manta" in nodes.problems["sick"]


async def test_node_where_no_daemon_starts_has_a_problem_that_says_why(made, others, caplog):
    daemons, nodes, actors = made
    del actors["sick"]
    others.error = ActorError("died at its birth\nModuleNotFoundError: No module named 'manta'")
    for _ in range(3):
        assert list(await daemons.ensure()) == ["well"]
    assert "has no Manta" in nodes.problems["sick"]
    assert caplog.text.count("has no Manta") == 1
    others.error = None
    del actors["sick"]
    assert list(await daemons.ensure()) == ["sick", "well"] and nodes.closed == set()


def test_data_check_is_made_by_a_node_that_accepts_placements(made):
    daemons, nodes, actors = made
    nodes.draining = {"sick"}
    actors["well"].answers = {"check_data": "it is empty"}
    assert asyncio.run(daemons.problem_of_data({"name": "x"}, ["/data"])) == "it is empty"
    actors["well"].answers = {"check_data": ActorError("died")}
    assert asyncio.run(daemons.problem_of_data({"name": "x"}, None)) is None, "it is not known, which is no problem"


def test_data_check_asks_no_further_nodes_after_a_few_are_silent(made, monkeypatch):
    daemons, _, actors = made
    monkeypatch.setattr(node_daemons, "DATA_SECONDS", 0.01)
    monkeypatch.setattr(node_daemons, "DATA_NODES", 1)
    for actor in actors.values():
        actor.answers = {"check_data": None}
    assert asyncio.run(daemons.problem_of_data({"name": "x"}, None)) is None
    assert [actor.calls.count("check_data") for actor in actors.values()] == [1, 0]


@pytest.fixture
def comes_and_goes(made, monkeypatch):
    """As `made`, where an autoscaler has added the node `well`."""
    _, nodes, _ = made
    nodes.shapes = shapes_in("small=1x4 slots")
    monkeypatch.setattr("manta.service.cluster.nodes.node_types", lambda ray: {"sick": "", "well": "small"})
    monkeypatch.setattr("manta.service.cluster.nodes.free_resources", lambda ray: {"well": {"manta_slot": 4}})
    return made


async def test_daemon_ended_for_a_rest_restarts_only_when_wanted(comes_and_goes, others):
    daemons, nodes, actors = comes_and_goes
    await daemons.rest("well")
    assert others.killed == ["well"] and nodes.at_rest == {"well"}
    del actors["well"]
    assert await daemons.watched("well") is None
    assert list(await daemons.ensure()) == ["sick"], "what all nodes are asked does not wake it"
    assert others.started == [] and nodes.closed == set(), "things can be placed there"
    await daemons.wake()
    assert [name for name, *_ in others.started] == [node_daemon_name("well")]
    assert nodes.at_rest == set() and "well" in daemons.used


async def test_node_whose_daemon_another_service_ended_counts_as_at_rest(comes_and_goes, others):
    daemons, nodes, actors = comes_and_goes
    del actors["well"], actors["sick"]
    assert await daemons.heartbeat_source("well") is None
    assert nodes.at_rest == {"well"} and others.started == []
    assert await daemons.heartbeat_source("sick") is not None, "a node that stays has a daemon always"


def test_daemon_that_dies_beside_ranks_is_restarted_at_once(comes_and_goes, others, monkeypatch):
    daemons, nodes, actors = comes_and_goes
    monkeypatch.setattr("manta.service.cluster.nodes.free_resources", lambda ray: {"well": {"manta_slot": 3}})
    del actors["well"]
    assert asyncio.run(daemons.watched("well")) is not None
    assert nodes.at_rest == set()


async def test_node_at_rest_is_marked_for_a_sweep_when_a_job_ends(comes_and_goes):
    daemons, nodes, _ = comes_and_goes
    await daemons.rest("well")
    await daemons.end_job("job_1")
    assert nodes.unswept == {"well"}
