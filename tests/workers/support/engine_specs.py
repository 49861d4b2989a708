"""Small specs for the engine's tests, as documents and as JobSpecs."""

from __future__ import annotations

import copy
from typing import Any

from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.spec.problems import Problem, SpecError
from manta.workers.spec.reading import parse_job_spec

TINY: dict[str, Any] = {
    "model": {"layers": 4, "hidden_size": 32, "heads": 4, "sequence_length": 8},
    "data": {"source": "text", "paths": ["corpus.txt"]},
    "train": {"steps": 30, "global_batch_size": 8},
}

# (tensor, pipeline, data) of every layout that must agree with every other.
SEVEN_LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 2, 2))


def document(**sections: dict[str, Any]) -> dict[str, Any]:
    """TINY with some keys of some sections replaced."""
    result = copy.deepcopy(TINY)
    for section, values in sections.items():
        result.setdefault(section, {}).update(values)
    return result


def spec(**sections: dict[str, Any]) -> JobSpec:
    """`document`, parsed."""
    return parse_job_spec(document(**sections))


def axes(layout: tuple[int, int, int]) -> dict[str, int]:
    """(tensor, pipeline, data) as keys of the section `parallel`."""
    return dict(zip(("tensor", "pipeline", "data"), layout, strict=True))


def layout_of(tensor: int = 1, pipeline: int = 1, data: int = 1) -> ParallelConfig:
    """A layout without a job."""
    return ParallelConfig(tensor=tensor, pipeline=pipeline, data=data)


def problems_of(document: Any) -> list[Problem]:
    """What is wrong with a document; nothing when it parses."""
    try:
        parse_job_spec(document)
    except SpecError as error:
        return error.problems
    return []
