"""What jobs have left on the nodes is removed, and nothing that somebody may still need."""

import asyncio
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from sqlalchemy import text, update

from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.placement import agent_name, job_of
from manta.service.control import housekeeping, removal
from manta.service.job.inbox import Cancel, Pause
from manta.service.leases.decisions import HOUSEKEEPING
from manta.service.states import JobState
from manta.service.store import checkpoints, jobs, pauses_and_retries
from manta.service.store.installation_tables import Lease
from tests.service.support.control_planes import (
    behave,
    finish,
    hold,
    left_running,
    log,
    train_to_the_end,
    until,
)
from tests.service.support.waiting import reached


def test_leftovers_of_finished_jobs_are_released_at_the_start(start, cluster, submit, store):
    over, waiting = submit(), submit(parallel={"tensor": 2, "data": 4})
    hold(cluster, over)
    finish(store, over)
    daemon = cluster.daemons._daemon("node_b")
    daemon.left = [over.id, waiting.id]
    plane = start()

    def gone():
        return over.id not in {agent.job for agent in cluster.agents.living.values()}

    plane._call(reached(lambda: daemon.left == [waiting.id] and gone()))
    assert over.id not in {job_of(name) for name in cluster.groups.held}


def test_agents_of_a_paused_job_are_released_but_its_snapshots_kept(start, cluster, submit, store):
    job = submit()
    hold(cluster, job)
    store.write(lambda session: pauses_and_retries.request_pause(session, job.id))
    (agent,) = cluster.agents.living.values()
    agent.layout, agent.steps = "layout", [3]
    start()._call(reached(lambda: not cluster.agents.living and not cluster.groups.held))
    assert agent.memory == {(job.id, "layout", 0): [3]}


@pytest.mark.parametrize("state", ["QUEUED", "PAUSED", "RUNNING"])
def test_job_that_runs_though_a_restored_database_does_not_say_so_runs_on(start, cluster, submit, store, state):
    job, agents = left_running(start, cluster, submit)

    def forget(session):
        row = jobs.get(session, job.id)
        row.generation, row.report_cursor, row.state = 0, {}, state
        session.execute(text("DELETE FROM generations"))
        session.execute(text("DELETE FROM ranks"))

    store.write(forget)
    second = start()

    async def train_on():
        await reached(lambda: job.id in second._owners.by_job)
        agents[0].commit(2)

    second._call(train_on())
    second._call(reached(lambda: second.store.query(jobs.get, job.id).step == 2))
    assert until(second, job, "RUNNING").generation == 1
    assert list(cluster.agents.living.values()) == agents
    assert [len(agent.orders) for agent in agents] == [1, 1]
    assert "database_older" in log(store, job)


def test_job_unknown_to_the_database_is_left_running_and_reported(start, cluster, submit, store, caplog):
    unknown = submit()
    hold(cluster, unknown)
    daemon = cluster.daemons._daemon("node_b")
    daemon.left = [unknown.id]
    store.write(lambda s: s.delete(jobs.get(s, unknown.id)))  # restored from a backup that is older than the job
    plane = start()
    behave(cluster, train_to_the_end)
    other = submit()
    plane.submitted(other.id)
    until(plane, other, "SUCCEEDED")
    assert [agent.name for agent in cluster.agents.living.values()] == [agent_name(unknown.id, 1, 0)]
    assert daemon.left == [unknown.id]
    assert f"{unknown.id} are there, but the database does not know that job" in caplog.text


@pytest.mark.parametrize("is_remote", [False, True])
def test_agents_of_an_unknown_job_are_reported_on_our_own_ray_only(start, cluster, caplog, is_remote):
    """In a Ray of others, other installations are none of our business."""
    plane = start()
    cluster.agents.elsewhere, cluster.is_remote = ["job_of_before"], is_remote
    plane._call(plane._housekeeping._release_unowned_jobs(None))
    assert ("agents of job_of_before are in the Ray of this home" in caplog.text) != is_remote


def test_snapshots_of_a_job_cancelled_while_paused_are_removed(start, cluster, submit, store):
    plane = start()
    job = submit()
    store.write(lambda s: pauses_and_retries.request_pause(s, job.id))
    plane.tell(job.id, Pause())
    cluster.agents.memory["node_a"] = {(job.id, "layout", 0): [3]}
    store.write(lambda s: jobs.request_cancel(s, job.id))
    plane.tell(job.id, Cancel())
    plane._call(reached(lambda: cluster.nothing_held))


