"""Who lives, who holds what, and who may write: on a real server where it matters."""

import threading

import psycopg
import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import OperationalError

from manta.service.leases.decisions import LeaseLost, RayMismatch
from manta.service.states import JobState
from manta.service.store import Store, jobs, leases
from manta.service.store.installation_tables import Lease
from manta.service.store.leases import connection_name

SECONDS = 60.0
LEASE_SECONDS = 3600.0


@pytest.fixture(autouse=True)
def long_leases(monkeypatch):
    """Nobody dies because a test takes long."""
    monkeypatch.setattr(leases, "LEASE_SECONDS", LEASE_SECONDS)


def join(store, me, place=None, ray="ray-1", alone=False):
    store.write(lambda s: leases.join(s, me, place or f"host:{me}", ray, alone))


def claim(store, name, me):
    return store.write(lambda s: leases.claim(s, name, me))


def let_time_pass(store, me, seconds=LEASE_SECONDS + 1):
    late = text("UPDATE control_planes SET lease_until = lease_until - :seconds WHERE id = :me")
    store.write(lambda s: s.execute(late, {"seconds": seconds, "me": me}))


def owner_of(store, job):
    with store.read() as session:
        (lease,) = [each for each in leases.overview(session) if each.id == job.id]
    return lease.owner, lease.epoch


def test_lease_of_a_living_owner_cannot_be_claimed_and_each_claim_raises_its_epoch(store):
    join(store, "a")
    join(store, "b")
    assert claim(store, "job_1", "a") == 1
    assert claim(store, "job_1", "b") is None
    store.write(lambda s: leases.release(s, "job_1", "a", 1))
    assert claim(store, "job_1", "b") == 2
    assert claim(store, "job_1", "a") is None


def test_late_release_of_an_earlier_claim_changes_nothing(store):
    join(store, "a")
    join(store, "b")
    assert [claim(store, "job_1", "a") for _ in range(2)] == [1, 2]
    store.write(lambda s: leases.release(s, "job_1", "a", 1))
    assert claim(store, "job_1", "b") is None
    store.write(lambda s: leases.release(s, "job_1", "a", 2))
    assert claim(store, "job_1", "b") == 3


def test_leases_of_a_dead_owner_are_free_once_it_is_removed(store, submit):
    job = submit()
    join(store, "a")
    join(store, "b")
    claim(store, job.id, "a")
    assert owner_of(store, job) == ("a", 1)
    let_time_pass(store, "a")
    assert store.query(leases.has_expired_members, "b")
    assert claim(store, job.id, "b") is None
    store.write(leases.remove_dead)
    assert owner_of(store, job) == (None, 1)
    assert not store.write(lambda s: leases.renew(s, "a"))
    assert claim(store, job.id, "b") == 2


def test_control_plane_that_renewed_late_is_not_removed(store):
    join(store, "a")
    let_time_pass(store, "a")
    assert store.write(lambda s: leases.renew(s, "a"))
    store.write(leases.remove_dead)
    assert store.write(lambda s: leases.renew(s, "a"))


def test_next_control_plane_at_the_same_place_takes_over_at_once(store):
    join(store, "a", place="host:home")
    assert claim(store, "job_1", "a") == 1
    join(store, "b", place="host:home")
    assert claim(store, "job_1", "b") == 2


def test_control_plane_that_runs_alone_takes_over_all_leases_at_its_start(store):
    join(store, "a", place="host:one")
    assert claim(store, "job_1", "a") == 1
    join(store, "b", place="host:other", alone=True)
    assert claim(store, "job_1", "b") == 2


def test_control_plane_with_another_ray_is_refused_while_one_lives(store):
    join(store, "a", place="host:a")
    with pytest.raises(RayMismatch, match="runs already at host:a, and uses another Ray"):
        join(store, "b", ray="ray-2")
    let_time_pass(store, "a")
    join(store, "b", ray="ray-2")


