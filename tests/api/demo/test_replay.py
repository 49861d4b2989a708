"""The steps around the failure, trained again: equal bits are told from others, and what goes wrong is a sentence."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from manta.api.demo import failure as demo_replay
from manta.api.demo.failure import ReplayFailed, replay

DOCUMENT = {"parallel": {"tensor": 2, "pipeline": 1, "data": 2}}
ROWS = {step: {"loss": 5.0 - step / 7, "grad_norm": 1.0 / step} for step in range(1, 31)}


class Job:
    """Stands for a client; knows the metrics and checkpoints of one job."""

    def __init__(self, folder, rows):
        self._rows = rows
        self.checkpoint = folder / "home" / "step-00000010-generation-1"
        self.checkpoint.mkdir(parents=True)
        (self.checkpoint / "data").write_text("state")

    def checkpoints(self, job_id):
        return SimpleNamespace(items=[SimpleNamespace(step=10, path=str(self.checkpoint))])

    def metrics(self, job_id, names, after_step, max_points):
        steps = [step for step in self._rows if step > after_step]
        return SimpleNamespace(steps=steps, series={name: [self._rows[step][name] for step in steps] for name in names})


@pytest.fixture
def engine(monkeypatch):
    """Stands for the engine: writes the rows that it is given, and remembers how it was called."""
    made = SimpleNamespace(rows=ROWS, returncode=0, stderr="", command=[])

    def run(command, **_):
        made.command = command
        folder = Path(command[command.index("--checkpoints") + 1])
        assert [each.name for each in folder.iterdir()] == ["step-00000010-generation-1"]
        metrics = Path(command[command.index("--metrics") + 1])
        last = int(command[command.index("--stop-after-step") + 1])
        with metrics.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": s, **made.rows[s]}) + "\n" for s in range(11, last + 1))
        return subprocess.CompletedProcess(command, made.returncode, "", made.stderr)

    monkeypatch.setattr(demo_replay.subprocess, "run", run)
    return made


def test_replay_with_equal_losses_reports_the_same_bits(tmp_path, engine):
    result = replay(Job(tmp_path, ROWS), DOCUMENT, "job", 10, 20, tmp_path / "replay")
    assert result.holds
    assert str(result) == "steps 11 to 20 trained again from the checkpoint of step 10 without the kill: same bits"
    assert "--nproc-per-node=4" in engine.command


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("step", [11, 17, 20])
def test_replay_reports_any_step_whose_loss_or_norm_differs_in_one_bit(tmp_path, engine, name, step):
    engine.rows = {**ROWS, step: {**ROWS[step], name: ROWS[step][name] * (1 + 2**-52)}}
    result = replay(Job(tmp_path, ROWS), DOCUMENT, "job", 10, 20, tmp_path / "replay")
    assert not result.holds
    assert result.differing == (step,)
    assert f"[{step}] have OTHER BITS" in str(result)


def test_replay_counts_a_missing_step_as_different(tmp_path, engine):
    rows = {step: row for step, row in ROWS.items() if step != 15}
    assert replay(Job(tmp_path, rows), DOCUMENT, "job", 10, 20, tmp_path / "replay").differing == (15,)


def test_replay_counts_a_step_not_trained_again_as_different(tmp_path, engine, monkeypatch):
    run = demo_replay.subprocess.run

    def ends_early(command, **about):
        at = command.index("--stop-after-step") + 1
        return run([*command[:at], "18", *command[at + 1 :]], **about)

    monkeypatch.setattr(demo_replay.subprocess, "run", ends_early)
    assert replay(Job(tmp_path, ROWS), DOCUMENT, "job", 10, 20, tmp_path / "replay").differing == (19, 20)


def test_replay_without_its_checkpoint_fails_with_the_missing_step(tmp_path, engine):
    job = Job(tmp_path, ROWS)
    with pytest.raises(ReplayFailed, match="the checkpoint of step 12 is not there"):
        replay(job, DOCUMENT, "job", 12, 20, tmp_path / "replay")


def test_replay_failure_quotes_the_error_of_the_engine(tmp_path, engine):
    engine.returncode, engine.stderr = 1, "Traceback ...\nMantaError: no room"
    with pytest.raises(ReplayFailed, match="failed: MantaError: no room"):
        replay(Job(tmp_path, ROWS), DOCUMENT, "job", 10, 20, tmp_path / "replay")
