"""The trainer process: what the zygote's child runs for one rank of one generation.

It reports over its control socket and dies with it: when the agent goes away, so does the trainer.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from workers.comm import Comm
from workers.device_peak import measure_peak_flops
from workers.errors import CheckpointError, DataError, NonFiniteError, PeerLost, SharedMemoryError
from workers.messages import Failure, LaunchOrder
from workers.parallel.grid import RankGrid
from workers.progress import Progress
from workers.reporter import Reporter
from workers.spec_reading import parse_job_spec
from workers.stacks import answer_with_stacks
from workers.trainer import Places, Trainer

EXIT_FAILED, EXIT_PEER_LOST, EXIT_ORPHANED = 1, 75, 76
_KINDS: dict[type[BaseException], str] = {
    PeerLost: "peer_lost",
    SharedMemoryError: "no_shared_memory",
    DataError: "bad_data",
    NonFiniteError: "not_finite",
    CheckpointError: "bad_checkpoint",
}


def run(argument: dict[str, Any], control: socket.socket) -> int:
    """Train as the LaunchOrder in `argument` says; returns the exit status.

    Whatever goes wrong becomes a `failure` report, whose kind tells a culprit from a rank that only lost a peer.
    """
    order = LaunchOrder.from_json(argument)
    reporter = Reporter(_sink(order, control))
    threading.Thread(target=_die_with, args=(control,), name="leash", daemon=True).start()
    trainer: Trainer | None = None
    try:
        trainer = _build(order, reporter)
        reporter.send("started", {"pid": os.getpid(), "resume": asdict(order.resume)})
        print(f"generation {order.generation}: rank {order.rank} goes on after step {trainer.step}", flush=True)
        trainer.train()
        print(f"generation {order.generation}: rank {order.rank} is done with step {trainer.step}", flush=True)
    except Exception as error:  # noqa: BLE001 - the border of the process: everything is reported, nothing goes on
        return _fail(error, order, trainer, reporter)
    reporter.send("finished", {"step": trainer.step, "seconds": trainer.clock.lap()})
    reporter.close()
    return 0


def _build(order: LaunchOrder, reporter: Reporter) -> Trainer:
    # One computation thread, so that bits do not depend on the machine's load.
    torch.set_num_threads(1)
    spec = parse_job_spec(order.spec)
    device = torch.device(order.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    comm = Comm(RankGrid(spec.layout), order.rank, device)
    if order.snapshot_folder is not None:
        answer_with_stacks(order.snapshot_folder, order.rank)
        comm.progress = Progress.shared(order.snapshot_folder, order.rank)
    if comm.size("world") > 1:
        if order.store_host is None or order.store_port is None:
            raise ValueError("a job of several ranks needs a rendezvous store in its launch order")
        store = dist.TCPStore(order.store_host, order.store_port, is_master=False)
        comm.connect(store, order.generation, order.store_host)
    comm.generation = order.generation
    peak = order.peak_flops or measure_peak_flops(device.type).flops
    checkpoints = order.checkpoint_folder if spec.checkpoint.every_steps else None
    trainer = Trainer(spec, comm, reporter, peak, Places(order.job, order.snapshot_folder, checkpoints))
    trainer.restore(order.resume)
    return trainer


def _fail(error: Exception, order: LaunchOrder, trainer: Trainer | None, reporter: Reporter) -> int:
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    kind = next((name for cls, name in _KINDS.items() if isinstance(error, cls)), "exception")
    step = trainer.step if trainer is not None else order.resume.step
    message = " ".join(str(error).split()) or type(error).__name__
    reporter.send("failure", asdict(Failure(kind, step + 1, type(error).__name__, message, text)))  # type: ignore[arg-type]
    reporter.close()
    return EXIT_PEER_LOST if kind == "peer_lost" else EXIT_FAILED


def _sink(order: LaunchOrder, control: socket.socket) -> Any:
    def send(messages: list[dict[str, Any]]) -> None:
        lines = []
        for kind, batch in _runs(messages):
            common = {"kind": kind, "generation": order.generation, "rank": order.rank}
            if kind == "metrics":
                lines.append({**common, "time": time.time(), "data": {"rows": [item["data"] for item in batch]}})
            else:
                lines += [{**common, "time": item["time"], "data": item["data"]} for item in batch]
        control.sendall("".join(json.dumps(line) + "\n" for line in lines).encode())

    return send


def _runs(messages: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Neighbouring messages of one kind together, order kept."""
    runs: list[tuple[str, list[dict[str, Any]]]] = []
    for message in messages:
        if not runs or runs[-1][0] != message["kind"]:
            runs.append((message["kind"], []))
        runs[-1][1].append(message)
    return runs


def _die_with(control: socket.socket) -> None:
    """Wait for the other end of `control` to close, then end the process at once: nobody would hear of its work."""
    try:
        while control.recv(4096):
            continue
    except OSError:
        pass
    os._exit(EXIT_ORPHANED)
