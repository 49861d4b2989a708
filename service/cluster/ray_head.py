"""Manta's own Ray: a head that is started as separate processes, outlives this process, and is reconnected to.

Nothing here imports ray before its token is in the environment: Ray reads RAY_AUTH_* when it is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from manta.service.cluster.processes import (
    children_named,
    end_all,
    freeze_all,
    same_process,
    session_leader,
    start_of,
    started_in,
)
from manta.service.cluster.ray_private import (
    HEAD_PROCESSES,
    MEMORY_MONITOR_MILLISECONDS,
    NO_AUTOSCALER,
    START_COMMAND,
    STARTUP_CONCURRENCY,
    address_file,
    sockets_of,
)
from manta.service.own_files import OwnFileUnusable, read_own, write_private, writing_in
from manta.service.settings import without_secrets
from manta.workers.errors import MantaError
from manta.workers.paths import Paths
from manta.workers.system.processes import ends_of
from manta.workers.system.sockets import split_address

log = logging.getLogger(__name__)

NAMESPACE = "manta"
"""Namespace of programs that do not belong to an installation; each installation has its own."""
SLOT = "manta_slot"
DEFAULT_SLOTS = 16
WARM_WORKERS = 8
"""Ray workers that wait for agents: with them eight agents start in half a second instead of two."""
OBJECT_STORE_BYTES = 100 * 1024 * 1024
"""We send no tensors through Ray, and its object store shares /dev/shm with the snapshots."""
START_SECONDS, ANSWER_SECONDS = 60.0, 2.0
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of HTTP/2 sends first: the preface, and settings without any (RFC 9113, section 3.4)."""
POLL_SECONDS = 1.0
"""How often to check that the sockets of a head are still there."""
UNRESPONSIVE_SECONDS = 60.0
"""How long a living head that does not answer is waited for; after that it is replaced, as if it were dead."""
MARK = "MANTA_RAY_HEAD"
"""Environment variable of all processes of a head; its value is the tag of the home."""
_FOR_ANY_RAY = ("RAY_OVERRIDE_RESOURCES",)
"""Ray's settings that a head of our own follows: what a machine is said to have, for tests."""
_NOT_FOR_RAY = ("PYTHONOPTIMIZE", "PYTHONINSPECT")
"""Python's settings without which Ray runs: it needs its docstrings, and exit codes as they are."""
IMPORTED_FROM = Path(__file__).parents[3]
"""Folder from which Python imports `manta`."""


class RayUnavailable(MantaError):
    """Ray did not start, or does not answer; the message says where its log is."""


