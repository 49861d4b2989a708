"""`make demo`: the main job from nothing to its summary, on a service of its own that is gone afterwards. One rank's
process is killed on the way; the steps around that are trained a second time without it, by the engine alone, from the
job's checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from manta.api.cli.progress import duration, figure, follow, percent
from manta.api.cli.service import start_service, stop_service
from manta.api.client import ApiError, Client, ServiceUnreachable
from manta.api.schemas import Cluster, Job, Rank, Recovery
from manta.service.settings import Settings
from manta.service.states import JobState, is_final
from manta.workers.config import JobSpec
from manta.workers.errors import MantaError
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec, read_document

ROOT = Path(__file__).parents[4]
HOME = ROOT / ".demo"
SPEC = ROOT / "examples" / "quickstart.yaml"
STEPS_BEFORE_KILL, STEPS_REPLAYED = 4, 8
"""Counted from the checkpoint that the steps around the failure are trained again from."""
COMPARED = ("loss", "grad_norm")
REPLAY_SECONDS = 120.0


def main() -> int:
    """Run the demo; returns the exit status."""
    console = Console()
    try:
        return _demo(console)
    except (MantaError, ApiError, SpecError, ServiceUnreachable) as error:
        console.print(f"The demo failed: {error}", style="red", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; stopping.")
        return 130
    finally:
        stop_service(HOME)


def _demo(console: Console) -> int:
    console.print(f"Starting Manta (home {HOME.name}/, a local Ray, SQLite) ...", highlight=False)
    began = time.monotonic()
    url = start_service(Settings(HOME), "127.0.0.1", 0, None, None)
    with Client.of_home(HOME) as client:
        up = f"Manta is up after {duration(time.monotonic() - began)}"
        console.print(f"{up}: {url}{client.link().path} (dashboard, good once)", highlight=False, soft_wrap=True)
        _cancel_leftovers(client)
        document: dict[str, Any] = read_document(SPEC)
        spec = parse_job_spec(document)
        document, note = slots_where_gpus_are_scarce(document, spec, client.cluster())
        if note:
            console.print(note, highlight=False)
        job: Job = client.submit(document)
        console.print(f"Submitted {SPEC.relative_to(ROOT)} as {job.id}", highlight=False)
        saved = last_intermediate_checkpoint(spec)
        killer = RankKiller(client, job.id, saved + STEPS_BEFORE_KILL, console)
        job = follow(client, job.id, console, on_progress=killer.poll)
        return 0 if _judge(console, client, document, job, killer, saved) else 1


def _judge(
    console: Console, client: Client, document: dict[str, Any], job: Job, killer: RankKiller, saved: int
) -> bool:
    """Train the steps around the failure again, show the summary; whether all is as promised."""
    outcome, same_bits = None, None
    if job.state == JobState.SUCCEEDED and killer.killed is not None:
        outcome = outcome_of(client.recoveries(job.id).items, killer.killed)
        last = min(saved + STEPS_REPLAYED, job.steps)
        console.print(f"Training steps {saved + 1} to {last} again, without the service and undisturbed ...")
        same_bits = replay(client, document, job.id, saved, last, HOME / "replay")
    show(console, client, job, outcome, same_bits)
    return job.state == JobState.SUCCEEDED and outcome is not None and same_bits is not None and same_bits.holds


def last_intermediate_checkpoint(spec: JobSpec) -> int:
    """Step of the newest checkpoint that the job saves before its last step."""
    every = spec.checkpoint.every_steps
    return every * ((spec.train.steps - 1) // every)


def _cancel_leftovers(client: Client) -> None:
    """End what an interrupted demo left: the service has just taken it up again."""
    for job in client.jobs().items:
        if not is_final(job.state):
            client.cancel(job.id)


def slots_where_gpus_are_scarce(
    document: dict[str, Any], spec: JobSpec, cluster: Cluster
) -> tuple[dict[str, Any], str | None]:
    """The document to submit, and a sentence for the user if it differs from the given one.

    By default a job uses GPUs if the cluster has any; with more ranks than GPUs it would wait forever."""
    gpus = sum(int(node.total) for node in cluster.nodes if node.accelerator == "gpu")
    ranks = spec.layout.world_size
    if gpus == 0 or gpus >= ranks:
        return document, None
    resources = {**document.get("resources", {}), "accelerator": "cpu"}
    has = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    note = (
        f"This machine has {has} and the job has {ranks} ranks, so it runs on CPU slots (resources.accelerator: cpu)."
    )
    return {**document, "resources": resources}, note


class NotRecovered(MantaError):
    """The job has no record of a recovery from the failure that was made."""


@dataclass(frozen=True)
class Killed:
    """A rank whose process was killed."""

    rank: Rank
    """As it was, with the process id that was killed."""
    ranks: int
    """Of the job."""
    step: int
    """Last step that was known to be committed then."""
    at: float
    """Unix time in seconds."""


@dataclass(frozen=True)
class Outcome:
    """What the failure cost."""

    killed: Killed
    seconds: float
    """From the kill to the next committed step."""
    kept: int
    """Processes that kept running, with their weights."""
    steps_redone: int
    """Committed steps that were done again."""


class RankKiller:
    """Kills one rank of a job, once, when the job has committed a certain step."""

    def __init__(self, client: Client, job_id: str, at_step: int, console: Console):
        self._client, self._job_id, self._at_step, self._console = client, job_id, at_step, console
        self.killed: Killed | None = None
        """None until it is done."""

    def poll(self, job: Job) -> None:
        """Kill a rank if the time has come."""
        if self.killed is not None or job.step < self._at_step or job.step >= job.steps:
            return
        ranks = self._client.ranks(self._job_id).items
        victim = ranks[len(ranks) // 2 + 1 if len(ranks) > 2 else -1]
        if victim.pid is None:
            return
        self.killed = Killed(victim, len(ranks), job.step, time.time())
        os.kill(victim.pid, signal.SIGKILL)
        self._console.print(f"kill -9 {victim.pid}: {described(victim)}, after step {job.step}", highlight=False)


def outcome_of(recoveries: Sequence[Recovery], killed: Killed) -> Outcome:
    """What the recovery from the kill of a rank cost. Raises NotRecovered where there is none."""
    for recovery in recoveries:
        if recovery.rank == killed.rank.rank and recovery.total_seconds is not None:
            next_step = recovery.time.timestamp() + recovery.total_seconds
            return Outcome(killed, next_step - killed.at, recovery.kept, recovery.steps_redone or 0)
    raise NotRecovered(f"rank {killed.rank.rank} was killed, but `manta recoveries` shows no recovery from that")


def described(rank: Rank) -> str:
    """Which part of the layout a rank is."""
    return f"rank {rank.rank} (tensor {rank.tensor}, pipeline {rank.pipeline}, data {rank.data})"


class ReplayFailed(MantaError):
    """The steps could not be trained again; the message says why."""


@dataclass(frozen=True)
class Comparison:
    """Steps of the job next to the same steps of the replay."""

    first: int
    last: int
    differing: tuple[int, ...]
    """Steps whose numbers have other bits."""

    @property
    def holds(self) -> bool:
        """Whether all have the same."""
        return not self.differing

    def __str__(self) -> str:
        steps = f"steps {self.first} to {self.last}"
        if self.holds:
            return f"{steps} trained again from the checkpoint of step {self.first - 1} without the kill: same bits"
        return f"of {steps}, trained again without the kill, {list(self.differing)} have OTHER BITS"


def replay(client: Client, document: dict[str, Any], job_id: str, saved: int, last: int, folder: Path) -> Comparison:
    """Train the steps from the job's checkpoint of step `saved` to step `last` again, in `folder`, and compare losses
    and gradient norms with the job's. Raises ReplayFailed."""
    shutil.rmtree(folder, ignore_errors=True)
    checkpoints = [Path(item.path) for item in client.checkpoints(job_id).items if item.step == saved and item.path]
    source = next((path for path in checkpoints if path.is_dir()), None)
    if source is None:
        raise ReplayFailed(f"the checkpoint of step {saved} is not there to start from")
    shutil.copytree(source, folder / "checkpoints" / source.name)
    rows = _train(document, folder, last)
    metrics = client.metrics(job_id, names=list(COMPARED), after_step=saved, max_points=10_000)
    job_rows = {step: [metrics.series[name][at] for name in COMPARED] for at, step in enumerate(metrics.steps)}
    steps = range(saved + 1, last + 1)
    return Comparison(saved + 1, last, tuple(step for step in steps if job_rows.get(step) != rows.get(step)))


