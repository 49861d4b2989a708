"""From which state the next generation goes on: what is in shared memory of which node, what is on disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from service.backups import rank_backups
from service.backups.other_layouts import Groups, spread, whole_states
from service.cluster.agent_client import AgentClient, within
from service.cluster.sizes import resized, shapes_of, sizes_of
from service.job.crew import Crew
from service.job.record import JobRecord
from service.recovery.decisions import choose_resume, unusable_sources
from workers.checkpoint.catalog import whole_checkpoints
from workers.comm.grid import state_groups
from workers.config import JobSpec
from workers.messages import Resume, StoredSnapshot
from workers.snapshot.snapshots import layout_tag

log = logging.getLogger(__name__)
T = TypeVar("T")

# A leaver that takes longer to answer is done without: it may be gone. A keeper has to come up first.
LEAVER_SECONDS = 30.0


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
    leavers: Sequence[AgentClient] = (),
) -> Found:
    """The newest state that all of the crew can reach; it is brought to their nodes where it lies on others.

    `last_kind`: of the death that ended the generation before; `leavers`: agents that are no longer of the crew, whose
    nodes may hold state."""
    agents, generation = crew.agents, (await record.job()).generation
    own = await asyncio.gather(*(agent.snapshot_steps(crew.tag) for agent in agents))
    brought, others = rank_backups.Brought([list(steps) for steps in own], {}), _other_layouts(submitted, crew.tag)
    foreign: list[tuple[int, list[str]]] = []
    needy = list(range(len(agents))) if leavers else rank_backups.without_state(own)
    if generation and (needy or others):
        memory = await _memory_of(agents, leavers)
        brought = await rank_backups.bring_back(
            agents, own, needy, generation, crew.tag, memory.holders, memory.files, crew.peers
        )
        foreign = await _of_other_layouts(memory, others, generation)
    held = [{*steps, *_in_process(crew, rank)} for rank, steps in enumerate(brought.steps)]
    whole = await asyncio.to_thread(whole_checkpoints, checkpoint_folder)
    await record.reconcile_checkpoints(whole)
    durable = [(manifest.step, str(path)) for path, manifest in whole]
    resume = choose_resume(held, durable, unusable_sources(await record.generations(), last_kind), foreign)
    taken = {kind for rank, kind in brought.taken.items() if resume.step in brought.steps[rank]}
    return Found(resume, _told(resume, taken, resume.step in crew.memory.values()))


def _in_process(crew: Crew, rank: int) -> list[int]:
    step = crew.memory.get(rank)
    return [] if step is None else [step]


def _told(resume: Resume, taken: set[str], from_memory: bool) -> str:
    if resume.source != "snapshot":
        return resume.source
    where = max(taken or {"snapshot"}, key=rank_backups.KINDS.index)
    return f"memory and {where}" if from_memory else where


def _other_layouts(submitted: JobSpec, tag: str) -> dict[str, Groups]:
    """By tag all layouts that the job may run in, but for the one with `tag`."""
    layouts = [resized(shape, size) for shape in shapes_of(submitted) for size in sizes_of(submitted)]
    found: dict[str, Groups] = {layout_tag(spec.model_dump(mode="json")): state_groups(spec.layout) for spec in layouts}
    found.pop(tag, None)
    return found


@dataclass(frozen=True)
class _Memory:
    """What lies in the shared memory of the job's hosts."""

    holders: dict[str, AgentClient]
    """An agent of each host."""
    files: dict[str, list[StoredSnapshot]]
    """The snapshot files of each host."""
    hosts: set[str]
    """Where the crew is."""


async def _memory_of(staying: Sequence[AgentClient], leavers: Sequence[AgentClient]) -> _Memory:
    """A leaver that does not answer holds nothing."""
    where = await asyncio.gather(*(agent.describe() for agent in staying))
    asked = await asyncio.gather(*(_answer(agent.describe()) for agent in leavers))
    hosts = {place.host: agent for place, agent in zip(where, staying, strict=True)}
    left = {place.host: agent for place, agent in zip(asked, leavers, strict=True) if place is not None}
    left = {host: agent for host, agent in left.items() if host not in hosts}
    here = await asyncio.gather(*(agent.snapshot_files() for agent in hosts.values()))
    there = await asyncio.gather(*(_answer(agent.snapshot_files()) for agent in left.values()))
    files = dict(zip(hosts, here, strict=True)) | {h: each for h, each in zip(left, there, strict=True) if each}
    return _Memory({host: agent for host, agent in {**left, **hosts}.items() if host in files}, files, set(hosts))


async def _answer(answer: Awaitable[T]) -> T | None:
    """What a leaver answers; None when it does not."""
    try:
        return await within(LEAVER_SECONDS, answer)
    except Exception as error:  # noqa: BLE001 - whatever it is, what it holds cannot be had
        log.warning("an agent that was left does not answer: %s", error)
        return None


async def _of_other_layouts(
    memory: _Memory, layouts: Mapping[str, Groups], generation: int
) -> list[tuple[int, list[str]]]:
    """(Step, files) of the newest state that ranks of other layouts left whole, once it is on every host of the
    crew."""
    for state in whole_states(memory.files, layouts):
        if await spread(state, memory.holders, memory.files, generation, memory.hosts):
            return [(state.step, state.paths)]
    return []
