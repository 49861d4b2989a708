"""With how many replicas a job may run, and for how many there is room."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.cluster.placement import Capacity
from manta.service.cluster.sizes import (
    SizeOutOfBounds,
    fitting,
    in_use,
    largest_fitting_size,
    layout_in_use,
    resized,
    room_for,
    shapes_of,
    sizes_of,
    sizes_of_shape,
    smallest,
    staying_replicas,
    with_freed_units,
)
from manta.workers.config import ParallelConfig
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec
from manta.workers.spec.rules import find_problems


def spec(**sections):
    document = {
        "model": {"layers": 2, "hidden_size": 32, "heads": 4, "sequence_length": 8},
        "data": {"source": "text", "paths": ["corpus.txt"]},
        "train": {"steps": 10, "global_batch_size": 8},
        "parallel": {"tensor": 2, "data": 2},
    }
    return parse_job_spec({**document, **sections})


def test_job_size_is_fixed_unless_it_is_elastic():
    assert sizes_of(spec()) == range(2, 3)
    assert sizes_of(spec(elastic={"min_data": 1, "max_data": 4})) == range(1, 5)
    assert sizes_of(spec(elastic={"min_data": 1})) == range(1, 3)


def spread(expert=2, data=4, **sections):
    """A job with experts over `expert` ranks."""
    moe = {"experts": 4, "per_token": 2, "ffn_hidden_size": 16}
    model = {"layers": 2, "hidden_size": 32, "heads": 4, "sequence_length": 8, "family": "llama", "moe": moe}
    return spec(model=model, parallel={"expert": expert, "data": data, **sections.pop("parallel", {})}, **sections)


@pytest.mark.parametrize(("job", "sizes"), [
    (spread(), [4]), (spread(elastic={"min_data": 2, "max_data": 8}), [2, 4, 6, 8]),
    (spread(4, elastic={"max_data": 8}), [4, 8]), (spread(4, elastic={"min_data": 1, "reshape": True}), [4]),
    (spread(4, parallel={"context": 2}, elastic={"min_data": 2}), [2, 4]),
    (spread(2, parallel={"context": 2}, elastic={"min_data": 1}), [1, 2, 3, 4]),
    (spread(4, parallel={"tensor": 2, "expert_tensor": 1}, elastic={"min_data": 2, "max_data": 8}), [2, 4, 6, 8]),
])  # fmt: skip
def test_replicas_come_and_go_in_whole_expert_groups(job, sizes):
    """Context ranks of a replica are in the same group."""
    assert list(sizes_of(job)) == sizes


def test_resized_spec_differs_in_nothing_else():
    before = spec(elastic={"max_data": 4})
    after = resized(before, 3)
    assert after.layout.data == 3
    assert resized(after, 2) == before
    assert resized(before, 2) is before


@pytest.mark.parametrize(("free", "layout", "room"), [
    ((8,), {"pipeline": 2}, 2), ((3, 3), {"pipeline": 2}, 1), ((1, 1, 1, 1), {"pipeline": 2}, 0),
    ((2, 2, 2, 3), {"pipeline": 2}, 2), ((8, 8), {"context": 2}, 4), ((8, 8), {"pipeline": 2, "context": 2}, 2),
])  # fmt: skip
def test_room_counts_whole_replicas_of_whole_tensor_groups(free, layout, room):
    """One for each stage and each part of the context."""
    nodes = {f"node{index}": (8, units) for index, units in enumerate(free)}
    capacity = Capacity("manta_slot", 8 * len(free), sum(free), nodes)
    assert room_for(ParallelConfig(tensor=2, data=2, **layout), capacity) == room


@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 8), st.integers(0, 6), st.integers(0, 6), st.integers(1, 4))
def test_elastic_size_is_the_wanted_one_or_the_nearest_with_room(least, more, wanted, held, room, step):
    sizes = range(least, least + more + 1, step)
    replicas, possible = largest_fitting_size(sizes, wanted, held, room), min(wanted, held + room)
    if replicas is None:
        assert possible < least or possible >= sizes[-1] + step
    else:
        assert replicas in sizes
        assert possible - step < replicas <= possible


@pytest.mark.parametrize(("left", "staying"), [
    ([0, 2, 3, 4, 5], (2, 3, 4, 5)), ([0, 1, 3, 4], (0, 1, 3, 4)), ([1, 2, 4], (1, 2)), ([1, 4, 5], (4, 5)),
    ([3], None),
])  # fmt: skip
def test_whole_expert_groups_come_first_after_replicas_are_lost(left, staying):
    job = spread(data=6, elastic={"min_data": 2})
    assert staying_replicas(sizes_of(job), job.layout, left) == staying


def test_a_size_that_some_batch_cannot_feed_is_refused_when_the_spec_is_read():
    with pytest.raises(SpecError) as caught:
        spec(elastic={"max_data": 9})
    (problem,) = caught.value.problems
    assert problem.path == "elastic.max_data"
    assert problem.rule.startswith("9 replicas do not work: ")
    assert problem.suggestion == "8"


def test_size_out_of_bounds_error_names_the_allowed_sizes():
    assert str(SizeOutOfBounds("job_1", 9, range(1, 5))) == (
        "job_1 cannot run with 9 replicas: its elastic.min_data..max_data is 1..4"
    )
    assert str(SizeOutOfBounds("job_1", 3, range(2, 9, 2))).endswith(
        "is 2..8 in steps of 2, whole groups of parallel.expert"
    )
    assert "is 2..2, so its size is fixed" in str(SizeOutOfBounds("job_1", 9, range(2, 3)))
    assert "groups of parallel.expert, so its size is fixed" in str(SizeOutOfBounds("job_1", 1, range(2, 3, 2)))


def sizes(spec):
    return spec.layout.tensor, spec.layout.pipeline, spec.layout.data


def reshaping(**parallel):
    model = {"layers": 8, "hidden_size": 32, "heads": 4, "sequence_length": 8}
    return spec(model=model, parallel={"data": 1, **parallel}, elastic={"reshape": True})


@pytest.mark.parametrize(("parallel", "shapes"), [
    ({"tensor": 4, "pipeline": 2}, [(4, 2, 1), (4, 1, 1), (2, 2, 1), (2, 1, 1), (1, 2, 1), (1, 1, 1)]),
    ({"tensor": 2, "context": 2}, [(2, 1, 2), (2, 1, 1), (1, 1, 2), (1, 1, 1)]),
    ({"pipeline": 2, "context": 4}, [(1, 2, 4), (1, 2, 2), (1, 1, 4), (1, 2, 1), (1, 1, 2), (1, 1, 1)]),
])  # fmt: skip
def test_smaller_elastic_shapes_divide_the_submitted_one_largest_first_if_allowed(parallel, shapes):
    assert shapes_of(spec()) == [spec()]
    assert [sizes_of_shape(shape.layout)[:3] for shape in shapes_of(reshaping(**parallel))] == shapes


def test_reshaping_job_with_few_replicas_spreads_experts_over_fewer_ranks():
    shapes = shapes_of(spread(4, elastic={"min_data": 1, "reshape": True}, parallel={"tensor": 2}))
    assert [sizes_of_shape(shape.layout)[::3] for shape in shapes] == [(2, 4), (2, 2), (2, 1), (1, 4), (1, 2), (1, 1)]
    found = [fitting(shapes, 4, on(a=free)) for free in (4, 3, 2, 1)]
    assert [each and (sizes_of_shape(each.layout)[::3], each.layout.data) for each in found] == [
        ((2, 2), 2), ((2, 1), 1), ((2, 1), 1), ((1, 1), 1)]  # fmt: skip
    assert all(find_problems(each) == [] for each in found)


def test_reshaping_job_keeps_whole_experts_where_both_sizes_fit():
    whole = {"tensor": 2, "expert_tensor": 1, "expert_dispatch": "all_to_all"}
    submitted = spread(4, parallel=whole, elastic={"min_data": 1, "reshape": True})
    layouts = [shape.layout for shape in shapes_of(submitted)]
    assert [(each.tensor, each.expert_size, each.expert_tensor, each.expert_dispatch) for each in layouts] == [
        (2, 4, 1, "all_to_all"), (2, 2, 1, None), (2, 1, None, None),
        (1, 4, None, "all_to_all"), (1, 2, None, "all_to_all"), (1, 1, None, None),
    ]  # fmt: skip
    for each in layouts:
        of_shape = stored(each.tensor, each.pipeline, each.data, expert=each.expert_size)
        assert layout_in_use(submitted.layout, of_shape) == each


@pytest.mark.parametrize("parallel", [
    {"tensor": 4, "pipeline": 4, "schedule": "interleaved", "virtual_stages": 2},
    {"tensor": 2, "pipeline": 4, "schedule": "zb-v", "virtual_stages": 2},
    {"tensor": 2, "pipeline": 4, "stage_layers": [1, 2, 2, 3]},
    {"tensor": 4, "pipeline": 1, "sequence_parallel": True},
    {"pipeline": 2, "context": 4, "context_method": "ring", "context_order": "contiguous"},
])  # fmt: skip
def test_every_shape_is_a_spec_that_would_be_taken(parallel):
    smaller = shapes_of(reshaping(**parallel))
    assert sizes(smaller[-1])[:2] == (1, 1)
    assert all(find_problems(shape) == [] for shape in smaller)


def on(**free):
    """Nodes of four units each, of which so many are free."""
    return Capacity("manta_slot", 4 * len(free), sum(free.values()), {node: (4, each) for node, each in free.items()})


@pytest.mark.parametrize(("free", "chosen"), [
    ({"a": 1}, (1, 1, 1)), ({"a": 2}, (2, 1, 1)), ({"a": 3}, (2, 1, 1)), ({"a": 4}, (2, 2, 1)),
    ({"a": 4, "b": 4}, (2, 2, 2)), ({"a": 0}, None),
])  # fmt: skip
def test_largest_layout_that_fits_is_taken(free, chosen):
    shapes = shapes_of(spec(parallel={"tensor": 2, "pipeline": 2, "data": 2}, elastic={"min_data": 1, "reshape": True}))
    taken = fitting(shapes, 2, on(**free))
    assert (taken and sizes(taken)) == chosen
    assert sizes(smallest(shapes[0])) == (1, 1, 1)


@pytest.mark.parametrize(("before", "released", "nodes", "free"), [
    ({"a": 1, "b": 0}, ["a", "b", "b", None, "left"], {"a": (4, 2), "b": (4, 2)}, 4),
    ({"a": 3, "b": 1}, ["a", "a", "a"], {"a": (4, 4), "b": (4, 1)}, 5),  # which may have been given back meanwhile
])  # fmt: skip
def test_units_that_a_job_releases_are_free_on_their_node_up_to_its_total(before, released, nodes, free):
    assert with_freed_units(on(**before), released) == Capacity("manta_slot", 8, free, nodes)


def stored(tensor=None, pipeline=None, replicas=None, context=None, expert=None):
    return SimpleNamespace(tensor=tensor, pipeline=pipeline, replicas=replicas, context=context, expert=expert)


def test_layout_in_use_is_the_submitted_one_with_the_stored_sizes():
    submitted = spec(parallel={"tensor": 2, "pipeline": 2, "data": 2, "context": 2, "context_method": "ring"})
    reshaped = submitted.model_copy(update={"elastic": submitted.elastic.model_copy(update={"reshape": True})})
    for shape in shapes_of(reshaped):
        assert in_use(submitted, stored(*sizes(shape), shape.layout.context)).layout == shape.layout
    for shape in shapes_of(spread(4, parallel={"expert_dispatch": "all_to_all"}, elastic={"reshape": True})):
        of_shape = stored(*sizes(shape), expert=shape.layout.expert_size)
        assert layout_in_use(spread(4, parallel={"expert_dispatch": "all_to_all"}).layout, of_shape) == shape.layout


@pytest.mark.parametrize("sequence_parallel", [None, False, True])
def test_layout_in_use_that_never_changed_equals_the_submitted_one(sequence_parallel):
    """Its tag is in the names of snapshots."""
    tensor = 1 if sequence_parallel is False else 2
    submitted = spec(parallel={"tensor": tensor, "sequence_parallel": sequence_parallel})
    assert in_use(submitted, stored()) == submitted


@pytest.mark.parametrize(
    ("tensor", "pipeline", "kept"),
    [(2, 4, ("interleaved", 2, True)), (4, 1, ("1f1b", 1, True)), (1, 4, ("interleaved", 2, None))],
)
def test_reshaped_layout_drops_settings_that_no_longer_apply(tensor, pipeline, kept):
    submitted = ParallelConfig(tensor=4, pipeline=4, schedule="interleaved", virtual_stages=2, sequence_parallel=True)
    running = layout_in_use(submitted, stored(tensor, pipeline, 3))
    assert (running.tensor, running.pipeline, running.data) == (tensor, pipeline, 3)
    assert (running.schedule, running.virtual_stages, running.sequence_parallel) == kept


def test_elastic_replicas_with_typed_stages_are_counted_by_gpu_type():
    typed = ParallelConfig(pipeline=3, stage_accelerators=("A100", "V100", "V100"))
    nodes = Capacity("GPU", 16, 12, {"a": (8, 2), "b": (8, 7), "c": (8, 8)}, {"a": "A100", "b": "V100"})
    assert (room_for(typed, nodes), room_for(typed.model_copy(update={"stage_accelerators": None}), nodes)) == (2, 5)
    assert layout_in_use(typed, stored(replicas=2)).stage_accelerators == ("A100", "V100", "V100")
    assert layout_in_use(typed, stored(1, 1, 2)).stage_accelerators is None


@pytest.mark.parametrize(("tensor", "pipeline", "layers"), [(2, 2, (1, 3)), (1, 2, (1, 3)), (2, 1, None)])
def test_a_list_of_layers_holds_for_its_own_pipeline_only(tensor, pipeline, layers):
    submitted = ParallelConfig(tensor=2, pipeline=2, stage_layers=(1, 3))
    assert layout_in_use(submitted, stored(tensor, pipeline, 2)).stage_layers == layers
