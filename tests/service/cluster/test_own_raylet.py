"""The raylet of this machine, and what is asked of Ray that it does not offer."""

import asyncio
import os
import signal
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from manta.service.cluster import existing_ray as module
from manta.service.cluster import ray_head
from manta.service.cluster.existing_ray import ensure_raylet
from manta.service.cluster.ray_head import RayUnavailable
from manta.service.cluster.ray_private import (
    Raylet,
    actors_on,
    node_of_actor,
    node_types,
    placement_group_states,
    session_name,
)
from manta.workers.paths import Paths
from manta.workers.system.sockets import PortRange
from tests.service.support.stand_in_ray import ray_processes

ADDRESS = "127.0.0.1:6379"


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def ray(monkeypatch):
    """Raylets that Ray knows; one that is started is among them from then on."""
    known, started, ray_starts, gives_up = [], [], [], []

    def wait(seconds):
        if gives_up:
            return gives_up.pop()
        raise module.subprocess.TimeoutExpired("ray", seconds)

    def spawn(address, paths, ports):
        started.append((address, ports))
        known.extend(ray_starts)
        return Mock(wait=wait, terminate=lambda: started.append("terminated"))

    monkeypatch.setattr(module, "raylets", lambda address: list(known))
    monkeypatch.setattr(module, "_spawn", spawn)
    monkeypatch.setattr(module, "_own_addresses", lambda: {"127.0.0.1", "10.0.0.7"})
    monkeypatch.setattr(module, "end_all", lambda mark, leader: started.append("ended what was left"))
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    return known, started, ray_starts, gives_up


def ensure(tmp_path, ports=None):
    ensure_raylet(ADDRESS, Paths.of(tmp_path), ports)


def raylet(port, alive=True, host="127.0.0.1", sockets=()):
    return Raylet(host, port, alive, tuple(sockets))


@pytest.mark.parametrize("runs_here", [True, False])
def test_raylet_is_started_on_the_allowed_ports_unless_one_runs_here(ray, tmp_path, listening, runs_here):
    known, started, starts, _ = ray
    known.append(raylet(1, host="10.9.9.9"))
    (known if runs_here else starts).append(raylet(listening))
    ports = PortRange(20000, 20199)
    ensure(tmp_path, ports)
    assert started == ([] if runs_here else ["ended what was left", (ADDRESS, ports)])


def test_raylet_start_moves_sockets_of_an_ended_one_out_of_the_way(ray, tmp_path, listening, closed):
    known, _, starts, _ = ray
    left, used = tmp_path / "raylet", tmp_path / "of another machine"
    left.touch()
    used.touch()
    known += [raylet(closed, alive=False, sockets=[left]), raylet(1, host="10.9.9.9", sockets=[used])]
    starts.append(raylet(listening))
    ensure(tmp_path)
    assert not left.exists() and used.exists()


def test_raylet_that_ended_but_is_still_listed_is_waited_out(ray, tmp_path, monkeypatch, listening, closed):
    known, _, starts, _ = ray
    known.append(raylet(closed))
    starts.append(raylet(listening))
    looks = []

    def look(address):
        looks.append(len(looks))
        if len(looks) == 6:
            known[0] = raylet(closed, alive=False)
        return list(known)

    monkeypatch.setattr(module, "raylets", look)
    ensure(tmp_path)
    assert len(looks) >= 6


def test_raylet_that_does_not_come_up_is_ended_and_reported(ray, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "START_SECONDS", 0.05)
    with pytest.raises(RayUnavailable, match=r"A raylet that joins the Ray at 127\.0\.0\.1:6379 did not start"):
        ensure(tmp_path)
    assert ray[1] == ["ended what was left", (ADDRESS, None), "terminated"] * module.TRIES


def test_raylet_that_ray_gives_up_is_started_again(ray, tmp_path, listening, monkeypatch):
    known, started, _, gives_up = ray
    gives_up += [1, 1]
    spawn = module._spawn

    def spawn_third_time_lucky(*about):
        if started.count((ADDRESS, None)) == 2:
            known.append(raylet(listening))
        return spawn(*about)

    monkeypatch.setattr(module, "_spawn", spawn_third_time_lucky)
    ensure(tmp_path)
    assert started.count((ADDRESS, None)) == 3 and started[-1] != "terminated"


def test_raylet_refused_by_ray_is_reported_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "raylets", Mock(side_effect=RuntimeError("wrong\ntoken")))
    with pytest.raises(RayUnavailable, match=f"Ray at {ADDRESS} refused the connection: wrong token"):
        ensure(tmp_path)


def test_raylet_servers_have_distinct_ports_and_workers_the_rest_of_the_range():
    options = module._listening_on(PortRange(20000, 20099))
    assert options["node-manager-port"] == "20000" and len(set(options.values())) == len(options)
    assert (options["min-worker-port"], options["max-worker-port"]) == ("20005", "20099")


def test_raylet_start_leaves_a_head_of_the_same_home_alone(ray, tmp_path, monkeypatch, listening):
    """Jobs may run in it."""
    marks = []
    monkeypatch.setattr(module, "end_all", lambda mark, leader: marks.append(mark))
    ray[2].append(raylet(listening))
    ensure(tmp_path)
    assert marks == [(module.MARK, Paths.of(tmp_path).tag)] and module.MARK != ray_head.MARK


