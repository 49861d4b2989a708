"""Snapshots in transfer between the nodes of two agents, and the state of ranks that move to other nodes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping

from service.cluster.agent_client import AgentClient, AgentError
from workers.protocol.messages import Endpoint

log = logging.getLogger(__name__)


async def address_of(holder: AgentClient, token: str, generation: int) -> Endpoint:
    """Where `holder` hands out snapshots. Raises AgentError, also if it has no shared memory."""
    address = await holder.receive_backups(token, generation)
    if address is None:
        raise AgentError("the agent was started without a folder in shared memory")
    return address


async def hand_over(moves: Mapping[int, tuple[AgentClient, AgentClient]], generation: int, layout: str) -> None:
    """For each rank its old and its new agent: bring the rank's snapshots to where the new one is, unless it has them
    there already, as nodes that share a machine do. What fails is logged: an older state may still do."""
    token = secrets.token_hex()
    done = await asyncio.gather(
        *(_hand_over(rank, old, new, token, generation, layout) for rank, (old, new) in moves.items()),
        return_exceptions=True,
    )
    for rank, result in zip(moves, done, strict=True):
        if isinstance(result, BaseException):
            log.warning("the snapshots of rank %d could not be moved: %s", rank, result)


async def _hand_over(rank: int, old: AgentClient, new: AgentClient, token: str, generation: int, layout: str) -> None:
    held, there = await asyncio.gather(old.snapshot_steps(layout), new.snapshot_steps(layout))
    if held and (not there or max(held) > max(there)):
        address = await address_of(old, token, generation)
        await new.fetch_snapshot(rank, address, token, generation, layout)
