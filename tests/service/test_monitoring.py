"""What a control plane knows about itself."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.nodes import GpuReadings, RayNode
from manta.service.cluster.placement import Capacity
from manta.service.monitoring.cluster_view import FRESH_SECONDS, measured
from manta.service.tasks import Lag
from manta.workers.protocol.messages import GpuReading

GPUS = (GpuReading(0, temperature_celsius=60),)


def cluster(known=(), **sets):
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
    seen = of(cluster(["n1"], **noted))
    assert [(node.id, node.host, node.state) for node in seen.nodes] == [("n1", "host-n1", state)]
    assert seen.units == {"GPU": (8, 3), "manta_slot": (8, 3)}


def test_gpu_readings_are_dropped_once_they_are_stale():
    now = time.monotonic()
    heard = {"n1": GpuReadings(now, GPUS), "n2": GpuReadings(now - FRESH_SECONDS - 1, GPUS)}
    assert [node.gpus for node in of(cluster(["n1", "n2", "n3"], gpus=heard)).nodes] == [GPUS, (), ()]


@pytest.mark.parametrize("without", [None, cluster(None)])
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
