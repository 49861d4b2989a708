"""A process in which one question for a name has failed asks for none, and those forked from it neither."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from manta.workers.comm import host_names

ALONE = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""Runs a program where no name server can be reached."""
RESOLVER = next((line for line in Path("/etc/nsswitch.conf").read_text().splitlines() if line.startswith("hosts:")), "")
pytestmark = pytest.mark.skipif("resolve" in RESOLVER.split(), reason="names come from systemd here")
NOT_TOLD = "hostname of the client socket cannot be retrieved"
PROGRAM = """
import os
from manta.workers.comm.host_names import skip_reverse_lookups, connect_once
skip_reverse_lookups()
connect_once()
child = os.fork()
if child == 0:
    connect_once()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize(
    "surroundings", [pytest.param([], marks=pytest.mark.soak), ALONE], ids=["with a name server or none", "alone"]
)
def test_host_name_lookup_of_torch_fails_once_and_is_not_repeated(surroundings):
    if subprocess.run([*surroundings, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make a network namespace")
    ended = subprocess.run([*surroundings, sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    # A process that asks is answered, and says nothing, or is not, and says so each time.
    assert ended.stderr.count(NOT_TOLD) == 1, ended.stderr


def test_host_name_lookup_of_other_threads_is_unchanged(monkeypatch):
    """Only the thread that is to fail asks where nobody answers."""
    answers = []

    def ask():
        with pytest.raises(socket.gaierror) as failed:
            socket.getnameinfo((host_names.ADDRESS, 80), 0)
        answers.append(failed.value.errno)

    monkeypatch.setattr(host_names, "connect_once", ask)
    host_names.skip_reverse_lookups()
    assert answers == [socket.EAI_AGAIN]
    assert socket.getnameinfo(("127.0.0.1", 80), socket.NI_NUMERICHOST)[0] == "127.0.0.1"
    assert "host names" not in [thread.name for thread in threading.enumerate()]


def test_host_name_lookup_is_still_made_with_another_c_library(monkeypatch):
    asked = []
    monkeypatch.setattr(host_names.ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(host_names, "connect_once", lambda: asked.append(threading.current_thread().name))
    host_names.skip_reverse_lookups()
    assert asked == ["host names"]
