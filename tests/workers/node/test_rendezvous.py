"""The store process serves a torch client in another process, and ends with its control socket."""

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed import DistError, TCPStore

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
