"""A trace as the JSON document that people and browsers read; docs/tracing.md describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manta.workers.step_traces.analysis import bubble, critical_path
from manta.workers.step_traces.assembly import StepTrace, TracedRank
from manta.workers.timing.recording import Slice

_WORDS = {
    "loader": "loader",
    "backward_input": "backward (inputs)",
    "backward_weight": "backward (weights)",
    "gather": "parameter gather",
}
"""Names of kinds that differ from the kind itself."""


def name_of(each: Slice) -> str:
    """What a slice is, in a few words."""
    match each.kind:
        case "collective":
            return f"{each.operation or 'collective'} ({each.axis})"
        case "send":
            return f"send to rank {each.peer}"
        case "receive":
            return f"receive from rank {each.peer}"
    word = _WORDS.get(each.kind, each.kind)
    return word if each.micro_batch is None else f"{word} {each.micro_batch}"


def slice_document(each: Slice) -> dict[str, Any]:
    """One slice."""
    return {
        "kind": each.kind,
        "name": name_of(each),
        "start": round(each.start, 7),
        "end": round(each.end, 7),
        "step": each.step,
        "stage": each.stage,
        "micro_batch": each.micro_batch,
        "bytes": each.bytes,
        "axis": each.axis,
        "wait": None if each.wait is None else round(each.wait, 7),
    }


def rank_documents(trace: StepTrace, nodes: Mapping[int, str | None]) -> list[dict[str, Any]]:
    """The ranks, with everything that each did. `nodes`: the node of each rank."""
    return [_rank_document(trace, rank, nodes.get(rank.rank)) for rank in trace.ranks]


def _rank_document(trace: StepTrace, rank: TracedRank, node: str | None) -> dict[str, Any]:
    at = trace.grid.coordinates(rank.rank)
    return {
        "rank": rank.rank,
        "tensor": at.tensor,
        "pipeline": at.pipeline,
        "data": at.data,
        "context": at.context,
        "node": node,
        "steps": [{"step": step.step, "start": round(step.start, 7), "end": round(step.end, 7)} for step in rank.steps],
        "slices": [slice_document(each) for each in rank.slices],
    }


def analysis_document(trace: StepTrace) -> dict[str, Any]:
    """Results computed from the slices."""
    bubbles = {each.rank: bubble(trace, each) for each in trace.ranks if each.steps}
    return {
        "clock": {"error_seconds": trace.error_seconds, "device": trace.device},
        "bubble": {
            "mean": sum(bubbles.values()) / len(bubbles) if bubbles else None,
            "ranks": [{"rank": rank, "fraction": fraction} for rank, fraction in bubbles.items()],
        },
        "critical_path": [list(place) for place in critical_path(trace)],
    }
