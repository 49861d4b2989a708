"""From which state a generation goes on: memory of processes, shared memory here and elsewhere, checkpoints."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from storage_away import away

from manta.service.cluster.agent_client import AgentError
from manta.service.cluster.sizes import resized, shapes_of
from manta.service.job import resume
from manta.service.job.context import LISTING_SECONDS, JobContext
from manta.service.job.gang import AgentSet
from manta.service.job.resume import known_checkpoints, newest_state
from manta.service.recovery.durable_state import CheckpointsUnreadable
from manta.service.store import checkpoints, generations
from manta.workers.checkpoint.catalog import MANIFEST, Manifest, checkpoint_path, seal
from manta.workers.config import ElasticConfig
from manta.workers.protocol.messages import Resume
from manta.workers.snapshot.files import layout_tag
from tests.service.support.fake_agents import FakeAgent
from tests.service.support.fake_cluster import FakeCluster


@pytest.fixture
def cluster(tmp_path):
    return FakeCluster(tmp_path, one=1, two=1, three=1)


@pytest.fixture
def job(store, submit, cluster):
    """A job of two ranks with the same state, one on each of two nodes; its first generation has ended."""
    context = JobContext.of(store, cluster, submit(parallel={"data": 2, "zero": 0}, elastic={"min_data": 1}))
    asyncio.run(context.gang.place(1, context.submitted, ()))
    store.write(lambda s: generations.begin(s, context.id, "test", False))
    for agent in context.gang.agents:
        agent.layout = context.gang.tag
    return context


def hold(job, *steps):
    """What is in each rank's own shared memory."""
    for agent, own in zip(job.gang.agents, steps, strict=True):
        agent.steps = own


def saved(job, step, generation=1):
    """A durable checkpoint of `step`; its folder."""
    path = checkpoint_path(job.checkpoint_folder, step, generation)
    path.mkdir(parents=True)
    seal(path, Manifest(job.id, generation, step, {}, {}))
    return str(path)


def completed(job, step):
    """A durable checkpoint of `step` of which the database knows; its folder."""
    path = saved(job, step)
    row = job.record.store.write(lambda s: checkpoints.begin(s, job.id, 1, step, path).id)
    job.record.store.write(lambda s: checkpoints.complete(s, row, 0))
    return path


def resume_of(job, last_kind=None, last_step=None):
    start = asyncio.run(newest_state(job, last_kind, last_step))
    return start.resume, start.source


def test_resume_without_any_state_begins_at_the_start(job):
    assert resume_of(job) == (Resume(), "start")


@pytest.mark.parametrize(
    ("held", "resting", "step", "source", "fetches"),
    [
        (([3, 4], [2, 3]), {}, 3, "snapshot", False),
        (([3, 4], [2, 3]), {1: 4}, 4, "memory and snapshot", False),
        (([3], [3]), {1: None}, 3, "snapshot", False),
        (([3], []), {0: 4, 1: 4}, 4, "memory and snapshot", True),  # what was fetched is older
    ],
)
def test_resume_uses_the_newest_step_in_snapshots_and_resting_processes(job, held, resting, step, source, fetches):
    hold(job, *held)
    job.gang.resting_steps = resting
    assert resume_of(job) == (Resume("snapshot", step), source)
    assert [bool(agent.fetched) for agent in job.gang.agents] == [False, fetches]


def test_resume_ignores_a_checkpoint_of_another_job_in_the_folder(job):
    saved(job, 4)
    path = checkpoint_path(job.checkpoint_folder, 9, 2)
    path.mkdir()
    seal(path, Manifest("job_of_others", 2, 9, {}, {}))
    assert resume_of(job)[0].step == 4


