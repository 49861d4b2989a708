"""Recordings of steps: contents and storage."""

from contextlib import nullcontext
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.liveness.progress import Progress
from manta.workers.protocol.json_codec import MalformedMessage, from_json, to_json
from manta.workers.timing.recorder import DeviceMoments, HostMoments, Recorder
from manta.workers.timing.recording import KINDS, PackedRecording, Recording, Slice, TracedStep
from manta.workers.timing.step_phases import StepPhases


@pytest.fixture
def clock():
    """A clock that moves when told to."""
    moments = HostMoments()
    moments.time = 100.0
    moments.now = lambda: moments.time
    return moments


class Work:
    """A communication that takes a while."""

    def __init__(self, clock, seconds, idle=None):
        self.clock, self.seconds, self.idle = clock, seconds, idle

    def wait(self):
        self.clock.time += self.seconds
        if self.idle is not None:
            self.idle[0] += self.seconds / 2


def spans(recording):
    return [(each.kind, each.start - 100, each.end - 100, each.micro_batch, each.stage) for each in recording.slices]


def test_recorded_phases_are_nested(clock):
    recorder = Recorder(1, 1, clock)
    recorder.begin_step(5)
    with recorder.phase("forward", nullcontext(), 3, 1):
        clock.time += 1
        with recorder.phase("recompute", nullcontext(), -1, -1):
            clock.time += 2
        with recorder.phase("tensor_communication", nullcontext(), -1, -1):
            clock.time += 4
    with recorder.phase("data", nullcontext(), -1, -1):
        clock.time += 8
    clock.time += 16
    recorder.end_step()
    recording = recorder.recording()
    assert spans(recording) == [("forward", 0, 7, 3, 1), ("recompute", 1, 3, 3, 1), ("loader", 7, 15, None, None)]
    assert recording.steps == ((5, 100, 131),)
    assert recorder.done and not recording.problem


def test_recorded_communications_have_start_wait_and_place(clock):
    idle = [0.0]
    recorder = Recorder(1, 1, clock, lambda: idle[0])
    recorder.begin_step(5)
    with recorder.phase("receive_forward", nullcontext(), 2, 1):
        recorder.issues()
        message = recorder.received(Work(clock, 6, idle), peer=3, size=64)
    clock.time += 1
    with recorder.phase("forward", nullcontext(), 2, 1):
        message.wait()
        recorder.issues()
        clock.time += 1
        recorder.collective(Work(clock, 2), "all_reduce", "tensor", 9, 32).wait()
    with recorder.phase("send_forward", nullcontext(), 2, 1):
        recorder.issues()
        recorder.sent(4, 64)
        recorder.issues()
        recorder.sent(4, 64)
    recorder.end_step()
    forward, received, collective, *sent = recorder.recording().slices
    assert forward.end - forward.start == 9
    assert received.kind == "receive" and (received.peer, received.number, received.bytes) == (3, 1, 64)
    assert (received.issued, received.start, received.end, received.wait) == (100, 101, 107, 3)
    assert (received.micro_batch, received.stage) == (2, 1)
    assert (collective.operation, collective.axis, collective.number, collective.bytes) == (
        "all_reduce",
        "tensor",
        9,
        32,
    )
    assert (collective.issued, collective.start, collective.wait, collective.micro_batch) == (107, 108, 0, 2)
    assert [(each.kind, each.peer, each.number) for each in sent] == [("send", 4, 1), ("send", 4, 2)]


def test_a_step_that_broke_off_leaves_nothing(clock):
    recorder = Recorder(1, 2, clock)
    recorder.begin_step(5)
    with pytest.raises(ValueError, match="no"), recorder.phase("forward", nullcontext(), 0, 0):
        raise ValueError("no")
    recorder.begin_step(5)
    with recorder.phase("backward", nullcontext(), 0, 0):
        clock.time += 1
    recorder.end_step()
    assert not recorder.done
    recorder.begin_step(6)
    with recorder.phase("forward", nullcontext(), 0, 0):
        clock.time += 1
    recording = recorder.recording()
    assert [each.step for each in recording.steps] == [5]
    assert [each.kind for each in recording.slices] == ["backward"]


