"""Explains a plan: its step starting from the device's peak rate, what single changes would do, the pipeline's timeline
and the memory of each stage. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.cluster.sizes import sizes_of
from service.planner.beside_steps import BesideSteps, beside_steps
from service.planner.budget import Share, sentences, step_shares
from service.planner.hardware import Cluster
from service.planner.long_run import Advice, NeverDone, Run, advise
from service.planner.memory import RankMemory, by_stage
from service.planner.mixed_step import step_model
from service.planner.pipeline import PASS_NAMES, Bar
from service.planner.search import Plan
from service.planner.what_if import WhatIf, what_ifs

MAX_PASSES = 20_000
"""Most passes of a timeline: browsers can draw that many, and an answer can hold them."""
LONG_SECONDS = 86400.0
"""Shortest training that is simulated with failures."""


@dataclass(frozen=True)
class Explanation:
    """Explanation of one plan."""

    shares: tuple[Share, ...]
    """Parts of a step, starting from the device's peak rate."""
    changes: tuple[WhatIf, ...]
    memory: tuple[RankMemory, ...]
    """Memory of one rank of each pipeline stage."""
    usable_bytes: tuple[float, ...]
    """Usable memory of a device in each of these stages."""
    bars: tuple[Bar, ...] | None
    """The passes of one step on each pipeline rank; None if there are too many."""
    beside: BesideSteps
    """What the training does in addition to its steps."""
    run: Advice | NeverDone | None
    """The whole training with failures; None if it takes less than a day or uses no accelerators."""


def explain(plan: Plan, cluster: Cluster) -> Explanation:
    """Explain `plan`, which a search on `cluster` returned."""
    spec, layout, memory = plan.spec, plan.spec.layout, by_stage(plan.spec, cluster)
    model = step_model(spec, cluster)
    passes = (3 if layout.schedule.startswith("zb") else 2) * layout.pipeline * layout.virtual_stages
    beside = beside_steps(model, plan.time)
    few = passes * spec.micro_batches <= MAX_PASSES
    return Explanation(
        shares=step_shares(model, plan.time, plan.peak_flops),
        changes=what_ifs(spec, cluster),
        memory=tuple(needed for needed, _ in memory),
        usable_bytes=tuple(usable for _, usable in memory),
        bars=tuple(model.pipeline().bars(spec.micro_batches)) if few else None,
        beside=beside,
        run=_whole_run(plan, cluster, beside),
    )


def _whole_run(plan: Plan, cluster: Cluster, beside: BesideSteps) -> Advice | NeverDone | None:
    spec, step = plan.spec, plan.time.seconds
    if cluster.machine.core is not None or spec.train.steps * step < LONG_SECONDS:
        return None
    layout = spec.layout
    run = Run(
        layout.world_size,
        cluster.gpus_per_node,
        layout.data,
        step,
        spec.train.steps,
        checkpoint_seconds=step,
        beside_seconds=beside.seconds / spec.train.steps,
        fewest=sizes_of(spec).start,
    )
    try:
        return advise(run)
    except NeverDone as error:
        return error


def _run_to_json(advice: Advice) -> dict[str, Any]:
    outcome, restarted = advice.outcome, advice.restarted
    names = ("redone", "recovering", "checkpoints", "waiting", "slower", "beside_steps")
    return {
        "hours": outcome.seconds / 3600,
        "gpu_hours": outcome.gpu_hours,
        "goodput": outcome.goodput,
        "failures": outcome.failures,
        "lost_hours": {name: getattr(outcome, name) / 3600 for name in names},
        "spare_nodes": advice.spares,
        "checkpoint_seconds": advice.checkpoint_seconds,
        "goodput_with_restarts": restarted.goodput,
        "gpu_hours_with_restarts": restarted.gpu_hours,
    }


def to_json(explanation: Explanation) -> dict[str, Any]:
    """As JSON, in the form of `api.schemas.PlanExplanation`."""
    run, said = explanation.run, [*sentences(explanation.shares), *explanation.beside.sentences()]
    if isinstance(run, NeverDone):
        run, said = None, [*said, f"Of the whole training: {run}."]
    return {
        "sentences": said,
        "shares": [
            {"name": each.name, "seconds": each.seconds, "what": each.what, "help": each.help}
            for each in explanation.shares
        ],
        "changes": [
            {
                "change": each.change,
                "step_seconds": each.seconds,
                "memory_bytes": round(each.memory),
                "fits": each.fits,
            }
            for each in explanation.changes
        ],
        "memory_by_stage": [each.parts() for each in explanation.memory],
        "usable_bytes": round(max(explanation.usable_bytes)),
        "usable_by_stage": [round(each) for each in explanation.usable_bytes],
        "run": None if run is None else _run_to_json(run),
        "timeline": None
        if explanation.bars is None
        else [
            {
                "rank": bar.rank,
                "kind": PASS_NAMES[bar.kind],
                "stage": bar.stage,
                "micro_batch": bar.micro_batch,
                "begin": bar.begin,
                "end": bar.end,
            }
            for bar in explanation.bars
        ],
    }
