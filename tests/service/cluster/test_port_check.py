"""Nodes that try each other's ports: which are closed, from where to where, and what is not known."""

import asyncio
import re
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster import port_check
from manta.service.cluster.agent_client import AgentFailed, AgentLost
from manta.service.cluster.nodes import RayNode
from manta.service.cluster.port_check import check_ports
from manta.workers.protocol.messages import Endpoint, ListeningPorts

HEAD = RayNode("head", ("10.0.0.1", 6380), "head", True, holds_ranks=False)


class Daemon:
    """A node's daemon; `closed`: (address, port) that it does not reach."""

    def __init__(self, address, closed):
        self.address, self.closed, self.tried = address, closed, []
        self.error = self.error_of_tries = None

    async def listen_for_a_moment(self, count, seconds):
        if self.error is not None:
            raise self.error
        return ListeningPorts(self.address, tuple(range(20_000, 20_000 + count)))

    async def unreached(self, addresses, seconds):
        if self.error_of_tries is not None:
            raise self.error_of_tries
        self.tried = addresses
        return [each for each in addresses if each in self.closed]


class Site:
    """A head and nodes n1, n2, ... at 10.0.0.2 and on; `closed_here`: what the control plane does not reach."""

    def __init__(self, count):
        self.closed_here, self.silent = [], set()
        self.daemons = {f"n{number}": Daemon(f"10.0.0.{number + 1}", []) for number in range(1, count + 1)}
        known = [HEAD, *(RayNode(name, (each.address, 6380), name) for name, each in self.daemons.items())]

        async def of(node):
            return None if node in self.silent else self.daemons[node]

        nodes = SimpleNamespace(known=AsyncMock(return_value=known), lost=set())
        self.cluster = SimpleNamespace(nodes=nodes, daemons=SimpleNamespace(of=of))

    def check(self):
        return asyncio.run(check_ports(self.cluster))


@pytest.fixture
def site(monkeypatch):
    def make(count):
        made = Site(count)

        async def unreached(addresses, seconds):
            return [each for each in addresses if each in made.closed_here]

        monkeypatch.setattr(port_check, "unreached", unreached)
        monkeypatch.setattr(port_check, "address_facing", lambda host: "10.0.0.9")
        return made

    return make


def test_port_check_tries_all_ports_of_other_nodes_and_of_ray_from_every_node(site):
    three = site(3)
    seen = three.check()
    assert (seen.problems, seen.left_out, seen.nodes) == ((), (), 3)
    tried = {(each.host, each.port) for each in three.daemons["n1"].tried}
    assert tried == {(f"10.0.0.{host}", port) for host in (3, 4) for port in (6380, 20_000, 20_001, 20_002)} | {
        ("10.0.0.1", 6380)
    }
    assert seen.tries == 3 * 9 + 3 * 4, "the control plane tries them all too"


def test_port_check_names_closed_ports_and_both_ends(site):
    three = site(3)
    three.daemons["n1"].closed = three.daemons["n3"].closed = [Endpoint("10.0.0.3", 20_001)]
    three.closed_here = [Endpoint("10.0.0.3", 20_001), Endpoint("10.0.0.3", 20_002)]
    (problem,) = three.check().problems
    assert problem.startswith(
        "ports 20001 and 20002 of node n2 (10.0.0.3) cannot be reached from node n1 (10.0.0.2), node n3 (10.0.0.4) and "
        "the control plane (10.0.0.9): open the ports of MANTA_PORTS"
    )


def test_port_check_reports_closed_ray_ports_separately(site):
    two = site(2)
    two.daemons["n1"].closed = [Endpoint("10.0.0.1", 6380), Endpoint("10.0.0.3", 6380)]
    problems = sorted(two.check().problems)
    assert [re.match(r"port 6380 of node (\w+) .*: open the ports of Ray", each)[1] for each in problems] == [
        "head",
        "n2",
    ]


def test_port_check_reports_nodes_that_cannot_take_part(site):
    three = site(3)
    three.silent = {"n1"}
    three.daemons["n2"].error = AgentFailed("all ports of 20000-20001 are in use")
    three.daemons["n3"].error_of_tries = AgentLost("the actor is dead")
    three.closed_here = [Endpoint("10.0.0.4", 6380)]
    seen = three.check()
    assert seen.left_out == (
        "node n1 (10.0.0.2) was not asked: its daemon does not answer",
        "node n2 (10.0.0.3) could not take part: all ports of 20000-20001 are in use",
        "node n3 (10.0.0.4) did not report which nodes it reaches: the actor is dead",
    )
    assert seen.nodes == 1 and "port 6380 of node n3" in seen.problems[0], "others tell of it"


def test_port_check_of_many_nodes_is_limited_to_a_few_peers_each_and_counts_those_shut_out(site, monkeypatch):
    six = site(6)
    for name in ("n2", "n3", "n4", "n5", "n6"):
        six.daemons[name].closed = [Endpoint("10.0.0.2", 20_000)]
    (problem,) = six.check().problems
    assert "from node n2 (10.0.0.3), node n3 (10.0.0.4), node n4 (10.0.0.5) and 2 more: " in problem
    monkeypatch.setattr(port_check, "PEERS", 4)
    many = site(20)
    assert many.check().nodes == 20
    targets = [{each.host for each in daemon.tried} - {"10.0.0.1"} for daemon in many.daemons.values()]
    assert all(len(these) == 4 for these in targets)
    assert all(sum(daemon.address in these for these in targets) == 4 for daemon in many.daemons.values())
    monkeypatch.setattr(port_check, "MAX_NODES", 5)
    assert many.check().nodes == 5


def test_port_check_of_a_single_node_tries_the_control_plane_and_the_head(site):
    seen = site(1).check()
    assert (seen.nodes, seen.tries, seen.problems) == (1, 1 + 4, ())
