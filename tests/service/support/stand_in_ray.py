"""Processes that look like those of Ray from outside: their names, their parent, and that they answer where they
listen."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

_CHILD = """
import socket, sys
with open("/proc/self/comm", "w") as name:
    name.write(sys.argv[1])
with socket.create_server(("127.0.0.1", 0)) as server:
    print("ready", flush=True)
    while True:
        peer, _ = server.accept()
        with peer:
            peer.recv(100)
            peer.sendall(b"settings")
"""
_LEADER = """
import subprocess, sys
for name in sys.argv[2].split(","):
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1], name], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def ray_processes(*names: str, environment: Mapping[str, str] | None = None) -> Iterator[dict[str, int]]:
    """Process ids by name: of `start`, the first process of a session, and of its children."""
    command = [sys.executable, "-c", _LEADER, _CHILD, ",".join(names), "start"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    ) as leader:
        try:
            yield {"start": leader.pid, **{name: int(leader.stdout.readline()) for name in names}}
        finally:
            os.killpg(leader.pid, signal.SIGKILL)
