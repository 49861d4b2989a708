"""What a control plane does with single jobs for their users, and with the nodes that they are on."""

import asyncio
import contextlib
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster.errors import ClusterUnavailable, NodeLeaving, NodeNotFound, NodeUnreachable
from manta.service.control import faults
from manta.service.control.control_plane import ControlPlane
from manta.service.control.faults import FaultNotConfirmed, FaultNotPossible, FaultsNotAllowed
from manta.service.job.inbox import Cancel, Pause, Resize, Trace
from manta.service.store import jobs, pauses_and_retries, step_traces
from manta.service.store.errors import JobNotFinal, JobNotFound
from manta.workers.paths import Paths
from manta.workers.protocol.messages import Fault, TraceOrder
from manta.workers.protocol.requests import Arm
from tests.service.support.control_planes import (
    behave,
    hold,
    log,
    running,
    start_training,
    train_to_the_end,
    until,
)
from tests.service.support.fake_agents import FakeAgent
from tests.service.support.waiting import reached


def start_and_save(agent):
    start_training(agent)
    agent.on_save = FakeAgent.save_and_exit


def test_running_job_is_cancelled(start, cluster, submit, store):
    plane = start()
    job = running(plane, cluster, submit)
    store.write(lambda s: jobs.request_cancel(s, job.id))
    plane.tell(job.id, Cancel())
    until(plane, job, "CANCELLED")
    assert cluster.nothing_held


def test_running_job_is_paused_stays_so_with_the_next_control_plane_and_is_resumed(start, cluster, submit, store):
    first = start()
    job = running(first, cluster, submit, start_and_save)
    store.write(lambda s: pauses_and_retries.request_pause(s, job.id))
    first.tell(job.id, Pause())
    until(first, job, "PAUSED")
    kept = {host: dict(memory) for host, memory in cluster.agents.memory.items()}
    hold(cluster, job)  # as if something had been left
    first.stop()
    second = start()
    second._call(reached(lambda: not cluster.agents.living))
    assert (job.id in second._owners.by_job, cluster.groups.held, cluster.agents.memory) == (False, {}, kept)
    behave(cluster, train_to_the_end)
    store.write(lambda s: pauses_and_retries.request_resume(s, job.id))
    second.submitted(job.id)
    assert until(second, job, "SUCCEEDED").restarts == 0


def test_job_placed_before_its_former_owner_ended_keeps_its_new_owner(start, cluster, submit, store, monkeypatch):
    plane, may_leave = start(), asyncio.Event()
    job = running(plane, cluster, submit, start_and_save)
    release = plane._leases.release

    async def release_late(name):
        await release(name)
        while not may_leave.is_set():  # without its lease it is told to end, again and again
            with contextlib.suppress(asyncio.CancelledError):
                await may_leave.wait()

    monkeypatch.setattr(plane._leases, "release", release_late)
    _, last = plane._owners.by_job[job.id]
    store.write(lambda s: pauses_and_retries.request_pause(s, job.id))
    plane.tell(job.id, Pause())
    plane._call(reached(lambda: plane._leases.of(job.id) is None))
    store.write(lambda s: pauses_and_retries.request_resume(s, job.id))
    plane.submitted(job.id)
    behave(cluster, start_training)
    until(plane, job, "RUNNING")
    lease, owner = plane._leases.of(job.id), plane._owners.of(job.id)
    plane._loop.call_soon_threadsafe(may_leave.set)
    plane._call(reached(last.done))
    assert plane._leases.of(job.id) is lease is not None
    assert plane._owners.of(job.id) is owner is not None, "the one that the job's user reaches"
    assert plane.store.query(jobs.get, job.id).restarts == 0


def test_resize_of_a_running_job_reaches_its_supervisor(start, cluster, submit, store):
    plane = start()
    job = running(plane, cluster, submit, parallel={"data": 2}, elastic={"min_data": 1})
    behave(cluster, train_to_the_end)
    for agent in cluster.agents.living.values():
        agent.on_launch = train_to_the_end
    store.write(lambda s: jobs.request_resize(s, job.id, 1))
    plane.tell(job.id, Resize())
    assert until(plane, job, "SUCCEEDED").replicas == 1


@pytest.mark.parametrize("asked_here", [True, False])
def test_trace_request_reaches_rank_0_through_any_control_plane(start, cluster, submit, store, asked_here):
    plane = start()
    job = running(plane, cluster, submit)
    store.write(lambda s: step_traces.request(s, job.id, 2, 7))
    if asked_here:
        plane.tell(job.id, Trace())
    (first,) = [agent for agent in cluster.agents.living.values() if agent.rank == 0]
    asyncio.run(reached(lambda: first.traces))
    assert first.traces == [TraceOrder(1, 1, 2, 7)]


