"""What a submitted job leaves to the service: its layout, its precision and its micro-batch size, decided once, for the
cluster that it is submitted to, and stored with it. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from manta.service.planner.defaults import with_micro_batch_size, with_precision
from manta.service.planner.hardware import Cluster
from manta.service.planner.job_plan import NotPlanned, refuse_unplannable
from manta.service.planner.memory import RESERVE, Fit, fits, tightest
from manta.service.planner.mixed_search import best_layouts
from manta.service.planner.search import Plan, placement_problem, smallest_cluster
from manta.workers.accounting.flops import adapters_in_words
from manta.workers.config import ElasticConfig, JobSpec
from manta.workers.spec.problems import Problem, SpecError, problems_of
from manta.workers.spec.rules import find_problems

AUTO = "auto"
LAYOUT_KEYS = ("parallel", "elastic")
"""Keys that a layout is decided from; all others are checked before."""


@dataclass(frozen=True)
class Decided:
    """A job with nothing left to decide."""

    spec: JobSpec
    notes: tuple[str, ...] = ()
    """What was decided and why, one sentence each."""


def leaves_layout(document: Any) -> bool:
    """Whether a job's document names no layout, or `parallel: auto`."""
    return isinstance(document, dict) and document.get("parallel", AUTO) == AUTO


def requests_layout(document: Any) -> bool:
    """Whether a job's document says `parallel: auto`."""
    return isinstance(document, dict) and document.get("parallel") == AUTO


