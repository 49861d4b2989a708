"""What ends a service from within while it serves has it started again; everything else ends the command too."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from manta.api.app_state import state_of
from manta.api.cli import service
service.RESTART_PAUSE_SECONDS = 0.0
file, ending, says = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "says"

def run(again):
    print("again" if again else "first", flush=True)
    if says:
        file.write_text(json.dumps({"pid": os.getpid()}))
    if again:
        file.unlink(missing_ok=True)
        sys.exit(7)
    if ending == "waits":
        print(os.getpid(), flush=True)
        signal.signal(signal.SIGTERM, lambda number, frame: (file.unlink(), sys.exit(0)))
        while True:
            time.sleep(10)
    if ending == "exit":
        os._exit(1)
    if ending == "in order":
        file.unlink(missing_ok=True)
        sys.exit(3)
    os.kill(os.getpid(), getattr(signal, ending))

service.restart_when_ended_by_ray(run, file)
"""


def started(tmp_path, ending, says="says", before=()):
    command = [*before, sys.executable, "-c", PROGRAM, str(tmp_path / "service.json"), ending, says]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize(("ending", "says", "lines", "code"), [
    ("SIGABRT", "says", ["first", "again"], 7),
    ("exit", "says", ["first", "again"], 7),
    ("exit", "does not", ["first"], 1),
    ("in order", "says", ["first"], 3),
    ("SIGKILL", "says", ["first"], -signal.SIGKILL),
    ("SIGABRT", "does not", ["first"], -signal.SIGABRT),
])  # fmt: skip
def test_service_that_crashes_while_serving_is_restarted_and_any_other_end_is_final(
    tmp_path, ending, says, lines, code
):
    process = started(tmp_path, ending, says)
    printed, _ = process.communicate(timeout=30)
    assert (printed.split(), process.returncode) == (lines, code)


def test_restarting_parent_passes_signals_to_the_service(tmp_path):
    process = started(tmp_path, "waits")
    assert process.stdout.readline() == "first\n"
    child = int(process.stdout.readline())
    assert child != process.pid and json.loads((tmp_path / "service.json").read_text()) == {"pid": child}
    until(lambda: caught(child, signal.SIGTERM))
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0 and not (tmp_path / "service.json").exists()


def test_service_that_a_signal_ended_ends_the_first_process_of_a_container_too(tmp_path):
    """Which no signal of its own ends: it says so as a shell does."""
    own = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*own, "true"], check=False, capture_output=True).returncode:
        pytest.skip("a namespace of processes cannot be made here")
    process = started(tmp_path, "SIGTERM", before=own)
    printed, _ = process.communicate(timeout=30)
    assert (printed.split(), process.returncode) == (["first"], 128 + signal.SIGTERM)


def test_service_process_ends_when_its_parent_command_is_killed(tmp_path):
    process = started(tmp_path, "waits")
    process.stdout.readline()
    child = int(process.stdout.readline())
    process.kill()
    process.wait(30)
    process.stdout.close()
    until(lambda: not Path(f"/proc/{child}").exists() or state_of(child) == "Z")


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def caught(pid, number):
    """Whether a process has a handler of its own for a signal."""
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("SigCgt:"))
    return bool(int(line.split()[1], 16) & 1 << (number - 1))


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()