def test_recorder_drops_steps_beyond_its_slice_limit_with_a_note(clock):
    recorder = Recorder(1, 3, clock, max_slices=3)
    for step, count in ((1, 2), (2, 4), (3, 1)):
        assert not recorder.done, "all ranks end with the same step"
        recorder.begin_step(step)
        for number in range(count):
            with recorder.phase("forward", nullcontext(), number, 0):
                clock.time += 1
        recorder.end_step()
    recording = recorder.recording()
    assert recorder.done
    assert [each.step for each in recording.steps] == [1]
    assert len(recording.slices) == 2
    assert recording.problem == "only the first 1 of its steps are kept, more would have over 3 slices"


def test_recorded_forward_work_within_backward_is_recomputation(clock):
    phases = StepPhases(None, Progress())
    phases.recorder = recorder = Recorder(1, 1, clock)
    recorder.begin_step(1)
    for phase in ("forward", "backward", "backward_input"):
        with phases.phase(phase, 0), phases.forward_work():
            clock.time += 1
    recorder.end_step()
    kinds = [each.kind for each in recorder.recording().slices]
    assert sorted(kinds) == ["backward", "backward_input", "forward", "recompute", "recompute"]


class Event:
    """Of a device that is 2 s behind its host, whose host takes a while to notice."""

    def __init__(self, host):
        self.host, self.at = host, None

    def record(self):
        self.at = self.host[0] + 2

    def elapsed_time(self, later):
        return 1000 * (later.at - self.at)


def test_times_of_a_device_are_its_events_on_the_hosts_clock(monkeypatch):
    host = [50.0]

    def settle():
        host[0] += 0.5

    monkeypatch.setattr("manta.workers.timing.recorder.time.monotonic", lambda: host[0])
    moments = DeviceMoments(lambda: Event(host), settle)
    recorder = Recorder(1, 1, moments)
    recorder.begin_step(1)
    with recorder.phase("forward", nullcontext(), 0, 0):
        host[0] += 3
    recorder.end_step()
    recording = recorder.recording()
    (forward,) = recording.slices
    assert recording.device and recording.error_seconds == 0.25
    assert forward.end - forward.start == pytest.approx(3)
    # The device passed its first event between 50.5 and 51 by the host's clock.
    assert forward.start == pytest.approx(50.75 + 0.5)


MOMENTS = st.floats(0.0, 1e4)
COUNTS = st.none() | st.integers(0, 2**50)
SLICES = st.builds(
    lambda kind, start, length, before, **about: Slice(
        kind, start, start + length, issued=None if before is None else start - before, **about
    ),
    st.sampled_from(KINDS),
    MOMENTS,
    MOMENTS,
    st.none() | st.floats(0.0, 10.0),
    step=st.integers(1, 2**40),
    stage=COUNTS,
    micro_batch=COUNTS,
    operation=st.none() | st.sampled_from(["all_reduce", "all_gather"]),
    bytes=COUNTS,
    axis=st.none() | st.just("tensor"),
    wait=st.none() | MOMENTS,
    peer=COUNTS,
    number=COUNTS,
)


@given(st.lists(SLICES, max_size=20), st.floats(0.0, 1e6), st.booleans(), st.text(max_size=9))
def test_recording_survives_packing_and_json(slices, began, device, problem):
    steps = (TracedStep(3, began, began + 1.5), TracedStep(4, began + 1.5, began + 2.5))
    sent = Recording(steps, tuple(slices), "here", device, 0.125, problem, peak_flops=1e12)
    packed = from_json(PackedRecording, to_json(sent.pack()))
    got = packed.unpack()
    assert packed.count == len(slices)
    assert (got.steps, got.clock, got.device, got.error_seconds) == (steps, "here", device, 0.125)
    assert (got.problem, got.peak_flops) == (problem, 1e12)
    for before, after in zip(slices, got.slices, strict=True):
        for name, value in before._asdict().items():
            close = pytest.approx(value, abs=3e-7) if isinstance(value, float) else value
            assert after._asdict()[name] == close, name


def test_packed_recording_of_a_thousand_slices_is_short():
    slices = tuple(Slice("forward", 0.001 * n, 0.001 * n + 0.0007, 1, 0, n) for n in range(1000))
    packed = Recording((TracedStep(1, 0.0, 1.0),), slices).pack()
    assert len(packed.packed) < 20 * 1000


@pytest.mark.parametrize("packed", ["", "no base 85 \x7f", "c$|h"])
def test_malformed_packed_recording_is_refused(packed):
    with pytest.raises(MalformedMessage, match="recording"):
        PackedRecording(packed).unpack()


def test_a_recording_without_steps_travels_too():
    empty = Recording((), (), problem="the recording was interrupted")
    assert from_json(PackedRecording, asdict(empty.pack())).unpack() == empty
