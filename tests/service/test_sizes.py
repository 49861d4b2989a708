"""With how many replicas a job may run, and for how many there is room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.placement import Capacity
from service.sizes import SizeOutOfBounds, resized, room_for, size_within, sizes_of
from workers.config import ParallelConfig
from workers.spec_problems import SpecError
from workers.spec_reading import parse_job_spec


def spec(**sections):
    document = {
        "model": {"layers": 2, "hidden_size": 32, "heads": 4, "sequence_length": 8},
        "data": {"source": "text", "paths": ["corpus.txt"]},
        "train": {"steps": 10, "global_batch_size": 8},
        "parallel": {"tensor": 2, "data": 2},
    }
    return parse_job_spec({**document, **sections})


def test_size_is_fixed_unless_elastic_says_otherwise():
    assert sizes_of(spec()) == range(2, 3)
    assert sizes_of(spec(elastic={"min_data": 1, "max_data": 4})) == range(1, 5)
    assert sizes_of(spec(elastic={"min_data": 1})) == range(1, 3)


def test_resized_spec_differs_in_nothing_else():
    before = spec(elastic={"max_data": 4})
    after = resized(before, 3)
    assert after.layout.data == 3
    assert resized(after, 2) == before
    assert resized(before, 2) is before


@pytest.mark.parametrize(("free", "room"), [((8,), 2), ((3, 3), 1), ((1, 1, 1, 1), 0), ((2, 2, 2, 3), 2)])
def test_room_counts_whole_replicas_of_whole_tensor_groups(free, room):
    nodes = {f"node{index}": (8, units) for index, units in enumerate(free)}
    capacity = Capacity("manta_slot", 8 * len(free), sum(free), nodes)
    assert room_for(ParallelConfig(tensor=2, pipeline=2, data=2), capacity) == room


@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 8), st.integers(0, 6), st.integers(0, 6))
def test_size_is_the_wanted_one_or_as_near_as_there_is_room(least, more, wanted, held, room):
    sizes = range(least, least + more + 1)
    found = size_within(sizes, wanted, held, room)
    if found is None:
        assert min(wanted, held + room) not in sizes
    else:
        assert found in sizes
        assert found <= held + room
        assert found == wanted or found == held + room < wanted


def test_a_size_that_some_batch_cannot_feed_is_refused_when_the_spec_is_read():
    with pytest.raises(SpecError) as caught:
        spec(elastic={"max_data": 9})
    (problem,) = caught.value.problems
    assert problem.path == "elastic.max_data"
    assert problem.rule.startswith("9 replicas do not work: ")
    assert problem.suggestion == "8"


def test_sentence_about_a_size_out_of_bounds_says_what_would_work():
    assert str(SizeOutOfBounds("job_1", 9, range(1, 5))) == (
        "job_1 cannot run with 9 replicas: its elastic.min_data..max_data is 1..4"
    )
    assert "its size is fixed" in str(SizeOutOfBounds("job_1", 9, range(2, 3)))
