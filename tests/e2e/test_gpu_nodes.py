"""Several nodes with GPUs, unequally many, and one without, on a machine that has none (see test_gpus.py): who is
placed where, and what happens when a node is being drained or is lost."""

import pytest

from tests.e2e.manta import EVERY_STEP, HOLD_SECONDS, LONG_HOLD_SECONDS
from tests.e2e.ray_nodes import SLOTS, Node, service_for_nodes
from tests.e2e.test_gpus import CPU, ON_CPU, devices, on_gpus, running

# The decisions: tests/service/scheduler, tests/service/job; on one node: test_gpus.py.
pytestmark = pytest.mark.soak
HEAD_GPUS, NODE_GPUS = 2, 3
STEPS, HELD_AT = 30, 8
LAYOUT = (2, 1, 2)
TO_LEAVE_SECONDS = 60


@pytest.fixture(scope="module")
def joined(tmp_path_factory, corpus):
    with service_for_nodes(tmp_path_factory.mktemp("manta"), corpus, on_gpus(HEAD_GPUS)) as made:
        yield made


@pytest.fixture(scope="module")
def manta(joined):
    """A service whose own node has two GPUs."""
    return joined[0]


@pytest.fixture(scope="module")
def network(joined):
    return joined[1]


@pytest.fixture(scope="module")
def nodes(manta, network):
    """Further nodes: one with three GPUs, one with two, and one without."""
    return [Node(manta, network, gpus, ON_CPU).registered().started() for gpus in (NODE_GPUS, 2, 0)]


@pytest.fixture(scope="module")
def clean(manta, nodes):
    """The curve of a job to which nothing happens."""
    job = manta.submit(spec_of(manta))
    manta.until_state(job, "SUCCEEDED")
    return manta.curve(job)


def spec_of(manta):
    return manta.spec(STEPS, LAYOUT, checkpoint=EVERY_STEP)


def held(manta, seconds=HOLD_SECONDS):
    """A job in the middle of its run."""
    return manta.submit_held(spec_of(manta), 0, HELD_AT, seconds)


def ranks_on(manta, job, node):
    pids = {process.pid for process in node.processes()}
    return [rank for rank, pid in enumerate(manta.pids(job)) if pid in pids]


def some_with_ranks(manta, job, nodes):
    """One of `nodes` that has ranks of `job`, and which."""
    return next((node, ranks) for node in nodes if (ranks := ranks_on(manta, job, node)))


def until_given_back(manta, node):
    """Wait until nobody has a GPU of a node, as Ray shows with some delay."""

    def with_freed_units():
        (seen,) = [each for each in manta.client.cluster().nodes if each.id == node.id]
        return seen.accelerator == "gpu" and seen.free == seen.total

    manta.until(f"all GPUs of {node.id} being free", with_freed_units)


def test_tensor_groups_stay_on_one_node_and_leftover_gpus_serve_other_jobs(manta, nodes):
    three, two, none = nodes
    job = running(manta, LAYOUT)
    alone = [running(manta, (1, 1, 1)) for _ in range(3)]
    for node in (three, two):
        assert ranks_on(manta, job, node) in ([], [0, 1], [2, 3])
    assert all(len(set(devices(manta, job)[pair : pair + 2])) == 2 for pair in (0, 2))
    assert [ranks_on(manta, each, none) for each in (job, *alone)] == [[]] * 4
    manta.until("all being held", lambda: manta.client.cluster().totals["free"] == 0)  # Ray's own view lags a little
    whole = manta.submit(manta.spec(STEPS, (4, 1, 1)))
    why = "needs 4 GPUs in groups of 4 on one node; the cluster has 0"
    manta.until("why it waits", lambda: manta.client.job(whole).message == why)
    (cpu,) = [each for each in manta.client.cluster().nodes if each.id == none.id]
    assert (cpu.accelerator, cpu.total) == ("cpu", SLOTS)
    on_slots = running(manta, (1, 1, 4 * SLOTS), train={"global_batch_size": 4 * SLOTS}, resources=CPU)
    assert len(ranks_on(manta, on_slots, none)) == SLOTS, "of GPUs or not, all nodes have slots"


def test_ranks_of_a_lost_gpu_node_resume_on_gpus_of_another(manta, nodes, clean):
    job = held(manta)
    lost, ranks = some_with_ranks(manta, job, nodes)
    lost.kill(job, ranks)
    manta.succeeded(job, clean)
    (recovered,) = manta.events(job, "recovered")
    assert recovered.data["steps_redone"] <= 1 and recovered.data["source"] != "start"
    assert all(device.startswith("GPU ") for device in devices(manta, job))
    lost.start_again()
    until_given_back(manta, lost)


def test_drained_gpu_node_releases_its_gpus_without_ending_other_processes(manta, nodes, clean):
    job = held(manta, LONG_HOLD_SECONDS)
    leaving, moved = some_with_ranks(manta, job, nodes)
    before = manta.pids(job)
    manta.client.drain(leaving.id, TO_LEAVE_SECONDS)
    manta.until("the move", lambda: len(manta.events(job, "first_step")) == 2)
    assert ranks_on(manta, job, leaving) == []
    assert [rank for rank, pid in enumerate(manta.pids(job)) if pid == before[rank]] == [
        rank for rank in range(4) if rank not in moved
    ]
    if 0 not in moved:
        manta.release_job(job, 0)
    ended = manta.until_state(job, "SUCCEEDED")
    assert (manta.curve(job), ended.generation, ended.restarts) == (clean, 2, 0)
    assert manta.events(job, "rank_lost") == []
    resumed = manta.events(job, "generation_started")[-1]
    assert resumed.data["resume_source"] == "snapshot"
    until_given_back(manta, leaving)
    leaving.kill()
    leaving.start_again()


def test_gpu_job_without_gpus_elsewhere_waits_despite_free_slots(manta, nodes, clean):
    three, two, none = nodes
    job = held(manta)
    here = ranks_on(manta, job, none)
    gone = [node for node in (three, two) if node.process.poll() is None]
    ranks = [ranks_on(manta, job, node) for node in gone]
    for node, held_there in zip(gone, ranks, strict=True):
        node.kill(job, held_there)
    waiting = manta.until_state(job, "QUEUED")
    assert (here, waiting.reason) == ([], "insufficient_gpus")
    why = "needs 4 GPUs in groups of 2 on one node; the cluster has 2"
    manta.until("why", lambda: why in (manta.client.job(job).message or ""))
    two.start_again()
    manta.succeeded(job, clean)
