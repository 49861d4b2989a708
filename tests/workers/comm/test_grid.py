"""Ranks are laid out as the contract says, and the groups of an axis split the world."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.comm.grid import AXES, Coordinates, RankGrid, state_groups, state_peers
from manta.workers.config import ParallelConfig

small = st.integers(1, 4)
grids = st.builds(
    lambda t, p, d, c, e: RankGrid(ParallelConfig(tensor=t, pipeline=p, data=d * e, context=c, expert=e)),
    *(small, small, small, small, small),
)
axes = st.sampled_from(AXES)


def test_tensor_ranks_are_neighbours_then_stages_then_replicas():
    grid = RankGrid(ParallelConfig(tensor=2, pipeline=2, data=2))
    assert [grid.coordinates(rank) for rank in range(4)] == [
        Coordinates(0, 0, 0, 0),
        Coordinates(1, 0, 0, 0),
        Coordinates(0, 1, 0, 0),
        Coordinates(1, 1, 0, 0),
    ]
    assert grid.coordinates(4) == Coordinates(tensor=0, pipeline=0, data=1, context=0)


@given(grids)
def test_rank_number_follows_from_its_grid_coordinates(grid):
    for rank in range(grid.world_size):
        at = grid.coordinates(rank)
        formula = ((at.data * grid.pipeline + at.pipeline) * grid.context + at.context) * grid.tensor + at.tensor
        assert grid.rank(at) == formula == rank


@given(grids, axes)
def test_groups_of_an_axis_partition_the_world(grid, axis):
    groups = grid.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    for group in groups:
        assert all(grid.group(axis, rank) == group for rank in group)


@given(grids, st.sampled_from(["tensor", "pipeline", "data", "context"]))
def test_group_differs_only_along_its_axis(grid, axis):
    for group in grid.groups(axis):
        places = [vars(grid.coordinates(rank)) for rank in group]
        assert [place[axis] for place in places] == list(range(getattr(grid, axis)))
        others = [{key: value for key, value in place.items() if key != axis} for place in places]
        assert all(other == others[0] for other in others)


@given(grids)
def test_holders_of_the_same_parameters_are_the_ranks_of_all_replicas_and_contexts(grid):
    assert grid.holders == ("data" if grid.context == 1 else "holders")
    for group in grid.groups("holders"):
        places = [grid.coordinates(rank) for rank in group]
        assert group == sorted(group) and len({(place.tensor, place.pipeline) for place in places}) == 1
        assert len(group) == grid.data * grid.context
        for rank in group:
            sharing = {axis: set(grid.group(axis, rank)) for axis in ("data", "context")}
            assert sharing["data"] | sharing["context"] <= set(group)
            assert (sharing["data"] == set(group)) == (grid.context == 1)


@given(grids)
def test_experts_are_spread_over_neighboring_holders_and_held_by_one_of_each_group(grid):
    assert ("expert" in grid.axes) == ("expert_holders" in grid.axes) == (grid.expert > 1)
    for holders in grid.groups("holders"):
        group_of = {rank: grid.group("expert", rank) for rank in holders}
        assert list(group_of.values())[:: grid.expert] == [
            holders[first : first + grid.expert] for first in range(0, len(holders), grid.expert)
        ]
        for rank, group in group_of.items():
            alike = grid.group("expert_holders", rank)
            assert [group_of[each].index(each) for each in alike] == [group.index(rank)] * len(alike)
            assert alike == sorted(alike) and len(alike) * grid.expert == len(holders) and rank in alike


def test_tensor_ranks_with_whole_experts_exchange_with_the_same_index_of_other_tensor_groups():
    layout = ParallelConfig(tensor=2, data=4, expert=4, expert_tensor=1)
    grid = RankGrid(layout)
    assert grid.groups("expert") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("expert_holders") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    places = [grid.coordinates(rank) for rank in range(8)]
    assert [layout.expert_index(at.tensor, at.data, at.context) for at in places] == [0, 1, 2, 3] * 2
    within = RankGrid(ParallelConfig(tensor=2, data=2, expert=2, expert_tensor=1))
    assert not {"expert", "expert_holders"} & set(within.axes)


@given(grids)
def test_embedding_group_is_the_first_and_last_stage(grid):
    for rank in range(grid.world_size):
        at = grid.coordinates(rank)
        ends = [grid.rank(Coordinates(at.tensor, stage, at.data, at.context)) for stage in (0, grid.pipeline - 1)]
        expected = sorted(set(ends)) if at.pipeline in (0, grid.pipeline - 1) else [rank]
        assert grid.group("embedding", rank) == expected


@pytest.mark.parametrize("rank", [-1, 8])
def test_coordinates_of_a_rank_outside_the_grid_are_an_index_error(rank):
    with pytest.raises(IndexError, match=f"rank {rank} is outside a grid of 8 ranks"):
        RankGrid(ParallelConfig(tensor=2, pipeline=2, data=2)).coordinates(rank)


def test_state_peers_are_replicas_unless_zero_splits_the_state():
    whole = ParallelConfig(tensor=2, pipeline=2, data=3, zero=0)
    assert state_peers(whole, 5) == state_peers(whole, 1) == [1, 5, 9]
    assert state_groups(whole) == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    split = whole.model_copy(update={"zero": 1})
    assert state_peers(split, 5) == [5]
    assert state_groups(split) == [[rank] for rank in range(12)]


def test_embedding_group_under_zb_v_is_a_single_rank():
    grid = RankGrid(ParallelConfig(tensor=2, pipeline=3, schedule="zb-v", virtual_stages=2))
    assert [grid.group("embedding", rank) for rank in range(6)] == [[rank] for rank in range(6)]


@pytest.mark.parametrize("zero", [0, 1])
@given(grids)
def test_state_groups_match_the_state_peers_of_each_rank(zero, grid):
    layout = ParallelConfig(
        **{axis: getattr(grid, axis) for axis in ("tensor", "pipeline", "data", "context", "expert")}, zero=zero
    )
    groups = state_groups(layout)
    size = 1 if zero else layout.expert_holders
    assert groups == sorted(groups) and all(len(group) == size for group in groups)
    group_of = {rank: group for group in groups for rank in group}
    assert group_of == {rank: state_peers(layout, rank) for rank in range(layout.world_size)}
