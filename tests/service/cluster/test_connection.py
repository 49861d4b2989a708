"""Calls of Ray: limits, retries, threads."""

import asyncio
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from manta.service.cluster import placement_groups
from manta.service.cluster.connection import RayConnection, RayThreads, detached
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.node_daemons import NodeDaemons
from manta.service.cluster.nodes import Nodes
from manta.service.cluster.placement_groups import NotPlaced, PlacementGroups
from manta.workers.config import ParallelConfig
from manta.workers.paths import Paths
from tests.service.support.waiting import reached

SECONDS = 60.0
NODE = {
    "NodeID": "n1", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1, "NodeManagerHostname": "h",
    "Resources": {"manta_slot": 4},
}  # fmt: skip


class RayError(Exception):
    """Ray's own."""


class FakeRay:
    """What of Ray is asked here. `hang` lets its head stand still until `go_on`."""

    def __init__(self):
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayError)
        self.util = SimpleNamespace(
            list_named_actors=lambda: self._answered(list(self.named)),
            placement_group=self._make_group,
            get_placement_group=self._group,
            remove_placement_group=lambda name: self.groups.pop(name),
        )  # fmt: skip
        self.named, self.groups = ["known"], {}
        self.new_groups = "CREATED"
        self.asked = threading.Semaphore(0)
        self._answers = threading.Event()
        self._answers.set()
        self.hang, self.go_on = self._answers.clear, self._answers.set

    def _answered(self, answer):
        self.asked.release()
        assert self._answers.wait(SECONDS)
        return answer

    def remote(self, cls):
        return cls

    def nodes(self):
        return self._answered([NODE])

    def get_actor(self, name):
        raise ValueError(f"Failed to look up actor with name '{name}'")

    def _make_group(self, bundles, name, **options):
        self._answered(None)
        self.groups[name] = self.new_groups

    def _group(self, name):
        self._answered(None)
        if name not in self.groups:
            raise ValueError(name)
        return name


@pytest.fixture
def ray(monkeypatch):
    made = FakeRay()
    monkeypatch.setattr(placement_groups, "placement_group_states", lambda ray, names: ray._answered(dict(ray.groups)))
    yield made
    made.go_on()


def go(body):
    async def bounded():
        async with asyncio.timeout(SECONDS):
            return await body()

    return asyncio.run(bounded())


def test_ray_call_without_an_answer_in_time_is_an_error_with_a_sentence(ray):
    connection = RayConnection(ray, seconds=0.01)
    ray.hang()
    with pytest.raises(ClusterUnavailable, match=r"Ray did not answer within 0\.01 s") as caught:
        go(connection.actor_names)
    assert caught.value.raised == "TimeoutError"


def test_ray_calls_fail_at_once_while_all_threads_hang_and_work_again_later(ray):
    connection = RayConnection(ray, seconds=0.01, threads=2)

    async def body():
        ray.hang()
        while not connection._threads.all_hang:  # a call that no thread has begun in time leaves none hanging
            given_up = await asyncio.gather(*(connection.actor_names() for _ in range(5)), return_exceptions=True)
            assert [type(each) for each in given_up] == [ClusterUnavailable] * 5
        with pytest.raises(ClusterUnavailable, match="not answered 2 calls"):
            await connection.actor_names()
        assert await asyncio.to_thread(lambda: "rows") == "rows", "the database is read on other threads"
        ray.go_on()
        while True:
            try:
                return await connection.actor_names()
            except ClusterUnavailable:
                await asyncio.sleep(0)

    assert go(body) == ["known"]


async def test_ray_that_stalls_and_recovers_only_delays_its_calls(ray):
    connection = RayConnection(ray, threads=1)
    ray.hang()
    calls = [asyncio.create_task(connection.actor_names()) for _ in range(3)]
    await asyncio.to_thread(ray.asked.acquire)
    ray.go_on()
    assert await asyncio.gather(*calls) == [["known"]] * 3


async def test_concurrent_node_listings_share_one_ray_call(ray):
    nodes = Nodes(RayConnection(ray, threads=8))
    ray.hang()
    looks = [asyncio.create_task(nodes.has_gpus()) for _ in range(100)]
    await asyncio.to_thread(ray.asked.acquire)
    looks[0].cancel()  # as one who asks may be, and the others wait on
    ray.go_on()
    assert await asyncio.gather(*looks[1:]) == [False] * 99
    assert not ray.asked.acquire(blocking=False)


