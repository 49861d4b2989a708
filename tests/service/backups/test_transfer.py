"""Snapshots of a rank go where the rank goes."""

import asyncio

import pytest

from service.backups.transfer import hand_over
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
def test_snapshots_are_fetched_where_they_are_newer_than_what_is_there(held, there, fetched):
    old, new = agent(*held), agent(*there)
    asyncio.run(hand_over({5: (old, new)}, 1, "layout"))
    assert new.fetched == ([(5, "layout", None)] if fetched else [])


def test_rank_whose_snapshots_cannot_be_had_does_not_hold_up_the_others():
    lost, old, alone, new = agent(4), agent(4), agent(), agent()
    lost.lose()
    asyncio.run(hand_over({0: (lost, alone), 1: (old, new)}, 1, "layout"))
    assert (alone.fetched, new.fetched) == ([], [(1, "layout", None)])
