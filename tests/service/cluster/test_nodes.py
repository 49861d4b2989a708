"""What is known of nodes: capacity, states, problems, shapes of those that an autoscaler adds."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.cluster import nodes as nodes_module
from manta.service.cluster.errors import problem_of, problem_of_start
from manta.service.cluster.node_shapes import (
    Demand,
    InvalidNodeShapes,
    NodeShape,
    capacity_after_placing,
    grown,
    shapes_in,
)
from manta.service.cluster.nodes import Nodes
from manta.service.cluster.placement import Capacity, missing
from manta.service.cluster.placement_groups import PlacementGroups
from manta.workers.config import ParallelConfig
from manta.workers.protocol.messages import NodeDescription
from tests.service.support.virtual_time import VirtualTimeLoop


class FakeConnection:
    """A Ray that answers at once."""

    def __init__(self, module):
        self.module = module

    async def read(self, function):
        return function()

    async def run(self, function, *arguments):
        return function(*arguments)


def node(name, gpus=0, alive=True):
    units = {"manta_slot": 4.0, **({"GPU": float(gpus)} if gpus else {})}
    return {
        "NodeID": name, "Alive": alive, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1,
        "NodeManagerHostname": f"host of {name}", "Resources": units,
    }  # fmt: skip


@pytest.fixture
def ray(monkeypatch):
    """Four nodes, on each of which one of four slots is taken, and one that Ray takes for dead."""
    free = {name: {"manta_slot": 3.0} for name in "abcd"}
    monkeypatch.setattr(nodes_module, "free_resources", lambda ray: free)
    made = SimpleNamespace(free=free, groups={})
    made.nodes = lambda: [*map(node, "abcd"), node("dead", gpus=8, alive=False)]
    made.util = SimpleNamespace(
        placement_group=lambda bundles, name, **options: made.groups.update({name: options["bundle_label_selector"]})
    )
    monkeypatch.setattr(
        "manta.service.cluster.placement_groups.placement_group_states",
        lambda ray, names: dict.fromkeys(ray.groups, "CREATED"),
    )
    return made


@pytest.fixture
def nodes(ray):
    return Nodes(FakeConnection(ray))


def test_lost_draining_silent_and_defective_nodes_get_no_placements(ray, nodes):
    nodes.problems = {"d": "it has no Manta"}
    assert asyncio.run(nodes.capacity("manta_slot")).nodes.keys() == {"a", "b", "c"}
    assert asyncio.run(nodes.capacity("manta_slot", all_living=True)).nodes["d"] == (4, 0), "nothing there is free"
    nodes.problems = {}
    nodes.lost, nodes.draining, nodes.unresponsive = {"a"}, {"b"}, {"c"}
    usable = asyncio.run(nodes.capacity("manta_slot"))
    assert usable == Capacity("manta_slot", 4, 3, {"d": (4, 3)})
    groups = PlacementGroups(nodes._ray, nodes)
    asyncio.run(groups.acquire("job", 1, ParallelConfig(tensor=2), "manta_slot"))
    assert ray.groups == {"replica/job/1/0": [{"ray.io/node-id": "!in(a,b,c)"}]}


def test_nodes_that_live_are_shown_though_nothing_is_placed_there(nodes):
    """What is free on a node whose daemon does not answer is of no use to anybody."""
    nodes.lost, nodes.draining, nodes.unresponsive = {"a"}, {"b"}, {"c"}
    shown = asyncio.run(nodes.capacity("manta_slot", all_living=True))
    assert shown == Capacity("manta_slot", 12, 6, {"b": (4, 3), "c": (4, 0), "d": (4, 3)})
    assert asyncio.run(nodes.living()) == ["b", "c", "d"]


def test_drain_reason_is_news_once_per_reason_until_the_drain_ends(nodes):
    assert [nodes.drain("b", 60.0, why) for why in ("spot", "spot", "a user")] == [True, False, True]
    nodes.cancel_drain("b")
    assert nodes.drain("b", None, "a user")
    nodes.keep_only({"a"})
    assert (nodes.draining, nodes.leave_by, nodes.drain_reasons) == (set(), {}, {})


@pytest.mark.parametrize(
    ("lost", "silent", "problems", "draining", "shapes", "why"),
    [
        ("", "", "", "abcd", (), None),
        ("abc", "", "", "", (), None),
        ("abcd", "", "", "", (), "no rank can be placed: Ray has no living node with slots for ranks"),
        ("a", "bc", "d", "", (), "no rank can be placed: of 3 nodes none has a daemon that can be reached"),
        ("abcd", "", "", "", ("a shape",), None),
    ],
)
def test_placement_problem_is_reported_unless_a_node_is_usable_or_can_be_added(
    ray, lost, silent, problems, draining, shapes, why
):
    nodes = Nodes(FakeConnection(ray), shapes)
    nodes.lost, nodes.unresponsive, nodes.draining = set(lost), set(silent), set(draining)
    nodes.problems = dict.fromkeys(problems, "a firewall")
    assert asyncio.run(nodes.problem_of_all()) == why


def test_gpu_capacity_counts_all_gpus_of_living_nodes_and_no_fractions(ray, nodes):
    """A rank takes a whole one."""
    assert not asyncio.run(nodes.has_gpus()), "those of the dead one do not count"
    ray.nodes = lambda: [node("a"), node("b", gpus=0.5)]
    assert not asyncio.run(nodes.has_gpus())
    assert asyncio.run(nodes.capacity("GPU")).total == 0
    ray.nodes = lambda: [node("a"), node("b", gpus=2)]
    assert asyncio.run(nodes.has_gpus())
    assert asyncio.run(nodes.capacity("GPU")) == Capacity("GPU", 2, 0, {"a": (0, 0), "b": (2, 0)})
    nodes.lost.add("b")
    assert not asyncio.run(nodes.has_gpus())


def test_known_nodes_have_address_and_liveness(nodes):
    known = {each.id: each for each in asyncio.run(nodes.known())}
    assert (known["a"].raylet, known["a"].host, known["a"].alive) == (("127.0.0.1", 1), "host of a", True)
    assert not known["dead"].alive


def test_gpu_type_of_a_node_is_the_one_ray_detected(ray, nodes):
    plain, named = node("a", gpus=2), node("b", gpus=2)
    named["Resources"] |= {"accelerator_type:H100": 1.0, "node:127.0.0.1": 1.0}
    ray.nodes = lambda: [plain, named]
    assert [each.gpu_type for each in asyncio.run(nodes.known())] == [None, "H100"]
    assert asyncio.run(nodes.capacity("GPU")).types == {"b": "H100"}


@pytest.mark.parametrize(("comes_after", "waited"), [(0.0, 0.0), (0.5, 0.5), (None, nodes_module.SETTLED_SECONDS)])
def test_released_units_are_awaited_until_ray_shows_them_or_a_limit(ray, nodes, comes_after, waited):
    loop = VirtualTimeLoop()

    async def wait():
        if comes_after is not None:
            loop.call_later(comes_after, ray.free["a"].update, {"manta_slot": 4.0})
            await asyncio.sleep(0)
        await nodes.until_free(Capacity("manta_slot", 16, 13, {}))
        return loop.time()

    try:
        assert loop.run_until_complete(wait()) == pytest.approx(waited, abs=2 * nodes_module.POLL_SECONDS)
    finally:
        loop.close()


def test_nodes_without_slots_are_left_out_of_the_living_nodes(ray, nodes):
    living = ray.nodes()
    ray.nodes = lambda: [{**node("head"), "Resources": {"CPU": 8.0, "manta_slot": 0.0}}, *living]
    assert asyncio.run(nodes.living()) == list("abcd")
    assert {each.id: each.holds_ranks for each in asyncio.run(nodes.known())}["head"] is False
    assert "head" not in asyncio.run(nodes.capacity("manta_slot", all_living=True)).nodes


@pytest.mark.parametrize(("unshared", "other_code", "begin", "advice"), [
    ((), False, None, None),
    (("/home/u/.manta",), False, " does not share /home/u/.manta, where the checkpoints would be", "MANTA_CHECKPOINTS"),
    ((), True, " runs another release of Manta", "MANTA_SHIP_CODE=1"),
])  # fmt: skip
def test_problem_of_a_node_names_its_folder_or_other_code_with_advice(unshared, other_code, begin, advice):
    problem = problem_of(NodeDescription("n", "host-1", "10.0.0.7", 1, 2, unshared=unshared), other_code=other_code)
    assert problem is None if begin is None else problem.startswith(f"node host-1 (10.0.0.7){begin}")
    assert problem is None or advice in problem


@pytest.mark.parametrize(("error", "words"), [
    ("ModuleNotFoundError: No module named 'manta'", "node 0123456789ab has no Manta: install the same"),
    ("ModuleNotFoundError: No module named 'manta.workers.node'", "has no Manta"),
    ("No module named 'psutil'", "lacks the Python package 'psutil', which Manta needs there: install it"),
    ("the disk is full", "the daemon of node 0123456789ab does not start: the disk is full"),
])  # fmt: skip
def test_daemon_start_error_says_what_is_missing(error, words):
    assert words in problem_of_start("0123456789abcdef", error)


SLOTS = "manta_slot"


def capacity(*nodes):
    """Of nodes with (total, free) slots."""
    named = {f"n{number}": node for number, node in enumerate(nodes)}
    return Capacity(SLOTS, sum(total for total, _ in nodes), sum(free for _, free in nodes), named)


def layout(tensor=1, pipeline=1, data=1):
    return ParallelConfig(tensor=tensor, pipeline=pipeline, data=data)


def test_node_shapes_of_slots_and_gpus_are_parsed_and_a_type_declared_twice_is_refused():
    workers, gpus = shapes_in("workers=4x8 slots, gpu-group = 2 x 8 GPUs")
    assert (workers, gpus) == (NodeShape("workers", 4, "manta_slot", 8), NodeShape("gpu-group", 2, "GPU", 8))
    with pytest.raises(InvalidNodeShapes, match="w twice"):
        shapes_in("w=1x1 slots, w=2x2 slots")


@pytest.mark.parametrize(
    "text", ["", "workers", "workers=4", "workers=4x8", "w=4x0 slots", "w=4x8 cpus", "w=1x1 slot,"]
)
def test_invalid_node_shapes_are_refused_with_an_example(text):
    with pytest.raises(InvalidNodeShapes, match="such as workers=4x8 slots"):
        shapes_in(text)


def test_grown_capacity_adds_the_nodes_that_can_still_come_if_any():
    most = grown(capacity((2, 0), (16, 4)), shapes_in("small=3x2 slots, fast=9x8 gpus"), ["small", ""])
    assert (most.total, most.free) == (2 + 16 + 2 * 2, 0 + 4 + 2 * 2)
    assert grown(capacity((2, 2)), shapes_in("small=1x2 slots"), ["small"] * 3) == capacity((2, 2))


def test_simulated_placement_keeps_each_tensor_group_on_one_node():
    assert capacity_after_placing(capacity((4, 3), (4, 3)), layout(tensor=2, data=3)) is None
    left = capacity_after_placing(capacity((4, 3), (4, 4)), layout(tensor=2, data=3))
    assert left is not None and left.free == 1


layouts = st.builds(layout, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 3))
clusters = st.lists(st.integers(0, 8).map(lambda free: (8, free)), max_size=5).map(lambda nodes: capacity(*nodes))


@given(clusters, layouts)
def test_simulated_placement_succeeds_exactly_if_nothing_is_missing(cluster, job):
    left = capacity_after_placing(cluster, job)
    assert (left is not None) == (missing(job, cluster) is None)
    if left is not None:
        assert left.free == cluster.free - job.world_size
        assert all(free >= 0 for _, free in left.nodes.values())


@given(clusters, st.lists(layouts, max_size=5))
def test_node_demand_is_a_prefix_of_the_queue_that_fits_together(cluster, queue):
    demand = Demand({SLOTS: cluster})
    asked = [demand.add(job, SLOTS) for job in queue]
    assert asked == sorted(asked, reverse=True), "none overtakes one that does not fit"
    units = sum(job.world_size for job, is_asked in zip(queue, asked, strict=True) if is_asked)
    assert sum(bundle[SLOTS] for bundle in demand.bundles) == units <= cluster.free
    assert demand.is_over == (False in asked)


def test_stages_are_counted_on_nodes_of_their_type():
    cluster = replace(capacity((4, 4), (4, 4), (4, 3)), types={"n0": "A100", "n1": "V100", "n2": "V100"})
    typed = ParallelConfig(tensor=2, pipeline=2, data=2, stage_accelerators=("A100", "V100"))
    left = capacity_after_placing(cluster, typed)
    assert left is not None and left.nodes == {"n0": (4, 0), "n1": (4, 2), "n2": (4, 1)} and left.types == cluster.types
    assert capacity_after_placing(cluster, typed.model_copy(update={"data": 3})) is None, (
        "two groups on A100, and no third"
    )
    demand = Demand({SLOTS: cluster})
    assert demand.add(typed, SLOTS)
    assert demand.bundles == [{SLOTS: 2.0, f"accelerator_type:{type}": 0.001} for type in ("A100",) * 2 + ("V100",) * 2]
