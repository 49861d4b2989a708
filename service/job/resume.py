"""The state that the next generation resumes from: what is in shared memory of which node, what is on disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from manta.service.cluster.agent_client import AgentClient, within
from manta.service.cluster.sizes import resized, shapes_of, sizes_of
from manta.service.job import rank_backups
from manta.service.job.context import LISTING_SECONDS, JobContext
from manta.service.job.rank_backups import complete_states, spread
from manta.service.recovery.decisions import choose_resume, unusable_sources
from manta.service.recovery.durable_state import DurableState, durable_state
from manta.service.store import checkpoints, restored
from manta.workers.checkpoint.catalog import generation_of
from manta.workers.comm.grid import state_groups
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.protocol.messages import Resume, StoredSnapshot
from manta.workers.snapshot.files import layout_tag

log = logging.getLogger(__name__)
T = TypeVar("T")

# A departing agent that takes longer to answer is ignored: it may be gone. One that was started to hand out snapshots
# has to start first.
DEPARTING_SECONDS = 30.0
# Seconds in which all snapshots must be where they are needed.
MEMORY_SECONDS = 150.0
# Seconds to wait for the list of checkpoints, if memory has a state at least as new as all known ones.
IN_MEMORY_SECONDS = 2.0


@dataclass(frozen=True)
class StartingPoint:
    """A state to resume from."""

    resume: Resume
    source: str
    """The source of the state, for the record of a recovery."""


async def newest_state(job: JobContext, last_kind: str | None, last_step: int | None = None) -> StartingPoint:
    """The newest state that all of the gang can reach; if it is on other nodes, it is copied to theirs. `last_kind`:
    kind of the death that ended the last generation; `last_step`: the step computed at that time. Departing agents are
    queried too: their nodes may hold state. Raises CheckpointsUnreadable if the newest state is a checkpoint that
    cannot be read now, AgentError, and TimeoutError if the agents take too long."""
    gang, generation = job.gang, (await job.record.job()).generation
    async with asyncio.timeout(MEMORY_SECONDS):  # limits the agents only: the database may take any time
        brought, foreign = await _in_memory(job, generation)
    resting = {rank: [step] for rank, step in gang.resting_steps.items() if step is not None}
    held = [{*steps, *resting.get(rank, ())} for rank, steps in enumerate(brought.steps)]
    unusable = unusable_sources(await job.record.generations(), last_kind, last_step)
    recorded = [(row.step, row.path) for row in await job.record.saved_checkpoints()]
    is_in_memory = choose_resume(held, recorded, unusable, foreign).source in ("snapshot", "memory")
    # Otherwise the database may be a backup, older than the folder. A resting rank has reported in this generation.
    is_heard = job.record.has_begun or bool(resting)
    durable = await known_checkpoints(job, IN_MEMORY_SECONDS if is_in_memory and is_heard else LISTING_SECONDS)
    resume = choose_resume(held, durable.checkpoints, unusable, foreign)
    durable.refuse_unknown(job.id, resume, job.has_snapshots)
    taken = {kind for rank, kind in brought.origins.items() if resume.step in brought.steps[rank]}
    return StartingPoint(resume, _source(resume, taken, resume.step in gang.resting_steps.values()))


async def _in_memory(
    job: JobContext, generation: int
) -> tuple[rank_backups.FetchedSnapshots, list[tuple[int, list[str]]]]:
    """What the gang can reach in shared memory: its own snapshots, including those that were copied to its nodes, and
    (step, files) of what other layouts have left."""
    gang, agents = job.gang, list(job.gang.by_rank.values())
    departing = [agent for people in gang.departing for agent in people.agents if agent is not None]
    own = await asyncio.gather(*(agent.snapshot_steps(gang.tag) for agent in agents))
    brought = rank_backups.FetchedSnapshots([list(steps) for steps in own], {})
    others = _other_layouts(job.submitted, gang.tag)
    foreign: list[tuple[int, list[str]]] = []
    needy = list(range(len(agents))) if departing else rank_backups.ranks_without_state(own)
    if generation and (needy or others):
        memory = await _memory_of(agents, departing)
        ranks = rank_backups.Ranks(agents, generation, gang.tag, gang.peers)
        brought = await rank_backups.fetch_snapshots(ranks, own, needy, memory.holders, memory.files)
        foreign = await _states_of_other_layouts(memory, others, generation)
    return brought, foreign


async def known_checkpoints(job: JobContext, seconds: float = LISTING_SECONDS) -> DurableState:
    """The job's checkpoints; also updates its rows, unless their folder does not answer within `seconds`. For a job
    whose gang is at rest."""
    listing = await job.folder_reader.list(job.checkpoint_folder, seconds, job.id)
    rows = await job.record.reconcile_checkpoints(listing)
    complete = [row for row in rows if row.state == checkpoints.COMPLETE]
    durable = durable_state(listing, complete, [row for row in rows if row.state == checkpoints.SAVING])
    newest = max((generation_of(path) or 0 for _, path in durable.checkpoints), default=0)
    if newest > (await job.record.job()).generation:  # a backup: later generations must have higher numbers
        await job.record.write(lambda session: restored.know_generation(session, job.id, newest))
    return durable


def _source(resume: Resume, taken: set[str], from_memory: bool) -> str:
    if resume.source != "snapshot":
        return resume.source
    where = max(taken or {"snapshot"}, key=rank_backups.KINDS.index)
    return f"memory and {where}" if from_memory else where


def _other_layouts(submitted: JobSpec, tag: str) -> dict[str, ParallelConfig]:
    """All layouts that the job may run in, by tag, except for the one with `tag`. There may be thousands."""
    shapes = shapes_of(submitted)
    layouts = (resized(shape, size).layout for shape in shapes for size in sizes_of(submitted, shape.layout))
    by_tag = {layout_tag(layout): layout for layout in layouts}
    by_tag.pop(tag, None)
    return by_tag


@dataclass(frozen=True)
class _Memory:
    """The contents of the shared memory of the job's hosts."""

    holders: dict[str, AgentClient]
    """An agent of each host."""
    files: dict[str, list[StoredSnapshot]]
    """The snapshot files of each host."""
    hosts: set[str]
    """Hosts of the gang."""


