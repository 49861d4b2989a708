"""A Ray cluster that others operate: it is used, never started or stopped. Ray accepts a process only where one of its
raylets runs, so the control plane's machine gets one without resources if it has none."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from manta.service.cluster.processes import children_named, end_all, session_leader
from manta.service.cluster.ray_head import (
    IMPORTED_FROM,
    NAMESPACE,
    RayUnavailable,
    answers,
    connect,
    start_command,
    start_ray,
)
from manta.service.cluster.ray_private import RAYLET, RECONNECT_SECONDS, Raylet, outlives_head, raylets
from manta.workers.paths import Paths
from manta.workers.system.processes import ends_of
from manta.workers.system.sockets import PortRange, address_facing, host_and_port, split_address

log = logging.getLogger(__name__)

HEAD_RECONNECT_SECONDS = "600"
"""How long this process, and a raylet that it starts, wait for a missing head. Ray's default of 60 s is shorter than
the time that a pod may take to come back; a head that has lost its state ends them at once."""
HEAD_IS_PERSISTENT = "Ray's head stores its state externally: jobs keep training while it is restarted"
HEAD_NOT_PERSISTENT = (
    "Ray's head stores its state in memory: when it is lost, all jobs continue from their newest checkpoints; "
    "with an external Redis they would keep training (docs/deploy/ray.md)"
)
MARK = "MANTA_RAYLET"
"""Environment variable of such a raylet's processes; its value is the tag of the home. It differs from that of a head
of the same home, in which jobs may run."""
START_SECONDS, POLL_SECONDS = 60.0, 0.2
TRIES = 3
"""Ray gives up after half a minute; a busy machine, or a head that has just come back, may need longer."""
SERVERS = (
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""The least that Ray accepts: nothing is stored there."""


class ExistingRay:
    """The cluster whose control store is at an address."""

    def __init__(
        self,
        address: str,
        home: str | Path,
        ship_code: bool = False,
        wait_for_ray: bool = False,
        ports: PortRange | None = None,
    ):
        """`address`: host:port; `home`: of the service; `ship_code`: give the nodes our own code, instead of using what
        is installed there; `wait_for_ray`: wait for a cluster that does not answer, since it did a moment ago; `ports`:
        on which a raylet that is started here listens, None: any."""
        self._address, self._paths, self._ship_code = address, Paths.of(home), ship_code
        self._waits_for_ray, self._ports = wait_for_ray, ports

    def connect(self, namespace: str = NAMESPACE) -> Any:
        """Connect this process to the cluster and return the ray module; `namespace`: of all names there. If no raylet
        of it runs on this machine, one without resources is started. Raises RayUnavailable."""
        if self._waits_for_ray:
            self._wait_for_answer()
        if not answers(self._address):
            raise RayUnavailable(f"No Ray answers at {self._address}; check --ray and that the cluster is up.")
        os.environ.setdefault(RECONNECT_SECONDS, HEAD_RECONNECT_SECONDS)
        ensure_raylet(self._address, self._paths, self._ports)
        problem = self.problem_of_head()
        log.log(logging.INFO if problem is None else logging.WARNING, problem or HEAD_IS_PERSISTENT)
        return connect(self._address, namespace, self._runtime_environment())

    async def until_gone(self) -> str:
        """Return once the raylet that was started here has ended, and say so; never if others started it."""
        return await until_raylet_ends(self._paths)

    def problem_of_head(self) -> str | None:
        """A sentence about what would be lost with the head; None: nothing, since its state is stored elsewhere."""
        try:
            return None if outlives_head(self._address) else HEAD_NOT_PERSISTENT
        except Exception as error:  # noqa: BLE001 - Ray raises its own errors, RuntimeError and what gRPC has
            return f"Ray does not report where its head stores its state: {' '.join(str(error).split())}"

    def _wait_for_answer(self) -> None:
        if not answers(self._address):
            log.warning("waiting for Ray, which does not respond, at %s", self._address)
        while not answers(self._address):
            threading.Event().wait(POLL_SECONDS)

    def _runtime_environment(self) -> dict[str, Any] | None:
        if not self._ship_code:
            return None
        return {"py_modules": [str(IMPORTED_FROM / "manta")], "excludes": ["**/__pycache__", "/api", "/service"]}