@dataclass(frozen=True)
class HeadRecord:
    """Identifies our Ray head, as stored in the home."""

    address: str
    """host:port of Ray's control store."""
    pid: int
    """Process id of the head's first process."""
    started: str | float
    """When that process started, in the form for `same_process`: a pid alone may belong to another process by now."""
    session: str
    """Ray's session folder, with its logs."""
    token: str = field(default="", repr=False, compare=False)
    """What it lets processes in by, in case its file is removed; empty: not known."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> HeadRecord:
        """From its JSON, also of an earlier release. Raises KeyError, ValueError, TypeError if it is damaged."""
        pid = int(document["pid"])
        session, token = str(document["session"]), str(document.get("token", ""))
        return cls(str(document["address"]), pid, started_in(document), session, token)


class RayHead:
    """The Ray head of the service whose state is in `home`."""

    def __init__(self, home: str | Path, slots: int | None = None):
        """`slots`: number of CPU ranks that fit, also next to GPUs, where jobs with `resources.accelerator: cpu` use
        them."""
        self._paths = Paths.of(home)
        self._slots = DEFAULT_SLOTS if slots is None else slots
        self._token = ""
        """Of the head that this process is connected to."""
        self._warm = min(max(self._slots, count_gpus()), WARM_WORKERS) + 1  # one more for the node's daemon

    def exists(self) -> bool:
        """Whether this home has a head of its own: one that runs, is starting, or has left its record."""
        return self._paths.ray_record.exists() or self._leader() is not None

    def record(self) -> HeadRecord | None:
        """The record of a living head, or None. A head whose record is lost or damaged is found by its mark."""
        return self._recorded() or self._running_head()

    def _recorded(self) -> HeadRecord | None:
        """The living head of which the record tells."""
        try:
            record = HeadRecord.of(json.loads(read_own(self._paths.ray_record) or ""))
        except (OwnFileUnusable, KeyError, ValueError, TypeError):
            return None
        return record if same_process(record.pid, record.started) else None

    def _leader(self) -> int | None:
        """The first process of a head of this home, whatever its record says."""
        return session_leader((MARK, self._paths.tag), ("start", "--head"))

    def _running_head(self) -> HeadRecord | None:
        leader = self._leader()
        try:
            if leader is not None and (address := address_file(self._paths.ray_folder).read_text().strip()):
                return HeadRecord(address, leader, start_of(leader), self._session())
        except OSError:  # it has not started yet, or is ending
            pass
        return None

    def _session(self) -> str:
        return str((self._paths.ray_folder / "session_latest").resolve())

    def ensure(self) -> HeadRecord:
        """The living head if ranks can be placed by it; otherwise a new one, also if nobody knows its token any more,
        since jobs continue from shared memory. A head that does not answer is waited for first. Raises RayUnavailable,
        HomeUnusable."""
        record = self.record()
        if record is None:
            return self.start()
        problem, deadline = self.problem_of(record), time.monotonic() + UNRESPONSIVE_SECONDS
        while problem is None and (silent := _unresponsive_process(record.pid)) is not None:
            problem = self.problem_of(record)
            if problem is None and time.monotonic() > deadline:
                problem = f"its {silent} has not answered for {UNRESPONSIVE_SECONDS:g} s"
        if problem is None and not self._has_token(record):
            problem = f"its token is gone ({self._paths.ray_token})"
        if problem is None:
            if self._recorded() is None:  # whoever started it was interrupted, or the record was removed
                self._write(record)
            return record
        log.error("Ray (process %d) is replaced: %s", record.pid, problem)
        return self.start()

    def problem_of(self, record: HeadRecord) -> str | None:
        """Why nothing can be placed by a head; None if nothing is known against it."""
        if not same_process(record.pid, record.started):
            return "it has ended"
        running = children_named(record.pid, HEAD_PROCESSES)
        ended = [name for name in HEAD_PROCESSES if name not in running]
        return f"its {ended[0]} has ended" if ended else _problem_of_sockets(record)

    async def until_gone(self) -> str:
        """Return once nothing can be placed by the head any more, and why."""
        record = self.record()
        if record is None:
            return "it has ended"
        processes = (record.pid, *children_named(record.pid, HEAD_PROCESSES).values())
        async with ends_of(processes) as ends:
            problem = self.problem_of(record)
            while problem is None:
                ended, _ = await asyncio.wait(ends, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                problem = self.problem_of(record) if ended else _problem_of_sockets(record)
        return problem

    def start(self) -> HeadRecord:
        """Start a new head, and end an earlier one of this home. Takes about 3 s. Raises RayUnavailable,
        HomeUnusable."""
        self.stop()
        self._prepare()
        process = self._spawn()
        address = self._wait_for_address(process)
        token = self._stored_token()
        record = HeadRecord(address, process.pid, start_of(process.pid), self._session(), token)
        self._write(record)
        return record

    def _write(self, record: HeadRecord) -> None:
        known = replace(record, token=record.token or self._token)
        write_private(self._paths.home, self._paths.ray_record, json.dumps(asdict(known)))

    def connect(self, namespace: str = NAMESPACE) -> Any:
        """Connect this process to the head, which `ensure` started, and return the ray module. `namespace`: of all
        names there, which are not visible from other namespaces. Nothing may have imported ray in this process before,
        since it would not know the token. Raises RayUnavailable if there is no head or it does not answer."""
        record = self.record()
        if record is None:
            raise RayUnavailable(f"There is no Ray of this service; its log is {self._paths.ray_log}.")
        for name in os.environ.keys() - of_our_own_ray(os.environ).keys():
            del os.environ[name]
        os.environ.update(self._authentication())
        self._token = self._stored_token()
        return connect(record.address, namespace)

    def restore_token(self) -> None:
        """Write the file of the token again if it is not the one by which this process was let in: whatever Ray starts
        reads it. Raises HomeUnusable."""
        if self._token and self._stored_token() != self._token:
            write_private(self._paths.home, self._paths.ray_token, self._token)

    def _has_token(self, record: HeadRecord) -> bool:
        """Whether the token of a head is known; its file is written again if it is not the recorded one."""
        self._token = record.token or self._stored_token()
        self.restore_token()
        return bool(self._token)

    def _stored_token(self) -> str:
        try:
            return (read_own(self._paths.ray_token) or "").strip()
        except OwnFileUnusable:
            return ""

    def stop(self) -> None:
        """Kill all processes of this home's head and no others, and remove Ray's temporary files. SIGKILL is used,
        since Ray keeps nothing that is worth a slow end; snapshots in shared memory stay."""
        record = self.record()
        end_all((MARK, self._paths.tag), record.pid if record is not None else None)
        with contextlib.suppress(OSError):  # a process that is gone must not be taken for a head
            self._paths.ray_record.unlink(missing_ok=True)
        shutil.rmtree(self._paths.ray_folder, ignore_errors=True)
        self._paths.remove_empty_runtime_folder()

    def freeze_ranks(self) -> None:
        """Let no rank of this home train on, so that the service can store what they have reported before it ends."""
        freeze_all((MARK, self._paths.tag), "manta.workers.zygote")

    def _prepare(self) -> None:
        with writing_in(self._paths.home):
            self._paths.home.mkdir(parents=True, exist_ok=True)
            self._paths.ray_log.parent.mkdir(parents=True, exist_ok=True)
        self._paths.make_runtime_folder()
        if not self._stored_token():
            write_private(self._paths.home, self._paths.ray_token, secrets.token_hex(32))

    def _authentication(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._paths.ray_token)}

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = {
            **self._authentication(),
            MARK: self._paths.tag,
            # The agents' modules, if the distribution is not installed.
            "PYTHONPATH": os.pathsep.join(filter(None, (str(IMPORTED_FROM), os.environ.get("PYTHONPATH")))),
            STARTUP_CONCURRENCY: str(self._warm),  # otherwise as many at once as there are cores
            MEMORY_MONITOR_MILLISECONDS: "0",  # memory belongs to the trainers: kill those, not their agents
        }
        return start_ray(self._command(), environment, self._paths.ray_log, of_our_own_ray(os.environ))

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "dashboard-agent-listen-port": "0",
            "include-dashboard": "false",
            "include-log-monitor": "false",
            # Agents take no CPU; this is how many workers Ray starts before they are needed.
            "num-cpus": str(self._warm),
            "object-store-memory": str(OBJECT_STORE_BYTES),
            "temp-dir": str(self._paths.ray_folder),
            "resources": json.dumps({SLOT: self._slots}),
        }
        return start_command(options, "--head", NO_AUTOSCALER)

    def _wait_for_address(self, process: subprocess.Popen[bytes]) -> str:
        """The head's actual address, which Ray writes into its folder once it runs."""
        file = address_file(self._paths.ray_folder)
        deadline = time.monotonic() + START_SECONDS
        while True:
            if file.exists() and (address := file.read_text().strip()):
                return address
            try:
                process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline:
                    continue
            self.stop()
            process.kill()
            process.wait()
            raise RayUnavailable(f"Ray did not start; its log is {self._paths.ray_log}.")