async def _memory_of(staying: Sequence[AgentClient], departing: Sequence[AgentClient]) -> _Memory:
    """A departing agent that does not answer counts as holding nothing."""
    where = await asyncio.gather(*(agent.describe() for agent in staying))
    asked = await asyncio.gather(*(_answer(agent.describe()) for agent in departing))
    hosts = {place.host: agent for place, agent in zip(where, staying, strict=True)}
    left = {place.host: agent for place, agent in zip(asked, departing, strict=True) if place is not None}
    left = {host: agent for host, agent in left.items() if host not in hosts}
    here = await asyncio.gather(*(agent.snapshot_files() for agent in hosts.values()))
    there = await asyncio.gather(*(_answer(agent.snapshot_files()) for agent in left.values()))
    files = dict(zip(hosts, here, strict=True)) | {h: each for h, each in zip(left, there, strict=True) if each}
    return _Memory({host: agent for host, agent in {**left, **hosts}.items() if host in files}, files, set(hosts))


async def _answer(answer: Awaitable[T]) -> T | None:
    """The answer of a departing agent; None if it does not answer."""
    try:
        return await within(DEPARTING_SECONDS, answer)
    except Exception as error:  # noqa: BLE001 - its snapshots cannot be reached
        log.warning("an agent on a departing node does not respond: %s", error)
        return None


async def _states_of_other_layouts(
    memory: _Memory, layouts: Mapping[str, ParallelConfig], generation: int
) -> list[tuple[int, list[str]]]:
    """(Step, files) of the newest state that ranks of other layouts left complete, once it is on every host of the
    gang."""
    left = {file.layout for files in memory.files.values() for file in files}
    # Only these: the ranks of all layouts that a large job may run in are millions.
    groups = {tag: state_groups(layout) for tag, layout in layouts.items() if tag in left}
    for state in complete_states(memory.files, groups):
        if await spread(state, memory.holders, memory.files, generation, memory.hosts):
            return [(state.step, state.paths)]
    return []
