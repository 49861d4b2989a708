"""The agent of one rank on the node where Ray has put it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from workers.node.folders import paths_on_node
from workers.protocol.messages import Launched, LaunchOrder
from workers.rank.agent import Agent


class AgentOnNode(Agent):
    """Finds out by itself which folders it has there: they may be others than the control plane's."""

    def __init__(self, job: str, rank: int, home: str, installation: str = "", group: str = ""):
        """`home`: the service's; `installation`: its id, as `workers/node/folders.py` takes it; `group`: the placement
        group that the agent is in."""
        paths = paths_on_node(home, installation)
        logs = home if paths.home == Path(home) else None
        self._snapshot_folder = str(paths.snapshot_folder(job))
        super().__init__(job, rank, logs, str(paths.runtime_folder), self._snapshot_folder, group)

    async def launch(self, order: LaunchOrder) -> Launched:
        """As `Agent.launch`; where the order has snapshots made, they lie on this node."""
        return await super().launch(self._here(order))

    async def prepare(self, order: LaunchOrder) -> bool:
        """As `Agent.prepare`."""
        return await super().prepare(self._here(order))

    def _here(self, order: LaunchOrder) -> LaunchOrder:
        return order if order.snapshot_folder is None else replace(order, snapshot_folder=self._snapshot_folder)