def start_command(options: Mapping[str, str], *flags: str) -> list[str]:
    """The command `ray start`, which stays for as long as what it starts."""
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-P", "-c", START_COMMAND, "start", *flags, "--block", "--disable-usage-stats", *arguments]


def of_our_own_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without Ray's settings, which were meant for another Ray."""
    return {name: value for name, value in environment.items() if not name.startswith("RAY_") or name in _FOR_ANY_RAY}


def start_ray(
    command: list[str], environment: Mapping[str, str], log: Path, inherited: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start processes of Ray that outlive this one, with `environment` in addition to what they inherit, by default all
    of this process's own; secrets are left out."""
    own = {**without_secrets(os.environ if inherited is None else inherited), "RAY_USAGE_STATS_ENABLED": "0"}
    for name in _NOT_FOR_RAY:
        own.pop(name, None)
    nothing = subprocess.DEVNULL
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=nothing,
            stdout=output,
            stderr=output,
            cwd="/",
            env={**own, **environment},
            start_new_session=True,
        )


def count_gpus() -> int:
    """Number of NVIDIA GPUs of this machine, from their device files."""
    return sum(1 for file in Path("/dev").glob("nvidia[0-9]*") if file.name.removeprefix("nvidia").isdigit())


def connect(address: str, namespace: str, runtime_environment: Mapping[str, Any] | None = None) -> Any:
    """Connect this process to the Ray at `address` and return the ray module. `runtime_environment`: Ray's, for
    everything that this process starts there. Raises RayUnavailable."""
    import ray

    try:
        # Ray has its workers look for modules in the driver's folder first, which is any folder of the user.
        with contextlib.chdir("/"):
            ray.init(
                address=address,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env=None if runtime_environment is None else dict(runtime_environment),
            )
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise RayUnavailable(f"Ray at {address} refused the connection: {' '.join(str(error).split())}") from error
    return ray


def answers(address: str) -> bool:
    """Whether something listens at `address`, host:port."""
    try:
        socket.create_connection(split_address(address), ANSWER_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def _problem_of_sockets(record: HeadRecord) -> str | None:
    gone = [socket for socket in sockets_of(record.session) if not socket.exists()]
    return f"its socket {gone[0]} is gone" if gone else None


def _unresponsive_process(head: int) -> str | None:
    """The name of a process of this head that does not answer, or of one that is gone; None if all answer."""
    running = children_named(head, HEAD_PROCESSES)
    return next((name for name in HEAD_PROCESSES if name not in running or not _answers_grpc(running[name])), None)


def _answers_grpc(pid: int) -> bool:
    """Whether a process answers the greeting of HTTP/2, which gRPC uses, at each port on which it listens. A connection
    alone proves nothing: the kernel accepts it even for a process that is stopped."""
    try:
        listening = [each.laddr for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"]
        for address in listening:
            with socket.create_connection(address, ANSWER_SECONDS) as connection:
                connection.settimeout(ANSWER_SECONDS)
                connection.sendall(HTTP2_GREETING)
                if not connection.recv(1):
                    return False
    except (OSError, psutil.Error):
        return False
    return bool(listening)
