"""Where the demo's job runs: on GPUs if there are enough of them, otherwise on CPU slots."""

from __future__ import annotations

from typing import Any

from api.schemas import Cluster
from workers.config import JobSpec


def on_slots_where_gpus_are_few(
    document: dict[str, Any], spec: JobSpec, cluster: Cluster
) -> tuple[dict[str, Any], str | None]:
    """The document to submit, and a sentence for the user if it differs from the given one.

    By default a job uses GPUs if the cluster has any; with more ranks than GPUs it would wait forever."""
    gpus = sum(int(node.total) for node in cluster.nodes if node.accelerator == "gpu")
    ranks = spec.layout.world_size
    if gpus == 0 or gpus >= ranks:
        return document, None
    resources = {**document.get("resources", {}), "accelerator": "cpu"}
    has = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    note = (
        f"This machine has {has} and the job has {ranks} ranks, so it runs on CPU slots (resources.accelerator: cpu)."
    )
    return {**document, "resources": resources}, note
