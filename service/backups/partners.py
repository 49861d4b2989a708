"""Which rank holds the backup of which, and which state remains when a node is lost. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


def partners(node_of_rank: Sequence[str]) -> dict[int, int]:
    """For each rank the rank on another node that holds its backup; empty if all ranks share one node.

    No rank holds more backups than necessary: one, unless a node has more ranks than all others together.
    """
    groups: dict[str, list[int]] = {}
    for rank, node in enumerate(node_of_rank):
        groups.setdefault(node, []).append(rank)
    if len(groups) < 2:
        return {}
    nodes = sorted(groups, key=lambda node: (-len(groups[node]), node))
    largest, everyone = len(groups[nodes[0]]), [rank for node in nodes for rank in groups[node]]
    if 2 * largest <= len(everyone):
        # Ranks of one node are consecutive: this many places further another node begins.
        return {rank: everyone[(at + largest) % len(everyone)] for at, rank in enumerate(everyone)}
    crowd, others = everyone[:largest], everyone[largest:]
    return {rank: others[at % len(others)] for at, rank in enumerate(crowd)} | dict(zip(others, crowd, strict=False))


@dataclass(frozen=True)
class Reachable:
    """The newest step that all ranks can resume from, using memory only."""

    step: int
    fetched: tuple[int, ...]
    """Ranks that need their backup for it; the others have it themselves."""


def reachable(own: Sequence[Iterable[int]], backups: Mapping[int, Iterable[int]]) -> Reachable | None:
    """`own`: for each rank the steps in its own shared memory, none for a rank that lost it; `backups`: by rank the
    steps that its partner holds. None if there is no step that every rank can reach."""
    mine = [set(steps) for steps in own]
    held = [set(backups.get(rank, ())) for rank in range(len(mine))]
    common = set.intersection(*(a | b for a, b in zip(mine, held, strict=True))) if mine else set()
    if not common:
        return None
    step = max(common)
    return Reachable(step, tuple(rank for rank, steps in enumerate(mine) if step not in steps))
