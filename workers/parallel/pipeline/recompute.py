"""Which micro-batches are recomputed: as many as memory asks for (arXiv:2205.05198, appendix C). Pure Python."""

from __future__ import annotations

from workers.config import ParallelConfig
from workers.parallel.pipeline.schedules.action import Action


def recomputed(actions: list[Action], layout: ParallelConfig) -> frozenset[tuple[int, int]]:
    """(micro-batch, chunk) pairs of one rank's `actions` whose activations are dropped in forward and recomputed.

    A rank keeps everything of at most `layout.recompute_keep` micro-batches at any time (each has as many pairs as
    the rank has chunks): a pair whose forward finds that many kept is recomputed, so the kept ones move through the
    step like a window.
    """
    if layout.recompute == "none":
        return frozenset()
    room = layout.recompute_keep * layout.virtual_stages
    kept: set[tuple[int, int]] = set()
    dropped: set[tuple[int, int]] = set()
    for action in actions:
        pair = (action.micro_batch, action.chunk)
        if action.kind == "forward":
            (kept if len(kept) < room else dropped).add(pair)
        elif action.kind in ("backward", "backward_weight"):
            kept.discard(pair)
    return frozenset(dropped)
