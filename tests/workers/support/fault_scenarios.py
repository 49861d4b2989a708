"""Scenarios of small jobs: layouts and faults of their generations, drawn from a seed, or covering all pairs. Pure
Python."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any, Literal

from engine_specs import axes, document
from job_cover import SCHEDULES, Factors, NotWanted, Row, cover

from manta.workers.config import JobSpec
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec

STEPS, BATCH = 6, 12
BAD_STEP = 3
"""Whose batch, counted from 0, has a bad sample."""
MAX_RANKS = 8
Layout = tuple[int, int, int]
"""(tensor, pipeline, data)."""
LAYOUTS: tuple[Layout, ...] = ((2, 1, 2), (1, 2, 2), (1, 1, 3), (1, 2, 1), (2, 2, 1), (1, 1, 2))

FACTORS: Factors = {
    "backend": ("links", "process_groups"),
    "schedule": tuple(SCHEDULES),
    "layout": LAYOUTS,
    "zero": (1, 0, 2, 3),
    # How two ranks share each sample, if they do.
    "context_method": (None, "all_gather", "all_to_all", "ring"),
    "deterministic": ("layout", "elastic"),
    "precision": ("fp32", "bf16", "fp16"),
    # How the second generation differs: not at all, or it has other replicas, or another number of ranks in each.
    "change": ("none", "fewer", "more", "reshape"),
    "first": ("cut", "kill", "rest", "pause"),
    # During the second generation, which recovers from the first event.
    "second": ("none", "cut restoring", "kill restoring", "kill", "rest, then cut"),
    "victims": ("one", "half", "all"),
    # Whether snapshots outlive whoever is killed first, or there are none.
    "memory": ("kept", "lost", "off"),
    "back": (False, True),
    "moves": (0, 1),
    "saves": (True, False),
    "snapshot_every": (1, 2),
    "compares": (False, True),
    "dropout": (0.0, 0.1),
    "frozen": ((), ("embedding",)),
    "lora": (False, True),
    "recompute": ("none", "selective"),
    "gather": ("after_update", "beside_forward"),
    # What is done about a step whose numbers are bad.
    "bad": ("none", "roll_back", "skip"),
    # Whether the control plane has heard of the steps that were rolled back before.
    "heard": (True, False),
}

FEW = ("1423", "467", "3088", "2372", "1605", "458", "685", "3192")
"""Seeds of drawn scenarios of few ranks that together have every value of every factor."""

Kind = Literal["cut", "kill", "rest", "pause"]


@dataclass(frozen=True)
class PlannedFault:
    """An event during a generation."""

    kind: Kind
    """The rank's connections are cut, it is killed, it is asked to rest, or to save and end."""
    rank: int
    part: int
    """0: while the state is restored; n: in the n-th step of the generation."""
    message: int
    """At which of the messages that the rank waits for in this part; at the end of the part if it has fewer."""
    others: tuple[int, ...] = ()
    """Ranks that end with it: also killed, or on the node that is left."""
    loses_memory: bool = False
    """Whether the snapshots of those that end are gone too."""
    during: tuple[str, str] | None = None
    """Only messages within this pass (forward, backward or recompute) and function of the exchange of experts count."""


@dataclass(frozen=True)
class Generation:
    """A generation of a scenario."""

    parallel: dict[str, Any]
    faults: tuple[PlannedFault, ...] = ()
    shift: int = 0
    """By how many places ranks and processes are apart: rank 0 is in process `-shift`."""
    until: int | None = None
    """Rests by itself after this step."""


@dataclass(frozen=True)
class Scenario:
    """A job, and its generations; the last one is repeated until it ends."""

    document: dict[str, Any]
    generations: tuple[Generation, ...]
    backend: str
    saves: bool
    """Whether there is a folder for its checkpoints."""
    has_snapshots: bool = True
    bad_sample: int | None = None
    """Makes a step's numbers bad."""
    heard: bool = True
    """Whether each generation is told what the ones before have rolled back."""

    @property
    def processes(self) -> int:
        """As many as its largest layout needs."""
        return max(world_size(each.parallel) for each in self.generations)


def world_size(parallel: dict[str, Any]) -> int:
    """Ranks of a layout."""
    return int(parallel["tensor"] * parallel["pipeline"] * parallel["data"] * parallel["context"])


