"""Who gets its turn: the scheduler on a real database and a cluster that exists on paper."""

import asyncio
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster.errors import ClusterUnavailable
from manta.service.control import scheduler as module
from manta.service.control.scheduler import Scheduler
from manta.service.leases.decisions import LeaseLost
from manta.service.store import generations, jobs, pauses_and_retries
from manta.service.stored_specs import stored_spec
from manta.workers.data import roots
from tests.service.support.queue import LARGE, cancel, free, has, job_now, resize
from tests.service.support.waiting import reached


def test_job_that_fits_is_starting_and_handed_over(store, submit, look, cluster):
    job = submit(parallel={"tensor": 2})
    assert look() == [(job.id, 1)]
    assert [each[:2] for each in cluster.groups.acquired] == [(job.id, 1)]
    assert job_now(store, job).state == "STARTING"


def test_stored_spec_that_this_release_rejects_stays_queued_and_blocks_no_other_job(store, submit, look):
    old, fine = submit(), submit()

    def spoil(session):
        row = jobs.get(session, old.id)
        row.spec = {**row.spec, "model": {**row.spec["model"], "heads": "many"}}

    store.write(spoil)
    assert [job for job, _ in look()] == [fine.id]
    stored = job_now(store, old)
    assert (stored.state, stored.reason) == ("QUEUED", "invalid_spec")
    assert "model.heads" in stored.message and "a release that does continues the job" in stored.message


def test_job_whose_data_check_raises_does_not_block_the_queue(store, submit, look, monkeypatch):
    odd, fine = submit(name="odd"), submit()

    def check(spec):
        if spec.name == "odd":
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    monkeypatch.setattr(roots, "check_data", check)
    assert [job for job, _ in look()] == [fine.id]
    assert job_now(store, odd).state == "QUEUED"


def test_queued_job_says_what_is_wrong_with_nodes(store, submit, look, cluster):
    cluster.nodes.problems = {node: f"node {node} has no Manta" for node in cluster.nodes.slots}
    job = submit()
    assert look() == []
    message = job_now(store, job).message
    assert "the cluster has 0; node " in message and "has no Manta" in message
    if len(cluster.nodes.slots) > 1:
        assert f"(and {len(cluster.nodes.slots) - 1} more nodes with problems)" in message


def test_nodes_on_which_the_job_kept_failing_are_avoided(store, submit, look, cluster):
    job = submit()
    fault = {"kind": "killed", "node": "bad", "at": time.time()}
    for failure in (None, fault, fault, fault):
        store.write(lambda s, f=failure: generations.begin(s, job.id, "test", False, data={"failure": f}))
    look()
    assert [avoid for *_, avoid in cluster.groups.acquired] == [{"bad"}]


def test_queued_job_without_room_says_what_is_missing(store, submit, look, nodes):
    has(nodes, 8, free=1)
    job = submit(parallel={"tensor": 2})
    assert look() == []
    stored = job_now(store, job)
    assert (stored.state, stored.reason) == ("QUEUED", "insufficient_slots")
    assert (stored.waiting_for["needed"], stored.waiting_for["available"]) == (2, 0)


def test_queued_small_job_does_not_overtake_a_large_one_that_will_fit(submit, look, nodes):
    has(nodes, 8, free=1)
    large, small = submit(parallel={"tensor": 2}), submit()
    assert look() == []
    has(nodes, 8, free=8)
    assert [job for job, _ in look()] == [large.id, small.id]


def test_job_that_never_fits_steps_aside(store, submit, look, nodes):
    has(nodes, 1)
    never, small = submit(parallel={"tensor": 2}), submit()
    assert look() == [(small.id, 1)]
    assert job_now(store, never).state == "QUEUED"


def test_job_that_never_fits_reports_its_shortage_unchanged(store, submit, look, nodes):
    job = submit(parallel={"data": 12}, train=LARGE)
    for unused in (8, 3):
        has(nodes, 8, free=unused)
        assert look() == []
        said = job_now(store, job)
        assert said.message == "needs 12 slots; the cluster has 8"
        assert said.waiting_for == {"unit": "slots", "needed": 12, "available": 8}


def test_job_that_never_fits_is_looked_at_again_after_later_jobs_were_placed(store, submit, cluster, nodes):
    has(nodes, 1)
    submit(parallel={"tensor": 2})
    submit()
    scheduler = Scheduler(store, cluster, lambda job, generation: None)
    assert asyncio.run(scheduler._round()), "nothing else may ever wake it"


