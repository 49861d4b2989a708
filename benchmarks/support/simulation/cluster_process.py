"""A cluster on paper in a process of its own: its agents and their ranks outlive the control planes that use it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support.simulation.messages import serve_requests
from manta.service.cluster.agent_client import AgentLost
from manta.service.cluster.placement import Seat
from manta.workers.config import ParallelConfig
from manta.workers.protocol.json_codec import JsonObject, to_json
from manta.workers.protocol.messages import Endpoint, Heartbeat
from manta.workers.protocol.remote_call import Ownership, StaleOwner, serve
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.simulated_training import SimulatedTraining

HOST = "127.0.0.1"


class SimulatedCluster:
    """What is asked of the cluster itself; each method is one request."""

    def __init__(self, home: Path, slots: dict[str, int]):
        """`slots`: of each node, by its name."""
        self.cluster = FakeCluster(home, **slots)
        self.training = SimulatedTraining(self.cluster)
        self._ports: dict[str, int] = {}
        self._owners: dict[str, Ownership] = {}
        self.refused = 0
        """Orders of owners that others had taken over from."""

    async def living(self) -> list[str]:
        """The nodes."""
        return await self.cluster.nodes.living()

    async def listen(self) -> None:
        """Have each node send heartbeats, at a port of its own."""
        for node in self.cluster.nodes.slots:
            server = await asyncio.start_server(partial(_send_heartbeats, node), HOST, 0)
            self._ports[node] = server.sockets[0].getsockname()[1]

    async def ports(self) -> dict[str, int]:
        """Of each node where it listens on this machine."""
        return self._ports

    async def units(self) -> dict[str, list[int]]:
        """Of each node how many slots it has, and how many of them are free."""
        nodes = self.cluster.nodes
        return {node: [slots, slots - nodes.used[node]] for node, slots in nodes.slots.items()}

    async def acquire(
        self, job: str, generation: int, layout: JsonObject, avoid: list[str], replicas: list[int]
    ) -> None:
        """Places of these replicas. Raises NotPlaced."""
        model = ParallelConfig.model_validate(layout)
        await self.cluster.groups.acquire(job, generation, model, "manta_slot", 0.0, avoid, replicas)

    async def group_states(self) -> dict[str, str]:
        """By name."""
        return await self.cluster.groups.states()

    async def remove_groups(self, names: list[str]) -> None:
        """Give these places back."""
        await self.cluster.groups.remove(names)

    async def start_agents(
        self, job: str, generation: int, ranks: list[int], groups: list[str], bundles: list[int]
    ) -> list[str]:
        """Agents for these ranks in these bundles of these groups; their names."""
        seats = {rank: Seat(group, bundle) for rank, group, bundle in zip(ranks, groups, bundles, strict=True)}
        return [agent.name or "" for agent in await self.cluster.agents.start(job, generation, seats, "manta_slot")]

    async def agent_names(self) -> list[str]:
        """Of all agents."""
        return await self.cluster.agents.names()

    async def node_of(self, agent: str) -> str | None:
        """Where it is; None for one that is gone."""
        living = self.cluster.agents.living.get(agent)
        return None if living is None else living.node

    async def kill(self, agents: list[str]) -> None:
        """Kill those of them that live."""
        await self.cluster.agents.kill(await self.cluster.agents.find(agents))

    async def end(self, agents: list[str], keep_snapshots: bool) -> None:
        """Let them end their trainers, and kill them."""
        await self.cluster.agents.end(await self.cluster.agents.find(agents), keep_snapshots)

    async def start_store(self, node: str, job: str, generation: int) -> Endpoint:
        """A rendezvous store."""
        return await (await self._daemon(node)).start_store(job, generation)

    async def end_job(self, node: str, job: str, keep_snapshots: bool) -> None:
        """Remove what `job` has left on the node."""
        await (await self._daemon(node)).end_job(job, keep_snapshots)

    async def _daemon(self, node: str) -> Any:
        return (await self.cluster.daemons.ensure())[node]

    async def account(self) -> JsonObject:
        """What has happened: the commits of each job, what may not have, and what is held."""
        return {
            "committed": dict(self.training.committed),
            "problems": self.training.problems,
            "refused": self.refused,
            "held": sorted([*self.cluster.agents.living, *self.cluster.groups.held]),
        }

    async def answer(self, agent: str | None, method: str, arguments: JsonObject) -> Any:
        """Any request."""
        if agent is None:
            return await serve(self, method, arguments)
        living = self.cluster.agents.living.get(agent)
        if living is None:
            raise AgentLost("the actor is dead")
        try:
            self._owners.setdefault(agent, Ownership()).admit(method, arguments)
        except StaleOwner:
            self.refused += 1
            raise
        return await serve(living, method, arguments)


async def _send_heartbeats(node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One for each line that is read, as a node's daemon does."""
    heartbeat = json.dumps(to_json(Heartbeat(node))).encode() + b"\n"
    with contextlib.suppress(ConnectionError):
        while await reader.readline():
            writer.write(heartbeat)
    writer.close()


async def run(folder: Path, slots: dict[str, int]) -> None:
    """Serve at `folder`/socket until killed."""
    cluster = SimulatedCluster(folder, slots)
    await cluster.listen()
    server = await serve_requests(str(folder / "socket"), cluster.answer)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), {f"node-{i}": int(sys.argv[3]) for i in range(int(sys.argv[2]))}))