EXPERT_FACTORS: Factors = FACTORS | {
    "experts": ("all_gather", "all_to_all"),
    "zero": (1, 0),
    "deterministic": ("layout",),
    "recompute": ("none", "full"),
    "frozen": ((), ("embedding", "layers.0.mlp.experts")),
    "lora": (False,),
    "layout": ((2, 1, 2), (1, 2, 2), (1, 1, 3), (1, 1, 4)),
}
"""Of jobs whose experts are spread over ranks by this exchange."""


def scenario_of(row: Row, seed: str, corpus: str) -> Scenario:
    """The scenario that a row stands for; the rest is drawn. Raises SpecError, NotWanted."""
    draw = random.Random(f"{seed} {sorted(row.items())}")
    if row["layout"][1] == 1 and row["schedule"] != "1f1b":
        raise NotWanted("without a pipeline all schedules are one")
    if row["memory"] == "lost" and row["first"] != "kill":
        raise NotWanted("nothing is lost with a process that stays or is left in time")
    if row["gather"] == "beside_forward" and (row["precision"] != "bf16" or not row["zero"]):
        raise NotWanted("that is after the update too")
    if row["bad"] != "none" and row["precision"] == "fp16":
        raise NotWanted("that is the loss scale's to mend")
    first = _parallel(row, row["layout"], _contexts(row))
    second = _changed(row, draw)
    third = first if row["back"] else second
    moves = row["moves"]
    faults = [_first(row, first, draw), _second(row, second, draw), _third(third, draw), ()]
    layouts = (first, second, third, third)
    shifts = (0, moves, moves, moves)
    generations = tuple(Generation(*each) for each in zip(layouts, faults, shifts, strict=True))
    for each in layouts:
        job_of(row, each, corpus)
    places = (row["saves"], row["memory"] != "off")
    bad = draw.randrange(BATCH * BAD_STEP, BATCH * (BAD_STEP + 1)) if row["bad"] != "none" else None
    return Scenario(_document(row, first, corpus), generations, row["backend"], *places, bad, row["heard"])


def job_of(row: Row, parallel: dict[str, Any], corpus: str) -> JobSpec:
    """The job in one of its layouts. Raises SpecError."""
    return parse_job_spec(_document(row, parallel, corpus))


def covering_scenarios(corpus: str, factors: Factors = FACTORS) -> list[tuple[Row, Scenario]]:
    """Scenarios with every value of every factor beside every value of every other one, as far as that is valid."""
    return cover(factors, lambda row: scenario_of(row, "cover", corpus))


def drawn_scenario(seed: str, corpus: str, factors: Factors = FACTORS) -> tuple[Row, Scenario] | None:
    """A scenario with all factors drawn; None if they are no valid one."""
    draw = random.Random(seed)
    row = {name: draw.choice(values) for name, values in factors.items()}
    if row["layout"][1] == 1:
        row["schedule"] = "1f1b"
    if row["first"] != "kill" and row["memory"] == "lost":
        row["memory"] = "kept"
    if row["precision"] == "fp16":
        row["bad"] = "none"
    if row["precision"] != "bf16" or not row["zero"]:
        row["gather"] = "after_update"
    if row["lora"]:
        row["frozen"] = ()
    try:
        return row, scenario_of(row, seed, corpus)
    except (SpecError, NotWanted):
        return None


def _parallel(row: Row, layout: Layout, context: int) -> dict[str, Any]:
    tensor, pipeline, _ = layout
    schedule = row["schedule"] if pipeline > 1 else "1f1b"
    keys = {key: row[key] for key in ("zero", "recompute", "gather")}
    keys |= {"schedule": schedule, "virtual_stages": SCHEDULES[schedule]}
    keys |= {"context": context, "context_method": row["context_method"] if context > 1 else None}
    if "experts" in row:
        keys |= spread(layout[2] * context, row["experts"])
    return {**axes(layout), **keys, "sequence_parallel": tensor > 1, "bucket_megabytes": 0.01}


def spread(holders: int, dispatch: str) -> dict[str, Any]:
    """Experts over as many as divide the ranks with the same parameters, if more than one do."""
    size = next((size for size in (2, 3) if holders % size == 0), 1)
    return {} if size == 1 else {"expert": size, "expert_dispatch": dispatch}