def test_control_plane_that_leaves_frees_its_leases(store, submit):
    job = submit()
    join(store, "a")
    join(store, "b")
    claim(store, job.id, "a")
    store.write(lambda s: leases.leave(s, "a"))
    assert owner_of(store, job) == (None, 1)
    assert claim(store, job.id, "b") == 2


def test_write_of_an_owner_that_lost_its_lease_is_refused(store, submit):
    job = submit()
    join(store, "a")
    claim(store, job.id, "a")

    def write(session, epoch):
        jobs.transition(session, job.id, JobState.STARTING)
        leases.check(session, job.id, "a", epoch)

    with pytest.raises(LeaseLost):
        store.write(lambda s: write(s, 0))
    let_time_pass(store, "a")
    store.write(leases.remove_dead)
    store.write(lambda s: leases.check(s, job.id, "a", 1))  # nobody else has it yet
    join(store, "b")
    claim(store, job.id, "b")
    with pytest.raises(LeaseLost):
        store.write(lambda s: write(s, 1))
    assert store.query(jobs.get, job.id).state == "QUEUED"


def everything(store):
    """Owner and epoch of each lease."""
    with store.read() as session:
        return {row.name: (row.owner, row.epoch) for row in session.scalars(select(Lease))}


def test_operation_on_one_lease_changes_no_other(store):
    join(store, "a")
    join(store, "b")
    for name, owner in (("1", "a"), ("2", "a"), ("3", "a"), ("4", "a"), ("5", "b")):
        claim(store, name, owner)
    assert store.write(lambda s: leases.raise_epoch(s, "2", "a", 1, above=7)) == 8
    store.write(lambda s: leases.check(s, "1", "a", 1))
    store.write(lambda s: leases.hand_over(s, "2", "a", 8, "b"))
    store.write(lambda s: leases.release(s, "3", "a", 1))
    store.write(lambda s: leases.release_all(s, ["4", "5"], "a"))
    now = {"1": ("a", 1), "2": ("b", 8), "3": (None, 1), "4": (None, 1), "5": ("b", 1)}
    assert everything(store) == now
    for name, me, epoch in (("1", "a", 2), ("2", "a", 8), ("5", "a", 1)):
        with pytest.raises(LeaseLost):
            store.write(lambda s, name=name, me=me, epoch=epoch: leases.hand_over(s, name, me, epoch, "a"))
        store.write(lambda s, name=name, me=me, epoch=epoch: leases.release(s, name, me, epoch))
    assert everything(store) == now, "who lost a lease has no say in it"
    store.write(lambda s: leases.leave(s, "a"))
    assert everything(store) == now | {"1": (None, 1)}


def test_overview_lists_unfinished_jobs_in_the_order_of_the_queue(store, submit):
    over, low, high, again = submit(), submit(priority=-1), submit(priority=5), submit(priority=5)
    store.write(lambda s: jobs.request_cancel(s, over.id))
    with store.read() as session:
        assert [each.id for each in leases.overview(session)] == [high.id, again.id, low.id]


def test_forgetting_a_lease_removes_no_other(store):
    join(store, "a")
    claim(store, "1", "a"), claim(store, "2", "a")
    store.write(lambda s: leases.forget(s, "1"))
    assert everything(store) == {"2": ("a", 1)}


@pytest.fixture
def postgres_store(postgres):
    store = Store(postgres.url(postgres.make_migrated()))
    yield store
    store.close()


def test_control_planes_are_notified_when_leases_are_released_or_handed_over(postgres_store, postgres):
    store = postgres_store
    join(store, "a")
    claim(store, "1", "a"), claim(store, "2", "a")
    url = store.engine.url
    with psycopg.connect(host=str(postgres.folder), user="manta", dbname=url.database, autocommit=True) as listening:
        listening.execute(f"LISTEN {leases.CHANNEL}")
        for change in (
            lambda s: leases.hand_over(s, "1", "a", 1, "b"),
            lambda s: leases.release(s, "2", "a", 1),
            lambda s: leases.release_all(s, ["2"], "a"),
            lambda s: leases.leave(s, "a"),
        ):
            store.write(change)
            assert len(list(listening.notifies(timeout=SECONDS, stop_after=1))) == 1


