"""Trainers on paper that train by themselves: the agents of a FakeCluster get ranks that begin, commit step after step,
come to rest when a peer dies, end early when they are asked to, and finish."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from manta.workers.config import JobSpec
from manta.workers.protocol.reports import TrainerStatus
from tests.service.support.fake_cluster import FakeCluster, SimulatedAgent

START_SECONDS = 0.3
STEP_SECONDS = 0.5
PEER_LOST_SECONDS = 0.1


class SimulatedTraining:
    """All jobs of a cluster. `committed` and `problems` say what happened."""

    def __init__(self, cluster: FakeCluster):
        self.committed: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """By job (generation, step) of each commit, in order."""
        self.problems: list[str] = []
        """What may never happen, such as two gangs that train one job at a time."""
        self._gangs: dict[tuple[str, int], dict[int, SimulatedAgent]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        cluster.agents.on_start = self._on_start

    def _on_start(self, agent: SimulatedAgent) -> None:
        agent.on_launch = self._launched  # type: ignore[assignment]

    def _launched(self, agent: SimulatedAgent) -> None:
        order = agent.orders[-1]
        gang = self._gangs.setdefault((order.job, order.generation), {})
        gang[order.rank] = agent
        if len(gang) == JobSpec.model_validate(order.spec).layout.world_size:
            task = asyncio.get_running_loop().create_task(self._train(order.job, order.generation, gang))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _train(self, job: str, generation: int, gang: dict[int, SimulatedAgent]) -> None:
        order = gang[0].orders[-1]
        last = JobSpec.model_validate(order.spec).train.steps
        step = order.resume.step
        await asyncio.sleep(START_SECONDS)
        for agent in self._running(gang, generation):
            agent.begin()
        if step and not gang[0].lost:
            gang[0].commit(*range(1, step + 1), keep=False)  # snapshots hold rows that may not have been reported
        while step < last:
            await asyncio.sleep(STEP_SECONDS)
            running = self._running(gang, generation)
            if any(agent.hung == generation for agent in running):
                self._stand_still(gang, running, step)
                continue
            if len(running) < len(gang):
                await asyncio.sleep(PEER_LOST_SECONDS)
                for agent in self._running(gang, generation):
                    agent.rest_by_itself(step)
                return
            step += 1
            self._commit(job, generation, gang, step)
            if step < last and any(generation in agent.asked_to_save for agent in gang.values()):
                for agent in gang.values():
                    agent.save_and_exit()
                return
        for agent in gang.values():
            agent.finish(last)

    def _running(self, gang: dict[int, SimulatedAgent], generation: int) -> list[SimulatedAgent]:
        return [agent for agent in gang.values() if agent.running and not agent.lost and agent.generation == generation]

    def _stand_still(self, gang: dict[int, SimulatedAgent], running: list[SimulatedAgent], step: int) -> None:
        """One rank hangs and all others wait for it: their agents say that each is overdue."""
        for agent in running:
            status = TrainerStatus(agent._pid, overdue=True, stopped=agent.hung is not None)
            agent.status = status
            agent.say(status)

    def _commit(self, job: str, generation: int, gang: dict[int, SimulatedAgent], step: int) -> None:
        for other, members in self._gangs.items():
            if other[0] == job and other != (job, generation) and self._running(members, other[1]):
                self.problems.append(f"{job}: generations {other[1]} and {generation} train at the same time")
        self.committed[job].append((generation, step))
        for rank in sorted(gang, reverse=True):
            gang[rank].status = None
            if rank:
                gang[rank].steps = [*gang[rank].steps, step][-2:]
            else:
                gang[rank].commit(step)
