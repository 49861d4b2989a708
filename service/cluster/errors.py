"""What can be wrong with a node that a user names."""

from __future__ import annotations

from workers.errors import MantaError


class NodeNotFound(MantaError):
    """No node, or more than one, goes by this id."""

    def __init__(self, node: str, found: int):
        """`found`: how many do."""
        many = (
            f"{found} nodes have ids that begin with {node}: give more of it" if found else f"there is no node {node}"
        )
        super().__init__(f"{many}; `manta nodes` lists them")


class NodeUnreachable(MantaError):
    """The node's daemon does not answer."""

    def __init__(self, node: str):
        super().__init__(f"the daemon of node {node} does not answer, so it could not be told; try again")
