"""The cluster as users see it, and what a control plane knows about itself."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from manta.api.schemas import Cluster
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.nodes import GpuReadings, RayNode
from manta.service.cluster.placement import Capacity
from manta.service.control.cluster_view import FRESH_SECONDS, cluster_view, measured
from manta.service.store import ranks
from manta.service.tasks import Lag
from manta.workers.protocol.messages import GpuReading
from tests.service.support.fake_cluster import FakeCluster

GPUS = (GpuReading(0, temperature_celsius=60),)


@pytest.fixture
def cluster(tmp_path):
    return FakeCluster(tmp_path, one=2, two=4)


def view(cluster, store):
    return asyncio.run(cluster_view(cluster, store))


def test_cluster_view_shows_free_units_ranks_and_drains_of_each_node(store, started, cluster):
    cluster.nodes.draining.add("two")
    cluster.nodes.problems["two"] = "it has no Manta"
    rows = [
        {"rank": rank, "tensor": rank, "pipeline": 0, "data": 0, "context": 0, "node": node, "device": "cpu",
         "pid": pid, "generation": 1, "actor": f"a{rank}", "state": "running"}
        for rank, node, pid in ((0, "one", 10), (1, "two", None))
    ]  # fmt: skip
    store.write(lambda session: ranks.replace(session, started.id, rows))
    seen = view(cluster, store)
    one, two = seen["nodes"]
    assert (one["id"], one["total"], one["free"], one["draining"]) == ("one", 2, 2, False)
    assert (two["id"], two["total"], two["draining"], two["alive"]) == ("two", 4, True, True)
    assert (one["problem"], two["problem"]) == (None, "it has no Manta")
    assert one["ranks"] == [{"job": started.id, "rank": 0}]
    assert two["ranks"] == [], "one that does not run takes no place"


def test_cluster_view_omits_a_node_lost_between_two_looks(store, cluster, monkeypatch):
    known = cluster.nodes.known

    async def fewer():
        return [node for node in await known() if node.id != "one"]

    monkeypatch.setattr(cluster.nodes, "known", fewer)
    assert [node["id"] for node in view(cluster, store)["nodes"]] == ["two"]


def places(node):
    return tuple(node.get(name) for name in ("accelerator", "total", "free", "slots_total", "slots_free"))


def test_cluster_view_shows_slots_of_nodes_without_gpus(store, cluster):
    cluster.nodes.accelerated = {}
    cluster.nodes.used["two"] = 1
    seen = view(cluster, store)
    assert [places(node) for node in seen["nodes"]] == [("cpu", 2, 2, 2, 2), ("cpu", 4, 3, 4, 3)]
    assert seen["totals"] == {"total": 6, "free": 5, "slots_total": 6, "slots_free": 5}


def test_cluster_view_shows_gpus_and_slots_of_a_gpu_node(store, cluster):
    cluster.nodes.accelerated = {"two": (3, 1)}
    seen = view(cluster, store)
    assert [places(node) for node in seen["nodes"]] == [("cpu", 2, 2, 2, 2), ("gpu", 3, 1, 4, 4)]
    assert seen["totals"] == {"total": 3, "free": 1, "slots_total": 6, "slots_free": 6}


def test_cluster_view_shows_gpu_type_and_memory_if_known(store, cluster):
    cluster.nodes.accelerated = {"two": (3, 1)}
    readings = (GpuReading(0, memory_total_bytes=80), GpuReading(1, memory_total_bytes=40), GpuReading(2))
    cluster.nodes.gpus["two"] = GpuReadings(0.0, readings)
    one, two = view(cluster, store)["nodes"]
    assert (one["gpu_type"], one["gpu_memory_bytes"]) == (None, None)
    assert (two["gpu_type"], two["gpu_memory_bytes"]) == (None, 40)


def test_gpus_are_shown_as_the_driver_says_for_a_minute(store, cluster):
    full = GpuReading(0, True, 0.9, 2**30, 80 * 2**30, 60, 350.5, 7, 1, {"79": 2, "31": 1}, 1980)
    cluster.nodes.gpus["one"] = GpuReadings(time.monotonic(), (full, GpuReading(1, answers=False)))
    one, two = view(cluster, store)["nodes"]
    assert one["gpus"][0] == {
        "index": 0, "answers": True, "utilization": 0.9, "memory_used_bytes": 2**30,
        "memory_total_bytes": 80 * 2**30, "power_watts": 350.5, "temperature_celsius": 60, "clock_mhz": 1980,
        "xid": [31, 79], "ecc_errors": 1, "ecc_corrected": 7,
    }  # fmt: skip
    assert (one["gpus"][1]["answers"], one["gpus"][1]["utilization"], two["gpus"]) == (False, None, [])
    assert Cluster.model_validate(view(cluster, store)).nodes[0].gpus[0].xid == [31, 79]
    cluster.nodes.gpus["one"] = GpuReadings(time.monotonic() - FRESH_SECONDS, (full,))
    assert view(cluster, store)["nodes"][0]["gpus"] == []


def noted_cluster(known=(), **sets):
    """A cluster with these nodes, and what was noted of them."""

    async def all_known():
        if known is None:
            raise ClusterUnavailable(TimeoutError("no answer"))
        return [RayNode(node, ("127.0.0.1", 1), f"host-{node}") for node in known]

    async def capacity(unit, all_living):
        return Capacity(unit, 8, 3, {})

    noted = {"lost": set(), "draining": set(), "unresponsive": set(), "problems": {}, "gpus": {}, **sets}
    return SimpleNamespace(nodes=SimpleNamespace(known=all_known, capacity=capacity, **noted))


def of(cluster):
    return asyncio.run(measured(cluster, time.monotonic(), 2, {"jobs": 0.5}))


@pytest.mark.parametrize(
    ("noted", "state"),
    [
        ({}, "ready"),
        ({"draining": {"n1"}}, "draining"),
        ({"unresponsive": {"n1"}}, "silent"),
        ({"problems": {"n1": "its port is closed"}}, "problem"),
        ({"lost": {"n1"}, "draining": {"n1"}}, "lost"),
    ],
)
def test_each_node_is_in_one_state(noted, state):
    seen = of(noted_cluster(["n1"], **noted))
    assert [(node.id, node.host, node.state) for node in seen.nodes] == [("n1", "host-n1", state)]
    assert seen.units == {"GPU": (8, 3), "manta_slot": (8, 3)}


def test_gpu_readings_are_dropped_once_they_are_stale():
    now = time.monotonic()
    heard = {"n1": GpuReadings(now, GPUS), "n2": GpuReadings(now - FRESH_SECONDS - 1, GPUS)}
    assert [node.gpus for node in of(noted_cluster(["n1", "n2", "n3"], gpus=heard)).nodes] == [GPUS, (), ()]


@pytest.mark.parametrize("without", [None, noted_cluster(None)])
def test_measurements_without_an_answer_of_ray_still_have_jobs_and_lag(without):
    seen = of(without)
    assert (seen.ray_answers, seen.nodes, seen.owned_jobs, seen.lag_seconds) == (False, (), 2, {"jobs": 0.5})


class Clock:
    """Stands until it is moved."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_lag_of_an_idle_loop_is_zero(clock):
    lag = Lag(clock=clock)
    clock.now += 50
    assert lag.seconds == 0


def test_lag_counts_from_the_first_request_until_the_pass_ends(clock):
    lag = Lag(clock=clock)
    lag.asked()
    clock.now += 2
    lag.asked()
    lag.begin()
    clock.now += 3
    assert lag.seconds == 5
    lag.done()
    assert lag.seconds == 0


def test_lag_of_a_request_during_a_pass_lasts_until_the_next_pass(clock):
    lag = Lag(clock=clock)
    lag.begin()
    clock.now += 1
    lag.asked()
    clock.now += 1
    lag.done()
    clock.now += 1
    assert lag.seconds == 2


def test_lag_continues_after_a_failed_pass(clock):
    lag = Lag(every=1.0, clock=clock)
    for _ in range(3):
        clock.now += 10
        lag.begin()
    assert lag.seconds == 29


def test_lag_of_a_periodic_loop_counts_from_its_due_time(clock):
    lag = Lag(every=1.0, clock=clock)
    lag.begin()
    lag.done()
    clock.now += 1
    assert lag.seconds == 0
    clock.now += 4
    assert lag.seconds == 4
