"""Jobs of one GPU, drawn by a seed: families, sizes from 100 million to 2 billion parameters, sequences, micro-batches
and recomputation. Pure Python."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from workers.accounting.device_bytes import device_bytes
from workers.accounting.flops import parameter_count, step_flops
from workers.config import JobSpec
from workers.spec.rules import find_problems


@dataclass(frozen=True)
class Range:
    """What may be drawn."""

    hidden: tuple[int, ...]
    head_sizes: tuple[int, ...]
    layers: tuple[int, ...]
    sequences: tuple[int, ...]
    vocabularies: tuple[int, ...]
    sizes: tuple[int, ...]
    """Sequences of a micro-batch."""
    counts: tuple[int, ...]
    """Micro-batches."""
    parameters: tuple[float, float]
    most_flops: float
    """Of a step."""
    most_bytes: float
    compiled: int
    """One job in so many is compiled."""


ON_GPU = Range(
    hidden=(768, 1024, 1280, 1536, 2048, 2560),
    head_sizes=(64, 128),
    layers=(8, 12, 16, 20, 24, 32),
    sequences=(1024, 2048, 4096),
    vocabularies=(32000, 50304),
    sizes=(1, 2, 4, 8, 16),
    counts=(1, 2, 3, 4, 8),
    parameters=(1e8, 2e9),
    most_flops=2.5e14,
    most_bytes=70e9,
    compiled=6,
)
"""A step takes up to about 0.7 s of an H100."""
TINY = Range((32, 64), (8, 16), (1, 2), (16, 32), (64, 128), (1, 2), (1, 2), (1.0, 1e7), 1e12, 1e9, compiled=6)
"""For a rehearsal on a CPU."""


def draw_jobs(seed: int, count: int, allowed: Range = ON_GPU) -> list[dict[str, Any]]:
    """So many documents of jobs that fit, all different; every `allowed.compiled`-th is compiled."""
    draw = random.Random(seed)
    jobs: list[dict[str, Any]] = []
    while len(jobs) < count:
        document = _document(draw, allowed)
        document["train"]["compile"] = len(jobs) % allowed.compiled == min(3, allowed.compiled - 1)
        if document not in jobs and _will_do(document, allowed):
            jobs.append(document)
    return jobs


def _document(draw: random.Random, allowed: Range) -> dict[str, Any]:
    family = draw.choice(("gpt", "llama", "qwen"))
    hidden = draw.choice(allowed.hidden)
    heads = hidden // draw.choice(allowed.head_sizes)
    groups = draw.choice((1, 2, 4)) if family != "gpt" else 1
    size, count = draw.choice(allowed.sizes), draw.choice(allowed.counts)
    return {
        "model": {
            "family": family,
            "layers": draw.choice(allowed.layers),
            "hidden_size": hidden,
            "heads": heads,
            "kv_heads": heads // groups if heads % groups == 0 else heads,
            "sequence_length": draw.choice(allowed.sequences),
            "vocabulary_size": draw.choice(allowed.vocabularies),
        },
        "data": {"source": "megatron", "paths": ["corpus.bin"]},
        "train": {
            "steps": 1000,
            "micro_batch_size": size,
            "global_batch_size": size * count,
            "precision": "bf16",
            "seed": 1234,
        },
        "parallel": {"recompute": draw.choice(("none", "none", "selective", "full"))},
    }


def _will_do(document: dict[str, Any], allowed: Range) -> bool:
    spec = JobSpec.model_validate(document)
    if find_problems(spec) or step_flops(spec).hardware_causal > allowed.most_flops:
        return False
    least, most = allowed.parameters
    return least <= parameter_count(spec) <= most and device_bytes(spec)[0].total <= allowed.most_bytes
