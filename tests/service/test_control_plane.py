"""The control plane on its thread: jobs go through it, are taken over by the next one, and fail alone."""

import asyncio
import socket
import threading
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from sqlalchemy import text

from manta.service.cluster import node_maintenance
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.ray_head import RayHead, RayUnavailable
from manta.service.control import control_plane, home_of_jobs, housekeeping, owners, scheduler
from manta.service.control.control_plane import ControlPlane
from manta.service.control.home_of_jobs import HomeOfJobs, JobsElsewhere
from manta.service.control.options import ControlPlaneOptions
from manta.service.control.takeover import CannotTakeOver
from manta.service.job.inbox import Cancel, Resize
from manta.service.job.supervisor import Supervisor
from manta.service.leases.decisions import RayMismatch
from manta.service.leases.held import Leases
from manta.service.revisions import newest_revision
from manta.service.states import JobState
from manta.service.store import jobs
from manta.service.store.database import FIRST_RELEASED
from manta.workers.paths import Paths
from manta.workers.protocol.messages import ProtocolMismatch
from tests.service.support.control_planes import (
    behave,
    left_running,
    log,
    running,
    train_to_the_end,
    until,
)
from tests.service.support.waiting import SECONDS, reached


def test_submitted_job_is_scheduled_supervised_and_over(start, cluster, submit, store):
    plane = start()
    behave(cluster, train_to_the_end)
    job = submit(parallel={"tensor": 2})
    plane.submitted(job.id)
    assert until(plane, job, "SUCCEEDED").step == 10
    assert log(store, job) == ["STARTING", "generation_started", "RUNNING", "first_step", "SUCCEEDED"]
    assert cluster.nothing_held


def test_jobs_keep_running_when_the_control_plane_stops_and_are_adopted_by_the_next(start, cluster, submit, store):
    job, agents = left_running(start, cluster, submit)
    assert all(agent.running for agent in agents)

    second = start()

    async def end():
        for agent in agents:
            agent.finish(10)

    second._call(end())
    until(second, job, "SUCCEEDED")
    assert log(store, job)[-2:] == ["adopted", "SUCCEEDED"]


@pytest.mark.parametrize("understood", [True, False])
def test_database_is_not_migrated_while_jobs_run_that_cannot_be_taken_over(
    start, cluster, submit, store, tmp_path, understood
):
    job, agents = left_running(start, cluster, submit)
    for agent in agents if not understood else ():
        agent.describe = AsyncMock(side_effect=ProtocolMismatch("the agent", 1))
    store.migrate(FIRST_RELEASED)
    if understood:
        until(start(), job, "RUNNING")
    else:
        with pytest.raises(CannotTakeOver, match=f"cannot take over {job.id}: "):
            start()
    with store.read() as session:
        revision = session.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
        assert revision == (newest_revision() if understood else FIRST_RELEASED)
        assert session.execute(text("SELECT state FROM jobs")).scalars().all() == ["RUNNING"]
    assert all(agent.running for agent in agents)


def test_daemon_that_hangs_holds_up_neither_the_start_nor_other_nodes(start, cluster, submit, monkeypatch):
    running, agents = left_running(start, cluster, submit)
    monkeypatch.setattr(node_maintenance, "FIRST_SECONDS", 0.2)
    held, sick = asyncio.Event(), cluster.daemons._daemon("node_b")
    cluster.daemons.hang["node_b"] = lambda _: held.wait()
    behave(cluster, train_to_the_end)
    plane = start()
    nowhere = submit(parallel={"tensor": 2, "data": 3}, train={"steps": 10, "global_batch_size": 6})
    fits = submit(parallel={"tensor": 2})
    for job in (nowhere, fits):
        plane.submitted(job.id)
    plane._call(reached(lambda: plane.store.query(jobs.get, fits.id).state == "SUCCEEDED"))
    assert plane.store.query(jobs.get, nowhere.id).state == "QUEUED" and cluster.nodes.unresponsive == {"node_b"}
    sick.left = [fits.id]  # it could not be notified that the job is over
    plane._loop.call_soon_threadsafe(held.set)
    plane._call(reached(lambda: plane.store.query(jobs.get, nowhere.id).state == "SUCCEEDED"))
    plane._call(reached(lambda: not sick.left and "node_b" in cluster.peak_flops))
    assert plane.store.query(jobs.get, running.id).state == "RUNNING" and all(agent.running for agent in agents)


def test_ray_that_does_not_answer_at_the_start_keeps_no_job_from_being_taken_over(start, cluster, started, monkeypatch):
    monkeypatch.setattr(housekeeping, "RETRY_SECONDS", 0.0)
    asked, real = [], cluster.groups.states

    async def states():
        asked.append(1)
        if len(asked) <= 3:
            raise ClusterUnavailable(TimeoutError("no answer"))
        return await real()

    monkeypatch.setattr(cluster, "jobs", states)
    behave(cluster, train_to_the_end)
    plane = start()
    until(plane, started, "SUCCEEDED")
    plane._call(reached(lambda: len(asked) > 3))