@pytest.mark.parametrize(
    ("at_rest", "has_launched", "complete", "waits"),
    [
        (3, False, 3, resume.IN_MEMORY_SECONDS),
        (None, True, 3, resume.IN_MEMORY_SECONDS),
        (None, False, 3, LISTING_SECONDS),
        (3, True, 4, LISTING_SECONDS),
    ],
)
def test_resume_waits_for_the_checkpoint_folder_only_if_it_is_needed(
    job, monkeypatch, at_rest, has_launched, complete, waits
):
    """One that does not answer may hold something newer where the database may be a backup: it does not say what rests,
    nor was it written here."""
    job.record.has_begun = has_launched
    completed(job, complete)
    hold(job, [3], [3])
    job.gang.resting_steps = {1: at_rest}
    asked, listed = [], job.folder_reader.list

    async def listing(folder, seconds, owner):
        asked.append(seconds)
        return await listed(folder, job=owner)

    monkeypatch.setattr(job.folder_reader, "list", listing)
    resume_of(job)
    assert asked == [waits]


@pytest.mark.parametrize(("step", "source"), [(4, "checkpoint"), (3, "snapshot"), (2, "snapshot")])
def test_resume_uses_a_checkpoint_only_if_it_is_newer_than_memory(job, step, source):
    saved(job, 1)
    newest = saved(job, step)
    hold(job, [3], [3])
    expected = Resume("checkpoint", step, newest) if source == "checkpoint" else Resume("snapshot", 3)
    assert resume_of(job) == (expected, source)


def test_resume_after_ranks_differ_twice_uses_a_checkpoint(job, store):
    path = saved(job, 2)
    hold(job, [3], [3])
    store.write(lambda s: generations.begin(s, job.id, "test", True, data={"failure": {"kind": "corrupt", "step": 4}}))
    assert resume_of(job, "corrupt", 5) == (Resume("snapshot", 3), "snapshot")
    assert resume_of(job, "corrupt", 4) == (Resume("checkpoint", 2, path), "checkpoint")


def test_resume_after_ranks_differ_twice_without_a_checkpoint_begins_anew(job, store):
    hold(job, [3], [3])
    store.write(lambda s: generations.begin(s, job.id, "test", True, data={"failure": {"kind": "corrupt", "step": 4}}))
    assert resume_of(job, "corrupt", 4) == (Resume(), "start")


def test_generation_with_a_checkpoint_that_the_database_forgot_is_not_used_again(job):
    path = saved(job, 4, generation=7)
    assert resume_of(job) == (Resume("checkpoint", 4, path), "checkpoint")
    assert asyncio.run(job.record.job()).generation == 7, "the next one is above it"


def test_job_generation_continues_from_the_newest_that_left_a_checkpoint(job):
    saved(job, 2, generation=7)
    saved(job, 4, generation=5)
    asyncio.run(known_checkpoints(job))
    assert asyncio.run(job.record.job()).generation == 7


@pytest.mark.parametrize(
    ("taken", "from_memory", "said"),
    [
        (set(), False, "snapshot"),
        ({"snapshot", "peer"}, False, "peer"),
        ({"snapshot", "peer", "replica"}, False, "replica"),
        ({"snapshot"}, True, "memory and snapshot"),
    ],
)
def test_resume_source_names_the_farthest_one_any_rank_needed(taken, from_memory, said):
    assert resume._source(Resume("snapshot", 3), taken, from_memory) == said
    assert resume._source(Resume("checkpoint", 3, "path"), taken, from_memory) == "checkpoint"


def test_resume_brings_checkpoint_rows_in_line_with_the_folder(job, store):
    paths = [saved(job, 2), str(checkpoint_path(job.checkpoint_folder, 1, 1))]
    for step, path in zip((2, 1), paths, strict=True):
        row = store.write(lambda s, step=step, path=path: checkpoints.begin(s, job.id, 1, step, path).id)
        store.write(lambda s, row=row: checkpoints.complete(s, row, 100))
    resume_of(job)
    with store.read() as session:
        assert [row.path for row in checkpoints.complete_ones(session, job.id)] == paths[:1]


def test_resume_fetches_lost_snapshots_from_a_peer(job):
    hold(job, [2, 3], [])
    assert resume_of(job) == (Resume("snapshot", 3), "peer")
    assert job.gang.agents[1].fetched == [(1, job.gang.tag, 0)]


def test_snapshots_of_a_departing_agent_are_fetched_from_its_node(job, cluster):
    cluster.agents.memory["three"] = {(job.id, job.gang.tag, rank): [5] for rank in (0, 1)}
    (holder,) = asyncio.run(cluster.agents.start_snapshot_holders(job.id, ["three"]))
    assert resume_of(job) == (Resume(), "start"), "nobody asks it"
    job.gang.departing.append(AgentSet([holder]))
    assert resume_of(job) == (Resume("snapshot", 5), "snapshot")


