"""Jobs on a Ray whose autoscaler has the nodes: they come when a job waits, and go when nobody needs them."""

import pytest

from manta.api.cli.service import stop_service
from manta.service.states import is_final
from tests.e2e.autoscaled_ray import MOST, SLOTS, TYPE, AutoscaledRay
from tests.e2e.manta import SECONDS, Manta

ALL = (1, 1, MOST * SLOTS)
LONG = 4 * SECONDS
"""For nodes to come, train and go."""


@pytest.fixture
def manta(tmp_path, corpus):
    """A service on a Ray with an autoscaler."""
    ray = AutoscaledRay(tmp_path)
    environment = {**ray.token, "MANTA_NODE_SHAPES": f"{TYPE}={MOST}x{SLOTS} slots"}
    try:
        yield Manta(tmp_path / "home", corpus, None, ray=ray.address, environment=environment)
    finally:
        stop_service(tmp_path / "home")
        ray.close()


def nodes(manta):
    return len(manta.client.cluster().nodes)


def until_trained(manta, job):
    """The job has trained without a failure."""
    manta.until("the job's end", lambda: is_final(manta.client.job(job).state), LONG)
    seen = manta.client.job(job)
    assert (seen.state, seen.restarts) == ("SUCCEEDED", 0), manta.story(job)


@pytest.mark.soak
def test_autoscaler_adds_nodes_for_waiting_jobs_and_removes_idle_ones(manta):
    assert nodes(manta) == 0
    never = manta.submit(manta.spec(layout=(1, 1, 2 * MOST * SLOTS)))
    job = manta.submit(manta.spec(layout=ALL, steps=20))
    until_trained(manta, job)
    most = f"the autoscaler can have {MOST} {TYPE} of {SLOTS} slots"
    assert f"that can be added: {most}" in manta.client.job(never).message
    manta.client.cancel(never)
    manta.until("the nodes being taken away", lambda: nodes(manta) == 0, LONG)

    pair = [manta.submit(manta.spec(layout=(1, 1, SLOTS), steps=20)) for _ in range(2)]
    manta.until("nodes for both", lambda: nodes(manta) == MOST, LONG)
    for each in pair:
        until_trained(manta, each)
    manta.until("the nodes being taken away", lambda: nodes(manta) == 0, LONG)
