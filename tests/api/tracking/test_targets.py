"""What other people's tools have of a job, read back by themselves. MLflow and Weights & Biases are tested where they
are installed."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from manta.api import tracking
from manta.api.tracking import MlflowRun, NotInstalled, TensorBoardFiles, TrackingFailed, WandbRun, flattened

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

    monkeypatch.setattr(tracking.importlib, "import_module", missing)
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
