"""Curves that were recorded once and are kept: a change that is not meant to change numbers changes none of them.

On the processor, torch and number of threads that the file records, every bit must be the same, weights included;
elsewhere sums are made in another order, and the curves agree to the tolerance of their precision. A change that is
meant to change numbers records them anew: `pytest tests/workers/parallel/test_golden_curves.py --record-curves`.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_specs import document
from rank_programs import train_job

from manta.workers.config import ParallelConfig

KEPT = Path(__file__).with_name("golden_curves.json")
STEPS = 8
TRAIN = {"steps": STEPS, "validate_every": STEPS, "validation_batches": 2, "optimizer": {"warmup_steps": 3}}

# What differs from TRAIN and the tiny model, and the layout: what is composed here is composed nowhere else.
JOBS: dict[str, dict[str, dict[str, Any]]] = {
    "alone": {"model": {"dropout": 0.1}, "train": {"micro_batch_size": 2}, "parallel": {}},
    "three axes": {
        "train": {},
        "parallel": {"tensor": 2, "pipeline": 2, "data": 2, "recompute": "selective"},
    },
    "interleaved without ZeRO": {
        "model": {"dropout": 0.1, "tie_embeddings": False},
        "train": {"micro_batch_size": 2},
        "parallel": {
            "pipeline": 2, "data": 2, "virtual_stages": 2, "schedule": "interleaved", "zero": 0, "recompute": "full",
        },
    },
    "zero bubble, elastic": {
        "train": {"deterministic": "elastic"},
        "parallel": {"pipeline": 2, "data": 2, "schedule": "zb-v", "virtual_stages": 2},
    },
    "bf16": {
        "train": {"precision": "bf16"},
        "parallel": {"tensor": 2, "data": 2, "sequence_parallel": True},
    },
}  # fmt: skip
TOLERANCES = {"fp32": 1e-6, "bf16": 2e-3}
"""Relative, of a loss; ten times that for the norm of a gradient."""


def machine() -> dict[str, Any]:
    """What the bits depend on beside the code."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": 1,  # of each rank, see rank_processes.py
    }


def _processor() -> str:
    """As Linux describes it: vendor, family, model and name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    lines = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    keys = {key.strip(): value.strip() for key, value in lines.items()}
    return " ".join(keys.get(key, "?") for key in ("vendor_id", "cpu family", "model", "model name"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """The text that the curves were recorded with."""
    path = tmp_path_factory.mktemp("corpus") / "numbers.txt"
    path.write_text("".join(f"{n} and {n + 1} are {2 * n + 1}.\n" for n in range(400)))
    return str(path)


def curve_of(ranks: Any, name: str, corpus: str) -> dict[str, Any]:
    """The curve of a job: losses and norms of each step, the validation loss, and a hash of all parameters."""
    sections = JOBS[name]
    job = document(
        model=sections.get("model", {}),
        data={"paths": [corpus], "validation_fraction": 0.1},
        train={**TRAIN, **sections["train"]},
        parallel=sections["parallel"],
    )
    trained = ranks.run(ParallelConfig(**sections["parallel"]), train_job, job)
    digest = hashlib.sha256()
    for rank in trained:
        digest.update(rank.parameters.contiguous().view(torch.uint8).numpy().tobytes())
    rows = trained[0].rows
    return {
        "loss": [row["loss"] for row in rows],
        "grad_norm": [row["grad_norm"] for row in rows],
        "validation_loss": rows[-1]["validation_loss"],
        "parameters": digest.hexdigest(),
    }


@pytest.mark.parametrize("name", JOBS)
def test_training_curve_matches_the_recorded_one(ranks, corpus, name, request):
    curve = curve_of(ranks, name, corpus)
    if request.config.getoption("--record-curves"):
        _record(name, curve)
        return
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    recorded = kept["curves"][name]
    if kept["recorded_on"] == machine():
        assert curve == recorded
        return
    tolerance = TOLERANCES[JOBS[name]["train"].get("precision", "fp32")]
    assert curve["loss"] == pytest.approx(recorded["loss"], rel=tolerance)
    assert curve["grad_norm"] == pytest.approx(recorded["grad_norm"], rel=10 * tolerance)
    assert curve["validation_loss"] == pytest.approx(recorded["validation_loss"], rel=tolerance)


def _record(name: str, curve: dict[str, Any]) -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {"curves": {}}
    kept = {"recorded_on": machine(), "curves": {**kept["curves"], name: curve}}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
