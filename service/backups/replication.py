"""A job's replicas, as its supervisor has them kept and brought back. What fails here costs protection, not the job."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.backups.other_layouts import KeptByHost
from service.backups.partners import partners, reachable

log = logging.getLogger(__name__)

Handle = Any
"""A Ray actor handle of an agent."""
Peers = Mapping[int, Sequence[int]]
"""For each rank those that have the same state, itself among them (`grid.state_peers`)."""


async def begin(
    agents: Sequence[Handle], nodes: Sequence[str], generation: int, layout: str, peers: Peers
) -> dict[int, int]:
    """Let every agent keep its rank's snapshots (of the layout with tag `layout`) with a partner on another node, from
    now on, unless a peer there has the same. `nodes`: the node of each rank. Answers who keeps whose; a rank whose
    partner fails is left out."""
    alone = {rank for rank, same in peers.items() if len({nodes[peer] for peer in same}) == 1}
    wanted, token = {rank: keeper for rank, keeper in partners(nodes).items() if rank in alone}, secrets.token_hex()
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
    if len(found) < len(wanted):
        problems = [str(each) for each in (*answers, *begun) if isinstance(each, BaseException)]
        log.warning("%d of %d ranks have no replica: %s", len(wanted) - len(found), len(agents), "; ".join(problems))
    return found


@dataclass(frozen=True)
class Brought:
    """What lies in shared memory of the nodes of the ranks that need it."""

    steps: list[list[int]]
    """Of each rank."""
    taken: dict[int, str]
    """By rank what was fetched for it: its own `snapshot` from another node, that of a `peer`, or a `replica`."""


async def bring_back(
    agents: Sequence[Handle],
    steps: Sequence[Sequence[int]],
    needy: Iterable[int],
    generation: int,
    layout: str,
    holders: Mapping[str, Handle],
    kept: KeptByHost,
    peers: Peers,
) -> Brought:
    """The steps in each rank's own shared memory, after those of the `needy` ranks that lack it fetched the newest step
    that all ranks can have, from files of their own or of their peers, or from replicas, on any host. `steps`: the same
    before that; `kept`: the files of each host, of which `holders` has an agent."""
    found, token = [list(each) for each in steps], secrets.token_hex()
    taken: dict[int, str] = {}
    offers = {rank: _offers(peers[rank], rank, layout, kept) for rank in needy}
    state = reachable(found, {rank: itertools.chain(*(each.steps for each in offers[rank])) for rank in offers})
    if state is None:
        return Brought(found, taken)  # what only some of them can have is of no use

    async def fetch(rank: int) -> None:
        for offer in offers[rank]:
            if state.step not in offer.steps or state.step in found[rank]:
                continue
            try:
                place = await holders[offer.host].receive_replicas.remote(token, generation)
                fetched = await agents[rank].fetch_snapshot.remote(rank, place, token, generation, layout, offer.rank)
            except Exception as error:  # noqa: BLE001 - whatever it is, others may offer the same
                log.warning("the snapshots of rank %d could not be fetched from %s: %s", rank, offer.host, error)
            else:
                found[rank], taken[rank] = fetched, offer.kind

    await asyncio.gather(*(fetch(rank) for rank in state.fetched))
    return Brought(found, taken)


def without_state(steps: Sequence[Sequence[int]]) -> list[int]:
    """The ranks whose `steps` are of no use: none, or all of them before those of the rank that is furthest. Such are
    left on a node that a rank once ran on and has come back to."""
    furthest = max(steps, key=lambda each: max(each, default=-1), default=())
    return [rank for rank, own in enumerate(steps) if not own or max(own) < min(furthest)]


KINDS = ("snapshot", "peer", "replica")
"""What a rank can go on from, the nearest first."""


@dataclass(frozen=True)
class _Offer:
    """Snapshots that can be fetched."""

    host: str
    rank: int
    """Whose they are."""
    kind: str
    """One of KINDS."""
    steps: tuple[int, ...]


def _offers(peers: Sequence[int], rank: int, layout: str, kept: KeptByHost) -> list[_Offer]:
    """What `rank` could go on from, the nearest first. Of a rank's files on one host only the one that goes furthest is
    given out."""
    found = []
    for host, files in sorted(kept.items()):
        for peer in peers:
            theirs = [file for file in files if (file["rank"], file["layout"]) == (peer, layout)]
            if theirs:
                furthest = max(theirs, key=lambda file: max(file["steps"], default=-1))
                kind = "replica" if furthest["is_replica"] else "snapshot" if peer == rank else "peer"
                found.append(_Offer(host, peer, kind, tuple(furthest["steps"])))
    return sorted(found, key=lambda offer: KINDS.index(offer.kind))
