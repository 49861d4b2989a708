"""A process finds out once whether it should ask for host names, and those forked from it know."""

import os
import subprocess
import sys
import threading

import pytest

from workers.node.host_names import IMPATIENT, settle

ALONE = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""Runs a program where no name server can be reached."""
PROGRAM = """
import os
from workers.node.host_names import _ask, settle
settle()
child = os.fork()
if child == 0:
    _ask()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("before", [None, "ndots:2"])
def test_nothing_is_left_of_the_question(monkeypatch, before):
    seen = []
    monkeypatch.setattr("workers.node.host_names._ask", lambda: seen.append(os.environ["RES_OPTIONS"]))
    if before is None:
        monkeypatch.delenv("RES_OPTIONS", raising=False)
    else:
        monkeypatch.setenv("RES_OPTIONS", before)
    settle()
    assert os.environ.get("RES_OPTIONS") == before
    assert seen == [f"{before} {IMPATIENT}" if before else IMPATIENT]
    assert "host names" not in [thread.name for thread in threading.enumerate()]


def test_names_that_do_not_come_are_asked_for_once_and_not_again_by_forked_processes():
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make a network namespace")
    ended = subprocess.run([*ALONE, sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("hostname of the client socket cannot be retrieved") == 1, ended.stderr
