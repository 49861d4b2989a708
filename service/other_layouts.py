"""State in shared memory that ranks of another layout left: what a job goes on from after its size has changed."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """(Host, path) of each rank's file, in order of ranks."""

    @property
    def paths(self) -> list[str]:
        """Of all files; the same on every host that has them."""
        return [path for _, path in self.places]


def whole_states(kept: KeptByHost, worlds: Mapping[str, int]) -> list[Whole]:
    """The newest whole state of each layout of which there is one, newest first. `worlds`: ranks of each layout, by its
    tag; files of other layouts mean nothing to this job."""
    found = [state for layout, world in worlds.items() if (state := _whole(kept, layout, world)) is not None]
    return sorted(found, key=lambda state: -state.step)


def _whole(kept: KeptByHost, layout: str, world: int) -> Whole | None:
    files: dict[int, dict[int, tuple[str, str]]] = {}  # by step, by rank
    for host in sorted(kept):
        for file in kept[host]:
            if file["layout"] == layout and not file["is_replica"]:
                for step in file["steps"]:
                    files.setdefault(step, {}).setdefault(file["rank"], (host, file["path"]))
    steps = [step for step, by_rank in files.items() if all(rank in by_rank for rank in range(world))]
    if not steps:
        return None
    step = max(steps)
    return Whole(layout, step, tuple(files[step][rank] for rank in range(world)))


async def spread(state: Whole, agents: Mapping[str, Handle], kept: KeptByHost, generation: int) -> bool:
    """Bring the files of `state` to every host, of which `agents` has one agent each; False when that fails."""
    token, wanted = secrets.token_hex(), []
    for host in agents:
        here = {file["rank"] for file in kept[host] if file["layout"] == state.layout and state.step in file["steps"]}
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