def test_job_without_an_owner_is_adopted(start, cluster, submit, store, monkeypatch):
    """As when the first write of its owner was lost, or its placing broke off."""
    monkeypatch.setattr(owners, "CLAIM_SECONDS", 0.01)
    plane = start()
    behave(cluster, train_to_the_end)
    job = submit()
    store.write(lambda s: jobs.transition(s, job.id, JobState.STARTING))
    assert until(plane, job, "SUCCEEDED").step == 10


@pytest.mark.parametrize("kind_of_database", ["sqlite"], indirect=True)
def test_job_that_ends_during_a_database_outage_has_ended_afterwards(
    start, cluster, submit, store, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(owners, "CLAIM_SECONDS", 0.001)
    plane, looks, look = start(), [], Leases._look
    monkeypatch.setattr(Leases, "_look", lambda leases, session: (looks.append(1), look(leases, session))[1])
    job = running(plane, cluster, submit)
    files = [tmp_path / each for each in ("manta.db", "manta.db-wal", "manta.db-shm")]
    (tmp_path / "away").mkdir()
    for file in files:
        file.rename(tmp_path / "away" / file.name)

    async def end():
        for agent in list(cluster.agents.living.values()):
            if agent.rank == 0:
                agent.commit(2)
            agent.finish(2)
        already = len(looks)
        await reached(lambda: len(looks) > already + 5)
        await reached(lambda: "the database does not answer" in caplog.text)
        assert len(cluster.agents.living) == 2, "nothing is decided"

    plane._call(end())
    assert not list(tmp_path.glob("manta.db*")), "none is begun"
    for file in reversed(files):
        (tmp_path / "away" / file.name).rename(file)
    assert until(plane, job, "SUCCEEDED").step == 2
    assert caplog.text.count("cannot list the jobs") == caplog.text.count("is gone: jobs train on") == 1


def test_job_that_is_being_placed_has_an_owner_soon_and_is_not_taken_for_lost(
    start, cluster, submit, store, monkeypatch
):
    monkeypatch.setattr(owners, "CLAIM_SECONDS", 0.001)
    plane, looks, acquire = start(), [], cluster.groups.acquire
    first = plane._leases.refresh

    async def refresh(is_busy):
        looks.append(plane._housekeeping.scheduler.placing)
        return await first(is_busy)

    async def slow(*arguments, **options):
        monkeypatch.setattr(plane._leases, "refresh", refresh)
        await reached(lambda: len(looks) >= 5)
        assert plane._owners.by_job == {}
        await acquire(*arguments, **options)

    monkeypatch.setattr(cluster.groups, "acquire", slow)
    behave(cluster, train_to_the_end)
    job = submit()
    plane.submitted(job.id)
    until(plane, job, "SUCCEEDED")
    assert log(store, job) == ["STARTING", "generation_started", "RUNNING", "first_step", "SUCCEEDED"]


def test_queued_job_is_scheduled_as_soon_as_another_ends(start, cluster, submit, store, monkeypatch):
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 1000.0)
    plane = start()
    first = running(plane, cluster, submit, parallel={"tensor": 2, "data": 4})
    behave(cluster, train_to_the_end)
    second = submit()
    plane.submitted(second.id)
    plane._call(reached(lambda: plane.store.query(jobs.get, second.id).waiting_for is not None))
    store.write(lambda s: jobs.request_cancel(s, first.id))
    plane.tell(first.id, Cancel())
    until(plane, second, "SUCCEEDED")


def test_control_plane_error_costs_a_job_nothing(start, cluster, submit, store, monkeypatch):
    plane = start()
    job = running(plane, cluster, submit, parallel={"tensor": 1})
    plane._call(reached(lambda: plane._owners.of(job.id)._supervisor._running))  # its first step may come before that
    trainers = list(cluster.agents.living.values())
    watch, errors = Supervisor._watch, iter([RuntimeError("nobody expected this")])

    async def broken(self):
        for error in errors:
            raise error
        return await watch(self)

    monkeypatch.setattr(Supervisor, "_watch", broken)

    async def stumble():  # the generation that is watched ends for its supervisor as by an error of ours
        owner, _ = plane._owners.by_job[job.id]
        owner._supervisor._running._alongside.append(asyncio.create_task(_fail()))
        owner._supervisor.tell(Resize())

    plane._call(stumble())

    async def end():
        await reached(lambda: {"supervision_failed", "adopted"} <= set(log(store, job)))
        assert list(cluster.agents.living.values()) == trainers
        for agent in trainers:
            agent.finish(10)

    plane._call(end())
    row = until(plane, job, "SUCCEEDED")
    assert row.restarts == 0
    assert plane.ready() == []


