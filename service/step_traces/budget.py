"""How the time of a step was spent: measured, beginning with a device's peak. Pure Python.

The parts are those of a planned step (`service/planner/budget.py`) as far as measurements can distinguish them; each is
a mean over the ranks, and their sum is the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manta.service.planner.budget import Share
from manta.workers.accounting.flops import step_flops
from manta.workers.config import JobSpec
from manta.workers.data.batch_plan import BatchPlan
from manta.workers.step_traces.analysis import idle_slices, own_seconds
from manta.workers.step_traces.assembly import PASSES, StepTrace, TracedRank
from manta.workers.timing.recording import Slice

PARTS = (
    *("arithmetic", "products", "recomputation", "bubble", "tensor", "pipeline", "data"),
    *("optimizer", "loader", "snapshot", "rest"),
)
"""All parts, beginning with the peak."""
_HELP = {
    "products": "larger matmuls (a larger micro-batch, a smaller tensor size), or train.compile: true",
    "recomputation": "less recomputation, where memory allows: a smaller micro-batch, or more stages",
    "bubble": "more micro-batches, more virtual stages, or a zero-bubble schedule",
    "tensor": "a smaller tensor size with more pipeline stages",
    "pipeline": "fewer stages, or stages that share a node",
    "data": "fewer replicas, a larger global batch, or replacing slow ranks",
    "optimizer": "a larger global batch, so that there are fewer updates, or parallel.zero: 1",
    "loader": "tokenizing beforehand (manta tokenize), or faster storage for them",
    "snapshot": "fewer snapshots and checkpoints: checkpoint.snapshot_every_steps, checkpoint.every_steps",
}
_PLANNED = {
    "arithmetic": "arithmetic",
    **dict.fromkeys(("products", "elementwise", "host"), "products"),
    "recomputation": "recomputation",
    "tensor": "tensor",
    "bubble": "bubble",
    **dict.fromkeys(("gradients", "replicas"), "data"),
    "optimizer": "optimizer",
}
"""The part that a share of a planned step belongs to."""
_MEASURED = {
    "forward": "passes",
    "backward": "passes",
    "recompute": "recomputation",
    "tensor_communication": "tensor",
    "pipeline_communication": "pipeline",
    "data_communication": "data",
    "bubble": "bubble",
    "optimizer": "optimizer",
    "data": "loader",
    "other": "rest",
}
"""The part that a phase measured by workers/timing/step_phases.py belongs to."""


@dataclass(frozen=True)
class Part:
    """One part of a step."""

    name: str
    seconds: float
    how: str
    """How it was measured, as a sentence."""
    help: str
    """What would make it smaller; empty if nothing does."""


def of_trace(trace: StepTrace, spec: JobSpec) -> tuple[Part, ...]:
    """The budget of the traced steps. `spec`: in the layout of the trace. Empty if no step was recorded."""
    ranks = [rank for rank in trace.ranks if rank.steps]
    steps = sum(len(rank.steps) for rank in ranks)
    if not steps:
        return ()
    sums: defaultdict[str, float] = defaultdict(float)
    for rank in ranks:
        for name, value in _of_rank(trace, rank).items():
            sums[name] += value
    whole = sum(rank.seconds for rank in ranks) / steps
    peaks = [rank.peak_flops for rank in ranks if rank.peak_flops]
    peak = sum(peaks) / len(peaks) if peaks else None
    sizes = BatchPlan(spec.train)
    sequences = [sizes.size(step.step) for step in ranks[0].steps]
    ideal = _ideal_seconds(spec, sum(sequences) / len(sequences), peak)
    how = {
        "products": "passes without communication and recomputation, beyond the arithmetic at the peak",
        "recomputation": "work of the forward pass that is done again within backward",
        "bubble": "waits for other stages: for their messages, and after the last pass",
        "tensor": "communication along the tensor axis, waits for its other ranks included",
        "pipeline": "messages between stages, from when they moved",
        "data": "gradient reductions, gathering of parameters and agreement, with waits for slower replicas",
        "optimizer": "the update and what is around it",
        "loader": "waits for the step's samples",
        "snapshot": "what snapshots and checkpoints held the training up for",
        "rest": "validation, and what lies between the slices",
    }
    clock = "by the devices' events" if trace.device else "by the hosts' clocks"
    seconds = {name: value / steps for name, value in sums.items()}
    return _parts(seconds, whole, ideal, {name: f"{what}, {clock}" for name, what in how.items()})


def _of_rank(trace: StepTrace, rank: TracedRank) -> defaultdict[str, float]:
    """Seconds of all of its steps by part, with `passes` for arithmetic and products together."""
    sums: defaultdict[str, float] = defaultdict(float)
    for each, around, seconds in own_seconds(rank.slices):
        sums[_part_of(each, around)] += seconds
    for each, seconds in idle_slices(trace, rank):
        sums[_part_of(each, ())] -= seconds
        sums["bubble"] += seconds
    return sums


def _part_of(each: Slice, around: Sequence[Slice]) -> str:
    if any(outer.kind == "validation" for outer in (*around, each)):
        return "rest"
    if each.kind in PASSES:
        return "passes"
    if each.kind == "collective":
        return "tensor" if each.axis == "tensor" else "data"
    return {
        "recompute": "recomputation",
        **dict.fromkeys(("send", "receive"), "pipeline"),
        **dict.fromkeys(("reduction", "gather"), "data"),
        **dict.fromkeys(("agreement", "optimizer"), "optimizer"),
        "loader": "loader",
        **dict.fromkeys(("snapshot", "checkpoint"), "snapshot"),
    }[each.kind]


def _ideal_seconds(spec: JobSpec, sequences: float, peak_flops: float | None) -> float | None:
    """How long the model's FLOPs of a step take at the peak rate of all ranks; None if that is not known."""
    if peak_flops is None or not spec.model.is_counted:
        return None
    flops = step_flops(spec, round(sequences))
    counted = flops.model_full if spec.attention_is_explicit else flops.model_causal
    return counted / (peak_flops * spec.layout.world_size)


