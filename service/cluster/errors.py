"""Errors of the cluster, and of a node that a user names; and why nothing can be placed on a node, in sentences for
logs and waiting jobs."""

from __future__ import annotations

from collections.abc import Sequence

from manta.service.errors import ErrorKind, ServiceError
from manta.workers.protocol.messages import NodeDescription
from manta.workers.system.sockets import address_facing

OPEN_PORTS_ADVICE = "open the ports of MANTA_PORTS between all machines (docs/deploy/ray.md)"
OPEN_RAYS = "open the ports of Ray between all machines of the cluster (docs/deploy/ray.md)"
NAMED = 3
"""How many nodes, or ports, a sentence names before it only counts the rest."""
SAME_CODE = "install the same release there, or set MANTA_SHIP_CODE=1 to ship this one to the nodes"


class ClusterUnavailable(ServiceError):
    """Ray did not do what it was asked, or does not answer; the message is one line."""

    kind = ErrorKind("cluster_unavailable", 503, "Ray does not answer")

    def __init__(self, error: Exception):
        """`error`: the exception that Ray raised."""
        self.raised = type(error).__name__
        super().__init__((str(error).strip() or self.raised).splitlines()[-1])


def needs_traceback(error: Exception) -> bool:
    """Whether a log has to show where `error` was raised; what Ray does not do is said in one line."""
    return not isinstance(error, ClusterUnavailable)


class NodeNotFound(ServiceError):
    """No node, or more than one, has this id."""

    kind = ErrorKind("node_not_found", 404, "there is no such node, or several ids start with this")

    def __init__(self, node: str, matches: int):
        """`matches`: how many nodes have it."""
        many = (
            f"{matches} nodes have ids that start with {node}: give more characters"
            if matches
            else f"there is no node {node}"
        )
        super().__init__(f"{many}; `manta nodes` lists them")


class NodeLeaving(ServiceError):
    """The machine itself has said that the node is about to go away, which no user can change."""

    kind = ErrorKind("node_leaving", 409, "the node's machine has announced that it is about to shut down")

    def __init__(self, node: str, reason: str):
        super().__init__(
            f"node {node} is being drained by its machine ({reason}); it stays once that notice is withdrawn there"
        )


class NodeUnreachable(ServiceError):
    """The node's daemon does not answer."""

    kind = ErrorKind("node_unreachable", 503, "the node does not answer")

    def __init__(self, node: str):
        super().__init__(f"the daemon of node {node} does not answer, so the request did not reach it; try again")


def problem_of(about: NodeDescription, other_code: bool) -> str | None:
    """The problem of a node whose daemon answers; None: it has none. `other_code`: the code installed there differs
    from ours."""
    name = f"node {about.host} ({about.address})"
    if other_code:
        return f"{name} runs another release of Manta than the control plane: {SAME_CODE}"
    if about.unshared:
        return (
            f"{name} does not share {about.unshared[0]}, where the checkpoints would be: set MANTA_CHECKPOINTS to an "
            "object store, or to a folder that the control plane and the nodes share at the same path and can write to"
        )
    return None


def problem_of_port(name: str, host: str, port: int) -> str:
    """The problem of a node whose daemon listens on a port that the control plane cannot reach."""
    here = address_facing(host)
    return (
        f"port {port} of node {name} ({host}) cannot be reached from the control plane ({here}), though its Ray can: "
        f"{OPEN_PORTS_ADVICE}"
    )


def problem_of_ports(node: str, ports: Sequence[int], sources: Sequence[str], advice: str) -> str:
    """The problem of a `node` some of whose `ports` cannot be reached from some others, the `sources`; all in words."""
    word = "port" if len(ports) == 1 else "ports"
    return f"{word} {_some(list(map(str, ports)))} of node {node} cannot be reached from {_some(sources)}: {advice}"


def _some(these: Sequence[str]) -> str:
    if len(these) > NAMED + 1:
        return f"{', '.join(these[:NAMED])} and {len(these) - NAMED} more"
    return " and ".join(filter(None, (", ".join(these[:-1]), these[-1])))


def problem_of_start(node: str, error: str) -> str:
    """The problem of a node where no daemon can be started, from the last line of the `error`."""
    name = f"node {node[:12]}"
    if "No module named" in error:
        missing = error.rpartition("No module named")[2].strip(" '\".")
        if missing.partition(".")[0] == "manta":
            return f"{name} has no Manta: {SAME_CODE}"
        return f"{name} lacks the Python package {missing!r}, which Manta needs there: install it"
    return f"the daemon of {name} does not start: {error}"
