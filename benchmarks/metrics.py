"""What it costs the training thread to ship metrics, in a real training run of one rank with snapshots in shared
memory and a reporter that writes into a socket, as in production; a process on the other side decodes the lines.

Two measurements: the time that the training thread spends on a step's row (making it, journalling it, handing it to
the reporter) without the copy of the state into the snapshot; and the time of whole steps with reporting on and off,
in turns. The second holds what the reporter's own thread takes from the training thread, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

import torch

from benchmarks.support.jobs import quickstart
from benchmarks.support.report import Report, deliver, parser, percentile
from workers.comm.comm import Comm
from workers.comm.grid import RankGrid
from workers.paths import SHARED_MEMORY
from workers.protocol.messages import LaunchOrder, Resume
from workers.rank.report_lines import report_lines, reports_of
from workers.reporter import Reporter
from workers.spec.reading import parse_job_spec
from workers.trainer import Places, Trainer

P = ParamSpec("P")
R = TypeVar("R")

TARGET_MS = 0.2
BLOCK = 10
WARM_UP = 300
"""Steps before any figure is taken: the journal in the snapshot has its full length after 256 rows."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("metrics", __doc__)
    options.add_argument("--steps", type=int, default=600, help="steps measured, half of them reported (default: 600)")
    options.add_argument("--warm-up", type=int, default=WARM_UP, help=f"steps before (default: {WARM_UP})")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Train with a stopwatch around the reporting."""
    report = Report("metrics", options.seed)
    total = options.warm_up + options.steps
    document = _small(total, options.seed)
    folder = tempfile.mkdtemp(prefix="manta-benchmark-", dir=SHARED_MEMORY)
    ours, theirs = socket.socketpair()
    context = multiprocessing.get_context("spawn")
    answer, lines = context.Pipe(duplex=False)
    reader = context.Process(target=_read, args=(theirs, lines), daemon=True)
    reader.start()
    theirs.close()
    try:
        trainer = _trainer(document, ours, folder)
        watch = Stopwatch(trainer)
        on, off = _race(trainer, watch, options.warm_up, options.steps)
        trainer.reporter.close()
        ours.shutdown(socket.SHUT_WR)
        read = answer.recv()
    finally:
        reader.kill()
        shutil.rmtree(folder, ignore_errors=True)
    spent = [1e3 * seconds for seconds in watch.spent]
    report.add("training_thread_a_step_median", round(statistics.median(spent), 4), "ms", TARGET_MS)
    report.add("training_thread_a_step_p99", round(percentile(spent, 0.99), 4), "ms")
    report.add("step_reported_median", round(1e3 * statistics.median(on), 4), "ms")
    report.add("step_unreported_median", round(1e3 * statistics.median(off), 4), "ms")
    differences = [a - b for a, b in zip(_medians(on), _medians(off), strict=False)]
    report.add("step_difference_median", round(1e3 * statistics.median(differences), 4), "ms")
    report.add("rows_sent", options.warm_up + len(on), "rows")
    report.add("rows_read", read, "rows")
    report.settings = {"job": document, "warm_up_steps": options.warm_up, "steps_a_turn": BLOCK}
    return report


def _small(steps: int, seed: int) -> dict[str, Any]:
    """The quickstart's model on one rank, with a small batch so that many steps fit into a minute."""
    document = quickstart((1, 1, 1), steps, seed)
    document["train"].update(global_batch_size=2, micro_batch_size=2)
    return document


def _trainer(document: dict[str, Any], control: socket.socket, folder: str) -> Trainer:
    torch.set_num_threads(1)
    spec = parse_job_spec(document)
    order = LaunchOrder("benchmark", 1, 0, spec.model_dump(mode="json"))
    comm = Comm(RankGrid(spec.layout), 0, torch.device("cpu"))
    reporter = Reporter(lambda messages: control.sendall(report_lines(reports_of(order, messages))))
    trainer = Trainer(spec, comm, reporter, 1e12, Places("benchmark", snapshots=folder))
    trainer.restore(Resume())
    return trainer


class Stopwatch:
    """Times what a trainer does for the metrics of each step, and can turn it off.

    That is: making the row and the journal. The rest is done by the thread that copies the snapshot.
    """

    def __init__(self, trainer: Trainer):
        snapshots = trainer.state.snapshots
        assert snapshots is not None
        self.spent: list[float] = []
        """Seconds for each reported step."""
        self.reporting = True
        self._in_start = 0.0
        self._start, self._keep_and_report = snapshots.start, trainer.state.keep
        trainer.state.keep = self._keep  # type: ignore[method-assign]
        snapshots.start = self._start_timed  # type: ignore[method-assign]

    def _start_timed(self, step: int, note: bytes = b"", then: Callable[[], object] | None = None) -> None:
        began = time.perf_counter()
        self._start(step, note, then)
        self._in_start = time.perf_counter() - began

    def _keep(self, step: int, make_row: Callable[[], dict[str, Any]]) -> None:
        if not self.reporting:
            self._start(step)
            return
        began = time.perf_counter()
        self._keep_and_report(step, make_row)
        self.spent.append(time.perf_counter() - began - self._in_start)


def _race(trainer: Trainer, watch: Stopwatch, warm_up: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step with reporting on and with it off, in turns of BLOCK steps."""
    for _ in range(warm_up):
        trainer.train_step()
    watch.spent.clear()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(steps):
        watch.reporting = number // BLOCK % 2 == 0
        began = time.perf_counter()
        trainer.train_step()
        seconds[watch.reporting].append(time.perf_counter() - began)
    return seconds[True], seconds[False]


def _medians(seconds: list[float]) -> list[float]:
    """The median of each turn."""
    return [statistics.median(seconds[start : start + BLOCK]) for start in range(0, len(seconds), BLOCK)]


def _read(control: socket.socket, answer: Connection) -> None:
    """Decode what arrives until the other side closes, as an agent does; answers the number of rows."""
    rows = 0
    with control, control.makefile("rb") as file:
        for line in file:
            document = json.loads(line)
            if document["kind"] == "metrics":
                rows += len(document["data"]["rows"])
    answer.send(rows)


if __name__ == "__main__":
    sys.exit(main())
