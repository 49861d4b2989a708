"""A daemon hears from its own machine that its node is being drained."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from pathlib import Path

import pytest

from manta.workers.node import local_drain
from manta.workers.node.local_drain import drain_nodes_here, drain_socket, serve_drains
from manta.workers.system.sockets import UnixListener


@pytest.fixture
def folder(monkeypatch):
    """A runtime folder of this user, as `drain_nodes_here` finds it; a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        monkeypatch.setattr(local_drain, "RUNTIME_FOLDERS", (Path(above), "manta-{user}-{tag}"))
        monkeypatch.setattr(local_drain, "ANSWER_SECONDS", 30.0)  # however busy the machine is
        made = Path(above) / f"manta-{os.getuid()}-01234567"
        made.mkdir(mode=0o700)
        yield made


def with_daemon(folder, use, node="ab" * 28):
    """What a daemon of `node` was told while `use` ran on another thread, and what that returned."""

    async def run():
        deadlines = []
        server = await serve_drains(UnixListener(drain_socket(folder, node)), node, deadlines.append)
        async with server:
            returned = await asyncio.to_thread(use)
        return deadlines, returned

    return asyncio.run(run())


def test_local_drain_tells_the_daemon_of_this_machine_its_deadline(folder):
    assert with_daemon(folder, lambda: drain_nodes_here(110.0)) == ([110.0], ["ab" * 28])


def test_local_drain_without_a_living_daemon_tells_nobody(folder):
    assert drain_nodes_here(25.0) == []
    with_daemon(folder, lambda: None)
    assert drain_nodes_here(25.0) == []


def test_local_drain_socket_of_a_restarted_daemon_replaces_the_old_one(folder):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(drain_socket(folder, "ab" * 28)))
    assert with_daemon(folder, lambda: drain_nodes_here(25.0)) == ([25.0], ["ab" * 28])


@pytest.mark.parametrize(
    "said", [
    b"\n", b"25\n", b"{}\n", b'{"seconds": -1}\n', b'{"seconds": Infinity}\n', b"x" * 9999,
]
)  # fmt: skip
def test_local_drain_ignores_malformed_requests(folder, said):
    def use():
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(drain_socket(folder, "ab" * 28)))
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(100)

    assert with_daemon(folder, use) == ([], b"")


def test_local_drain_ignores_folders_of_other_users(folder, monkeypatch):
    def use():
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        return drain_nodes_here(25.0)

    (folder.parent / f"manta-{os.getuid() + 1}-01234567").symlink_to(folder)
    assert with_daemon(folder, use) == ([], [])


def test_local_drain_socket_answers_with_the_id_of_its_node(folder):
    def use():
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(drain_socket(folder, "n1")))
            connection.sendall(json.dumps({"seconds": 3}).encode() + b"\n")
            return json.loads(connection.recv(100))

    assert with_daemon(folder, use, "n1") == ([3.0], {"node": "n1"})