def without_layout(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the smallest layout, to check everything else."""
    return {name: value for name, value in document.items() if name not in LAYOUT_KEYS}


def bounds_in(document: dict[str, Any]) -> ElasticConfig:
    """The document's limits for changes of size. Raises SpecError."""
    try:
        return ElasticConfig.model_validate(document.get("elastic", {}))
    except ValidationError as error:
        problems = problems_of(error)
        raise SpecError(
            [replace(problem, path=f"elastic.{problem.path}".rstrip(".")) for problem in problems]
        ) from error


def decide(spec: JobSpec, document: dict[str, Any], cluster: Cluster, free: Cluster | None) -> Decided:
    """`spec` with a decision on each key that its `document` leaves out: on GPUs the fastest layout that fits, on
    CPUs one rank; bf16 where the GPUs have it; the fastest micro-batch size. `spec`: the checked document, without
    layout and bounds if it leaves out the layout; `free`: the part of `cluster` that is not in use. Raises SpecError if
    it does not fit."""
    wants_all = cluster.machine.has_gpus and _reason_not_planned(spec) is None
    if requests_layout(document) or (leaves_layout(document) and wants_all):
        return _with_layout(spec, bounds_in(document), cluster, free)
    return _with_rest(_within_bounds(spec, document), cluster)


def not_decided(spec: JobSpec, document: dict[str, Any], error: SpecError) -> Decided:
    """`spec` with one rank, in fp32 and with micro-batches of one sequence where its `document` leaves that out, on a
    cluster that cannot be planned for: `error`, which is raised again if the document asks for a planned layout, or
    describes the cluster."""
    if requests_layout(document) or "cluster" in document:
        raise error
    reason = "; ".join(problem.rule for problem in error.problems)
    notes = (*_about_adapters(spec), f"keys left out have their plain defaults: {reason}")
    return Decided(_within_bounds(spec, document), notes)


def _within_bounds(spec: JobSpec, document: dict[str, Any]) -> JobSpec:
    """`spec` with the bounds of its `document`, which are checked against a layout of one rank if it names none. Raises
    SpecError."""
    if not leaves_layout(document) or "elastic" not in document:
        return spec
    bounded = spec.model_copy(update={"elastic": bounds_in(document)})
    if problems := find_problems(bounded):
        raise SpecError(problems)
    return bounded


def _reason_not_planned(spec: JobSpec) -> str | None:
    try:
        refuse_unplannable(spec)
    except NotPlanned as error:
        return str(error)
    return None


def _with_layout(spec: JobSpec, elastic: ElasticConfig, cluster: Cluster, free: Cluster | None) -> Decided:
    """The fastest layout of `spec` within `elastic` that fits on the `free` slots of `cluster`, or on all of them if
    none fits there, with its micro-batch size. Raises SpecError if none fits at all."""
    job, plan, where = with_precision(spec, cluster), None, "free "
    if free is not None:
        plan = next(iter(best_layouts(_searched(job, elastic), free, limit=1).plans), None)
    if plan is None or free is None:
        plan, free, where = _fastest(_searched(job, elastic), cluster), cluster, ""
    layout, among = plan.spec.layout, sum(part.gpus for part in free.parts)
    context = f", context {layout.context} ({layout.context_method})" if layout.context > 1 else ""
    context += f", expert {layout.expert}" if layout.expert_size > 1 else ""
    context += " (whole on tensor ranks)" if layout.expert_tensor is not None else ""
    zero = f", zero {layout.zero}" if layout.zero > 1 else ""
    note = (
        f"parallel: {layout.tensor}x{layout.pipeline}x{layout.data} (tensor x pipeline x data){context}{zero}, "
        f"recompute {layout.recompute}: the fastest layout that fits on {_counted(among, where, cluster)}, by estimate "
        f"{plan.time.seconds:.3g} s per step"
    )
    return Decided(plan.spec, (note, *_choices(spec, plan.spec)))


def _searched(job: JobSpec, elastic: ElasticConfig) -> JobSpec:
    return job.model_copy(update={"parallel": AUTO, "elastic": elastic})


def _fastest(job: JobSpec, cluster: Cluster) -> Plan:
    answer = best_layouts(job, cluster, limit=1)
    if answer.plans:
        return answer.plans[0]
    reason = answer.rejected[0].reason if answer.rejected else "the rules of the spec leave no layout"
    larger = smallest_cluster(job, cluster)
    tail = f"; {larger}" if larger else ""
    raise SpecError([Problem("parallel", f"no layout of this job fits on this cluster: {reason}{tail}")])


def _with_rest(spec: JobSpec, cluster: Cluster) -> Decided:
    """Precision and micro-batch size of `spec`, whose layout is given. Raises SpecError if it does not fit."""
    decided, total, alone = with_precision(spec, cluster), sum(part.gpus for part in cluster.parts), None
    if total > 1 and not {"tensor", "pipeline", "context", "data"} & spec.layout.model_fields_set:
        alone = f"1 of {_counted(total, '', cluster)} used"
    reason = _reason_not_planned(decided)
    if reason is None:
        decided = with_micro_batch_size(decided, cluster)
        problem = memory_problem(decided, cluster)
        if problem is not None:
            raise SpecError([Problem("parallel", problem, AUTO if alone and cluster.machine.has_gpus else None)])
        reason = f"`parallel: auto` looks for a faster layout on all {total}"
    notes = () if alone is None else (f"{alone}; {reason}",)
    return Decided(decided, (*_choices(spec, decided), *notes))


def _choices(spec: JobSpec, decided: JobSpec) -> Iterator[str]:
    """Sentences about what was decided beside the layout, and about adapters."""
    yield from _about_adapters(decided)
    if decided.train.precision != spec.train.precision:
        yield f"train.precision: {decided.train.precision}, which these GPUs compute fastest"
    if decided.train.micro_batch_size != spec.train.micro_batch_size:
        yield f"train.micro_batch_size: {decided.train.micro_batch_size}, the fastest that fits"


def _about_adapters(spec: JobSpec) -> Iterator[str]:
    if spec.train.lora is None:
        return
    yield f"{adapters_in_words(spec)}, at learning rates up to {spec.train.optimizer.learning_rate:g}"
    if spec.model.from_ is None:
        yield "train.lora: the model that the adapters are beside is random, since model.from is null"


def memory_problem(spec: JobSpec, cluster: Cluster) -> str | None:
    """Why no node of `cluster` has enough memory for the ranks of `spec` that it would hold; None if one has, or if the
    layout needs nodes that are not there. All memory counts, without the reserve that plans leave free, and without
    GPUs that of the whole node, which its ranks share."""
    if placement_problem(spec, cluster) is not None:
        return None
    placed = spec.layout.stage_accelerators is not None
    problems = [_too_small(spec, part) for part in ((cluster,) if placed else cluster.parts)]
    return None if None in problems else problems[0]


def _too_small(spec: JobSpec, part: Cluster) -> str | None:
    memory, usable = tightest(spec, part)
    ranks = 1 if part.machine.has_gpus else min(spec.layout.world_size, part.gpus_per_node)
    room = usable / (1 - RESERVE) * (1 if part.machine.has_gpus else part.gpus_per_node / ranks)
    if memory.total <= room:
        return None
    return f"does not fit: {Fit(memory, room, fits(spec, part).change)}"


def _counted(number: int, where: str, cluster: Cluster) -> str:
    what = "GPU" if cluster.machine.has_gpus else "slot"
    return f"{number} {where}{what}" + ("" if number == 1 else "s")
