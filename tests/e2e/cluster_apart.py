"""A Ray cluster of machines of their own (`machines.py`), and a service beside it on one more."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import site
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from manta.api.client import Client
from manta.workers.paths import Paths
from tests.e2e.machines import Machine
from tests.e2e.manta import LONG_HOLD_SECONDS, SECONDS, Manta
from tests.e2e.network import Network
from tests.e2e.other_ray import RayMismatch
from tests.e2e.redis_server import RedisServer

SLOTS = 2
CORPUS = "/home/data/words.txt"
"""Where the nodes, and nobody else, have their corpus."""
PORT = 8400
MANTA_PORTS, RAY_WORKER_PORTS = "20000-20199", "10002-10999"
RAY_SERVERS = ("node-manager", "object-manager", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
RAY_SERVER_PORTS = {f"{server}-port": 6380 + number for number, server in enumerate(RAY_SERVERS)}
OPEN = ("6379-6384", RAY_WORKER_PORTS, MANTA_PORTS)
"""What docs/deploy/ray.md has opened between the machines of a cluster; on the control plane's the last is enough."""
RAY_PORT = 6379
OBJECT_STORE_BYTES = 80 * 2**20
UNTIL_IT_RUNS = ("sh", "-c", 'until "$0" "$@"; do sleep 1; done')
"""As whoever looks after a cluster would: Ray gives up after half a minute, which is little on a busy machine."""
HEAD_RUNS = "Ray runtime started"
START_RAY = "from ray.scripts.scripts import main; main()"


class ApartCluster:
    """A head without room for ranks, and nodes with room for some."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        corpus: Path,
        nodes: int,
        without: Sequence[Path] = (),
        ray: RayMismatch | None = None,
    ):
        """`without`: what of the installation the nodes do not have; `ray`: the one of all machines, None: ours."""
        self.ray = ray
        self._token = secrets.token_hex(32)
        self.head = Machine(network, "head", folder, other=ray)
        self.nodes = [Machine(network, f"node{number}", folder, without, ray) for number in range(nodes)]
        for node in self.nodes:
            file = node.path(CORPUS)
            file.parent.mkdir()
            shutil.copy(corpus, file)
        self.environment: dict[str, str] = {}
        """Of all nodes, such as what they need to reach an object store."""
        self.redis: RedisServer | None = None
        """Where the head keeps what it knows; None: nowhere."""

    @property
    def address(self) -> str:
        """Of its control store."""
        return f"{self.head.address}:{RAY_PORT}"

    @property
    def token(self) -> dict[str, str]:
        """What a process needs to be let in."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}

    def start(self) -> None:
        """All of it; the nodes once the head is complete, which they would take the cores from."""
        self.start_head()
        deadline = time.monotonic() + 2 * SECONDS
        while HEAD_RUNS not in self.head.output.read_text():
            assert time.monotonic() < deadline, self.head.output.read_text()
            time.sleep(0.1)
        for node in self.nodes:
            self.start_node(node)

    def start_head(self) -> None:
        """The head, once it listens."""
        kept, redis = [], {}
        if self.redis is not None:
            kept = [f"--redis-password={self.redis.password}"]
            redis = {"RAY_REDIS_ADDRESS": f"{self.redis.host}:{self.redis.port}"}
        options = ("--head", f"--port={RAY_PORT}", "--include-dashboard=false", "--num-cpus=0", *kept)
        self._ray(self.head, *options, **redis)
        deadline = time.monotonic() + SECONDS
        while not _listens(self.head.address, RAY_PORT):
            assert time.monotonic() < deadline, "Ray's head did not start"
            time.sleep(0.05)

    def start_node(self, node: Machine) -> None:
        """Have a node join."""
        slots = json.dumps({"manta_slot": SLOTS})
        self._ray(node, f"--address={self.address}", f"--num-cpus={SLOTS + 1}", f"--resources={slots}")

    def _ray(self, machine: Machine, *options: str, **more: str) -> None:
        memory = f"--object-store-memory={OBJECT_STORE_BYTES}"
        ours = ("start", "--block", "--disable-usage-stats", f"--node-ip-address={machine.address}", memory)
        first, last = RAY_WORKER_PORTS.split("-")
        fixed = {**RAY_SERVER_PORTS, "min-worker-port": first, "max-worker-port": last}
        options = (*options, *(f"--{name}={port}" for name, port in fixed.items()))
        machine.let_in(OPEN)
        environment = {**self.token, **self.environment, **more, "RAY_memory_monitor_refresh_ms": "0"}
        machine.start(*UNTIL_IT_RUNS, *machine.python("-c", START_RAY), *ours, *options, **environment)

    def node_of(self, pid: int) -> Machine:
        """The machine on which a process runs."""
        return next(node for node in self.nodes if pid in {process.pid for process in node.processes()})

    def an_agent_on(self, node: Machine) -> psutil.Process:
        """The process of some rank's agent."""
        return next(each for each in node.processes() if each.name().startswith("ray::Agent"))

    def close(self) -> None:
        """Leave nothing of it."""
        for machine in (*self.nodes, self.head):
            machine.close()


