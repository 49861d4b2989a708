"""A job that is killed again and again while it saves: a whole checkpoint is always there, and goes on to the bit."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
import yaml
from checkpoint_programs import job, lone
from rank_processes import begin_process

from manta.workers import run
from manta.workers.checkpoint.catalog import complete_checkpoints, newest_usable, next_generation
from manta.workers.protocol.messages import Resume


def killed_while_saving(config: Path, folder: Path, seconds: float) -> None:
    """Start the job, let it get to a new checkpoint and `seconds` further, and kill it."""
    generation = next_generation(folder)
    job, deadline = begin_process(run.main, [str(config), "--checkpoints", str(folder)]), time.monotonic() + 120
    while not any(made.generation == generation for _, made in complete_checkpoints(folder)):
        assert job.is_alive(), "it ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(seconds)
    job.kill()
    job.join()
    assert job.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_job_killed_while_saving_has_a_whole_checkpoint_with_the_same_next_step(corpus, tmp_path, times):
    config, folder, draw = tmp_path / "job.yaml", tmp_path / "checkpoints", random.Random(7)
    one_thread = {"threads": 1}  # as this process has, or its bits would be others some steps on
    numbers = {"train": {"steps": 1_000_000}, "checkpoint": {"every_steps": 0}, "resources": one_thread}
    document = job(corpus, {}, model={"hidden_size": 16}, **numbers)
    config.write_text(yaml.safe_dump({**document, "checkpoint": {"every_steps": 1, "keep": 2}}))
    never_interrupted, expected = lone(document, tmp_path / "none"), [(0.0, 0.0)]
    never_interrupted.restore(Resume())
    reached = 0
    for _ in range(times):
        killed_while_saving(config, folder, draw.uniform(0, 0.1))
        path, skipped = newest_usable(folder)
        assert path == complete_checkpoints(folder)[-1][0]
        assert all("manifest.json is missing, so its save was interrupted" in reason for reason in skipped)
        step = complete_checkpoints(folder)[-1][1].step
        assert step > reached, "it went on from where it was"
        reached = step
        while len(expected) <= step + 1:
            statistics = never_interrupted.train_step()
            expected.append((statistics.loss, statistics.grad_norm))
        resumed = lone(document, tmp_path / "none")
        resumed.restore(Resume("checkpoint", step, str(path)))
        statistics = resumed.train_step()
        assert (statistics.loss, statistics.grad_norm) == expected[step + 1]
