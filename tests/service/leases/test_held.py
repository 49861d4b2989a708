"""What a control plane holds, and that it is still while that is not certain."""

import asyncio
from unittest.mock import AsyncMock

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from manta.service.leases.decisions import HOUSEKEEPING, LEASE_SECONDS, MARGIN_SECONDS, LeaseLost, LeaseUncertain
from manta.service.leases.held import Leases, new_id
from manta.service.states import JobState
from manta.service.store import Store, jobs, leases

SECONDS = 60.0


class Plane:
    """The leases of one control plane, without the thread that renews; its clock is a number."""

    def __init__(self, url, name):
        self.now = 100.0
        self.store = Store(url)
        self.leases = Leases(self.store, new_id(), clock=lambda: self.now)
        self.leases.join(f"host:{name}", "ray-1")

    def renew(self, answered_after=0.0):
        """As the renewer does, from whom the answer may come late."""
        requested_at = self.now
        in_time = self.store.write(lambda session: leases.renew(session, self.leases.me))
        self.now += answered_after
        self.leases._record_renewal(requested_at, in_time)

    def seems_dead(self):
        late = text("UPDATE control_planes SET lease_until = 0 WHERE id = :me")
        self.store.write(lambda session: session.execute(late, {"me": self.leases.me}))


@pytest.fixture
def planes(postgres, monkeypatch):
    """Two on one database, neither of which dies because its test takes long."""
    monkeypatch.setattr(leases, "LEASE_SECONDS", 3600.0)
    url = postgres.url(postgres.make_migrated())
    made = [Plane(url, name) for name in ("one", "two")]
    yield made
    for plane in made:
        plane.store.close()


@pytest.fixture
def job(planes, make_spec):
    def make(session):
        job, _ = jobs.create(session, make_spec())
        return jobs.transition(session, job.id, JobState.STARTING).id

    return planes[0].store.write(make)


async def test_control_plane_takes_the_leases_of_another_only_once_that_is_dead(planes, job):
    one, two = planes
    await one.leases.refresh()
    assert await one.leases.claim(HOUSEKEEPING) is not None
    assert one.leases.of(job) is not None
    await two.leases.refresh()
    assert two.leases.of(job) is None and await two.leases.claim(HOUSEKEEPING) is None
    one.seems_dead()
    await two.leases.refresh()
    assert two.leases.of(job).epoch == 2 and await two.leases.claim(HOUSEKEEPING) is not None


async def test_lease_owned_in_the_database_but_not_held_is_released_at_the_next_look(planes, job):
    one, two = planes
    one.store.write(lambda session: leases.claim(session, "job_gone", one.leases.me))
    await one.leases.refresh(lambda name: name == "job_gone")
    assert await two.leases.claim("job_gone") is None
    await one.leases.refresh()
    assert await two.leases.claim("job_gone") is not None
    assert one.leases.of(job) is not None and await two.leases.claim(job) is None, "and nothing else"


async def test_lease_refresh_does_not_take_a_lease_that_is_already_being_claimed(planes, job):
    one, _ = planes
    one.store.write(lambda session: leases.claim(session, job, one.leases.me))
    await one.leases.refresh(lambda each: each == job)
    assert one.leases.of(job) is None
    await one.leases.refresh()
    assert one.leases.of(job).epoch == 2


async def test_lease_that_is_being_claimed_is_not_claimed_by_a_look(planes, job, monkeypatch):
    one, _ = planes
    write, taken, go_on = one.store.write_async, asyncio.Event(), asyncio.Event()

    async def dawdle(operation):
        result = await write(operation)
        taken.set()
        await go_on.wait()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(one.store, "write_async", dawdle)
        claiming = asyncio.create_task(one.leases.claim(job))
        await taken.wait()
    await one.leases.refresh()
    assert one.leases.of(job) is None
    go_on.set()
    assert (await claiming).epoch == one.leases.of(job).epoch == 1


async def test_lease_that_was_dropped_or_could_not_be_claimed_is_taken_at_the_next_look(planes, job, monkeypatch):
    one, _ = planes
    one.leases.drop(await one.leases.claim(job))
    await one.leases.refresh()
    assert one.leases.of(job).epoch == 2
    one.leases.drop(one.leases.of(job))
    with monkeypatch.context() as patch, pytest.raises(OperationalError):
        patch.setattr(
            one.store,
            "write_async",
            AsyncMock(side_effect=OperationalError("claim", {}, Exception("the database is away"))),
        )
        await one.leases.claim(job)
    await one.leases.refresh()
    assert one.leases.of(job).epoch == 3