def test_jobs_are_told_of_a_drained_or_lost_node(start, cluster, submit, store):
    plane = start()
    job = running(plane, cluster, submit)
    plane.drain("node_a", 60.0)
    plane._call(reached(lambda: "node_draining" in log(store, job)))
    plane._call(reached(lambda: {agent.node for agent in cluster.agents.living.values()} == {"node_b"}))

    async def lose():
        cluster.lose_node("node_b")
        cluster.nodes.draining.clear()
        plane._node_lost("node_b", "it does not answer")

    plane._call(lose())
    plane._call(reached(lambda: "node_lost" in log(store, job)))
    plane._call(reached(lambda: {agent.node for agent in cluster.agents.living.values()} == {"node_a"}))


def test_repeated_drain_heartbeats_of_a_node_are_handled_once(start, cluster, submit, store):
    """It does so with every heartbeat."""
    plane = start()
    job = running(plane, cluster, submit)

    async def beat():
        for _ in range(3):
            plane._node_draining("node_a", 60.0)

    plane._call(beat())
    plane._call(reached(lambda: {agent.node for agent in cluster.agents.living.values()} == {"node_b"}))
    assert log(store, job).count("node_draining") == 1


@pytest.mark.parametrize("seconds", [1000.0, 0.0])
def test_failed_job_keeps_its_snapshots_for_the_configured_time(start, cluster, submit, seconds):
    plane = start(memory_seconds=seconds)

    def train_and_fail(agent):
        start_training(agent)
        if agent.rank == 0:
            agent.fail("bad_data", 2)

    behave(cluster, train_and_fail)
    job = submit(parallel={"tensor": 2})
    plane.submitted(job.id)
    failed = until(plane, job, "FAILED")
    kept_until = pytest.approx(failed.finished_at + seconds, abs=60) if seconds else None
    assert failed.memory_kept_until == kept_until


FAULT = Fault("f1", "kill", 0, 5)


def test_fault_injection_needs_permission_and_a_running_job(start, cluster, submit):
    cluster.nodes.used["node_a"] = 4
    job = submit(parallel={"tensor": 2, "data": 4})
    with pytest.raises(FaultsNotAllowed):
        start().tell(job.id, Arm(FAULT))
    plane = start(allow_faults=True)
    with pytest.raises(FaultNotPossible, match="the job is QUEUED"):
        plane.tell(job.id, Arm(FAULT))
    with pytest.raises(JobNotFound):
        plane.tell("job_000000000000", Arm(FAULT))


def test_fault_for_a_finished_job_is_refused_before_its_owner_has_left(start, cluster, submit, monkeypatch):
    plane, leaves = start(allow_faults=True), asyncio.Event()
    release = plane._leases.release

    async def release_late(name):
        await leaves.wait()
        await release(name)

    monkeypatch.setattr(plane._leases, "release", release_late)
    behave(cluster, train_to_the_end)
    job = submit(parallel={"tensor": 2})
    plane.submitted(job.id)
    plane._call(reached(lambda: plane.store.query(jobs.get, job.id).state == "SUCCEEDED"))
    with pytest.raises(FaultNotPossible, match="the job is SUCCEEDED, and faults need a running job"):
        plane.tell(job.id, Arm(FAULT))
    plane._loop.call_soon_threadsafe(leaves.set)


def test_fault_is_armed_at_the_agent_of_its_rank(start, cluster, submit, store):
    plane = start(allow_faults=True)
    job = running(plane, cluster, submit)
    plane.tell(job.id, Arm(FAULT))
    assert [len(agent.faults) for agent in cluster.agents.living.values()] == [1, 0]
    next(iter(cluster.agents.living.values())).refuse("tell fault", "no")
    with pytest.raises(FaultNotPossible, match="refused it: no"):
        plane.tell(job.id, Arm(FAULT))
    assert log(store, job)[-2:] == ["fault_injected", "fault_injected"]


def test_fault_whose_agent_answers_late_is_not_reported_as_refused(start, cluster, submit, monkeypatch):
    monkeypatch.setattr(faults, "INJECT_SECONDS", 0.01)
    plane = start(allow_faults=True)
    job = running(plane, cluster, submit)
    next(iter(cluster.agents.living.values())).silent = True
    with pytest.raises(FaultNotConfirmed, match="sent, but the agent of rank 0 has not confirmed it yet"):
        plane.tell(job.id, Arm(FAULT))


def test_cluster_shows_nodes_slots_and_ranks(start, cluster, submit):
    plane = start()
    running(plane, cluster, submit)
    view = plane.cluster()
    assert view["totals"] == {"total": 8, "free": 6, "slots_total": 8, "slots_free": 6}
    assert [(node["id"], node["free"], len(node["ranks"])) for node in view["nodes"]] == [
        ("node_a", 2, 2), ("node_b", 4, 0)
    ]  # fmt: skip


