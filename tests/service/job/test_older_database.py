"""A database that was restored from a backup: what runs is neither swept nor fought."""

from dataclasses import replace
from unittest.mock import AsyncMock

import pytest

from manta.service.job.owner import newer_gang
from manta.service.store import Store, events, generations, jobs, pauses_and_retries, ranks, restored
from manta.workers.protocol.messages import AgentDescription


def forget(job, generation, state=None):
    """The rows say what they said when the job was at `generation`, and in `state`; of its newer gang they say
    nothing."""

    def operation(session):
        row = jobs.get(session, job.id)
        for life in generations.of_job(session, job.id):
            if life.generation > generation:
                session.delete(life)
        row.generation, row.report_cursor = generation, {}
        row.state = row.state if state is None else state
        if generation == 0:
            ranks.replace(session, job.id, [])

    job.store.write(operation)


def restore(job):
    """The job's database says that it was restored."""
    job.store.write(lambda session: events.append(session, job.id, restored.RESTORED, "from a backup"))


async def at_generation_two(job):
    """The job loses a rank, goes on in generation 2, and then its control plane dies."""
    await job.train(1)
    job.ranks[1].die()
    await job.watched(2)
    await job.commit(2)
    await job.die_with_control_plane()


def orders(cluster):
    return [len(agent.orders) for agent in cluster.agents.living.values()]


async def test_gang_newer_than_a_restored_database_is_adopted(job, cluster):
    await at_generation_two(job)
    given = orders(cluster)
    forget(job, 1)
    await job.own()
    await job.watched(2)
    assert orders(cluster) == given, "no agent was told anything"
    assert all(agent.running for agent in job.ranks)
    await job.finish(3)
    assert (job.row.generation, job.row.state, job.row.step) == (2, "SUCCEEDED", 10)
    assert job.log[-4:] == ["database_older", "adopted", "first_step", "SUCCEEDED"]
    assert job.message("database_older").startswith("generation 2 runs, and the database knows 1: ")
    assert cluster.nothing_held


async def test_owner_epoch_after_a_restore_exceeds_those_known_to_agents(two_replicas, cluster, monkeypatch):
    """Else the agents would take its orders for those of one that was replaced."""
    job, epochs = two_replicas(cluster), []
    monkeypatch.setattr(Store, "exceed", AsyncMock(side_effect=epochs.append))
    await at_generation_two(job)
    forget(job, 1)
    for epoch, agent in enumerate(cluster.agents.living.values(), start=40):
        agent.description = replace(agent.description, owner_epoch=epoch)
    await job.own()
    await job.watched(2)
    assert epochs == [43]
    await job.finish()


async def test_silent_ranks_after_a_restore_are_replaced_and_others_stay(job, cluster):
    await at_generation_two(job)
    forget(job, 1)
    agent = list(cluster.agents.living.values())[3]
    agent.lose()
    del cluster.agents.living[agent.name]
    staying = list(cluster.agents.living.values())
    await job.own()
    await job.watched(3)
    assert job.ranks[:3] == staying
    await job.finish(3)
    assert "rank_lost" in job.log and job.row.state == "SUCCEEDED"
    assert cluster.nothing_held


async def test_gang_of_another_size_than_a_restored_database_is_adopted_in_its_size(two_replicas, cluster):
    job = two_replicas(cluster, elastic={"min_data": 1, "max_data": 2})
    await job.train(1)
    job.resize(1)
    await job.watched(2)
    await job.commit(2)
    await job.die_with_control_plane()
    forget(job, 1)
    job.store.write(lambda s: setattr(jobs.get(s, job.id), "replicas", 2))
    job.store.write(lambda s: setattr(jobs.get(s, job.id), "wanted_replicas", 1))
    given = orders(cluster)
    await job.own()
    await job.watched(2)
    assert orders(cluster) == given and len(job.ranks) == 2
    await job.finish()
    assert (job.row.replicas, job.row.state) == (1, "SUCCEEDED")


@pytest.mark.parametrize("state", ["QUEUED", "PAUSED", "PAUSING", "FAILED", "RESIZING", "STARTING", "RECOVERING"])
async def test_job_keeps_running_whatever_its_state_in_the_restored_database(job, cluster, state):
    await at_generation_two(job)
    given = orders(cluster)
    forget(job, 0 if state == "QUEUED" else 1, state)
    assert await job.catch_up()
    await job.own()
    await job.watched(2)
    assert orders(cluster) == given
    await job.commit(3)
    assert job.row.state == "RUNNING"
    await job.finish()
    assert job.row.state == "SUCCEEDED"


@pytest.mark.parametrize("state", ["SUCCEEDED", "CANCELLED"])
async def test_finished_job_of_an_older_database_stays_finished(job, state):
    await at_generation_two(job)
    forget(job, 1, state)
    assert not await job.catch_up()
    assert job.row.state == state


async def test_cancel_in_a_restored_database_is_carried_out(job, cluster):
    await at_generation_two(job)
    forget(job, 1, "CANCELLING")
    await job.own()
    await job.task
    assert job.row.state == "CANCELLED"
    assert cluster.nothing_held


async def test_job_without_agents_after_a_restore_waits_for_its_user(job, cluster):
    await at_generation_two(job)
    restore(job)
    await cluster.end_job(job.id, keep_snapshots=True)
    memory = {host: dict(files) for host, files in cluster.agents.memory.items()}
    await job.own()
    await job.task
    assert cluster.agents.memory == memory, "what it may go on from is kept"
    assert (job.row.state, job.row.reason) == ("PAUSED", "restored")
    job.store.write(lambda s: pauses_and_retries.request_resume(s, job.id))
    await job.train(3)
    await job.finish()
    assert job.row.state == "SUCCEEDED"


async def test_old_restore_does_not_pause_a_job(job, cluster):
    await job.train()
    restore(job)
    job.ranks[1].die()
    await job.watched(2)
    await job.die_with_control_plane()
    await cluster.end_job(job.id, keep_snapshots=True)
    await job.own()
    await job.finish(3, generation=3)
    assert job.row.state == "SUCCEEDED"


async def test_generation_after_a_restore_exceeds_those_that_left_checkpoints(job):
    job.store.write(lambda s: restored.know_generation(s, job.id, 7))
    await job.train(1)
    await job.finish()
    assert job.row.generation == 8


def described(generation, rank, sizes=(1, 1, 2)):
    return AgentDescription("host", "127.0.0.1", 1, generation=generation, rank=rank, sizes=sizes, trainer_pid=5)


def test_newest_gang_among_agents_is_the_one_adopted():
    about = {"a": described(3, 0), "b": described(3, 1), "c": described(2, 1), "d": described(0, None, ())}
    gang = newer_gang(2, about)
    assert (gang.generation, gang.tensor, gang.pipeline, gang.data) == (3, 1, 1, 2)
    assert {rank: agent["actor"] for rank, agent in gang.agents.items()} == {0: "a", 1: "b"}
    assert newer_gang(3, about) is None
    assert newer_gang(0, {}) is None
    assert newer_gang(0, {"a": described(0, None, ())}) is None
