"""A raylet without resources on the control plane's machine: Ray accepts a process only where one of its raylets
runs."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from service.cluster.processes import children_named, end_all, session_leader
from service.cluster.ray_head import RayUnavailable, answers
from service.cluster.ray_private import RAYLET, START_COMMAND, Raylet, raylets
from service.settings import without_secrets
from workers.paths import Paths
from workers.system.ports import PortRange, address_towards
from workers.system.processes import ends_of

log = logging.getLogger(__name__)

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


def ensure_raylet(address: str, paths: Paths, ports: PortRange | None) -> None:
    """Ensure that a raylet of the Ray at `address` runs on this machine: the existing one, or a new one, which outlives
    this process (`end_raylet`); it and its processes, including this one, listen on `ports`. Raises RayUnavailable."""
    if any(listens for _, listens in _here(address)):
        return
    log.info("no raylet of the Ray at %s runs on this machine: one without resources is started", address)
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
    return [(raylet, raylet.alive and answers(f"{raylet.host}:{raylet.port}")) for raylet in known]


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
        "node-ip-address": address_towards(address.rpartition(":")[0]),
        "num-cpus": "0",
        "num-gpus": "0",
        "object-store-memory": str(OBJECT_STORE_BYTES),
    }
    if ports is not None:
        options |= _listening_on(ports)
    command = [sys.executable, "-c", START_COMMAND, "start", "--block", "--disable-usage-stats"]
    with paths.ray_log.open("ab") as output:
        return subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={**without_secrets(os.environ), MARK: paths.tag, "RAY_USAGE_STATS_ENABLED": "0"},
            start_new_session=True,
        )


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
