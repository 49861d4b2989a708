"""A machine knows under which address others reach it."""

import socket

import pytest

from manta.workers.system.ports import address_facing, outward_address


def test_towards_itself_it_is_the_machine_itself():
    assert address_facing("127.0.0.1") == "127.0.0.1"


def test_the_outward_address_is_one_that_can_be_listened_on():
    with socket.create_server((outward_address(), 0)) as listener:
        assert listener.getsockname()[0] == outward_address()


def test_a_machine_without_a_network_reaches_itself(monkeypatch):
    def unreachable(probe, address):
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    assert outward_address() == "127.0.0.1"
    with pytest.raises(OSError, match="unreachable"):
        address_facing("10.0.0.1")