async def _fail():
    raise RuntimeError("nobody expected this")


def test_control_plane_is_ready_as_long_as_ray_answers(start, cluster, tmp_path):
    assert ControlPlane(tmp_path, SimpleNamespace()).ready() == ["the control plane is starting"]
    plane = start()
    assert plane.ready() == []
    problem_of_all, cluster.nodes.problem_of_all = cluster.nodes.problem_of_all, lambda: asyncio.sleep(0, "no nodes")
    assert plane.ready() == ["no nodes"]
    cluster.nodes.problem_of_all = problem_of_all
    cluster.nodes.problem_of_all = AsyncMock(side_effect=ClusterUnavailable(ConnectionResetError("gone")))
    assert plane.ready() == ["Ray does not answer (ConnectionResetError)"]


def test_control_plane_gives_up_a_hanging_ray_call_after_its_timeout(start, cluster, monkeypatch):
    plane, ended = start(), threading.Event()

    async def hangs():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(cluster.nodes, "has_gpus", hangs)
    with pytest.raises(ClusterUnavailable, match=r"did not answer within 0\.01 s; try again"):
        plane._call(cluster.nodes.has_gpus(), 0.01)
    assert ended.wait(SECONDS), "it is given up"


def test_control_plane_asks_for_peak_flops_until_every_node_knows_them(start, cluster, monkeypatch):
    monkeypatch.setattr(node_maintenance, "POLL_SECONDS", 0.0)
    daemon = cluster.daemons._daemon("node_b")
    daemon.peak_flops = None
    plane = start()

    async def learned():
        await reached(lambda: "node_a" in cluster.peak_flops)
        daemon.peak_flops = 2e12
        await reached(lambda: "node_b" in cluster.peak_flops)

    plane._call(learned())
    assert cluster.peak_flops == {"node_a": 1e12, "node_b": 2e12}


class OwnRay(RayHead):
    """A Ray of our own on paper: which one was there before, and which is there now."""

    def __init__(self, before, now):
        self.before, self.now, self.gone, self.namespaces = before, now, threading.Event(), []
        self.is_stopped = False

    def record(self):
        return self.before

    def ensure(self):
        return self.now

    def connect(self, namespace="manta"):
        self.namespaces.append(namespace)

    def stop(self):
        self.is_stopped = True

    async def until_gone(self):
        await asyncio.to_thread(self.gone.wait, SECONDS)
        return "it has ended"


@pytest.mark.parametrize("same", [True, False])
def test_process_starts_over_when_its_own_ray_has_died(cluster, store, database_url, tmp_path, monkeypatch, same):
    """Jobs of a release before stay in its namespace for as long as its Ray lives."""
    store.write(lambda session: session.execute(text("UPDATE installation SET ray_namespace = 'manta'")))
    over, now = threading.Event(), SimpleNamespace(pid=77)
    head = OwnRay(now if same else None, now)
    plane = ControlPlane(tmp_path, head, ControlPlaneOptions(database_url=database_url), over.set)
    try:
        plane.start()
        assert not over.is_set()
        head.gone.set()
        assert over.wait(SECONDS)
    finally:
        head.gone.set()
        plane.stop()
    (namespace,) = head.namespaces
    assert namespace == "manta" if same else namespace.startswith("manta-")


def test_process_starts_over_when_its_own_ray_has_given_up_its_only_node(cluster, database_url, tmp_path):
    """As it does with a node that stood still for half a minute: it is never taken back."""
    over, head = threading.Event(), OwnRay("the same", "the same")
    plane = ControlPlane(tmp_path, head, ControlPlaneOptions(database_url=database_url), over.set)
    dead = {node: SimpleNamespace(id=node, alive=False, holds_ranks=True) for node in ("node_a", "node_b")}
    known = cluster.nodes.known
    try:
        plane.start()
        plane._call(_reported_lost(plane, "node_a"))
        assert not over.is_set(), "another node lives"
        cluster.nodes.known = lambda: asyncio.sleep(0, list(dead.values()))
        plane._call(_reported_lost(plane, "node_b"))
        assert over.is_set() and head.is_stopped
    finally:
        cluster.nodes.known = known
        head.gone.set()
        plane.stop()


