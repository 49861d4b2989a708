"""A recorded step: clocks of ranks, exclusive and idle time, the critical path, Perfetto's format."""

from dataclasses import replace

import pytest
from drawn_schedules import SECONDS, SHAPES
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto_reader import fields, read_trace
from simulated_traces import grid_of, recordings_of, timeline_of, trace_of

from manta.workers.parallel.pipeline.schedules.simulate import PassTimes
from manta.workers.step_traces.analysis import bubble, critical_path, own_seconds
from manta.workers.step_traces.assembly import PASSES, StepTrace, TracedRank, assembled, clock_offsets, nested
from manta.workers.step_traces.document import name_of
from manta.workers.step_traces.perfetto import perfetto
from manta.workers.timing.recording import Recording, Slice, TracedStep


def lane(*spans):
    return [Slice("forward", start, end, 1) for start, end in spans]


def test_own_seconds_of_a_slice_exclude_its_inner_slices():
    slices = lane((0, 10), (1, 4), (2, 3), (5, 6), (10, 12))
    assert [seconds for _, _, seconds in own_seconds(slices)] == [6, 2, 1, 1, 2]
    assert [len(around) for _, around in nested(slices)] == [0, 1, 2, 1, 0]


@st.composite
def trees(draw, start=0.0, end=100.0, depth=3):
    """Slices one within another or apart, by their start."""
    marks = sorted(draw(st.lists(st.floats(start, end), max_size=6)))
    spans = list(zip(marks[::2], marks[1::2], strict=False))
    nested_spans = []
    for low, high in spans:
        nested_spans.append((low, high))
        if depth and high > low:
            nested_spans += draw(trees(low, high, depth - 1))
    return nested_spans


@given(trees())
def test_own_seconds_sum_to_the_outermost_slices_even_after_packing(spans):
    slices = lane(*spans)
    packed = Recording((TracedStep(1, 0.0, 100.0),), tuple(slices)).pack().unpack().slices
    for each in (slices, packed):
        outermost = sum(one.end - one.start for one, around in nested(each) if not around)
        assert sum(seconds for _, _, seconds in own_seconds(each)) == pytest.approx(outermost, abs=1e-4)


@given(SHAPES, SECONDS, SECONDS, SECONDS)
def test_traced_bubble_matches_the_idle_time_of_the_simulated_schedule(shape, forward, backward_input, backward_weight):
    kind, stages, virtual_stages, _ = shape
    timeline = timeline_of(*shape, PassTimes(forward, backward_input, backward_weight))
    trace = trace_of(kind, stages, virtual_stages, timeline)
    for rank, passes in zip(trace.ranks, timeline.passes, strict=True):
        works = sum(end - start for _, start, end in passes)
        assert bubble(trace, rank) == pytest.approx(1 - works / timeline.makespan, abs=1e-6)


def test_bubble_of_a_traced_1f1b_schedule_matches_the_paper():
    """(p - 1) / (m + p - 1), arXiv:2104.04473, section 2.2.1."""
    trace = trace_of("1f1b", 2, 1, timeline_of("1f1b", 2, 1, 4, PassTimes(1.0, 1.0, 1.0)))
    assert [bubble(trace, rank) for rank in trace.ranks] == pytest.approx([1 / 5, 1 / 5])


def test_bubble_of_a_trace_excludes_transfers_and_includes_unknown_waits():
    trace = trace_of("1f1b", 2, 1, timeline_of("1f1b", 2, 1, 1, PassTimes(1.0, 1.0, 1.0)))
    first, _ = trace.ranks
    moved = [each._replace(wait=0.0) if each.kind == "receive" else each for each in first.slices]
    unknown = [each._replace(wait=None) for each in first.slices]
    whole = bubble(trace, first)
    assert whole == pytest.approx(0.5)
    assert bubble(trace, type(first)(0, first.steps, tuple(moved))) == pytest.approx(0.0)
    assert bubble(trace, type(first)(0, first.steps, tuple(unknown))) == pytest.approx(whole)


def test_bubble_of_a_trace_without_a_pipeline_is_zero():
    trace = trace_of("1f1b", 1, 1, timeline_of("1f1b", 1, 1, 3, PassTimes(1.0, 1.0, 1.0)))
    assert bubble(trace, trace.ranks[0]) == 0.0


def computed(trace, path):
    """Seconds that the passes of the path compute."""
    total = 0.0
    for rank, index in path:
        each, slices = trace.ranks[rank].slices[index], trace.ranks[rank].slices
        if each.kind in PASSES:
            inside = (wait for wait in slices[index + 1 : index + 2] if wait.kind == "receive")
            total += each.end - each.start - sum(wait.end - wait.start for wait in inside)
    return total


