"""A job's replicas, as its supervisor has them kept and brought back. What fails here costs protection, not the job."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from service.replicas import partners

log = logging.getLogger(__name__)

Handle = Any
"""A Ray actor handle of an agent."""


async def begin(agents: Sequence[Handle], nodes: Sequence[str], generation: int, layout: str) -> dict[int, int]:
    """Let every agent keep its rank's snapshots (of the layout with tag `layout`) with a partner on another node, from
    now on. `nodes`: the node of each rank. Answers who keeps whose; a rank whose partner fails is left out."""
    wanted, token = partners(nodes), secrets.token_hex()
    if not wanted:
        return {}
    keepers = sorted(set(wanted.values()))
    answers = await asyncio.gather(
        *(agents[keeper].receive_replicas.remote(token, generation) for keeper in keepers), return_exceptions=True
    )
    places = {keeper: place for keeper, place in zip(keepers, answers, strict=True) if isinstance(place, dict)}
    ranks = [rank for rank, keeper in sorted(wanted.items()) if places.get(keeper)]
    begun = await asyncio.gather(
        *(agents[rank].replicate_to.remote(places[wanted[rank]], token, generation, layout) for rank in ranks),
        return_exceptions=True,
    )
    found = {rank: wanted[rank] for rank, problem in zip(ranks, begun, strict=True) if problem is None}
    if len(found) < len(agents):
        problems = [str(each) for each in (*answers, *begun) if isinstance(each, BaseException)]
        log.warning("%d of %d ranks have no replica: %s", len(agents) - len(found), len(agents), "; ".join(problems))
    return found


async def bring_back(
    agents: Sequence[Handle],
    steps: Sequence[Sequence[int]],
    generation: int,
    layout: str,
    leavers: Sequence[Handle] = (),
) -> list[list[int]]:
    """The steps in each rank's own shared memory, after those that have none, or only some that the others are long
    past, fetched the newest of theirs, or a replica of it, from any agent's node. `steps`: the same before that;
    `leavers`: agents without a rank whose nodes may keep some."""
    found = [list(each) for each in steps]
    lost = without_state(found)
    if not lost or (len(lost) == len(found) and not leavers):
        return found
    holders = [*agents, *leavers]
    token = secrets.token_hex()  # one for all: an agent that several fetch from knows one at a time
    fetched = await asyncio.gather(
        *(_fetch(agents[rank], holders, rank, found[rank], token, generation, layout) for rank in lost),
        return_exceptions=True,
    )
    for rank, result in zip(lost, fetched, strict=True):
        if isinstance(result, BaseException):
            log.warning("no replica of rank %d could be fetched: %s", rank, result)
        else:
            found[rank] = result
    return found


def without_state(steps: Sequence[Sequence[int]]) -> list[int]:
    """The ranks whose `steps` are of no use: none, or all of them before the oldest that any other rank holds. Such are
    left on a node that a rank once ran on and has come back to."""
    lost = []
    for rank, own in enumerate(steps):
        others = [step for other, each in enumerate(steps) if other != rank for step in each]
        if not own or (others and max(own) < min(others)):
            lost.append(rank)
    return lost


async def _fetch(
    agent: Handle, holders: Sequence[Handle], rank: int, own: list[int], token: str, generation: int, layout: str
) -> list[int]:
    kept = await asyncio.gather(*(each.steps_of.remote(rank, layout) for each in holders), return_exceptions=True)
    newest = {keeper: max(steps) for keeper, steps in enumerate(kept) if isinstance(steps, list) and steps}
    if not newest or max(newest.values()) <= max(own, default=0):
        return own
    keeper = max(newest, key=lambda number: newest[number])
    place = await holders[keeper].receive_replicas.remote(token, generation)
    found: list[int] = await agent.fetch_snapshot.remote(rank, place, token, generation, layout)
    return found
