"""The thread that says that a control plane lives, on a real server."""

import threading
import time

import pytest
from sqlalchemy import text

from manta.service.leases.decisions import RENEW_SECONDS
from manta.service.leases.held import LeaseRenewer
from manta.service.store import Store, leases

SECONDS = 30.0


class Heard:
    """What a renewer says, for whoever waits for it."""

    def __init__(self):
        self._changed, self.renewals, self.woken = threading.Condition(), [], 0

    def renewed(self, requested_at, in_time):
        with self._changed:
            self.renewals.append((requested_at, in_time))
            self._changed.notify_all()

    def wake(self):
        with self._changed:
            self.woken += 1
            self._changed.notify_all()

    def until(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, SECONDS)


@pytest.fixture
def kept(postgres):
    store, heard = Store(postgres.url(postgres.make_migrated())), Heard()
    store.write(lambda session: leases.join(session, "me", "host:me", "ray-1", False))
    renewer = LeaseRenewer(store.database, "me", heard.renewed, heard.wake)
    renewer.start()
    yield store, heard
    renewer.stop()
    store.write(leases.wake_control_planes)
    renewer._thread.join(SECONDS)
    store.close()


def lease_until(store):
    with store.read() as session:
        return session.execute(text("SELECT lease_until FROM control_planes")).scalar_one()


def test_keeper_renews_regularly_by_the_databases_clock(kept, monkeypatch):
    store, heard = kept
    waits, wait = [], store.database.wait_for_notification
    noted = lambda connection, seconds: waits.append(seconds) or wait(connection, seconds)  # noqa: E731
    monkeypatch.setattr(store.database, "wait_for_notification", noted)
    heard.until(lambda: heard.renewals)
    before, count = lease_until(store), len(heard.renewals)
    heard.until(lambda: len(heard.renewals) > count + 1)  # one of these was asked for after that look
    assert lease_until(store) > before
    asked = [requested_at for requested_at, _ in heard.renewals]
    assert asked == sorted(asked) and all(in_time for _, in_time in heard.renewals)
    assert waits and max(waits) <= RENEW_SECONDS, "else a busy database may take it for dead"
    assert not heard.woken, "nobody has anything to be seen"


def test_renewal_counts_from_when_it_was_asked_for_however_late_the_answer(kept, monkeypatch):
    _, heard = kept
    heard.until(lambda: heard.renewals)
    begun, renew = [], leases.renew

    def renew_late(session, me):
        begun.append(time.monotonic())
        return renew(session, me)

    monkeypatch.setattr(leases, "renew", renew_late)
    count = len(heard.renewals)
    heard.until(lambda: begun and len(heard.renewals) > count + 1)
    requested_at, _ = heard.renewals[-1]
    assert requested_at <= begun[-1]


def test_keeper_reports_that_it_renewed_too_late_once_its_row_is_gone(kept):
    store, heard = kept
    heard.until(lambda: heard.renewals)
    store.write(lambda session: session.execute(text("DELETE FROM control_planes")))
    heard.until(lambda: not heard.renewals[-1][1])


def test_keeper_is_woken_by_other_control_planes(kept):
    store, heard = kept
    heard.until(lambda: heard.renewals)  # it listens by then
    store.write(leases.wake_control_planes)
    heard.until(lambda: heard.woken)


def test_keeper_continues_with_another_connection_when_its_own_is_cut(kept):
    store, heard = kept
    heard.until(lambda: heard.renewals)
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'UPDATE control_planes%'"
    others = f"{cut} AND datname = current_database() AND pid <> pg_backend_pid()"
    store.write(lambda session: session.execute(text(others)))
    count = len(heard.renewals)
    heard.until(lambda: len(heard.renewals) > count + 1)
    assert heard.renewals[-1][1]
