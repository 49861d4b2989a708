"""What somebody on another machine reaches of a service that `manta up` started, who has no key."""

import contextlib

import psutil
import pytest

from benchmarks.support import own_processes
from manta.api.serving.local_service import running_service
from manta.workers.system.sockets import loopback_address, outward_address
from tests.e2e.manta import PAIR
from tests.e2e.neighbour_network import HERE, neighbour

HELLOS = (b"GET /v1/jobs HTTP/1.1\r\nHost: manta\r\nConnection: close\r\n\r\n", b"\n")
SETTINGS_FRAME = 4
"""Type of the frame with which a server of HTTP/2 begins (RFC 9113, 3.4), after three bytes of its length."""


@pytest.mark.parametrize("ports", ["of_ours", pytest.param("all", marks=pytest.mark.soak)])
def test_other_machines_reach_only_ports_of_ray_and_get_no_answer_without_its_token(manta, ports):
    """Ray listens on all addresses, whatever it is asked to do, and wants its token (docs/security.md)."""
    job = manta.submit(manta.spec(steps=100_000, layout=PAIR))
    manta.leave_room(job)
    manta.until_step(job, 3)
    service = psutil.Process(int(str(running_service(manta.home)["pid"])))
    ours = listening(own_processes.of_service(service, manta.paths))
    assert {"manta.api.cli", "ray::NodeDaemon", "ray::AgentOnNode"} <= set(ours.values()), (
        "it looks at the wrong processes"
    )
    asked = ours if ports == "of_ours" else range(1, 65536)
    with neighbour() as somebody:
        for address in {HERE, outward_address()} - {loopback_address()}:
            reached = [port for port in somebody.open_ports(address, asked) if port in ours]
            assert reached, "the neighbour does not reach this machine at all"
            assert service_port(manta) not in reached
            answers = [(ours[port], answers_without_key(somebody, address, port)) for port in reached]
            assert not [(name, answer) for name, answer in answers if answer]


def listening(processes):
    """The names of those of `processes` that listen, by port."""
    ports = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            name = "manta.api.cli" if "manta.api.cli" in process.cmdline() else process.name().partition(".")[0]
            listeners = [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
            ports |= {each.laddr.port: name for each in listeners}
    return ports


def service_port(manta):
    return int(manta.url.rpartition(":")[2])


def answers_without_key(somebody, address, port):
    """What a stranger hears at this port, if it is anything but the beginning of Ray's RPC or that a key is missing."""
    for words in HELLOS:
        heard = somebody.speak(address, port, words)
        if heard:
            refused = heard.startswith((b"HTTP/1.1 401", b"HTTP/1.0 401"))
            return b"" if refused or heard[3:4] == bytes([SETTINGS_FRAME]) else heard
    return b""