class ApartService(Manta):
    """A service on a machine of its own, without torch, that uses such a cluster."""

    def __init__(self, network: Network, folder: Path, cluster: ApartCluster, environment: Mapping[str, str]):
        """`environment`: of the service, beside what lets it into Ray."""
        torch = [Path(each) / "torch" for each in site.getsitepackages()]
        self.machine = Machine(network, "control", folder, [each for each in torch if each.is_dir()], cluster.ray)
        self.cluster = cluster
        self._environment = {**environment, **cluster.token, "MANTA_NO_DASHBOARD": "1", "MANTA_PORTS": MANTA_PORTS}
        self.machine.let_in((str(PORT), MANTA_PORTS))
        self.home = self.machine.path(f"{self.machine.home}/.manta")
        self.paths, self._corpus = Paths.of(self.home), Path(CORPUS)
        self.log = folder / "service.log"
        made = self.machine.run(
            *self.machine.python("-m", "manta.api.cli", "keys", "create", "--admin"), **self._environment
        )
        assert made.returncode == 0, made.stderr
        self._key = made.stdout.strip()
        self.client = Client(f"http://{self.machine.address}:{PORT}", key=self._key)
        self.start()

    @property
    def key(self) -> str:
        """An administrator's."""
        return self._key

    def start(self) -> None:
        """`manta serve`, until it answers; again where it gives up, as whoever looks after it would: on a busy machine
        Ray may not answer in time."""
        self.serve()

        def answers() -> bool:
            if self.process.poll() is not None:
                self.serve()
            return self.answers()

        self.until("the service", answers, 3 * SECONDS)

    def serve(self, **environment: str) -> None:
        """`manta serve`."""
        options = ("--host", self.machine.address, "--port", str(PORT), "--ray", self.cluster.address)
        command = self.machine.python("-m", "manta.api.cli", "serve", *options, "--tls-terminated", "--allow-faults")
        self.process = self.machine.start(*command, log=self.log, **{**self._environment, **environment})

    def doctor(self) -> str:
        """What `manta doctor` says on the machine of the service."""
        asking = {"MANTA_URL": str(self.client.url), "MANTA_API_KEY": self._key}
        command = self.machine.python("-m", "manta.api.cli", "doctor")
        return self.machine.run(*command, seconds=2 * SECONDS, **self._environment, **asking).stdout

    def kill_service(self, with_signal: int = signal.SIGKILL) -> None:
        """Send the service's process this signal, and nobody else; return when it has ended."""
        self.process.send_signal(with_signal)
        self.process.wait(30)

    def lose_all_in_turn(self, job: str) -> None:
        """Kill a rank, an agent and the control plane of a job of four ranks or more, and a node, each once what was
        before is recovered from, and look at what that costs; the job ends, and the node comes back."""
        self.hold(job, 0, step=5, seconds=LONG_HOLD_SECONDS)
        psutil.Process(self.pids(job)[3]).kill()
        (first,) = self.until("the recovery", lambda: self.events(job, "recovered"))
        assert first.data["steps_redone"] <= 1
        self.cluster.an_agent_on(self.cluster.node_of(self.pids(job)[2])).kill()
        self.until("the second recovery", lambda: len(self.events(job, "recovered")) == 2)
        self.kill_service()
        self.start()
        lost = self.cluster.node_of(self.pids(job)[2])
        lost.power_off()
        *_, third = self.until("the third recovery", lambda: self.events(job, "recovered")[2:])
        assert third.data["steps_redone"] <= 2, "what the node had came from another node's memory"
        self.release_job(job, 0)  # it still has the process that it had
        self.until_state(job, "SUCCEEDED")
        sources = {event.data["source"] for event in self.events(job, "recovered")}
        assert not sources & {"start", "checkpoint"}, (sources, self.story(job))
        self.cluster.start_node(lost)

    def until_nodes(self, count: int, exactly: bool = False) -> None:
        """Wait until jobs can be placed on so many nodes, or on more unless `exactly`."""

        def enough() -> bool:
            usable = self._usable()
            return usable == count if exactly else usable >= count

        self.until(f"{count} nodes", enough, 2 * SECONDS)

    def _usable(self) -> int:
        return sum(1 for node in self.client.cluster().nodes if node.free)

    def close(self) -> None:
        """Leave nothing of it."""
        self.client.close()
        self.machine.close()


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True
