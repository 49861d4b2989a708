"""A node's heartbeat answers every ping, says at once when the node is to be left, and ends with its process."""

import json
import signal
import socket
import subprocess
import sys

import pytest

from workers.node.heartbeat import HeartbeatServer


@pytest.fixture
def heartbeat():
    started = HeartbeatServer("127.0.0.1", "n1")
    yield started
    started.close()


def connected(heartbeat):
    """A connection to it, as a file of lines."""
    connection = socket.create_connection(heartbeat.address, 5)
    return connection, connection.makefile("r")


def test_greets_and_answers_each_beat(heartbeat):
    connection, lines = connected(heartbeat)
    assert json.loads(lines.readline()) == {"node": "n1", "drain_seconds": None}
    connection.sendall(b"\n")
    assert json.loads(lines.readline()) == {"node": "n1", "drain_seconds": None}


def test_tells_everybody_at_once_that_the_node_is_to_be_left(heartbeat):
    first, second = connected(heartbeat), connected(heartbeat)
    for _, lines in (first, second):
        lines.readline()
    heartbeat.drain(60)
    assert all(0 < json.loads(lines.readline())["drain_seconds"] <= 60 for _, lines in (first, second))
    _, late = connected(heartbeat)
    assert json.loads(late.readline())["drain_seconds"] is not None


def test_the_last_word_about_when_the_node_is_to_be_left_counts(heartbeat):
    for seconds, least in ((600, 300), (60, 0), (300, 60)):
        heartbeat.drain(seconds)
        _, lines = connected(heartbeat)
        assert least < json.loads(lines.readline())["drain_seconds"] <= seconds


def test_one_that_hangs_up_does_not_disturb_the_others(heartbeat):
    gone, _ = connected(heartbeat)
    gone.close()
    connection, lines = connected(heartbeat)
    lines.readline()
    connection.sendall(b"\n")
    assert json.loads(lines.readline())["node"] == "n1"


PROGRAM = """
import signal, time
from workers.node.preemption import on_termination
on_termination(lambda: print("told", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_process_that_is_asked_to_end_hears_of_it_and_lives_on():
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "told\n"
        assert process.poll() is None
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
