"""Learning rates by step: linear warm-up, then one of several schedules, as transformers and torch have them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from engine_specs import spec
from hypothesis import given
from hypothesis import strategies as st
from reported import rows_of

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import OptimizerConfig
from manta.workers.protocol.messages import Resume
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.learning_rate import decay_steps, learning_rate
from manta.workers.training.reporter import Reporter

CONFIG = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=4)


def test_warmup_raises_the_learning_rate_linearly_to_the_highest():
    assert [learning_rate(CONFIG, step, 20) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_the_last_step_has_the_smallest_rate_and_the_middle_the_mean():
    assert learning_rate(CONFIG, 20, 20) == pytest.approx(0.1)
    assert learning_rate(CONFIG, 12, 20) == pytest.approx(0.55)
    assert learning_rate(CONFIG, 8, 20) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))


def test_first_learning_rate_without_warm_up_is_near_the_highest():
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.0)
    assert learning_rate(config, 1, 1000) == pytest.approx(1.0, abs=1e-5)


def test_a_job_that_is_all_warm_up_ends_at_the_highest_rate():
    assert learning_rate(CONFIG, 4, 4) == 1.0


SCHEDULES = ("cosine", "linear", "wsd", "inverse-sqrt", "constant")


@given(st.sampled_from(SCHEDULES), st.integers(1, 300), st.integers(0, 300))
def test_learning_rates_rise_then_fall_within_bounds(schedule, steps, warmup):
    config = OptimizerConfig(
        learning_rate=1.0, min_learning_rate=0.1, warmup_steps=min(warmup, steps), schedule=schedule
    )
    rates = [learning_rate(config, step, steps) for step in range(1, steps + 1)]
    top = config.warmup_steps
    assert all(a < b for a, b in itertools.pairwise(rates[:top]))
    assert all(a >= b for a, b in itertools.pairwise(rates[max(top - 1, 0) :]))
    assert all(0 < rate <= 1.0 for rate in rates)
    assert all(rate >= 0.1 for rate in rates[top:])


def rates(steps: int = 40, low: float = 0.0, **keys) -> list[float]:
    """Of a whole job with a highest rate of 0.5 and 8 steps of warm-up."""
    config = OptimizerConfig(learning_rate=0.5, min_learning_rate=low, **{"warmup_steps": 8, **keys})
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


def scheduled(make, steps: int = 40) -> list[float]:
    """What one of transformers' or torch's schedulers gives from its step 1 on, at a rate of 0.5."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler, seen = make(optimizer), []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        seen.append(scheduler.get_last_lr()[0])
    return seen


@pytest.mark.parametrize(
    ("keys", "name", "arguments"),
    [
        ({"schedule": "cosine"}, "get_cosine_schedule_with_warmup", {"num_training_steps": 40}),
        ({"schedule": "linear"}, "get_linear_schedule_with_warmup", {"num_training_steps": 40}),
        ({"schedule": "inverse-sqrt"}, "get_inverse_sqrt_schedule", {}),
        ({"schedule": "constant"}, "get_constant_schedule_with_warmup", {}),
        *[
            (
                {"schedule": "wsd", "decay_steps": 12, "decay_shape": shape},
                "get_wsd_schedule",
                {"num_decay_steps": 12, "num_training_steps": 40, "decay_type": shape},
            )
            for shape in ("linear", "cosine", "1-sqrt")
        ],
    ],
    ids=["cosine", "linear", "inverse-sqrt", "constant", "wsd linear", "wsd cosine", "wsd 1-sqrt"],
)
def test_schedules_ending_at_zero_match_transformers(keys, name, arguments):
    optimization = pytest.importorskip("transformers.optimization")
    expected = scheduled(lambda optimizer: getattr(optimization, name)(optimizer, num_warmup_steps=8, **arguments))
    assert rates(**keys) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_decays_ending_above_zero_match_transformers_after_its_warmup(shape):
    """Its warm-up then begins at the smallest rate, ours at nothing."""
    optimization = pytest.importorskip("transformers.optimization")
    decay = {"num_decay_steps": 12, "num_training_steps": 40, "min_lr_ratio": 0.2, "decay_type": shape}
    expected = scheduled(lambda optimizer: optimization.get_wsd_schedule(optimizer, num_warmup_steps=8, **decay))
    actual = rates(low=0.1, schedule="wsd", decay_steps=12, decay_shape=shape)
    assert actual[8:] == pytest.approx(expected[8:], rel=1e-12)


def test_linear_decay_matches_torchs():
    expected = scheduled(lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=40))
    assert rates(low=0.1, schedule="linear", warmup_steps=0) == pytest.approx(expected, rel=1e-12)


def test_wsd_decay_is_as_long_as_asked_or_a_tenth_of_the_job():
    def length(steps: int, **keys) -> int:
        return decay_steps(OptimizerConfig(schedule="wsd", **keys), steps)

    assert length(1000) == 100
    assert length(3) == 1, "at least one"
    assert length(1000, warmup_steps=950) == 50, "what the warm-up leaves"
    assert length(1000, decay_steps=7) == 7
    assert length(1000, decay_fraction=0.25) == 250
    assert length(3, decay_fraction=0.1) == 1, "at least one"
    falling = rates(low=0.1, schedule="wsd", decay_steps=4)
    assert falling[7:36] == [0.5] * 29
    assert falling[36:] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_inverse_sqrt_schedule_falls_no_lower_than_the_smallest_rate():
    falling = rates(steps=100, low=0.2, schedule="inverse-sqrt")
    assert falling[31] == pytest.approx(0.25), "half of it at four times the warm-up"
    assert falling[99] == 0.2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resumed_job_has_the_learning_rates_of_an_uninterrupted_one(tmp_path, schedule):
    """Nothing of a schedule is kept: rates follow from the step."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("to be or not to be, that is the question. " * 20, encoding="utf-8")
    optimizer = {"schedule": schedule, "warmup_steps": 2}
    job = spec(
        model={"layers": 1, "hidden_size": 16},
        data={"paths": [str(corpus)]},
        train={"steps": 8, "optimizer": optimizer},
        checkpoint={"every_steps": 5},
    )
    whole = curve(job, str(tmp_path / "whole"), Resume())
    path = complete_checkpoints(tmp_path / "whole")[0][0]
    assert curve(job, str(tmp_path / "more"), Resume("checkpoint", 5, str(path))) == whole[5:]
    assert [rate for _, rate, _ in whole] == [learning_rate(job.train.optimizer, step, 8) for step in range(1, 9)]


def curve(job, folder: str, resume: Resume) -> list[tuple[int, float, float]]:
    """(step, learning rate, loss) of each step of a job of one rank from `resume` on."""
    messages = []
    reporter = Reporter(messages.extend)
    comm = Comm(RankGrid(job.layout), 0, torch.device("cpu"))
    comm.generation = 1
    trainer = Trainer(job, comm, reporter, 1e9, StatePaths(checkpoints=folder))
    trainer.restore(resume)
    trainer.train()
    trainer.close()
    reporter.close()
    return [(row["step"], row["learning_rate"], row["loss"]) for row in rows_of(messages)]
