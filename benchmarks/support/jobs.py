"""The job documents that several benchmarks run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.support.report import ROOT
from manta.workers.errors import DataError
from manta.workers.spec.reading import read_document

SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"
QUICKSTART, MIXTRAL = ROOT / "examples" / "quickstart.yaml", ROOT / "examples" / "mixtral_small.yaml"


def nanogpt(text: Path, steps: int, seed: int) -> dict[str, Any]:
    """nanoGPT's settings for a CPU (its README, "I only have a macbook") on `text`, for `steps` steps.

    Raises DataError when the text is not there.
    """
    if not text.is_file():
        raise DataError(
            f"no text to train on at {text}: give one with --text (nanoGPT's figures are for tinyshakespeare)"
        )
    return {
        "name": "nanogpt",
        "model": {"layers": 4, "hidden_size": 128, "heads": 4, "sequence_length": 64, "bias": False},
        "data": {"source": "text", "paths": [str(text)], "validation_fraction": 0.1},
        "train": {
            "steps": steps,
            "global_batch_size": 12,
            "micro_batch_size": 12,
            "seed": seed,
            "optimizer": {
                "learning_rate": 1e-3,
                "min_learning_rate": 1e-4,
                "warmup_steps": min(100, steps),
                "weight_decay": 0.1,
                "beta2": 0.99,
                "clip_norm": 1.0,
            },
        },
        "checkpoint": {"every_steps": 0},
    }


def quickstart(layout: tuple[int, int, int], steps: int, seed: int, example: Path = QUICKSTART) -> dict[str, Any]:
    """The quickstart, or another example, under another (tensor, pipeline, data), without validation and durable
    checkpoints."""
    document = read_document(example)
    document["name"] = "x".join(str(size) for size in layout)
    document["train"].update(steps=steps, seed=seed, validate_every=0)
    optimizer = document["train"]["optimizer"]
    optimizer["warmup_steps"] = min(optimizer["warmup_steps"], steps)
    tensor, pipeline, data = layout
    document["parallel"].update(tensor=tensor, pipeline=pipeline, data=data, sequence_parallel=tensor > 1)
    document["checkpoint"] = {"every_steps": 0}
    return dict(document)
