"""`manta track`: writes a job's metrics to TensorBoard, MLflow or Weights & Biases, from where the command runs, as
they come, until the job is over.

Each tool is a package of its own that has to be installed, and takes its servers and secrets from its own environment
(MLFLOW_TRACKING_URI, WANDB_API_KEY, WANDB_MODE ...), never from a job or from Manta.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Protocol

import typer

from manta.api.cli.main import EXIT_BAD_INPUT, JobId, Json, Url, app, connect, fail, show
from manta.api.cli.progress import JobReader, watch
from manta.api.client.retries import RetryPolicy
from manta.api.schemas import Job, MetricSeries
from manta.service.states import JobState
from manta.workers.errors import MantaError

Row = Mapping[str, float]
"""Finite numbers of one step, by metric name."""
MAX_STEPS = 10_000
"""In one answer; where there are more, the service thins them out."""
POLL_SECONDS = 2.0


class NotInstalled(MantaError):
    """A package is asked for that is not there; the message says which."""


class TrackingFailed(MantaError):
    """A tool does not take what it is given; the message has its own words."""


class Target(Protocol):
    """Takes the rows of one job."""

    def write(self, step: int, row: Row) -> None:
        """Take the numbers of committed step `step`; steps come in ascending order."""
        ...

    def close(self, succeeded: bool) -> None:
        """The job is over, well or not; what was taken is where it belongs once this returns."""
        ...


class TensorBoardFiles:
    """Event files in a folder, which `tensorboard --logdir` shows."""

    def __init__(self, folder: Path, job: Job):
        """Raises NotInstalled, TrackingFailed."""
        writer = _package("tensorboardX", "tensorboardX").SummaryWriter
        with _words_of("TensorBoard"):
            self._writer = writer(str(folder / job.id))

    def write(self, step: int, row: Row) -> None:
        with _words_of("TensorBoard"):
            for name, value in row.items():
                self._writer.add_scalar(name, value, step)

    def close(self, succeeded: bool) -> None:
        with _words_of("TensorBoard"):
            self._writer.close()


class MlflowRun:
    """A run of an MLflow experiment, with the spec as its parameters."""

    def __init__(self, experiment: str, job: Job):
        """Raises NotInstalled, TrackingFailed."""
        mlflow = _package("mlflow", "mlflow-skinny")
        with _words_of("MLflow"):
            self._client = mlflow.MlflowClient()
            existing = self._client.get_experiment_by_name(experiment)
            place = existing.experiment_id if existing else self._client.create_experiment(experiment)
            self._run = self._client.create_run(place, run_name=job.name, tags={"manta.job": job.id}).info.run_id
            for name, value in flattened(job.spec).items():
                self._client.log_param(self._run, name, value)

    def write(self, step: int, row: Row) -> None:
        with _words_of("MLflow"):
            for name, value in row.items():
                self._client.log_metric(self._run, name, value, step=step)

    def close(self, succeeded: bool) -> None:
        with _words_of("MLflow"):
            self._client.set_terminated(self._run, "FINISHED" if succeeded else "FAILED")


class WandbRun:
    """A run of a Weights & Biases project, with the spec as its configuration."""

    def __init__(self, project: str, job: Job):
        """Raises NotInstalled, TrackingFailed."""
        self._wandb = _package("wandb", "wandb")
        with _words_of("Weights & Biases"):
            self._run = self._wandb.init(project=project, name=job.name, notes=job.id, config=job.spec)

    def write(self, step: int, row: Row) -> None:
        with _words_of("Weights & Biases"):
            self._run.log(dict(row), step=step)

    def close(self, succeeded: bool) -> None:
        with _words_of("Weights & Biases"):
            self._run.finish(exit_code=0 if succeeded else 1)
            self._wandb.teardown()  # only then has its process written all that it was told


@contextmanager
def _words_of(tool: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each tool has its own
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TrackingFailed(f"{tool} rejected the data: {lines[0]}") from error


def flattened(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by their paths, such as `train.steps`."""
    flat: dict[str, Any] = {}
    for name, value in section.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _package(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotInstalled(f"{name} is not installed here: pip install {name} ({error})") from error


class MetricReader(JobReader, Protocol):
    """What can be asked for a job and its metrics, such as `manta.api.client.Client`."""

    def metrics(
        self, job_id: str, names: Sequence[str] | None = None, after_step: int = 0, max_points: int = 1000
    ) -> MetricSeries:
        """Metrics of the steps after `after_step`."""


def carry_over(
    reader: MetricReader,
    job_id: str,
    targets: Sequence[Target],
    poll_seconds: float = POLL_SECONDS,
    on_progress: Callable[[Job], None] = lambda job: None,
) -> Job:
    """Write a job's metrics into `targets` from its first step on, until it is final, and return it. A step that is
    done again after a recovery is written once. Raises what reading and writing raise."""
    written, retries = 0, RetryPolicy()
    for job in watch(reader, job_id, poll_seconds, retries):
        after = written
        new = retries.call(lambda: reader.metrics(job_id, after_step=after, max_points=MAX_STEPS))  # noqa: B023
        for step, row in _rows(new):
            for target in targets:
                target.write(step, row)
            written = step
        on_progress(job)
    for target in targets:
        target.close(job.state == JobState.SUCCEEDED)
    return job


def _rows(series: MetricSeries) -> Iterator[tuple[int, Row]]:
    """(Step, its numbers), of which those that are not known or not finite are left out."""
    for index, step in enumerate(series.steps):
        values = ((name, column[index]) for name, column in series.series.items())
        yield step, {name: value for name, value in values if value is not None and math.isfinite(value)}


@app.command()
def track(
    job: JobId,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="FOLDER", help="Write event files into FOLDER/JOB.")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option("--mlflow", metavar="EXPERIMENT", help="Write a run in this MLflow experiment.")
    ] = None,
    wandb: Annotated[
        str | None, typer.Option("--wandb", metavar="PROJECT", help="Write a run in this Weights & Biases project.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write a job's metrics, from the first step until the job ends, to an experiment tracker."""
    if tensorboard is None and mlflow is None and wandb is None:
        raise fail("choose a tracker: --tensorboard FOLDER, --mlflow EXPERIMENT or --wandb PROJECT", EXIT_BAD_INPUT)
    with connect(url) as client:
        followed = client.job(job)
        done = carry_over(client, followed.id, _targets(followed, tensorboard, mlflow, wandb))
    sentence = f"{done.id} is {done.state}: metrics up to step {done.step} are written"
    show(done, as_json, lambda console: console.print(sentence, highlight=False))


def _targets(job: Job, tensorboard: Path | None, mlflow: str | None, wandb: str | None) -> list[Target]:
    targets: list[Target] = []
    if tensorboard is not None:
        targets.append(TensorBoardFiles(tensorboard, job))
    if mlflow is not None:
        targets.append(MlflowRun(mlflow, job))
    if wandb is not None:
        targets.append(WandbRun(wandb, job))
    return targets
