"""`manta nodes`, `drain`: the cluster's nodes, and how jobs are made to leave one."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Annotated

import psutil
import typer

from api.cli import render
from api.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, Json, Url, connect, fail, show
from api.client import MantaClient
from workers.node.local_drain import drain_nodes_here

LOOK_SECONDS = 0.5
AGENT = "ray::AgentOnNode"[:15]
"""How Ray names an agent's process, as far as the kernel keeps it (workers/rank/agent_on_node.py)."""


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(drain)
    app.command()(nodes)


def drain(
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="Id of the node, or enough of its start.")] = None,
    deadline: Annotated[float, typer.Option("--deadline", min=0, help="Seconds that the node lives on.")] = 120.0,
    this_node: Annotated[
        bool, typer.Option("--this-node", help="The node that this command runs on, without a word to the service.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when nothing runs there any more.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Have all jobs leave a node before it goes away."""
    if (node is None) == (not this_node):
        raise fail("name a node, or say --this-node", EXIT_BAD_INPUT)
    if node is None:
        if url is not None:
            raise fail("--this-node asks no service: leave --url away, or name the node", EXIT_BAD_INPUT)
        _drain_this_one(deadline, wait, as_json)
        return
    with connect(url) as client:
        answer = client.drain(node, deadline)
        show(answer, as_json, lambda console: console.print(f"{answer.id} is being left", highlight=False))
        _wait_until(lambda: _is_empty(client, answer.id), answer.id, deadline if wait else None)


def _drain_this_one(deadline: float, wait: bool, as_json: bool) -> None:
    left = drain_nodes_here(deadline)
    words = [f"{each} is being left" for each in left] or ["nothing of Manta that is this user's runs on this machine"]
    typer.echo(json.dumps({"nodes": left}) if as_json else "\n".join(words))
    if left:
        _wait_until(lambda: not agents_here(), "this machine", deadline if wait else None)


def agents_here() -> list[int]:
    """Processes of agents that this user has on this machine: those of ranks, and those that still hand out the state
    of ranks which have left."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid() and process.name().startswith(AGENT):
                pids.append(int(process.pid))
    return pids


def _is_empty(client: MantaClient, node: str) -> bool:
    return not any(each.ranks for each in client.cluster().nodes if each.id == node and each.alive)


def _wait_until(empty: Callable[[], bool], name: str, seconds: float | None) -> None:
    """Fails where `name` is not empty after so many seconds; None: does not wait."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is not None and not empty():
        if time.monotonic() >= deadline:
            raise fail(f"{name} was not left within {seconds:g} s: see `manta nodes`", EXIT_FAILED)
        time.sleep(LOOK_SECONDS)


def nodes(url: Url = None, as_json: Json = False) -> None:
    """Show the cluster's nodes and what runs on them."""
    with connect(url) as client:
        cluster = client.cluster()
    show(cluster, as_json, lambda console: render.node_table(console, cluster))
