"""Backups of the ranks' snapshots on other nodes, as a job's supervisor has them taken and brought back. What fails
here costs protection, not the job."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from service.backups.other_layouts import FilesByHost
from service.backups.partners import partners, reachable
from service.backups.transfer import address_of
from service.cluster.agent_client import AgentClient
from workers.protocol.messages import Endpoint

log = logging.getLogger(__name__)

Peers = Mapping[int, Sequence[int]]
"""For each rank those that have the same state, itself among them (`grid.state_peers`)."""


async def begin(
    agents: Sequence[AgentClient], nodes: Sequence[str], generation: int, layout: str, peers: Peers
) -> dict[int, int]:
    """Let every agent stream its rank's snapshots (of the layout with tag `layout`) to a partner on another node, from
    now on, unless a peer there has the same. `nodes`: the node of each rank. Answers by rank the partner that holds its
    backup; a rank whose partner fails is left out."""
    unprotected = {rank for rank, same in peers.items() if len({nodes[peer] for peer in same}) == 1}
    wanted = {rank: partner for rank, partner in partners(nodes).items() if rank in unprotected}
    if not wanted:
        return {}
    token, receivers = secrets.token_hex(), sorted(set(wanted.values()))
    answers = await asyncio.gather(
        *(agents[receiver].receive_backups(token, generation) for receiver in receivers), return_exceptions=True
    )
    pairs = zip(receivers, answers, strict=True)
    addresses = {receiver: address for receiver, address in pairs if isinstance(address, Endpoint)}
    ranks = [rank for rank, partner in sorted(wanted.items()) if partner in addresses]
    begun = await asyncio.gather(
        *(agents[rank].send_backups(addresses[wanted[rank]], token, generation, layout) for rank in ranks),
        return_exceptions=True,
    )
    sending = {rank: wanted[rank] for rank, problem in zip(ranks, begun, strict=True) if problem is None}
    if len(sending) < len(wanted):
        problems = [str(each) for each in (*answers, *begun) if isinstance(each, BaseException)]
        log.warning("%d of %d ranks have no backup: %s", len(wanted) - len(sending), len(agents), "; ".join(problems))
    return sending


@dataclass(frozen=True)
class Brought:
    """What lies in shared memory of the nodes of the ranks that need it."""

    steps: list[list[int]]
    """Of each rank."""
    taken: dict[int, str]
    """By rank what was fetched for it: its own `snapshot` from another node, that of a `peer`, or a `replica`."""


async def bring_back(
    agents: Sequence[AgentClient],
    steps: Sequence[Sequence[int]],
    needy: Iterable[int],
    generation: int,
    layout: str,
    holders: Mapping[str, AgentClient],
    files: FilesByHost,
    peers: Peers,
) -> Brought:
    """The steps in each rank's own shared memory, after those of the `needy` ranks that lack it fetched the newest step
    that all ranks can have, from files of their own or of their peers, or from backups, on any host. `steps`: the same
    before that; `files`: of each host, of which `holders` has an agent."""
    held, token = [list(each) for each in steps], secrets.token_hex()
    taken: dict[int, str] = {}
    offers = {rank: _offers(peers[rank], rank, layout, files) for rank in needy}
    state = reachable(held, {rank: itertools.chain(*(each.steps for each in offers[rank])) for rank in offers})
    if state is None:
        return Brought(held, taken)  # what only some of them can have is of no use

    async def fetch(rank: int) -> None:
        for offer in offers[rank]:
            if state.step not in offer.steps or state.step in held[rank]:
                continue
            try:
                address = await address_of(holders[offer.host], token, generation)
                fetched = await agents[rank].fetch_snapshot(rank, address, token, generation, layout, offer.rank)
            except Exception as error:  # noqa: BLE001 - whatever it is, others may offer the same
                log.warning("the snapshots of rank %d could not be fetched from %s: %s", rank, offer.host, error)
            else:
                held[rank], taken[rank] = fetched, offer.kind

    await asyncio.gather(*(fetch(rank) for rank in state.fetched))
    return Brought(held, taken)


def without_state(steps: Sequence[Sequence[int]]) -> list[int]:
    """The ranks whose `steps` are of no use: none, or all of them before those of the rank that is furthest. Such are
    left on a node that a rank once ran on and has come back to."""
    furthest = max(steps, key=lambda each: max(each, default=-1), default=())
    return [rank for rank, own in enumerate(steps) if not own or max(own) < min(furthest)]


KINDS = ("snapshot", "peer", "replica")
"""What a rank can resume from, the nearest first. These words are stored with recoveries: a backup is a `replica`
there."""


@dataclass(frozen=True)
class _Offer:
    """Snapshots that can be fetched."""

    host: str
    rank: int
    """Whose they are."""
    kind: str
    """One of KINDS."""
    steps: tuple[int, ...]


def _offers(peers: Sequence[int], rank: int, layout: str, files: FilesByHost) -> list[_Offer]:
    """What `rank` could resume from, the nearest first. Of a rank's files on one host only the one that goes furthest
    is given out."""
    offers = []
    for host, here in sorted(files.items()):
        for peer in peers:
            theirs = [file for file in here if (file.rank, file.layout) == (peer, layout)]
            if theirs:
                furthest = max(theirs, key=lambda file: max(file.steps, default=-1))
                kind = "replica" if furthest.is_backup else "snapshot" if peer == rank else "peer"
                offers.append(_Offer(host, peer, kind, furthest.steps))
    return sorted(offers, key=lambda offer: KINDS.index(offer.kind))
