"""The rendezvous store of a job, and ports that nodes reach."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed import DistError, TCPStore

from manta.workers.node.host import listen_for_a_moment, unreached
from manta.workers.protocol.messages import Endpoint
from manta.workers.system.sockets import PortRange

ROOT = Path(__file__).parents[3]

STORE = (
    "import socket, sys\n"
    "from manta.workers.node import rendezvous\n"
    "rendezvous.MEMORY_BYTES = 32 * 1024 * 1024\n"
    "sys.exit(rendezvous.run({'host': '127.0.0.1'}, socket.socket(fileno=int(sys.argv[1]))))\n"
)
CLIENT = (
    "import sys\n"
    "from torch.distributed import PrefixStore, TCPStore\n"
    "store = PrefixStore('7', TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False))\n"
    "store.set('key', 'value')\n"
    "print(store.get('key').decode(), store.add('count', 2))\n"
)


@contextlib.contextmanager
def store():
    """The process of a store, and its port; at the end, it must end by itself."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, "-c", STORE, str(theirs.fileno())]
            process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        try:
            yield process, json.loads(ours.makefile().readline())["port"]
            ours.shutdown(socket.SHUT_RDWR)
            assert process.wait(10) == 0
        finally:
            process.kill()


def test_store_serves_until_its_control_socket_closes():
    with store() as (serving, port):
        sockets = [each for each in psutil.Process(serving.pid).net_connections("tcp") if each.laddr.port == port]
        assert {each.laddr.ip for each in sockets} == {"127.0.0.1"}, "no other machine reaches it"
        process = subprocess.run(
            [sys.executable, "-c", CLIENT, str(port)], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert process.stdout.split() == ["value", "2"], process.stderr


def test_stranger_who_writes_without_end_is_cut_off_and_others_keep_their_entries():
    with store() as (_, port):
        ours, strangers = (TCPStore("127.0.0.1", port, is_master=False) for _ in range(2))
        ours.set("address/0", "here")
        with pytest.raises(DistError):
            for number in range(100):
                strangers.set(f"filler/{number}", b"x" * 1024 * 1024)
        assert ours.get("address/0") == b"here"
        ours.set("address/1", "there")
        assert ours.get("address/1") == b"there"


HERE = "127.0.0.1"


@pytest.fixture
def free():
    """A port on which nobody listens."""
    with socket.create_server((HERE, 0)) as server:
        return server.getsockname()[1]


async def test_reachability_check_reports_only_ports_that_refuse(free):
    listening = listen_for_a_moment(HERE, None, 3, 60.0)
    there = [Endpoint(HERE, port) for port in listening.ports]
    assert listening.host == HERE and len(set(listening.ports)) == 3
    assert await unreached([*there, Endpoint(HERE, free)], 30.0) == [Endpoint(HERE, free)]


def test_reachability_check_reports_ports_that_do_not_answer_in_time(monkeypatch):
    async def never(host, port):
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    silent = Endpoint("192.0.2.1", 1)
    assert asyncio.run(unreached([silent], 0.01)) == [silent]


def test_reachability_listener_closes_after_its_moment():
    async def body():
        (port,) = listen_for_a_moment(HERE, None, 1, 0.01).ports
        there = [Endpoint(HERE, port)]
        while not await unreached(there, 30.0):
            await asyncio.sleep(0)
        return True

    assert asyncio.run(asyncio.wait_for(body(), 60.0))


def test_ports_are_of_the_range_and_given_back_where_there_are_too_few(free):
    async def body():
        listening = listen_for_a_moment(HERE, PortRange(free, free), 1, 60.0)
        assert listening.ports == (free,)

    asyncio.run(body())

    async def too_many():
        with pytest.raises(OSError, match="MANTA_PORTS"):
            listen_for_a_moment(HERE, PortRange(free, free), 2, 60.0)
        with socket.create_server((HERE, free)):
            pass

    asyncio.run(too_many())
