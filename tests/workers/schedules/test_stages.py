"""Every virtual stage has one place, and every layer one virtual stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.config import ParallelConfig
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.stages import chunk_location, even_counts, layer_counts, layers_of, virtual_stage


@pytest.mark.parametrize("stages", range(1, 17))
@pytest.mark.parametrize(
    ("kind", "virtual_stages"), [(kind, v) for kind in SCHEDULES for v in range(1, 5) if kind != "zb-v" or v == 2]
)
def test_virtual_stages_map_one_to_one_to_ranks_and_chunks(kind, stages, virtual_stages):
    total = stages * virtual_stages
    places = [chunk_location(kind, stages, virtual_stages, index) for index in range(total)]
    assert set(places) == {(rank, chunk) for rank in range(stages) for chunk in range(virtual_stages)}
    assert [virtual_stage(kind, stages, virtual_stages, rank, chunk) for rank, chunk in places] == list(range(total))
    for rank in range(stages):
        held = [virtual_stage(kind, stages, virtual_stages, rank, chunk) for chunk in range(virtual_stages)]
        assert held == sorted(held), "a later chunk is later in the model"


def test_chunks_are_placed_round_robin_or_turn_back_under_zb_v():
    assert [chunk_location("interleaved", 3, 2, index) for index in range(6)] == [
        (0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1),
    ]  # fmt: skip
    assert [chunk_location("zb-v", 3, 2, index) for index in range(6)] == [
        (0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1),
    ]  # fmt: skip


def test_stage_outside_the_model_is_refused():
    with pytest.raises(ValueError, match=r"virtual stage 6 is outside 0\.\.5"):
        chunk_location("interleaved", 3, 2, 6)
    with pytest.raises(ValueError, match=r"rank 3 is outside 0\.\.2"):
        virtual_stage("interleaved", 3, 2, 3, 0)
    with pytest.raises(ValueError, match=r"chunk -1 is outside 0\.\.1"):
        virtual_stage("interleaved", 3, 2, 0, -1)
    with pytest.raises(ValueError, match="zb-v has chunks per rank: 2, not 1"):
        chunk_location("zb-v", 3, 1, 0)


@given(st.integers(1, 64), st.integers(0, 200))
def test_layers_are_split_evenly_in_order_over_stages(total, more):
    layers = total + more
    parts = [layers_of(layers, ParallelConfig(pipeline=total), index) for index in range(total)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert even_counts(layers, total) == tuple(map(len, parts))
    assert {len(part) for part in parts} <= {layers // total, layers // total + 1}
    assert total == 1 or len(parts[-1]) == layers // total, "the logits are on the last one"


@pytest.mark.parametrize(
    ("layers", "counts"),
    [
        (4, [1, 1, 1, 1]),
        (5, [1, 2, 1, 1]),
        (6, [1, 2, 2, 1]),
        (7, [2, 2, 2, 1]),
        (8, [2, 2, 2, 2]),
        (9, [2, 3, 2, 2]),
    ],
)
def test_extra_layers_go_to_the_middle_stages_then_to_the_first(layers, counts):
    assert list(even_counts(layers, 4)) == counts


def test_layers_of_small_models_are_cut_evenly():
    assert layers_of(5, ParallelConfig(), 0) == range(5)
    assert [layers_of(5, ParallelConfig(pipeline=2), index) for index in range(2)] == [range(3), range(3, 5)]


def test_fewer_layers_than_virtual_stages_are_refused():
    with pytest.raises(ValueError, match="3 layers do not fill 4 virtual stages"):
        layers_of(3, ParallelConfig(pipeline=4), 0)
    with pytest.raises(ValueError, match=r"virtual stage 4 is outside 0\.\.3"):
        layers_of(8, ParallelConfig(pipeline=4), 4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_layers_are_split_as_stage_layers_say(counts):
    layout = ParallelConfig(pipeline=len(counts), stage_layers=tuple(counts))
    parts = [layers_of(sum(counts), layout, index) for index in range(len(counts))]
    assert [len(part) for part in parts] == counts == list(layer_counts(sum(counts), layout))
    assert [layer for part in parts for layer in part] == list(range(sum(counts)))


@pytest.mark.parametrize(("layers", "stages", "index"), [(7, 3, 0), (6, 2, 0), (6, 3, 3), (6, 3, -1)])
def test_stage_layers_of_another_model_or_pipeline_are_refused(layers, stages, index):
    with pytest.raises(ValueError, match=r"stage_layers \[1, 2, 3\] are not|outside 0"):
        layers_of(layers, ParallelConfig(pipeline=stages, stage_layers=(1, 2, 3)), index)
