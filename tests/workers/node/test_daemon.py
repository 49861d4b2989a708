"""A daemon's rendezvous stores: one a job, which its generations share, and none before the newest gets; and what else
it looks after on its node."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from held_memory import held_bytes
from metadata_service import MetadataService

from manta.workers import paths
from manta.workers.node import daemon as module
from manta.workers.node import local_drain
from manta.workers.node.daemon import NodeDaemon, StoreUnavailable
from manta.workers.node.host import Host
from manta.workers.node.local_drain import _ask, drain_socket
from manta.workers.node.notices import NOTICE_SECONDS, NoticeWatch
from manta.workers.paths import Paths
from manta.workers.protocol.messages import Endpoint
from manta.workers.snapshot.node_memory import SnapshotMemory, in_node_memory
from manta.workers.snapshot.snapshot_file import Form
from manta.workers.zygote.client import ZygoteUnavailable
from manta.workers.zygote.owner import ZygoteOwner


class Store:
    """The process of a rendezvous store, which says `line` and `printed` and runs until it is killed."""

    def __init__(self, line: bytes, printed: bytes = b""):
        self.control, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        for stream, content in ((self.control, line), (self.stderr, printed)):
            stream.feed_data(content)
            stream.feed_eof()
        self.ended = self.closed = False

    def kill(self) -> None:
        self.ended = True

    async def wait(self) -> None:
        assert self.ended

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def stores(monkeypatch) -> list[Store]:
    """The stores that were started, in their order; the zygote answers at once."""
    started: list[Store] = []

    async def fork(socket_path, entry, argument):
        assert entry == "store"
        started.append(Store(json.dumps({"port": 5001 + len(started)}).encode() + b"\n"))
        return started[-1]

    monkeypatch.setattr("manta.workers.node.daemon.fork", fork)
    return started


async def refused(*arguments):
    raise ZygoteUnavailable("none is started here")


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "fork", refused)
    made = NodeDaemon("n1", str(tmp_path))
    yield made
    made._heartbeat.close()


def ports(addresses: list[Endpoint]) -> list[int]:
    return [address.port for address in addresses]


async def test_node_daemon_shares_a_store_per_job_and_refuses_earlier_generations(daemon, stores):
    addresses = [await daemon.start_store("job", generation) for generation in (1, 3, 3)]
    assert ports(addresses) == [5001] * 3
    with pytest.raises(StoreUnavailable, match="store of generation 3 here, so 2 gets none"):
        await daemon.start_store("job", 2)
    assert ports([await daemon.start_store("another job", 2)]) == [5002]
    assert [store.ended for store in stores] == [False, False]


async def test_rendezvous_store_listens_on_loopback_only_if_all_ranks_are_on_one_machine(daemon, stores, monkeypatch):
    monkeypatch.setattr("manta.workers.node.daemon.this_host", lambda: Host("machine", "192.0.2.7", None, ()))
    inside = [await daemon.start_store("job", generation, one_machine=True) for generation in (1, 2)]
    assert inside == [Endpoint("127.0.0.1", 5001)] * 2
    assert await daemon.start_store("job", 3) == Endpoint("192.0.2.7", 5002)
    assert await daemon.start_store("job", 4, one_machine=True) == Endpoint("127.0.0.1", 5003)
    assert [store.ended for store in stores] == [True, True, False]


async def test_ended_rendezvous_store_is_replaced_only_for_the_newest_generation(daemon, stores):
    await daemon.start_store("job", 2)
    stores[0].ended = True
    with pytest.raises(StoreUnavailable, match="store of generation 2 here, so 1 gets none"):
        await daemon.start_store("job", 1)
    assert ports([await daemon.start_store("job", 2), await daemon.start_store("job", 2)]) == [5002, 5002]
    assert [store.closed for store in stores] == [True, False]


async def test_rendezvous_store_that_fails_to_start_reports_its_error_and_can_be_started_again(
    daemon, stores, monkeypatch
):
    async def fail(socket_path, entry, argument):
        return Store(b"", b"Traceback\nOSError: no port is free\n")

    with monkeypatch.context() as broken:
        broken.setattr("manta.workers.node.daemon.fork", fail)
        with pytest.raises(StoreUnavailable, match=r"store of job did not start on .*: OSError: no port is free"):
            await daemon.start_store("job", 1)
    assert await daemon.jobs() == []
    assert ports([await daemon.start_store("job", 1)]) == [5001]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Iterator[Paths]:
    """The daemon's, with a shared memory of its own, where it starts without a zygote and takes no signals."""
    monkeypatch.setattr(paths, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(module, "on_termination", lambda act: None)
    for method in ("start", "close"):
        monkeypatch.setattr(ZygoteOwner, method, AsyncMock(return_value=None))
    yield Paths.of(tmp_path)
    Paths.of(tmp_path).remove_runtime_folder()


async def test_node_daemon_removes_leftovers_of_a_job_but_keeps_wanted_snapshots(daemon, stores, home):
    for job in ("job", "another"):
        home.snapshot_folder(job).mkdir(parents=True)
    await daemon.start_store("job", 1)
    await daemon.start_store("third", 1)
    assert await daemon.jobs() == ["another", "job", "third"]
    await daemon.end_job("job", keep_snapshots=True)
    assert stores[0].ended and home.snapshot_folder("job").exists()
    await daemon.end_job("job")
    await daemon.end_job("absent")
    assert list(daemon._locks) == ["third"], "nothing is kept of who is gone"
    assert await daemon.jobs() == ["another", "third"]
    await daemon.shutdown()
    assert stores[1].ended and not home.snapshot_root.exists()


async def test_node_drain_keeps_the_earliest_deadline_of_signal_user_and_machine(daemon, home, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "on_termination", asked.append)
    monkeypatch.setattr(local_drain, "ANSWER_SECONDS", 30.0)  # however busy the machine is
    for _ in range(2):
        about = await daemon.start()
    assert (about.node, about.peak_flops, len(asked)) == ("n1", None, 1)
    assert not daemon._heartbeat.state.draining
    asked[0]()
    assert 0 < daemon._heartbeat.state.drain_seconds <= NOTICE_SECONDS
    await daemon.drain(7.0)
    assert daemon._heartbeat.state.drain_seconds <= 7.0
    await daemon.drain(600.0)
    assert daemon._heartbeat.state.drain_seconds <= NOTICE_SECONDS, "a user does not know better than a signal"
    here = drain_socket(home.runtime_folder, "n1")
    assert await asyncio.to_thread(_ask, here, 5.0) == "n1", "the machine says so, too"
    assert daemon._heartbeat.state.drain_seconds <= 5.0
    assert await daemon.undrain() == "the machine was asked to end"
    daemon._heartbeat.withdraw("SIGTERM")
    await daemon.drain(600.0)
    assert await daemon.undrain() == "" and daemon._heartbeat.state.stays
    daemon._drains.close()


def test_node_daemon_hears_notices_of_a_leaving_machine_and_their_withdrawal(go, home, monkeypatch):
    monkeypatch.setattr(module, "fork", refused)
    monkeypatch.setattr(module, "NoticeWatch", partial(NoticeWatch, poll_seconds=0.02))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 500))
    service = MetadataService()
    service.answers = {"/computeMetadata/v1/instance/preempted": "TRUE"}
    daemon = NodeDaemon("n1", str(home.home), notices=f"gcp={service.url},slurm")

    async def body():
        assert not daemon._heartbeat.state.draining
        await daemon.start()
        said = []
        async with asyncio.timeout(30):
            for reason in ("Google Cloud preempts the machine", "the Slurm job reaches its time limit"):
                while daemon._heartbeat.state.drain_reason != reason:
                    await asyncio.sleep(0.01)
                said.append(daemon._heartbeat.state)
                service.answers = {}
        await daemon.shutdown()
        assert 20 < said[0].drain_seconds <= 30
        assert 450 < said[1].drain_seconds <= 500

    try:
        go(body)
    finally:
        service.close()
    assert all(watch._stopped.is_set() for watch in daemon._notices)


