"""Places are asked of Ray in the right words, given back when they do not come, and taken by their owner only."""

import asyncio
from types import SimpleNamespace

import pytest

from manta.service.cluster import placement_groups
from manta.service.cluster.nodes import Nodes
from manta.service.cluster.placement_groups import AVOIDING_SECONDS, MAX_POLL_SECONDS, NotPlaced, PlacementGroups
from manta.service.leases.decisions import LeaseLost
from manta.workers.config import ParallelConfig
from tests.service.support.virtual_time import VirtualTimeLoop

SLOT = "manta_slot"
TWO = ParallelConfig(tensor=2, pipeline=3, data=2)


class FakeConnection:
    """A Ray that answers at once."""

    def __init__(self, module):
        self.module = module

    async def read(self, function):
        return function()

    async def run(self, function, *arguments):
        return function(*arguments)


class FakeRay:
    """Groups by name, and what was asked for. Three nodes with twelve slots each."""

    def __init__(self):
        self.util = self
        self.states, self.made, self.removed, self.looks = {}, [], [], 0
        self.state_of = lambda name, selector: "CREATED"
        """By name and selector of its bundles the state that a new group has."""

    def nodes(self):
        about = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1, "NodeManagerHostname": "h"}
        return [{"NodeID": node, "Alive": True, "Resources": {SLOT: 12.0}, **about} for node in "abc"]

    def placement_group(self, bundles, **options):
        selectors = options["bundle_label_selector"]
        self.made.append(SimpleNamespace(bundles=bundles, **options))
        self.states[options["name"]] = self.state_of(options["name"], selectors)

    def get_placement_group(self, name):
        if name not in self.states:
            raise ValueError(name)
        return name

    def remove_placement_group(self, name):
        self.removed.append(name)
        del self.states[name]


@pytest.fixture
def ray(monkeypatch):
    made = FakeRay()

    def states(module, names):
        made.looks += 1
        return {name: made.states[name] for name in names if name in made.states}

    monkeypatch.setattr(placement_groups, "placement_group_states", states)
    monkeypatch.setattr("manta.service.cluster.nodes.free_resources", lambda module: {})
    return made


@pytest.fixture
def groups(ray):
    connection = FakeConnection(ray)
    return PlacementGroups(connection, Nodes(connection))