async def test_empty_node_list_of_ray_counts_as_no_answer_and_is_asked_for_again(ray):
    nodes, answer = Nodes(RayConnection(ray)), ray.nodes
    ray.nodes = list
    for listing in (nodes.known, nodes.living):
        with pytest.raises(ClusterUnavailable, match="did not list its nodes"):
            await listing()
    ray.nodes = answer
    assert await nodes.living() == ["n1"]


def test_ray_actor_lookup_failure_is_not_taken_for_a_missing_actor(ray):
    connection = RayConnection(ray)
    assert go(lambda: connection.find(["never there"])) == [None]
    with pytest.raises(ClusterUnavailable, match="Failed to look up actor with name 'known'"):
        go(lambda: connection.find(["never there", "known"]))


def test_daemon_that_ray_does_not_tell_of_closes_no_node(ray):
    connection = RayConnection(ray, seconds=0.01)
    nodes = Nodes(connection)
    ray.hang()
    with pytest.raises(ClusterUnavailable):
        go(lambda: NodeDaemons(connection, nodes, Paths.of("/nowhere")).of("n1"))
    assert nodes.closed == set()


def test_ray_actor_outlives_the_control_plane_and_is_not_restarted_when_killed(ray):
    """One that Ray started again would know nothing of its trainer. It takes none of the units of ranks."""
    assert detached("node-a", 7) == {
        "name": "node-a", "lifetime": "detached", "num_cpus": 0, "max_restarts": 0, "max_concurrency": 7
    }  # fmt: skip
    ray.kill = Mock()
    go(lambda: RayConnection(ray).kill("an actor"))
    ray.kill.assert_called_once_with("an actor", no_restart=True)


async def test_ray_node_listings_are_not_reused_by_later_callers(ray):
    nodes = Nodes(RayConnection(ray))
    before = await nodes.living()
    ray.nodes = lambda: [{**NODE, "NodeID": "n2"}]
    assert (before, await nodes.living()) == (["n1"], ["n2"])


def acquire(ray, nodes, **options):
    groups = PlacementGroups(nodes._ray, nodes)
    return lambda: groups.acquire("job", 1, ParallelConfig(data=2), "manta_slot", **options)


def test_places_are_waited_for_without_a_thread(ray):
    ray.new_groups = "PENDING"
    nodes = Nodes(RayConnection(ray, threads=1))
    with pytest.raises(NotPlaced):
        go(acquire(ray, nodes, timeout=0.1))
    assert ray.groups == {}
    ray.new_groups = "CREATED"
    ray.groups["replica/job/1/0"] = "CREATED"  # left by a try that Ray did not answer
    go(acquire(ray, nodes))
    assert sorted(ray.groups) == ["replica/job/1/0", "replica/job/1/1"]


async def test_placement_group_that_ray_makes_too_late_is_removed(ray):
    nodes, make = Nodes(RayConnection(ray)), ray.util.placement_group
    asked, may_make, made = threading.Event(), threading.Event(), threading.Event()

    def make_late(*arguments, **options):
        asked.set()
        assert may_make.wait(SECONDS)
        make(*arguments, **options)
        made.set()

    ray.util.placement_group = make_late
    acquiring = asyncio.create_task(acquire(ray, nodes)())
    await asyncio.to_thread(asked.wait, SECONDS)
    acquiring.cancel()
    await asyncio.wait({acquiring})
    may_make.set()
    await reached(lambda: not nodes._ray._threads._abandoned)
    assert made.is_set() and ray.groups == {}


LIMIT_SECONDS = 20.0


def test_ray_threads_are_bounded_and_answer_every_call():
    threads = RayThreads(2)
    calls = [threads.submit(threading.current_thread) for _ in range(5)]
    assert {call.result(LIMIT_SECONDS).name for call in calls} <= {"ray-0", "ray-1"}
    assert len(threads._started) == 2


def test_threads_hang_once_all_of_their_calls_are_given_up_and_until_one_returns():
    threads, go_on, begun = RayThreads(2), threading.Event(), threading.Semaphore(0)

    def hang():
        begun.release()
        assert go_on.wait(LIMIT_SECONDS)

    calls = [threads.submit(hang) for _ in range(2)]
    try:
        assert all(begun.acquire(timeout=LIMIT_SECONDS) for _ in calls)
        waiting = threads.submit(lambda: "never begun")
        threads.give_up(waiting)
        threads.give_up(calls[0])
        assert waiting.cancelled() and not threads.all_hang, "a call that is not begun takes no thread"
        threads.give_up(calls[1])
        assert threads.all_hang
    finally:
        go_on.set()
    after = threads.submit(lambda: "answered")
    assert after.result(LIMIT_SECONDS) == "answered"
    assert not threads.all_hang
