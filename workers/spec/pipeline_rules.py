"""Rules about the division of a model into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from manta.workers.config import JobSpec
from manta.workers.parallel.pipeline.stages import even_counts
from manta.workers.spec.problems import Problem


def _schedule_fits_virtual_stages(spec: JobSpec) -> Iterator[Problem]:
    layout = spec.layout
    if layout.schedule == "zb-v" and layout.virtual_stages != 2:
        yield Problem("parallel.virtual_stages", f"zb-v has 2 virtual stages, not {layout.virtual_stages}", "2")
    elif layout.schedule in ("gpipe", "1f1b", "zb-h1") and layout.virtual_stages != 1:
        yield Problem(
            "parallel.schedule",
            f"{layout.schedule} has one virtual stage, not {layout.virtual_stages}; interleaved takes any number",
            "interleaved",
        )


def _pipeline_has_layers(spec: JobSpec) -> Iterator[Problem]:
    layout, layers = spec.layout, spec.model.layers
    virtual_stages = 2 if layout.schedule == "zb-v" else layout.virtual_stages
    if layers < layout.pipeline * virtual_stages:
        if virtual_stages > layers or layout.schedule == "zb-v" or layout.pipeline == 1:
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