def test_snapshots_of_a_job_cancelled_in_the_queue_are_removed(start, cluster, submit, store):
    plane = start()
    plane._call(reached(lambda: len(cluster.peak_flops) == 2))  # all nodes are swept by then
    job = submit(parallel={"tensor": 2, "data": 2})
    cluster.agents.memory["node_a"] = {(job.id, "layout", 0): [3]}
    store.write(lambda s: jobs.request_cancel(s, job.id))
    plane.tell(job.id, Cancel())

    async def idle():
        await reached(lambda: not plane._background_tasks.running)

    plane._call(idle())
    assert cluster.daemons._daemon("node_a").ended_jobs == [job.id]
    assert cluster.nothing_held


def test_expired_job_is_deleted_with_all_it_holds_if_configured(start, cluster, submit, store, monkeypatch):
    monkeypatch.setattr(removal, "CONFIRMED_SECONDS", 0.0)
    old, young, let_go_of = submit(), submit(), []
    for job in (old, young):
        finish(store, job)
    release_job = housekeeping.Housekeeping.release_job

    async def noted(self, job_id):
        await release_job(self, job_id)
        let_go_of.append((job_id, cluster.daemons._daemon("node_a").ended_jobs[-1]))

    monkeypatch.setattr(housekeeping.Housekeeping, "release_job", noted)

    def age(session):
        jobs.get(session, old.id).finished_at -= 31 * removal.DAY_SECONDS

    store.write(age)
    plane = start(retention_days=30)

    def known():
        return set(store.query(jobs.states, [old.id, young.id]))

    plane._call(reached(lambda: known() == {young.id}))
    assert let_go_of == [(old.id, old.id)]


def failed_with_snapshots(submit, store, until):
    """A job that has failed, and whose snapshots are kept `until` then."""
    job = submit()
    store.write(lambda s: jobs.transition(s, job.id, JobState.FAILED))
    store.write(lambda s: setattr(jobs.get(s, job.id), "memory_kept_until", until))
    return job


def test_snapshots_of_a_failed_job_outlive_the_control_plane_but_not_their_time(
    start, cluster, submit, store, monkeypatch
):
    monkeypatch.setattr(housekeeping, "MEMORY_SECONDS", 0.001)
    monkeypatch.setattr(housekeeping, "MEMORY_CONFIRMED_SECONDS", 0.0)
    job = failed_with_snapshots(submit, store, time.time() + 1000)
    daemon = cluster.daemons._daemon("node_a")
    daemon.left = [job.id]
    plane = start()
    plane._call(reached(lambda: "node_a" in cluster.peak_flops))  # which is asked for after the sweep
    assert (daemon.left, daemon.ended_jobs) == ([job.id], [])
    store.write(lambda s: setattr(jobs.get(s, job.id), "memory_kept_until", time.time() - 1))

    plane._call(reached(lambda: daemon.ended_jobs == [job.id]))
    assert plane.store.query(jobs.get, job.id).memory_kept_until is None


def test_clock_that_is_set_forward_takes_no_snapshots_of_a_failed_job(start, cluster, submit, store, monkeypatch):
    """They may be the only copy of its state, and a clock that was wrong at the start is soon put right."""
    monkeypatch.setattr(housekeeping, "MEMORY_SECONDS", 0.001)
    looks = []

    def in_a_week():
        looks.append(time.time() + 7 * 86400.0)
        return looks[-1]

    monkeypatch.setattr(housekeeping, "time", SimpleNamespace(time=in_a_week, monotonic=time.monotonic))
    until = time.time() + 86400.0
    job = failed_with_snapshots(submit, store, until)
    plane = start()
    plane._call(reached(lambda: len(looks) > 20))
    assert plane.store.query(jobs.get, job.id).memory_kept_until == until


