"""The bubble: where a rank neither computes nor communicates because of the pipeline.

It waits for messages of its neighbours, and after its last pass, in whatever comes next, for the passes of its
replica's other stages. If a backend does not distinguish waiting from transferring, all of a communication counts as
waiting.
"""

from __future__ import annotations

from collections.abc import Iterator

from workers.step_traces.assembly import StepTrace, TracedRank
from workers.timing.recording import Slice


def idle_slices(trace: StepTrace, rank: TracedRank) -> Iterator[tuple[Slice, float]]:
    """The communications in which `rank` waits because of the pipeline, and for how many seconds each."""
    if trace.grid.pipeline == 1:
        return
    for slices, own, whole in zip(rank.by_step, rank.pass_ends, trace.replica_pass_ends(rank.rank), strict=False):
        for each in slices:
            waited = each.end - each.start if each.wait is None else each.wait
            if each.kind == "receive":
                yield each, waited
            elif each.kind == "collective" and each.start >= own:
                yield each, max(0.0, min(each.start + waited, whole) - each.start)


def bubble(trace: StepTrace, rank: TracedRank) -> float:
    """Fraction of its steps that `rank` waits because of the pipeline."""
    return sum(seconds for _, seconds in idle_slices(trace, rank)) / rank.seconds if rank.steps else 0.0
