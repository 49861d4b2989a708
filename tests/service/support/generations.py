"""A running generation over agents that only say what a test lets them say."""

import asyncio

from manta.service.job.generation import RunningGeneration
from manta.workers.protocol.reports import Exited, Failure, TrainerStatus
from tests.service.support.fake_agents import FakeAgent
from tests.service.support.waiting import SECONDS


def agent_of(rank):
    """An agent whose trainer runs in generation 1."""
    agent = FakeAgent(rank)
    agent.generation, agent.running = 1, True
    return agent


def run(body, ranks=2, gone=()):
    """Run `body(running, agents, handled)` on a generation of so many ranks, without agents for those that are `gone`;
    `handled`: rank and kind of each report."""

    async def bounded():
        async with asyncio.timeout(SECONDS):
            agents = [None if rank in gone else agent_of(rank) for rank in range(ranks)]
            handled = []

            async def handle(report):
                handled.append((report.rank, report.kind))

            running = RunningGeneration(agents, 1, {}, handle)
            try:
                await body(running, agents, handled)
            finally:
                await running.close()

    asyncio.run(bounded())


def failed(kind, at=0.0):
    """What an agent says of a trainer that failed."""
    return Exited(code=75 if kind == "peer_lost" else 1, failure=Failure(kind, 3, "E", "m", "t", at))


def stalled(overdue, standing_seconds):
    """What an agent says of a trainer that is not finished with something in time, or does not move."""
    return TrainerStatus(7, overdue=overdue, standing_seconds=standing_seconds)
