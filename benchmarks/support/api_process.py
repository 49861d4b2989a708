"""The service's REST and dashboard alone, on a database, without a cluster:
`python -m benchmarks.support.api_process HOME URL`. Says `{"port": ...}` once it answers, and runs until it is
ended."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any, cast

import uvicorn

from manta.api.app import create_app
from manta.api.serving.connections import limited_to, max_connections
from manta.api.ui import mount
from manta.service.control.cluster_view import Measurements
from manta.service.control.control_plane import ControlPlane
from manta.service.control.options import NO_MODELS
from manta.service.settings import RequestLimits
from manta.service.store import Store
from manta.workers.data.roots import ANYWHERE

UNLIMITED = RequestLimits(0, 10_000, 10_000, 0)


class Unscheduled:
    """Stands for a control plane: jobs are stored, and nothing becomes of them."""

    def __init__(self, home: Path, url: str):
        self.home, self.store, self.data_roots, self.model_packages = home, Store(url), ANYWHERE, NO_MODELS

    def submitted(self, job_id: str) -> None:
        """Nothing happens: the job stays in the queue."""

    def measurements(self) -> Measurements:
        """Zeros, since there is no control plane."""
        return Measurements(0.0, 0, {})

    def cluster(self) -> dict[str, Any]:
        """There is none."""
        return {"nodes": [], "totals": {}}

    def ready(self) -> list[str]:
        """Always."""
        return []


def main() -> None:
    """Answer until the process is ended."""
    control: Any = Unscheduled(Path(sys.argv[1]), sys.argv[2])
    app = create_app(cast(ControlPlane, control), limits=UNLIMITED)
    mount(app)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    config = uvicorn.Config(
        app, http=limited_to(max_connections()), log_level="warning", access_log=False, timeout_graceful_shutdown=1
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
