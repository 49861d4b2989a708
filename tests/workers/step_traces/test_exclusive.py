"""Every moment of a rank belongs to one slice at most: the innermost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.step_traces.analysis import own_seconds
from manta.workers.step_traces.assembly import nested
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
