"""Further Ray nodes on this machine. Where the machine allows it, each is like a machine of its own: with a network of
its own (a namespace on a bridge, whose cable can be pulled), a shared memory of its own and a name of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from manta.api.cli.service import stop_service
from manta.service.cluster.ray_head import MARK, RayHead
from tests.e2e.manta import SECONDS, Manta
from tests.e2e.network import Network

SLOTS = 2
SHARED_MEMORY_MEGABYTES = 300
# A node's first process: gives itself a name and a shared memory, and becomes what it was told to be.
ENTRY = f'hostname "$0" && mount -t tmpfs -o size={SHARED_MEMORY_MEGABYTES}m tmpfs /dev/shm && exec "$@"'


@contextlib.contextmanager
def service_for_nodes(folder: Path, corpus: Path, environment: Mapping[str, str]) -> Iterator[tuple[Manta, Network]]:
    """A service that further nodes join, and what they are plugged into; in the end none of them is left."""
    network = Network(uuid.uuid4().hex)
    through = {"GLOO_SOCKET_IFNAME": network.bridge} if network.usable else {}  # else gloo goes by the host's name
    made = Manta(folder, corpus, SLOTS, environment={**environment, **through})
    try:
        yield made, network
    finally:
        for node in network.plugged_in:
            node.kill()
        stop_service(made.home)
        network.close()


class Node:
    """A further Ray node with slots of its own. `registered`, then `started` before anything else."""

    def __init__(
        self,
        manta: Manta,
        network: Network,
        gpus: int | None = None,
        more: Mapping[str, str] | None = None,
        gpu_type: str | None = None,
    ):
        """`gpus`: how many Ray is told that it has, None: it looks itself; `gpu_type`: what they are, None: the same;
        `more`: environment of its processes beside this one's."""
        offered = {"manta_slot": SLOTS} | ({f"accelerator_type:{gpu_type}": 1} if gpu_type else {})
        options = {"address": RayHead(manta.home).record().address, "num-cpus": 3, "object-store-memory": 80 * 2**20,
                   "resources": json.dumps(offered)}  # fmt: skip
        options |= {} if gpus is None else {"num-gpus": gpus}
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(manta.paths.ray_token),
                       MARK: manta.paths.tag, "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0",
                       "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}  # fmt: skip
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
        alone: list[str] = []
        self.cable = network.plug_in() if network.usable else None
        if self.cable is not None:
            options["node-ip-address"] = self.cable.address
            namespaces = ["unshare", "--mount", "--uts", "--propagation", "private"]
            alone = ["ip", "netns", "exec", self.cable.namespace, *namespaces, "sh", "-c", ENTRY, self.cable.namespace]
        self._command = [
            *alone,
            *ray,
            "--disable-usage-stats",
            *(f"--{name}={value}" for name, value in options.items()),
        ]
        if gpus is not None and self.cable is not None:
            environment["GLOO_SOCKET_IFNAME"] = self.cable.device  # else gloo goes by the name of the host
        self._environment = {**os.environ, **environment, **(more or {})}
        self._manta, self.id = manta, ""
        network.plugged_in.append(self)
        self._others = {node.id for node in manta.client.cluster().nodes}
        self._start()

    def _start(self) -> None:
        with (self._manta.home / "logs" / "node.log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def registered(self) -> Node:
        """Wait until the cluster has it: Ray cannot start two nodes on one machine at the same time."""
        known = self._others
        (self.id,) = self._manta.until("a further node", lambda: self._ids() - known, 3 * SECONDS)
        return self

    def _ids(self) -> set[str]:
        if self.process.poll() is not None:  # Ray gives a node 30 s to start, which a busy machine may not hold
            self._start()
        return {node.id for node in self._manta.client.cluster().nodes}

    def started(self) -> Node:
        """Wait until it can be placed on."""
        self._manta.until("the node's daemon", self.daemon)
        return self

    def processes(self) -> list[psutil.Process]:
        """All of this node's: Ray, daemon, zygote, agents, trainers."""
        if self.process.poll() is not None:
            return []
        return [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]

    def daemon(self) -> Any:
        """The process of the node's daemon; None before it is up."""
        return next((process for process in self.processes() if _is_daemon(process)), None)

    def kill(self, job: str | None = None, ranks: Any = ()) -> None:
        """kill -9 of everything on the node, as when the power fails; what `ranks` of `job` kept there goes with it."""
        if self.cable is None and job is not None:
            for rank in ranks:
                for file in self._manta.paths.snapshot_folder(job).glob(f"rank-{rank:05d}.*"):
                    file.unlink()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with those before
                process.kill()
        self.process.wait(10)

    def vanish(self, job: str, ranks: Any) -> None:
        """Nobody reaches the node from now on: its cable is pulled or, where there is none, its power is off."""
        if self.cable is not None:
            self.cable.pull()
        else:
            self.kill(job, ranks)

    def reappear(self) -> None:
        """It is there again, and can be placed on."""
        if self.cable is not None:
            self.cable.put_back()
        else:
            self.start_again()

    def start_again(self) -> None:
        """After `kill`, it comes up as a new node, and can be placed on."""
        self._others = {node.id for node in self._manta.client.cluster().nodes}
        self._start()
        self.registered().started()

    def close(self) -> None:
        """Leave nothing of it."""
        self.kill()
        if self.cable is not None:
            self.cable.close()


def _is_daemon(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("ray::NodeDaemon")
    except psutil.NoSuchProcess:
        return False
