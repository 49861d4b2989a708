"""What waits to be written is counted, and how long the oldest of it has waited."""

import threading
from concurrent.futures import Future

from manta.service.store import Store
from manta.service.store.database import WriteQueue


class Clock:
    """Stands until it is moved."""

    now = 0.0

    def __call__(self):
        return self.now


def test_writes_count_as_waiting_until_they_succeed_or_fail(store: Store):
    before, _ = store.writes.done
    begun, go_on = threading.Event(), threading.Event()

    def slow(session):
        begun.set()
        assert go_on.wait(60)
        raise ValueError

    store.write_later(slow)
    assert begun.wait(60)
    store.fenced(AnyFence()).write_later(lambda session: None)
    assert store.writes.length == 2
    assert store.writes.oldest_seconds > 0
    counted = store._submit(lambda session: (store.writes.length, store.writes.done[0]))
    go_on.set()
    assert counted.result(60) == (1, before + 2)


class AnyFence:
    """Lets everybody write."""

    def check(self, session):
        pass


def test_time_of_a_write_begins_when_it_is_asked_for():
    clock, first, second = Clock(), Future(), Future()
    writes = WriteQueue(clock)
    writes.add(first)
    clock.now = 2
    writes.add(second)
    clock.now = 3
    assert writes.oldest_seconds == 3
    first.set_result(None)
    assert (writes.oldest_seconds, writes.done) == (1, (1, 3))
    second.set_exception(ValueError())
    assert writes.done == (2, 4)
