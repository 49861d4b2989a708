"""Small jobs with layouts of every kind, drawn by a seed. Pure Python."""

from __future__ import annotations

import random
from typing import Any

from manta.workers.accounting.flops import step_flops
from manta.workers.config import JobSpec
from manta.workers.spec.rules import find_problems

MAX_RANKS = 8
FLOPS = (8e9, 1.2e11)
"""Of a step: 50 ms to about a second on two cores."""
CHUNKS = {"interleaved": 2, "zb-v": 2}


def draw_jobs(seed: int, count: int) -> list[dict[str, Any]]:
    """So many documents of jobs that the rules allow, all different."""
    draw = random.Random(seed)
    jobs: list[dict[str, Any]] = []
    while len(jobs) < count:
        document = _document(draw)
        if document not in jobs and _will_do(document):
            jobs.append(document)
    return jobs


def _document(draw: random.Random) -> dict[str, Any]:
    hidden = draw.choice((128, 192, 256, 384, 512))
    pipeline = draw.choice((1, 2, 2, 3, 4))
    schedule = draw.choice(("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")) if pipeline > 1 else "1f1b"
    tensor, data = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2, 4))
    size = draw.choice((1, 2, 4))
    micro_batches = draw.choice((1, 2, 3, 4, 6, 8))
    if schedule == "interleaved":  # which takes one for each stage at a time
        micro_batches = pipeline * draw.choice((1, 2, 3))
    return {
        "model": {
            "layers": max(draw.choice((2, 3, 4, 6, 8)), pipeline * CHUNKS.get(schedule, 1)),
            "hidden_size": hidden,
            "heads": hidden // draw.choice((32, 64) if hidden > 128 else (16, 32)),
            "sequence_length": draw.choice((64, 128, 256)),
            "vocabulary_size": draw.choice((256, 1024, 4096)),
        },
        "data": {"source": "megatron", "paths": ["corpus.bin"]},
        "train": {
            "steps": 1000,
            "micro_batch_size": size,
            "global_batch_size": size * micro_batches * data,
            "seed": 1234,
        },
        "parallel": {
            "tensor": tensor,
            "pipeline": pipeline,
            "data": data,
            "schedule": schedule,
            "virtual_stages": CHUNKS.get(schedule, 1),
            "recompute": draw.choice(("none", "selective", "full")),
            "zero": draw.choice((0, 1)),
        },
    }


def _will_do(document: dict[str, Any]) -> bool:
    spec = JobSpec.model_validate(document)
    if find_problems(spec) or spec.layout.world_size > MAX_RANKS:
        return False
    return FLOPS[0] <= step_flops(spec).hardware_causal <= FLOPS[1]
