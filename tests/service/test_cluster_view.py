"""The cluster as users see it."""

import asyncio

import pytest

from service.cluster_view import cluster_view
from service.store import ranks
from tests.service.support.fake_cluster import FakeCluster


@pytest.fixture
def cluster(tmp_path):
    return FakeCluster(tmp_path, one=2, two=4)


def view(cluster, store):
    return asyncio.run(cluster_view(cluster, store))


def test_each_node_says_what_is_free_who_runs_there_and_whether_it_is_left(store, started, cluster):
    cluster.nodes.draining.add("two")
    cluster.nodes.problems["two"] = "it has no Manta"
    rows = [
        {"rank": rank, "tensor": rank, "pipeline": 0, "data": 0, "context": 0, "node": node, "device": "cpu",
         "pid": pid, "generation": 1, "actor": f"a{rank}", "state": "running"}
        for rank, node, pid in ((0, "one", 10), (1, "two", None))
    ]  # fmt: skip
    store.write(lambda session: ranks.replace(session, started.id, rows))
    seen = view(cluster, store)
    assert seen["totals"] == {"total": 6, "free": 6}
    one, two = seen["nodes"]
    assert (one["id"], one["total"], one["free"], one["draining"]) == ("one", 2, 2, False)
    assert (two["id"], two["total"], two["draining"], two["alive"]) == ("two", 4, True, True)
    assert (one["problem"], two["problem"]) == (None, "it has no Manta")
    assert one["ranks"] == [{"job": started.id, "rank": 0}]
    assert two["ranks"] == [], "one that does not run takes no place"


def test_node_that_is_lost_between_two_looks_is_left_out(store, cluster, monkeypatch):
    known = cluster.nodes.known

    async def fewer():
        return [node for node in await known() if node.id != "one"]

    monkeypatch.setattr(cluster.nodes, "known", fewer)
    assert [node["id"] for node in view(cluster, store)["nodes"]] == ["two"]


@pytest.mark.parametrize(("has_gpus", "unit", "accelerator"), [(True, "GPU", "gpu"), (False, "manta_slot", "cpu")])
def test_nodes_are_counted_in_the_unit_that_jobs_take(store, cluster, monkeypatch, has_gpus, unit, accelerator):
    asked, capacity = [], cluster.nodes.capacity

    async def noted(unit, all_living=False):
        asked.append((unit, all_living))
        return await capacity(unit, all_living)

    async def answer():
        return has_gpus

    monkeypatch.setattr(cluster.nodes, "capacity", noted)
    monkeypatch.setattr(cluster.nodes, "has_gpus", answer)
    nodes = view(cluster, store)["nodes"]
    assert asked == [(unit, True)]
    assert [(node["accelerator"], node["address"]) for node in nodes] == [(accelerator, "127.0.0.1")] * 2
