"""What a rank has recorded arrives as it was."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.protocol.json_codec import MalformedMessage, from_json, to_json
from manta.workers.timing.recording import KINDS, PackedRecording, Recording, Slice, TracedStep

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
    empty = Recording((), (), problem="the recording was broken off")
    assert from_json(PackedRecording, asdict(empty.pack())).unpack() == empty
