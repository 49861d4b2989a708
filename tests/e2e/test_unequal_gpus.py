"""A pipeline over nodes with GPUs of two types, on a machine that has none (see test_gpus.py): it is planned, each
stage is placed on nodes of its own type, and stays there whoever dies."""

import pytest

from tests.e2e.manta import EVERY_STEP
from tests.e2e.ray_nodes import Node, service_for_nodes
from tests.e2e.test_gpus import ON_CPU, on_gpus

# The decisions: tests/service/cluster/test_placement.py, tests/service/planner/test_mixed_search.py.
pytestmark = pytest.mark.soak
GPUS, STEPS, HELD_AT = 2, 30, 8
FAST, SLOW = "A100", "V100"
OVER_BOTH = {"stage_layers": [3, 1], "stage_accelerators": [FAST, SLOW]}
MODEL = {"layers": 4}


@pytest.fixture(scope="module")
def joined(tmp_path_factory, corpus):
    with service_for_nodes(tmp_path_factory.mktemp("manta"), corpus, on_gpus(GPUS, FAST)) as made:
        yield made


@pytest.fixture(scope="module")
def manta(joined):
    """A service whose own node has the fast ones."""
    return joined[0]


@pytest.fixture(scope="module")
def network(joined):
    return joined[1]


@pytest.fixture(scope="module")
def slow(manta, network):
    """Two nodes with the slow ones."""
    return [Node(manta, network, GPUS, ON_CPU, SLOW).registered().started() for _ in range(2)]


def ranks_on(manta, job, node):
    pids = {process.pid for process in node.processes()}
    return [rank for rank, pid in enumerate(manta.pids(job)) if pid in pids]


def stages_on(manta, job, nodes):
    """Stages of the ranks whose processes are on one of `nodes`."""
    stages = [rank.pipeline for rank in manta.client.ranks(job).items]
    return [stages[rank] for node in nodes for rank in ranks_on(manta, job, node)]


def test_stages_run_on_nodes_of_their_gpu_type_also_after_a_replacement(manta, slow):
    spec = manta.spec(STEPS, (1, 2, 2), model=MODEL, parallel=OVER_BOTH, checkpoint=EVERY_STEP)
    clean = manta.submit(spec)
    manta.until_state(clean, "SUCCEEDED")
    job = manta.submit_held(spec, 0, HELD_AT)
    assert stages_on(manta, job, slow) == [1, 1]
    lost = next(node for node in slow if ranks_on(manta, job, node))
    lost.kill(job, ranks_on(manta, job, lost))
    manta.until("the recovery", lambda: manta.events(job, "recovered"))
    assert stages_on(manta, job, slow) == [1, 1]
    manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == manta.curve(clean)
    lost.start_again()


def test_a_layout_that_is_found_for_the_whole_cluster_goes_over_both_types(manta, slow):
    """The fast ones alone are fewer than the batch could use."""
    spec = manta.spec(STEPS, (1, 1, 1), model={"layers": 8, "hidden_size": 1024, "sequence_length": 1024})
    del spec["parallel"], spec["checkpoint"], spec["name"]
    plans = manta.client.plans({**spec, "cluster": {"current": True}}).plans
    assert {FAST, SLOW} == set(plans[0].parallel["stage_accelerators"])
    assert sum(plans[0].parallel["stage_layers"]) == 8