def test_newer_state_on_the_node_that_was_left_is_brought_in_the_place_of_older_files(job, cluster):
    hold(job, [3], [3])
    cluster.agents.memory["three"] = {(job.id, job.gang.tag, rank): [5] for rank in (0, 1)}
    job.gang.departing.append(AgentSet(asyncio.run(cluster.agents.start_snapshot_holders(job.id, ["three"]))))
    assert resume_of(job) == (Resume("snapshot", 5), "snapshot")


@pytest.mark.parametrize("trouble", [FakeAgent.silence, FakeAgent.lose, lambda it: it.refuse("snapshot_files", "no")])
def test_resume_does_without_a_departing_agent_that_does_not_list_snapshots(job, cluster, monkeypatch, trouble):
    monkeypatch.setattr(resume, "DEPARTING_SECONDS", 0.001)
    (holder,) = asyncio.run(cluster.agents.start_snapshot_holders(job.id, ["three"]))
    trouble(holder)
    job.gang.departing.append(AgentSet([holder]))
    hold(job, [2], [2])
    assert resume_of(job) == (Resume("snapshot", 2), "snapshot")


def test_resume_uses_a_state_left_by_another_number_of_replicas(job, cluster):
    alone = job.submitted.model_copy(update={"parallel": job.submitted.parallel.model_copy(update={"data": 1})})
    cluster.agents.memory["one"] = {(job.id, layout_tag(alone.layout), 0): [6]}
    start, source = resume_of(job)
    assert (start.source, start.step, source) == ("memory", 6, "memory")
    assert len(start.paths) == 1
    assert 6 in cluster.agents.memory["two"].popitem()[1], "it is on every node of the gang"


def test_resume_examines_only_layouts_that_left_snapshots(job, cluster, monkeypatch):
    looked, groups = [], resume.state_groups
    monkeypatch.setattr(resume, "state_groups", lambda layout: looked.append(layout.data) or groups(layout))
    elastic = {"elastic": ElasticConfig(min_data=1, max_data=64)}
    job = replace(job, submitted=job.submitted.model_copy(update=elastic))
    alone = job.submitted.model_copy(update={"parallel": job.submitted.parallel.model_copy(update={"data": 1})})
    cluster.agents.memory["one"] = {(job.id, layout_tag(alone.layout), 0): [6]}
    assert resume_of(job)[0].source == "memory"
    assert looked == [1]


def test_resume_does_not_retry_a_state_that_could_not_be_read(job):
    newest = saved(job, 5)
    older = saved(job, 4)
    job.record.store.write(
        lambda s: generations.begin(s, job.id, "test", False, "checkpoint", 5, {"resume_path": newest})
    )
    assert resume_of(job) == (Resume("checkpoint", 5, newest), "checkpoint")
    assert resume_of(job, "bad_checkpoint") == (Resume("checkpoint", 4, older), "checkpoint")


def test_newest_checkpoint_that_cannot_be_read_is_not_gone_back_behind(job):
    older, newest = completed(job, 4), completed(job, 5)
    with away(Path(newest, MANIFEST)):
        with pytest.raises(CheckpointsUnreadable, match=r"of step 5, which cannot be read now: .*Input/output error"):
            resume_of(job)
        hold(job, [4], [4])
        with pytest.raises(CheckpointsUnreadable, match="continue from an older checkpoint instead, delete its folder"):
            resume_of(job)
        hold(job, [5], [5])
        assert resume_of(job) == (Resume("snapshot", 5), "snapshot"), "what is in memory is as new"
    hold(job, [], [])
    assert resume_of(job) == (Resume("checkpoint", 5, newest), "checkpoint")
    with away(Path(older, MANIFEST)):
        assert resume_of(job) == (Resume("checkpoint", 5, newest), "checkpoint"), "nobody needs the older one"