async def test_node_daemon_describes_its_address_memory_and_measured_peak(daemon, home, monkeypatch):
    async def measured(socket_path, entry, argument, environment):
        assert (entry, argument) == ("peak", {"device": "cpu"})
        assert environment == {"CUDA_VISIBLE_DEVICES": ""}, "GPUs belong to ranks"
        return Store(json.dumps({"peak_flops": 5e9, "source": "measured"}).encode() + b"\n")

    monkeypatch.setattr(module, "fork", measured)
    monkeypatch.setattr(ZygoteOwner, "pid", 77)
    room = {module.SHARED_MEMORY: SimpleNamespace(total=100, used=30, free=70)}
    monkeypatch.setattr(module.shutil, "disk_usage", room.__getitem__)
    assert (await daemon.describe()).peak_flops is None
    await daemon.start()
    await daemon._peak
    assert home.snapshot_root.is_dir() and home.runtime_folder.is_dir(), "before the first trainer needs it"
    about = await daemon.describe()
    assert (about.peak_flops, about.zygote_pid, about.pid) == (5e9, 77, os.getpid())
    assert (about.address, about.heartbeat_port) == daemon._heartbeat.address
    assert about.heartbeat_secret == daemon._heartbeat.secret
    assert (about.shared_memory_bytes, about.shared_memory_free_bytes) == (100, 70)


