"""Connections are broken from another thread, those that are wanted and no others."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from manta.workers.system.sockets import Connection, break_connections, open_connections

OPEN = Path("/proc/self/fd")


@pytest.fixture
def connected():
    """Makes connections within this process: (the caller's end, the listener's end)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = []

        def connect():
            here = socket.create_connection(listener.getsockname())
            there = listener.accept()[0]
            for end in (here, there):
                end.settimeout(10.0)
            made.extend((here, there))
            return here, there

        yield connect
        for end in made:
            end.close()


def ends(of):
    return Connection(of.getsockname(), of.getpeername())


def test_open_connections_list_established_ones_without_listeners_or_files(connected):
    before = open_connections()
    here, there = connected()
    assert open_connections() - before == {ends(here), ends(there)}
    there.close()
    here.close()
    assert open_connections() == before


def test_broken_connection_wakes_readers_at_both_ends(connected):
    here, there = connected()
    said = []
    waiting = threading.Thread(target=lambda: said.append(here.recv(1)))
    waiting.start()
    assert break_connections(lambda connection: connection == ends(here)) == 1
    waiting.join(10.0)
    assert said == [b""]
    assert there.recv(1) == b""


def test_breaking_a_connection_leaves_others_open(connected):
    (wanted, _), (here, there) = connected(), connected()
    assert break_connections({ends(wanted)}.__contains__) == 1
    here.sendall(b"x")
    assert there.recv(1) == b"x"


def test_breaking_connections_leaves_descriptors_open(connected):
    here, _ = connected()
    before = len(list(OPEN.iterdir()))
    break_connections(lambda connection: connection == ends(here))
    assert len(list(OPEN.iterdir())) == before
    assert here.fileno() >= 0