def _train(document: dict[str, Any], folder: Path, last: int) -> dict[int, list[float]]:
    """By step what the engine alone computes, on as many processes as the layout has ranks."""
    config, metrics = folder / "job.yaml", folder / "metrics.jsonl"
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    layout = document["parallel"]
    ranks = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("data", 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "manta.workers.run", str(config), "--metrics", str(metrics)]
    command += ["--checkpoints", str(folder / "checkpoints"), "--stop-after-step", str(last)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REPLAY_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ReplayFailed(f"`{' '.join(command[1:])}` took more than {REPLAY_SECONDS:g} s") from error
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ReplayFailed(f"`{' '.join(command[1:])}` failed: {reason}")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {row["step"]: [row[name] for name in COMPARED] for row in rows}


def show(console: Console, client: Client, job: Job, outcome: Outcome | None, same_bits: Comparison | None) -> None:
    """Print what the job did and what the failure cost."""
    table = Table(title=f"{job.name}: {job.state}", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in {**_training(client, job), **_failure(outcome, same_bits), **_places(client, job)}.items():
        table.add_row(name, value)
    console.print(table)
    if job.state != JobState.SUCCEEDED:
        console.print(job.message or job.reason or "no reason given", style="red", highlight=False)


def _training(client: Client, job: Job) -> dict[str, str]:
    metrics, latest, layout = client.metrics(job.id), job.metrics.latest, job.parallel
    losses = [loss for loss in metrics.series["loss"] if isinstance(loss, float)]
    on_cpu = all(rank.device in (None, "cpu") for rank in client.ranks(job.id).items)
    against = "a matrix product on one core of this machine for each rank" if on_cpu else "the device's peak"
    return {
        "layout": f"tensor {layout['tensor']} x pipeline {layout['pipeline']} x data {layout['data']}",
        "loss, first step": figure(losses[0], 4) if losses else "-",
        "loss, last step": figure(losses[-1], 4) if losses else "-",
        "validation loss": figure(_number(latest.get("validation_loss")), 4),
        "tokens/s, median": figure(_median(metrics.series["tokens_per_second"]), 0),
        "MFU, attention in full, median": percent(_median(metrics.series["mfu_full"])),
        "MFU, causal half, median": percent(_median(metrics.series["mfu_causal"])),
        "MFU is measured against": against,
        "goodput": percent(job.goodput),
    }


def _failure(outcome: Outcome | None, same_bits: Comparison | None) -> dict[str, str]:
    if outcome is None:
        return {"killed": "nothing: the job ended before"}
    killed = outcome.killed
    return {
        "killed": f"process {killed.rank.pid}, {described(killed.rank)}, with kill -9 after step {killed.step}",
        "next committed step": f"{outcome.seconds:.2f} s after the kill",
        "kept process and weights": f"{outcome.kept} of {killed.ranks} ranks",
        "steps done again": str(outcome.steps_redone),
        "the curve": str(same_bits) if same_bits is not None else "not compared",
    }


def _places(client: Client, job: Job) -> dict[str, str]:
    saved = [entry for entry in client.checkpoints(job.id).items if entry.state == "complete"]
    manta = _short(Path(sys.executable).parent / "manta")
    return {
        "checkpoint": _short(Path(saved[0].path)) if saved and saved[0].path else "none",
        "open the dashboard": f"MANTA_HOME=.demo {manta} up",
    }


def _short(path: Path) -> str:
    """`path` as seen from the folder that the demo is run in."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _median(values: Sequence[object]) -> float | None:
    numbers = [value for value in values if isinstance(value, int | float)]
    return statistics.median(numbers) if numbers else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


if __name__ == "__main__":
    sys.exit(main())
