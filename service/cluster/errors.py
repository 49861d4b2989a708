"""Errors of the cluster, and of a node that a user names."""

from __future__ import annotations

from workers.errors import MantaError


class ClusterUnavailable(MantaError):
    """Ray did not do what it was asked, or does not answer; the message is one line."""

    def __init__(self, error: Exception):
        """`error`: the exception that Ray raised."""
        self.kind = type(error).__name__
        super().__init__((str(error).strip() or self.kind).splitlines()[-1])


def needs_traceback(error: Exception) -> bool:
    """Whether a log has to show where `error` was raised; what Ray does not do is said in one line."""
    return not isinstance(error, ClusterUnavailable)


class NodeNotFound(MantaError):
    """No node, or more than one, has this id."""

    def __init__(self, node: str, matches: int):
        """`matches`: how many nodes have it."""
        many = (
            f"{matches} nodes have ids that begin with {node}: give more of it"
            if matches
            else f"there is no node {node}"
        )
        super().__init__(f"{many}; `manta nodes` lists them")


class NodeLeaving(MantaError):
    """The machine itself has said that the node is about to go away, which no user can change."""

    def __init__(self, node: str, reason: str):
        super().__init__(
            f"node {node} is being drained by its machine ({reason}); it stays once that notice is withdrawn there"
        )


class NodeUnreachable(MantaError):
    """The node's daemon does not answer."""

    def __init__(self, node: str):
        super().__init__(f"the daemon of node {node} does not answer, so the request did not reach it; try again")
