"""A machine knows under which address others reach it."""

import socket

import pytest

from manta.workers.system.sockets import address_facing, outward_address


def test_own_address_towards_loopback_is_loopback():
    assert address_facing("127.0.0.1") == "127.0.0.1"


def test_outward_address_can_be_listened_on():
    with socket.create_server((outward_address(), 0)) as listener:
        assert listener.getsockname()[0] == outward_address()


def test_machine_without_a_network_uses_its_loopback_address(monkeypatch):
    def unreachable(probe, address):
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    assert outward_address() == "127.0.0.1"
    with pytest.raises(OSError, match="unreachable"):
        address_facing("10.0.0.1")