def test_snapshots_that_expired_during_a_ray_outage_are_removed_afterwards(start, cluster, submit, store, monkeypatch):
    monkeypatch.setattr(housekeeping, "MEMORY_SECONDS", 0.001)
    monkeypatch.setattr(housekeeping, "MEMORY_CONFIRMED_SECONDS", 0.0)
    job = submit()
    store.write(lambda s: jobs.transition(s, job.id, JobState.FAILED))
    daemon, names, end_job, tried = cluster.daemons._daemon("node_a"), cluster.agents.names, cluster.end_job, []

    async def away():
        raise ClusterUnavailable(TimeoutError("Ray gave no answer"))

    async def ending(job_id):
        try:
            await end_job(job_id)
        finally:
            tried.append(job_id)

    plane = start()
    plane._call(reached(lambda: "node_a" in cluster.peak_flops))
    daemon.left, cluster.agents.names, cluster.end_job = [job.id], away, ending
    store.write(lambda s: setattr(jobs.get(s, job.id), "memory_kept_until", time.time() - 1))
    plane._call(reached(lambda: tried))
    cluster.agents.names = names
    plane._call(reached(lambda: daemon.ended_jobs == [job.id]))


async def test_expired_snapshots_are_looked_for_again_after_a_failure(kept, submit, store, cluster, monkeypatch):
    monkeypatch.setattr(housekeeping, "MEMORY_SECONDS", 0.001)
    keeping = kept(True, True)
    looked, failures = asyncio.Event(), [RuntimeError("the database is away")] * 2

    async def look(_query):
        if failures:
            raise failures.pop()
        looked.set()
        return []

    monkeypatch.setattr(keeping._store, "read_async", look)
    task = asyncio.create_task(keeping._remove_expired_snapshots())
    await asyncio.wait_for(looked.wait(), 20)
    task.cancel()


def test_leftovers_are_released_once_ray_answers(kept, monkeypatch):
    monkeypatch.setattr(housekeeping, "RETRY_SECONDS", 0.001)
    keeping, tries, placing = kept(True, True), [], SimpleNamespace(wake=lambda: None)

    async def release(of):
        tries.append(looked.is_set())
        if len(tries) < 3:
            raise ClusterUnavailable(TimeoutError("no answer"))
        return set()

    monkeypatch.setattr(keeping, "_release_unowned_jobs", release)
    looked = asyncio.Event()
    asyncio.run(asyncio.wait_for(keeping._release_leftovers(placing, looked), 20))
    assert tries == [False] * 3 and looked.is_set()


