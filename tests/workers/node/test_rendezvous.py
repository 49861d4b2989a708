"""The store process serves a torch client in another process, and ends with its control socket."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from workers.node import rendezvous

ROOT = Path(__file__).parents[3]

CLIENT = (
    "import sys\n"
    "from torch.distributed import PrefixStore, TCPStore\n"
    "store = PrefixStore('7', TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False))\n"
    "store.set('key', 'value')\n"
    "print(store.get('key').decode(), store.add('count', 2))\n"
)


def test_store_serves_until_its_control_socket_closes():
    ours, theirs = socket.socketpair()
    codes = []
    serving = threading.Thread(target=lambda: codes.append(rendezvous.run({"host": "127.0.0.1"}, theirs)))
    serving.start()
    with ours, theirs:
        port = json.loads(ours.makefile().readline())["port"]
        sockets = [each for each in psutil.Process().net_connections("tcp") if each.laddr.port == port]
        assert {each.laddr.ip for each in sockets} == {"127.0.0.1"}, "no other machine reaches it"
        process = subprocess.run(
            [sys.executable, "-c", CLIENT, str(port)], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        ours.shutdown(socket.SHUT_RDWR)
        serving.join(10)
    assert process.stdout.split() == ["value", "2"], process.stderr
    assert codes == [0]
