"""The configuration of a control plane, beyond its home and its Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manta.service.cluster.cluster import ANY_NODES, NodeOptions
from manta.service.job.context import DEFAULT_MEMORY_SECONDS
from manta.workers.config import JobSpec
from manta.workers.data.roots import ANYWHERE, DataRoots
from manta.workers.spec.problems import Problem
from manta.workers.storage.locations import Location
from manta.workers.system.sockets import is_loopback


@dataclass(frozen=True)
class ModelPackages:
    """The packages that the operator permits."""

    names: tuple[str, ...] = ()
    """Packages such as `my_models`, with everything below it, or `my_models.public`; none: no job may bring its own
    model."""

    def problems(self, spec: JobSpec) -> list[Problem]:
        """The problem of a spec whose model comes from elsewhere. Does not check what is installed."""
        entrypoint = spec.model.entrypoint
        if entrypoint is None or any(self._holds(name, entrypoint) for name in self.names):
            return []
        allowed = ", ".join(self.names) or "none is set"
        rule = f"{entrypoint} is not in a package that jobs may use models from (MANTA_MODEL_PACKAGES: {allowed})"
        return [Problem("model.entrypoint", rule)]

    @staticmethod
    def _holds(name: str, entrypoint: str) -> bool:
        module = entrypoint.partition(":")[0]
        return module == name or module.startswith(f"{name}.")


NO_MODELS = ModelPackages()


@dataclass(frozen=True)
class ControlPlaneOptions:
    """What the operator of a service decides about its jobs; `manta.service.settings` reads most of it."""

    database_url: str | None = None
    """Where the job database is; None: in the home."""
    checkpoints: Location | None = None
    """Where the checkpoints of all jobs are stored; None: in the home."""
    logs: Location | None = None
    """Where the logs of all jobs are stored in addition to the home; None: nowhere."""
    export_roots: Sequence[Path] = ()
    """Folders below which weights may be exported; none: `exports` in the home."""
    data_roots: DataRoots = ANYWHERE
    """Folders below which jobs may read."""
    model_packages: ModelPackages = NO_MODELS
    """Installed packages from which jobs may use models."""
    memory_seconds: float = DEFAULT_MEMORY_SECONDS
    """How long the snapshots of a failed job are kept for a retry."""
    retention_days: float = 0.0
    """How long jobs are kept after their end; 0: until a user deletes them."""
    allow_faults: bool = False
    """Whether faults are injected into jobs on request."""
    traces: str | None = None
    """The collector to which starts and recoveries are sent, as in `Settings.traces`; None: they are not sent."""
    nodes: NodeOptions = ANY_NODES
    """Settings for all nodes."""


DEFAULTS = ControlPlaneOptions()


def roots_of(folders: tuple[Path, ...] | None, host: str) -> DataRoots:
    """`folders` as configured. If they are not: everything for a service that listens on loopback, nothing for one that
    listens elsewhere (`host`)."""
    return DataRoots(folders if folders is not None or is_loopback(host) else ())
