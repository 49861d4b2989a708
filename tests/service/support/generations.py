"""Agents of a running generation that only say what a test lets them say."""

from manta.workers.protocol.reports import Exited, Failure, TrainerStatus
from tests.service.support.fake_agents import FakeAgent


def agent_of(rank):
    """An agent whose trainer runs in generation 1."""
    agent = FakeAgent(rank)
    agent.generation, agent.running = 1, True
    return agent


def failed(kind, at=0.0):
    """What an agent says of a trainer that failed."""
    return Exited(code=75 if kind == "peer_lost" else 1, failure=Failure(kind, 3, "E", "m", "t", at))


def stalled(overdue, standing_seconds):
    """What an agent says of a trainer that is not finished with something in time, or does not move."""
    return TrainerStatus(7, overdue=overdue, standing_seconds=standing_seconds)