def _contexts(row: Row) -> int:
    return 1 if row["context_method"] is None else 2


def _changed(row: Row, draw: random.Random) -> dict[str, Any]:
    """The layout of the second generation. Raises NotWanted."""
    tensor, pipeline, data = row["layout"]
    context = _contexts(row)
    match row["change"]:
        case "none":
            choices = [(row["layout"], context)]
        case "fewer":
            choices = [((tensor, pipeline, fewer), context) for fewer in range(1, data)]
        case "more":
            choices = [((tensor, pipeline, data + more), context) for more in (1, 2)]
        case _:
            layouts = itertools.product({1, tensor}, {1, pipeline}, {1, data, data + 1})
            smaller = itertools.product(layouts, {1, context})
            choices = sorted(each for each in smaller if (*each[0][:2], each[1]) != (tensor, pipeline, context))
    parallels = [_parallel(row, *each) for each in choices]
    fitting = [each for each in parallels if 1 < world_size(each) <= MAX_RANKS]
    if not fitting:
        raise NotWanted("no such layout has more than one rank and not too many")
    return draw.choice(fitting)


def _first(row: Row, parallel: dict[str, Any], draw: random.Random) -> tuple[PlannedFault, ...]:
    return (_fault(row["first"], parallel, draw, (1, 1, 2, 3), row["victims"], row["memory"] == "lost"),)


def _second(row: Row, parallel: dict[str, Any], draw: random.Random) -> tuple[PlannedFault, ...]:
    match row["second"]:
        case "none":
            return ()
        case "cut restoring":
            return (_fault("cut", parallel, draw, (0,)),)
        case "kill restoring":
            return (_fault("kill", parallel, draw, (0,), row["victims"]),)
        case "kill":
            return (_fault("kill", parallel, draw, (1, 2), row["victims"]),)
        case _:
            part = draw.choice((1, 2))
            return (_fault("rest", parallel, draw, (part,)), _fault("cut", parallel, draw, (part,)))


def _third(parallel: dict[str, Any], draw: random.Random) -> tuple[PlannedFault, ...]:
    kinds: tuple[Kind, ...] = ("cut", "kill", "rest", "pause")
    return (_fault(draw.choice(kinds), parallel, draw, (0, 1, 1, 2), draw.choice(FACTORS["victims"])),)


def _fault(
    kind: Kind,
    parallel: dict[str, Any],
    draw: random.Random,
    parts: tuple[int, ...],
    victims: str = "one",
    loses_memory: bool = False,
) -> PlannedFault:
    world = world_size(parallel)
    rank, part = draw.randrange(world), draw.choice(parts)
    others = [each for each in range(world) if each != rank]
    ending = {"one": 0, "half": world // 2 - 1, "all": world - 1}[victims]
    # Of a few messages one is met for sure, of many some part has so many.
    message = draw.choice((draw.randint(1, 6), draw.randint(1, 40), draw.randint(1, 120)))
    return PlannedFault(kind, rank, part, message, tuple(sorted(draw.sample(others, ending))), loses_memory)


def _document(row: Row, parallel: dict[str, Any], corpus: str) -> dict[str, Any]:
    moe = {"experts": 6, "per_token": 2, "ffn_hidden_size": 8, "shared": 1, "balance": {"bias_rate": 0.01}}
    experts = {"family": "llama", "moe": moe} if "experts" in row else {}
    return document(
        model={"layers": 4, "hidden_size": 16, "kv_heads": 2, "dropout": row["dropout"], **experts},
        data={"paths": [corpus], "validation_fraction": 0.1},
        train={
            "steps": STEPS, "global_batch_size": BATCH,
            "micro_batch_size": 1 if row["schedule"] == "interleaved" else 2, "deterministic": row["deterministic"],
            "precision": row["precision"], "frozen": list(row["frozen"]), "validate_every": 3,
            "validation_batches": 1, "lora": {"rank": 3, "dropout": row["dropout"]} if row["lora"] else None,
        },
        parallel=parallel,
        checkpoint={"every_steps": 2, "snapshot_every_steps": row["snapshot_every"]},
        recovery={
            "check_replicas_every": int(row["compares"]),
            "nonfinite": "fail" if row["bad"] == "none" else row["bad"],
            "roll_back_steps": 2,
        },
    )  # fmt: skip
