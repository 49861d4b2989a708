"""A job's replicas, as its supervisor has them kept and brought back. What fails here costs protection, not the job."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from service.other_layouts import KeptByHost
from service.replicas import partners, reachable

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
    needy: Iterable[int],
    generation: int,
    layout: str,
    holders: Mapping[str, Handle],
    kept: KeptByHost,
) -> list[list[int]]:
    """The steps in each rank's own shared memory, after those of the `needy` ranks that lack it fetched the newest step
    that all ranks can have, from their own files or replicas of these on any host. `steps`: the same before that;
    `kept`: the files of each host, of which `holders` has an agent."""
    found, token = [list(each) for each in steps], secrets.token_hex()
    offers = {rank: _offers(rank, layout, kept) for rank in needy}
    state = reachable(found, {rank: itertools.chain(*each.values()) for rank, each in offers.items()})
    if state is None:
        return found  # what only some of them can have is of no use
    wanted = {rank: next(host for host, held in offers[rank].items() if state.step in held) for rank in state.fetched}
    fetched = await asyncio.gather(
        *(_fetch(agents[rank], holders[host], rank, token, generation, layout) for rank, host in wanted.items()),
        return_exceptions=True,
    )
    for rank, result in zip(wanted, fetched, strict=True):
        if isinstance(result, BaseException):
            log.warning("the snapshots of rank %d could not be fetched: %s", rank, result)
        else:
            found[rank] = result
    return found


def without_state(steps: Sequence[Sequence[int]]) -> list[int]:
    """The ranks whose `steps` are of no use: none, or all of them before those of the rank that is furthest. Such are
    left on a node that a rank once ran on and has come back to."""
    furthest = max(steps, key=lambda each: max(each, default=-1), default=())
    return [rank for rank, own in enumerate(steps) if not own or max(own) < min(furthest)]


def _offers(rank: int, layout: str, kept: KeptByHost) -> dict[str, list[int]]:
    """By host the steps of `rank` that can be fetched from there: those of the file that goes furthest."""
    offers = {}
    for host, files in sorted(kept.items()):
        mine = [list(file["steps"]) for file in files if (file["rank"], file["layout"]) == (rank, layout)]
        offers[host] = max(mine, key=lambda steps: max(steps, default=-1), default=[])
    return offers


async def _fetch(agent: Handle, holder: Handle, rank: int, token: str, generation: int, layout: str) -> list[int]:
    place = await holder.receive_replicas.remote(token, generation)
    found: list[int] = await agent.fetch_snapshot.remote(rank, place, token, generation, layout)
    return found