def go(body):
    """What `body` answers, and after how many virtual seconds."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(body), loop.time()
    finally:
        loop.close()


def test_each_replica_has_a_detached_group_with_a_bundle_for_each_tensor_group(ray, groups):
    _, seconds = go(groups.acquire("job", 3, TWO, SLOT))
    assert [made.name for made in ray.made] == ["replica/job/3/0", "replica/job/3/1"]
    assert [made.bundles for made in ray.made] == [[{SLOT: 2.0}] * 3] * 2
    assert {(made.lifetime, made.strategy, made.bundle_label_selector) for made in ray.made} == {
        ("detached", "PACK", None)
    }
    assert (seconds, ray.removed) == (0, [])


@pytest.mark.parametrize(("replicas", "made"), [([1], ["replica/job/3/1"]), ([], [])])
def test_placement_makes_groups_only_for_the_requested_replicas(ray, groups, replicas, made):
    go(groups.acquire("job", 3, TWO, SLOT, replicas=replicas))
    assert list(ray.states) == made


def test_bundles_avoid_closed_and_avoided_nodes_if_the_layout_fits_on_others(ray, groups):
    _, seconds = go(groups.acquire("job", 1, ParallelConfig(tensor=12, data=3), SLOT, avoid=["a"]))
    assert ([made.bundle_label_selector for made in ray.made], seconds) == ([None] * 3, 0)
    groups._nodes.draining.add("b")
    go(groups.acquire("job", 2, ParallelConfig(pipeline=3), SLOT, avoid=["a"]))
    assert ray.made[-1].bundle_label_selector == [{"ray.io/node-id": "!in(a,b)"}] * 3


def test_placement_uses_avoided_nodes_if_no_others_are_free_in_time(ray, groups):
    ray.state_of = lambda name, selectors: "PENDING" if selectors else "CREATED"
    _, seconds = go(groups.acquire("job", 1, TWO, SLOT, avoid=["a"]))
    assert [made.bundle_label_selector is None for made in ray.made] == [False, False, True, True]
    assert ray.states == dict.fromkeys(["replica/job/1/0", "replica/job/1/1"], "CREATED")
    assert ray.removed == ["replica/job/1/0", "replica/job/1/1"], "what nobody waits for is given back once"
    assert seconds == pytest.approx(AVOIDING_SECONDS, abs=0.01)


def test_placement_needs_all_groups_and_releases_them_after_its_timeout(ray, groups):
    """And both are given back when one does not come, after the time that was asked for."""
    ray.state_of = lambda name, selectors: "CREATED" if name.endswith("/0") else "PENDING"
    with pytest.raises(NotPlaced, match=r"job did not get 12 slots within 7 s; it keeps waiting"):
        go(groups.acquire("job", 1, TWO, SLOT, timeout=7.0))
    assert ray.states == {}
    assert ray.removed == ["replica/job/1/0", "replica/job/1/1"]
    assert 7.0 / MAX_POLL_SECONDS <= ray.looks <= 7.0 / MAX_POLL_SECONDS + 10, "looks become rare"


def test_placement_notices_groups_that_are_created_later(ray, groups):
    ray.state_of = lambda name, selectors: "PENDING"

    async def body():
        loop = asyncio.get_running_loop()
        loop.call_later(10.0, ray.states.update, dict.fromkeys(["replica/job/1/0", "replica/job/1/1"], "CREATED"))
        await groups.acquire("job", 1, TWO, SLOT)

    _, seconds = go(body())
    assert seconds == pytest.approx(10.0, abs=MAX_POLL_SECONDS)
    assert ray.removed == []


def test_placement_removes_groups_of_its_earlier_try_and_no_others(ray, groups):
    ray.states = {"replica/job/1/0": "PENDING", "replica/job/0/0": "CREATED", "replica/other/1/0": "CREATED"}
    go(groups.acquire("job", 1, ParallelConfig(), SLOT))
    assert ray.removed == ["replica/job/1/0"]
    assert ray.states == dict.fromkeys(["replica/job/0/0", "replica/other/1/0", "replica/job/1/0"], "CREATED")


def test_placement_error_releases_the_groups_already_made(ray, groups):
    def fails_at_the_second(name, selectors):
        if name.endswith("/1"):
            raise RuntimeError("Ray is restarting")
        return "CREATED"

    ray.state_of = fails_at_the_second
    with pytest.raises(RuntimeError, match="Ray is restarting"):
        go(groups.acquire("job", 1, ParallelConfig(data=3), SLOT))
    assert ray.states == {}


def test_placement_removal_continues_past_a_missing_group(ray, groups):
    groups.epoch = lambda job, method: 1
    ray.states = dict.fromkeys(["replica/job/1/1", "replica/job/1/2"], "CREATED")
    go(groups.remove(f"replica/job/1/{replica}" for replica in range(3)))
    assert ray.states == {}


def test_placement_groups_are_made_and_removed_by_the_jobs_owner_only(ray, groups):
    asked = []

    def epoch(job, method):
        asked.append((job, method))
        if job == "theirs":
            raise LeaseLost(job)
        return 1

    groups.epoch = epoch
    go(groups.acquire("ours", 1, ParallelConfig(), SLOT))
    assert asked[0] == ("ours", None)
    ray.states["replica/theirs/1/0"] = "CREATED"
    with pytest.raises(LeaseLost):
        go(groups.acquire("theirs", 2, ParallelConfig(), SLOT))
    with pytest.raises(LeaseLost):
        go(groups.remove(["replica/ours/1/0", "replica/theirs/1/0"]))
    assert sorted(ray.states) == ["replica/ours/1/0", "replica/theirs/1/0"], "nothing of either has gone"
    go(groups.remove(["replica/ours/1/0", "of nobody"]))
    assert list(ray.states) == ["replica/theirs/1/0"]
