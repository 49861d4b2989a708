"""The part of the control plane that the API uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from manta.service.control.options import ModelPackages
from manta.service.control.running_ranks import ObservedWaits, RankStack
from manta.service.exports import Exports
from manta.service.logs.pages import JobLogs
from manta.service.monitoring.cluster_view import Measurements
from manta.service.removal.deletion import Deletion
from manta.service.store import Checkpoint, Store
from manta.workers.config import JobSpec
from manta.workers.data.roots import DataRoots
from manta.workers.protocol.messages import Fault


class ControlPlane(Protocol):
    """The control plane as the API sees it. Its methods are called from worker threads and must not block for long."""

    @property
    def store(self) -> Store:
        """The job database."""

    @property
    def home(self) -> Path:
        """Folder of the embedded state."""

    @property
    def logs(self) -> JobLogs:
        """The output of the ranks of all jobs."""

    @property
    def data_roots(self) -> DataRoots:
        """The folders below which jobs may read."""

    @property
    def model_packages(self) -> ModelPackages:
        """The packages that jobs may take models from."""

    @property
    def exports(self) -> Exports:
        """Exports of weights."""

    def submitted(self, job_id: str) -> None:
        """A job was stored in state QUEUED, or its place in the queue may have changed: wake the scheduler."""

    def cancel(self, job_id: str) -> None:
        """A job was moved to CANCELLED or CANCELLING: wake its owner."""

    def pause(self, job_id: str) -> None:
        """A job was moved to PAUSED or PAUSING: wake its owner."""

    def delete(self, job_id: str) -> Deletion:
        """Delete a final job and everything that belongs to it. Raises JobNotFound, JobNotFinal, FilesNotRemoved,
        ClusterUnavailable."""

    def delete_checkpoint(self, job_id: str, checkpoint_id: str, force: bool) -> Checkpoint:
        """Delete a checkpoint and its files. Raises JobNotFound, CheckpointNotFound, CheckpointNeeded,
        CheckpointNotRemoved."""

    def inject(self, job_id: str, fault: Fault) -> None:
        """Inject a fault into a job. Raises JobNotFound, FaultsNotAllowed, FaultNotPossible, SpecNotUnderstood,
        ClusterUnavailable."""

    def waits(self, job_id: str) -> ObservedWaits:
        """Which ranks of a running job wait for which others. Raises JobNotFound, NoRanks, SpecNotUnderstood,
        ClusterUnavailable."""

    def stack(self, job_id: str, rank: int) -> RankStack:
        """The current stack of a rank's trainer. Raises JobNotFound, NoRanks, RankNotFound, RankTimeout,
        ClusterUnavailable."""

    def resize(self, job_id: str) -> None:
        """A job's size was changed: wake its owner."""

    def trace(self, job_id: str) -> None:
        """A trace of a job was requested: wake its owner."""

    def drain(self, node: str, seconds: float) -> dict[str, Any]:
        """Have all jobs leave a node; returns the node, in the form of `manta.api.schemas.Node`. Raises NodeNotFound,
        NodeUnreachable."""

    def undrain(self, node: str) -> dict[str, Any]:
        """Use a node again; returns it, in the form of `manta.api.schemas.Node`. Raises NodeNotFound, NodeUnreachable,
        NodeLeaving."""

    def cluster(self) -> dict[str, Any]:
        """The cluster, in the form of `manta.api.schemas.Cluster`."""

    def check_cluster(self) -> dict[str, Any]:
        """Problems between the nodes, in the form of `manta.api.schemas.ClusterCheck`. May take half a minute."""

    def problem_of_data(self, spec: JobSpec) -> str | None:
        """Why a job's data cannot be trained on; None if it can, or no node reports. Raises ClusterUnavailable."""

    def measurements(self) -> Measurements:
        """Measurements of this control plane and of the nodes. Raises ClusterUnavailable."""

    def ready(self) -> list[str]:
        """Why the service cannot run jobs at present, one sentence per reason; empty if it can."""
