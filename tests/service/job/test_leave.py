"""A job gives its places back before its last step, and goes on later: pauses, and the end of its time."""

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from manta.service.cluster.placement_groups import NotPlaced
from manta.service.job import leave
from manta.service.job.context import JobContext
from manta.service.job.inbox import LEAVE, Pause
from manta.service.job.supervisor import Supervisor
from manta.service.states import JobState
from manta.service.store import checkpoints, generations, jobs, pauses_and_retries
from manta.workers.checkpoint.catalog import Listing, checkpoint_path
from tests.service.support.fake_agents import FakeAgent
from tests.service.support.supervised_job import UP, save_checkpoint

PAUSED = ["PAUSING", "not_saved", "PAUSED"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(leave, "RETRY_SECONDS", 0.01)


@pytest.fixture
def job(two_replicas, cluster):
    """Its agents let their trainers save and end as soon as any of them is asked."""
    made = two_replicas(cluster)

    def all_save(agent):
        for each in list(cluster.agents.living.values()):
            if each.running:
                each.save_and_exit()

    cluster.agents.on_start = lambda agent: setattr(agent, "on_save", all_save)
    return made


async def test_paused_job_holds_only_its_snapshots_and_resumes_from_them(job, cluster):
    await job.train(1, 2)
    save_checkpoint(job, 2)
    job.pause()
    await job.task
    assert (job.row.state, job.row.reason) == ("PAUSED", "paused_by_user")
    assert job.row.message == f"paused by the user at step 2; manta resume {job.id} continues it"
    assert not cluster.agents.living and not cluster.groups.held
    assert job.rank_states == ["exited"] * 4
    assert all(cluster.agents.memory["one"].values())
    await job.resume()
    await job.finish(3, generation=2)
    assert job.log == [*UP, "PAUSING", "PAUSED", "QUEUED", *UP, "SUCCEEDED"]
    assert job.generations[1] == ("resumed by the user", "snapshot", 2)
    assert (job.row.restarts, job.recoveries) == (0, [])
    assert cluster.nothing_held


async def test_memory_that_is_lost_in_the_pause_is_made_up_for_by_the_checkpoint(job, cluster):
    await job.train(1, 2)
    save_checkpoint(job, 2)
    job.pause()
    await job.task
    cluster.agents.memory.clear()
    await job.resume()
    await job.finish(generation=2)
    assert job.generations[1] == ("resumed by the user", "checkpoint", 2)


async def test_pause_asks_one_agent_after_another_until_one_accepts(job, cluster):
    await job.train(1)
    for agent in job.ranks:
        agent.refuse("tell save_and_end", "cannot do that now")
    job.pause()
    await asyncio.sleep(0.05)
    assert job.row.state == "PAUSING"
    job.ranks[3]._refused.clear()
    await job.task
    assert [agent.asked_to_save for agent in cluster.agents.ended] == [[], [], [], [1]]
    assert job.row.state == "PAUSED"


async def test_pause_reports_steps_that_are_on_no_checkpoint(job):
    await job.train(1, 2)
    for step in (1, 2):
        save_checkpoint(job, step)
    await job.commit(3)
    job.pause()
    await job.task
    assert job.log == [*UP, *PAUSED]
    assert job.message("not_saved").startswith(
        "the state of step 3 is only in memory, and the newest checkpoint is of step 2"
    )


async def test_pause_and_resume_are_no_restart_despite_clock_differences(job):
    def shift(session):
        generations.of_job(session, job.id)[-1].started_at += 3600.0  # by a clock that is fast, or was set back since

    await job.train(1)
    job.pause()
    await job.task
    job.store.write(shift)
    await job.resume()
    await job.finish(generation=2)
    assert job.generations[1] == ("resumed by the user", "snapshot", 1)
    assert job.row.restarts == 0


async def test_pause_without_a_checkpoint_says_that_all_steps_may_be_lost(job):
    await job.train(1, 2)
    job.pause()
    await job.task
    assert job.message("not_saved") == (
        "the state of step 2 is only in memory, and there is no checkpoint: a step whose state is lost is repeated"
    )
    (event,) = [each for each in job.events if each.type == "not_saved"]
    assert (event.step, event.data) == (2, {"step": 2, "saved": None})


@pytest.mark.parametrize(
    ("saved", "newest", "again"),
    [
        (0, "there is no checkpoint", "steps 1 to 9 are"),
        (4, "the newest checkpoint is of step 4", "steps 5 to 9 are"),
        (8, "the newest checkpoint is of step 8", "step 9 is"),
    ],
)
def test_pause_without_snapshots_says_that_the_unsaved_state_is_lost(saved, newest, again):
    said = leave._not_saved(9, saved, has_snapshots=False)
    assert said == f"the state of step 9 is lost, as checkpoint.snapshots is off: {newest}, and {again} repeated"


async def test_pause_with_an_unreadable_checkpoint_folder_still_frees_the_places(job, cluster):
    await job.train(1)
    job.supervisor._job.folder_reader.list = AsyncMock(side_effect=OSError("Input/output error"))
    job.pause()
    await job.task
    assert job.log == [*UP, "PAUSING", "PAUSED"], "nothing is said of what is not known"
    assert not cluster.agents.living and not cluster.groups.held


async def test_pause_does_not_count_an_unfinished_checkpoint_as_saved(job):
    await job.train(1, 2)
    save_checkpoint(job, 1)
    path = checkpoint_path(job.cluster.paths.checkpoint_folder(job.id), 2, 1)
    job.store.write(lambda s: checkpoints.begin(s, job.id, 1, 2, str(path)))

    async def silent(folder, *_):
        return Listing(folder, problem="no answer")

    job.supervisor._job.folder_reader.list = silent
    job.pause()
    await job.task
    assert job.message("not_saved").endswith(
        "the newest checkpoint is of step 1: a step whose state is lost is repeated"
    )


@pytest.mark.parametrize("died", ["rank", "agent"])
async def test_pause_is_completed_after_recovering_a_rank_that_dies_meanwhile(job, cluster, died):
    await job.train(1)
    job.stop_saving()
    job.pause()
    await job.cluster.agents.until(lambda: all(agent.asked_to_save for agent in job.ranks))
    lost = job.ranks[1]
    if died == "rank":
        lost.die()
    else:
        lost.lose()
        del cluster.agents.living[lost.name]
    await cluster.agents.until(lambda: len(job.ranks[0].orders) == 2)
    for agent in job.ranks:
        agent.save_and_exit()
    await job.task
    assert job.log[:6] == [*UP, "PAUSING", "rank_lost"]
    assert job.log[-2:] == ["not_saved", "PAUSED"]
    assert (job.row.generation, job.row.restarts) == (2, 1)


async def test_pause_recovers_a_rank_lost_after_others_have_saved(job, cluster):
    await job.train(1)
    job.ranks[0].on_save = lambda agent: [each.save_and_exit() for each in job.ranks[:3]]
    for agent in job.ranks[1:]:
        agent.on_save = lambda agent: None
    job.pause()
    await cluster.agents.until(lambda: job.ranks[3].asked_to_save == [1])
    for agent in job.ranks:
        agent.on_save = lambda agent: [each.save_and_exit() for each in job.ranks if each.running]
    job.ranks[3].die()
    await job.task
    assert job.log[-1] == "PAUSED"
    assert job.row.generation == 2


async def test_job_that_has_no_step_to_save_is_paused_at_once(job, cluster):
    await job.store.write_async(job._place)
    await cluster.groups.acquire(job.id, 1, job.spec.layout, "manta_slot")
    job.store.write(lambda s: jobs.transition(s, job.id, JobState.PAUSING))
    job.supervise(1)
    await job.task
    assert job.log == ["STARTING", "PAUSING", "PAUSED"]
    assert not cluster.agents.ended, "none was started"
    assert cluster.nothing_held


async def test_pause_that_takes_too_long_to_save_leaves_with_its_snapshots(job, monkeypatch):
    monkeypatch.setattr(leave, "seconds_allowed", lambda needed: 0.1)
    await job.train(1, 2)
    job.stop_saving()
    job.pause()
    await job.task
    assert job.log == [*UP, *PAUSED]
    assert all(steps == [1, 2] for steps in job.cluster.agents.memory["one"].values())


async def test_pause_of_a_job_without_places_to_save_in_ends_at_once(job, cluster):
    await job.train(1)
    job.stop_saving()
    job.pause()
    await cluster.agents.until(lambda: all(agent.asked_to_save for agent in job.ranks))
    cluster.groups.refuse = Mock(side_effect=NotPlaced("there is no room"))
    for agent in list(job.ranks):
        agent.lose()
        del cluster.agents.living[agent.name]
    await job.task
    assert (job.row.state, job.row.reason, job.row.message) == ("PAUSED", "paused_by_user", "there is no room")
    assert job.log[-1] == "PAUSED"


async def test_last_step_that_is_committed_meanwhile_is_the_end(job, cluster):
    await job.train(1)
    job.stop_saving()
    job.pause()
    await cluster.agents.until(lambda: all(agent.asked_to_save for agent in job.ranks))
    await job.finish()
    assert job.log == [*UP, "PAUSING", "SUCCEEDED"]
    assert cluster.nothing_held


@pytest.mark.parametrize("when", ["saving", "leaving"])
async def test_cancel_of_a_job_that_is_pausing(job, cluster, monkeypatch, when):
    release = cluster.release

    async def cancelled_release(*arguments, **options):
        monkeypatch.setattr(cluster, "release", release)
        await release(*arguments, **options)
        job.cancel()

    await job.train(1)
    if when == "saving":
        job.stop_saving()
    else:
        monkeypatch.setattr(cluster, "release", cancelled_release)
    job.pause()
    if when == "saving":
        job.cancel()
    await job.task
    assert job.log[-2:] == ["CANCELLING", "CANCELLED"]
    assert cluster.nothing_held


@pytest.mark.parametrize("at", ["asked", "noted", "released"])
async def test_pause_is_continued_by_the_next_control_plane(job, cluster, monkeypatch, at):
    await job.train(1)
    if at == "asked":
        job.stop_saving()
    held, release = asyncio.Event(), cluster.release

    async def stuck(*arguments, **options):
        if at == "released":
            await release(*arguments, **options)
        held.set()
        await asyncio.Event().wait()

    if at != "asked":
        monkeypatch.setattr(cluster, "release", stuck)
    job.pause()
    await (held.wait() if at != "asked" else cluster.agents.until(lambda: bool(job.ranks[0].asked_to_save)))
    await job.die_with_control_plane()
    monkeypatch.setattr(cluster, "release", release)
    if at == "asked":
        for agent in cluster.agents.living.values():
            agent.save_and_exit()
    job.supervise(None)
    await job.task
    assert job.row.state == "PAUSED"
    await job.resume()
    await job.finish(generation=2)
    assert [kind for kind in job.log if kind in ("PAUSING", "PAUSED")] == ["PAUSING", "PAUSED"]
    assert job.generations[1] == ("resumed by the user", "snapshot", 1)
    assert job.row.restarts == 0
    assert cluster.nothing_held


async def test_pause_abandons_a_prepared_resize(two_replicas, cluster):
    job = two_replicas(cluster, elastic={"min_data": 1, "max_data": 3})
    starting = asyncio.Event()

    def start_silent(agent):
        async def prepare(order):
            starting.set()
            await asyncio.Event().wait()

        agent.prepare = prepare

    await job.train(1)
    for agent in job.ranks:
        agent.on_save = FakeAgent.save_and_exit
    cluster.agents.on_start = start_silent
    job.resize(3)
    await starting.wait()
    job.pause()
    await job.task
    assert job.log[-1] == "PAUSED"
    assert not cluster.agents.living and not cluster.groups.held


async def test_time_that_is_up_ends_the_job_with_its_state_and_a_retry_has_as_long_again(two_replicas, cluster):
    job = two_replicas(cluster, max_duration=1000.0)

    def make_older(session):
        for change in jobs.states_over_time(session, job.id):
            change.time -= 1000.0

    await job.train(1, 2)
    save_checkpoint(job, 2)
    await job.die_with_control_plane()
    for agent in cluster.agents.living.values():
        agent.on_save = FakeAgent.save_and_exit
    job.store.write(make_older)
    job.supervise(None)
    await job.task
    assert not cluster.agents.living and all(cluster.agents.memory["one"].values())
    job.store.write(lambda s: pauses_and_retries.request_retry(s, job.id))
    await job.train()
    await job.finish()
    assert job.log[:7] == [*UP, "adopted", "FAILED", "memory_kept"]
    (said,) = [event.message for event in job.events if event.data and event.data.get("reason") == "max_duration"]
    assert said.endswith(f"ran for the 1000 s that max_duration allows; manta retry {job.id} allows as long again")
    assert job.generations[1] == ("retried by the user", "snapshot", 2)
    assert job.row.state == "SUCCEEDED"


async def test_job_whose_time_is_up_before_its_launch_launches_nothing(two_replicas, cluster, monkeypatch):
    job = two_replicas(cluster, max_duration=0.0001)
    start = cluster.agents.start

    async def start_when_time_is_up(*arguments):
        await job.inbox.wait(*LEAVE)
        return await start(*arguments)

    monkeypatch.setattr(cluster.agents, "start", start_when_time_is_up)
    await job.start()
    await job.task
    assert (job.row.state, job.row.reason) == ("FAILED", "max_duration")
    assert cluster.nothing_held


def test_supervisor_remembers_a_pause_requested_before_it_runs(store, submit, cluster):
    supervisor = Supervisor(JobContext.of(store, cluster, submit()))
    supervisor.tell(Pause())
    assert supervisor._job.inbox.has(*LEAVE)
