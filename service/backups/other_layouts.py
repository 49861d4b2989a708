"""State in shared memory that ranks of another layout left: what a job goes on from after its size has changed."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.snapshot.snapshots import REPLICA_PREFIX

log = logging.getLogger(__name__)

Handle = Any
"""A Ray actor handle of an agent."""
KeptByHost = Mapping[str, Sequence[Mapping[str, Any]]]
"""For each host the snapshot files there, as `Agent.kept` tells them."""


Groups = Sequence[Sequence[int]]
"""The ranks of a layout, in groups that have the same state (`grid.state_groups`)."""


@dataclass(frozen=True)
class Place:
    """Where a snapshot file lies."""

    rank: int
    """Whose it is."""
    host: str
    path: str
    """Where the rank keeps its own; here perhaps that of a replica."""


@dataclass(frozen=True)
class Whole:
    """The newest step that files of one layout hold all of."""

    layout: str
    """Tag of the layout."""
    step: int
    places: tuple[Place, ...]
    """One of each group of ranks with the same state, in order."""

    @property
    def paths(self) -> list[str]:
        """Of all files; the same on every host, once `spread` has brought them there."""
        return [place.path for place in self.places]


def whole_states(kept: KeptByHost, layouts: Mapping[str, Groups]) -> list[Whole]:
    """The newest whole state of each layout of which there is one, newest first. `layouts`: by tag; files of others
    mean nothing to this job."""
    found = [state for layout, groups in layouts.items() if (state := _whole(kept, layout, groups)) is not None]
    return sorted(found, key=lambda state: -state.step)


def _whole(kept: KeptByHost, layout: str, groups: Groups) -> Whole | None:
    group_of = {rank: group for group, ranks in enumerate(groups) for rank in ranks}
    files: dict[int, dict[int, Place]] = {}  # by step, by group
    found = [(host, file) for host in sorted(kept) for file in kept[host] if file["layout"] == layout]
    for host, file in sorted(found, key=lambda each: bool(each[1]["is_replica"])):  # own files first
        place = Place(file["rank"], host, _own_path(file["path"]))
        for step in file["steps"]:
            files.setdefault(step, {}).setdefault(group_of[place.rank], place)
    steps = [step for step, by_group in files.items() if len(by_group) == len(groups)]
    if not steps:
        return None
    step = max(steps)
    return Whole(layout, step, tuple(files[step][group] for group in range(len(groups))))


def _own_path(path: str) -> str:
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{name.removeprefix(REPLICA_PREFIX)}"


async def spread(
    state: Whole, agents: Mapping[str, Handle], kept: KeptByHost, generation: int, hosts: Collection[str]
) -> bool:
    """Bring the files of `state` to each of `hosts`, a replica as if it were the rank's own; False when that fails.
    `agents` has one agent of each host that holds or wants any."""
    token, wanted = secrets.token_hex(), []
    for host in sorted(hosts):
        files = [file for file in kept[host] if file["layout"] == state.layout and not file["is_replica"]]
        here = {file["rank"] for file in files if state.step in file["steps"]}
        wanted += [(host, place.rank, place.host) for place in state.places if place.rank not in here]
    try:
        doors = {
            source: await agents[source].receive_replicas.remote(token, generation)
            for source in sorted({source for _, _, source in wanted})
        }
        fetched = await asyncio.gather(
            *(
                agents[host].fetch_snapshot.remote(rank, doors[source], token, generation, state.layout)
                for host, rank, source in wanted
            )
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, there may be an older state that needs no fetching
        log.warning("the state of step %d could not be brought to all nodes: %s", state.step, error)
        return False
    return all(state.step in steps for steps in fetched)
