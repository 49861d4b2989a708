"""Backups as the supervisor has them made: real agents, with a folder each for what would be their nodes' memory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stepped_snapshots import parts_of

from manta.service.cluster.agent_client import AgentLost
from manta.service.cluster.placement import Reachable, partners, reachable
from manta.service.job.rank_backups import (
    FetchedSnapshots,
    Ranks,
    begin,
    complete_states,
    fetch_snapshots,
    hand_over,
    ranks_without_state,
    spread,
)
from manta.workers.protocol.messages import StoredSnapshot
from manta.workers.rank.agent import Agent
from manta.workers.snapshot.files import backup_path, snapshot_path
from manta.workers.snapshot.snapshot_file import committed_steps
from manta.workers.snapshot.snapshots import Snapshots
from tests.service.support.fake_agents import FakeAgent

LAYOUT = "0a0a0a0a"
nodes = st.lists(st.sampled_from("abcd"), min_size=1, max_size=24)
steps = st.sets(st.integers(0, 5), max_size=2)


class LosableAgent(Agent):
    """An agent of this process; a lost one fails whatever it is asked for other ranks."""

    lost = False

    async def snapshot_steps(self, layout: str | None = None) -> list[int]:
        self._answer()
        return await super().snapshot_steps(layout)

    async def receive_backups(self, *arguments: Any) -> Any:
        self._answer()
        return await super().receive_backups(*arguments)

    async def send_backups(self, *arguments: Any) -> None:
        self._answer()
        await super().send_backups(*arguments)

    async def fetch_snapshot(self, *arguments: Any) -> list[int]:
        self._answer()
        return await super().fetch_snapshot(*arguments)

    def _answer(self) -> None:
        if self.lost:
            raise AgentLost("the actor is dead")


class Job:
    """Four ranks on two nodes; `state_of`: whose state each of them has."""

    def __init__(self, folder: Path, state_of: tuple[int, ...] = (0, 1, 2, 3)):
        self.peers = {rank: [peer for peer in range(4) if state_of[peer] == state_of[rank]] for rank in range(4)}
        self.folder, self.nodes = folder, ["a", "a", "b", "b"]
        self.agents = [self.agent(rank, self.nodes[rank]) for rank in range(4)]
        self.snapshots = [
            Snapshots(folder / node, rank, parts_of([torch.full((1000,), float(state_of[rank]))]), b"0" * 16, LAYOUT)
            for rank, node in enumerate(self.nodes)
        ]

    def agent(self, rank: int, node: str) -> LosableAgent:
        """A new agent."""
        return LosableAgent("job-1", rank, str(self.folder / "home"), str(self.folder), str(self.folder / node))

    def ranks(self, generation: int = 1) -> Ranks:
        """With the agents as they are now."""
        return Ranks(self.agents, generation, LAYOUT, self.peers)

    async def commit(self, step: int, keepers: dict[int, int]) -> None:
        """A step, its checksums, without which nobody is given it, and its backups."""
        for snapshots in self.snapshots:
            snapshots.save(step)
        for snapshots in self.snapshots:
            snapshots.wait_for_sums()
        deadline = time.monotonic() + 30
        for rank, keeper in keepers.items():
            while step not in committed_steps(backup_path(self.folder / self.nodes[keeper], rank, LAYOUT)):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)

    async def keep(self, nodes: list[str], generation: int = 1) -> dict[int, int]:
        """Begin to; who keeps whose."""
        return await begin(self.ranks(generation), nodes)

    async def brought_back(self, own: list[list[int]]) -> FetchedSnapshots:
        """The steps of all ranks after the agents of "a" and "b" were asked for what the needy ones lack."""
        holders = {"a": self.agents[0], "b": self.agents[-1]}
        kept = {host: await agent.snapshot_files() for host, agent in holders.items()}
        return await fetch_snapshots(self.ranks(), own, ranks_without_state(own), holders, kept)

    async def close(self) -> None:
        """End what is left."""
        for agent in self.agents:
            await agent.close()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """The job."""
    return Job(tmp_path)


async def test_ranks_of_a_lost_node_resume_from_backups_on_the_other(job):
    keepers = await job.keep(job.nodes)
    assert {job.nodes[rank] + job.nodes[keeper] for rank, keeper in keepers.items()} == {"ab", "ba"}
    for step in (1, 2):
        await job.commit(step, keepers)
    lost = [job.agents[rank] for rank in (2, 3)]
    job.agents[2:] = [job.agent(rank, "c") for rank in (2, 3)]
    own = [await handle.snapshot_steps() for handle in job.agents]
    assert own == [[1, 2], [1, 2], [], []]
    assert await job.brought_back(own) == FetchedSnapshots([[1, 2]] * 4, {2: "replica", 3: "replica"})
    state = [torch.zeros(1000)]
    Snapshots(job.folder / "c", 3, parts_of(state), b"0" * 16, LAYOUT).load(2)
    assert bool((state[0] == 3).all())
    assert (await job.keep(["a", "a", "c", "c"], 2)).keys() == {0, 1, 2, 3}
    for handle in lost:
        await handle.close()
    await job.close()


def test_backups_on_a_single_node_are_not_made_and_no_agent_is_asked(job):
    for agent in job.agents:
        agent.lost = True
    assert asyncio.run(job.keep(["a"] * 4)) == {}


async def test_peer_with_the_same_state_on_another_node_replaces_a_backup(tmp_path):
    job = Job(tmp_path, state_of=(0, 1, 0, 1))
    assert await job.keep(job.nodes) == {}, "nobody needs a backup"
    await job.commit(1, {})
    await job.commit(2, {})
    job.agents[2:] = [job.agent(rank, "c") for rank in (2, 3)]
    own = [await handle.snapshot_steps() for handle in job.agents]
    kept = {"a": await job.agents[0].snapshot_files()}
    outcome = await fetch_snapshots(job.ranks(), own, ranks_without_state(own), {"a": job.agents[0]}, kept)
    assert outcome == FetchedSnapshots([[1, 2]] * 4, {2: "peer", 3: "peer"})
    state = [torch.zeros(1000)]
    Snapshots(job.folder / "c", 3, parts_of(state), b"0" * 16, LAYOUT).load(2)
    assert bool((state[0] == 1).all())
    await job.close()


async def test_backup_is_fetched_from_the_next_holder_if_the_nearest_fails(tmp_path, caplog):
    job = Job(tmp_path, state_of=(0, 1, 0, 1))
    await job.commit(1, {})
    gone = job.agents[0]
    gone.lost = True
    job.agents[0] = job.agent(0, "c")
    kept = {"a": await job.agents[1].snapshot_files(), "b": await job.agents[2].snapshot_files()}
    own = [await handle.snapshot_steps() for handle in job.agents]
    holders = {"a": gone, "b": job.agents[2]}
    outcome = await fetch_snapshots(job.ranks(), own, [0], holders, kept)
    assert outcome == FetchedSnapshots([[1]] * 4, {0: "peer"})
    assert "rank 0 could not be fetched from a: the actor is dead" in caplog.text
    await job.close()


async def test_backups_are_kept_if_peers_with_the_same_state_share_the_node(tmp_path):
    job = Job(tmp_path, state_of=(0, 0, 2, 3))
    assert (await job.keep(job.nodes)).keys() == {0, 1, 2, 3}
    await job.close()


async def test_failed_backup_partner_costs_only_its_rank_the_backup(job, caplog):
    job.agents[3].lost = True
    partner_of = await job.keep(job.nodes)
    assert len(partner_of) == 2
    assert 3 not in partner_of and 3 not in partner_of.values()
    assert "2 of 4 ranks have no backup: the actor is dead" in caplog.text
    job.agents[3].lost = False
    assert await job.brought_back([[1], [1], [1], []]) == FetchedSnapshots([[1], [1], [1], []], {})
    await job.close()


def test_rank_counts_as_without_state_if_it_is_behind_what_others_hold():
    assert ranks_without_state([[], []]) == [0, 1]
    assert ranks_without_state([[1], [1, 2], [2], [2, 3]]) == [0]
    assert ranks_without_state([[7, 8], [8, 9], [9, 10], [8, 9]]) == [0], "it is a step too far back"
    assert ranks_without_state([[8, 9], [9, 10]]) == []
    assert ranks_without_state([[4, 5], [4, 5], [99, 100], [99, 100]]) == [0, 1], "both have come back to an old node"


async def test_rank_back_on_old_snapshots_uses_its_newer_backup(job):
    keepers = await job.keep(job.nodes)
    await job.commit(1, keepers)
    await job.commit(2, keepers)
    old = Snapshots(job.folder / "c", 2, parts_of([torch.full((1000,), 9.0)]), b"0" * 16, LAYOUT)
    old.save(0)
    old.close()
    job.agents[2] = job.agent(2, "c")
    snapshot_path(job.folder / "b", 2, LAYOUT).unlink()
    own = [await handle.snapshot_steps() for handle in job.agents]
    assert own[2] == [0]
    brought = await job.brought_back(own)
    assert (brought.steps[2], brought.origins) == ([1, 2], {2: "replica"})
    await job.close()


async def test_backup_beyond_the_step_that_all_ranks_have_is_not_fetched(job):
    """Rank 2's backup goes further than the other ranks ever went again."""
    keepers = await job.keep(job.nodes)
    await job.commit(7, keepers)
    await job.commit(8, keepers)
    steps = [[3, 4], [3, 4], [3, 4], [3, 4]]
    holders = {"b": job.agents[3]}
    kept = {"b": [file for file in await job.agents[3].snapshot_files() if file.rank == 2]}
    assert kept["b"]
    outcome = await fetch_snapshots(job.ranks(), steps, range(4), holders, kept)
    assert outcome == FetchedSnapshots(steps, {})
    await job.close()