def test_job_that_cannot_fit_is_read_again_only_after_a_change_or_a_minute(store, submit, cluster, nodes, monkeypatch):
    """There may be thousands, and each look at one takes a millisecond of a core."""
    has(nodes, 1)
    job, read, now, if_queued = submit(parallel={"tensor": 2}).id, [], [0.0], module._if_queued
    monkeypatch.setattr(module, "_if_queued", lambda s, job_id: read.append(job_id) or if_queued(s, job_id))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    scheduler = Scheduler(store, cluster, lambda job, generation: None)

    def reads():
        read.clear()
        for _ in range(3):
            assert asyncio.run(scheduler._round())
        return len(read)

    assert reads() == 2, "once more, since it has said meanwhile why it waits"
    assert reads() == 0
    store.write(lambda session: jobs.edit(session, job, name="another"))
    assert reads() == 1
    now[0] += module.RETRY_SECONDS
    assert reads() == 1
    has(nodes, 2)
    assert not asyncio.run(scheduler._round())
    assert store.query(jobs.get, job).state == "STARTING"


def test_elastic_job_starts_with_as_many_replicas_as_fit(store, submit, look, nodes):
    has(nodes, 8, free=5)
    job = submit(parallel={"tensor": 2, "data": 4}, elastic={"min_data": 1, "max_data": 4})
    assert look() == [(job.id, 1)]
    assert job_now(store, job).replicas == 2, "which its supervisor goes by"
    assert free(nodes) == 1


def test_queued_job_is_placed_with_its_resized_size(store, submit, look, nodes):
    job = submit(parallel={"data": 2}, elastic={"min_data": 1, "max_data": 4})
    resize(store, job, 4)
    assert look() == [(job.id, 1)]
    assert job_now(store, job).replicas == 4
    assert free(nodes) == 4


def test_queued_job_resized_beyond_the_room_takes_what_there_is(store, submit, look, nodes):
    has(nodes, 8, free=3)
    job = submit(parallel={"data": 1}, elastic={"min_data": 1, "max_data": 4})
    resize(store, job, 4)
    assert look() == [(job.id, 1)]
    assert job_now(store, job).replicas == 3


def test_resized_job_that_fits_in_no_size_waits_for_the_requested_one(store, submit, look, nodes):
    has(nodes, 8, free=0)
    job = submit(parallel={"tensor": 2, "data": 2}, elastic={"min_data": 1, "max_data": 4})
    resize(store, job, 3)
    assert look() == []
    assert job_now(store, job).waiting_for == {"unit": "slots", "needed": 6, "available": 0, "free": 0}


def test_elastic_job_starts_in_the_largest_shape_that_fits(store, submit, look, nodes):
    has(nodes, 8, free=3)
    job = submit(parallel={"tensor": 2, "pipeline": 2}, elastic={"reshape": True})
    assert look() == [(job.id, 1)]
    stored = job_now(store, job)
    assert (stored.tensor, stored.pipeline, stored.replicas) == (2, 1, 1)


def test_elastic_job_of_which_the_smallest_size_would_fit_keeps_its_turn(submit, look, nodes):
    has(nodes, 2, free=1)
    submit(parallel={"tensor": 2, "data": 4}, elastic={"min_data": 1, "max_data": 4})
    submit()
    assert look() == []


def test_job_with_higher_priority_is_placed_before_older_ones(submit, look, nodes):
    has(nodes, 1)
    submit()
    urgent = submit(priority=5)
    assert look() == [(urgent.id, 1)]


def test_job_cancelled_in_the_queue_is_never_placed(store, submit, look):
    job = submit()
    cancel(store, job)
    assert look() == []
    assert job_now(store, job).state == "CANCELLED"


def test_paused_job_is_not_scheduled(store, submit, look):
    paused, waiting = submit(), submit()
    store.write(lambda session: pauses_and_retries.request_pause(session, paused.id))
    assert look() == [(waiting.id, 1)]


async def test_scheduler_looks_at_the_queue_again_after_an_error_of_ray(store, cluster, nodes, submit):
    nodes.error = ClusterUnavailable(OSError())
    submit()
    placed = asyncio.Event()
    scheduler = Scheduler(store, cluster, lambda job, generation: placed.set())
    running = asyncio.create_task(scheduler.run())
    await placed.wait()
    running.cancel()


def test_job_waiting_for_gpus_reports_insufficient_gpus(store, submit, look, nodes):
    nodes.accelerated = {"node": (2, 1)}
    job = submit(parallel={"tensor": 2}, resources={"accelerator": "gpu"})
    assert look() == []
    stored = job_now(store, job)
    assert (stored.reason, stored.waiting_for) == (
        "insufficient_gpus",
        {"unit": "gpus", "needed": 2, "available": 0, "free": 1},
    )
    assert stored.message == "needs 2 GPUs in groups of 2 on one node; 1 of 2 is free"


