"""How far a device has come is told by marks in its stream, which nobody waits for."""

import threading

import pytest
from pretended_devices import Device, Event, Network, no_thread

from manta.workers.liveness import device_trail
from manta.workers.liveness.device_trail import DeviceTrail
from manta.workers.liveness.progress import Progress, ProgressReader, progress_path

DATA = 2


class Rig:
    """A trail on a device of its own, and the record that it tells."""

    def __init__(self, tmp_path):
        self.network = Network(members={"sum": (0, 1)})
        self.device, self.progress = Device(0, self.network), Progress.shared(tmp_path, 0)
        self.trail = DeviceTrail(lambda: Event(self.device), self.progress)
        self.reader = ProgressReader(progress_path(tmp_path, 0))

    def begin(self, step=1):
        self.progress.begin_step(step)
        self.trail.begin_step()

    def at(self, phase, micro_batch=-1):
        self.progress.at(phase, micro_batch)
        self.trail.at(self.progress.position)

    def compute(self, seconds):
        self.device.queue("compute", seconds)

    def communicate(self, number=1, others_at=None):
        """A sum along data, to which the other rank comes at a time of the device's, or not."""
        if others_at is not None:
            self.network.came.setdefault("sum", {})[1] = others_at
        self.trail.arrives("data", number)
        self.device.queue("start", "sum")
        self.trail.waits(DATA, number)
        self.device.queue("wait", "sum")
        self.trail.wait_ended()

    def seen(self):
        self.device.run()
        self.trail.poll()
        return self.reader.read().device


@pytest.fixture
def rig(tmp_path):
    with no_thread():
        made = Rig(tmp_path)
        yield made
        made.reader.close()


def test_device_trail_is_empty_before_the_first_step(rig):
    before = Event.made
    rig.at("forward")
    rig.trail.poll()
    assert rig.reader.read().device is None
    assert Event.made == before


def test_device_phase_follows_its_work_rather_than_its_host(rig):
    rig.begin(7)
    rig.at("forward", 2)
    rig.compute(1.0)
    rig.at("backward", 3)
    rig.compute(float("inf"))
    rig.at("optimizer")
    seen = rig.seen()
    assert (seen.phase, seen.step, seen.micro_batch) == ("backward", 7, 3)
    assert (seen.pending, seen.waits, seen.fresh) == (1, False, True)
    assert rig.reader.read().phase == "optimizer"


def test_device_trail_places_the_device_in_the_begun_step_before_its_first_mark(rig):
    rig.begin(7)
    rig.compute(float("inf"))
    rig.at("forward")
    seen = rig.seen()
    assert (seen.phase, seen.step, seen.pending) == ("data", 7, 1)


def test_device_wait_is_reported_until_it_is_over(rig):
    rig.begin()
    rig.communicate(number=4)
    rig.at("optimizer")
    seen = rig.seen()
    assert (seen.waits, seen.channel, seen.number, seen.waits_for) == (True, DATA, 4, None)
    assert seen.counts["data"] == 4
    rig.network.came["sum"][1] = 9.0
    seen = rig.seen()
    assert (seen.waits, seen.channel, seen.number, seen.pending, seen.phase) == (False, None, 0, 0, "optimizer")


@pytest.mark.parametrize(("peer", "sending"), [(0, False), (5, True)])
def test_device_trail_names_the_peer_of_a_message(rig, peer, sending):
    rig.begin()
    rig.device.queue("start", "sum")
    rig.trail.waits(1, 3, peer, sending)
    rig.device.queue("wait", "sum")
    rig.trail.wait_ended()
    seen = rig.seen()
    assert (seen.waits, seen.channel, seen.number, seen.waits_for, seen.sending) == (True, 1, 3, peer, sending)


def test_device_trail_does_not_count_a_rank_that_still_computes_as_waiting(rig):
    rig.begin()
    rig.compute(float("inf"))
    rig.communicate()
    seen = rig.seen()
    assert (seen.waits, seen.counts["data"]) == (False, 0)


def test_device_trail_counts_passed_marks_as_heartbeats(rig):
    rig.begin()
    rig.compute(1.0)
    rig.at("backward")
    before = rig.reader.read().heartbeat
    rig.seen()
    assert rig.reader.read().heartbeat == before + 2
    rig.seen()
    assert rig.reader.read().heartbeat == before + 2, "to look is none"


def test_device_trail_step_times_exclude_waits_on_the_device(rig):
    """2 s, a wait of 5 s, 1 s: known once the step after it has begun on the device as well."""
    rig.begin(1)
    rig.compute(2.0)
    rig.communicate(others_at=7.0)
    rig.compute(1.0)
    rig.begin(2)
    rig.seen()
    assert rig.trail.step_seconds is None
    rig.compute(3.0)
    rig.begin(3)
    assert rig.trail.step_seconds == (8.0, 3.0)
    rig.seen()
    rig.begin(4)
    assert rig.trail.step_seconds == (3.0, 3.0)


def test_events_are_used_again(rig):
    def step(number):
        rig.begin(number)
        rig.at("forward")
        rig.communicate(others_at=0.0)
        rig.seen()

    step(1)
    step(2)
    made = Event.made
    for number in range(3, 9):
        step(number)
    assert Event.made == made


def test_device_trail_forgets_marks_of_an_earlier_generation(rig):
    rig.begin()
    rig.communicate()
    rig.seen()
    moves = rig.reader.read().heartbeat
    rig.trail.forget()
    assert rig.reader.read().device is None
    assert rig.reader.read().heartbeat == moves
    rig.network.came["sum"][1] = 9.0
    rig.begin(1)
    seen = rig.seen()
    assert (seen.waits, seen.pending, sum(seen.counts.values())) == (False, 0, 0)
    assert rig.trail.step_seconds is None


class Asked:
    """An event that says on which thread it was asked."""

    def __init__(self, answer):
        self.answer, self.threads, self.asked = answer, [], threading.Event()

    def record(self):
        """Nothing is queued."""

    def query(self):
        self.threads.append(threading.current_thread().name)
        if len(self.threads) > 1:
            self.asked.set()
        return self.answer()


def test_device_trail_thread_ends_with_the_generation(tmp_path, monkeypatch):
    monkeypatch.setattr(device_trail, "POLL_SECONDS", 0.001)
    event, before = Asked(lambda: False), set(threading.enumerate())
    trail = DeviceTrail(lambda: event, Progress())
    trail.begin_step()
    (looking,) = set(threading.enumerate()) - before
    assert event.asked.wait(20.0)
    assert set(event.threads) == {"device trail"}
    trail.forget()
    looking.join(20.0)
    assert not looking.is_alive()


def test_device_trail_poll_does_not_wait_for_a_mark_being_recorded(tmp_path):
    """A device with a full queue holds its host up in whatever that puts there next, a mark too."""
    looked = threading.Event()

    class Full(Asked):
        def record(self):
            threading.Thread(target=lambda: (trail.poll(), looked.set()), daemon=True).start()
            assert looked.wait(20.0), "poll waits for the host, which waits for the device"

    with no_thread():
        trail = DeviceTrail(lambda: Full(lambda: False), Progress())
        trail.begin_step()
    assert looked.is_set()


def test_failed_device_raises_in_the_trainer_and_ends_the_trail_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(device_trail, "POLL_SECONDS", 0.001)

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    before = set(threading.enumerate())
    trail = DeviceTrail(lambda: Asked(fail), Progress())
    trail.begin_step()
    for looking in set(threading.enumerate()) - before:
        looking.join(20.0)
        assert not looking.is_alive()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        trail.begin_step()