async def _reported_lost(plane, node):
    plane._node_lost(node, "gone")
    await plane._background_tasks.settled()


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("is_new", [False, True])
def test_earlier_ray_that_refuses_connections_is_replaced(database_url, tmp_path, monkeypatch, is_new, hangs):
    """One that was started just now would not let anybody in the next time either."""
    replaced, over = [], threading.Event()
    monkeypatch.setattr(control_plane, "JOIN_RAY_SECONDS", 0.01 if hangs else SECONDS)

    class Unreachable(OwnRay):
        def connect(self, namespace="manta"):
            if hangs and not is_new:
                over.wait(SECONDS)
            raise RayUnavailable("nobody gets in")

        def stop(self):
            replaced.append("stopped")

    def start_over():
        replaced.append("started over")
        over.set()

    head = Unreachable(None if is_new else "the same", "the same")
    plane = ControlPlane(tmp_path, head, ControlPlaneOptions(database_url=database_url), start_over)
    with pytest.raises(RayUnavailable, match="nobody gets in"):
        plane.start()
    assert replaced[:2] == ([] if is_new else ["stopped", "started over"])
    plane.stop()


def test_control_plane_waits_for_one_with_another_ray_that_may_be_dead(tmp_path, monkeypatch):
    plane, asked = ControlPlane(tmp_path, SimpleNamespace()), []
    monkeypatch.setattr(control_plane, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(control_plane, "LEASE_SECONDS", 60.0)

    def join(place, ray):
        asked.append((place, ray))
        if len(asked) < 3:
            raise RayMismatch("there", "its Ray", ray)

    monkeypatch.setattr(plane._leases, "join", join)
    plane._join("our Ray")
    assert asked == [(f"{socket.gethostname()}:{Paths.of(tmp_path).home}", "our Ray")] * 3
    asked.clear()
    monkeypatch.setattr(control_plane, "LEASE_SECONDS", -1.0)
    with pytest.raises(RayMismatch, match="its Ray, here our Ray"):
        plane._join("our Ray")
    plane.stop()


def test_control_plane_refuses_to_start_with_another_place_for_job_files(store, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"

    def home_of_jobs(home, checkpoints=None, logs=None):
        home.mkdir(exist_ok=True)
        of_jobs = HomeOfJobs(home, checkpoints, logs)
        assert of_jobs.folder == home, "nothing is shared"
        of_jobs.find(store)
        return of_jobs.folder

    assert home_of_jobs(first) == home_of_jobs(second) == Paths.of(first).home
    first.rmdir()
    for places in ({}, {"checkpoints": tmp_path}, {"logs": tmp_path}):
        with pytest.raises(JobsElsewhere, match=r"are in .*first, which is not there"):
            home_of_jobs(second, **places)
    named = home_of_jobs(second, checkpoints=tmp_path, logs=tmp_path)
    assert named == Paths.of(first).home and not first.exists(), "nothing is in it: nodes know the jobs by its name"


def test_control_plane_is_not_ready_once_its_scheduler_has_stopped(start, cluster):
    plane = start()
    (scheduling,) = [task for task in plane._tasks if task.get_name() == "scheduler"]
    plane._loop.call_soon_threadsafe(scheduling.cancel)
    plane._call(asyncio.wait({scheduling}))
    assert plane.ready() == ["the scheduler has stopped; see the service's log"]


def test_control_plane_measurements_count_jobs_nodes_units_and_lag(start, cluster, submit, store):
    plane = start()
    running(plane, cluster, submit)
    seen = plane.measurements()
    assert (seen.owned_jobs, seen.ray_answers, set(seen.lag_seconds)) == (1, True, {"jobs", "queue", "nodes"})
    assert {node.id for node in seen.nodes} == set(cluster.nodes.slots)
    total, free = seen.units["manta_slot"]
    assert free < total


def test_folder_of_checkpoints_that_does_not_answer_keeps_no_service_from_starting(tmp_path, monkeypatch, caplog):
    answers, marked, shared = threading.Event(), [], tmp_path / "shared"

    def mark(folder, installation):
        assert folder != shared or answers.wait(60)
        marked.append(folder)

    def soon_given_up(seconds, name, work):
        return answered_within(0.05 if work.args[0] == shared else 6 * seconds, name, work)

    answered_within = home_of_jobs.answered_within
    monkeypatch.setattr(home_of_jobs, "mark", mark)
    monkeypatch.setattr(home_of_jobs, "answered_within", soon_given_up)
    HomeOfJobs(tmp_path / "home", shared, None).mark("manta-1")
    assert marked == [tmp_path / "home"]
    assert f"{shared} cannot be marked as belonging to this service: no answer" in caplog.text
    answers.set()


def test_cluster_that_does_not_answer_is_as_it_was_last_seen_and_unavailable_before_that():
    away = ClusterUnavailable(TimeoutError("no answer"))
    plane = Mock(spec=ControlPlane, cluster=Mock(side_effect=away), _seen_cluster=None)
    with pytest.raises(ClusterUnavailable):
        ControlPlane.last_seen_cluster(plane)
    plane._seen_cluster = {"nodes": []}
    assert ControlPlane.last_seen_cluster(plane) == {"nodes": []}