def test_job_of_which_something_cannot_be_released_keeps_no_other_one_waiting(
    start, cluster, submit, store, monkeypatch
):
    monkeypatch.setattr(housekeeping, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(housekeeping, "MAX_RETRY_SECONDS", 0.001)
    stuck, over, release, released = submit(), submit(), cluster.release, asyncio.Event()
    for job in (stuck, over):
        hold(cluster, job)
    finish(store, over)

    async def refuse(job_id, keep_snapshots=False):
        if job_id == stuck.id and not released.is_set():
            raise RuntimeError("an agent says what nobody understands")
        await release(job_id, keep_snapshots)

    monkeypatch.setattr(cluster, "release", refuse)
    behave(cluster, train_to_the_end)
    plane, other = start(), submit()
    plane.submitted(other.id)
    until(plane, other, "SUCCEEDED")
    waiting = plane.store.query(jobs.get, stuck.id)
    assert (waiting.state, waiting.reason) == ("QUEUED", "not_released")
    assert {agent.job for agent in cluster.agents.living.values()} == {stuck.id}

    async def lower_priority():
        released.set()

    plane._call(lower_priority())
    until(plane, stuck, "SUCCEEDED")
    assert plane.store.query(jobs.get, stuck.id).generation == 1


async def test_housekeeping_restarts_after_a_failure(kept, monkeypatch):
    monkeypatch.setattr(housekeeping, "CLAIM_SECONDS", 0.001)
    keeping, tries, again = kept(True, True), [], asyncio.Event()

    async def claim(name):
        tries.append(name)
        if len(tries) == 1:
            raise RuntimeError("the database is away")
        return "lease"

    async def keep(lease, care):
        assert (lease, care) == ("lease", "care")
        if len(tries) == 2:
            raise RuntimeError("a defect")
        again.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(keeping._leases, "claim", claim, raising=False)
    monkeypatch.setattr(keeping._leases, "drop", lambda lease: None, raising=False)
    monkeypatch.setattr(keeping, "_keep", keep)
    running = asyncio.create_task(keeping.run("care"))
    await asyncio.wait_for(again.wait(), 20)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(asyncio.all_tasks()) == 1, "what was done is ended too"
    assert tries == [HOUSEKEEPING] * 3


def test_scheduler_resumes_after_another_process_held_its_lease(start, cluster, submit, store, monkeypatch):
    monkeypatch.setattr(housekeeping, "CLAIM_SECONDS", 0.001)
    behave(cluster, train_to_the_end)
    plane = start()
    until(plane, submit(), "SUCCEEDED")
    store.write(lambda s: s.execute(update(Lease).values(owner=None, epoch=Lease.epoch + 1)))
    until(plane, submit(), "SUCCEEDED")


def test_deletion_lets_the_snapshots_of_a_failed_job_go(start, cluster, submit, store):
    job = failed_with_snapshots(submit, store, time.time() + 1000)
    daemon = cluster.daemons._daemon("node_a")
    daemon.left = [job.id]
    plane = start()
    plane._call(reached(lambda: "node_a" in cluster.peak_flops))
    assert daemon.left == [job.id], "kept for a retry until then"
    plane.delete(job.id)
    assert daemon.left == []


def test_leftovers_of_a_deleted_job_are_removed_when_its_node_returns(start, cluster, submit, store):
    """What belongs to a job that the database never knew would be left alone."""
    first, second = submit(), submit()
    for job in (first, second):
        store.write(lambda s, job=job: jobs.request_cancel(s, job.id))
    plane = start()
    for job in (first, second):
        plane.delete(job.id)
    plane.stop()
    hold(cluster, first)
    daemon = cluster.daemons._daemon("node_b")
    daemon.left = [second.id, "job_000000000000"]
    plane = start()
    plane._call(reached(lambda: daemon.left == ["job_000000000000"] and not cluster.agents.living))
    assert cluster.groups.held == {}


@pytest.fixture
def kept(store, cluster):
    """Housekeeping of a control plane that is alone or not, and holds its lease or not."""

    def make(alone, done_here):
        held = SimpleNamespace(alone=alone, of=lambda name: "held" if done_here and name == HOUSEKEEPING else None)
        return housekeeping.Housekeeping(store, cluster, held, lambda job, generation: None)

    return make


@pytest.mark.parametrize(("alone", "done_here"), [(True, False), (False, True), (False, False)])
def test_housekeeping_reports_finished_jobs_only_if_alone_or_in_charge(kept, submit, store, alone, done_here):
    over, waiting = submit(), submit()
    finish(store, over)
    said = asyncio.run(kept(alone, done_here).over([over.id, waiting.id, "job_unknown"]))
    assert said == ({over.id} if alone or done_here else set())


@pytest.mark.parametrize(("alone", "unswept"), [(True, set()), (False, {"node_a", "node_b"})])
def test_housekeeping_sweeps_all_nodes_after_a_takeover(kept, cluster, alone, unswept):
    asyncio.run(kept(alone, True)._have_nodes_swept())
    assert cluster.nodes.unswept == unswept


def test_sweep_of_nodes_is_postponed_if_they_cannot_be_listed(kept, cluster, monkeypatch):
    monkeypatch.setattr(cluster.nodes, "living", AsyncMock(side_effect=ClusterUnavailable(TimeoutError("no answer"))))
    asyncio.run(kept(False, True)._have_nodes_swept())
    assert cluster.nodes.unswept == set()


@pytest.mark.parametrize(("done_here", "stopped"), [(True, False), (False, True)])
async def test_housekeeping_stops_when_another_control_plane_has_it(kept, done_here, stopped):
    keeping = kept(False, done_here)
    keeping.stop_if_lost()  # nothing is done yet
    work = keeping._work = asyncio.create_task(asyncio.Event().wait())
    keeping.stop_if_lost()
    await asyncio.wait({work}, timeout=0.01)
    assert work.cancelled() == stopped
    work.cancel()


@pytest.mark.parametrize(
    ("state", "saved", "needed"),
    [
        ("PAUSED", 5, False), ("PAUSED", 3, True), ("QUEUED", 5, False), ("QUEUED", None, True),
        ("RUNNING", None, False), ("RECOVERING", None, True), ("SUCCEEDED", None, False),
    ],
)  # fmt: skip
def test_memory_of_a_node_without_ranks_is_needed_while_nothing_else_has_the_state(store, submit, state, saved, needed):
    job = submit()

    def write(session):
        row = jobs.get(session, job.id)
        row.state, row.step = state, 5
        if saved is not None:
            checkpoints.complete(session, checkpoints.begin(session, job.id, 1, saved, "/c").id, 1)

    store.write(write)
    assert store.query(housekeeping._needing_memory, [job.id]) == ({job.id} if needed else set())
    assert store.query(housekeeping._needing_memory, ["unknown"]) == {"unknown"}
