"""Explains a plan: its step starting from the device's peak rate, what each single change that a user may think of
would do, the pipeline's timeline and the memory of each stage. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from manta.service.cluster.sizes import sizes_of
from manta.service.planner.beside_steps import BesideSteps, beside_steps
from manta.service.planner.budget import Share, sentences, step_shares
from manta.service.planner.candidates import METHODS, MIN_CONTEXT_TOKENS, expert_sizes, whole_expert_sizes
from manta.service.planner.hardware import Cluster
from manta.service.planner.long_run import Advice, NeverFinishes, Run, advise
from manta.service.planner.memory import by_stage, fits
from manta.service.planner.part_labels import PART_LABELS
from manta.service.planner.pipeline import Bar
from manta.service.planner.search import Plan, placement_problem
from manta.service.planner.step_time import step_model
from manta.workers.accounting.device_bytes import DeviceBytes
from manta.workers.config import JobSpec
from manta.workers.schedules import RUN_BY_ENGINE, SCHEDULES
from manta.workers.schedules.stages import even_counts, layer_counts
from manta.workers.spec.rules import find_problems

MAX_PASSES = 20_000
"""Most passes of a timeline: browsers can draw that many, and an answer can hold them."""
LONG_SECONDS = 86400.0
"""Shortest training that is simulated with failures."""
MAX_LISTED = 16
"""Most virtual stages whose layers are listed in a change."""
_TRADES = (("tensor", "data"), ("tensor", "pipeline"), ("pipeline", "data"))
"""Pairs of axes between which a factor of two may move."""
_CONTEXT_TRADES = (("context", "data"), ("context", "tensor"), ("context", "pipeline"))
"""Advice for long sequences, or for layouts that split them."""


@dataclass(frozen=True)
class Explanation:
    """Explanation of one plan."""

    shares: tuple[Share, ...]
    """Parts of a step, starting from the device's peak rate."""
    changes: tuple[WhatIf, ...]
    memory: tuple[DeviceBytes, ...]
    """Memory of one rank of each pipeline stage."""
    usable_bytes: tuple[float, ...]
    """Usable memory of a device in each of these stages."""
    bars: tuple[Bar, ...] | None
    """The passes of one step on each pipeline rank; None if there are too many."""
    beside: BesideSteps
    """What the training does in addition to its steps."""
    run: Advice | NeverFinishes | None
    """The whole training with failures; None if it takes less than a day or uses no accelerators."""


def explain(plan: Plan, cluster: Cluster) -> Explanation:
    """Explain `plan`, which a search on `cluster` returned."""
    spec, layout, memory = plan.spec, plan.spec.layout, by_stage(plan.spec, cluster)
    model = step_model(spec, cluster)
    passes = (3 if SCHEDULES[layout.schedule].splits_backward else 2) * layout.pipeline * layout.virtual_stages
    beside = beside_steps(model, plan.time)
    few = passes * spec.micro_batches <= MAX_PASSES
    return Explanation(
        shares=step_shares(model, plan.time, plan.peak_flops),
        changes=what_ifs(spec, cluster),
        memory=tuple(needed for needed, _ in memory),
        usable_bytes=tuple(usable for _, usable in memory),
        bars=tuple(model.pipeline().bars(spec.micro_batches)) if few else None,
        beside=beside,
        run=_full_run(plan, cluster, beside),
    )


def _full_run(plan: Plan, cluster: Cluster, beside: BesideSteps) -> Advice | NeverFinishes | None:
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
    except NeverFinishes as error:
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
    """As JSON, in the form of `manta.api.schemas.PlanExplanation`."""
    run, said = explanation.run, [*sentences(explanation.shares), *explanation.beside.sentences()]
    if isinstance(run, NeverFinishes):
        run, said = None, [*said, f"Of the whole training: {run}."]
    return {
        "sentences": said,
        "shares": [{**asdict(share), "label": PART_LABELS[share.name]} for share in explanation.shares],
        "changes": [
            {
                "change": change.change,
                "step_seconds": change.seconds,
                "memory_bytes": round(change.memory),
                "fits": change.fits,
            }
            for change in explanation.changes
        ],
        "memory_by_stage": [each.parts() for each in explanation.memory],
        "usable_bytes": round(max(explanation.usable_bytes)),
        "usable_by_stage": [round(each) for each in explanation.usable_bytes],
        "run": None if run is None else _run_to_json(run),
        "timeline": None if explanation.bars is None else [bar._asdict() for bar in explanation.bars],
    }


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
        if find_problems(other) or placement_problem(other, cluster) is not None:
            continue
        seconds = step_model(other, cluster).time().seconds
        fit = fits(other, cluster)
        answers.append(WhatIf(change, seconds, fit.memory.total, fit.fits))
    return tuple(sorted(answers, key=lambda each: (not each.fits, each.seconds, each.change)))


