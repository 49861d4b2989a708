"""A job whose nodes are all to be left saves its state in time and waits in the queue, whatever happens meanwhile."""

import asyncio

import pytest

from manta.service.job import leave, resize_and_drain
from manta.service.job.actions import Launch, Leave, Reacquire, while_leaving
from manta.service.job.inbox import NodeDraining, NodeLost
from manta.service.job.leave import SPARE_SECONDS
from manta.service.store import jobs
from tests.service.support.fake_agents import FakeAgent
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.supervised_job import UP, save_checkpoint
from tests.service.support.waiting import reached

NOTICED = ["node_draining", "node_draining"]
LEFT = ["RESIZING", "QUEUED"]
CAUSE = "placed on other nodes: its nodes were being drained"
SOON, LATER = SPARE_SECONDS + 0.3, 3600.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(leave, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(resize_and_drain, "ROOM_SECONDS", 0.01)


@pytest.fixture
def cluster(tmp_path):
    """Two nodes with room for a replica each."""
    return FakeCluster(tmp_path, one=2, two=2)


@pytest.fixture
def job(two_replicas, cluster):
    """Its agents let their trainers save and end as soon as any of them is asked."""
    cluster.agents.on_start = lambda agent: setattr(agent, "on_save", lambda asked: all_save(cluster))
    return two_replicas(cluster)


def all_save(cluster):
    for each in list(cluster.agents.living.values()):
        if each.running:
            each.save_and_exit()


async def up(job, *steps, saved=()):
    await job.train(*steps)
    for step in saved:
        save_checkpoint(job, step)


def drain(job, seconds, *nodes):
    """As the control plane does."""
    for node in nodes or ("one", "two"):
        job.cluster.nodes.drain(node, seconds)
        job.supervisor.tell(NodeDraining(node, seconds))


async def asked(job):
    await job.cluster.agents.until(lambda: any(agent.asked_to_save for agent in job.ranks))


async def placed_on(job, *nodes):
    """There are other nodes, and the job is placed there."""
    job.cluster.nodes.slots |= dict.fromkeys(nodes, 2)
    job.cluster.nodes.used |= dict.fromkeys(nodes, 0)
    await job.train()


async def test_drained_job_saves_its_state_and_resumes_where_there_is_room(job, cluster):
    await up(job, 1, 2, saved=[2])
    drain(job, 10.0)
    await job.task
    assert (job.row.state, job.row.reason) == ("QUEUED", "nodes_to_be_left")
    assert job.row.message == "its nodes are being drained and no other slots are free; it continues once some are"
    assert not cluster.agents.living and not cluster.groups.held
    assert job.rank_states == ["exited"] * 4
    assert all(all(memory.values()) for memory in cluster.agents.memory.values())
    await placed_on(job, "three", "four")
    assert {agent.node for agent in job.ranks} == {"three", "four"}
    await job.finish(3)
    assert job.log == [*UP, *NOTICED, *LEFT, *UP, "SUCCEEDED"]
    assert job.generations[1] == (CAUSE, "snapshot", 2), "the nodes that it has left may still be there"
    assert (job.row.restarts, job.recoveries) == (0, [])
    assert cluster.nothing_held


async def test_drained_job_whose_old_nodes_are_gone_resumes_from_its_checkpoint(job, cluster):
    await up(job, 1, 2, saved=[2])
    drain(job, 10.0)
    await job.task
    for node in ("one", "two"):
        cluster.lose_node(node)
    await placed_on(job, "three", "four")
    await job.finish()
    assert job.generations[1] == (CAUSE, "checkpoint", 2)
    assert job.row.restarts == 0


async def test_drained_job_waits_for_room_while_there_is_time_to_save(job, cluster):
    await up(job, 1, saved=[1])
    drain(job, LATER)
    await reached(lambda: "drain_waiting" in job.log)
    await job.commit(2)
    assert not any(agent.asked_to_save for agent in job.ranks)
    cluster.nodes.drain("two", 5.0)  # the same notice again, and less time
    await job.task
    assert job.row.state == "QUEUED"
    said = job.message("drain_waiting")
    assert said.startswith("no other slots are free; the job stays until some are, or for 35")
    assert said.endswith(" s; then it saves its state and waits in the queue")
    assert job.log == [*UP, *NOTICED, "drain_waiting", "RESIZING", "not_saved", "QUEUED"]


async def test_job_stays_on_a_drained_node_without_a_deadline(job, cluster):
    await up(job, 1)
    drain(job, None)
    await reached(lambda: "drain_waiting" in job.log)
    await job.finish()
    assert job.log == [*UP, *NOTICED, "drain_waiting", "SUCCEEDED"]
    assert job.message("node_draining") == "node two is being drained; it runs 2 ranks of the job"
    assert job.message("drain_waiting") == "no other slots are free; the job stays until some are, or until the end"


async def test_job_ignores_the_deadline_of_a_node_it_does_not_use(job, cluster):
    await up(job, 1)
    cluster.nodes.drain("of others", 1.0)
    drain(job, LATER)
    await reached(lambda: "drain_waiting" in job.log)
    await job.finish()
    assert job.log == [*UP, *NOTICED, "drain_waiting", "SUCCEEDED"]


async def test_job_of_fixed_size_leaves_both_nodes_when_one_is_drained(job, cluster):
    await up(job, 1)
    drain(job, SOON, "two")
    await job.task
    assert not cluster.groups.held, "its other node is free for others"
    assert (job.row.state, job.row.reason) == ("QUEUED", "nodes_to_be_left")


async def test_drained_job_moves_elsewhere_if_it_can_be_ready_in_time(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2, three=2)
    job = two_replicas(cluster)

    def never_ready(agent):
        agent.on_save = lambda asked: all_save(cluster)
        agent.prepare = lambda order: asyncio.Event().wait()

    await up(job, 1, saved=[1])
    for agent in job.ranks:
        agent.on_save = FakeAgent.save_and_exit
    cluster.agents.on_start = never_ready
    drain(job, 0.5, "two")
    await job.task
    assert not cluster.groups.held and not cluster.agents.living, "nothing is left of who was to take over"
    assert (job.row.state, job.row.reason) == ("QUEUED", "nodes_to_be_left")
    assert job.row.message == "its nodes shut down before it can move; it continues on others"


async def test_drained_job_recovers_a_rank_that_dies_while_saving_and_saves_again(job, cluster):
    await up(job, 1, saved=[1])
    job.stop_saving()
    drain(job, SOON)
    await asked(job)
    job.ranks[1].die()
    await cluster.agents.until(lambda: job.ranks[0].asked_to_save == [1, 2])
    await job.commit(2)
    all_save(cluster)
    await job.task
    assert [kind for kind in job.log if kind.isupper()] == [
        "STARTING", "RUNNING", "RESIZING", "RECOVERING", "RESIZING", "RUNNING", "RESIZING", "QUEUED"
    ]  # fmt: skip
    assert (job.row.reason, job.row.generation, job.row.restarts) == ("nodes_to_be_left", 2, 1)


async def test_drained_job_whose_nodes_go_too_early_is_queued_with_older_state(job, cluster):
    await up(job, 1, 2, saved=[1])
    job.stop_saving()
    drain(job, SOON)
    await asked(job)
    for node in ("one", "two"):
        cluster.lose_node(node)
        job.supervisor.tell(NodeLost(node, "its time was up"))
    await job.task
    assert (job.row.state, job.row.reason) == ("QUEUED", "nodes_to_be_left")
    await placed_on(job, "three", "four")
    await job.finish()
    assert "not_saved" in job.log
    assert job.generations[1][1:] == ("checkpoint", 1)


async def test_drained_job_that_saves_too_slowly_leaves_with_what_is_saved(job, monkeypatch):
    monkeypatch.setattr(leave, "seconds_allowed", lambda needed: 0.1)
    await up(job, 1)
    job.stop_saving()
    drain(job, SOON)
    await job.task
    assert job.row.state == "QUEUED"
    assert "not_saved" in job.log


async def test_last_step_that_is_committed_meanwhile_is_the_end(job, cluster):
    await up(job, 1)
    job.stop_saving()
    drain(job, SOON)
    await asked(job)
    await job.finish()
    assert job.log == [*UP, *NOTICED, "RESIZING", "SUCCEEDED"]
    assert cluster.nothing_held


@pytest.mark.parametrize(
    ("wish", "states"), [("pause", ["PAUSING", "PAUSED"]), ("cancel", ["CANCELLING", "CANCELLED"])]
)
@pytest.mark.parametrize("when", ["saving", "leaving"])
async def test_pause_or_cancel_while_leaving_a_node_takes_precedence(job, cluster, monkeypatch, wish, states, when):
    release = cluster.release

    async def late_wish(*arguments, **options):
        monkeypatch.setattr(cluster, "release", release)
        await release(*arguments, **options)
        getattr(job, wish)()

    await up(job, 1, saved=[1])
    if when == "saving":
        job.stop_saving()
    else:
        monkeypatch.setattr(cluster, "release", late_wish)
    drain(job, SOON)
    if when == "saving":
        await asked(job)
        getattr(job, wish)()
        all_save(cluster)
    await job.task
    assert [kind for kind in job.log if kind.isupper()] == ["STARTING", "RUNNING", "RESIZING", *states]
    assert not cluster.agents.living and not cluster.groups.held
    assert cluster.nothing_held is (wish == "cancel")


@pytest.mark.parametrize("at", ["asked", "saved", "noted", "released"])
async def test_drained_job_is_carried_on_by_the_next_control_plane(job, cluster, monkeypatch, at):
    await up(job, 1, saved=[1])
    held, release = asyncio.Event(), cluster.release

    async def stuck(*arguments, **options):
        if at == "released":
            await release(*arguments, **options)
        held.set()
        await asyncio.Event().wait()

    if at in ("asked", "saved"):
        job.stop_saving()
    else:
        monkeypatch.setattr(cluster, "release", stuck)
    drain(job, SOON)
    await (asked(job) if at in ("asked", "saved") else held.wait())
    await job.die_with_control_plane()
    monkeypatch.setattr(cluster, "release", release)
    if at == "saved":
        all_save(cluster)
    for agent in cluster.agents.living.values():
        agent.on_save = lambda asked: all_save(cluster)
    job.supervise(None)
    await job.task
    assert (job.row.state, job.row.reason) == ("QUEUED", "nodes_to_be_left")
    assert not cluster.agents.living and not cluster.groups.held
    await placed_on(job, "three", "four")
    await job.finish()
    assert [kind for kind in job.log if kind.isupper()] == [
        *("STARTING", "RUNNING", "RESIZING", "QUEUED", "STARTING", "RUNNING", "SUCCEEDED")
    ]
    assert job.generations[1] == (CAUSE, "snapshot", 1)
    assert job.row.restarts == 0
    assert cluster.nothing_held


async def test_drained_job_without_agents_is_queued_by_the_next_control_plane(job, cluster):
    await up(job, 1, saved=[1])
    job.stop_saving()
    drain(job, SOON)
    await asked(job)
    await job.die_with_control_plane()
    for node in ("one", "two"):
        cluster.lose_node(node)
    job.supervise(None)
    await job.task
    assert (job.row.state, job.row.reason) == ("QUEUED", "nodes_to_be_left")


async def test_drained_job_is_placed_again_if_its_control_plane_dies_after_placement(job, cluster):
    """What had ended the generation before is history by then."""
    await up(job, 1, saved=[1])
    drain(job, SOON)
    await job.task
    cluster.nodes.slots |= {"three": 4}
    cluster.nodes.used |= {"three": 0}
    await job.store.write_async(job._place)
    job.supervise(None)
    await job.finish(generation=2)
    assert job.row.state == "SUCCEEDED"


async def test_job_queued_off_a_drained_node_can_be_paused_and_resumed(job, cluster):
    await up(job, 1, saved=[1])
    drain(job, SOON)
    await job.task
    job.pause()
    assert job.row.state == "PAUSED"
    cluster.nodes.slots |= {"three": 4}
    cluster.nodes.used |= {"three": 0}
    await job.resume()
    await job.finish(generation=2)
    assert job.generations[1][0] == "resumed by the user"


def test_job_that_leaves_for_lack_of_room_asks_for_no_other_places():
    launch = Launch("why", counts=True)
    assert while_leaving(Reacquire(launch), False, False, no_room=True) == Leave()
    assert while_leaving(launch, False, False, no_room=True) == launch, "it has places, and goes on there to be saved"


async def test_drained_job_in_the_queue_has_the_documented_reason(job):
    await up(job, 1)
    drain(job, SOON)
    await job.task
    (queued,) = [event for event in job.events if event.data and event.data.get("to") == "QUEUED"]
    assert queued.data["reason"] == "nodes_to_be_left"
    with job.store.read() as session:
        assert jobs.get(session, job.id).waiting_for is None