def test_resume_does_not_wait_for_a_damaged_checkpoint(job):
    older, newest = completed(job, 4), completed(job, 5)
    job.record.store.write(
        lambda s: generations.begin(s, job.id, "test", False, "checkpoint", 5, {"resume_path": newest})
    )
    with away(Path(newest, MANIFEST)):
        with pytest.raises(CheckpointsUnreadable):
            resume_of(job)
        assert resume_of(job, "bad_checkpoint") == (Resume("checkpoint", 4, older), "checkpoint")
    assert resume_of(job, "unreadable_checkpoint") == (Resume("checkpoint", 5, newest), "checkpoint"), (
        "it can be read now"
    )


def test_folder_that_is_gone_though_checkpoints_are_complete_is_waited_for(job):
    completed(job, 5)
    job.checkpoint_folder.rename(job.checkpoint_folder.parent / "elsewhere")
    for _ in range(2):
        with pytest.raises(CheckpointsUnreadable, match=f"the folder {job.checkpoint_folder} "):
            resume_of(job)
        job.checkpoint_folder.mkdir(exist_ok=True)


def test_resume_waits_for_silent_agents_and_fails_for_lost_ones(job, monkeypatch):
    job.gang.agents[1].silence()
    with monkeypatch.context() as patch, pytest.raises(TimeoutError):
        patch.setattr(resume, "MEMORY_SECONDS", 0.01)
        resume_of(job)
    job.gang.agents[1].lose()
    with pytest.raises(AgentError):
        resume_of(job)


def test_resume_uses_a_state_left_by_another_shape(store, cluster, submit):
    cluster.nodes.slots["one"] = 2
    job = JobContext.of(store, cluster, submit(parallel={"tensor": 2}, elastic={"reshape": True}))
    asyncio.run(job.gang.place(1, job.submitted, ()))
    store.write(lambda s: generations.begin(s, job.id, "test", False))
    for agent in job.gang.agents:
        agent.layout = job.gang.tag
    alone = shapes_of(job.submitted)[-1]
    assert alone.layout.tensor == 1
    cluster.agents.memory["two"] = {(job.id, layout_tag(alone.layout), 0): [6]}
    assert resume_of(job) == (Resume(), "start"), "nobody asks that node"
    job.gang.departing.append(AgentSet(asyncio.run(cluster.agents.start_snapshot_holders(job.id, ["two"]))))
    start, source = resume_of(job)
    assert (start.source, start.step, source) == ("memory", 6, "memory")


def test_resume_asks_only_about_layouts_that_left_snapshots(store, cluster, make_spec, submit, monkeypatch):
    sizes = {"parallel": {"tensor": 2, "data": 64}, "elastic": {"min_data": 1, "reshape": True}}
    sizes["train"] = {"steps": 10, "global_batch_size": 64, "micro_batch_size": 1}
    every = {
        layout_tag(resized(shape, size).layout): resized(shape, size).layout
        for shape in shapes_of(make_spec(**sizes))
        for size in range(1, 65)
    }
    looked, groups = [], resume.state_groups
    monkeypatch.setattr(resume, "state_groups", lambda layout: looked.append(layout) or groups(layout))
    cluster.nodes.slots["one"] = 128
    job = JobContext.of(store, cluster, submit(**sizes))
    asyncio.run(job.gang.place(1, job.submitted, ()))
    assert resume_of(job) == (Resume(), "start")
    store.write(lambda s: generations.begin(s, job.id, "test", False))
    tag, layout = next((tag, layout) for tag, layout in every.items() if (layout.tensor, layout.data) == (1, 2))
    for rank in range(2):
        cluster.agents.memory["one"][job.id, tag, rank] = [6]
    (start, source) = resume_of(job)
    assert (start.source, start.step, source) == ("memory", 6, "memory")
    assert looked == [layout]


def test_resume_of_a_job_that_never_began_asks_about_no_other_layouts(store, cluster, submit):
    job = JobContext.of(store, cluster, submit(parallel={"data": 2, "zero": 0}, elastic={"min_data": 1}))
    asyncio.run(job.gang.place(1, job.submitted, ()))
    for agent in job.gang.agents:
        agent.refuse("snapshot_files", "nobody may ask")
    assert resume_of(job) == (Resume(), "start")
