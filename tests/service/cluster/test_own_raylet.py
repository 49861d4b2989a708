"""Ray takes a process in only where a raylet runs: one is started where none does, whatever a dead one has left."""

import asyncio
import os
import signal
import socket

import pytest

from manta.service.cluster import existing_ray as module
from manta.service.cluster import ray_head
from manta.service.cluster.existing_ray import ensure_raylet
from manta.service.cluster.ray_head import RayUnavailable
from manta.service.cluster.ray_private import Raylet
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
def ray(monkeypatch, tmp_path):
    """Raylets that Ray knows; one that is started is among them from then on."""
    known, started = [], []

    class Process:
        def wait(self, seconds):
            if gives_up:
                return gives_up.pop()
            raise module.subprocess.TimeoutExpired("ray", seconds)

        def terminate(self):
            started.append("terminated")

    def spawn(address, paths, ports):
        started.append((address, ports))
        known.extend(ray_starts)
        return Process()

    ray_starts, gives_up = [], []
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


def test_raylet_that_runs_on_this_host_is_used(ray, tmp_path, listening):
    known, started, _, _ = ray
    known += [raylet(1, host="10.9.9.9"), raylet(listening)]
    ensure(tmp_path)
    assert started == []


def test_raylet_is_started_on_the_allowed_ports_if_none_runs_here(ray, tmp_path, listening):
    known, started, starts, _ = ray
    known.append(raylet(1, host="10.9.9.9"))
    starts.append(raylet(listening))
    ports = PortRange(20000, 20199)
    ensure(tmp_path, ports)
    assert started == ["ended what was left", (ADDRESS, ports)]


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
    def refuse(address):
        raise RuntimeError("wrong\ntoken")

    monkeypatch.setattr(module, "raylets", refuse)
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


def test_raylet_started_by_others_is_not_watched(tmp_path):
    async def watched():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(module.until_raylet_ends(Paths.of(tmp_path)), 0.01)

    asyncio.run(watched())
