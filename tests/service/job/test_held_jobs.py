"""A job whose newest state cannot be read is held until it can, and loses nothing meanwhile."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from manta.service.job import supervisor
from manta.service.job.supervisor import Supervisor
from manta.service.recovery import durable_state
from manta.service.recovery.decisions import FailureHistory
from manta.service.recovery.durable_state import CheckpointsUnreadable
from manta.service.store import checkpoints
from manta.workers.checkpoint.catalog import Manifest, checkpoint_path, seal

SAVED = ["checkpoint_saving", "checkpoint_saved"]


@pytest.fixture(autouse=True)
def short_waits(short_waits, monkeypatch):
    """A job that is held looks again after a millisecond, too."""
    monkeypatch.setattr(durable_state, "INITIAL_HOLD_SECONDS", 0.001)
    monkeypatch.setattr(durable_state, "MAX_HOLD_SECONDS", 0.001)


def folder_of(job):
    return job.cluster.paths.checkpoint_folder(job.id)


async def save(job, step):
    """Rank 0 saves a checkpoint of `step`, of which the database hears."""
    path = checkpoint_path(folder_of(job), step, job.row.generation)
    path.mkdir(parents=True)
    seal(path, Manifest(job.id, job.row.generation, step, {}, {}))
    job.ranks[0].event("checkpoint_saving", step, path=str(path))
    job.ranks[0].event("checkpoint_saved", step, path=str(path), bytes=0)
    await job.cluster.agents.until(lambda: job.ranks[0].all_handled)


async def save_unheard(job, step):
    """Rank 0 saves a checkpoint of `step`, and is lost before anybody hears that it is complete."""
    path = checkpoint_path(folder_of(job), step, job.row.generation)
    job.ranks[0].event("checkpoint_saving", step, path=str(path))
    await job.cluster.agents.until(lambda: job.ranks[0].all_handled)
    path.mkdir(parents=True)
    seal(path, Manifest(job.id, job.row.generation, step, {}, {}))


async def run_and_lose_all(job):
    """The job commits three steps with a checkpoint of the second; then its folder, memory and trainers are gone."""
    await job.train(1, 2, 3)
    await save(job, 2)
    folder_of(job).rename(folder_of(job).parent / "elsewhere")
    job.cluster.agents.memory.clear()
    for agent in job.ranks:
        agent.die()


def fetch_snapshots(job):
    (folder_of(job).parent / "elsewhere").rename(folder_of(job))


def states(job):
    return job.store.query(lambda session: [row.state for row in checkpoints.page(session, job.id).items])


async def test_held_job_resumes_by_itself_once_its_checkpoint_is_readable(job):
    await run_and_lose_all(job)
    await job.waited(3)
    assert (job.row.state, job.row.generation, states(job)) == ("RECOVERING", 1, ["complete"])
    assert (job.row.reason, job.row.message) == ("held", job.message("held"))
    fetch_snapshots(job)
    await job.watched(2)
    assert (job.row.reason, job.row.message) == (None, None)
    assert all(agent.orders[-1].resume.step == 2 for agent in job.ranks)
    assert {agent.orders[-1].resume.began for agent in job.ranks} == {1}
    await job.finish(3, 4)
    assert job.log[4:9] == [*SAVED, "RECOVERING", "rank_lost", "held"]
    assert job.log.count("held") == 1, "once, not at each look"
    assert f"the folder {folder_of(job)} is not there" in job.message("held")
    assert job.generations[1][1:] == ("checkpoint", 2)
    assert (job.row.state, job.row.restarts, states(job)) == ("SUCCEEDED", 1, ["complete"])


@pytest.mark.parametrize("how", ["dies", "is_lost", "goes_down_with_all"])
async def test_rank_that_does_not_run_has_no_pid_while_the_job_is_held(job, how):
    await run_and_lose_all(job)
    if how == "is_lost":
        job.ranks[1].lose()
    elif how == "goes_down_with_all":  # as after `manta down`
        await job.die_with_control_plane()
        for agent in list(job.cluster.agents.living.values()):
            agent.lose()
        job.cluster.agents.living.clear()
        job.supervise(None)
    await job.waited(2)
    assert (job.row.reason, job.rank_states, job.pids) == ("held", ["exited"] * 4, [None] * 4)
    fetch_snapshots(job)
    await job.watched(2)
    assert all(job.pids)
    await job.finish()


@pytest.mark.parametrize(("wish", "states_after"), [("cancel", ["CANCELLING", "CANCELLED"]), ("pause", ["PAUSED"])])
async def test_held_job_is_cancelled_or_paused_at_once_since_nothing_is_to_be_saved(
    job, monkeypatch, wish, states_after
):
    monkeypatch.setattr(durable_state, "INITIAL_HOLD_SECONDS", 1000.0)
    monkeypatch.setattr(durable_state, "MAX_HOLD_SECONDS", 1000.0)
    await run_and_lose_all(job)
    await job.waited(1)
    getattr(job, wish)()
    await job.task
    assert job.log[-len(states_after) :] == states_after
    assert (job.row.generation, states(job)) == (1, ["complete"]), "nobody knows better"
    assert job.cluster.nothing_held


async def test_held_job_stays_held_under_the_next_control_plane_without_a_new_event(job):
    await run_and_lose_all(job)
    await job.waited(1)
    await job.die_with_control_plane()
    for agent in job.cluster.agents.living.values():
        agent.lose()
    job.cluster.agents.living.clear()
    job.supervise(None)
    await job.waited(2)
    fetch_snapshots(job)
    await job.finish(generation=2)
    assert job.log.count("held") == 1
    assert job.generations[1][1:] == ("checkpoint", 2)


async def test_trainer_that_cannot_read_the_checkpoint_is_retried_without_end(two_replicas, cluster):
    job = two_replicas(cluster, recovery={"max_restarts": 1})
    await run_and_lose_all(job)
    fetch_snapshots(job)
    for generation in (2, 3, 4, 5):
        await job.watched(generation)
        assert job.ranks[0].orders[-1].resume.step == 2
        job.ranks[0].fail("unreadable_checkpoint", 3, "the checkpoint cannot be read")
    await job.finish(3, generation=6)
    assert job.log.count("held") == 1
    assert job.row.state == "SUCCEEDED"


async def test_job_is_held_for_a_checkpoint_whose_completion_was_not_reported(job):
    await job.train(1, 2)
    await save_unheard(job, 2)
    folder = folder_of(job)
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder)  # the system says that it cannot be read
    job.cluster.agents.memory.clear()
    for agent in job.ranks:
        agent.die()
    await job.waited(3)
    assert (job.row.state, job.row.reason, states(job)) == ("RECOVERING", "held", ["saving"])
    folder.unlink()
    fetch_snapshots(job)
    await job.finish(generation=2)
    assert job.generations[1][1:] == ("checkpoint", 2)
    assert states(job) == ["complete"]


async def test_job_is_held_while_its_tokens_cannot_be_stored(two_replicas, cluster):
    job = two_replicas(cluster, recovery={"max_restarts": 1})
    await job.start()
    for generation in (1, 2, 3, 4):
        await job.watched(generation)
        job.ranks[0].fail("not_saved", 1, "the tokens cannot be kept in /cache (No space left on device)")
    await job.finish(generation=5)
    assert job.message("held") == (
        "on hold until this is possible: the tokens cannot be kept in /cache (No space left on device). "
        f"manta cancel {job.id} ends the job"
    )
    assert (job.row.state, job.log.count("held")) == ("SUCCEEDED", 1)


@pytest.mark.parametrize(
    ("kind", "until"),
    [("unreadable_data", "its data can be read"), ("node_exhausted", "a node has what its ranks need")],
)
async def test_job_that_a_node_cannot_serve_for_now_is_held_and_says_why(two_replicas, cluster, kind, until):
    job, why = two_replicas(cluster, recovery={"max_restarts": 1}), "/data cannot be read on a now (Input/output error)"
    await job.train(1)
    for generation in (1, 2, 3, 4):
        await job.watched(generation)
        job.ranks[0].fail(kind, 2, why)
    await job.finish(generation=5)
    assert job.message("held") == f"on hold until {until}: {why}. manta cancel {job.id} ends the job"
    assert (job.row.state, job.log.count("held")) == ("SUCCEEDED", 1)


@pytest.mark.parametrize("trouble", ["the folder is gone", "an error"])
async def test_finished_job_succeeds_despite_unreadable_checkpoints(job, monkeypatch, trouble):
    await job.train(1)
    await save(job, 1)
    folder_of(job).rename(folder_of(job).parent / "elsewhere")
    if trouble == "an error":
        monkeypatch.setattr(job.supervisor._job.folder_reader, "list", None)
    await job.finish()
    assert (job.row.state, states(job)) == ("SUCCEEDED", ["complete"])


async def test_job_without_any_complete_checkpoint_begins_at_the_start(job):
    await job.train(1)
    job.cluster.agents.memory.clear()
    for agent in job.ranks:
        agent.die()
    await job.watched(2)
    await job.commit(1, 2)
    job.ranks[1].die()
    await job.watched(3)
    assert {agent.orders[-1].resume.began for agent in job.ranks} == {2}, "its state is that of generation 2"
    await job.finish()
    assert [life[1:] for life in job.generations[1:]] == [("start", 0), ("snapshot", 2)]
    assert "held" not in job.log


def test_launch_held_for_an_unreadable_checkpoint_resets_failed_launches(monkeypatch):
    """All agents have answered."""
    held = object.__new__(Supervisor)
    held._job, held._history = None, FailureHistory(0.0)
    held._history.failed_launches.append("a failure")
    held._wait_before_retry = AsyncMock(side_effect=lambda launch, why: (launch, why))
    monkeypatch.setattr(supervisor, "launch_generation", AsyncMock(side_effect=CheckpointsUnreadable("not mounted")))
    assert asyncio.run(held._launch("launch")) == ("launch", "not mounted")
    assert held._history.failed_launches == []
