"""Which steps are bad, and where a roll back leads."""

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manta.workers.config import RecoveryConfig
from manta.workers.training.bad_numbers import (
    NO_LIMITS,
    NumericsHistory,
    RollBack,
    judge,
    limit,
    limits,
    merged_histories,
    merged_roll_backs,
    roll_back_target,
)

FINITE = st.floats(0, 1e6)
PAIRS = st.lists(st.tuples(FINITE, FINITE), max_size=12).map(tuple)
ROLL_BACKS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 20), st.integers(0, 40)).map(
        lambda each: RollBack(each[0], each[1], (range(each[2], each[2] + 8),))
    ),
    max_size=5,
)


def recovery(**spike):
    return RecoveryConfig.model_validate({"spike": {"policy": "skip", "window": 5, **spike}})


def calm(count=5, loss=2.0, norm=1.0):
    return NumericsHistory(((loss, norm),) * count)


def test_a_number_that_hardly_moves_still_has_room():
    assert limit([2.0] * 9, 8.0) == pytest.approx(2.0 * 1.4)


def test_deviations_are_those_of_a_normal_distribution():
    """Its median distance from its median is 0.6745 standard deviations."""
    assert limit([1.0, 2.0, 3.0, 4.0, 5.0], 2.0) == pytest.approx(3.0 + 2.0 / 0.6745, rel=1e-4)


@given(st.lists(st.floats(0.1, 10), min_size=5), st.floats(0.1, 50))
def test_a_limit_lies_above_the_median_and_grows_with_the_deviations(values, deviations):
    middle = sorted(values)[(len(values) - 1) // 2]
    assert middle < limit(values, deviations) < limit(values, 2 * deviations)


@given(st.floats(100, 1e9))
def test_a_spike_among_the_recent_steps_does_not_hide_the_next(spike):
    values = [2.0, 2.1, 1.9, 2.0, spike, 2.1, 2.0]
    assert limit(values, 8.0) < 4.0


def test_numerics_limits_need_enough_recent_steps():
    assert limits(calm(4), recovery()) == NO_LIMITS
    assert limits(calm(5), recovery(policy="ignore")) == NO_LIMITS
    assert limits(calm(5), recovery()) == (pytest.approx(2.8), pytest.approx(2.0))
    assert limits(calm(5), recovery(grad_norm_deviations=None))[1] == math.inf


def test_numerics_judge_names_spikes_and_non_finite_steps_by_policy():
    bounds = (2.8, 2.0)
    assert judge(recovery(), 7, 2.8, 2.0, bounds) is None
    spike = judge(recovery(), 7, 2.9, 1.0, bounds)
    assert (spike.kind, spike.policy) == ("spike", "skip")
    assert "step 7 has loss 2.9" in spike.sentence and "a loss above the 2.8 that the last 5 steps" in spike.sentence
    assert "a gradient norm above the 2 " in judge(recovery(), 7, 2.0, 2.1, bounds).sentence
    assert ", a loss above the 2.8 " in judge(recovery(), 7, 2.9, 2.1, bounds).sentence, "the loss comes first"
    assert judge(recovery(policy="ignore"), 7, 2.9, 2.1, bounds) is None
    for pair in ((math.nan, 1.0), (1.0, math.inf)):
        bad = judge(RecoveryConfig(nonfinite="roll_back"), 7, *pair, NO_LIMITS)
        assert (bad.kind, bad.policy) == ("not_finite", "roll_back")


def test_numerics_history_keeps_finite_steps_of_its_window_only():
    history = NumericsHistory()
    for loss in (1.0, math.nan, 2.0, math.inf, 3.0):
        history = history.with_step(loss, 1.0, window=2)
    assert history.with_step(4.0, math.inf, window=2) == history
    assert history.recent == ((2.0, 1.0), (3.0, 1.0))


def test_merged_roll_backs_of_the_same_samples_keep_the_furthest_back():
    samples = (range(56, 64),)
    both = [RollBack(8, 7, samples), RollBack(8, 3, samples)]
    for each in (both, both[::-1]):
        assert merged_roll_backs(each) == (RollBack(8, 3, samples),)


@given(PAIRS, ROLL_BACKS)
def test_numbers_survive_their_way_through_json_with_all_bits(recent, roll_backs):
    history = NumericsHistory(recent).with_roll_backs(roll_backs)
    assert NumericsHistory.from_json(json.loads(json.dumps(history.to_json()))) == history


@given(ROLL_BACKS, ROLL_BACKS)
def test_roll_backs_add_up_in_any_order(first, second):
    assert merged_roll_backs([*first, *second]) == merged_roll_backs([*second, *first])
    assert merged_roll_backs([*merged_roll_backs(first), *second]) == merged_roll_backs([*first, *second])


@given(PAIRS, ROLL_BACKS, ROLL_BACKS)
def test_ranks_agree_on_all_roll_backs_that_any_of_them_knows(recent, first, second):
    merged = merged_histories(
        [
            NumericsHistory((), ()),
            NumericsHistory(recent).with_roll_backs(first),
            NumericsHistory(recent).with_roll_backs(second),
        ]
    )
    assert merged == NumericsHistory(recent).with_roll_backs([*first, *second])


@given(st.sets(st.integers(0, 50), min_size=1), st.integers(1, 60), st.integers(1, 20))
@example({3, 4, 5}, 6, 2)
def test_a_roll_back_undoes_enough_where_it_can(kept, step, steps):
    kept = {each for each in kept if each < step} or {0}
    target = roll_back_target(kept, step, steps)
    assert target in kept
    enough = {each for each in kept if step - 1 - each >= steps}
    assert target == (max(enough) if enough else min(kept))