@pytest.mark.parametrize("ends", ["start", "raylet"])
def test_raylet_started_here_is_watched_for_its_end(tmp_path, ends):
    """Its first process stays when the raylet ends without an error."""
    paths = Paths.of(tmp_path)

    async def noticed():
        watch = asyncio.create_task(module.until_raylet_ends(paths))
        await asyncio.sleep(0)
        assert not watch.done()
        os.kill(processes[ends], signal.SIGTERM)
        return await asyncio.wait_for(watch, 60)

    with ray_processes("raylet", environment={module.MARK: paths.tag}) as processes:
        assert asyncio.run(noticed()) == "the raylet that was started here has ended"


async def test_raylet_started_by_others_is_not_watched(tmp_path):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(module.until_raylet_ends(Paths.of(tmp_path)), 0.01)


def ray_with(*groups):
    """A Ray in namespace `ours` that knows these groups: (name, namespace, state)."""
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData as Group  # who starts a Ray must be the first to

    table = [
        Group(name=name, ray_namespace=namespace, state=Group.PlacementGroupState.Value(state)).SerializeToString()
        for name, namespace, state in groups
    ]

    def by_name(name, namespace):
        living = (
            each
            for each, about in zip(table, groups, strict=True)
            if about[:2] == (name, namespace) and about[2] != "REMOVED"
        )
        return next(living, None)

    accessor = SimpleNamespace(get_placement_group_table=lambda: table, get_placement_group_by_name=by_name)
    state = SimpleNamespace(_connect_and_get_accessor=lambda: accessor)
    return SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(namespace="ours"),
        _private=SimpleNamespace(state=SimpleNamespace(state=state)),
    )


REPLACED = [("replica/a/3/1", "ours", "REMOVED"), ("replica/a/3/1", "ours", "CREATED")]
FOUR = [("a", "ours", "PENDING"), ("b", "theirs", "CREATED"), ("c", "ours", "REMOVED"), ("d", "ours", "CREATED")]


@pytest.mark.parametrize(("groups", "states"), [
    (REPLACED, {"replica/a/3/1": "CREATED"}),  # else what the other one holds would never be given back
    (REPLACED[::-1], {"replica/a/3/1": "CREATED"}),
    (FOUR, {"a": "PENDING", "d": "CREATED"}),
])  # fmt: skip
def test_placement_groups_are_those_of_our_namespace_that_are_not_removed(groups, states):
    assert placement_group_states(ray_with(*groups)) == states


def test_placement_groups_are_looked_up_by_name_without_listing_all():
    ray = ray_with(*FOUR)
    ray._private.state.state._connect_and_get_accessor().get_placement_group_table = None
    assert placement_group_states(ray, ["a", "b", "c"]) == {"a": "PENDING"}


def test_ray_actors_on_a_node_are_found_with_one_query():
    from ray.core.generated.gcs_pb2 import ActorTableData as Actor

    def about(name, namespace, node):
        return Actor(name=name, ray_namespace=namespace, address={"node_id": bytes.fromhex(node)}).SerializeToString()

    known = [about("a", "ours", "ab12"), about("b", "theirs", "ab12"), about("c", "ours", "cd34")]
    accessor = SimpleNamespace(get_actor_table=lambda job, state: known if (job, state) == (None, "ALIVE") else [])
    ray = ray_with()
    ray._private.state.state._connect_and_get_accessor = lambda: accessor
    assert actors_on(ray, "ab12") == ["a"]


@pytest.mark.parametrize("about", [{"Address": {"NodeID": "n1"}}, {"Address": {}}, {"Address": None}, {}, None])
def test_node_of_an_actor_is_unknown_until_ray_has_placed_it(about):
    state = SimpleNamespace(actors=lambda actor_id: about if actor_id == "ab12" else {"Address": {"NodeID": "another"}})
    actor = SimpleNamespace(_actor_id=bytes.fromhex("ab12"))
    node = node_of_actor(SimpleNamespace(_private=SimpleNamespace(state=state)), actor)
    assert node == ("n1" if about == {"Address": {"NodeID": "n1"}} else None)


def test_ray_cluster_is_identified_by_its_session_name():
    worker = SimpleNamespace(global_worker=SimpleNamespace(node=SimpleNamespace(session_name="session_1")))
    assert session_name(SimpleNamespace(_private=SimpleNamespace(worker=worker))) == "session_1"


def test_node_types_are_those_the_autoscaler_gave_to_living_nodes():
    from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply, NodeStatus

    reply = GetClusterResourceStateReply()
    for node_id, name, status in ((b"\1", "small", "RUNNING"), (b"\2", "", "IDLE"), (b"\3", "small", "DEAD")):
        node = reply.cluster_resource_state.node_states.add()
        node.node_id, node.ray_node_type_name, node.status = node_id, name, NodeStatus.Value(status)
    client = SimpleNamespace(get_cluster_resource_state=reply.SerializeToString)
    worker = SimpleNamespace(global_worker=SimpleNamespace(gcs_client=client))
    assert node_types(SimpleNamespace(_private=SimpleNamespace(worker=worker))) == {"01": "small", "02": ""}
