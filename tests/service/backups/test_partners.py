"""Which nodes keep copies for each other, in this layout or another, and how a copy gets there."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.backups.partners import Reachable, partners, reachable
from manta.service.backups.rank_backups import complete_states, hand_over, spread
from manta.workers.protocol.messages import StoredSnapshot
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


def file(rank, *steps, layout="aaaa", backup=False):
    path = f"/shm/{layout}/{'replica-' if backup else ''}{rank}"
    return StoredSnapshot(path, rank, layout, backup, steps)


def alone(world):
    """Ranks that all have different states."""
    return [[rank] for rank in range(world)]


def test_whole_states_have_the_newest_step_of_every_rank():
    kept = {"one": [file(0, 4, 5), file(1, 5, 6)], "two": [file(2, 5), file(3, 4, 5)]}
    (state,) = complete_states(kept, {"aaaa": alone(4)})
    assert (state.layout, state.step) == ("aaaa", 5)
    assert [place.host for place in state.locations] == ["one", "one", "two", "two"]
    assert state.paths == [f"/shm/aaaa/{rank}" for rank in range(4)]


def test_whole_states_exclude_missing_ranks_and_layouts_of_other_jobs():
    assert complete_states({"one": [file(0, 5)]}, {"aaaa": alone(2)}) == []
    assert complete_states({"one": [file(0, 5, layout="bbbb")]}, {"aaaa": alone(1)}) == []
    assert complete_states({"one": [file(0, 4), file(1, 5)]}, {"aaaa": alone(2)}) == []


def test_a_backup_stands_for_a_rank_whose_host_is_lost():
    kept = {"one": [file(0, 5), file(1, 5, backup=True)]}
    (state,) = complete_states(kept, {"aaaa": alone(2)})
    assert state.paths == ["/shm/aaaa/0", "/shm/aaaa/1"], "where its own would lie, so that the path is every host's"
    agents = {"one": agent_with([5])}
    assert asyncio.run(spread(state, agents, kept, 7, ["one"]))
    assert agents["one"].fetched == [(1, "aaaa", None)], "from itself"


def test_own_snapshot_is_preferred_to_a_backup_of_the_same_rank():
    (state,) = complete_states({"one": [file(0, 5, backup=True)], "two": [file(0, 5)]}, {"aaaa": alone(1)})
    assert [place.host for place in state.locations] == ["two"]


def test_one_snapshot_serves_all_ranks_with_the_same_state():
    kept = {"one": [file(1, 5), file(2, 5)], "two": []}
    (state,) = complete_states(kept, {"aaaa": [[0, 2], [1, 3]]})
    assert state.paths == ["/shm/aaaa/2", "/shm/aaaa/1"]
    agents = {"one": agent_with([5]), "two": agent_with([5])}
    assert asyncio.run(spread(state, agents, kept, 7, ["one", "two"]))
    assert (agents["one"].fetched, agents["two"].fetched) == ([], [(2, "aaaa", None), (1, "aaaa", None)])
    assert complete_states({"one": [file(1, 5), file(3, 5)]}, {"aaaa": [[0, 2], [1, 3]]}) == []


def test_whole_states_of_several_layouts_are_sorted_newest_first():
    kept = {"one": [file(0, 5), file(0, 7, layout="bbbb"), file(1, 7, layout="bbbb")]}
    assert [state.layout for state in complete_states(kept, {"aaaa": alone(1), "bbbb": alone(2)})] == ["bbbb", "aaaa"]


def agent_with(steps):
    """An agent that has these steps after whatever it is asked to fetch; with None it can fetch nothing."""
    agent = FakeAgent()
    agent.steps = steps or []
    if steps is None:
        agent.refuse("fetch_snapshot", "no room")
    return agent


def brought(steps, hosts=("one", "two")):
    agents = {"one": agent_with(steps), "two": agent_with(steps)}
    kept = {"one": [file(0, 5)], "two": [file(1, 5)]}
    (state,) = complete_states(kept, {"aaaa": alone(2)})
    done = asyncio.run(spread(state, agents, kept, 7, hosts))
    return done, agents["one"].fetched, agents["two"].fetched


def test_spread_state_lets_each_host_fetch_what_it_lacks():
    assert brought([5]) == (True, [(1, "aaaa", None)], [(0, "aaaa", None)])


def test_spread_state_fails_if_a_fetch_fails_or_brings_another_step():
    assert brought([4])[0] is False
    assert brought(None)[0] is False


def test_spread_state_lets_a_leaving_host_give_and_not_fetch():
    assert brought([5], ["one"]) == (True, [(1, "aaaa", None)], [])


def test_spread_state_lets_a_host_with_an_older_step_fetch_the_whole_one():
    kept = {"one": [file(0, 4, 5)], "two": [file(0, 4)]}
    (state,) = complete_states(kept, {"aaaa": alone(1)})
    agents = {"one": agent_with([5]), "two": agent_with([5])}
    assert asyncio.run(spread(state, agents, kept, 7, ["one", "two"]))
    assert (agents["one"].fetched, agents["two"].fetched) == ([], [(0, "aaaa", None)])
