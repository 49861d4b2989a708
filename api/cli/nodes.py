"""`manta nodes`, `drain`: the cluster's nodes, and how jobs are made to leave one."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Annotated

import psutil  # type: ignore[import-untyped]
import typer

from api.cli import render
from api.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, Json, Url, connect, fail, show
from api.client import MantaClient
from api.schemas import Node
from workers.errors import MantaError
from workers.system.own_address import LOOPBACK

LOOK_SECONDS = 0.5


class NotThisNode(MantaError):
    """It cannot be told which node of the cluster this machine is."""


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(drain)
    app.command()(nodes)


def drain(
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="Id of the node, or enough of its start.")] = None,
    deadline: Annotated[float, typer.Option("--deadline", min=0, help="Seconds that the node lives on.")] = 120.0,
    this_node: Annotated[bool, typer.Option("--this-node", help="The node that this command runs on.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when nothing runs there any more.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Have all jobs leave a node before it goes away."""
    if (node is None) == (not this_node):
        raise fail("name a node, or say --this-node", EXIT_BAD_INPUT)
    with connect(url) as client:
        answer = client.drain(this_one(client.cluster().nodes, own_addresses()) if node is None else node, deadline)
        stays = wait and not _until_empty(client, answer.id, deadline)
    show(answer, as_json, lambda console: console.print(f"{answer.id} is being left", highlight=False))
    if stays:
        raise fail(f"{answer.id} was not left within {deadline:g} s: see `manta nodes`", EXIT_FAILED)


def this_one(nodes: Sequence[Node], addresses: Collection[str]) -> str:
    """The id of the living node that has one of these addresses. Raises NotThisNode."""
    here = [node.id for node in nodes if node.alive and node.address in addresses]
    if len(here) == 1:
        return here[0]
    known = ", ".join(sorted(node.address for node in nodes))
    several = f"{len(here)} nodes are on this machine" if here else f"no node is at {', '.join(sorted(addresses))}"
    raise NotThisNode(f"{several}; those of the cluster are at {known}: name one, as `manta nodes` shows them")


def own_addresses() -> set[str]:
    """The addresses under which others reach this machine; where there is none, its own."""
    own = {each.address for interface in psutil.net_if_addrs().values() for each in interface}
    return own - {LOOPBACK} or {LOOPBACK}


def _until_empty(client: MantaClient, node: str, seconds: float) -> bool:
    """Whether nothing runs on `node` within so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        if not any(each.ranks for each in client.cluster().nodes if each.id == node and each.alive):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_SECONDS)


def nodes(url: Url = None, as_json: Json = False) -> None:
    """Show the cluster's nodes and what runs on them."""
    with connect(url) as client:
        cluster = client.cluster()
    show(cluster, as_json, lambda console: render.node_table(console, cluster))
