"""The state of ranks that move to other nodes: brought from the agents that they leave to those that they go to."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

Handle = Any
"""A Ray actor handle of an agent."""


async def hand_over(moves: Mapping[int, tuple[Handle, Handle]], generation: int, layout: str) -> None:
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


async def _hand_over(rank: int, old: Handle, new: Handle, token: str, generation: int, layout: str) -> None:
    held, there = await asyncio.gather(old.snapshot_steps.remote(layout), new.snapshot_steps.remote(layout))
    if held and (not there or max(held) > max(there)):
        place = await old.receive_replicas.remote(token, generation)
        await new.fetch_snapshot.remote(rank, place, token, generation, layout)
