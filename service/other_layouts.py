"""State in shared memory that ranks of another layout left: what a job goes on from after its size has changed."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.checkpoint.snapshot import REPLICA_PREFIX

log = logging.getLogger(__name__)

Handle = Any
"""A Ray actor handle of an agent."""
KeptByHost = Mapping[str, Sequence[Mapping[str, Any]]]
"""For each host the snapshot files there, as `Agent.kept` tells them."""


@dataclass(frozen=True)
class Whole:
    """The newest step that the files of one layout hold of all of its ranks."""

    layout: str
    """Tag of the layout."""
    step: int
    places: tuple[tuple[str, str], ...]
    """Of each rank, in order: a host where its file, or a replica of it, lies; and the path of such a file where a rank
    keeps its own."""

    @property
    def paths(self) -> list[str]:
        """Of all files; the same on every host, once `spread` has brought them there."""
        return [path for _, path in self.places]


def whole_states(kept: KeptByHost, worlds: Mapping[str, int]) -> list[Whole]:
    """The newest whole state of each layout of which there is one, newest first. `worlds`: ranks of each layout, by its
    tag; files of other layouts mean nothing to this job."""
    found = [state for layout, world in worlds.items() if (state := _whole(kept, layout, world)) is not None]
    return sorted(found, key=lambda state: -state.step)


def _whole(kept: KeptByHost, layout: str, world: int) -> Whole | None:
    files: dict[int, dict[int, tuple[str, str]]] = {}  # by step, by rank
    found = [(host, file) for host in sorted(kept) for file in kept[host] if file["layout"] == layout]
    for host, file in sorted(found, key=lambda each: bool(each[1]["is_replica"])):  # own files first
        for step in file["steps"]:
            files.setdefault(step, {}).setdefault(file["rank"], (host, _own_path(file["path"])))
    steps = [step for step, by_rank in files.items() if all(rank in by_rank for rank in range(world))]
    if not steps:
        return None
    step = max(steps)
    return Whole(layout, step, tuple(files[step][rank] for rank in range(world)))


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
        wanted += [(host, rank, source) for rank, (source, _) in enumerate(state.places) if rank not in here]
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
