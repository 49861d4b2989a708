"""`manta drain`: which node is meant, and when it is empty."""

import json
import os
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from manta.api.cli import nodes as commands
from manta.api.cli.main import app
from manta.api.schemas import Node
from manta.workers.node import local_drain
from manta.workers.rank.agent import AgentOnNode


def node(name, address, alive=True, ranks=()):
    return Node.model_construct(id=name, address=address, alive=alive, ranks=list(ranks))


class Client:
    """A service with one node, from which a rank goes with each look."""

    def __init__(self, ranks):
        self.ranks, self.asked = ranks, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def cluster(self):
        self.ranks = max(0, self.ranks - 1)
        return SimpleNamespace(nodes=[node("abcd", "10.0.0.1", ranks=range(self.ranks))])

    def drain(self, name, seconds):
        self.asked.append((name, seconds))
        return node("abcd", "10.0.0.1")


@pytest.fixture
def drain(monkeypatch):
    monkeypatch.setattr(commands, "POLL_SECONDS", 0.0)

    def run(client, *words, code=0):
        monkeypatch.setattr(commands, "connect", lambda url: client)
        result = CliRunner().invoke(app, ["drain", *words])
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_drain_command_asks_the_service_to_drain_a_node(drain):
    client = Client(0)
    assert drain(client, "abcd", "--deadline", "25") == "abcd is being drained\n"
    assert client.asked == [("abcd", 25.0)]


@pytest.mark.parametrize(("words", "why"), [
    ((), "give a node, or --this-node"), (("abcd", "--this-node"), "give a node, or --this-node"),
    (("--this-node", "--url", "http://there"), "--this-node uses no service"),
    (("--this-node", "--undo"), "--undo goes with a node"), (("abcd", "--undo", "--wait"), "without --wait"),
])  # fmt: skip
def test_drain_needs_exactly_one_node(drain, words, why):
    assert why in drain(Client(0), *words, code=2)


def test_drain_with_wait_returns_once_the_node_is_empty_or_fails_at_its_deadline(drain):
    client = Client(5)
    assert drain(client, "abcd", "--wait") == "abcd is being drained\n" and client.ranks == 0
    assert "was not drained within 0 s" in drain(Client(5), "abcd", "--wait", "--deadline", "0", code=1)


@pytest.fixture
def agents(monkeypatch):
    """The processes of this machine, by name and user, of which the last goes with each look; and the deadlines that
    its daemons are given."""
    running, deadlines = [], []

    def processes():
        for name, user in running:
            yield SimpleNamespace(pid=7, name=lambda n=name: n, uids=lambda u=user: SimpleNamespace(real=u))
        if running:
            running.pop()

    def drain_nodes_here(seconds):
        deadlines.append(seconds)
        return ["abcd"]

    monkeypatch.setattr(commands.psutil, "process_iter", processes)
    monkeypatch.setattr(commands, "drain_nodes_here", drain_nodes_here)
    return running, deadlines


def nobody(url):
    raise AssertionError("the service is asked")


def test_drain_of_this_node_needs_no_service_and_waits_for_its_own_agents(agents, drain):
    (running, deadlines), ours, me = agents, f"ray::{AgentOnNode.__name__}"[:15], os.getuid()
    running += [(ours, me + 1), (ours, me), (ours, me), ("python", me)]
    assert drain(nobody, "--this-node", "--wait", "--deadline", "25") == "abcd is being drained\n"
    assert deadlines == [25.0] and running == [], "it looks until no agent of this user is left"


def test_drain_of_this_node_fails_at_its_deadline_while_agents_run(agents, drain):
    agents[0].extend([(commands.AGENT, os.getuid())] * 3)
    assert "this machine was not drained within 0 s" in drain(
        nobody, "--this-node", "--wait", "--deadline", "0", code=1
    )


def test_drain_of_this_node_without_a_daemon_does_nothing(monkeypatch, tmp_path, drain):
    monkeypatch.setattr(local_drain, "RUNTIME_FOLDERS", (tmp_path, "manta-{user}-{tag}"))
    assert drain(nobody, "--this-node", "--wait") == "no Manta processes of this user are running on this machine\n"
    assert json.loads(drain(nobody, "--this-node", "--json")) == {"nodes": []}


def test_drain_names_a_daemon_of_this_node_that_does_not_answer(monkeypatch, drain):
    monkeypatch.setattr(local_drain, "ANSWER_SECONDS", 0.01)
    # The path of a socket may have 107 bytes, which that of the test's own folder may exceed.
    with tempfile.TemporaryDirectory(dir="/tmp") as place, socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.setattr(local_drain, "RUNTIME_FOLDERS", (Path(place), "manta-{user}-{tag}"))
        folder = Path(place) / f"manta-{os.getuid()}-0"
        folder.mkdir()
        listener.bind(str(local_drain.drain_socket(folder, "abcd")))
        listener.listen()
        assert "does not answer: name the node to the service, `manta drain NODE`" in drain(
            nobody, "--this-node", code=2
        )


def test_drain_command_refuses_an_empty_node_name():
    said = CliRunner().invoke(app, ["drain", ""])
    assert (said.exit_code, said.stderr) == (2, "give a node, or --this-node\n")
