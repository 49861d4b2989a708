"""What each single change that a user may think of would do to the step and the memory of a plan. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from service.planner.hardware import Cluster
from service.planner.memory import fits
from service.planner.mixed_step import step_model
from service.planner.search import no_place
from workers.config import JobSpec
from workers.parallel.pipeline.schedules import KINDS
from workers.parallel.pipeline.stages import even_counts, layer_counts
from workers.spec.rules import find_problems

MAX_LISTED = 16
"""Most virtual stages whose layers are listed in a change."""
_TRADES = (("tensor", "data"), ("tensor", "pipeline"), ("pipeline", "data"))
"""Pairs of axes between which a factor of two may move."""


@dataclass(frozen=True)
class WhatIf:
    """One change, and its effect."""

    change: str
    """As a user would write it: `micro_batch_size: 2`."""
    seconds: float
    """Seconds of a step."""
    memory: float
    """Bytes of the rank that needs most."""
    fits: bool


def what_ifs(spec: JobSpec, cluster: Cluster) -> tuple[WhatIf, ...]:
    """The effect of every single change that the rules allow: first those that fit, the fastest first, then those that
    do not fit."""
    answers = []
    for change, document in _changes(spec):
        other = JobSpec.model_validate(document)
        if find_problems(other) or no_place(other, cluster) is not None:
            continue
        seconds = step_model(other, cluster).time().seconds
        fit = fits(other, cluster)
        answers.append(WhatIf(change, seconds, fit.memory.total, fit.fits))
    return tuple(sorted(answers, key=lambda each: (not each.fits, each.seconds, each.change)))


def _changes(spec: JobSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each change, and the job's document with it."""
    document = spec.model_dump(mode="json")
    train, parallel = document["train"], document["parallel"]

    def of(section: str, **values: Any) -> tuple[str, dict[str, Any]]:
        if parallel["stage_layers"] is not None and _chunks(parallel) != _chunks(parallel | values):
            values["stage_layers"] = None  # its layers are those of other stages
        words = ", ".join(f"{key}: {'null' if value is None else value}" for key, value in values.items())
        return words, {**document, section: document[section] | values}

    micro = train["micro_batch_size"]
    if 2 * micro <= -(-train["global_batch_size"] // parallel["data"]):
        yield of("train", micro_batch_size=2 * micro)
    if micro % 2 == 0:
        yield of("train", micro_batch_size=micro // 2)
    for axes in _TRADES:
        for more, fewer in (axes, axes[::-1]):
            if parallel[fewer] % 2 == 0:
                yield of("parallel", **{more: 2 * parallel[more], fewer: parallel[fewer] // 2})
    for recompute in ("none", "selective", "full"):
        if recompute != parallel["recompute"]:
            yield of("parallel", recompute=recompute)
    for schedule, stages in _schedules(parallel):
        yield of("parallel", schedule=schedule, virtual_stages=stages)
    for counts in _lists(spec):
        yield of("parallel", stage_layers=counts)
    if parallel["data"] > 1:
        yield of("parallel", zero=1 - min(1, parallel["zero"]))


def _chunks(parallel: dict[str, Any]) -> tuple[int, int, bool]:
    """A key that is equal for layouts with the same virtual stages on the same ranks."""
    return parallel["pipeline"], parallel["virtual_stages"], parallel["schedule"] == "zb-v"


def _lists(spec: JobSpec) -> Iterator[list[int] | None]:
    """Other layers of stages, if there are few enough stages to read: even ones; one layer less on either end and one
    more on the emptiest of the others; and one more on either end from the fullest of the others."""
    counts = layer_counts(spec.model.layers, spec.layout)
    if not 1 < len(counts) <= MAX_LISTED:
        return
    even = even_counts(spec.model.layers, len(counts))
    if counts != even:
        yield None
    seen = {counts, even}
    for end in (0, len(counts) - 1):
        others = [index for index in range(len(counts)) if index != end]
        emptiest, fullest = min(others, key=counts.__getitem__), max(others, key=counts.__getitem__)
        for giver, taker in ((end, emptiest), (fullest, end)):
            moved = tuple(each + (index == taker) - (index == giver) for index, each in enumerate(counts))
            if min(moved) > 0 and moved not in seen:
                seen.add(moved)
                yield list(moved)


def _schedules(parallel: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Other schedules, and other numbers of virtual stages."""
    if parallel["pipeline"] == 1:
        return
    now = parallel["schedule"], parallel["virtual_stages"]
    for schedule in KINDS:
        counts = {"interleaved": (2, 4, 8), "zb-v": (2,)}.get(schedule, (1,))
        yield from ((schedule, count) for count in counts if (schedule, count) != now)
