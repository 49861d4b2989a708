"""Whether the nodes reach each other, checked before a job fails because they do not: each listens for a moment on a
few of its ports, and others try those, and Ray's ports. The result does not affect where jobs are placed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from manta.service.cluster.agent_client import AgentError, NodeClient, within
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.errors import OPEN_PORTS_ADVICE, OPEN_RAYS, problem_of_ports
from manta.service.cluster.nodes import RayNode
from manta.workers.node.host import unreached
from manta.workers.protocol.messages import Endpoint
from manta.workers.system.sockets import address_facing

MAX_NODES, PEERS = 256, 16
"""If there are more nodes, this many are drawn, and each tries this many others: a thousand nodes would need a million
attempts."""
PORTS = 3
"""How many of its ports each node listens on: a firewall may be configured for another range than ours."""
LISTEN_SECONDS, CONNECT_SECONDS = 20.0, 3.0
REQUEST_SECONDS = 10.0


@dataclass(frozen=True)
class PortCheck:
    """The result."""

    problems: tuple[str, ...]
    """Which ports are closed, from where to where: a sentence for each node and kind of ports."""
    left_out: tuple[str, ...]
    """Sentences about nodes of which nothing is known."""
    nodes: int
    """How many nodes took part."""
    tries: int
    """How many connections were tried."""


@dataclass(frozen=True)
class _Port:
    """A port that is tried: `at`, of the node `of`."""

    at: Endpoint
    of: RayNode
    advice: str
    """What to do if it is closed."""


@dataclass(frozen=True)
class _Party:
    """A node that takes part."""

    node: RayNode
    daemon: NodeClient
    ports: list[_Port]
    """Where it accepts connections."""


@dataclass(frozen=True)
class _Closed:
    port: _Port
    source: str
    """Who could not reach it, in words."""


async def check_ports(cluster: Cluster) -> PortCheck:
    """Let the nodes try each other. Raises ClusterUnavailable."""
    alive = [node for node in await cluster.nodes.known() if node.alive and node.id not in cluster.nodes.lost]
    nodes = [node for node in alive if node.holds_ranks]
    drawn = random.sample(nodes, min(len(nodes), MAX_NODES))
    invited = await asyncio.gather(*(_invite(cluster, node) for node in drawn))
    parties = [each for each in invited if isinstance(each, _Party)]
    without_ranks = [_of_ray(node) for node in alive if not node.holds_ranks]
    plans = [_ports_of_peers(number, parties) + without_ranks for number in range(len(parties))]
    from_here = [port for party in parties for port in party.ports]
    tries = (_try_from(party, plan) for party, plan in zip(parties, plans, strict=True))
    answers = await asyncio.gather(*tries, _try_from_here(from_here))
    closed = [each for answer in answers if not isinstance(answer, str) for each in answer]
    left_out = [each for each in (*invited, *answers) if isinstance(each, str)]
    count = sum(map(len, plans)) + len(from_here)
    return PortCheck(tuple(_problems(closed)), tuple(sorted(left_out)), len(parties), count)


async def _invite(cluster: Cluster, node: RayNode) -> _Party | str:
    """The node as a participant, or a sentence that says why it does not take part."""
    daemon = await cluster.daemons.of(node.id)
    if daemon is None:
        return f"node {_named(node)} was not asked: its daemon does not answer"
    try:
        listening = await within(REQUEST_SECONDS, daemon.listen_for_a_moment(PORTS, LISTEN_SECONDS))
    except AgentError as error:
        return f"node {_named(node)} could not take part: {error}"
    ours = [_Port(Endpoint(listening.host, port), node, OPEN_PORTS_ADVICE) for port in listening.ports]
    return _Party(node, daemon, [_of_ray(node), *ours])


def _of_ray(node: RayNode) -> _Port:
    return _Port(Endpoint(*node.raylet), node, OPEN_RAYS)


def _ports_of_peers(number: int, parties: Sequence[_Party]) -> list[_Port]:
    """Ports of the nodes that party `number` tries; each node is tried by as many others as it tries."""
    others = min(PEERS, len(parties) - 1)
    peers = [parties[(number + distance) % len(parties)] for distance in range(1, others + 1)]
    return [port for peer in peers for port in peer.ports]


async def _try_from(party: _Party, ports: Sequence[_Port]) -> list[_Closed] | str:
    """What the party cannot reach, or a sentence if it did not say."""
    by_address = {port.at: port for port in ports}
    try:
        missed = await within(REQUEST_SECONDS, party.daemon.unreached(list(by_address), CONNECT_SECONDS))
    except AgentError as error:
        return f"node {_named(party.node)} did not report which nodes it reaches: {error}"
    return [_Closed(by_address[address], f"node {_named(party.node)}") for address in missed]


async def _try_from_here(ports: Sequence[_Port]) -> list[_Closed]:
    by_address = {port.at: port for port in ports}
    missed = await unreached(list(by_address), CONNECT_SECONDS)
    return [_Closed(by_address[address], f"the control plane ({address_facing(address.host)})") for address in missed]


def _problems(closed: Iterable[_Closed]) -> list[str]:
    """A sentence for each node and kind of ports."""
    grouped: dict[tuple[str, str], list[_Closed]] = {}
    for each in closed:
        grouped.setdefault((each.port.of.id, each.port.advice), []).append(each)
    return sorted(_problem(these) for these in grouped.values())


def _problem(these: Sequence[_Closed]) -> str:
    port = these[0].port
    ports, sources = {each.port.at.port for each in these}, {each.source for each in these}
    return problem_of_ports(_named(port.of, port.at.host), sorted(ports), sorted(sources), port.advice)


def _named(node: RayNode, address: str | None = None) -> str:
    return f"{node.host or node.id[:12]} ({address or node.raylet[0]})"
