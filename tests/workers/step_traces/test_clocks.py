"""Clocks that nobody has set together are put together by what their ranks did together, with an error that holds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_traces import grid_of, recordings_of, timeline_of

from manta.workers.parallel.pipeline.schedules.simulate import PassTimes
from manta.workers.step_traces.assembly import assembled, clock_offsets
from manta.workers.timing.recording import Recording, Slice, TracedStep


def meeting(number, begun, over):
    return Slice("collective", begun, over, 1, axis="world", number=number, issued=begun)


@st.composite
def meetings(draw):
    """Of two to five ranks on machines whose clocks are apart: when each came to collectives, and when it left."""
    apart = draw(st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=5))
    slices = [[] for _ in apart]
    now = 0.0
    for number in range(draw(st.integers(1, 6))):
        came = [now + draw(st.floats(0.0, 1.0)) for _ in apart]
        left = [max(came) + draw(st.floats(0.0, 0.5)) for _ in apart]
        now = max(left)
        for rank, ahead in enumerate(apart):
            slices[rank].append(meeting(number, came[rank] + ahead, left[rank] + ahead))
    steps = [(TracedStep(1, ahead, ahead + now),) for ahead in apart]
    return apart, {rank: Recording(steps[rank], tuple(each), f"machine {rank}") for rank, each in enumerate(slices)}


@given(meetings())
def test_clock_offset_is_within_its_stated_error(drawn):
    apart, recordings = drawn
    offsets = clock_offsets(recordings)
    for rank, ahead in enumerate(apart):
        offset = offsets[f"machine {rank}"]
        assert abs(offset.seconds - (ahead - apart[0])) <= offset.error_seconds + 1e-8
        assert offset.error_seconds <= 1.5, "no worse than the meeting that says most"


@given(st.floats(-1e5, 1e5))
def test_ranks_of_two_machines_are_put_on_one_clock(ahead):
    timeline = timeline_of("1f1b", 2, 1, 3, PassTimes(1.0, 1.0, 1.0))
    recordings = recordings_of("1f1b", 1, timeline)
    alone = assembled(recordings, grid_of("1f1b", 2, 1))
    assert alone.error_seconds == 0.0
    there = recordings[1]
    moved = [
        each._replace(start=each.start + ahead, end=each.end + ahead, issued=each.issued and each.issued + ahead)
        for each in there.slices
    ]
    steps = tuple(TracedStep(each.step, each.start + ahead, each.end + ahead) for each in there.steps)
    recordings[1] = replace(there, slices=tuple(moved), steps=steps, clock="there")
    apart = assembled(recordings, grid_of("1f1b", 2, 1))
    # Rank 1 comes first to the one meeting, by a pass of 2 s, so that its clock is known to a second.
    assert apart.error_seconds == pytest.approx(1.0)
    shift = apart.ranks[1].steps[0].start - alone.ranks[1].steps[0].start
    shift -= apart.ranks[0].steps[0].start - alone.ranks[0].steps[0].start
    assert abs(shift) <= apart.error_seconds + 1e-6


def test_clock_offset_without_a_meeting_is_known_to_a_steps_length():
    steps = {"here": TracedStep(1, 100.0, 103.0), "there": TracedStep(1, 900.0, 902.0)}
    recordings = {rank: Recording((step,), (), clock) for rank, (clock, step) in enumerate(steps.items())}
    offset = clock_offsets(recordings)["there"]
    assert (offset.seconds, offset.error_seconds) == (800.0, 3.0)


def test_inexact_device_clocks_add_their_error_to_a_trace():
    recordings = {0: Recording((TracedStep(1, 0.0, 1.0),), (), "here", device=True, error_seconds=0.25)}
    trace = assembled(recordings, grid_of("1f1b", 1, 1))
    assert (trace.error_seconds, trace.device) == (0.25, True)
