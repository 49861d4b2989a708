"""Jobs and clusters for tests of the planner."""

from __future__ import annotations

from typing import Any

from manta.service.planner.hardware import Cluster, machine_of
from manta.workers.config import JobSpec


def job(layers: int = 8, hidden: int = 1024, heads: int = 16, **sections: Any) -> JobSpec:
    """A GPT of 512 tokens a sequence, 16-bit, batch of 64, unless `sections` say otherwise."""
    model = {"layers": layers, "hidden_size": hidden, "heads": heads, "sequence_length": 512}
    model |= {"vocabulary_size": 32000} | sections.pop("model", {})
    train = {"steps": 10, "global_batch_size": 64, "precision": "bf16"} | sections.pop("train", {})
    data = {"source": "megatron", "paths": ("corpus.bin",)}
    return JobSpec.model_validate({"model": model, "data": data, "train": train, "parallel": sections})


def a100s(nodes: int = 1, gpus_per_node: int = 8) -> Cluster:
    """DGX A100s."""
    return Cluster(machine_of("a100-80gb"), nodes, gpus_per_node)
