"""What a rank has to say arrives in order, in batches, and all of it before the rank ends."""

import threading
import time

import pytest

from manta.workers.liveness.rank_samples import RankSample, packed
from manta.workers.protocol.reports import Event, Finished, Metrics
from manta.workers.training import reporter as module
from manta.workers.training.reporter import Reporter


class Listener:
    """Takes what is shipped."""

    def __init__(self, seconds=0.0):
        self.batches, self._seconds, self.heard = [], seconds, threading.Event()

    def __call__(self, messages):
        time.sleep(self._seconds)
        self.batches.append([message.payload for message in messages])
        self.heard.set()

    @property
    def payloads(self):
        return [payload for batch in self.batches for payload in batch]


def test_reporter_has_delivered_everything_when_it_is_closed(monkeypatch):
    """The process ends right after that, and so does a thread that still ships."""
    monkeypatch.setattr(module, "BATCH_SECONDS", 1000.0)
    listener = Listener(seconds=0.02)
    reporter = Reporter(listener)
    rows = [{"step": step} for step in range(1, 6)]
    for row in rows:
        reporter.metrics(row)
    reporter.event("told", 5, "something happened", {"a": 1})
    reporter.send(Finished(5))
    reporter.close()
    expected = [*(Metrics((row,)) for row in rows), Event("told", "something happened", 5, {"a": 1}), Finished(5)]
    assert listener.payloads == expected
    assert not reporter._thread.is_alive(), "and nobody has waited for the time to be over"


def test_reporter_builds_slow_messages_on_its_own_thread_in_order():
    listener, made_by = Listener(), []

    def make():
        made_by.append(threading.current_thread().name)
        return Finished(2)

    reporter = Reporter(listener)
    reporter.metrics({"step": 1})
    reporter.deferred(make)
    reporter.send(Finished(3))
    reporter.close()
    assert listener.payloads == [Metrics(({"step": 1},)), Finished(2), Finished(3)]
    assert made_by == ["reporter"]


def test_reporter_skips_a_message_that_cannot_be_built(capfd):
    """A recovery waits for what a rank says last, and kills one that says nothing."""

    def fail():
        raise OSError(28, "No space left on device")

    listener = Listener()
    reporter = Reporter(listener)
    reporter.metrics({"step": 1})
    reporter.deferred(fail)
    reporter.send(Finished(2))
    reporter.close()
    assert listener.payloads == [Metrics(({"step": 1},)), Finished(2)]
    assert "No space left on device" in capfd.readouterr().err


def test_reporter_ships_urgent_messages_without_waiting_for_a_batch(monkeypatch):
    monkeypatch.setattr(module, "BATCH_SECONDS", 1000.0)
    listener = Listener()
    reporter = Reporter(listener)
    reporter.metrics({"step": 1})
    assert listener.heard.wait(20)
    listener.heard.clear()
    for step in (2, 3):
        reporter.metrics({"step": step})
    reporter.send(Finished(3))
    assert listener.heard.wait(20)
    reporter.close()
    assert not reporter._thread.is_alive(), "nor does its end"
    assert listener.payloads[-1] == Finished(3)
    assert len(listener.batches) <= 3, "what came meanwhile is one batch"


def test_reporter_batches_rows_again_after_an_urgent_message(monkeypatch):
    monkeypatch.setattr(module, "BATCH_SECONDS", 0.0)
    urgent, heard = [], threading.Event()

    def sink(messages):
        urgent.append(reporter._urgent.is_set())
        heard.set()

    reporter = Reporter(sink)
    reporter.send(Finished(1))
    assert heard.wait(20)
    heard.clear()
    reporter.metrics({"step": 2})
    assert heard.wait(20)
    assert urgent[1] is False
    reporter.close()


def test_messages_have_the_time_they_were_made_at(monkeypatch):
    monkeypatch.setattr(module.time, "time", lambda: 100.0)
    shipped, hold = [], threading.Event()

    def sink(messages):
        shipped.extend(messages)
        assert hold.wait(20)

    reporter = Reporter(sink)
    reporter.send(Finished(1))
    reporter.send(Finished(2))
    monkeypatch.setattr(module.time, "time", lambda: 200.0)
    hold.set()
    reporter.close()
    assert [message.time for message in shipped] == [100.0, 100.0]


@pytest.mark.parametrize("error", [BrokenPipeError, ConnectionResetError])
def test_reporter_thread_ends_when_its_listener_is_gone(error):
    def gone(messages):
        raise error

    reporter = Reporter(gone)
    reporter.metrics({"step": 1})
    reporter._thread.join(20)
    assert not reporter._thread.is_alive(), "not even until it is closed"
    reporter.close()


def test_reporter_waits_for_a_stuck_listener_no_longer_than_asked():
    hold = threading.Event()
    reporter = Reporter(lambda messages: hold.wait(20))
    reporter.send(Finished(1))
    reporter.close(timeout=0.01)
    assert reporter._thread.is_alive()
    assert reporter._thread.daemon, "nor for longer than the process has anything else to do"
    hold.set()


def test_reporter_attaches_rank_samples_to_the_next_row_only():
    listener = Listener()
    reporter = Reporter(listener)
    sample = RankSample(1, 0.1, None, packed([1.0]))
    reporter.ranks(sample)
    reporter.metrics({"step": 1})
    reporter.metrics({"step": 2})
    reporter.close()
    assert listener.payloads == [Metrics(({"step": 1},), sample), Metrics(({"step": 2},))]
