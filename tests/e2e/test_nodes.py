"""Several nodes: one is lost, one or all are being drained, and the job's curve does not show it."""

from datetime import UTC, datetime, timedelta

import pytest
from metadata_service import MetadataService

from manta.api.cli.service import stop_service
from tests.e2e.manta import EVERY_STEP, Manta
from tests.e2e.ray_nodes import SLOTS, Network, Node

# In `make test` a node is lost in test_compose.py, and what is decided is in tests/service/job and service/cluster.
pytestmark = pytest.mark.soak

STEPS = 20_000
HELD_BACK_SECONDS = 0.15
SPOT = "/latest/meta-data/spot/instance-action"


@pytest.fixture(scope="module")
def cloud():
    """What says to the head's machine that it is to be taken."""
    made = MetadataService()
    yield made
    made.close()


@pytest.fixture(scope="module")
def manta(tmp_path_factory, corpus, cloud):
    """A service whose head has room for one replica of two ranks."""
    notices = {"MANTA_NODE_NOTICES": f"aws={cloud.url}"}
    running = Manta(tmp_path_factory.mktemp("manta"), corpus, SLOTS, environment=notices)
    yield running
    stop_service(running.home)


@pytest.fixture(scope="module")
def network(manta):
    """What further nodes are plugged into."""
    made = Network(manta.paths.tag)
    yield made
    stop_service(manta.home)
    made.close()


@pytest.fixture(scope="module")
def host(manta, network):
    """A further node, with room for one replica."""
    return Node(manta, network).registered().started()


@pytest.fixture(scope="module")
def nodes(manta, network, host):
    """Two further nodes. The first test that asks for them uses one up."""
    return [host, Node(manta, network).registered().started()]


@pytest.fixture(scope="module")
def last(manta, network, host):
    """The only further node from now on: one that the tests before have left."""
    living = {node.id for node in manta.client.cluster().nodes if node.alive and not node.draining}
    left, *more = [node for node in network.plugged_in if node.id in living]
    for node in more:
        node.kill()
    return left


def spec_of(manta, min_data, data=2, zero=1):
    train, elastic = {"deterministic": "elastic"}, {"min_data": min_data, "max_data": 2}
    return manta.spec(STEPS, (2, 1, data), train=train, elastic=elastic, parallel={"zero": zero}, checkpoint=EVERY_STEP)


def submitted_whole(manta, document):
    """Submit a job once all of its ranks have room, what a job before it gave back included: it might begin smaller."""

    def free():
        return sum(node.free for node in manta.client.cluster().nodes if node.alive and not node.draining)

    manta.until("room for all ranks", lambda: free() >= 2 * SLOTS)
    return manta.submit(document)


@pytest.fixture(scope="module")
def undisturbed_curve(manta):
    """The curve of a job to which nothing happens, as far as is asked for: neither the number of its replicas nor the
    stage of ZeRO shows in it."""
    curve = []

    def first(steps):
        if len(curve) < steps:
            undisturbed = manta.submit(spec_of(manta, 1, data=1))
            manta.until_step(undisturbed, steps)
            stopped(manta, undisturbed)
            curve[:] = manta.curve(undisturbed)
        return curve[:steps]

    return first


def same_as_undisturbed(manta, job, undisturbed_curve):
    """End `job`, and see whether its curve is that of a job to which nothing happens."""
    ended = stopped(manta, job)
    curve = manta.curve(job)
    assert curve == undisturbed_curve(len(curve))
    return ended


def stopped(manta, job):
    manta.client.cancel(job)
    return manta.until_state(job, "CANCELLED")


def ranks_on(manta, job, node):
    """The ranks of `job` on `node`, by its processes."""
    pids = {process.pid for process in node.processes()}
    return [rank for rank, pid in enumerate(manta.pids(job)) if pid in pids]


def node_with_ranks(manta, job, nodes):
    """One of `nodes` that has ranks of `job`, and which: Ray may also have left the head empty."""
    return next((node, held) for node in nodes if (held := ranks_on(manta, job, node)))


