"""A job's metrics in other tools."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from manta.api.cli import track
from manta.api.cli.track import (
    MlflowRun,
    NotInstalled,
    TensorBoardFiles,
    TrackingFailed,
    WandbRun,
    carry_over,
    flattened,
)
from manta.api.schemas import MetricSeries


class Growing:
    """A job that has committed one of `ends` steps at each look; in `state` at the last one."""

    def __init__(self, *ends: int, state: str = "SUCCEEDED"):
        self._ends, self._looks, self._state = ends, 0, state

    def job(self, job_id):
        last = self._looks == len(self._ends) - 1
        self._committed = self._ends[self._looks]
        self._looks += 1
        return SimpleNamespace(id=job_id, state=self._state if last else "RUNNING", step=self._committed)

    def metrics(self, job_id, names=None, after_step=0, max_points=1000):
        steps = list(range(after_step + 1, self._committed + 1))
        losses = [float("nan") if step == 2 else 1.0 / step for step in steps]
        validation = [0.5 if step == 3 else None for step in steps]
        return MetricSeries(steps=steps, series={"loss": losses, "validation_loss": validation})


class Noted:
    def __init__(self):
        self.rows, self.ended = [], []

    def write(self, step, row):
        self.rows.append((step, dict(row)))

    def close(self, succeeded):
        self.ended.append(succeeded)


def test_tracking_writes_each_step_once_with_its_finite_numbers():
    first, second = Noted(), Noted()
    done = carry_over(Growing(0, 2, 2, 4), "j", [first, second], poll_seconds=0.0)
    assert done.state == "SUCCEEDED"
    assert first.rows == [
        (1, {"loss": 1.0}),
        (2, {}),
        (3, {"loss": 1 / 3, "validation_loss": 0.5}),
        (4, {"loss": 0.25}),
    ]
    assert second.rows == first.rows
    assert first.ended == second.ended == [True]


@pytest.mark.parametrize("state", ["CANCELLED", "FAILED"])
def test_tracking_reports_a_job_short_of_its_last_step_as_unsuccessful(state):
    target = Noted()
    carry_over(Growing(1, 2, state=state), "j", [target], poll_seconds=0.0)
    assert (len(target.rows), target.ended) == (2, [False])


JOB = SimpleNamespace(
    id="job-1", name="small", spec={"name": "small", "train": {"steps": 2, "optimizer": {"name": "adamw"}}}
)


def write_two(target):
    target.write(1, {"loss": 2.5})
    target.write(2, {"loss": 2.0, "validation_loss": 2.25})
    target.close(True)


def scalars(file):
    """(Name, step, value) of each scalar in a file of TensorBoard's events."""
    from tensorboardX.proto.event_pb2 import Event

    content, at, triples = file.read_bytes(), 0, []
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)  # then its checksum, the event, and that one's
        event = Event.FromString(content[at + 12 : at + 12 + length])
        triples += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        at += 12 + length + 4
    return triples


def test_tensorboard_has_each_number_at_its_step(tmp_path):
    write_two(TensorBoardFiles(tmp_path, JOB))
    (file,) = (tmp_path / "job-1").iterdir()
    assert scalars(file) == [("loss", 1, 2.5), ("loss", 2, 2.0), ("validation_loss", 2, 2.25)]


def test_unwritable_tensorboard_folder_is_reported(tmp_path):
    (tmp_path / "job-1").write_text("")
    with pytest.raises(TrackingFailed, match=r"TensorBoard rejected the data: .*Not a directory"):
        TensorBoardFiles(tmp_path, JOB)


def test_missing_tracking_package_is_reported_with_its_install_command(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(track.importlib, "import_module", missing)
    with pytest.raises(NotInstalled, match="mlflow-skinny is not installed here: pip install mlflow-skinny"):
        MlflowRun("mine", JOB)


def test_spec_is_flattened_for_tracking_tools():
    assert flattened(JOB.spec) == {"name": "small", "train.steps": 2, "train.optimizer.name": "adamw"}


@pytest.mark.soak
def test_mlflow_has_a_run_with_the_spec_and_each_number(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    write_two(MlflowRun("mine", JOB))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert run.data.params["train.optimizer.name"] == "adamw"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(1, 2.5), (2, 2.0)]


@pytest.mark.soak
def test_weights_and_biases_has_a_run_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    write_two(WandbRun("mine", JOB))
    (stored,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"validation_loss" in stored.read_bytes()