@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
def test_queued_gpu_job_that_never_fits_is_told_if_slots_would_do(store, submit, look, nodes, accelerator):
    nodes.accelerated = {"node": (3, 3)}
    resources = {"accelerator": accelerator}
    slots_would_do = submit(parallel={"tensor": 2, "pipeline": 2}, resources=resources)
    neither = submit(parallel={"data": 12}, train=LARGE, resources=resources)
    assert look() == []
    advice = "; with resources.accelerator: cpu it would run on CPU slots, of which there are enough"
    lacks = "needs 4 GPUs in groups of 2 on one node; the cluster has 2"
    assert job_now(store, slots_would_do).message == f"{lacks}{advice}"
    assert job_now(store, neither).message == "needs 12 GPUs; the cluster has 3"


def test_queued_gpu_job_blocks_later_gpu_jobs_but_no_cpu_job(store, submit, look, nodes):
    nodes.accelerated = {"node": (2, 1)}
    waits, small = submit(parallel={"tensor": 2}), submit()
    on_slots = submit(resources={"accelerator": "cpu"})
    assert look() == [(on_slots.id, 1)]
    assert [job_now(store, job).state for job in (waits, small)] == ["QUEUED", "QUEUED"]


def test_queued_cpu_job_blocks_no_gpu_job(submit, look, nodes):
    nodes.accelerated = {"node": (2, 2)}
    has(nodes, 8, free=1)
    cpu = {"accelerator": "cpu"}
    submit(parallel={"tensor": 2}, resources=cpu), submit(resources=cpu)
    on_gpu = submit()
    assert look() == [(on_gpu.id, 1)]


@pytest.fixture
def rounds(store, cluster, monkeypatch):
    """Runs a scheduler through looks that answer whether jobs wait; how many there were once `during` has returned."""

    def run(during, *answers):
        async def body():
            scheduler, looks = Scheduler(store, cluster, lambda job, generation: None), []

            async def look():
                looks.append(1)
                return answers[len(looks) - 1] if len(looks) <= len(answers) else False

            monkeypatch.setattr(scheduler, "_round", look)
            running = asyncio.create_task(scheduler.run())
            await during(scheduler, looks)
            running.cancel()
            return len(looks)

        return asyncio.run(asyncio.wait_for(body(), 60))

    return run


def test_scheduler_of_an_empty_queue_runs_only_when_woken(rounds, monkeypatch):
    monkeypatch.setattr("manta.service.control.scheduler.IDLE_SECONDS", 0.0)

    async def pass_by():
        for _ in range(20):
            await asyncio.sleep(0)

    async def wake(scheduler, looks):
        await pass_by()
        assert len(looks) == 1
        scheduler.wake()
        await pass_by()

    assert rounds(wake, False, False) == 2, "once for each time that somebody says so"


def test_scheduler_with_waiting_jobs_runs_periodically(rounds, monkeypatch):
    monkeypatch.setattr("manta.service.control.scheduler.IDLE_SECONDS", 0.0)

    async def wait(scheduler, looks):
        await reached(lambda: len(looks) == 3)

    assert rounds(wait, True, True, False) == 3


def test_database_error_stops_the_scheduling_round_without_blaming_a_job(store, submit, look, monkeypatch):
    """Those behind it would fare no better: the whole queue is looked at again."""
    submit()
    monkeypatch.setattr(store, "until_certain", AsyncMock(side_effect=OSError("the disk is full")))
    with pytest.raises(OSError, match="the disk is full"):
        look()


def test_scheduler_whose_lease_is_lost_ends(store, submit, cluster, monkeypatch):
    scheduler = Scheduler(store, cluster, lambda job, generation: None)
    monkeypatch.setattr(store, "until_certain", AsyncMock(side_effect=LeaseLost("housekeeping")))
    submit()
    with pytest.raises(LeaseLost):
        asyncio.run(asyncio.wait_for(scheduler.run(), 10))


def test_job_that_waits_says_that_nodes_are_to_be_left(store, submit, look, cluster, nodes):
    job = submit(parallel={"tensor": 2})
    nodes.drain("node", 60.0)
    assert look() == []
    assert job_now(store, job).message == (
        "needs 2 slots in groups of 2 on one node; the cluster has 0; a node that is being drained takes no job"
    )


def test_accelerator_auto_is_decided_when_a_job_is_first_placed(store, submit, look, cluster, monkeypatch):
    """A GPU that comes later changes nothing, and what the user asked for by name stays."""
    job, named = submit(), submit(resources={"accelerator": "cpu"})
    look()
    assert [job_now(store, each).spec["resources"]["accelerator"] for each in (job, named)] == ["cpu", "cpu"]
    assert "resources" not in job_now(store, job).submitted
    monkeypatch.setattr(cluster.nodes, "has_gpus", AsyncMock(return_value=True))
    assert stored_spec(job_now(store, job)).spec.resources.accelerator == "cpu"
    later = submit()
    look()
    assert job_now(store, later).spec["resources"]["accelerator"] == "gpu"


def test_waiting_job_leaves_auto_settings_undecided(store, submit, look, nodes):
    has(nodes, 8, free=0)
    job = submit()
    look()
    assert stored_spec(job_now(store, job)).spec.resources.accelerator == "auto"
