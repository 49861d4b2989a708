"""What the planner expects of a step: its parts, and its timeline in the form of a trace. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.planner.budget import step_shares
from service.planner.explain import MAX_PASSES
from service.planner.hardware import Cluster, UnknownMachine
from service.planner.mixed_step import step_model
from service.planner.pipeline import PASS_NAMES, Bar
from service.planner.search import plan_of
from service.planner.step_time import StepModel, StepTime
from service.step_traces.budget import Part, of_plan
from workers.comm.grid import Coordinates, RankGrid
from workers.config import JobSpec
from workers.step_traces.document import slice_document
from workers.timing.recording import Slice, SliceKind


@dataclass(frozen=True)
class PlannedStep:
    """One step of a job as planned."""

    seconds: float
    parts: tuple[Part, ...]
    bubble_ratio: float
    ranks: list[dict[str, Any]] | None
    """For each stage of one replica a rank with its slices, as in a trace; None if they are too many."""

    def to_json(self) -> dict[str, Any]:
        """In the form of `api.schemas.traces.PlannedTrace`."""
        return {"step_seconds": self.seconds, "bubble": {"mean": self.bubble_ratio}, "ranks": self.ranks}


def planned_step(spec: JobSpec, cluster: Cluster) -> PlannedStep | None:
    """A step of `spec`, which has a layout, on `cluster`; None if the planner cannot plan it."""
    if not spec.model.is_counted or spec.layout.world_size > sum(part.gpus for part in cluster.parts):
        return None
    try:
        model = step_model(spec, cluster)
    except UnknownMachine:
        return None
    plan = plan_of(spec, cluster, time=model.time())
    time, parts = plan.time, of_plan(step_shares(model, plan.time, plan.peak_flops))
    return PlannedStep(time.seconds, parts, time.bubble_ratio, _ranks(spec, model, time))


def _ranks(spec: JobSpec, model: StepModel, time: StepTime) -> list[dict[str, Any]] | None:
    layout = spec.layout
    passes = (3 if layout.schedule.startswith("zb") else 2) * layout.pipeline * layout.virtual_stages
    if passes * spec.micro_batches > MAX_PASSES:
        return None
    bars: dict[int, list[Bar]] = {stage: [] for stage in range(layout.pipeline)}
    for bar in model.pipeline().bars(spec.micro_batches):
        bars[bar.rank].append(bar)
    return [_rank(RankGrid(layout), stage, bars[stage], time) for stage in range(layout.pipeline)]


def _rank(grid: RankGrid, stage: int, bars: list[Bar], time: StepTime) -> dict[str, Any]:
    slices = [Slice(_kind(bar), bar.begin, bar.end, 1, bar.stage, bar.micro_batch) for bar in bars]
    reduced = time.pipeline + time.gradients + time.tied
    updated = reduced + time.optimizer
    tail: list[tuple[SliceKind, float, float]] = [
        ("reduction", time.pipeline, reduced),
        ("optimizer", reduced, updated),
    ]
    slices += [Slice(kind, start, end, 1) for kind, start, end in tail if end > start]
    return {
        "rank": grid.rank(Coordinates(0, stage, 0, 0)),
        "tensor": 0,
        "pipeline": stage,
        "data": 0,
        "context": 0,
        "node": None,
        "steps": [{"step": 1, "start": 0.0, "end": time.seconds}],
        "slices": [slice_document(each) for each in slices],
    }


def _kind(bar: Bar) -> SliceKind:
    kinds: dict[str, SliceKind] = {
        "forward": "forward",
        "backward": "backward",
        "backward_input": "backward_input",
        "backward_weight": "backward_weight",
    }
    return kinds[PASS_NAMES[bar.kind]]