async def test_stale_owner_cannot_write_or_give_orders_and_drops_its_lease_when_it_looks(planes, job):
    one, two = planes
    await one.leases.refresh()
    stale = one.store.fenced(one.leases.of(job))
    one.seems_dead()
    await two.leases.refresh()
    with pytest.raises(LeaseLost):
        await stale.write_async(lambda session: jobs.transition(session, job, JobState.RUNNING))
    one.renew()  # the first thing that it hears: too late
    assert not one.leases.certain
    with pytest.raises(LeaseUncertain):
        one.leases.epoch(job, "stop")
    await one.leases.refresh()
    assert one.leases.certain and one.leases.of(job) is None
    with pytest.raises(LeaseLost):
        one.leases.epoch(job, "stop")
    with pytest.raises(LeaseLost):
        await stale.until_certain()


async def test_control_plane_wrongly_taken_for_dead_keeps_leases_that_no_other_took(planes, job):
    one, two = planes
    await one.leases.refresh()
    one.seems_dead()
    two.store.write(leases.remove_dead)
    one.leases.changed.clear()
    one.renew()
    assert one.leases.changed.is_set(), "it looks at once"
    waiting = asyncio.create_task(one.leases.until_certain(job))
    await asyncio.sleep(0)
    assert not waiting.done()
    await one.leases.refresh()
    await asyncio.wait_for(waiting, SECONDS)
    assert one.leases.me in one.store.query(leases.living), "for others, too"
    assert one.leases.certain and one.leases.of(job).epoch == 1
    one.store.fenced(one.leases.of(job)).write(lambda session: jobs.transition(session, job, JobState.RUNNING))


async def test_orders_wait_and_reads_continue_while_the_database_is_away_past_the_lease(planes, job):
    one, _ = planes
    await one.leases.refresh()
    one.now += LEASE_SECONDS - MARGIN_SECONDS
    assert one.leases.epoch(job, "describe") == one.leases.epoch(job, "reports") == 1
    for method in ("stop", "launch", "tell trace", None):
        with pytest.raises(LeaseUncertain):
            one.leases.epoch(job, method)
    waiting = asyncio.create_task(one.leases.until_certain(job))
    await asyncio.sleep(0)
    assert not waiting.done()
    one.renew()
    await waiting
    assert one.leases.epoch(job, "stop") == 1


@pytest.mark.parametrize("answered_after", [0.0, 2.0, LEASE_SECONDS])
def test_renewal_counts_from_when_it_was_asked_for_however_late_its_answer(planes, answered_after):
    one, _ = planes
    one.now += LEASE_SECONDS
    until = one.now + LEASE_SECONDS - MARGIN_SECONDS
    one.renew(answered_after)
    for at in (until - 0.5, until):
        one.now = max(one.now, at)
        assert one.leases.certain is (one.now < until)


def test_calls_other_than_describe_and_arm_are_refused_without_the_lease_of_the_job(planes, job):
    assert planes[0].leases.epoch(job, "describe") is planes[0].leases.epoch(job, "tell fault") is None
    for method in ("reports", "stop", None):
        with pytest.raises(LeaseLost):
            planes[0].leases.epoch(job, method)


async def test_lease_claimed_during_a_look_is_not_taken_for_lost(planes):
    (one, _), held = planes, []
    read = one.store.read_async

    async def read_and_claim(query):
        seen = await read(query)
        one.store.read_async = read
        held.append(await one.leases.claim("job_2"))
        return seen

    one.store.read_async = read_and_claim
    await one.leases.refresh()
    assert one.leases.of("job_2") is held[0] is not None


async def test_job_that_is_handed_over_is_held_by_the_other_at_its_next_look(planes, job):
    one, two = planes
    await one.leases.refresh()
    await one.leases.hand_over(job, 1, two.leases.me)
    assert one.leases.of(job) is None
    await one.leases.refresh()
    assert one.leases.of(job) is None
    await two.leases.refresh()
    assert two.leases.of(job).epoch == 2
    with pytest.raises(LeaseLost):
        await one.leases.hand_over(job, 1, one.leases.me)


async def test_control_plane_that_leaves_frees_its_jobs_for_others_at_once(planes, job):
    one, two = planes
    await one.leases.refresh()
    await one.leases.leave()
    await two.leases.refresh()
    assert two.leases.of(job).epoch == 2


