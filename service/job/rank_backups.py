"""Snapshots of ranks on other nodes: backups, as a job's supervisor has them taken and brought back, and state that has
to get there, of ranks that move, and of ranks of another layout, from which a job resumes after its size has changed.
What fails here costs protection, not the job."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from manta.service.cluster.agent_client import AgentClient, AgentError
from manta.service.cluster.placement import partners, reachable
from manta.workers.protocol.messages import Endpoint, StoredSnapshot
from manta.workers.snapshot.files import BACKUP_PREFIX

log = logging.getLogger(__name__)

FilesByHost = Mapping[str, Sequence[StoredSnapshot]]
"""For each host the snapshot files on it."""
Groups = Sequence[Sequence[int]]
"""The ranks of a layout, in groups that have the same state (`grid.state_groups`)."""
Peers = Mapping[int, Sequence[int]]
"""For each rank those that have the same state, itself among them (`grid.state_peers`)."""


@dataclass(frozen=True)
class SnapshotLocation:
    """Where a snapshot file is."""

    rank: int
    """The rank whose state it contains."""
    host: str
    path: str
    """Path of the rank's own file; the file that is there may be a backup."""


@dataclass(frozen=True)
class CompleteState:
    """The newest step of which files of one layout contain the whole state."""

    layout: str
    """Tag of the layout."""
    step: int
    locations: tuple[SnapshotLocation, ...]
    """One place for each group of ranks with the same state, in order."""

    @property
    def paths(self) -> list[str]:
        """Paths of all files; the same on every host once `spread` has copied them there."""
        return [place.path for place in self.locations]


def complete_states(files: FilesByHost, layouts: Mapping[str, Groups]) -> list[CompleteState]:
    """The newest complete state of each layout that has one, newest first. `layouts`: by tag; files of other layouts
    mean nothing to this job."""
    states = [
        state for layout, groups in layouts.items() if (state := _complete_state(files, layout, groups)) is not None
    ]
    return sorted(states, key=lambda state: -state.step)


def _complete_state(files: FilesByHost, layout: str, groups: Groups) -> CompleteState | None:
    group_of = {rank: group for group, ranks in enumerate(groups) for rank in ranks}
    locations: dict[int, dict[int, SnapshotLocation]] = {}  # by step, by group
    ours = [(host, file) for host in sorted(files) for file in files[host] if file.layout == layout]
    for host, file in sorted(ours, key=lambda each: each[1].is_backup):  # own files first
        place = SnapshotLocation(file.rank, host, _own_path(file.path))
        for step in file.steps:
            locations.setdefault(step, {}).setdefault(group_of[place.rank], place)
    steps = [step for step, by_group in locations.items() if len(by_group) == len(groups)]
    if not steps:
        return None
    step = max(steps)
    return CompleteState(layout, step, tuple(locations[step][group] for group in range(len(groups))))


def _own_path(path: str) -> str:
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{name.removeprefix(BACKUP_PREFIX)}"


async def spread(
    state: CompleteState, agents: Mapping[str, AgentClient], files: FilesByHost, generation: int, hosts: Collection[str]
) -> bool:
    """Copy the files of `state` to each of `hosts`, a backup as if it were the rank's own file; False if that fails.
    `agents` has one agent of each host that has or needs any."""
    token, wanted = secrets.token_hex(), []
    for host in sorted(hosts):
        own = [file for file in files[host] if file.layout == state.layout and not file.is_backup]
        here = {file.rank for file in own if state.step in file.steps}
        wanted += [(host, place.rank, place.host) for place in state.locations if place.rank not in here]
    try:
        addresses = {
            source: await address_of(agents[source], token, generation)
            for source in sorted({source for _, _, source in wanted})
        }
        fetched = await asyncio.gather(
            *(
                agents[host].fetch_snapshot(rank, addresses[source], token, generation, state.layout)
                for host, rank, source in wanted
            )
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, there may be an older state that needs no copying
        log.warning("the state of step %d could not be copied to all nodes: %s", state.step, error)
        return False
    return all(state.step in steps for steps in fetched)


async def address_of(holder: AgentClient, token: str, generation: int) -> Endpoint:
    """Where `holder` hands out snapshots. Raises AgentError, also if it has no shared memory."""
    address = await holder.receive_backups(token, generation)
    if address is None:
        raise AgentError("the agent was started without a folder in shared memory")
    return address


async def hand_over(moves: Mapping[int, tuple[AgentClient, AgentClient]], generation: int, layout: str) -> None:
    """For each rank its old and its new agent: bring the rank's snapshots to where the new one is, unless it has them
    there already, as nodes that share a machine do. What fails is logged: an older state may still do."""
    token = secrets.token_hex()
    done = await asyncio.gather(
        *(_hand_over(rank, old, new, token, generation, layout) for rank, (old, new) in moves.items()),
        return_exceptions=True,
    )
    for rank, result in zip(moves, done, strict=True):
        if isinstance(result, BaseException):
            log.warning("the snapshots of rank %d could not be moved: %s", rank, result)


async def _hand_over(rank: int, old: AgentClient, new: AgentClient, token: str, generation: int, layout: str) -> None:
    held, there = await asyncio.gather(old.snapshot_steps(layout), new.snapshot_steps(layout))
    if held and (not there or max(held) > max(there)):
        address = await address_of(old, token, generation)
        await new.fetch_snapshot(rank, address, token, generation, layout)


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
class FetchedSnapshots:
    """Snapshots in the shared memory of each rank's node, after some were fetched."""

    steps: list[list[int]]
    """Steps by rank."""
    origins: dict[int, str]
    """By rank, what was fetched for it: its own `snapshot` from another node, that of a `peer`, or a `replica`."""


async def fetch_snapshots(
    gang: Ranks,
    steps: Sequence[Sequence[int]],
    needy: Iterable[int],
    holders: Mapping[str, AgentClient],
    files: FilesByHost,
) -> FetchedSnapshots:
    """Let those of the `needy` ranks that lack it fetch the newest step that all ranks can have, from snapshots of
    their own or of their peers, or from backups, on any host. `steps`: those in each rank's shared memory; `files`: of
    each host, for which `holders` has an agent."""
    held, token = [list(rank_steps) for rank_steps in steps], secrets.token_hex()
    origins: dict[int, str] = {}
    offers = {rank: _offers(gang.peers[rank], rank, gang.layout, files) for rank in needy}
    state = reachable(held, {rank: itertools.chain(*(offer.steps for offer in offers[rank])) for rank in offers})
    if state is None:
        return FetchedSnapshots(held, origins)  # a step that only some ranks can have is useless

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
                held[rank], origins[rank] = fetched, offer.kind

    await asyncio.gather(*(fetch(rank) for rank in state.fetched))
    return FetchedSnapshots(held, origins)


def ranks_without_state(steps: Sequence[Sequence[int]]) -> list[int]:
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
