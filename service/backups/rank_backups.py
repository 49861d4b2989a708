"""Backups of the ranks' snapshots on other nodes, as a job's supervisor has them taken and brought back. What fails
here costs protection, not the job."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from service.backups.moved_state import FilesByHost, address_of
from service.backups.partners import partners, reachable
from service.cluster.agent_client import AgentClient
from workers.protocol.messages import Endpoint

log = logging.getLogger(__name__)

Peers = Mapping[int, Sequence[int]]
"""For each rank those that have the same state, itself among them (`grid.state_peers`)."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a generation whose snapshots are backed up."""

    agents: Sequence[AgentClient]
    generation: int
    layout: str
    """Tag of the layout."""
    peers: Peers


async def begin(gang: Ranks, nodes: Sequence[str]) -> dict[int, int]:
    """From now on let every agent stream its rank's snapshots to a partner on another node, unless a peer there has the
    same state. `nodes`: the node of each rank. Returns by rank the partner that holds its backup; a rank whose partner
    fails is left out."""
    agents, generation = gang.agents, gang.generation
    unprotected = {rank for rank, same in gang.peers.items() if len({nodes[peer] for peer in same}) == 1}
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
        *(agents[rank].send_backups(addresses[wanted[rank]], token, generation, gang.layout) for rank in ranks),
        return_exceptions=True,
    )
    sending = {rank: wanted[rank] for rank, problem in zip(ranks, begun, strict=True) if problem is None}
    if len(sending) < len(wanted):
        problems = [str(each) for each in (*answers, *begun) if isinstance(each, BaseException)]
        log.warning("%d of %d ranks have no backup: %s", len(wanted) - len(sending), len(agents), "; ".join(problems))
    return sending


@dataclass(frozen=True)
class Brought:
    """Snapshots in the shared memory of each rank's node, after some were fetched."""

    steps: list[list[int]]
    """Steps by rank."""
    taken: dict[int, str]
    """By rank, what was fetched for it: its own `snapshot` from another node, that of a `peer`, or a `replica`."""


async def bring_back(
    gang: Ranks,
    steps: Sequence[Sequence[int]],
    needy: Iterable[int],
    holders: Mapping[str, AgentClient],
    files: FilesByHost,
) -> Brought:
    """Let those of the `needy` ranks that lack it fetch the newest step that all ranks can have, from snapshots of
    their own or of their peers, or from backups, on any host. `steps`: those in each rank's shared memory; `files`: of
    each host, for which `holders` has an agent."""
    held, token = [list(each) for each in steps], secrets.token_hex()
    taken: dict[int, str] = {}
    offers = {rank: _offers(gang.peers[rank], rank, gang.layout, files) for rank in needy}
    state = reachable(held, {rank: itertools.chain(*(each.steps for each in offers[rank])) for rank in offers})
    if state is None:
        return Brought(held, taken)  # a step that only some ranks can have is useless

    async def fetch(rank: int) -> None:
        agent, generation = gang.agents[rank], gang.generation
        for offer in offers[rank]:
            if state.step not in offer.steps or state.step in held[rank]:
                continue
            try:
                address = await address_of(holders[offer.host], token, generation)
                fetched = await agent.fetch_snapshot(rank, address, token, generation, gang.layout, offer.rank)
            except Exception as error:  # noqa: BLE001 - others may offer the same
                log.warning("the snapshots of rank %d could not be fetched from %s: %s", rank, offer.host, error)
            else:
                held[rank], taken[rank] = fetched, offer.kind

    await asyncio.gather(*(fetch(rank) for rank in state.fetched))
    return Brought(held, taken)


def without_state(steps: Sequence[Sequence[int]]) -> list[int]:
    """The ranks whose `steps` are useless: there are none, or all are older than those of the most advanced rank. A
    rank finds such old snapshots if it comes back to a node on which it once ran."""
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
