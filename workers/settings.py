"""Settings from the environment: torchrun's variables for the engine without the service; Kubernetes' and Slurm's for a
node; which NCCL backend torch uses; where tokens of corpora are kept on a machine; and, in tests, whether to pretend
that there are no GPUs, or that slots are GPUs. No other module of `workers` reads a setting from the environment;
`service/settings.py` reads those of the service."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manta.workers.paths import Paths


@dataclass(frozen=True)
class Launcher:
    """torchrun's variables for each of its processes."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Processes on this machine."""
    host: str
    """Host of the rendezvous store."""
    port: int
    """Port of the rendezvous store."""
    store_is_running: bool
    """Whether the launcher hosts the store, so that rank 0 must not."""


def read_launcher() -> Launcher | None:
    """torchrun's variables, or None when the process was not started by it."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return Launcher(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        host=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=int(os.environ.get("MASTER_PORT", "29500")),
        store_is_running=os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
    )


@dataclass(frozen=True)
class Pod:
    """Kubernetes' variables for a process of a pod."""

    api_host: str
    api_port: int
    """Port of its API, with TLS."""
    node: str
    """Name of the Kubernetes node that the pod runs on (MANTA_NODE_NAME, from the pod's spec.nodeName)."""


def read_pod() -> Pod | None:
    """Kubernetes' variables, or None when the process is in no pod, or does not know its node."""
    host, node = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("MANTA_NODE_NAME")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return Pod(host, int(port), node) if host and node and port.isdigit() else None


def read_token_cache(otherwise: Path | None = None) -> Path:
    """This machine's folder for tokens of corpora (MANTA_TOKEN_CACHE). None: `cache/tokens` in the home.

    `otherwise` replaces the folder in the home."""
    value = os.environ.get("MANTA_TOKEN_CACHE")
    if value:
        return Path(value).expanduser().absolute()
    return otherwise or Paths.of(os.environ.get("MANTA_HOME") or "~/.manta").token_cache


def read_slurm_job_end() -> float | None:
    """When the Slurm job that the process belongs to reaches its time limit, in Unix seconds; None outside of Slurm."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdigit() else None


def read_computes_on_cpu() -> bool:
    """Whether a rank that was given a GPU computes on the CPU (MANTA_COMPUTE_ON_CPU_FOR_TESTS=1). For tests on machines
    without GPUs whose Ray declares some."""
    return os.environ.get("MANTA_COMPUTE_ON_CPU_FOR_TESTS", "") == "1"


def read_visible_gpus() -> str:
    """The GPUs that the process may use, as in CUDA_VISIBLE_DEVICES; empty: none, or all if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def nccl_is_the_second() -> bool:
    """Whether torch uses its second backend for NCCL (TORCH_DIST_USE_NCCL2=1; torch 2.14 and later)."""
    return os.environ.get("TORCH_DIST_USE_NCCL2") == "1"


def read_backend() -> Literal["process_groups"] | None:
    """The backend of ranks on CPU slots: gloo's process groups instead of our links
    (MANTA_PROCESS_GROUPS_FOR_TESTS=1). For tests and benchmarks of the GPU path."""
    return "process_groups" if os.environ.get("MANTA_PROCESS_GROUPS_FOR_TESTS") == "1" else None
