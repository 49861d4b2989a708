"""Jobs whose ranks communicate over process groups (gloo, as GPUs use NCCL) are repaired and changed in place, as those
over the links are: whatever is killed, stopped or cut, who survives keeps its process, and the curve shows nothing. The
short form is in test_gpus.py."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from manta.api.cli.service import stop_service
from manta.workers.protocol.messages import BETWEEN_STEPS, FAULT_PHASES
from tests.e2e.manta import EVERY_STEP, LONG_HOLD_SECONDS, Manta
from tests.e2e.ray_nodes import Node
from tests.e2e.test_gpus import OVER_GROUPS, survivors

pytestmark = pytest.mark.soak
FOUR = (2, 1, 2)
STEPS = 30


@pytest.fixture(scope="module")
def manta(tmp_path_factory, corpus):
    """A service whose ranks communicate so."""
    running = Manta(tmp_path_factory.mktemp("groups"), corpus, 4, environment=OVER_GROUPS)
    yield running
    stop_service(running.home)


@pytest.fixture(scope="module")
def clean(manta):
    """The curve of a job to which nothing happens."""
    job = manta.submit(manta.spec(STEPS, FOUR, checkpoint=EVERY_STEP))
    manta.until_state(job, "SUCCEEDED")
    said = [line.text for line in manta.client.logs(job).items]
    assert sum("communicates over process groups" in text for text in said) == 4
    return manta.curve(job)


@pytest.mark.timeout(1800)
def test_a_hundred_faults_cost_no_other_process_and_no_bit(manta):
    """Kind, rank and phase are drawn from a seed; of what is killed or stopped, all but one process stays."""
    faults, between = 100, 6
    sections = {"checkpoint": EVERY_STEP, "recovery": {"max_restarts": 2 * faults}}
    document = manta.spec(faults * between + 20, FOUR, **sections)
    undisturbed = manta.submit(document)
    manta.until_state(undisturbed, "SUCCEEDED", seconds=600.0)
    job, choice = manta.submit(document), random.Random(15)
    phases = [phase for phase in FAULT_PHASES if phase not in (*BETWEEN_STEPS, "checkpoint")]
    struck = []
    for number in range(1, faults + 1):
        kind, rank, phase = (
            choice.choice(["kill", "kill", "stop", "partition"]),
            choice.randrange(4),
            choice.choice(phases),
        )
        manta.inject(job, kind, rank, at_step=number * between, phase=phase)
        manta.until_generation(job, number + 1)
        struck.append(None if kind == "partition" else rank)
    manta.until_state(job, "SUCCEEDED", seconds=600.0)
    kept = survivors(manta, job)
    assert kept == [[rank for rank in range(4) if rank != lost] for lost in struck]
    assert manta.curve(job) == manta.curve(undisturbed)


def test_resized_job_keeps_the_processes_that_stay(manta):
    train = {"deterministic": "elastic", "micro_batch_size": 2}
    job = manta.submit(manta.spec(100_000, (1, 1, 2), train=train, elastic={"min_data": 1, "max_data": 3}))
    manta.leave_room(job)
    manta.until_step(job, 10)
    before = manta.pids(job)
    for replicas, kept in ((1, 1), (3, 1), (2, 2)):
        manta.client.resize(job, replicas)
        manta.until(f"{replicas} replicas", lambda n=replicas: manta.client.job(job).parallel["data"] == n)
        manta.until_step(job, manta.client.job(job).step + 5)
        now = manta.pids(job)
        assert now[:kept] == before[:kept]
        before = now
    manta.client.cancel(job)
    assert manta.until_state(job, "CANCELLED").restarts == 0
    assert manta.leftovers(job) == []


@pytest.fixture
def further_nodes(manta, monkeypatch):
    """Two of them, with room for one replica each. On this machine's own network, since gloo listens where the
    machine's name leads to."""
    for name, value in OVER_GROUPS.items():
        monkeypatch.setenv(name, value)
    network, made = SimpleNamespace(usable=False, plugged_in=[]), []
    for _ in range(2):
        made.append(Node(manta, network).registered().started())
    yield made
    for node in made:
        node.close()


def test_drained_node_is_left_between_steps_and_only_its_ranks_move(manta, clean, further_nodes):
    blocker = manta.submit(manta.spec(100_000, (1, 1, 2)))  # half of the first node
    manta.leave_room(blocker)
    manta.until_step(blocker, 1)
    job = manta.submit_held(manta.spec(STEPS, FOUR, checkpoint=EVERY_STEP), 0, 10, LONG_HOLD_SECONDS)
    before = manta.pids(job)
    ranks_on = {
        node: [rank for rank, pid in enumerate(before) if pid in {process.pid for process in node.processes()}]
        for node in further_nodes
    }
    leaving, moved = next((node, ranks) for node, ranks in ranks_on.items() if ranks)
    manta.client.drain(leaving.id)
    manta.until("the next generation", lambda: len(manta.events(job, "first_step")) == 2)
    kept = [rank for rank, pid in enumerate(manta.pids(job)) if pid == before[rank]]
    assert kept == [rank for rank in range(4) if rank not in moved]
    if 0 in kept:
        manta.release_job(job, 0)
    ended = manta.until_state(job, "SUCCEEDED")
    assert (ended.generation, ended.restarts) == (2, 0)
    assert manta.curve(job) == clean
