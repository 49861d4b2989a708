"""How long torchrun and Ray Train take from kill -9 of a worker to the next step of the same small job.

Their workers all end and restart from the newest checkpoint. The time counts to the first step that is completed
after the kill, also when that one had been completed before and is done again.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from benchmarks.support import baseline_toy
from benchmarks.support.report import ROOT, Report
from manta.service.cluster.processes import wait_until_ended
from manta.workers.errors import MantaError

START_SECONDS, RECOVER_SECONDS, POLL_SECONDS = 180.0, 120.0, 0.02
STEPS_BETWEEN = 12
"""Steps that are completed between two kills."""
CHECKPOINT_EVERY = 10
FOREVER_STEPS = 1_000_000

Command = Callable[[Path, int, int], Sequence[str]]
"""What starts the job: from its folder, the number of workers, and the failures to survive."""


class BaselineFailed(MantaError):
    """A baseline did not do what it is measured at; the message holds the end of what it printed."""


@dataclass
class Recoveries:
    """What the kills did."""

    seconds: list[float] = field(default_factory=list)
    """From each kill to the next completed step."""
    redone: list[int] = field(default_factory=list)
    """Steps that had been completed and were done again."""
    survived: list[int] = field(default_factory=list)
    """Processes that are there before and after."""

    def report(self, report: Report, name: str, workers: int) -> None:
        """Add the figures to `report`."""
        report.add_spread(f"{name}_kill_to_next_step", self.seconds, "s")
        report.add(f"{name}_steps_redone_max", max(self.redone), "steps")
        report.add(f"{name}_processes_survived_of_{workers}_min", min(self.survived), "processes")
        samples = {
            "seconds": [round(value, 3) for value in self.seconds],
            "steps_redone": self.redone,
            "survived": self.survived,
        }
        report.samples[name] = [samples]


def torchrun(folder: Path, workers: int, failures: int) -> list[str]:
    """torchrun with elastic restarts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={workers}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--max-restarts={failures}"]
    # How often it checks its workers; its default is 0.1 s.
    return [*command, "--monitor-interval=0.1", str(baseline_toy.__file__), str(folder), *_lengths()]


def ray_train(python: str, engine: bool = False) -> Command:
    """Ray Train's TorchTrainer, run by `python`: of the toy, or with `engine` of the quickstart on Manta's engine."""

    def command(folder: Path, workers: int, failures: int) -> list[str]:
        script = Path(__file__).with_name("baseline_ray_train_engine.py" if engine else "baseline_ray_train.py")
        return [python, str(script), str(folder), *_lengths(), str(workers), str(failures)]

    return command


def _lengths() -> list[str]:
    return [str(FOREVER_STEPS), str(CHECKPOINT_EVERY)]


def why_no_ray_train(python: str) -> str | None:
    """Why `python` cannot run Ray Train, in one line; None when it can."""
    done = subprocess.run([python, "-c", "import ray.train.torch"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1]


def measure(command: Command, workers: int, kills: int, choice: random.Random) -> Recoveries:
    """Start the job, and kill a worker chosen at random again and again. Raises BaselineFailed."""
    recoveries = Recoveries()
    with tempfile.TemporaryDirectory(prefix="manta-baseline-") as temporary:
        folder = Path(temporary)
        with _running(command(folder, workers, kills + 1), folder) as job:
            job.wait_for(lambda: job.steps_done() > 0, START_SECONDS, "its first step")
            for _ in range(kills):
                job.wait_for(partial(job.has_done, job.steps_done() + STEPS_BETWEEN), START_SECONDS, "the next steps")
                time.sleep(choice.uniform(0.0, 0.2))
                _kill(job, choice.randrange(workers), recoveries)
    return recoveries


class _Job:
    """A job that runs, by the files that it writes."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, log: Path):
        self.process, self.folder, self._log = process, folder, log

    def steps(self) -> list[tuple[float, int, str]]:
        """(Unix time, step, attempt) of every completed step."""
        path = self.folder / "steps"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(float(line[0]), int(line[1]), line[2]) for line in lines if len(line) == 3]

    def steps_done(self) -> int:
        """How many times a step was completed."""
        return len(self.steps())

    def has_done(self, count: int) -> bool:
        """Whether so many steps were completed."""
        return self.steps_done() >= count

    def workers(self) -> dict[int, tuple[int, float]]:
        """Process id and time of creation by rank."""
        processes = {}
        for file in self.folder.glob("pid-*"):
            with contextlib.suppress(psutil.Error, ValueError, IndexError):
                pid = int(file.read_text().split()[0])
                processes[int(file.name.removeprefix("pid-"))] = (pid, psutil.Process(pid).create_time())
        return processes

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Raises BaselineFailed when the job ends before `condition` holds, or when that takes too long."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                printed = self._log.read_text(errors="replace").strip().splitlines()[-5:]
                raise BaselineFailed(f"the job did not come to {what}: {' | '.join(printed)}")
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _running(command: Sequence[str], folder: Path) -> Iterator[_Job]:
    """The job while it runs; all its processes are gone afterwards."""
    log = folder / "log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(folder)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield _Job(process, folder, log)
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        wait_until_ended(family, START_SECONDS)


def _kill(job: _Job, rank: int, recoveries: Recoveries) -> None:
    before = job.workers()
    os.kill(before[rank][0], signal.SIGKILL)
    killed = time.time()
    attempt = job.steps()[-1][2]

    def again() -> bool:
        return any(name != attempt and when > killed for when, _, name in job.steps())

    job.wait_for(again, RECOVER_SECONDS, "a step after a kill")
    rows = job.steps()
    last = max(step for _, step, name in rows if name == attempt)
    when, step = next((when, step) for when, step, name in rows if name != attempt and when > killed)
    recoveries.seconds.append(when - killed)
    recoveries.redone.append(max(0, last - step + 1))
    recoveries.survived.append(len(set(before.values()) & set(job.workers().values())))