@given(SHAPES, SECONDS, SECONDS, SECONDS)
def test_the_passes_of_the_path_take_the_whole_step(shape, forward, backward_input, backward_weight):
    kind, stages, virtual_stages, _ = shape
    timeline = timeline_of(*shape, PassTimes(forward, backward_input, backward_weight))
    trace = trace_of(kind, stages, virtual_stages, timeline)
    path = critical_path(trace)
    assert len(path) == len(set(path))
    assert computed(trace, path) == pytest.approx(timeline.makespan, rel=1e-6)


def collective(start, end, issued=None):
    return Slice("collective", start, end, 1, axis="world", number=1, operation="all_reduce", issued=issued or start)


def test_critical_path_follows_a_collective_to_its_last_rank():
    """Rank 1 computes for 5 s, the others for 1 s: the path is that of rank 1."""
    timeline = timeline_of("1f1b", 3, 1, 1, PassTimes(1.0, 1.0, 1.0))
    grid = trace_of("1f1b", 3, 1, timeline).grid
    step = (TracedStep(1, 0.0, 7.0),)
    lanes = [
        (Slice("forward", 0.0, long, 1), collective(long, 6.0), Slice("optimizer", 6.0, 7.0 - rank / 10, 1))
        for rank, long in enumerate((1.0, 5.0, 1.0))
    ]
    trace = StepTrace(grid, tuple(TracedRank(rank, step, lane) for rank, lane in enumerate(lanes)))
    assert critical_path(trace) == [(0, 2), (0, 1), (1, 0)]


def test_critical_path_of_an_empty_trace_is_empty():
    grid = trace_of("1f1b", 2, 1, timeline_of("1f1b", 2, 1, 1, PassTimes(1.0, 1.0, 1.0))).grid
    assert critical_path(StepTrace(grid, (TracedRank(0, (), ()),))) == []


@given(SHAPES, SECONDS, SECONDS)
@settings(max_examples=30)
def test_every_rank_has_its_track_and_every_slice_its_place(shape, forward, backward):
    kind, stages, virtual_stages, _ = shape
    trace = trace_of(kind, stages, virtual_stages, timeline_of(*shape, PassTimes(forward, backward, backward)))
    replica, *tracks = read_trace(perfetto(trace))
    assert (replica.name, replica.slices) == ("replica 0", [])
    assert [track.name for track in tracks] == [
        f"rank {rank} (tensor 0, pipeline {rank}, data 0)" for rank in range(stages)
    ]
    sent, received = set(), set()
    for rank, track in zip(trace.ranks, tracks, strict=True):
        step, *slices = track.slices
        assert (step["name"], step["depth"]) == ("step 7", 0)
        assert len(slices) == len(rank.slices)
        for each, read in zip(rank.slices, slices, strict=True):
            assert (read["name"], read["depth"] > 0) == (name_of(each), True)
            assert read["begin"] == pytest.approx(each.start * 1e9, abs=1000)
            assert read["end"] == pytest.approx(each.end * 1e9, abs=1000)
            said = {"step": each.step, "stage": each.stage, "micro_batch": each.micro_batch, "bytes": each.bytes}
            said |= {"axis": each.axis, "wait_seconds": each.wait}
            assert read["about"] == {name: value for name, value in said.items() if value is not None}
            if read["flows"]:
                (sent if each.kind == "send" else received).update(read["flows"])
    assert sent == received, "each message leads somewhere"


def test_perfetto_keeps_a_slice_within_its_outer_one_despite_rounding():
    lane = (Slice("forward", 0.0, 1.0, 1, 0, 300), Slice("collective", 0.5, 1.0 + 2e-7, 1, axis="tensor", number=3))
    trace = StepTrace(grid_of("1f1b", 1, 1), (TracedRank(0, (TracedStep(1, 0.0, 1.0),), lane),))
    _, track = read_trace(perfetto(trace))
    assert [each["depth"] for each in track.slices] == [0, 1, 2]
    assert {each["end"] for each in track.slices} == {10**9}
    assert track.slices[1]["about"]["micro_batch"] == 300


def test_perfetto_reader_of_the_tests_notices_truncation():
    trace = trace_of("1f1b", 2, 1, timeline_of("1f1b", 2, 1, 1, PassTimes(1.0, 1.0, 1.0)))
    with pytest.raises((AssertionError, IndexError)):
        list(fields(perfetto(trace)[:-1]))


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
