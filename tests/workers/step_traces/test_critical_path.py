"""The chain that a step's length hangs on is as long as the step, and leads from rank to rank by what was sent."""

import pytest
from drawn_schedules import SECONDS, SHAPES
from hypothesis import given
from simulated_traces import timeline_of, trace_of

from manta.workers.parallel.pipeline.schedules.simulate import PassTimes
from manta.workers.step_traces.analysis import critical_path
from manta.workers.step_traces.assembly import PASSES, StepTrace, TracedRank
from manta.workers.timing.recording import Slice, TracedStep


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
