"""`manta nodes`, `drain`: listing and draining the cluster's nodes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Annotated

import psutil
import typer

from manta.api.cli import render
from manta.api.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, Json, Url, app, connect, fail, show
from manta.api.client import Client
from manta.workers.node.local_drain import drain_nodes_here

POLL_SECONDS = 0.5
AGENT = "ray::AgentOnNode"[:15]
"""Ray's name of an agent's process, as truncated by the kernel (workers/rank/agent.py)."""


@app.command()
def drain(
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="Id of the node, or a unique prefix.")] = None,
    deadline: Annotated[float, typer.Option("--deadline", min=0, help="Seconds until the node goes away.")] = 120.0,
    this_node: Annotated[
        bool, typer.Option("--this-node", help="The node that this command runs on, without contacting the service.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until nothing is running on the node.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Use the node again.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Drain a node: all jobs move away before it goes away.

    A node that stays takes jobs again after --undo."""
    node = node or None  # "" names none
    if (node is None) == (not this_node):
        raise fail("give a node, or --this-node", EXIT_BAD_INPUT)
    if undo and (node is None or wait):
        raise fail("--undo goes with a node and without --wait: there is nothing to wait for", EXIT_BAD_INPUT)
    if node is None:
        if url is not None:
            raise fail("--this-node uses no service: omit --url, or give the node", EXIT_BAD_INPUT)
        _drain_this_one(deadline, wait, as_json)
        return
    with connect(url) as client:
        if undo:
            stays = client.undrain(node)
            show(stays, as_json, lambda console: console.print(f"{stays.id} accepts ranks again", highlight=False))
            return
        answer = client.drain(node, deadline)
        show(answer, as_json, lambda console: console.print(f"{answer.id} is being drained", highlight=False))
        _wait_until(lambda: _is_empty(client, answer.id), answer.id, deadline if wait else None)


def _drain_this_one(deadline: float, wait: bool, as_json: bool) -> None:
    left = drain_nodes_here(deadline)
    words = [f"{each} is being drained" for each in left] or [
        "no Manta processes of this user are running on this machine"
    ]
    typer.echo(json.dumps({"nodes": left}) if as_json else "\n".join(words))
    if left:
        _wait_until(lambda: not agents_here(), "this machine", deadline if wait else None)


def agents_here() -> list[int]:
    """This user's agent processes on this machine: those of ranks, and those that still serve the state of ranks that
    have moved away."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid() and process.name().startswith(AGENT):
                pids.append(int(process.pid))
    return pids


def _is_empty(client: Client, node: str) -> bool:
    return not any(each.ranks for each in client.cluster().nodes if each.id == node and each.alive)


def _wait_until(empty: Callable[[], bool], name: str, seconds: float | None) -> None:
    """Fails if `name` is not empty after this many seconds; None: does not wait."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is not None and not empty():
        if time.monotonic() >= deadline:
            raise fail(f"{name} was not drained within {seconds:g} s: see `manta nodes`", EXIT_FAILED)
        time.sleep(POLL_SECONDS)


@app.command()
def nodes(url: Url = None, as_json: Json = False) -> None:
    """List the cluster's nodes and their ranks."""
    with connect(url) as client:
        cluster = client.cluster()
    show(cluster, as_json, lambda console: render.node_table(console, cluster))