def _parts(seconds: Mapping[str, float], whole: float, ideal: float | None, how: Mapping[str, str]) -> tuple[Part, ...]:
    """All parts of a step of `whole` seconds."""
    passes = seconds.get("passes", 0.0)
    by_name = {name: seconds.get(name, 0.0) for name in PARTS}
    by_name["arithmetic"] = passes if ideal is None else ideal
    by_name["products"] = passes - by_name["arithmetic"]
    by_name["rest"] = whole - sum(value for name, value in by_name.items() if name != "rest")
    unknown = "all passes: the model's FLOPs or the device's peak are not known"
    said = {**how, "arithmetic": unknown if ideal is None else "the model's FLOPs at the peak of all ranks' devices"}
    return tuple(Part(name, by_name[name], said.get(name, ""), _HELP.get(name, "")) for name in PARTS)


def of_phases(rows: Sequence[Mapping[str, Any]], spec: JobSpec) -> tuple[Part, ...]:
    """The mean budget of the steps whose rows of metrics have a division into phases (`train.time_parts_every`). Empty
    if none has."""
    measured = [row for row in rows if row.get("forward_seconds") is not None and row.get("step_seconds")]
    if not measured:
        return ()
    sums: defaultdict[str, float] = defaultdict(float)
    for row in measured:
        for phase, part in _MEASURED.items():
            sums[part] += row.get(f"{phase}_seconds") or 0.0
    seconds = {name: value / len(measured) for name, value in sums.items()}
    stalls = sum(row.get("snapshot_seconds") or 0.0 for row in measured) / len(measured)
    # The delay by a snapshot is not a phase of its own, and is contained in what no phase names.
    seconds["snapshot"] = min(stalls, max(0.0, seconds.get("rest", 0.0)))
    whole = sum(row["step_seconds"] for row in measured) / len(measured)
    mfu = [row.get("mfu_full" if spec.attention_is_explicit else "mfu_causal") for row in measured]
    known = [value * row["step_seconds"] for value, row in zip(mfu, measured, strict=True) if value is not None]
    ideal = sum(known) / len(known) if known else None
    how = dict.fromkeys(PARTS, f"mean over the ranks, and over {len(measured)} steps that were measured")
    return _parts(seconds, whole, ideal, how)


def of_ledger(step_seconds: float, waits: Mapping[str, float], mfu: float | None) -> tuple[Part, ...]:
    """The budget of a step of which only its MFU and its waits (`data_wait`, `snapshot`, in seconds) are known."""
    known = {
        "loader": waits.get("data_wait", 0.0),
        "snapshot": waits.get("snapshot", 0.0),
        "passes": 0.0 if mfu is None else mfu * step_seconds,
    }
    how = {
        "loader": "waits for samples, mean of the generation's steps",
        "snapshot": "stalls by snapshots and checkpoints, mean of the generation's steps",
        "rest": "all that is not distinguished: a trace does that, and train.time_parts_every",
    }
    return _parts(known, step_seconds, None if mfu is None else mfu * step_seconds, how)


def of_plan(shares: Sequence[Share]) -> tuple[Part, ...]:
    """All parts of a planned step, from its shares."""
    sums: defaultdict[str, float] = defaultdict(float)
    said: dict[str, list[str]] = {}
    for share in shares:
        name = _PLANNED.get(share.name, "rest")
        sums[name] += share.seconds
        said.setdefault(name, []).append(share.what)
    return tuple(
        Part(name, sums[name], "planned: " + "; ".join(said[name]) if name in said else "not planned", "")
        for name in PARTS
    )


def to_json(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """In the form of `manta.api.schemas.traces.BudgetPart`."""
    whole = sum(part.seconds for part in parts) or 1.0
    return [
        {
            "name": part.name,
            "seconds": part.seconds,
            "fraction": part.seconds / whole,
            "how": part.how,
            "help": part.help,
        }
        for part in parts
    ]
