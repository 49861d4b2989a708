"""A rank that loses its connections at any message rests, meets the others again in the next generation with the same
process, and the job ends with the bits that it has when nothing happens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_specs import axes, document
from repair_programs import Cut, train_through

from manta.workers.config import ParallelConfig

STEPS = 5
LAYOUTS = {
    "tensor-data": (axes((2, 1, 2)), {}, {}),
    "tensor-data-zero-0": (axes((2, 1, 2)), {"zero": 0}, {}),
    "pipeline-data": (axes((1, 2, 2)), {"schedule": "zb-h1"}, {}),
    "zb-v-dropout": (axes((1, 2, 1)), {"schedule": "zb-v", "virtual_stages": 2}, {"dropout": 0.1}),
    "beside-forward": (axes((1, 2, 2)), {"gather": "beside_forward", "bucket_megabytes": 0.01}, {}),
    "everything": (axes((2, 2, 2)), {"schedule": "interleaved", "virtual_stages": 2, "recompute": "selective"}, {}),
}


CASES = [
    *(("links", "tensor-data", "soak"), ("links", "tensor-data-zero-0", "soak"), ("links", "pipeline-data", "")),
    *(("links", "zb-v-dropout", ""), ("links", "everything", "")),
    *(("process_groups", "tensor-data", ""), ("process_groups", "pipeline-data", "")),
    *(("process_groups", "tensor-data-zero-0", "soak"), ("process_groups", "zb-v-dropout", "soak")),
    *(("process_groups", "everything", "soak"), ("links", "beside-forward", "soak")),
    ("process_groups", "beside-forward", ""),
]


@pytest.mark.parametrize(
    ("backend", "name"),
    [pytest.param(backend, name, marks=[pytest.mark.soak] if soak else []) for backend, name, soak in CASES],
)
def test_training_has_the_same_bits_if_connections_are_cut_at_any_message(ranks, corpus, tmp_path, backend, name):
    sizes, parallel, model = LAYOUTS[name]
    precision = "bf16" if "gather" in parallel else "fp32"  # in which alone that is done
    job = document(
        model=model,
        data={"paths": [corpus]},
        train={
            "steps": STEPS,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "time_parts_every": 2,
            "precision": precision,
        },
        parallel={**sizes, **parallel},
    )
    layout = ParallelConfig(**sizes, **parallel)
    clean = ranks.run(layout, train_through, job, folder(tmp_path, "clean"), ranks.port, [], backend=backend)
    choice = random.Random(name)
    messages = [trained.messages for trained in clean]
    cuts = []
    for generation in range(3):
        rank = choice.randrange(layout.world_size)
        # Of what is left after the cuts before, and never after the last step is committed.
        cuts.append(Cut(generation, rank, choice.randrange(1, messages[rank] * 2 // 5)))
    broken = ranks.run(layout, train_through, job, folder(tmp_path, "broken"), ranks.port, cuts, backend=backend)
    for trained, expected in zip(broken, clean, strict=True):
        assert trained.generations == 4, cuts
        assert trained.state == expected.state, cuts
        assert trained.steps_redone <= len(cuts), cuts
    assert broken[0].rows == clean[0].rows, cuts


def folder(tmp_path: Path, name: str) -> str:
    made = tmp_path / name
    made.mkdir()
    return str(made)
