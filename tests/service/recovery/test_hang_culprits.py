"""The culprit of a hang: found in simulated gangs that hang anywhere, and never invented."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.service.recovery.waits import AXES, RankView, find_culprits, waiting_for
from manta.workers.comm.grid import RankGrid
from manta.workers.config import ParallelConfig
from manta.workers.protocol.reports import Position, TrainerStatus

LAYOUTS = [(2, 2, 2), (1, 1, 4), (4, 1, 1), (1, 4, 2), (2, 1, 2), (1, 1, 2), (1, 1, 1)]


def grid_of(layout):
    tensor, pipeline, data = layout
    return RankGrid(ParallelConfig(tensor=tensor, pipeline=pipeline, data=data))


class Gang:
    """Ranks that run the same program of collectives, until nobody can go on because one of them hangs."""

    def __init__(self, layout, seed):
        self.grid, choice = grid_of(layout), random.Random(seed)
        self.size = self.grid.world_size
        axes = [*choice.choices(["tensor", "data", "world"], k=30), "world"]
        self.hung, self.at = choice.randrange(self.size), choice.randrange(len(axes))
        self.done = [0] * self.size
        self.entered = [dict.fromkeys(AXES, 0) for _ in range(self.size)]
        self.axes = axes
        self.inside = [False] * self.size
        moved = True
        while moved:
            moves = [self._move(rank) for rank in choice.sample(range(self.size), self.size)]
            moved = any(moves)
        self.choice = choice

    def group(self, axis, rank):
        return self.grid.group(axis, rank)

    def _move(self, rank):
        """One thing that `rank` can do: enter a collective, or leave it once all are in; False when it cannot."""
        number = self.done[rank]
        if number == len(self.axes) or (rank == self.hung and number == self.at):
            return False
        axis = self.axes[number]
        if not self.inside[rank]:
            self.inside[rank] = True
            self.entered[rank][axis] += 1
            return True
        if self._missing(rank):
            return False
        self.done[rank], self.inside[rank] = number + 1, False
        return True

    def _missing(self, rank):
        """Ranks that have not entered the collective that `rank` is in."""
        number = self.done[rank]
        axis = self.axes[number]
        return [
            peer
            for peer in self.group(axis, rank)
            if not (self.done[peer] > number or (self.done[peer] == number and self.inside[peer]))
        ]

    def views(self, knows_peers=True, **culprit):
        """What the agents see; `knows_peers`: the backend tells who waits for whom."""
        seen = []
        for rank in range(self.size):
            waits_for = self.choice.choice(self._missing(rank)) if self.inside[rank] else None
            seen.append(RankView(rank, True, True, False, waits_for if knows_peers else None, 1, self.entered[rank], 7))
        seen[self.hung] = replace(seen[self.hung], **culprit)
        return seen


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(0, 2**32), st.booleans())
def test_hang_is_blamed_on_the_rank_that_did_not_enter_unless_it_may_continue(layout, seed, knows_peers):
    gang = Gang(layout, seed)
    verdict = find_culprits(gang.views(knows_peers), gang.group)
    assert (verdict.kind, verdict.ranks) == ("ranks", (gang.hung,))
    assert find_culprits(gang.views(overdue=False), gang.group).kind == "nobody"


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(0, 2**32))
def test_hang_is_blamed_on_a_stopped_rank_or_on_a_silent_one_that_others_wait_for(layout, seed):
    gang = Gang(layout, seed)
    views = gang.views()
    stopped = gang.choice.randrange(gang.size)
    views[stopped] = replace(views[stopped], stopped=True)
    verdict = find_culprits(views, gang.group)
    assert verdict.kind == "ranks" and {stopped} <= set(verdict.ranks) <= {stopped, gang.hung}
    views = gang.views()
    views[gang.hung] = RankView(gang.hung, answered=False)
    waiters = [view for view in views if view.waits_for is not None]
    assert find_culprits(views, gang.group).ranks == ((gang.hung,) if waiters else ())


def late(rank, waits_for=None, step=9, **known):
    return RankView(rank, overdue=True, waits_for=waits_for, step=step, **known)


def counted(number, **others):
    return {**dict.fromkeys(AXES, number), **others}


@pytest.mark.parametrize(("views", "kind", "ranks", "why"), [
    ([RankView(0, waits_for=1), RankView(1)], "nobody", (), ""),
    ([RankView(0, overdue=True), RankView(1, answered=False)], "ranks", (0,), ""),
    ([late(0, 1), late(1, 0, step=8), late(2, 0)], "ranks", (1,), "wait for each other"),
    ([late(0, 1, counts=counted(5)), late(1, 0, counts=counted(5, world=4))], "ranks", (1,), ""),
    ([late(0, 1), late(1, 0), RankView(2, waits_for=0)], "gang", (0, 1, 2), "is not known"),
    ([late(rank, counts=counted(3)) for rank in range(4)], "gang", (0, 1, 2, 3), ""),
    ([late(0, 1), late(1), late(2, 3), late(3, 2, stopped=True)], "ranks", (1, 3), ""),
])  # fmt: skip
def test_hang_is_blamed_on_whoever_got_least_far_or_on_the_gang(views, kind, ranks, why):
    verdict = find_culprits(views, grid_of((1, 1, len(views))).group)
    assert (verdict.kind, verdict.ranks) == (kind, ranks)
    assert why in verdict.why


def test_ranks_waiting_through_others_are_listed_as_waiting():
    views = [RankView(0, waits_for=1), RankView(1, waits_for=2), RankView(2), RankView(3)]
    assert waiting_for(views, 2, grid_of((1, 1, 4)).group) == [0, 1]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.none() | st.integers(0, 4)), min_size=5, max_size=5))
def test_hang_verdict_names_only_ranks_that_stand_still(seen):
    views = [RankView(r, overdue=o, stopped=s and o, waits_for=w) for r, (o, s, w) in enumerate(seen)]
    verdict = find_culprits(views, lambda axis, rank: range(5))
    if verdict.kind == "ranks":
        edges = {view.rank: view.waits_for for view in views if view.waits_for is not None}
        reachable = {rank for view in views if view.overdue for rank in [view.rank, *edges.values()]}
        assert set(verdict.ranks) <= reachable
        assert any(view.overdue for view in views)
    assert (verdict.kind == "nobody") or any(view.overdue for view in views)


def test_hang_look_has_the_fields_of_the_agents_status():
    counts = dict.fromkeys(AXES, 3)
    record = Position(100, 1, "backward", step=12, waits_for=4, counts=counts, heartbeat=7)
    assert RankView.of(2, TrainerStatus(100, overdue=True, stopped=True, record=record)) == RankView(
        2, True, True, True, waits_for=4, step=12, counts=counts, heartbeat=7
    )
    assert RankView.of(2, TrainerStatus(100, overdue=True, stopped=True)) == RankView(2, True, True, True), (
        "it still starts"
    )
    assert RankView.of(2, TrainerStatus(100, record=record)).overdue is False
    assert RankView.of(2, None) == RankView(2, answered=False)


def test_hang_search_lets_a_rank_without_a_named_peer_wait_for_the_furthest_behind():
    group = {"tensor": (0, 1), "data": (0, 2, 3), "world": (0, 2, 3)}
    views = [
        RankView(0, overdue=True, counts={"tensor": 9, "data": 2, "world": 5}),
        RankView(1, counts={"tensor": 6, "data": 2, "world": 5}),
        RankView(2, counts={"tensor": 9, "data": 1, "world": 1}),
        RankView(3),
    ]
    verdict = find_culprits(views, lambda axis, rank: group.get(axis, ()))
    assert (verdict.kind, verdict.why) == ("nobody", "rank 2 may still continue")


def test_hang_search_visits_each_group_once():
    grid, seen = grid_of((8, 48, 8)), []

    def group(axis, rank):
        seen.append(len(grid.group(axis, rank)))
        return grid.group(axis, rank)

    counts = dict.fromkeys(AXES, 7)
    views = [RankView(rank, overdue=True, counts=counts) for rank in range(grid.world_size)]
    views[2900] = replace(views[2900], counts={**counts, "tensor": 6, "world": 6})
    verdict = find_culprits(views, group)
    assert (verdict.kind, verdict.ranks) == ("ranks", (2900,))
    assert sum(seen) == len(AXES) * grid.world_size


@pytest.mark.parametrize(("views", "why"), [
    ([late(0, 1), late(1)], "others wait for it, and it waits for no rank"),
    ([late(0), RankView(1)], "it makes no progress and waits for no rank"),
    ([late(0, 1, stopped=True), RankView(1)], "its process is stopped"),
    ([late(0, 1), RankView(1, answered=False)], "others wait for it, and its agent does not answer"),
    ([*map(late, range(9)), late(9, step=8)],
     "of ranks 0, 1, 2, 3, 4, 5, 6, 7 and more it got least far, and none of them waits for another"),
])  # fmt: skip
def test_hang_explanation_says_why_a_rank_is_blamed(views, why):
    assert find_culprits(views, lambda axis, rank: ()).why == why
