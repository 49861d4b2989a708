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


def test_newest_step_that_every_rank_has_counts():
    kept = {"one": [file(0, 4, 5), file(1, 5, 6)], "two": [file(2, 5), file(3, 4, 5)]}
    (state,) = complete_states(kept, {"aaaa": alone(4)})
    assert (state.layout, state.step) == ("aaaa", 5)
    assert [place.host for place in state.places] == ["one", "one", "two", "two"]
    assert state.paths == [f"/shm/aaaa/{rank}" for rank in range(4)]


def test_a_missing_rank_or_a_layout_that_is_not_the_jobs_is_no_state():
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


def test_own_files_go_before_backups():
    (state,) = complete_states({"one": [file(0, 5, backup=True)], "two": [file(0, 5)]}, {"aaaa": alone(1)})
    assert [place.host for place in state.places] == ["two"]


def test_of_ranks_with_the_same_state_one_is_enough():
    kept = {"one": [file(1, 5), file(2, 5)], "two": []}
    (state,) = complete_states(kept, {"aaaa": [[0, 2], [1, 3]]})
    assert state.paths == ["/shm/aaaa/2", "/shm/aaaa/1"]
    agents = {"one": agent_with([5]), "two": agent_with([5])}
    assert asyncio.run(spread(state, agents, kept, 7, ["one", "two"]))
    assert (agents["one"].fetched, agents["two"].fetched) == ([], [(2, "aaaa", None), (1, "aaaa", None)])
    assert complete_states({"one": [file(1, 5), file(3, 5)]}, {"aaaa": [[0, 2], [1, 3]]}) == []


def test_of_several_layouts_the_newest_comes_first():
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


def test_each_host_fetches_what_it_lacks():
    assert brought([5]) == (True, [(1, "aaaa", None)], [(0, "aaaa", None)])


def test_a_fetch_that_fails_or_brings_another_step_says_so():
    assert brought([4])[0] is False
    assert brought(None)[0] is False


def test_a_host_that_is_left_gives_and_needs_nothing():
    assert brought([5], ["one"]) == (True, [(1, "aaaa", None)], [])


def test_a_host_that_has_an_older_step_of_a_rank_fetches_the_one_that_counts():
    kept = {"one": [file(0, 4, 5)], "two": [file(0, 4)]}
    (state,) = complete_states(kept, {"aaaa": alone(1)})
    agents = {"one": agent_with([5]), "two": agent_with([5])}
    assert asyncio.run(spread(state, agents, kept, 7, ["one", "two"]))
    assert (agents["one"].fetched, agents["two"].fetched) == ([], [(0, "aaaa", None)])
