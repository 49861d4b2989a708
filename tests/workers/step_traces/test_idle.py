"""The bubble of a trace is that of the schedule that was run."""

import pytest
from drawn_schedules import SECONDS, SHAPES
from hypothesis import given
from simulated_traces import timeline_of, trace_of

from manta.workers.parallel.pipeline.schedules.simulate import PassTimes
from manta.workers.step_traces.analysis import bubble


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
