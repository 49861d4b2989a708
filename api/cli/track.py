"""`manta track`: writes a job's metrics to TensorBoard, MLflow or Weights & Biases, from where the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manta.api.cli.main import EXIT_BAD_INPUT, JobId, Json, Url, app, connect, fail, show
from manta.api.schemas import Job
from manta.api.tracking import MlflowRun, Target, TensorBoardFiles, WandbRun
from manta.api.tracking import track as carry_over


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
        raise fail("give a target: --tensorboard FOLDER, --mlflow EXPERIMENT or --wandb PROJECT", EXIT_BAD_INPUT)
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
