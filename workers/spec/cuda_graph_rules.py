"""Requirements of `train.cuda_graphs` on a JobSpec: a replay repeats kernels and addresses, so nothing else may differ
between micro-batches, and no communication may lie in one. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator

from workers.config import JobSpec
from workers.spec.problems import Problem


def cuda_graphs_fit(spec: JobSpec) -> Iterator[Problem]:
    """The rule, as in `rules.py`: the first reason why micro-batches cannot be replayed."""
    if not spec.train.cuda_graphs:
        return
    reason = next(_reasons(spec), None)
    rule = _too_few(spec) if reason is None else f"not supported with {reason}"
    if rule is not None:
        yield Problem("train.cuda_graphs", rule, "false")


def _reasons(spec: JobSpec) -> Iterator[str]:
    layout, train = spec.layout, spec.train
    if spec.resources.accelerator == "cpu":
        yield "resources.accelerator cpu: CUDA graphs are for GPUs"
    for axis in ("tensor", "pipeline"):
        size = getattr(layout, axis)
        if size > 1:
            yield f"parallel.{axis} {size}: ranks would communicate within a micro-batch"
    if layout.schedule != "1f1b":
        yield f"parallel.schedule {layout.schedule}: a micro-batch's backward must follow its forward, as with 1f1b"
    if layout.offload_layers:
        yield "parallel.offload_layers: copies of activations do not begin and end within a micro-batch"
    if train.fp8 != "off":
        yield f"train.fp8 {train.fp8}: weights in 8 bits are in other memory in each step"
    if spec.data.documents == "apart":
        yield "data.documents apart: where documents end differs between micro-batches"
    if spec.model.family == "custom":
        yield "custom models: what their Python code does would not be repeated"


def _too_few(spec: JobSpec) -> str | None:
    """Of the micro-batches of a step the first is not replayed, nor the last where its backward starts sums over
    replicas."""
    sums_overlap = spec.layout.data > 1 and spec.train.deterministic == "layout"
    if spec.micro_batches > (2 if sums_overlap else 1):
        return None
    which = "the first and the last one of a step are" if sums_overlap else "the first one of a step is"
    return (
        f"no micro-batch would be replayed: a replica has {spec.micro_batches} per step, and {which} computed without "
        "a graph; train.micro_batch_size may be smaller"
    )
