"""Ports for others to try, and trying theirs."""

import asyncio
import socket

import pytest

from manta.workers.node.host import listen_for_a_moment, unreached
from manta.workers.protocol.messages import Endpoint
from manta.workers.system.sockets import PortRange

HERE = "127.0.0.1"


@pytest.fixture
def free():
    """A port on which nobody listens."""
    with socket.create_server((HERE, 0)) as server:
        return server.getsockname()[1]


def test_reachability_check_reports_only_ports_that_refuse(free):
    async def body():
        listening = listen_for_a_moment(HERE, None, 3, 60.0)
        there = [Endpoint(HERE, port) for port in listening.ports]
        assert listening.host == HERE and len(set(listening.ports)) == 3
        return await unreached([*there, Endpoint(HERE, free)], 30.0)

    assert asyncio.run(body()) == [Endpoint(HERE, free)]


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
