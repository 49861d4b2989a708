"""What is written for Perfetto is read back by its wire format alone: all tracks, all slices, where they were."""

import pytest
from drawn_schedules import SECONDS, SHAPES
from hypothesis import given, settings
from perfetto_reader import fields, read_trace
from simulated_traces import grid_of, timeline_of, trace_of

from benchmarks.support.timeline import PassTimes
from manta.workers.step_traces.analysis import name_of
from manta.workers.step_traces.assembly import StepTrace, TracedRank
from manta.workers.step_traces.perfetto import perfetto
from manta.workers.timing.recording import Slice, TracedStep


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
