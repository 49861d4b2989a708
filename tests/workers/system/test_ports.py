"""Processes listen on a port of the range that was named, and say so where none is free."""

import socket

import pytest

from manta.workers.system.sockets import InvalidPortRange, PortRange, listen

HOST = "127.0.0.1"


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


def test_listener_without_a_port_range_takes_any_port():
    with listen(HOST) as one, listen(HOST) as other:
        assert one.getsockname()[1] != other.getsockname()[1]


def test_foreign_address_is_not_reported_as_a_port_in_use():
    with pytest.raises(OSError) as refused:
        listen("192.0.2.1", PortRange(20000, 20010))
    assert "in use" not in str(refused.value)
