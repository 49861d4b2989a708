"""Jobs that wait while nodes can be added, or woken."""

import pytest

from manta.service.cluster.node_shapes import shapes_in
from tests.service.support.queue import LARGE, job_now, resize


@pytest.fixture
def growing(cluster, nodes):
    """A cluster without nodes, to which an autoscaler can add two of four slots."""
    nodes.slots.clear()
    nodes.shapes = shapes_in("small=2x4 slots")
    return cluster


def asked(cluster):
    return [int(bundle["manta_slot"]) for bundle in cluster.requests.bundles]


def add_node(cluster, name):
    cluster.nodes.slots[name], cluster.nodes.used[name], cluster.nodes.types[name] = 4, 0, "small"


def test_queued_job_requests_nodes_from_the_autoscaler_and_says_so(store, submit, look, growing):
    job = submit(parallel={"tensor": 2, "data": 3})
    assert look() == []
    assert asked(growing) == [2, 2, 2]
    stored = job_now(store, job)
    assert stored.reason == "insufficient_slots"
    assert stored.message == (
        "needs 6 slots in groups of 2 on one node; the cluster has 0; nodes for 6 of them are requested: "
        "the autoscaler can have 2 small of 4 slots"
    )


def test_placed_job_asks_the_autoscaler_for_nothing(submit, look, growing):
    job = submit(parallel={"data": 4})
    look()
    add_node(growing, "first")
    assert look() == [(job.id, 1)]
    assert asked(growing) == []


def test_queued_job_larger_than_the_grown_cluster_steps_aside(store, submit, look, growing):
    never, fits = submit(parallel={"data": 12}, train=LARGE), submit(parallel={"data": 4})
    assert look() == []
    assert asked(growing) == [1] * 4
    message = job_now(store, never).message
    assert "too little even with all that can be added: the autoscaler can have 2 small of 4 slots" in message
    assert "are requested" in job_now(store, fits).message


def test_queued_job_with_typed_stages_is_told_that_no_nodes_are_requested(store, submit, look, growing):
    typed = submit(parallel={"pipeline": 2, "stage_accelerators": ["A100", "V100"]}, resources={"accelerator": "gpu"})
    assert look() == [] and asked(growing) == []
    assert job_now(store, typed).message.endswith(
        "which GPUs nodes of the autoscaler have is not known, so none are requested: start some"
    )


def test_queued_jobs_ask_the_autoscaler_as_far_as_they_fit_together(submit, look, growing):
    for data in (4, 2, 4, 1):
        submit(parallel={"data": data})
    look()
    assert asked(growing) == [1] * 6, "the third does not fit, so the fourth has no turn either"


def test_queued_job_without_room_to_grow_requests_nothing(store, submit, look, growing):
    add_node(growing, "first")
    growing.nodes.used["first"] = 4
    job = submit(parallel={"data": 8}, train=LARGE)
    assert look() == [] and asked(growing) == []
    assert "running jobs use too much of what can be added" in job_now(store, job).message


def test_elastic_job_asks_for_as_much_as_there_could_be(submit, look, growing):
    submit(parallel={"tensor": 2, "data": 8}, train=LARGE, elastic={"min_data": 1, "max_data": 8})
    look()
    assert asked(growing) == [2] * 4


@pytest.mark.parametrize("replicas", [1, 4])
def test_queued_resized_job_requests_nodes_for_its_new_size(store, submit, look, growing, replicas):
    job = submit(parallel={"tensor": 2, "data": 2}, elastic={"min_data": 1, "max_data": 4})
    resize(store, job, replicas)
    assert look() == []
    assert asked(growing) == [2] * replicas
    message = job_now(store, job).message
    assert f"needs {2 * replicas} slots" in message and f"; nodes for {2 * replicas} of them are requested" in message


def test_resting_nodes_are_woken_for_a_job_that_fits_only_there(submit, look, growing):
    add_node(growing, "first")
    growing.nodes.at_rest.add("first")
    large = submit(parallel={"data": 8}, train=LARGE)
    assert look() == [] and growing.nodes.at_rest == {"first"}
    add_node(growing, "second")
    assert look() == [(large.id, 1)]
    assert growing.nodes.at_rest == set()
