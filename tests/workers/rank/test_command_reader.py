"""A trainer takes its agent's commands in their order, until the agent hangs up."""

import queue
import socket

import pytest

from manta.workers.protocol.messages import Fault, LaunchOrder
from manta.workers.protocol.requests import Arm, DumpFlightRecord, Go, Rest, SaveAndEnd
from manta.workers.rank import control_socket
from manta.workers.rank.control_socket import EXIT_ORPHANED, CommandReader, command_line, exit_orphaned

SECONDS = 20.0


def order(generation):
    return LaunchOrder("job-1", generation, 3, {})


@pytest.fixture
def reader():
    """The agent's end of a control socket, the reader at the other one, and what it has called."""
    ours, theirs = socket.socketpair()
    called = queue.SimpleQueue()
    made = CommandReader(theirs, called.put, lambda: called.put("orphaned"))
    yield ours, made, called
    ours.close()
    while called.get(timeout=SECONDS) != "orphaned":
        continue
    theirs.close()


def test_trainer_commands_are_taken_in_order_except_for_launch_orders(reader):
    ours, commands, called = reader
    given = [Rest(4), Go(order(7)), SaveAndEnd(6), Arm(Fault("f", "kill", 3)), DumpFlightRecord()]
    for command in given:
        ours.sendall(command_line(command))
    taken = [each for each in given if not isinstance(each, Go)]
    assert [called.get(timeout=SECONDS) for _ in taken] == taken
    assert commands.next_order(after=0) == order(7)


def test_orders_of_generations_that_are_over_are_passed_over(reader):
    ours, commands, _ = reader
    for generation in (1, 2, 5, 6):
        ours.sendall(command_line(Go(order(generation))))
    assert commands.next_order(after=2) == order(5)
    assert commands.next_order(after=5) == order(6)


def test_trainer_that_gets_an_unreadable_command_counts_as_orphaned(reader, monkeypatch):
    monkeypatch.setattr(control_socket.threading, "excepthook", lambda arguments: None)
    ours, _, called = reader
    ours.sendall(b"nonsense\n")
    assert called.get(timeout=SECONDS) == "orphaned"
    called.put("orphaned")  # for the fixture


def test_orphaned_trainer_exits_with_its_own_status(monkeypatch):
    statuses = []
    monkeypatch.setattr(control_socket.os, "_exit", statuses.append)
    exit_orphaned()
    assert statuses == [EXIT_ORPHANED]