def test_backup_is_fetched_once_from_the_nearest_holder_that_goes_far_enough():
    asked, fetched = [], []

    def holder(host):
        async def receive_backups(token, generation):
            asked.append((host, token, generation))
            return f"address of {host}"

        return SimpleNamespace(receive_backups=receive_backups)

    async def fetch_snapshot(rank, address, token, generation, layout, of):
        fetched.append((rank, address, token, generation, layout, of))
        return [3, 4]

    def stored(rank, *steps, layout=LAYOUT, is_backup=False):
        return StoredSnapshot("any", rank, layout, is_backup, steps)

    files = {
        "a": [stored(1, 3, 4, is_backup=True), stored(1, 4, 5, layout="another0")],
        "b": [stored(0, 3, 4)],
        "c": [stored(1, 2, 3)],
        "d": [stored(1, 2), stored(1, 3, 4)],
    }
    agents = [SimpleNamespace(), SimpleNamespace(fetch_snapshot=fetch_snapshot)]
    holders, peers = {host: holder(host) for host in files}, {0: [0, 1], 1: [0, 1]}
    brought = asyncio.run(fetch_snapshots(Ranks(agents, 7, LAYOUT, peers), [[3, 4], []], [1], holders, files))
    assert brought == FetchedSnapshots([[3, 4], [3, 4]], {1: "snapshot"})
    ((host, secret, generation),) = asked
    assert (host, generation) == ("d", 7) and len(secret) >= 32
    assert fetched == [(1, "address of d", secret, 7, LAYOUT, 1)]


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
