"""What becomes of a job while it is placed, and who has it then."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster.placement_groups import NotPlaced
from manta.service.control.scheduler import PLACEMENT_SECONDS, Scheduler
from manta.service.store import generations, jobs, leases, pauses_and_retries
from tests.service.support.queue import cancel, job_now, owned_by


def test_job_is_marked_as_being_placed_until_it_has_an_owner(store, submit, cluster):
    """The loop that gives owners to jobs without one may not take it meanwhile."""
    job = submit()
    seen = []
    looking = Scheduler(store, cluster, lambda placed, generation: seen.append(set(looking.placing)))
    asyncio.run(looking._round())
    assert (seen, looking.placing) == ([{job.id}], set())


def refuse(cluster, error=None, meanwhile=lambda: None):
    """Give no placement any more, after `meanwhile` has happened; by default for want of room."""

    def refused():
        meanwhile()
        raise error or NotPlaced("not in time")

    cluster.groups.refuse = refused


@pytest.mark.parametrize(("error", "why"), [
    (None, "not in time"), (OSError("nobody expected this"), "nobody expected this"),
])  # fmt: skip
def test_job_without_a_placement_stays_queued_and_says_why(store, submit, look, cluster, error, why):
    refuse(cluster, error)
    job = submit()
    assert look() == []
    stored = job_now(store, job)
    assert (stored.state, stored.reason, stored.message) == ("QUEUED", "insufficient_slots", why)


def test_failed_gpu_placement_reports_insufficient_gpus(store, submit, look, cluster, nodes):
    nodes.accelerated = {"node": (2, 2)}
    refuse(cluster)
    job = submit()
    look()
    assert job_now(store, job).reason == "insufficient_gpus"


def test_job_that_got_no_placement_in_time_keeps_its_turn(submit, look, cluster):
    refuse(cluster, meanwhile=lambda: setattr(cluster.groups, "refuse", lambda: None))
    large, small = submit(parallel={"tensor": 2}), submit()
    assert look() == []
    assert [job for job, _ in look()] == [large.id, small.id]


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize(("change", "state"), [
    (jobs.request_cancel, "CANCELLING"), (pauses_and_retries.request_pause, "PAUSING"),
])  # fmt: skip
def test_job_ended_or_paused_during_placement_gets_an_owner_for_that(
    store, submit, look, refused, cluster, change, state
):
    job = submit()

    def meanwhile():
        store.write(lambda session: change(session, job.id))

    if refused:
        refuse(cluster, meanwhile=meanwhile)
    else:
        cluster.groups.refuse = meanwhile
    assert look() == [(job.id, 1)]
    assert job_now(store, job).state == state


@pytest.fixture
def look_holding(store, cluster, own_leases):
    """As `look`, of a control plane that holds the jobs that it places."""

    def once():
        placed = []
        scheduler = Scheduler(
            store,
            cluster,
            lambda job, generation: placed.append((job.id, generation, own_leases.of(job.id) is not None)),
            leases=own_leases,
        )
        asyncio.run(scheduler._round())
        return placed

    return once


def test_job_is_leased_before_it_is_handed_to_its_owner(store, submit, look_holding, own_leases):
    job = submit()
    assert look_holding() == [(job.id, 1, True)]
    assert (own_leases.of(job.id).epoch, owned_by(store, "me")) == (1, {job.id})


def test_job_without_a_placement_releases_its_lease_and_can_be_placed_later(
    store, submit, look_holding, own_leases, cluster
):
    refuse(cluster)
    job = submit()
    assert look_holding() == []
    assert own_leases.of(job.id) is None
    assert owned_by(store, "me") == set()
    cluster.groups.refuse = lambda: None
    assert look_holding() == [(job.id, 1, True)], "and placed when there is room"


def test_job_cancelled_during_a_failed_placement_stays_leased_for_its_owner(store, submit, look_holding, cluster):
    job = submit()
    refuse(cluster, meanwhile=lambda: cancel(store, job))
    assert look_holding() == [(job.id, 1, True)]
    assert owned_by(store, "me") == {job.id}


@pytest.mark.parametrize("holder", ["other", "me"])
def test_job_still_leased_by_another_owner_is_not_placed_yet(store, submit, look_holding, own_leases, cluster, holder):
    job = submit()
    if holder == "me":
        asyncio.run(own_leases.claim(job.id))
    else:
        store.write(lambda session: leases.claim(session, job.id, "other"))
    assert look_holding() == []
    assert (job_now(store, job).state, owned_by(store, holder)) == ("QUEUED", {job.id})
    assert cluster.groups.acquired == []
    again = Scheduler(store, cluster, lambda job, generation: None, leases=own_leases)
    assert asyncio.run(again._round()), "it is looked at again"


def test_job_that_has_run_before_is_placed_under_the_number_of_its_next_generation(store, submit, look, cluster):
    job = submit()
    for _ in range(3):
        store.write(lambda s: generations.begin(s, job.id, "test", False))
    assert look() == [(job.id, 4)]
    assert [each[:2] for each in cluster.groups.acquired] == [(job.id, 4)]


def test_places_are_of_the_unit_that_the_job_takes_and_are_waited_for_a_while(
    store, submit, look, cluster, monkeypatch
):
    async def acquire(job, generation, layout, unit, timeout, avoid=()):
        asked.append((unit, timeout, layout.tensor))

    asked = []
    monkeypatch.setattr(cluster.nodes, "has_gpus", AsyncMock(return_value=True))
    monkeypatch.setattr(cluster.groups, "acquire", acquire)
    submit(parallel={"tensor": 2})
    submit(resources={"accelerator": "cpu"})
    look()
    assert asked == [("GPU", PLACEMENT_SECONDS, 2), ("manta_slot", PLACEMENT_SECONDS, 1)]
