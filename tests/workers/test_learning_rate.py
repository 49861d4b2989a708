"""Linear warm-up, then a cosine down to the smallest rate at the last step."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.config import OptimizerConfig
from workers.learning_rate import learning_rate

CONFIG = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=4)


def test_warm_up_rises_linearly_to_the_highest_rate():
    assert [learning_rate(CONFIG, step, 20) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_the_last_step_has_the_smallest_rate_and_the_middle_the_mean():
    assert learning_rate(CONFIG, 20, 20) == pytest.approx(0.1)
    assert learning_rate(CONFIG, 12, 20) == pytest.approx(0.55)
    assert learning_rate(CONFIG, 8, 20) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))


def test_without_warm_up_the_first_step_is_near_the_highest_rate():
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.0)
    assert learning_rate(config, 1, 1000) == pytest.approx(1.0, abs=1e-5)


def test_a_job_that_is_all_warm_up_ends_at_the_highest_rate():
    assert learning_rate(CONFIG, 4, 4) == 1.0


@given(st.integers(1, 300), st.integers(0, 300))
def test_rates_rise_then_fall_and_stay_in_bounds(steps, warmup):
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=min(warmup, steps))
    rates = [learning_rate(config, step, steps) for step in range(1, steps + 1)]
    top = config.warmup_steps
    assert all(a < b for a, b in itertools.pairwise(rates[:top]))
    assert all(a >= b for a, b in itertools.pairwise(rates[max(top - 1, 0) :]))
    assert all(0 < rate <= 1.0 for rate in rates)
