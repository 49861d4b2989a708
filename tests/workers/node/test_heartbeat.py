"""A node's heartbeat answers every ping, says at once when the node is being drained, and ends with its process."""

import contextlib
import gc
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manta.workers.node.heartbeat import MAX_UNAUTHENTICATED, HeartbeatServer
from manta.workers.protocol.json_codec import from_json
from manta.workers.protocol.messages import GpuReading, Heartbeat

SECONDS = 30.0


@pytest.fixture
def heartbeat():
    started = HeartbeatServer("127.0.0.1", "n1")
    yield started
    started.close()


def connected(heartbeat):
    """A connection on which a heartbeat was asked for, and its lines."""
    connection = socket.create_connection(heartbeat.address, SECONDS)
    ping(connection, heartbeat)
    return connection, connection.makefile("r")


def ping(connection, heartbeat):
    connection.sendall(f"{heartbeat.secret}\n".encode())


def test_heartbeat_answers_each_ping(heartbeat):
    connection, lines = connected(heartbeat)
    quiet = {"node": "n1", "draining": False, "drain_seconds": None, "drain_reason": "", "stays": False, "gpus": None}
    assert json.loads(lines.readline()) == quiet
    ping(connection, heartbeat)
    assert json.loads(lines.readline()) == quiet


def test_heartbeat_sends_new_gpu_readings_once_per_connection(heartbeat):
    (first, its_lines), (_, other_lines) = connected(heartbeat), connected(heartbeat)
    for lines in (its_lines, other_lines):
        assert json.loads(lines.readline())["gpus"] is None
    heartbeat.note_gpus((GpuReading(0, temperature_celsius=60),))
    said = []
    for _ in range(2):
        ping(first, heartbeat)
        said.append(from_json(Heartbeat, json.loads(its_lines.readline())).gpus)
    assert said == [(GpuReading(0, temperature_celsius=60),), None]
    assert json.loads(connected(heartbeat)[1].readline())["gpus"][0]["temperature_celsius"] == 60