def held_back(manta, job, left_alone=()):
    """Make each of the job's steps a slow one, by a rank that is not among `left_alone`: while a node comes up it would
    otherwise make thousands, all of which the undisturbed job has to make too."""
    rank = next(rank for rank in range(4) if rank not in left_alone)
    manta.inject(job, "slow", rank, seconds=HELD_BACK_SECONDS)
    manta.until_step(job, manta.client.job(job).step + 3)


def kept_ranks(before, after):
    """Ranks that have the process that they had."""
    return [rank for rank, pid in enumerate(after) if pid == before[rank]]


def steps_committed(manta, job, times):
    """Wait until a generation has committed its first step for the `times`-th time."""
    manta.until(f"generation {times}'s first step", lambda: len(manta.events(job, "first_step")) >= times)


@pytest.mark.parametrize("way", ["both", "output", "input"])
def test_unreachable_host_is_replaced_and_used_again_when_it_returns(manta, network, host, undisturbed_curve, way):
    """Also where one way of the cable is cut: whoever is asked there hears the question, or is heard."""
    if not network.usable:
        pytest.skip("this user may not make network namespaces")
    job = submitted_whole(manta, spec_of(manta, min_data=1))
    manta.until_step(job, 8)
    cut_off = ranks_on(manta, job, host)
    assert len(cut_off) == 2
    held_back(manta, job, cut_off)
    with host.cable.cut(way):
        (lost,) = manta.until("the loss", lambda: manta.events(job, "node_lost"))
        assert (lost.data["node"], lost.data["ranks"]) == (host.id, cut_off)
        steps_committed(manta, job, 2)
        assert manta.client.job(job).parallel["data"] == 1
        (recovered,) = manta.events(job, "recovered")
        assert recovered.data["steps_redone"] <= 1
        assert recovered.data["source"] == "memory", "of the ranks that are cut off it is the replicas"
    steps_committed(manta, job, 3)
    assert manta.client.job(job).parallel["data"] == 2
    assert len(ranks_on(manta, job, host)) == 2
    ended = same_as_undisturbed(manta, job, undisturbed_curve)
    assert ended.restarts == 1


def test_drained_node_is_left_without_repeating_a_step(manta, nodes, undisturbed_curve):
    job = submitted_whole(manta, spec_of(manta, min_data=2))
    manta.until_step(job, 8)
    leaving, moved = node_with_ranks(manta, job, nodes)
    held_back(manta, job, moved)
    before = manta.pids(job)
    leaving.daemon().terminate()
    steps_committed(manta, job, 2)
    assert ranks_on(manta, job, leaving) == []
    assert kept_ranks(before, manta.pids(job)) == [rank for rank in range(4) if rank not in moved]
    ended = same_as_undisturbed(manta, job, undisturbed_curve)
    assert (ended.generation, ended.restarts) == (2, 0)
    assert manta.events(job, "rank_lost") == []
    (draining,) = manta.events(job, "node_draining")
    assert (draining.data["node"], draining.data["ranks"]) == (leaving.id, moved)
    resumed, first = manta.events(job, "generation_started")[-1], manta.events(job, "first_step")[-1]
    changed = [event for event in manta.events(job, "state_changed") if event.data["to"] == "RESIZING"]
    assert resumed.data["resume_source"] == "snapshot"
    assert resumed.data["resume_step"] >= changed[0].step, "nothing that was committed is done again"
    assert first.step == resumed.data["resume_step"] + 1
    assert manta.leftovers(job) == []


def test_job_runs_with_fewer_stages_until_there_is_room_again(manta, last):
    job = submitted_whole(manta, manta.spec(STEPS, (2, 2, 1), elastic={"reshape": True}, checkpoint=EVERY_STEP))
    manta.until_step(job, 8)
    lost = ranks_on(manta, job, last)
    held_back(manta, job, lost)
    last.vanish(job, lost)
    steps_committed(manta, job, 2)
    smaller = manta.client.job(job).parallel
    assert (smaller["tensor"], smaller["pipeline"], smaller["data"]) == (2, 1, 1)
    (recovered,) = manta.events(job, "recovered")
    assert (recovered.data["source"], recovered.data["steps_redone"] <= 1) == ("memory", True)
    held_back(manta, job)  # its ranks are others than before
    last.reappear()
    steps_committed(manta, job, 3)
    ended = stopped(manta, job)
    assert (ended.parallel["tensor"], ended.parallel["pipeline"], ended.restarts) == (2, 2, 1)
    curve = manta.curve(job)
    assert [step for step, _, _ in curve] == list(range(1, len(curve) + 1)), "every step once"
    clean = manta.submit(manta.spec(STEPS, (2, 1, 1)))
    manta.until_step(clean, len(curve))
    stopped(manta, clean)
    for (_, loss, _), (_, expected, _) in zip(curve, manta.curve(clean), strict=False):
        assert loss == pytest.approx(expected, rel=1e-5)


