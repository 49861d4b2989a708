"""What the ranks of another size left in shared memory is found where it is whole, and brought to all hosts."""

import asyncio

from manta.service.backups.rank_backups import complete_states, spread
from manta.workers.protocol.messages import StoredSnapshot
from tests.service.support.fake_agents import FakeAgent


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