def test_ping_may_come_in_pieces(heartbeat):
    connection = socket.create_connection(heartbeat.address, SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in (heartbeat.secret[:5], heartbeat.secret[5:], "\n"):
        connection.sendall(piece.encode())
        wait_until_read(connection)
    assert json.loads(connection.makefile("r").readline())["node"] == "n1"


def wait_until_read(connection):
    """Until the other end has nothing left that it has not read: what comes next is a piece of its own."""
    mine, theirs = connection.getsockname(), connection.getpeername()
    wanted = [f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}" for host, port in (theirs, mine)]
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        if any(row[1:3] == wanted and row[4].endswith(":00000000") for row in rows):
            return
    raise AssertionError("it does not read")


@pytest.mark.parametrize("words", [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"0" * 64 + b"\n", b"0" * 1000])
def test_heartbeat_caller_without_a_valid_ping_gets_no_answer(heartbeat, words):
    connection = socket.create_connection(heartbeat.address, SECONDS)
    with contextlib.suppress(ConnectionError):
        connection.sendall(words)
        assert connection.recv(1) == b""


def test_stranger_who_hangs_up_without_a_word_is_forgotten(heartbeat):
    socket.create_connection(heartbeat.address, SECONDS).close()
    connection, lines = connected(heartbeat)
    lines.readline()
    ping(connection, heartbeat)
    lines.readline()  # before this answer it has looked at all that was there before the first one
    assert heartbeat._unauthenticated == {}


def test_unauthenticated_heartbeat_caller_does_not_hear_of_a_drain(heartbeat):
    silent = socket.create_connection(heartbeat.address, SECONDS)
    _, lines = connected(heartbeat)
    lines.readline()
    heartbeat.drain(60)
    assert json.loads(lines.readline())["drain_seconds"] is not None
    heartbeat.close()
    assert silent.recv(1) == b""


def test_too_many_unauthenticated_heartbeat_callers_do_not_displace_one_that_pings(heartbeat):
    known, lines = connected(heartbeat)
    lines.readline()
    strangers = [socket.create_connection(heartbeat.address, SECONDS) for _ in range(MAX_UNAUTHENTICATED + 10)]
    _, others = connected(heartbeat)
    assert json.loads(others.readline())["node"] == "n1"
    assert [stranger.recv(1) for stranger in strangers[:10]] == [b""] * 10  # the longest there make room
    ping(known, heartbeat)
    assert json.loads(lines.readline())["node"] == "n1"


def test_heartbeat_tells_all_connections_at_once_that_the_node_drains(heartbeat):
    first, second = connected(heartbeat), connected(heartbeat)
    for _, lines in (first, second):
        lines.readline()
    heartbeat.drain(60)
    assert all(0 < json.loads(lines.readline())["drain_seconds"] <= 60 for _, lines in (first, second))
    _, late = connected(heartbeat)
    assert json.loads(late.readline())["drain_seconds"] is not None


def test_newest_drain_request_sets_the_deadline_in_the_heartbeat(heartbeat):
    for seconds, least in ((600, 300), (60, 0), (300, 60)):
        heartbeat.drain(seconds)
        _, lines = connected(heartbeat)
        assert least < json.loads(lines.readline())["drain_seconds"] <= seconds


def test_heartbeat_reports_the_earliest_of_several_drain_deadlines(heartbeat):
    for seconds, source in ((None, "cordon"), (600.0, "user"), (30.0, "cloud"), (300.0, "another")):
        heartbeat.drain(seconds, f"says the {source}", source)
    state = heartbeat.state
    assert (state.draining, 20 < state.drain_seconds <= 30, state.drain_reason) == (True, True, "says the cloud")
    heartbeat.withdraw("cloud")
    assert heartbeat.state.drain_reason == "says the another"
    for source in ("user", "another"):
        heartbeat.withdraw(source)
    assert heartbeat.state == Heartbeat("n1", True, None, "says the cordon")


def test_heartbeat_says_that_a_node_stays_once_its_drain_is_withdrawn(heartbeat):
    _, lines = connected(heartbeat)
    assert json.loads(lines.readline())["stays"] is False
    heartbeat.drain(60.0, "it is sold", "cloud")
    assert json.loads(lines.readline())["draining"] is True
    heartbeat.withdraw("cloud")
    said = json.loads(lines.readline())
    assert (said["draining"], said["drain_seconds"], said["stays"]) == (False, None, True)
    assert heartbeat.state.stays
    heartbeat.drain(60.0)
    assert (heartbeat.state.draining, heartbeat.state.stays) == (True, False)


def test_heartbeat_survives_a_peer_that_hangs_up(heartbeat):
    with contextlib.closing(connected(heartbeat)[0]) as gone:
        gone.shutdown(socket.SHUT_RDWR)
    connection, lines = connected(heartbeat)
    lines.readline()
    ping(connection, heartbeat)
    assert json.loads(lines.readline())["node"] == "n1"
    assert len(heartbeat._connections) == 1, "who is gone is listened to no longer"


PROGRAM = """
import signal, time
from manta.workers.node.notices import on_termination
on_termination(lambda: print("told", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_heartbeat_close_ends_all_connections_and_descriptors():
    gc.collect()  # what earlier tests have left goes now or stays
    before = len(list(Path("/proc/self/fd").iterdir()))
    heartbeat = HeartbeatServer("127.0.0.1", "n1")
    stranger = socket.create_connection(heartbeat.address, SECONDS)
    connection, lines = connected(heartbeat)
    lines.readline()
    heartbeat.close()
    assert (stranger.recv(1), lines.readline()) == (b"", "")
    for each in (stranger, lines, connection):
        each.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_termination_signal_calls_its_handler_and_does_not_end_the_process():
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "told\n"
        assert process.poll() is None
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