def test_data_check_happens_on_the_nodes_if_jobs_run_elsewhere(start, cluster, make_spec):
    spec = make_spec(data={"source": "text", "paths": ["/on/the/nodes/only"]})
    control = start()
    assert control.problem_of_data(spec) == "no such file or directory: /on/the/nodes/only"

    async def problem(spec, folders, begins=True):
        return f"{spec['data']['paths'][0]} is empty"

    cluster.is_remote, cluster.daemons.problem_of_data = True, problem
    assert control.problem_of_data(spec) == "/on/the/nodes/only is empty"


def test_node_that_the_user_drains_is_told_once(start, cluster):
    assert start().drain("node_a", 60.0)["draining"]
    assert cluster.daemons._daemon("node_a").drains == [60.0]
    assert cluster.nodes.draining == {"node_a"}


def test_drain_is_undone_unless_the_machine_goes_away(start, cluster):
    plane, daemon = start(), cluster.daemons._daemon("node_a")
    plane.drain("node_a", 60.0)
    assert plane.undrain("node_a")["draining"] is False
    assert daemon.drains == []
    assert cluster.nodes.draining == {"node_a"}, "until a heartbeat says so: one that is on its way says otherwise"
    daemon.notice = "it is sold"
    with pytest.raises(NodeLeaving, match=r"node node_a is being drained by its machine \(it is sold\)"):
        plane.undrain("node_a")


@pytest.mark.parametrize("request_", [lambda plane, node: plane.drain(node, 60.0), ControlPlane.undrain])
def test_drain_of_an_ambiguous_unknown_or_silent_node_is_refused(start, cluster, request_):
    plane = start()
    cluster.daemons.silent.add("node_b")
    for node, error, why in (
        ("node", NodeNotFound, "2 nodes"),
        ("x", NodeNotFound, "no node x"),
        ("node_b", NodeUnreachable, "node_b"),
    ):
        with pytest.raises(error, match=why):
            request_(plane, node)


def test_deletion_of_a_job_clears_its_cached_log(start, submit, store, monkeypatch):
    plane, job, forgotten = start(), submit(), []
    store.write(lambda s: jobs.request_cancel(s, job.id))
    with monkeypatch.context() as patched:
        patched.setattr(plane, "_archiver", SimpleNamespace(forget=forgotten.append))
        plane.delete(job.id)
    assert forgotten == [job.id]


def test_deleted_job_leaves_nothing_on_the_nodes_that_answer(start, cluster, submit, store, tmp_path):
    plane = start()
    job = running(plane, cluster, submit)
    with pytest.raises(JobNotFinal):
        plane.delete(job.id)

    async def end():
        for agent in list(cluster.agents.living.values()):
            agent.finish(10)

    plane._call(end())
    until(plane, job, "SUCCEEDED")
    folder = Paths.of(tmp_path).checkpoint_folder(job.id)
    folder.mkdir(parents=True)
    assert plane.delete(job.id).rows["ranks"] == 2
    assert not folder.parent.exists()
    assert all(cluster.daemons._daemon(node).ended_jobs[-1] == job.id for node in ("node_a", "node_b"))
    with pytest.raises(JobNotFound):
        plane.delete(job.id)


def test_job_whose_agents_cannot_be_reached_is_not_deleted(start, cluster, submit, store, monkeypatch):
    job = submit()
    store.write(lambda s: jobs.request_cancel(s, job.id))
    plane = start()
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "end_job", AsyncMock(side_effect=ClusterUnavailable(TimeoutError("no answer"))))
        with pytest.raises(ClusterUnavailable):
            plane.delete(job.id)
    assert plane.store.query(jobs.get, job.id).deletion_began_at is not None
    assert plane.delete(job.id).rows["jobs"] == 1


def test_repeated_drain_notice_only_updates_the_deadline(start, cluster, submit, store):
    plane = start()
    job = running(plane, cluster, submit, parallel={"tensor": 2, "data": 4})

    async def say(*notice):
        plane._node_draining("node_a", *notice)
        return cluster.nodes.leave_by.get("node_a")

    now = time.monotonic()
    first = plane._call(say(6000.0, "it is sold"))
    again = plane._call(say(5000.0, "it is sold"))
    assert first - now > 5900.0 > 5100.0 > again - now
    plane._call(reached(lambda: log(store, job).count("node_draining") == 1))
    assert plane._call(say(4000.0, "it burns")) - now < 4100.0
    plane._call(reached(lambda: log(store, job).count("node_draining") == 2))
    assert plane._call(say(None, "it is cordoned")) is None
