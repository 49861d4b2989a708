"""A control plane in a process of its own, on a simulated cluster."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.support.simulation.remote_cluster import connected
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.existing_ray import ExistingRay
from manta.service.control.control_plane import ControlPlane
from manta.service.control.options import ControlPlaneOptions

READY = "ready"


class SimulatedControlPlane(ControlPlane):
    """The real one, with another cluster."""

    def __init__(self, home: Path, socket: str, database: str | None = None):
        super().__init__(home, ExistingRay(socket, home), ControlPlaneOptions(database_url=database))
        self._socket = socket

    def _connect(self, namespace: str) -> Cluster:
        return connected(self._socket, self.home)


if __name__ == "__main__":
    SimulatedControlPlane(Path(sys.argv[1]), *sys.argv[2:4]).start()
    print(READY, flush=True)
    while True:
        time.sleep(3600.0)
