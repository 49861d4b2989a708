"""Jobs such that every value of every factor below meets every value of every other one, as far as rules allow."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from engine_specs import document

from manta.workers.config import JobSpec
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec

Factors = dict[str, tuple[Any, ...]]
Row = dict[str, Any]
Made = TypeVar("Made")

EXPERTS = {"experts": 4, "per_token": 2, "ffn_hidden_size": 8, "shared": 1, "balance": {"bias_rate": 0.01}}
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
"""Each with its virtual stages."""
LAYOUTS = ((2, 2, 2), (1, 4, 1), (4, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4))
FACTORS: Factors = {
    "schedule": tuple(SCHEDULES),
    "layout": LAYOUTS,
    "family": ("gpt", "llama", "qwen", "deepseek"),
    "zero": (1, 0, 2, 3),
    # How two ranks share each sample, if they do.
    "context_method": (None, "all_gather", "all_to_all", "ring"),
    "sequence_parallel": (True, False),
    "recompute": ("none", "selective", "full"),
    "deterministic": ("layout", "elastic"),
    "tied": (True, False),
    "experts": (False, True),
    "precision": ("fp32", "bf16", "fp16"),
    "z_loss": (0.0, 1e-4),
    "frozen": ((), ("embedding",), ("embedding", "layers.0-1")),
    "adapters": (False, True),
    "rolls_back": (False, True),
    # Layers more than virtual stages, all on the last of them; None: shared out evenly.
    "more_on_the_last": (None, 2),
    "validates": (True, False),
}
LATENT = {"q_rank": 12, "kv_rank": 8, "rope_size": 4, "nope_size": 6, "value_size": 8}
_CANDIDATES, _SEED = 200, 1


class NotWanted(Exception):
    """A row that another one stands for."""


def job_of(row: Row, corpus: str, **more: dict[str, Any]) -> JobSpec:
    """The small job that a row stands for; `more`: keys of sections. Raises SpecError for a row that no job has,
    NotWanted."""
    tensor, pipeline, data = row["layout"]
    if pipeline == 1 and row["schedule"] != "1f1b":
        raise NotWanted("without a pipeline all schedules are one")
    layout = {"tensor": tensor, "pipeline": pipeline, "data": data, "virtual_stages": SCHEDULES[row["schedule"]]}
    layout |= {key: row[key] for key in ("schedule", "sequence_parallel", "recompute", "zero", "context_method")}
    layout["context"] = 1 if row["context_method"] is None else 2
    if tensor * pipeline * data * layout["context"] > 8:
        raise NotWanted("more ranks show nothing new")
    layers, stages = max(4, pipeline * SCHEDULES[row["schedule"]]), pipeline * SCHEDULES[row["schedule"]]
    if row["more_on_the_last"] is not None:
        layers = stages + row["more_on_the_last"]
        layout["stage_layers"] = [1] * (stages - 1) + [1 + row["more_on_the_last"]]
    train = {key: row[key] for key in ("deterministic", "precision", "z_loss")} | {"frozen": list(row["frozen"])}
    train["lora"] = {"rank": 3} if row["adapters"] else None
    per_step = data * _micro_batches(row)
    numbers = {"steps": 1, "global_batch_size": per_step, "micro_batch_size": 1, "time_parts_every": 1}
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "family": row["family"],
            "layers": layers,
            "moe": EXPERTS if row["experts"] else None,
            "tie_embeddings": row["tied"],
            "kv_heads": 2 if row["family"] in ("llama", "qwen") else None,
            "latent_attention": LATENT if row["family"] == "deepseek" else None,
        },
        "data": {"paths": [corpus], "validation_fraction": 0.2},
        "train": train | numbers | {"validate_every": int(row["validates"]), "validation_batches": 1},
        "parallel": layout,
        "checkpoint": {"every_steps": 1},
        "recovery": {"check_replicas_every": 1, "nonfinite": "roll_back" if row["rolls_back"] else "fail"},
    }
    for section, values in more.items():
        sections[section] = sections.get(section, {}) | values
    return parse_job_spec(document(**sections))


def _micro_batches(row: Row) -> int:
    """Of a replica: as many as it takes for all stages to have both directions at once."""
    _, pipeline, data = row["layout"]
    if data > 2:
        return pipeline
    return 2 * pipeline if SCHEDULES[row["schedule"]] > 1 or pipeline == 1 else pipeline + 1


def covering_all(corpus: str) -> list[tuple[Row, JobSpec]]:
    """Rows with their jobs."""
    return cover(FACTORS, lambda row: job_of(row, corpus))


def covering_most(corpus: str) -> list[tuple[Row, JobSpec]]:
    """Fewer and smaller jobs: every schedule, layout and stage of ZeRO with every other, and nine tenths of all pairs
    that jobs can have."""
    return cover(FACTORS, lambda row: job_of(row, corpus), ("schedule", "layout", "zero"), _stages_of_all_ranks)


def cover(
    factors: Factors,
    make: Callable[[Row], Made],
    needed: Collection[str] | None = None,
    cost: Callable[[Row], float] = lambda row: 1.0,
) -> list[tuple[Row, Made]]:
    """Rows, each with what `make` makes of it. Drawn from a fixed seed: each is the best of some that meet a pair
    nobody has met yet. `make`: raises SpecError or NotWanted where there is nothing; `needed`: the factors whose values
    must all meet, all without it; `cost`: by which the pairs that a row is the first to meet are divided."""
    draw = random.Random(_SEED)
    names = sorted(factors)
    left = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    open_pairs = {pair for pair in left if needed is None or {name for name, _ in pair} <= set(needed)}
    rows: list[tuple[Row, Made]] = []
    while open_pairs := open_pairs & left:
        wanted = min(open_pairs, key=repr)
        drawn = [
            {name: draw.choice(values) for name, values in factors.items()} | dict(wanted) for _ in range(_CANDIDATES)
        ]
        by_gain = sorted(drawn, key=lambda row: len(pairs_of(row) & left) / cost(row), reverse=True)
        best = next(((row, made) for row in by_gain if (made := _if_any(make, row)) is not None), None)
        if best is None:
            left.discard(wanted)  # nothing has both
            continue
        left -= pairs_of(best[0])
        rows.append(best)
    return rows


def _stages_of_all_ranks(row: Row) -> float:
    contexts = 1 if row["context_method"] is None else 2
    return math.prod(row["layout"]) * contexts * SCHEDULES[row["schedule"]]


def pairs_of(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Each value of a row beside each other one."""
    return set(itertools.combinations(sorted(row.items()), 2))


def _if_any(make: Callable[[Row], Made], row: Row) -> Made | None:
    try:
        return make(row)
    except (SpecError, NotWanted):
        return None
