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
from manta.service.planner.part_labels import PART_LABELS
from manta.workers.accounting.flops import step_flops
from manta.workers.config import JobSpec
from manta.workers.data.batch_plan import BatchPlan
from manta.workers.step_traces.analysis import idle_slices, own_seconds
from manta.workers.step_traces.assembly import PASSES, StepTrace, TracedRank
from manta.workers.timing.recording import Slice
from manta.workers.training.metric_names import VALIDATION_LOSS

PARTS = (
    *("arithmetic", "products", "recomputation", "bubble", "tensor", "context", "expert", "pipeline", "data"),
    *("optimizer", "loader", "snapshot", "rest"),
)
"""All parts, beginning with the peak; `context` and `expert` only of jobs with such parallelism."""
_HELP = {
    "products": "larger matmuls (a larger micro-batch, a smaller tensor size), or `train.compile: true`",
    "recomputation": "less recomputation, where memory allows: a smaller micro-batch, or more stages",
    "bubble": "more micro-batches, more virtual stages, or a zero-bubble schedule",
    "tensor": "a smaller tensor size with more pipeline stages",
    "context": "a smaller context size with more replicas, or another `parallel.context_method`",
    "expert": "a smaller expert size, or the other `parallel.expert_dispatch`",
    "pipeline": "fewer stages, or stages that share a node",
    "data": "fewer replicas, a larger global batch, or replacing slow ranks",
    "rest": "fewer validations (`train.validate_every`), if the measured steps include one",
    "optimizer": "a larger global batch, so that there are fewer updates, or `parallel.zero: 1`",
    "loader": "tokenizing beforehand (`manta tokenize`), or faster storage",
    "snapshot": "fewer snapshots and checkpoints (`checkpoint.snapshot_every_steps`, `checkpoint.every_steps`)",
}
ONLY_SOME_HAVE = ("context", "expert")
"""Parts of jobs whose ranks share samples, or have different experts."""
_PLANNED = {
    "arithmetic": "arithmetic",
    **dict.fromkeys(("products", "elementwise", "host"), "products"),
    "recomputation": "recomputation",
    "tensor": "tensor",
    "context": "context",
    "expert": "expert",
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
    "context_communication": "context",
    **dict.fromkeys(("dispatch", "combine"), "expert"),
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
        "products": "forward and backward passes without communication and recompute, beyond ideal compute",
        "recomputation": "forward work repeated during backward",
        "bubble": "waits for messages of other stages, and after the last pass",
        "tensor": "communication of tensor-parallel ranks, including waits for each other",
        "context": "exchange of keys and values between context ranks, including waits for each other",
        "expert": "dispatch of tokens to the ranks of their experts and back, including waits for each other",
        "pipeline": "transfers between stages",
        "data": "gradient reductions, parameter gathers and agreement, including waits for slower replicas",
        "optimizer": "the update of the parameters",
        "loader": "waits for samples",
        "snapshot": "time that snapshots and checkpoints delayed training",
        "rest": "validation, and time outside of the traced actions",
    }
    clock = "timed on the devices" if trace.device else "timed on the hosts"
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
        return {"tensor": "tensor", "context": "context", "expert": "expert"}.get(each.axis or "", "data")
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
    unknown = "forward and backward passes; the model's FLOPs or the device's peak rate are unknown"
    said = {
        **how,
        "arithmetic": unknown if ideal is None else "the model's FLOPs at the peak rate of all ranks' devices",
    }
    return tuple(Part(name, by_name[name], said.get(name, ""), _HELP.get(name, "")) for name in _parts_of(by_name))


def _parts_of(seconds: Mapping[str, float]) -> tuple[str, ...]:
    """The parts of a step, of which these are known."""
    return tuple(name for name in PARTS if name not in ONLY_SOME_HAVE or seconds.get(name))


def of_phases(rows: Sequence[Mapping[str, Any]], spec: JobSpec) -> tuple[Part, ...]:
    """The mean budget of the steps whose rows of metrics have a division into phases (`train.time_parts_every`). Empty
    if none has. Those that validated too are used only if there are no others."""
    measured = [row for row in rows if row.get("forward_seconds") is not None and row.get("step_seconds")]
    if not measured:
        return ()
    measured = [row for row in measured if not any(name.startswith(VALIDATION_LOSS) for name in row)] or measured
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
    how = dict.fromkeys(PARTS, f"mean over the ranks and over {len(measured)} measured steps")
    return _parts(seconds, whole, ideal, how)


def of_ledger(step_seconds: float, waits: Mapping[str, float], mfu: float | None) -> tuple[Part, ...]:
    """The budget of a step of which only its MFU and its waits (`data_wait`, `snapshot`, in seconds) are known."""
    known = {
        "loader": waits.get("data_wait", 0.0),
        "snapshot": waits.get("snapshot", 0.0),
        "passes": 0.0 if mfu is None else mfu * step_seconds,
    }
    how = {
        "loader": "waits for samples, mean over the generation's steps",
        "snapshot": "stalls by snapshots and checkpoints, mean over the generation's steps",
        "rest": "everything else; `manta trace` and `train.time_parts_every` divide it",
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
        for name in _parts_of(sums)
    )


def to_json(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """In the form of `manta.api.schemas.traces.BudgetPart`."""
    whole = sum(part.seconds for part in parts) or 1.0
    return [
        {
            "name": part.name,
            "label": PART_LABELS[part.name],
            "seconds": part.seconds,
            "fraction": part.seconds / whole,
            "how": part.how,
            "help": part.help,
        }
        for part in parts
    ]