def _changes(spec: JobSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    document = spec.model_dump(mode="json")
    train, parallel = document["train"], document["parallel"]

    def of(section: str, **values: Any) -> tuple[str, dict[str, Any]]:
        if parallel["stage_layers"] is not None and _chunks(parallel) != _chunks(parallel | values):
            values["stage_layers"] = None  # its layers are those of other stages
        if values.get("expert") == 1:
            values |= {key: None for key in ("expert", "expert_dispatch") if parallel[key] is not None}
        if values.get("context") == 1:  # then these have no effect
            values |= {key: None for key in ("context_method", "context_order") if parallel[key] is not None}
        words = ", ".join(f"{key}: {'null' if value is None else value}" for key, value in values.items())
        return words, {**document, section: document[section] | values}

    micro = train["micro_batch_size"]
    if 2 * micro <= -(-train["global_batch_size"] // parallel["data"]):
        yield of("train", micro_batch_size=2 * micro)
    if micro % 2 == 0:
        yield of("train", micro_batch_size=micro // 2)
    is_long = parallel["context"] > 1 or spec.model.sequence_length >= MIN_CONTEXT_TOKENS
    for axes in (*_TRADES, *(_CONTEXT_TRADES if is_long else ())):
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
    if parallel["context"] > 1:
        for method in METHODS:
            if method != (parallel["context_method"] or METHODS[0]):
                yield of("parallel", context_method=method)
        order = "zigzag" if parallel["context_order"] == "contiguous" else "contiguous"
        yield of("parallel", context_order=order)
    yield from (of("parallel", **values) for values in _spreads(spec))
    if spec.layout.holders > 1:
        for zero in (0, 1, 2, 3) if parallel["pipeline"] == 1 else (0, 1):
            if zero != parallel["zero"]:
                yield of("parallel", zero=zero)


def _spreads(spec: JobSpec) -> Iterator[dict[str, Any]]:
    """Other ways to spread experts over ranks: the next sizes, and the other dispatch."""
    layout, moe = spec.layout, spec.model.moe
    sizes = expert_sizes(spec, layout.holders)
    whole = whole_expert_sizes(spec, layout.holders, layout.tensor)
    if layout.expert_tensor is not None:
        sizes = whole
        yield {"expert": layout.exchange_size, "expert_tensor": None}
    elif whole:
        yield {"expert": layout.expert_size * layout.tensor, "expert_tensor": 1}
    if layout.expert_size in sizes:
        at = sizes.index(layout.expert_size)
        yield from ({"expert": size} for size in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2]))
    if moe is not None and layout.exchange_size > 1:
        now = layout.dispatch(moe.per_token)
        yield {"expert_dispatch": "all_to_all" if now == "all_gather" else "all_gather"}


def _chunks(parallel: dict[str, Any]) -> tuple[int, int, bool]:
    """A key that is equal for layouts with the same virtual stages on the same ranks."""
    return parallel["pipeline"], parallel["virtual_stages"], SCHEDULES[parallel["schedule"]].turns_back


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
    if parallel["pipeline"] == 1:
        return
    now = parallel["schedule"], parallel["virtual_stages"]
    for name in RUN_BY_ENGINE:
        fixed = SCHEDULES[name].virtual_stages
        counts = (2, 4, 8) if fixed is None else (fixed,)
        yield from ((name, count) for count in counts if (name, count) != now)