def ensure_raylet(address: str, paths: Paths, ports: PortRange | None) -> None:
    """Ensure that a raylet of the Ray at `address` runs on this machine: the existing one, or a new one, which outlives
    this process (`end_raylet`); it and its processes, including this one, listen on `ports`. Raises RayUnavailable."""
    if any(listens for _, listens in _here(address)):
        return
    log.info("starting a raylet without resources for the Ray at %s, since none runs on this machine", address)
    paths.ray_log.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(TRIES):
        end_raylet(paths)  # one of a head that is gone, or one that did not start
        _remove_sockets(address)
        process = _spawn(address, paths, ports)
        if _until(lambda: _is_settled(address), process):
            return
        process.terminate()
    raise RayUnavailable(f"A raylet that joins the Ray at {address} did not start; its log is {paths.ray_log}.")


def own_raylet(paths: Paths) -> int | None:
    """First process of the raylet that a service of this home has started; None if none runs."""
    return session_leader((MARK, paths.tag), ("start",))


async def until_raylet_ends(paths: Paths) -> str:
    """Return once the raylet that a service of this home has started has ended, and say so; never if there is none.
    `ray start --block` stays when its raylet ends without an error."""
    leader = own_raylet(paths)
    if leader is None:
        return await asyncio.Future()
    async with ends_of((leader, *children_named(leader, (RAYLET,)).values())) as ends:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    return "the raylet that was started here has ended"


def end_raylet(paths: Paths) -> None:
    """Kill that raylet; no rank is on it."""
    end_all((MARK, paths.tag), None)


def _here(address: str) -> list[tuple[Raylet, bool]]:
    """The raylets that Ray knows on this machine, and whether each lives and listens."""
    own = _own_addresses()
    known = [raylet for raylet in _raylets(address) if raylet.host in own]
    return [(raylet, raylet.alive and answers(host_and_port(raylet.host, raylet.port))) for raylet in known]


def _is_settled(address: str) -> bool:
    """Whether one runs here and none that has ended is still listed as living, which Ray might make this process
    use."""
    living = [listens for raylet, listens in _here(address) if raylet.alive]
    return bool(living) and all(living)


def _remove_sockets(address: str) -> None:
    """Remove the sockets that raylets which ended here have left."""
    for raylet, listens in _here(address):
        for path in () if listens else raylet.sockets:
            Path(path).unlink(missing_ok=True)


def _raylets(address: str) -> list[Raylet]:
    try:
        return raylets(address)
    except Exception as error:  # Ray raises its own errors, RuntimeError and what gRPC has
        raise RayUnavailable(f"Ray at {address} refused the connection: {' '.join(str(error).split())}") from error


def _own_addresses() -> set[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = psutil.net_if_addrs().values()
    return {entry.address for entries in interfaces for entry in entries if entry.family in families}


def _spawn(address: str, paths: Paths, ports: PortRange | None) -> subprocess.Popen[bytes]:
    options = {
        "address": address,
        "node-ip-address": address_facing(split_address(address)[0]),
        "num-cpus": "0",
        "num-gpus": "0",
        "object-store-memory": str(OBJECT_STORE_BYTES),
    }
    if ports is not None:
        options |= _listening_on(ports)
    return start_ray(start_command(options), {MARK: paths.tag}, paths.ray_log)


def _listening_on(ports: PortRange) -> dict[str, str]:
    """Ray's options: a port for each of its servers, and the others for the processes that use it."""
    first = [str(ports.first + number) for number in range(len(SERVERS))]
    workers = {"min-worker-port": str(ports.first + len(SERVERS)), "max-worker-port": str(ports.last)}
    return dict(zip(SERVERS, first, strict=True)) | workers


def _until(there: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if there():
            return True
        try:
            process.wait(POLL_SECONDS)
            return False
        except subprocess.TimeoutExpired:
            continue
    return False
