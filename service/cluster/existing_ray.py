"""A Ray cluster that others operate: it is used, never started or stopped."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

from service.cluster.own_raylet import ensure_raylet, until_raylet_ends
from service.cluster.ray_head import NAMESPACE, ROOT, RayUnavailable, answers, connect
from service.cluster.ray_private import RECONNECT_SECONDS, outlives_head
from workers.paths import Paths
from workers.system.ports import PortRange

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
HEAD_AWAY_SECONDS = "600"
"""How long this process, and a raylet that it starts, wait for a missing head. Ray's default of 60 s is shorter than
the time that a pod may take to come back; a head that has lost its state ends them at once."""
HEAD_REMEMBERS = "Ray's head keeps what it knows in a store of its own: jobs keep training while it is restarted"
HEAD_FORGETS = (
    "Ray's head keeps what it knows in its memory: when it is lost, all jobs continue from their newest checkpoints; "
    "with an external Redis they would train on meanwhile (docs/deploy/ray.md)"
)


class ExistingRay:
    """The cluster whose control store is at an address."""

    def __init__(
        self,
        address: str,
        home: str | Path,
        ship_code: bool = False,
        patient: bool = False,
        ports: PortRange | None = None,
    ):
        """`address`: host:port; `home`: of the service; `ship_code`: give the nodes our own code, instead of using what
        is installed there; `patient`: wait for a cluster that does not answer, since it did a moment ago; `ports`: on
        which a raylet that is started here listens, None: any."""
        self._address, self._paths, self._ship_code = address, Paths.of(home), ship_code
        self._patient, self._ports = patient, ports

    def connect(self, namespace: str = NAMESPACE) -> Any:
        """Connect this process to the cluster and return the ray module; `namespace`: of all names there. If no raylet
        of it runs on this machine, one without resources is started. Raises RayUnavailable."""
        if self._patient:
            self._wait_for_answer()
        if not answers(self._address):
            raise RayUnavailable(f"No Ray answers at {self._address}; check --ray and that the cluster is up.")
        os.environ.setdefault(RECONNECT_SECONDS, HEAD_AWAY_SECONDS)
        ensure_raylet(self._address, self._paths, self._ports)
        problem = self.problem_of_head()
        log.log(logging.INFO if problem is None else logging.WARNING, problem or HEAD_REMEMBERS)
        return connect(self._address, namespace, self._runtime_environment())

    async def until_gone(self) -> str:
        """Return once the raylet that was started here has ended, and say so; never if others started it."""
        return await until_raylet_ends(self._paths)

    def problem_of_head(self) -> str | None:
        """A sentence about what would be lost with the head; None: nothing, since its state is stored elsewhere."""
        try:
            return None if outlives_head(self._address) else HEAD_FORGETS
        except Exception as error:  # noqa: BLE001 - Ray raises its own errors, RuntimeError and what gRPC has
            return f"Ray does not say where its head keeps what it knows: {' '.join(str(error).split())}"

    def _wait_for_answer(self) -> None:
        if not answers(self._address):
            log.warning("Ray does not answer at %s: it is waited for", self._address)
        while not answers(self._address):
            threading.Event().wait(LOOK_SECONDS)

    def _runtime_environment(self) -> dict[str, Any] | None:
        if not self._ship_code:
            return None
        return {"py_modules": [str(ROOT / "workers")], "excludes": ["**/__pycache__"]}
