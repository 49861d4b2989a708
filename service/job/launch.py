"""Starting a generation: the crew's agents get their orders, and a gang that watches them is made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from service.backups import rank_backups
from service.job.actions import Launch
from service.job.context import JobContext
from service.job.generation import RunningGeneration
from service.job.hang_watch import HangWatch
from service.job.reports import ReportWriter
from service.job.resume import newest_state
from workers.comm.grid import RankGrid
from workers.config import JobSpec
from workers.errors import MantaError
from workers.messages import AgentDescription, Launched, LaunchOrder, Resume, StoreAddress
from workers.paths import Paths
from workers.reports import Report

# A launch that takes longer has an agent in it that does not answer; a node's first trainer waits for its zygote.
LAUNCH_SECONDS = 150.0


class LaunchFailed(MantaError):
    """Agents did not do their part before the generation had begun; the next try goes on without them."""

    def __init__(self, silent: Mapping[int, str]):
        """`silent`: by rank why its agent did not answer."""
        self.silent = dict(silent)
        rank, why = next(iter(silent.items()))
        others = f" and {len(silent) - 1} others" if len(silent) > 1 else ""
        super().__init__(f"rank {rank}{others} could not be launched ({why})")


class Launcher:
    """Launches the generations of one job."""

    def __init__(self, job: JobContext):
        self._job, self._site, self._record, self._crew = job, job.site, job.record, job.crew
        self._paths = Paths.of(job.site.home)

    async def launch(self, launch: Launch) -> RunningGeneration:
        """Begin the next generation with the agents at hand and watch it. An agent that fails once the generation has
        begun is one of the gang's deaths; before, it raises LaunchFailed. Raises AgentError and TimeoutError too."""
        crew, incident = self._crew, launch.incident
        departing = [agent for people in self._job.departing for agent in people.agents]
        where = await self._everywhere()
        folder = self._paths.checkpoint_folder(self._record.id)
        last_kind = None if incident is None else incident.culprit.kind
        async with asyncio.timeout(LAUNCH_SECONDS):
            found = await newest_state(crew, self._job.submitted, folder, self._record, last_kind, departing)
            store = await self._start_store(where[0].node)
            generation = await self._record.begin(
                launch.cause, launch.counts, found.resume, found.source, crew.layout, incident
            )
            passed = await self._record.rolled_back()
        orders = {
            rank: self.order(rank, crew.spec, generation, found.resume, store, place, passed)
            for rank, place in where.items()
        }
        gang = self.watch(generation, found.resume.step)
        answers, silent = await self._site.gangs.ask(
            dict(enumerate(crew.agents)),
            lambda rank, agent: agent.launch(orders[rank]),
            LAUNCH_SECONDS,
        )
        rows = [self._row(orders[rank], where[rank], answers.get(rank)) for rank in orders]
        kept = [rank for rank, answer in answers.items() if answer.kept]
        await self._record.launched(generation, time.time(), rows, kept)
        for rank, why in silent.items():
            gang.lose(rank, f"could not be launched ({why})")
        if not silent:
            nodes = [place.node or place.host for place in where.values()]
            await rank_backups.begin(crew.agents, nodes, generation, crew.tag, crew.peers)
        return gang

    async def _everywhere(self) -> dict[int, AgentDescription]:
        """By rank where its agent is."""
        agents = dict(enumerate(self._crew.agents))
        where, silent = await self._site.gangs.ask(agents, lambda _, agent: agent.describe(), LAUNCH_SECONDS)
        if silent:
            places = {rank: await self._site.gangs.node_of(agents[rank]) for rank in silent}
            self._crew.seen({**{rank: place.node for rank, place in where.items()}, **places})
            raise LaunchFailed(silent)
        self._crew.note(where)
        return where

    async def _start_store(self, node: str | None) -> StoreAddress | None:
        """Where the ranks of the next generation meet; on the node of rank 0."""
        if self._crew.layout.world_size == 1:
            return None
        daemons = await self._site.gangs.ensure_node_daemons()
        if node is None or node not in daemons:  # agents of a real cluster are always on one
            raise LaunchFailed(dict.fromkeys(self._crew.on([str(node)]), f"the daemon of node {node} does not answer"))
        generation = (await self._record.job()).generation + 1
        return await daemons[node].start_store(self._record.id, generation)

    def watch(self, generation: int, resume_step: int, taken_over: bool = False) -> RunningGeneration:
        """The crew as the gang of `generation`, which resumed at `resume_step`. `taken_over`: from another control
        plane, which may have seen what we did not."""
        crew, record = self._crew, self._record
        writer = ReportWriter(self._site.store, record.id, generation, resume_step)

        async def take(report: Report) -> None:
            hangs.heard(report)
            await writer.take(report)

        gang = RunningGeneration(crew.agents, generation, crew.after, take)
        hangs = HangWatch(
            crew.agents,
            RankGrid(crew.layout).group,
            record.event,
            gang.lose,
            crew.spec.recovery.stragglers,
            self._job.stragglers_replaced,
        )
        gang.run_alongside(hangs.run(look_first=taken_over))
        return gang

    def order(
        self,
        rank: int,
        spec: JobSpec,
        generation: int,
        resume: Resume,
        store: StoreAddress | None,
        where: AgentDescription,
        roll_backs: Sequence[dict[str, Any]] = (),
    ) -> LaunchOrder:
        """What the agent of `rank`, which is at `where`, is told. `store`: of the generation; `roll_backs`: what the
        events of steps that were rolled back say."""
        return LaunchOrder(
            job=self._record.id,
            generation=generation,
            rank=rank,
            spec=spec.model_dump(mode="json"),
            store_host=store.host if store else None,
            store_port=store.port if store else None,
            snapshot_folder=str(self._paths.snapshot_folder(self._record.id)),
            checkpoint_folder=str(self._paths.checkpoint_folder(self._record.id)),
            resume=resume,
            roll_backs=tuple(roll_backs),
            device="cuda:0" if where.devices else "cpu",
            peak_flops=self._site.peaks.get(where.node or ""),
            in_place=not where.devices,  # over NCCL a survivor cannot leave a collective
        )

    def _row(self, order: LaunchOrder, where: AgentDescription, answer: Launched | None) -> dict[str, Any]:
        at = RankGrid(self._crew.layout).coordinates(order.rank)
        return {
            "rank": order.rank,
            "tensor": at.tensor,
            "pipeline": at.pipeline,
            "data": at.data,
            "context": at.context,
            "node": where.host,
            "device": f"GPU {where.devices[0]}" if where.devices else "cpu",
            "pid": None if answer is None else answer.pid,
            "generation": order.generation,
            "state": "exited" if answer is None else "running",
            "actor": self._crew.names[order.rank],
        }