def test_lost_node_costs_a_step_at_most(manta, last, undisturbed_curve):
    job = submitted_whole(manta, spec_of(manta, min_data=1, zero=0))
    manta.until_step(job, 8)
    ranks, before = ranks_on(manta, job, last), manta.pids(job)
    last.kill(job, ranks)
    (event,) = manta.until("the loss", lambda: manta.events(job, "node_lost"))
    assert event.data == {"node": last.id, "ranks": ranks}
    steps_committed(manta, job, 2)
    assert manta.pids(job) == [pid for rank, pid in enumerate(before) if rank not in ranks]
    ended = same_as_undisturbed(manta, job, undisturbed_curve)
    assert (ended.generation, ended.restarts, ended.parallel["data"]) == (2, 1, 1)
    (recovered,) = manta.events(job, "recovered")
    assert recovered.data["steps_redone"] <= 1
    assert recovered.data["source"] == "memory", "that of the ranks that are left is the same"
    assert len(manta.events(job, "rank_lost")) == 1
    assert manta.leftovers(job) == []


def test_job_on_a_leaving_node_without_room_elsewhere_saves_then_resumes_elsewhere(
    manta, cloud, network, undisturbed_curve
):
    saves_all_the_time = {**EVERY_STEP, "every_steps": 1}  # so that the notice comes in the middle of a checkpoint
    job = manta.submit({**spec_of(manta, 1, data=1), "checkpoint": saves_all_the_time})
    manta.inject(job, "slow", 0, seconds=HELD_BACK_SECONDS)
    manta.until_step(job, 3)
    usable = [node for node in manta.client.cluster().nodes if node.alive and not node.draining]
    for other in (node for node in usable if not node.ranks):  # which tests before this one may have left
        manta.client.drain(other.id[:16], 600)
    (node,) = [node for node in usable if node.ranks]
    assert manta.client.drain(node.id[:16], 600).draining
    (waiting,) = manta.until("its being told", lambda: manta.events(job, "drain_waiting"))
    assert "no other slots are free" in waiting.message
    manta.until_step(job, manta.client.job(job).step + 5)
    assert manta.client.job(job).generation == 1
    gone = datetime.now(UTC) + timedelta(seconds=12)
    cloud.answers = {SPOT: {"action": "terminate", "time": gone.strftime("%Y-%m-%dT%H:%M:%SZ")}}
    queued = manta.until_state(job, "QUEUED")
    assert datetime.now(UTC) < gone, "it was saved in time"
    assert [event.data.get("reason") for event in manta.events(job, "node_draining")] == [
        None, "AWS reclaims the spot instance (terminate)"
    ]  # fmt: skip
    (left,) = [event for event in manta.events(job, "state_changed") if event.data["to"] == "QUEUED"]
    assert left.data["reason"] == "nodes_to_be_left"
    newest = manta.client.checkpoints(job).items[0]
    assert (newest.state, newest.step) == ("complete", queued.step)
    assert manta.events(job, "not_saved") == []
    manta.until("the end of its agents' processes", lambda: not manta.agents())  # which Ray kills
    cloud.answers = {}
    other = Node(manta, network).registered().started()
    steps_committed(manta, job, 2)
    assert len(ranks_on(manta, job, other)) == 2
    resumed = manta.events(job, "generation_started")[-1]
    assert resumed.data["resume_step"] == queued.step
    ended = same_as_undisturbed(manta, job, undisturbed_curve)
    assert (ended.generation, ended.restarts) == (2, 0)
    assert manta.leftovers(job) == []
