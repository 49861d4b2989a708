"""The engine inside of Ray Train. In the soak: real TorchTrainers on a real Ray, one of which loses a worker."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rank_programs import train_job

from manta.workers.checkpoint.catalog import complete_checkpoints, list_checkpoints, verify
from manta.workers.checkpoint.transfer import copy as copy_checkpoint
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec, read_document

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "ray_train.py"
STEPS, EVERY, KEEP = 20, 4, 2
SECONDS = 240.0
"""That a run takes at most, on a machine that does much else."""


def quickstart(corpus: str) -> dict[str, Any]:
    """The quickstart's model on 4 ranks, for a few steps."""
    document = read_document(ROOT / "examples" / "quickstart.yaml")
    document["data"] = {"source": "text", "paths": [corpus]}
    document["train"].update(steps=STEPS, global_batch_size=8, micro_batch_size=2, validate_every=0)
    document["train"]["optimizer"]["warmup_steps"] = 5
    document["parallel"].update(tensor=2, pipeline=1, data=2)
    document["checkpoint"] = {"every_steps": EVERY, "keep": KEEP}
    return dict(document)


@pytest.fixture(scope="module")
def job(corpus: str) -> dict[str, Any]:
    return quickstart(corpus)


@pytest.fixture(scope="module")
def undisturbed(job, ranks, tmp_path_factory):
    """Without Ray, and without a failure: (its rows, the folder of its checkpoints, of which all are there)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    keeping = {**job, "checkpoint": {"every_steps": EVERY, "keep": STEPS}}
    first, *_ = ranks.run(parse_job_spec(job).layout, train_job, keeping, str(folder))
    return first.rows, folder


@pytest.fixture(scope="module")
def interrupted(start, job, undisturbed, tmp_path_factory):
    """A run that has ended well. It began with a checkpoint of the other's, and one of its workers was killed after its
    own first."""
    folder = tmp_path_factory.mktemp("job")
    pulled, _ = complete_checkpoints(undisturbed[1])[0]
    copy_checkpoint(pulled, folder / "run" / pulled.name)
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    run = start(folder, "run", EXAMPLE, folder / "job.yaml")
    known = run.folder / "checkpoint_manager_snapshot.json"
    run.until("its first report", lambda: known.exists() and len(run.workers()) == 4)
    run.workers()[2].kill()
    run.ended()
    return run


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]


@pytest.mark.soak
def test_ray_train_has_the_same_bits_after_a_worker_is_killed(interrupted, undisturbed):
    expected = [(row["step"], row["loss"], row["grad_norm"]) for row in undisturbed[0]]
    rows = rows_of(interrupted.folder / "metrics")
    assert [(row["step"], row["loss"], row["grad_norm"]) for row in rows] == expected[EVERY:]
    generations = sorted({row["generation"] for row in rows})
    assert len(generations) == 2, "all workers have started again"
    began = next(row["step"] for row in rows if row["generation"] == generations[1])
    assert began > 2 * EVERY and began % EVERY == 1, "after the last checkpoint that was reported"


@pytest.mark.soak
def test_manta_reads_checkpoints_stored_by_ray_train(interrupted):
    newest, manifest = complete_checkpoints(interrupted.folder)[-1]
    assert verify(newest).step == manifest.step == STEPS
    assert manifest.job == interrupted.name
    command = [sys.executable, "-m", "manta.api.cli", "checkpoints", "verify", str(interrupted.folder)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.replace("\n", "").startswith(f"{newest} is intact: step {STEPS}, ")
    assert [each.step for each in list_checkpoints(interrupted.folder).checkpoints] == [EVERY, STEPS - EVERY, STEPS]


@pytest.mark.soak
def test_ray_train_reads_checkpoints_stored_by_the_engine(interrupted):
    from ray.train import Result
    from torch.distributed.checkpoint import load

    result = Result.from_path(interrupted.folder)
    assert result.metrics == rows_of(interrupted.folder / "metrics")[-1]
    assert list(result.metrics_dataframe["step"]) == [STEPS - EVERY, STEPS]
    stored = {"model.final_norm.weight": torch.zeros(128)}
    with result.checkpoint.as_directory() as folder:
        assert Path(folder) == complete_checkpoints(interrupted.folder)[-1][0]
        load(stored, checkpoint_id=folder, no_dist=True)
    assert stored["model.final_norm.weight"].norm() > 0


def test_ray_train_gets_one_worker_per_rank_and_absolute_data_paths(job, tmp_path, monkeypatch):
    from manta.workers.integrations.ray_train import torch_trainer

    monkeypatch.chdir(tmp_path)
    here = copy.deepcopy(job)
    here["data"] |= {"paths": ["words.txt"], "validation": [{"name": "more", "paths": ["more.txt"]}]}
    here["train"]["validate_every"] = EVERY
    here["resources"] = {"accelerator": "cpu"}
    here["recovery"] = {"max_restarts": 7}
    trainer = torch_trainer(here, name="one", storage_path=str(tmp_path))
    assert trainer.scaling_config.num_workers == 4 and not trainer.scaling_config.use_gpu
    assert trainer.run_config.failure_config.max_failures == 7
    assert trainer.run_config.checkpoint_config.num_to_keep == KEEP
    assert trainer.run_config.name == "one"
    data = trainer.train_loop_config["job"]["data"]
    assert data["paths"] == [str(tmp_path / "words.txt")]
    assert data["validation"][0]["paths"] == [str(tmp_path / "more.txt")]
    assert here["data"]["paths"] == ["words.txt"]


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"recovery": {"nonfinite": "roll_back"}}, "set recovery.nonfinite and recovery.spike.policy to skip or fail"),
        ({"parallel": {"tensor": 2}}, r"the layout has 2 ranks, but ScalingConfig says 4 workers: set num_workers=2"),
    ],
)
def test_ray_train_refuses_unsupported_specs_before_it_starts(job, sections, sentence):
    from ray.train import ScalingConfig

    from manta.workers.integrations.ray_train import RayTrainError, torch_trainer

    with pytest.raises(RayTrainError, match=sentence):
        torch_trainer({**job, **sections}, ScalingConfig(num_workers=4))
    with pytest.raises(SpecError):
        torch_trainer({**job, "trian": {}}, ScalingConfig(num_workers=4))


def test_training_stops_at_checkpoints_at_reports_and_at_the_end(job):
    from manta.workers.integrations.ray_train import _next_stop

    spec = parse_job_spec(job)
    assert [_next_stop(spec, step, 0) for step in (0, 3, 4, 17)] == [4, 4, 8, 20]
    assert [_next_stop(spec, step, 6) for step in (4, 6, 8, 16, 18)] == [6, 8, 12, 18, 20]
    without = parse_job_spec({**job, "checkpoint": {"every_steps": 0}})
    assert _next_stop(without, 0, 0) == STEPS
    assert _next_stop(without, 0, 7) == 7


def test_a_checkpoint_that_could_not_be_saved_is_not_reported(monkeypatch, tmp_path):
    """Ray Train would count it among those that are kept, and delete an older one for it."""
    from manta.workers.integrations import ray_train

    reported, saved = [], SimpleNamespace(due=lambda step: True, failure="no space left on device")
    trainer = SimpleNamespace(step=4, comm=SimpleNamespace(rank=0), state=SimpleNamespace(checkpoints=saved))
    monkeypatch.setattr(ray_train.ray.train, "report", lambda *what, **how: reported.append(what))
    rows = ray_train._Rows(None)
    rows.metrics({"step": 4})
    ray_train._report(trainer, tmp_path, rows)
    assert reported == [({"step": 4}, None)]


@pytest.mark.soak
@pytest.mark.timeout(6 * SECONDS)
def test_tune_sweeps_over_values_of_the_spec(start, corpus, tmp_path):
    job = quickstart(corpus)
    job["parallel"].update(tensor=1, data=1, sequence_parallel=False)
    job["train"]["steps"] = 2 * EVERY
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    run = start(tmp_path, "sweep", ROOT / "examples" / "ray_tune.py", tmp_path / "job.yaml")
    said = run.ended(5 * SECONDS)
    folders = [file.parent for file in run.folder.glob("*/checkpoint_manager_snapshot.json")]
    manifests = [complete_checkpoints(folder)[-1][1] for folder in folders]
    rates = [manifest.spec["train"]["optimizer"]["learning_rate"] for manifest in manifests]
    assert sorted(rates) == [3.0e-4, 1.0e-3, 3.0e-3]
    losses = [rows_of(folder / "metrics")[-1]["loss"] for folder in folders]
    best = losses.index(min(losses))
    assert f"best learning rate {rates[best]:g}: loss {losses[best]:.4f}" in said
    assert f"checkpoint {complete_checkpoints(folders[best])[-1][0]}" in said
