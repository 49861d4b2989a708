"""Snapshots of a rank go where the rank goes."""

import asyncio
from types import SimpleNamespace

import pytest

from manta.service.backups.rank_backups import hand_over
from tests.service.support.fake_agents import FakeAgent


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
