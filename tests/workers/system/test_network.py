"""Addresses, ports and sockets of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from manta.workers.system.sockets import (
    Connection,
    InvalidPortRange,
    PortRange,
    UnixListener,
    address_facing,
    break_connections,
    host_and_port,
    listen,
    open_connections,
    outward_address,
    split_address,
)


def test_address_towards_loopback_is_loopback_and_the_outward_one_can_be_listened_on():
    assert (address_facing("127.0.0.1"), address_facing("::1")) == ("127.0.0.1", "::1")
    with socket.create_server((outward_address(), 0)) as listener:
        assert listener.getsockname()[0] == outward_address()


def test_machine_without_a_network_uses_its_loopback_address(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=OSError("network is unreachable")))
    assert outward_address() == "127.0.0.1"
    monkeypatch.setattr(socket, "create_server", Mock(side_effect=OSError("cannot assign requested address")))
    assert outward_address() == "::1", "it has no IPv4"
    with pytest.raises(OSError, match="unreachable"):
        address_facing("10.0.0.1")


HOST = "127.0.0.1"


@pytest.mark.parametrize(("host", "port", "text"), [(HOST, 1, "127.0.0.1:1"), ("::1", 22, "[::1]:22"), ("a", 3, "a:3")])
def test_address_of_either_family_survives_a_round_trip(host, port, text):
    assert host_and_port(host, port) == text
    assert split_address(text) == (host, port)


@pytest.mark.parametrize(
    ("text", "ports"), [("20000-20999", PortRange(20000, 20999)), (" 1024-1024 ", PortRange(1024, 1024))]
)
def test_port_range_survives_a_round_trip(text, ports):
    assert PortRange.of(text) == ports == PortRange.of(str(ports))


@pytest.mark.parametrize("text", ["", "20000", "20000-", "a-b", "20999-20000", "80-90", "65000-65536", "1-2-3", "²-³"])
def test_malformed_port_range_is_refused(text):
    with pytest.raises(InvalidPortRange, match="is not a range of ports"):
        PortRange.of(text)


def free_ports(count):
    """So many free ports in a row."""
    while True:
        with socket.create_server((HOST, 0)) as probe:
            first = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                socket.create_server((HOST, port)).close()
        except (OSError, OverflowError):
            continue
        return PortRange(first, first + count - 1)


def test_every_port_of_a_range_is_used_before_it_is_full():
    ports = free_ports(3)
    listening = [listen(HOST, ports) for _ in range(3)]
    assert {each.getsockname()[1] for each in listening} == {ports.first, ports.first + 1, ports.last}
    with pytest.raises(OSError, match=f"all ports of {ports} .MANTA_PORTS. are in use at {HOST}; name a larger range"):
        listen(HOST, ports)
    listening[1].close()
    listen(HOST, ports).close()
    for each in listening:
        each.close()


def test_listener_without_a_port_range_takes_any_port_but_no_foreign_address():
    with listen(HOST) as one, listen(HOST) as other:
        assert one.getsockname()[1] != other.getsockname()[1]
    with pytest.raises(OSError) as refused:
        listen("192.0.2.1", PortRange(20000, 20010))
    assert "in use" not in str(refused.value)


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


def test_breaking_a_connection_leaves_others_and_all_descriptors_open(connected):
    (wanted, _), (here, there) = connected(), connected()
    before = len(list(OPEN.iterdir()))
    assert break_connections({ends(wanted)}.__contains__) == 1
    assert len(list(OPEN.iterdir())) == before
    assert wanted.fileno() >= 0
    here.sendall(b"x")
    assert there.recv(1) == b"x"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "a.sock"


def reaches(listener):
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(listener.path))
        listener.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            listener.socket.accept()[0].close()
            return True
    return False


def test_unix_socket_is_private_and_replaces_a_stale_one(path):
    with UnixListener(path).socket, contextlib.closing(UnixListener(path)) as second:
        assert path.stat().st_mode & 0o777 == 0o600
        assert list(path.parent.iterdir()) == [path]
        assert reaches(second)


def replace_with_socket(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


def replace_with_file(path):
    path.unlink()
    path.touch()


@pytest.mark.parametrize("lose", [os.unlink, replace_with_socket, replace_with_file])
def test_unreachable_socket_gets_a_successor_at_its_path(path, lose):
    first = UnixListener(path)
    assert first.successor() is None and reaches(first)
    lose(path)
    with contextlib.closing(first.successor()) as second:
        first.close()
        assert reaches(second) and second.successor() is None


def test_unix_listener_has_no_successor_until_its_folder_exists_again(path):
    first = UnixListener(path)
    shutil.rmtree(path.parent)
    assert first.successor() is None
    path.parent.mkdir()
    with contextlib.closing(first.successor()) as second:
        assert reaches(second)
    assert not path.exists()
    first.close()


def test_answering_socket_of_another_process_is_left_alone(path):
    first = UnixListener(path)
    with contextlib.closing(UnixListener(path)) as second:
        assert first.successor() is None
        first.close()
        assert reaches(second)
