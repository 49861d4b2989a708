"""Which nodes keep copies for each other, and how a copy gets there."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.backups.partners import Reachable, partners, reachable
from manta.service.backups.rank_backups import hand_over
from tests.service.support.fake_agents import FakeAgent

nodes = st.lists(st.sampled_from("abcd"), min_size=1, max_size=24)
steps = st.sets(st.integers(0, 5), max_size=2)


@given(nodes)
def test_backup_partner_of_every_rank_is_on_another_node_if_there_is_one(node_of_rank):
    partner_of = partners(node_of_rank)
    if len(set(node_of_rank)) == 1:
        assert partner_of == {}
        return
    assert partner_of.keys() == set(range(len(node_of_rank)))
    assert all(node_of_rank[rank] != node_of_rank[partner] for rank, partner in partner_of.items())


@given(nodes)
def test_backups_are_spread_evenly_over_the_ranks_of_other_nodes(node_of_rank):
    partner_of = partners(node_of_rank)
    if partner_of:
        largest = max(Counter(node_of_rank).values())
        others = len(node_of_rank) - largest
        assert max(Counter(partner_of.values()).values()) == max(1, -(-largest // others))


@given(nodes)
def test_backup_partners_depend_on_the_nodes_of_ranks_only(node_of_rank):
    assert partners(node_of_rank) == partners(tuple(node_of_rank))


@given(st.lists(st.tuples(steps, steps), min_size=1, max_size=5))
def test_memory_reaches_the_newest_step_that_every_rank_has_or_can_fetch(held):
    own, backups = [mine for mine, _ in held], {rank: kept for rank, (_, kept) in enumerate(held)}
    start = reachable(own, backups)
    common = set.intersection(*(mine | kept for mine, kept in held))
    assert (start.step if start else None) == max(common, default=None)
    if start:
        assert set(start.fetched) == {rank for rank, mine in enumerate(own) if start.step not in mine}
        assert all(start.step in backups[rank] for rank in start.fetched)


def test_backups_of_a_lost_node_set_the_step_to_resume_from():
    assert reachable([[8, 9], [8, 9], []], {2: [7, 8]}) == Reachable(8, (2,))
    assert reachable([[8, 9], [8, 9], []], {2: [6, 7]}) is None
    assert reachable([[8, 9], [8, 9], []], {}) is None
    assert reachable([], {}) is None


def agent(*steps):
    """One with these steps in its shared memory."""
    made = FakeAgent()
    made.steps = list(steps)
    return made


@pytest.mark.parametrize(
    ("held", "there", "fetched"),
    [
        ((3, 4), (), True),
        ((3, 4), (2, 3), True),  # left from when the rank was there before
        ((3, 4), (3, 4), False),
        ((3,), (3, 4), False),
        ((), (), False),
    ],
)
def test_snapshot_transfer_fetches_only_newer_snapshots(held, there, fetched):
    old, new = agent(*held), agent(*there)
    asyncio.run(hand_over({5: (old, new)}, 1, "layout"))
    assert new.fetched == ([(5, "layout", None)] if fetched else [])


def test_unreachable_snapshots_of_one_rank_do_not_delay_the_transfer_of_others():
    lost, old, alone, new = agent(4), agent(4), agent(), agent()
    lost.lose()
    asyncio.run(hand_over({0: (lost, alone), 1: (old, new)}, 1, "layout"))
    assert (alone.fetched, new.fetched) == ([], [(1, "layout", None)])


def test_snapshot_transfer_asks_for_the_jobs_layout_with_one_secret_per_generation():
    asked, wanted = [], []

    def stub(name, steps):
        async def snapshot_steps(layout=None):
            asked.append((name, layout))
            return steps

        async def receive_backups(token, generation):
            wanted.append((name, token, generation))
            return f"address of {name}"

        async def fetch_snapshot(rank, holder, token, generation, layout, of=None):
            wanted.append((name, token, generation, rank, holder, layout, of))
            return steps

        return SimpleNamespace(
            snapshot_steps=snapshot_steps, receive_backups=receive_backups, fetch_snapshot=fetch_snapshot
        )

    asyncio.run(hand_over({5: (stub("old", [4]), stub("new", [3]))}, 9, "layout"))
    assert sorted(asked) == [("new", "layout"), ("old", "layout")]
    secret = wanted[0][1]
    assert len(secret) >= 32, "nobody guesses it"
    assert wanted == [("old", secret, 9), ("new", secret, 9, 5, "address of old", "layout", None)]
