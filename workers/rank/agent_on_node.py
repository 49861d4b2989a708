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
    """Determines its folders on this node by itself: they may differ from the control plane's."""

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
        """`home`: the service's; `installation`: its id, for `workers/node/folders.py`; `group`: the agent's placement
        group; `ports`: a range for it and its trainer to listen on, None: any; `reports_lines`: the output of its
        trainers goes to the control plane, even if the node shares the home."""
        paths = paths_on_node(home, installation)
        logs = home if paths.home == Path(home) and not reports_lines else None
        self._snapshot_folder = str(paths.snapshot_folder(job))
        self._token_cache = str(read_token_cache(paths.token_cache))
        self._keeper = str(memory_socket(paths.runtime_folder, this_host().node))
        self._ports = None if ports is None else PortRange.of(ports)
        super().__init__(job, rank, logs, str(paths.runtime_folder), self._snapshot_folder, group, self._ports)

    async def launch(self, order: LaunchOrder) -> Launched:
        """Like `Agent.launch`; if the order includes snapshots, they are on this node."""
        return await super().launch(self._here(order))

    async def prepare(self, order: LaunchOrder) -> bool:
        """Like `Agent.prepare`."""
        return await super().prepare(self._here(order))

    def _here(self, order: LaunchOrder) -> LaunchOrder:
        snapshots = None if order.snapshot_folder is None else self._snapshot_folder
        own = replace(order, token_cache=self._token_cache, memory_keeper=self._keeper, ports=self._ports)
        return replace(own, snapshot_folder=snapshots)
