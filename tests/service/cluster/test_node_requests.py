"""Nodes are asked for by one group that waits, and by nothing else."""

import asyncio
from types import SimpleNamespace

import pytest

from manta.service.cluster import placement_groups
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.placement_groups import NodeRequests

ONE, TWO = [{"manta_slot": 1.0}], [{"manta_slot": 2.0}] * 2


class FakeRay:
    """The groups that wait or are granted, by name, and a connection to it."""

    def __init__(self):
        self.module = SimpleNamespace(util=self)
        self.states, self.made = {}, []

    async def run(self, function, *arguments):
        return function(*arguments)

    def placement_group(self, bundles, name, **options):
        self.made.append((bundles, options))
        self.states[name] = "PENDING"
        return name

    def remove_placement_group(self, name):
        del self.states[name]


@pytest.fixture
def ray(monkeypatch):
    made = FakeRay()
    monkeypatch.setattr(placement_groups, "placement_group_states", lambda module, names: made.states)
    return made


@pytest.fixture
def requests(ray):
    return NodeRequests(ray)


def go(body):
    return asyncio.run(body)


def grant(ray):
    ray.states.update(dict.fromkeys(ray.states, "CREATED"))


def test_node_request_puts_all_bundles_into_one_placement_group(ray, requests):
    go(requests.request(TWO, {"b", "a"}))
    ((bundles, options),) = ray.made
    assert bundles == TWO
    assert options == {"strategy": "PACK", "bundle_label_selector": [{"ray.io/node-id": "!in(a,b)"}] * 2}


def test_node_request_is_made_once_and_replaced_by_another_or_by_none(ray, requests):
    for bundles, groups in (((), 0), (ONE, 1), (ONE, 1), (TWO, 1), ((), 0)):
        go(requests.request(bundles, ()))
        assert len(ray.states) == groups
    assert [bundles for bundles, _ in ray.made] == [ONE, TWO]


def test_pending_node_request_is_kept_and_a_granted_one_released(ray, requests):
    go(requests.request(ONE, ()))
    assert not go(requests.settle()) and len(ray.states) == 1
    grant(ray)
    assert go(requests.settle()) and ray.states == {}


@pytest.mark.parametrize(("seconds", "groups"), [(3600.0, 1), (0.0, 2)])
def test_granted_node_request_that_did_not_help_is_repeated_after_a_pause(ray, requests, monkeypatch, seconds, groups):
    monkeypatch.setattr(placement_groups, "RETRY_SECONDS", seconds)
    go(requests.request(ONE, ()))
    grant(ray)
    go(requests.settle())
    go(requests.request(ONE, ()))
    assert len(ray.made) == groups


def test_node_request_that_ray_forgot_is_made_again(ray, requests):
    go(requests.request(ONE, ()))
    ray.states.clear()
    ray.remove_placement_group = lambda name: None
    assert not go(requests.settle())
    go(requests.request(ONE, ()))
    assert len(ray.states) == 1


@pytest.mark.parametrize("answers", ["before it is withdrawn", "after"])
def test_node_request_group_that_ray_makes_too_late_is_removed(ray, requests, answers):
    """Else it would hold what is free, or have nodes added, until this process ends."""
    late = []

    async def silent(function, *arguments):
        late.append(lambda: function(*arguments))
        raise ClusterUnavailable(TimeoutError("Ray gave no answer"))

    answering, ray.run = ray.run, silent
    with pytest.raises(ClusterUnavailable):
        go(requests.request(ONE, ()))
    ray.run = answering
    if answers == "after":
        go(requests.settle())
    late.pop()()
    go(requests.withdraw())
    assert len(ray.made) == 1 and ray.states == {}
