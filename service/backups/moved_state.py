"""State in shared memory that has to get to other nodes: of ranks that move, and of ranks of another layout, from which
a job resumes after its size has changed."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from service.cluster.agent_client import AgentClient, AgentError
from workers.protocol.messages import Endpoint, StoredSnapshot
from workers.snapshot.files import BACKUP_PREFIX

log = logging.getLogger(__name__)

FilesByHost = Mapping[str, Sequence[StoredSnapshot]]
"""For each host the snapshot files on it."""
Groups = Sequence[Sequence[int]]
"""The ranks of a layout, in groups that have the same state (`grid.state_groups`)."""


@dataclass(frozen=True)
class Place:
    """Where a snapshot file is."""

    rank: int
    """The rank whose state it contains."""
    host: str
    path: str
    """Path of the rank's own file; the file that is there may be a backup."""


@dataclass(frozen=True)
class Whole:
    """The newest step of which files of one layout contain the whole state."""

    layout: str
    """Tag of the layout."""
    step: int
    places: tuple[Place, ...]
    """One place for each group of ranks with the same state, in order."""

    @property
    def paths(self) -> list[str]:
        """Paths of all files; the same on every host once `spread` has copied them there."""
        return [place.path for place in self.places]


def whole_states(files: FilesByHost, layouts: Mapping[str, Groups]) -> list[Whole]:
    """The newest complete state of each layout that has one, newest first. `layouts`: by tag; files of other layouts
    mean nothing to this job."""
    states = [state for layout, groups in layouts.items() if (state := _whole(files, layout, groups)) is not None]
    return sorted(states, key=lambda state: -state.step)


def _whole(files: FilesByHost, layout: str, groups: Groups) -> Whole | None:
    group_of = {rank: group for group, ranks in enumerate(groups) for rank in ranks}
    places: dict[int, dict[int, Place]] = {}  # by step, by group
    ours = [(host, file) for host in sorted(files) for file in files[host] if file.layout == layout]
    for host, file in sorted(ours, key=lambda each: each[1].is_backup):  # own files first
        place = Place(file.rank, host, _own_path(file.path))
        for step in file.steps:
            places.setdefault(step, {}).setdefault(group_of[place.rank], place)
    steps = [step for step, by_group in places.items() if len(by_group) == len(groups)]
    if not steps:
        return None
    step = max(steps)
    return Whole(layout, step, tuple(places[step][group] for group in range(len(groups))))


def _own_path(path: str) -> str:
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{name.removeprefix(BACKUP_PREFIX)}"


async def spread(
    state: Whole, agents: Mapping[str, AgentClient], files: FilesByHost, generation: int, hosts: Collection[str]
) -> bool:
    """Copy the files of `state` to each of `hosts`, a backup as if it were the rank's own file; False if that fails.
    `agents` has one agent of each host that has or needs any."""
    token, wanted = secrets.token_hex(), []
    for host in sorted(hosts):
        own = [file for file in files[host] if file.layout == state.layout and not file.is_backup]
        here = {file.rank for file in own if state.step in file.steps}
        wanted += [(host, place.rank, place.host) for place in state.places if place.rank not in here]
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
        log.warning("the state of step %d could not be brought to all nodes: %s", state.step, error)
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
