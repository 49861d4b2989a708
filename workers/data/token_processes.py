"""Tokenizes the shards of a corpus with several processes, each of which takes the next shard when it has finished
one."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from manta.workers.data.read_errors import raise_answered
from manta.workers.data.shards import Shard
from manta.workers.data.token_process import Order, ShardResult
from manta.workers.errors import DataError
from manta.workers.system.processes import process_state

POLL_SECONDS = 0.5
MAX_TRIES = 3
"""Number of attempts for a shard whose process is killed."""


@dataclass
class Counts:
    """Progress of the work."""

    bytes: int = 0
    """Bytes of the corpus's files that are done."""
    tokens: int = 0


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    shard: int | None = None
    shard_progress: Counts = field(default_factory=Counts)
    """Progress with its present shard."""
    cpu_seconds: float = 0.0
    received: bytes = b""
    """Incomplete last line."""

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def send(self, content: dict[str, Any]) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed when its answers are read
            self.process.stdin.write(json.dumps(content).encode() + b"\n")
            self.process.stdin.flush()

    def lines(self) -> list[bytes] | None:
        """Messages since the last call; None at the end of the process."""
        content = os.read(self.answers.fileno(), 2**16)
        *lines, self.received = (self.received + content).split(b"\n")
        return lines if content else None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def tokenize_shards(
    order: Order,
    shards: Mapping[int, Shard],
    alive: Callable[[], object],
    progress: Callable[[Counts], object],
    processes: int | None = None,
) -> list[ShardResult]:
    """Results of `shards`, by number, in any order. `alive` is called whenever one of the processes makes progress;
    `progress` with the total progress; `processes`: number of processes, by default one per core. Raises DataError."""
    work = _Work(order, shards, alive, progress)
    try:
        return work.run(min(processes or cores(), len(shards)))
    finally:
        work.close()


class _Work:
    def __init__(
        self,
        order: Order,
        shards: Mapping[int, Shard],
        alive: Callable[[], object],
        progress: Callable[[Counts], object],
    ):
        self._order, self._shards, self._alive, self._progress = order, shards, alive, progress
        self._waiting = sorted(shards, reverse=True)
        self._tries = dict.fromkeys(shards, 0)
        self._selector = selectors.DefaultSelector()
        self._workers: set[_Worker] = set()
        self._done = Counts()
        self._results: list[ShardResult] = []

    def run(self, processes: int) -> list[ShardResult]:
        for _ in range(processes):
            self._start()
        while len(self._results) < len(self._shards):
            for key, _ in self._selector.select(POLL_SECONDS):
                self._receive(key.data)
            self._check_cpu_time()
        return self._results

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.communicate()
        self._selector.close()

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "manta.workers.data.token_process", str(os.getpid())]
        # In a process group of its own: an interrupt is meant for this process, which ends the others.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        worker = _Worker(process)
        self._workers.add(worker)
        worker.send(asdict(self._order))
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)
        self._assign_next(worker)

    def _assign_next(self, worker: _Worker) -> None:
        worker.shard, worker.shard_progress = None, Counts()
        if not self._waiting:
            return
        number = worker.shard = self._waiting.pop()
        self._tries[number] += 1
        worker.send({"shard": number, "sections": [asdict(section) for section in self._shards[number]]})

    def _receive(self, worker: _Worker) -> None:
        lines = worker.lines()
        if lines is None:
            self._ended(worker)
            return
        for line in lines:
            self._alive()
            self._handle(worker, json.loads(line))

    def _handle(self, worker: _Worker, answer: dict[str, Any]) -> None:
        raise_answered(answer)
        if "number" in answer:
            self._results.append(ShardResult(**answer))
            self._assign_next(worker)
        else:
            for counts in (worker.shard_progress, self._done):
                counts.bytes += answer["bytes"]
                counts.tokens += answer["tokens"]
            self._progress(self._done)

    def _ended(self, worker: _Worker) -> None:
        """The process was killed, or failed without an error message."""
        self._selector.unregister(worker.answers)
        self._workers.discard(worker)
        worker.process.communicate()
        if worker.shard is None:
            return
        sections = self._shards[worker.shard]
        if worker.process.returncode == -signal.SIGVTALRM:
            raise DataError(f"{sections[0].path}: the chat template does not come to an end with some conversation")
        if self._tries[worker.shard] >= MAX_TRIES or worker.process.returncode >= 0:
            raise DataError(
                f"the process that tokenizes {sections[0].path} ended with exit code {worker.process.returncode}, "
                "perhaps for lack of memory"
            )
        self._done.bytes -= worker.shard_progress.bytes
        self._done.tokens -= worker.shard_progress.tokens
        self._waiting.append(worker.shard)
        self._start()

    def _check_cpu_time(self) -> None:
        """Count CPU time of any of them as progress, since a large shard takes long without a message."""
        for worker in self._workers:
            state = process_state(worker.process.pid)
            if state is not None and state.cpu_seconds > worker.cpu_seconds:
                worker.cpu_seconds = state.cpu_seconds
                self._alive()
