"""From which state the next generation goes on: what is in shared memory of which node, what is on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service import replication
from service.crew import Crew
from service.gangs import Handle
from service.job_record import JobRecord
from service.other_layouts import spread, whole_states
from service.recovery import choose_resume, unusable_sources
from service.sizes import resized, shapes_of, sizes_of
from workers.checkpoint.catalog import whole_checkpoints
from workers.checkpoint.snapshot import layout_tag
from workers.config import JobSpec
from workers.messages import Resume


@dataclass(frozen=True)
class Found:
    """A state to go on from."""

    resume: Resume
    source: str
    """Where it comes from, for the record of a recovery."""


async def newest_state(
    crew: Crew,
    submitted: JobSpec,
    checkpoint_folder: Path,
    record: JobRecord,
    last_kind: str | None,
    leavers: Sequence[Handle] = (),
) -> Found:
    """The newest state that all of the crew can reach; it is brought to their nodes where it lies on others.

    `last_kind`: of the death that ended the generation before; `leavers`: agents that are no longer of the crew, whose
    nodes may hold state."""
    agents, generation = crew.agents, (await record.job()).generation
    own = await asyncio.gather(*(agent.snapshot_steps.remote(crew.tag) for agent in agents))
    found = await replication.bring_back(agents, own, generation, crew.tag, leavers)
    held = [{*steps, *_in_process(crew, rank)} for rank, steps in enumerate(found)]
    whole = await asyncio.to_thread(whole_checkpoints, checkpoint_folder)
    await record.reconcile_checkpoints(whole)
    resume = choose_resume(
        held,
        [(manifest.step, str(path)) for path, manifest in whole],
        unusable_sources(await record.generations(), last_kind),
        await _of_other_layouts([*agents, *leavers], agents, submitted, crew.tag, generation),
    )
    replicated = {step for before, after in zip(own, found, strict=True) for step in {*after} - {*before}}
    return Found(resume, _told(resume, resume.step in replicated, resume.step in crew.memory.values()))


def _in_process(crew: Crew, rank: int) -> list[int]:
    step = crew.memory.get(rank)
    return [] if step is None else [step]


def _told(resume: Resume, from_replica: bool, from_memory: bool) -> str:
    if resume.source != "snapshot":
        return resume.source
    where = "replica" if from_replica else "snapshot"
    return f"memory and {where}" if from_memory else where


async def _of_other_layouts(
    holders: Sequence[Handle], staying: Sequence[Handle], submitted: JobSpec, tag: str, generation: int
) -> list[tuple[int, list[str]]]:
    """(Step, files) of the newest state that ranks of another layout than the one with `tag` left whole in the shared
    memory of any node of `holders`, once it is on every node of `staying`."""
    layouts = [resized(shape, size) for shape in shapes_of(submitted) for size in sizes_of(submitted)]
    worlds = {layout_tag(spec.model_dump(mode="json")): spec.layout.world_size for spec in layouts}
    worlds.pop(tag, None)
    if not worlds:
        return []
    agents, kept, hosts = await _hosts_of(holders, staying)
    for state in whole_states(kept, worlds):
        if await spread(state, agents, kept, generation, hosts):
            return [(state.step, state.paths)]
    return []


async def _hosts_of(
    holders: Sequence[Handle], staying: Sequence[Handle]
) -> tuple[dict[str, Handle], dict[str, list[dict[str, Any]]], set[str]]:
    """One agent of each host of `holders`; which files each host keeps; the hosts of `staying`, who are among them. A
    holder that does not answer holds nothing, unless it stays."""
    answers = await asyncio.gather(*(agent.describe.remote() for agent in holders), return_exceptions=True)
    agents: dict[str, Handle] = {}
    hosts = set()
    for agent, place in zip(holders, answers, strict=True):
        if isinstance(place, BaseException):
            if agent in staying:
                raise place
            continue
        agents[place["host"]] = agent
        if agent in staying:
            hosts.add(place["host"])
    kept = await asyncio.gather(*(agent.kept.remote() for agent in agents.values()))
    return agents, dict(zip(agents, kept, strict=True)), hosts
