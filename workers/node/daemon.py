"""The daemon of one node: owns its zygote, its jobs' rendezvous stores and its shared memory.

Plain Python; the service turns it into a detached Ray actor, one per Ray node. If it dies, the zygote and all processes
forked from it end at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from manta.workers.config import JobSpec
from manta.workers.data.roots import DataRoots
from manta.workers.errors import MantaError
from manta.workers.node import host as machine
from manta.workers.node.folders import RuntimeFolder, SharedFolders, paths_on_node
from manta.workers.node.gpus import GpuWatch
from manta.workers.node.heartbeat import HeartbeatServer
from manta.workers.node.host import own_code, this_host, visible
from manta.workers.node.local_drain import drain_socket, serve_drains
from manta.workers.node.notice_sources import notice_sources
from manta.workers.node.notices import NOTICE_SECONDS, Notice, NoticeSource, NoticeWatch, on_termination
from manta.workers.paths import SHARED_MEMORY, UnsafePath, memory_socket, zygote_socket
from manta.workers.protocol.json_codec import JsonObject, from_json, to_json
from manta.workers.protocol.messages import (
    Endpoint,
    ListeningPorts,
    NodeDescription,
    PeakRate,
    StoreArgument,
    StorePort,
)
from manta.workers.protocol.remote_call import serve
from manta.workers.snapshot.node_memory import MemoryServer
from manta.workers.system.daemon_threads import in_daemon_thread
from manta.workers.system.sockets import POLL_SECONDS, PortRange, UnixListener, loopback_address
from manta.workers.zygote.client import ForkedProcess, ZygoteUnavailable, fork
from manta.workers.zygote.owner import ZygoteOwner

log = logging.getLogger(__name__)

MACHINE = "machine"
"""Who asks for a drain with `manta drain --this-node`."""
PEAK_SECONDS = 60.0
"""Time limit for measuring the CPU's peak rate; it includes the zygote's warm-up."""


class StoreUnavailable(MantaError):
    """The rendezvous store of a job could not be started; the message contains what it printed."""


@dataclass
class _Store:
    generation: int
    process: ForkedProcess
    host: str
    port: int = 0


class NodeDaemon:
    """One per node. Call `start` first."""

    def __init__(
        self,
        node: str,
        home: str,
        zygote_options: Sequence[str] = (),
        zygote_environment: Mapping[str, str] | None = None,
        notices: str | None = None,
        installation: str = "",
        to_share: Sequence[str] = (),
        ports: str | None = None,
    ):
        """`node`: Ray's node id, or any name outside of Ray; `home`: the service's; `notices`: who is asked whether the
        machine is to be taken away, as `notice_sources` reads it; None: nobody; `installation`: the service's id, and
        `to_share`: folders of the service that the node should see (`workers/node/folders.py`); `ports`: a range on
        which the daemon and the rendezvous stores listen, None: any.

        The zygote's options and environment are for tests, which replace the trainer.
        """
        self._node, self._paths = node, paths_on_node(home, installation)
        self._shared_folders = SharedFolders(to_share, installation)
        self._ports = None if ports is None else PortRange.of(ports)
        self._socket_path = zygote_socket(self._paths.runtime_folder, this_host().node)
        self._zygote = ZygoteOwner(self._socket_path, self._paths.zygote_log(node), zygote_options, zygote_environment)
        self._memory: MemoryServer | None = None
        self._stores: dict[str, _Store] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._peak: asyncio.Task[PeakRate | None] | None = None
        self._runtime_folder = RuntimeFolder(self._paths)
        self._drains: asyncio.Server | None = None
        self._drain_listener: UnixListener | None = None
        self._reachability: asyncio.Task[None] | None = None
        self._heartbeat = HeartbeatServer(this_host().address, node, self._ports)
        self._gpus = GpuWatch(self._heartbeat.note_gpus)
        self._notices = [self._watch(source) for source in notice_sources(notices)] if notices else []

    async def call(self, method: str, arguments: JsonObject) -> Any:
        """Calls a method of this class for other processes: arguments and answer as JSON (`remote_call.py`)."""
        return await serve(self, method, arguments)

    async def start(self) -> NodeDescription:
        """Start the zygote and begin to measure the CPU. Returns the same as `describe`. A second call does nothing."""
        if self._peak is None:
            self._runtime_folder.keep()
            self._paths.make_snapshot_root()
            address = memory_socket(self._paths.runtime_folder, this_host().node)
            self._memory = MemoryServer(address, self._paths.snapshot_root)
            await self._zygote.start()
            await self._serve_drains(UnixListener(drain_socket(self._paths.runtime_folder, self._node)))
            self._reachability = asyncio.create_task(self._maintain_sockets(), name="runtime folder")
            on_termination(lambda: self._heartbeat.drain(NOTICE_SECONDS, "the machine was asked to end", "SIGTERM"))
            for watch in self._notices:
                watch.start()
            self._gpus.start()
            self._peak = asyncio.create_task(self._measure_peak(), name="peak rate")
        return await self.describe()

    async def describe(self) -> NodeDescription:
        """This node."""
        host, memory = this_host(), shutil.disk_usage(SHARED_MEMORY)
        peak = self._peak.result() if self._peak is not None and self._peak.done() else None
        address, port = self._heartbeat.address
        return NodeDescription(
            node=self._node,
            host=host.name,
            address=address,
            pid=os.getpid(),
            heartbeat_port=port,
            heartbeat_secret=self._heartbeat.secret,
            zygote_pid=self._zygote.pid,
            shared_memory_bytes=memory.total,
            shared_memory_free_bytes=memory.free,
            peak_flops=peak.peak_flops if peak is not None else None,
            unshared=await self._shared_folders.unshared(),
            code=own_code(),
        )

    async def drain(self, seconds: float) -> None:
        """This node is being drained within `seconds`: tell the control plane, now and whenever it connects. SIGTERM
        has the same effect, with NOTICE_SECONDS."""
        self._heartbeat.drain(seconds)

    async def undrain(self) -> str:
        """What a user said to the service or on the machine no longer holds: the node stays. Returns why it is being
        drained nevertheless, on SIGTERM or a notice; empty if it is not."""
        self._heartbeat.withdraw("", MACHINE)
        return self._heartbeat.state.drain_reason

    async def start_store(self, job: str, generation: int, one_machine: bool = False) -> Endpoint:
        """Serve a rendezvous store for `job`: the existing one if it still runs, since every generation has its own
        keys in it. If all ranks are on this `one_machine`, only processes here can reach it.

        Raises StoreUnavailable if it does not start, and if a newer generation already has its store here;
        ZygoteUnavailable if the zygote does not answer.
        """
        async with self._locks.setdefault(job, asyncio.Lock()):
            current = self._stores.get(job)
            if current is not None and current.generation > generation:
                raise StoreUnavailable(
                    f"{job} has a store of generation {current.generation} here, so {generation} gets none; "
                    "read the job's current generation."
                )
            host = loopback_address() if one_machine else this_host().address
            if current is not None and not current.process.ended and current.host == host:
                current.generation = generation
                return Endpoint(host, current.port)
            await self._end_store(job)
            process = await fork(self._socket_path, "store", to_json(StoreArgument(host, self._ports)))
            self._stores[job] = store = _Store(generation, process, host)
            line = await process.control.readline()
            if not line:
                self._stores.pop(job)
                raise StoreUnavailable(
                    await _last_words(process, f"The rendezvous store of {job} did not start on {host}")
                )
            store.port = from_json(StorePort, json.loads(line)).port
            return Endpoint(host, store.port)

    async def stop_store(self, job: str) -> None:
        """End the rendezvous store of `job`, if there is one here."""
        async with self._locks.setdefault(job, asyncio.Lock()):
            await self._end_store(job)
        self._locks.pop(job, None)

    async def end_job(self, job: str, keep_snapshots: bool = False) -> None:
        """Remove everything that `job` has left here: its store and, unless `keep_snapshots`, the snapshots of ranks
        whose agents died too early."""
        await self.stop_store(job)
        if keep_snapshots:
            return
        shutil.rmtree(self._paths.snapshot_folder(job), ignore_errors=True)
        if self._memory is not None:
            await asyncio.to_thread(self._memory.free_unlinked)

    async def jobs(self) -> list[str]:
        """The jobs that have a store or snapshots here."""
        root = self._paths.snapshot_root
        return sorted({*self._stores, *(folder.name for folder in (root.iterdir() if root.is_dir() else []))})

    async def check_data(self, spec: JsonObject, roots: list[str] | None, begins: bool = True) -> str | None:
        """Why the job `spec` cannot be trained on its corpus here, in a sentence; None if it can, or if that is not
        known now. `roots`: folders below which jobs may read; None: anywhere. `begins`: whether it has no checkpoint,
        and needs its initial weights."""
        allowed = DataRoots(None if roots is None else tuple(map(Path, roots)))
        try:
            wanted = JobSpec.model_validate(spec)
            look = in_daemon_thread("data of a job", partial(allowed.problem_of_data, wanted, begins))
            return await asyncio.wrap_future(look)
        except MantaError as error:
            return str(error)

    async def listen_for_a_moment(self, count: int, seconds: float) -> ListeningPorts:
        """Accept connections on `count` of this node's ports for `seconds`, for others to try; returns which. Raises
        OSError if no port is free."""
        return machine.listen_for_a_moment(this_host().address, self._ports, count, seconds)

    async def unreached(self, addresses: list[Endpoint], seconds: float) -> list[Endpoint]:
        """The `addresses` that accept no connection from here within `seconds`."""
        return await machine.unreached(addresses, seconds)

    async def shutdown(self) -> None:
        """End stores and the zygote, and with it every process forked on this node; remove all snapshots."""
        if self._peak is not None:
            self._peak.cancel()
        if self._reachability is not None:
            self._reachability.cancel()
        if self._drains is not None and self._drain_listener is not None:
            self._drains.close()
            self._drain_listener.close()
        for job in list(self._stores):
            await self.stop_store(job)
        self._paths.remove_snapshots()
        if self._memory is not None:
            await asyncio.to_thread(self._memory.close)
        await self._zygote.close()
        self._paths.remove_snapshots()  # a trainer may have made its file anew
        for watch in self._notices:
            watch.stop()
        await asyncio.to_thread(self._gpus.stop)
        self._heartbeat.close()
        self._runtime_folder.release()
        self._paths.remove_empty_runtime_folder()

    async def _serve_drains(self, listener: UnixListener) -> None:
        self._drain_listener = listener
        self._drains = await serve_drains(
            listener,
            self._node,
            lambda seconds: self._heartbeat.drain(seconds, "the machine asks to be drained", MACHINE),
        )

    async def _maintain_sockets(self) -> None:
        """Keep the runtime folder and the socket for drains; the zygote and the MemoryServer keep theirs."""
        reported = ""
        while self._drains is not None and self._drain_listener is not None:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await asyncio.to_thread(self._runtime_folder.keep)
            except (OSError, UnsafePath) as error:
                if reported != (reported := str(error)):
                    log.warning("the sockets of this node cannot be reached: %s; retrying", error)
                continue
            if (successor := self._drain_listener.successor()) is not None:
                self._drains.close()
                self._drain_listener.close()
                await self._serve_drains(successor)

    def _watch(self, source: NoticeSource) -> NoticeWatch:
        def noticed(notice: Notice) -> None:
            self._heartbeat.drain(notice.seconds, notice.reason, source.name)

        return NoticeWatch(source, noticed, lambda: self._heartbeat.withdraw(source.name))

    async def _end_store(self, job: str) -> None:
        store = self._stores.pop(job, None)
        if store is not None:
            store.process.kill()
            await store.process.wait()
            store.process.close()

    async def _measure_peak(self) -> PeakRate | None:
        """Best effort: without it MFU is not known, and nothing else is lost."""
        try:
            process = await fork(self._socket_path, "peak", {"device": "cpu"}, visible(()))
            try:
                async with asyncio.timeout(PEAK_SECONDS):
                    line = await process.control.readline()
            finally:
                process.close()
        except (ZygoteUnavailable, TimeoutError):  # the zygote's log, or the next fork, says why
            return None
        return from_json(PeakRate, json.loads(line)) if line else None


async def _last_words(process: ForkedProcess, sentence: str) -> str:
    printed = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
    process.close()
    return f"{sentence}: {printed[-1] if printed else 'it printed nothing'}."
