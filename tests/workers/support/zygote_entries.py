"""Entry functions that the tests let the zygote run; imported by the zygote, not by pytest."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path


def _say(control: socket.socket, **document: object) -> None:
    control.sendall(json.dumps(document).encode() + b"\n")


def echo(argument: dict, control: socket.socket) -> int:
    """Tells what the child sees, then exits with the wanted code."""
    print("hello from stdout")
    print("hello from stderr", file=sys.stderr)
    _say(
        control, argument=argument, pid=os.getpid(), group=os.getpgid(0), variable=os.environ.get("MANTA_TEST"),
        descriptors=len(list(Path("/proc/self/fd").iterdir())), time=time.time(),
    )  # fmt: skip
    return int(argument.get("code", 0))


def fail(argument: dict, control: socket.socket) -> int:
    raise RuntimeError("it went wrong")


def leave(argument: dict, control: socket.socket) -> int:
    raise SystemExit("no more")


def wait(argument: dict, control: socket.socket) -> int:
    """Says that it is up, then runs until it is killed: it does not look at its control socket."""
    _say(control, pid=os.getpid())
    if argument.get("grandchild"):
        _say(control, grandchild=subprocess.Popen(["sleep", "1000"]).pid)
    if argument.get("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()
    return 0


def compute(argument: dict, control: socket.socket) -> int:
    """Multiplies with as many threads as the argument says; says how many the process had before and has then."""
    import torch

    def count():
        return len(list(Path("/proc/self/task").iterdir()))

    before = count()
    torch.set_num_threads(argument["threads"])
    torch.ones(512, 512) @ torch.ones(512, 512)
    _say(control, before=before, after=count(), spins=os.environ["GOMP_SPINCOUNT"])
    return 0


def train(argument: dict, control: socket.socket) -> int:
    """Trains a job to its end, and says what was imported meanwhile of other libraries than Python's."""
    from manta.workers import run
    from manta.workers import standalone as standalone  # as the zygote's own entries, these bring the trainer

    assert standalone.Trainer
    before, ours = set(sys.modules), {"manta", *sys.stdlib_module_names}
    code = run.main([argument["config"], "--checkpoints", argument["checkpoints"]])
    imported = [name for name in sys.modules.keys() - before if name.partition(".")[0] not in ours]
    _say(control, imported=sorted(imported))
    return code


def trainer(argument: dict, control: socket.socket) -> int:
    """A stand-in for the trainer: does what the job's spec tells it to, as reports on the control socket."""
    order = argument["order"]
    if argument["prepare"]:
        return wait({}, control)
    for text in order["spec"].get("print", []):
        print(text, file=sys.stderr)
    if "bytes" in order["spec"]:
        os.write(1, bytes(order["spec"]["bytes"]))
    for index in range(order["spec"].get("reports", 0)):
        _say(control, kind="event", generation=order["generation"], rank=order["rank"], time=time.time(),
             data={"type": "count", "data": {"index": index}})  # fmt: skip
    for document in order["spec"].get("raw", []):
        control.sendall(document.encode() + b"\n")
    for _ in range(order["spec"].get("echo_commands", 0)):
        command = json.loads(control.makefile().readline())
        _say(control, kind="event", generation=order["generation"], rank=order["rank"], time=time.time(),
             data={"type": "command", "data": {"command": command}})  # fmt: skip
    if order["spec"].get("wait"):
        return wait({"stop": order["spec"].get("stop")}, control)
    if "signal" in order["spec"]:
        os.kill(os.getpid(), order["spec"]["signal"])
    return int(order["spec"].get("code", 0))
