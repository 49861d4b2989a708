"""Rules about the division of a model into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from manta.workers.config import JobSpec
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.stages import even_counts
from manta.workers.spec.problems import Problem


def _schedule_fits_virtual_stages(spec: JobSpec) -> Iterator[Problem]:
    name, count = spec.layout.schedule, spec.layout.virtual_stages
    expected = SCHEDULES[name].virtual_stages
    if expected is None or count == expected:
        return
    if expected > 1:
        yield Problem("parallel.virtual_stages", f"{name} has {expected} virtual stages, not {count}", str(expected))
    else:
        flexible = next(other for other, schedule in SCHEDULES.items() if schedule.virtual_stages is None)
        rule = f"{name} has one virtual stage, not {count}; {flexible} takes any number"
        yield Problem("parallel.schedule", rule, flexible)


def _pipeline_has_layers(spec: JobSpec) -> Iterator[Problem]:
    layout, layers = spec.layout, spec.model.layers
    turns_back = SCHEDULES[layout.schedule].turns_back
    virtual_stages = 2 if turns_back else layout.virtual_stages
    if layers < layout.pipeline * virtual_stages:
        if virtual_stages > layers or turns_back or layout.pipeline == 1:
            yield Problem(
                "model.layers",
                f"layers ({layers}) must be at least parallel.pipeline x virtual_stages "
                f"({layout.pipeline} x {virtual_stages})",
                str(layout.pipeline * virtual_stages),
            )
        else:
            yield Problem(
                "parallel.pipeline",
                f"pipeline ({layout.pipeline}) x virtual_stages ({virtual_stages}) must be at most model.layers "
                f"({layers})",
                str(layers // virtual_stages),
            )


def _every_stage_has_accelerators(spec: JobSpec) -> Iterator[Problem]:
    layout = spec.layout
    types = layout.stage_accelerators
    if types is not None and spec.resources.accelerator == "cpu":
        rule = "sets the GPU types of stages, but resources.accelerator is cpu"
        yield Problem("parallel.stage_accelerators", rule, "null")
    elif types is not None and len(types) != layout.pipeline:
        rule = f"has types for {len(types)} stages, but parallel.pipeline is {layout.pipeline}: give one for each stage"
        repeated = (types or ("A100",)) * layout.pipeline
        yield Problem("parallel.stage_accelerators", rule, f"[{', '.join(repeated[: layout.pipeline])}]")


def _stages_have_all_layers(spec: JobSpec) -> Iterator[Problem]:
    """Checks stage_layers; whether there are enough layers for all stages is checked by another rule."""
    layout, layers, counts = spec.layout, spec.model.layers, spec.layout.stage_layers
    stages = layout.pipeline * layout.virtual_stages
    if counts is None or layers < stages:
        return
    even = str(list(even_counts(layers, stages)))
    if len(counts) != stages:
        yield Problem(
            "parallel.stage_layers",
            f"{len(counts)} numbers of layers for {stages} virtual stages: there must be one for each "
            f"(parallel.pipeline {layout.pipeline} x virtual_stages {layout.virtual_stages})",
            even,
        )
    elif sum(counts) != layers:
        yield Problem("parallel.stage_layers", f"{sum(counts)} layers in total, not model.layers ({layers})", even)


PIPELINE_RULES = (
    _schedule_fits_virtual_stages,
    _pipeline_has_layers,
    _stages_have_all_layers,
    _every_stage_has_accelerators,
)
