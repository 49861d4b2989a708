"""The agent of one rank on the node where Ray has put it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from workers.node.folders import paths_on_node
from workers.node.host import this_host
from workers.paths import memory_socket
from workers.protocol.messages import Launched, LaunchOrder
from workers.rank.agent import Agent
from workers.settings import read_token_cache
from workers.system.ports import PortRange


class AgentOnNode(Agent):
    """Finds out by itself which folders it has there: they may be others than the control plane's."""

    def __init__(
        self,
        job: str,
        rank: int,
        home: str,
        installation: str = "",
        group: str = "",
        ports: str | None = None,
        reports_lines: bool = False,
    ):
        """`home`: the service's; `installation`: its id, as `workers/node/folders.py` takes it; `group`: the placement
        group that the agent is in; `ports`: a range on which it and its trainer listen, None: any; `reports_lines`:
        what its trainers print goes to the control plane, also where the node shares the home."""
        paths = paths_on_node(home, installation)
        logs = home if paths.home == Path(home) and not reports_lines else None
        self._snapshot_folder = str(paths.snapshot_folder(job))
        self._token_cache = str(read_token_cache(paths.token_cache))
        self._keeper = str(memory_socket(paths.runtime_folder, this_host().node))
        self._ports = None if ports is None else PortRange.of(ports)
        super().__init__(job, rank, logs, str(paths.runtime_folder), self._snapshot_folder, group, self._ports)

    async def launch(self, order: LaunchOrder) -> Launched:
        """As `Agent.launch`; where the order has snapshots made, they lie on this node."""
        return await super().launch(self._here(order))

    async def prepare(self, order: LaunchOrder) -> bool:
        """As `Agent.prepare`."""
        return await super().prepare(self._here(order))

    def _here(self, order: LaunchOrder) -> LaunchOrder:
        snapshots = None if order.snapshot_folder is None else self._snapshot_folder
        own = replace(order, token_cache=self._token_cache, memory_keeper=self._keeper, ports=self._ports)
        return replace(own, snapshot_folder=snapshots)