def test_control_plane_that_renews_while_being_taken_for_dead_is_not_removed(postgres_store, monkeypatch):
    """Nobody else can be asked before its connections were cut; it may have had another one by then."""
    store, cut = postgres_store, []
    join(store, "a"), join(store, "b")
    let_time_pass(store, "a"), let_time_pass(store, "b")

    def renew_meanwhile(session, ids):
        cut.append(sorted(ids))
        leases.renew(session, "a")

    monkeypatch.setattr(leases, "_end_connections", renew_meanwhile)
    store.write(leases.remove_dead)
    assert (store.query(leases.living), cut) == (["a"], [["a", "b"]])


def test_control_plane_that_joins_again_does_not_cut_its_own_connections(store, monkeypatch):
    cut = []
    monkeypatch.setattr(leases, "_end_connections", lambda session, ids: cut.extend(ids))
    for me in ("a", "b", "b"):
        join(store, me, place="host:home")
    join(store, "b", alone=True)
    assert cut == ["a"]


@pytest.mark.parametrize("first", ["claim", "join"])
def test_claim_and_join_exclude_each_other_but_two_claims_do_not(postgres_store, first):
    """Else a lease could be left to one that is gone. Two that only look do not wait for each other."""
    store = postgres_store
    other = Store(store.engine.url.render_as_string(hide_password=False))
    join(store, "a")
    acts = {
        "claim": lambda s: leases.claim(s, "1", "a"),
        "join": lambda s: leases.join(s, "b", "host:b", "ray-1", False),
    }

    def operation(session):
        session.execute(text("SET LOCAL lock_timeout = '200ms'"))
        acts[first](session)
        if first == "claim":
            assert other.write(lambda s: leases.claim(s, "2", "a")) == 1
        (second,) = acts.keys() - {first}

        def blocked(theirs):
            theirs.execute(text("SET LOCAL lock_timeout = '200ms'"))
            acts[second](theirs)

        with pytest.raises(OperationalError, match="lock timeout"):
            other.write(blocked)

    try:
        store.write(operation)
    finally:
        other.close()


def test_owner_can_raise_its_epoch_above_the_one_that_agents_know(store):
    join(store, "a")
    assert claim(store, "job_1", "a") == 1
    assert store.write(lambda s: leases.raise_epoch(s, "job_1", "a", 1, above=7)) == 8
    with pytest.raises(LeaseLost):
        store.write(lambda s: leases.raise_epoch(s, "job_1", "a", 1, above=9))


def test_owner_stuck_in_a_transaction_is_cut_off_and_its_lease_can_be_claimed(postgres):
    """Its locks go with its connections, which whoever finds its time over cuts."""
    url = postgres.url(postgres.make_migrated())
    stale, other = Store(url, connection_name("a")), Store(url, connection_name("b"))
    stopped, goes_on = threading.Event(), threading.Event()

    def stand_still(session):
        leases.check(session, "job_1", "a", 1)
        session.execute(text("UPDATE leases SET epoch = 100"))
        stopped.set()
        goes_on.wait(60)

    try:
        join(stale, "a")
        assert claim(stale, "job_1", "a") == 1
        join(other, "b")
        writing = stale._submit(stand_still)
        stopped.wait(60)
        let_time_pass(other, "a")
        other.write(leases.remove_dead)
        assert claim(other, "job_1", "b") == 2
        goes_on.set()
        assert writing.exception() is not None
        assert other.query(leases.owned, "b") == {"job_1"}
    finally:
        goes_on.set()
        stale.close()
        other.close()


def test_restored_database_has_no_owners_and_goes_on_counting_epochs(store):
    join(store, "a")
    assert claim(store, "job_1", "a") == 1
    store.write(leases.clear_owners)
    with store.read() as session:
        assert (leases.living(session), leases.owned(session, "a")) == ([], set())
    join(store, "b")
    assert claim(store, "job_1", "b") == 2
