"""`manta drain`: which node is meant, and when it is empty."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from api.cli import nodes as commands
from api.cli.main import app
from api.cli.nodes import NotThisNode, own_addresses, this_one
from api.schemas import Node

commands.register(app)


def node(name, address, alive=True, ranks=()):
    return Node.model_construct(id=name, address=address, alive=alive, ranks=list(ranks))


NODES = [node("a", "10.0.0.1"), node("b", "10.0.0.2"), node("old", "10.0.0.2", alive=False), node("c", "10.0.0.3")]


def test_the_node_at_one_of_this_machines_addresses_is_this_one():
    assert this_one(NODES, {"192.0.2.1", "10.0.0.2"}) == "b"


@pytest.mark.parametrize(("addresses", "why"), [
    ({"192.0.2.1"}, "no node is at 192.0.2.1"), ({"10.0.0.1", "10.0.0.3"}, "2 nodes are on this machine"),
])  # fmt: skip
def test_none_or_several_are_no_answer(addresses, why):
    with pytest.raises(NotThisNode, match=f"^{why}; those of the cluster are at 10.0.0.1, 10.0.0.2, .*: name one"):
        this_one(NODES, addresses)


def test_a_machine_without_a_network_has_its_own_address_alone(monkeypatch):
    def interfaces(*addresses):
        given = {"i": [SimpleNamespace(address=each) for each in addresses]}
        monkeypatch.setattr(commands.psutil, "net_if_addrs", lambda: given)

    interfaces("127.0.0.1")
    assert own_addresses() == {"127.0.0.1"}
    interfaces("127.0.0.1", "192.0.2.7", "fe80::1")
    assert own_addresses() == {"192.0.2.7", "fe80::1"}


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
    monkeypatch.setattr(commands, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(commands, "own_addresses", lambda: {"10.0.0.1"})

    def run(client, *words, code=0):
        monkeypatch.setattr(commands, "connect", lambda url: client)
        result = CliRunner().invoke(app, ["drain", *words])
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_this_node_is_drained(drain):
    client = Client(0)
    assert drain(client, "--this-node", "--deadline", "25") == "abcd is being left\n"
    assert client.asked == [("abcd", 25.0)]


@pytest.mark.parametrize("words", [(), ("abcd", "--this-node")])
def test_one_node_has_to_be_meant(drain, words):
    assert "name a node, or say --this-node" in drain(Client(0), *words, code=2)


def test_who_waits_is_told_when_it_is_empty_or_that_it_was_not_in_time(drain):
    client = Client(5)
    assert drain(client, "abcd", "--wait") == "abcd is being left\n" and client.ranks == 0
    assert "was not left within 0 s" in drain(Client(5), "abcd", "--wait", "--deadline", "0", code=1)
