"""`parallel: auto`: the layout of a job is searched for once, at submission. Pure Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from service.planner.hardware import Cluster
from service.planner.mixed_search import best_layouts
from service.planner.search import smallest_cluster
from workers.config import ElasticConfig, JobSpec
from workers.spec.problems import Problem, SpecError, problems_of


def asks_for_layout(document: Any) -> bool:
    """Whether a job's document says `parallel: auto`."""
    return isinstance(document, dict) and document.get("parallel") == "auto"


def without_layout(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the smallest layout, to check everything else."""
    return {name: value for name, value in document.items() if name not in ("parallel", "elastic")}


def bounds_in(document: dict[str, Any]) -> ElasticConfig:
    """The document's limits for changes of size. Raises SpecError."""
    try:
        return ElasticConfig.model_validate(document.get("elastic", {}))
    except ValidationError as error:
        problems = problems_of(error)
        raise SpecError([replace(each, path=f"elastic.{each.path}".rstrip(".")) for each in problems]) from error


def with_layout(spec: JobSpec, elastic: ElasticConfig, cluster: Cluster) -> JobSpec:
    """`spec` with the fastest layout that fits on `cluster` and within `elastic`. Raises SpecError if there is none."""
    job = spec.model_copy(update={"parallel": "auto", "elastic": elastic})
    answer = best_layouts(job, cluster, limit=1)
    if answer.plans:
        return answer.plans[0].spec
    reason = answer.rejected[0].reason if answer.rejected else "the rules of the spec leave no layout"
    larger = smallest_cluster(job, cluster)
    tail = f"; {larger}" if larger else ""
    raise SpecError([Problem("parallel", f"no layout of this job fits on this cluster: {reason}{tail}")])