async def test_snapshots_outside_of_shared_memory_are_the_daemons_until_their_job_has_left(daemon, home):
    await daemon.start()
    memory = SnapshotMemory("node_memory", paths.memory_socket(home.runtime_folder, module.this_host().node))
    path = home.snapshot_folder("job") / "rank-00000.snapshot"
    (await asyncio.to_thread(memory.create, path, Form(bytes(16), 100))).close()
    assert held_bytes(daemon._memory) > 0 and in_node_memory(path)
    await daemon.end_job("job", keep_snapshots=True)
    assert held_bytes(daemon._memory) > 0
    await daemon.end_job("job")
    assert held_bytes(daemon._memory) == 0
    await daemon.shutdown()
    assert not memory.server.exists()


@pytest.mark.parametrize("removed", ["a socket", "the folder"])
async def test_daemon_whose_socket_or_folder_is_removed_is_reached_again(daemon, home, monkeypatch, removed):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    folder = home.runtime_folder
    here, keeper = drain_socket(folder, "n1"), paths.memory_socket(folder, module.this_host().node)
    await daemon.start()
    if removed == "a socket":
        here.unlink()
        keeper.unlink()
    else:
        home.remove_runtime_folder()
    while not (here.exists() and keeper.exists()):
        await asyncio.sleep(0.01)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert await asyncio.to_thread(_ask, here, 5.0) == "n1" and daemon._heartbeat.state.draining
    descriptor = os.open(folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    await daemon.shutdown()
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


@pytest.mark.parametrize("said", [b"", b"late"])
def test_node_daemon_without_measurable_devices_reports_no_peak(go, daemon, monkeypatch, said):
    made = []

    async def fork(socket_path, entry, argument, environment):
        made.append(Store(b""))
        if said:
            made[-1].control = asyncio.StreamReader()
        return made[-1]

    monkeypatch.setattr(module, "fork", fork)
    monkeypatch.setattr(module, "PEAK_SECONDS", 0.01)
    assert go(daemon._measure_peak) is None
    assert made[0].closed, "who measures ends with that"


async def test_node_daemon_shutdown_ends_zygote_stores_and_heartbeat(daemon, stores, home, monkeypatch):
    ended = []

    async def close(owner):
        ended.append(home.snapshot_root.exists())

    monkeypatch.setattr(ZygoteOwner, "close", close)
    home.snapshot_folder("job").mkdir(parents=True)
    daemon._peak = asyncio.create_task(asyncio.Event().wait())
    await daemon.start_store("job", 1)
    await daemon.shutdown()
    await asyncio.wait({daemon._peak})
    assert daemon._peak.cancelled()
    assert ended == [False], "the snapshots of its trainers are gone by then"
    assert not daemon._heartbeat._thread.is_alive()
    assert stores[0].ended and stores[0].closed


DOCUMENT = {
    "model": {"layers": 1, "hidden_size": 16, "heads": 2, "sequence_length": 8},
    "data": {"source": "python-stdlib"},
    "train": {"steps": 1, "global_batch_size": 2},
}


async def test_node_daemon_checks_data_as_the_ranks_will_see_it(home, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("words and more words. " * 200)
    document = {**DOCUMENT, "data": {"source": "text", "paths": [str(corpus)]}}
    daemon = NodeDaemon("n1", str(home.home))
    assert await daemon.check_data(document, None) is None
    assert await daemon.check_data(document, [str(tmp_path)]) is None
    assert "is not below any of the folders" in await daemon.check_data(document, ["/elsewhere"])
    corpus.unlink()
    assert str(corpus) in await daemon.check_data(document, None)
    daemon._heartbeat.close()


async def test_file_systems_that_do_not_answer_take_no_thread_that_the_end_of_a_job_needs(daemon, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(module.DataRoots, "check", lambda self, spec, begins: answers.wait(20))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    look = asyncio.create_task(daemon.check_data(DOCUMENT, None))
    try:
        async with asyncio.timeout(10):
            await asyncio.sleep(0)
            assert await asyncio.to_thread(lambda: "what the end of a job has to do")
        assert not look.done()
    finally:
        answers.set()
    assert await look is None


async def test_node_daemon_reports_unshared_folders_and_uses_a_home_of_its_own(home, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "own"))
    daemon = NodeDaemon("n1", "/not/here", installation="manta-1", to_share=["/not/here"])
    about = await daemon.describe()
    assert about.unshared == ("/not/here",) and len(about.code) == 16
    assert str(tmp_path / "own") in str(daemon._paths.home)
    daemon._heartbeat.close()