async def test_lease_epoch_rises_above_a_higher_known_one_and_stays_at_an_equal_one(planes, job):
    one, _ = planes
    await one.leases.refresh()
    owned = one.store.fenced(one.leases.of(job))
    await owned.exceed(1)
    assert one.leases.epoch(job, "stop") == 1
    await owned.exceed(41)
    assert one.leases.epoch(job, "stop") == 42
    await owned.write_async(lambda session: jobs.transition(session, job, JobState.RUNNING))


async def test_control_plane_counts_as_living_and_is_woken_until_it_leaves(planes):
    one, two = planes
    one.seems_dead()
    one.leases._requested_at = float("-inf")
    one.leases.begin()
    lease = one.leases.hold("job_1", 1)
    await asyncio.wait_for(lease.until_certain(), SECONDS)
    assert set(one.store.query(leases.well)) == {one.leases.me, two.leases.me}
    one.leases.changed.clear()
    await asyncio.to_thread(two.leases.wake_control_planes)
    await asyncio.wait_for(one.leases.changed.wait(), SECONDS)
    await one.leases.leave()
    one.leases._renewer._thread.join(SECONDS)
    assert not one.leases._renewer._thread.is_alive()
    assert one.store.query(leases.living) == [two.leases.me]


def owned(store, plane):
    return store.query(leases.owned, plane)


async def test_borrowed_lease_is_released_even_if_its_borrower_fails(store, own_leases):
    assert not own_leases.is_borrowed("job_1")
    with pytest.raises(ValueError):
        async with own_leases.borrowed("job_1") as lease:
            assert (lease.name, lease.epoch, own_leases.of("job_1")) == ("job_1", 1, lease)
            assert own_leases.is_borrowed("job_1") and not own_leases.is_borrowed("job_2")
            assert owned(store, "me") == {"job_1"} and not own_leases.changed.is_set()
            raise ValueError
    assert own_leases.of("job_1") is None and not own_leases.is_borrowed("job_1")
    assert owned(store, "me") == set() and own_leases.changed.is_set(), "whoever waits for it looks again"


async def test_lease_that_has_an_owner_cannot_be_borrowed(store, own_leases):
    store.write(lambda session: leases.claim(session, "theirs", "other"))
    async with own_leases.borrowed("theirs") as lease:
        assert lease is None
    assert owned(store, "other") == {"theirs"}
    ours = await own_leases.claim("ours")
    async with own_leases.borrowed("ours") as lease:
        assert lease is None
    assert own_leases.of("ours") is ours and owned(store, "me") == {"ours"}
    assert not own_leases._borrowing, "jobs come and go for weeks"


async def test_borrower_waits_for_a_lease_until_it_is_released(store, own_leases):
    store.write(lambda session: leases.claim(session, "theirs", "other"))

    async def borrow():
        async with own_leases.borrowed("theirs", SECONDS) as lease:
            return lease.epoch

    borrowing = asyncio.create_task(borrow())
    await asyncio.sleep(0.1)
    assert not borrowing.done()
    store.write(lambda session: leases.release(session, "theirs", "other", 1))
    assert await asyncio.wait_for(borrowing, SECONDS) == 2


async def test_claiming_a_held_lease_again_returns_the_same_one(store, own_leases):
    first = await own_leases.claim("job_1")
    assert await own_leases.claim("job_1") is first and first.epoch == 1
    assert store.write(lambda session: own_leases.claim_within(session, "job_1")) is None
    own_leases.drop(first)
    assert own_leases.of("job_1") is None and owned(store, "me") == {"job_1"}
    assert (await own_leases.claim("job_1")).epoch == 2, "it is looked after again"
    await own_leases.release("job_1")
    assert own_leases.of("job_1") is None and owned(store, "me") == set()


async def test_waiting_for_a_released_or_handed_over_lease_fails_at_once(own_leases):
    for name in ("job_1", "job_2"):
        await own_leases.claim(name)
        await own_leases.until_certain(name)
    await own_leases.release("job_1")
    await own_leases.hand_over("job_2", 1, "other")
    for name in ("job_1", "job_2"):
        with pytest.raises(LeaseLost):
            await own_leases.until_certain(name)
        with pytest.raises(LeaseLost):
            await own_leases.raise_epoch(name, 5)


async def test_control_plane_that_shuts_down_releases_its_leases_in_memory_and_database(store, own_leases):
    await own_leases.claim("job_1")
    await own_leases.leave()
    assert own_leases.of("job_1") is None and owned(store, "me") == set()
    assert store.query(leases.living) == ["other"]
