"""Samples of ranks, and which of them are slow."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.workers.liveness.rank_samples import (
    EVERY_SECONDS,
    MIN_SECONDS,
    SLOW_STEPS,
    WINDOW,
    RankSample,
    RankSampler,
    Stragglers,
    packed,
    unpacked,
)
from manta.workers.protocol.json_codec import from_json, to_json

FOUR = [0, 0, 1, 1]


def run(stages, steps):
    """Everything that is named in `steps`, as (step, straggler)."""
    watch = Stragglers(stages)
    return [(number, straggler) for number, own in enumerate(steps, 1) for straggler in watch.add(own)]


def test_a_rank_that_is_slow_for_long_is_named_once_with_the_evidence():
    ((step, straggler),) = run(FOUR, [(0.2, 0.5, 1.0, 1.0)] * 100)
    assert step == SLOW_STEPS
    assert (straggler.rank, straggler.own_seconds, straggler.usual_seconds) == (1, 0.5, 0.2)
    assert "rank 1 slows the others down" in straggler.sentence
    assert straggler.to_json() == {
        "straggler": 1, "own_seconds": 0.5, "usual_seconds": 0.2, "slow_steps": SLOW_STEPS, "window": WINDOW,
    }  # fmt: skip


def test_a_stage_that_has_more_to_do_is_no_straggler():
    assert run(FOUR, [(0.2, 0.2, 2.0, 2.0)] * 100) == []


def test_a_rank_without_peers_cannot_be_compared():
    assert run([0, 1], [(0.2, 2.0)] * 100) == []


def test_straggler_slower_by_less_than_the_floor_is_not_named():
    assert run([0, 0], [(0.001, 0.001 + 0.9 * MIN_SECONDS)] * 100) == []
    assert run([0, 0], [(10.0, 10.0 + 2 * MIN_SECONDS)] * 100) == [], "nor so little of a long step"
    assert [straggler.rank for _, straggler in run([0, 0], [(0.001, 0.001 + 1.1 * MIN_SECONDS)] * 100)] == [1]


def test_straggler_is_compared_with_the_median_of_the_window():
    steps = [(9.0, 9.0, 9.0)] * 50 + [(0.2, 0.5, 0.2)] * WINDOW
    ((step, straggler),) = run([0, 0, 0], steps)
    assert step == 50 + SLOW_STEPS
    assert (straggler.own_seconds, straggler.usual_seconds, straggler.slow_steps) == (0.5, 0.2, SLOW_STEPS)


def test_slow_now_and_then_is_not_persistent():
    assert run([0, 0], ([(0.2, 0.9)] * (SLOW_STEPS - 1) + [(0.2, 0.2)] * (WINDOW - SLOW_STEPS + 1)) * 10) == []


def test_straggler_that_recovers_for_most_of_a_window_is_named_again():
    slow, fine = [(0.2, 0.9)] * 40, [(0.2, 0.2)] * (WINDOW // 2)
    assert [straggler.rank for _, straggler in run([0, 0], slow + fine + slow)] == [1, 1]


def test_straggler_that_recovers_for_a_few_steps_is_not_named_again():
    slow, fine = [(0.2, 0.9)] * 40, [(0.2, 0.2)] * (WINDOW - SLOW_STEPS + 2)
    assert [straggler.rank for _, straggler in run([0, 0], slow + fine + slow)] == [1]


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 8), st.integers(0, 2**32), st.floats(0.01, 2.0))
def test_no_straggler_is_named_among_equally_noisy_ranks(ranks, seed, pace):
    """Every rank is now and then twice as slow as the others, as on a machine with too many processes."""
    noise = random.Random(seed)
    steps = [[pace * (2.0 if noise.random() < 0.4 else 1.0) for _ in range(ranks)] for _ in range(300)]
    assert run([0] * ranks, steps) == []


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 8), st.integers(0, 2**32), st.floats(0.2, 2.0), st.data())
def test_the_slow_one_is_found_in_the_noise_and_nobody_else(ranks, seed, pace, data):
    noise, slow = random.Random(seed), data.draw(st.integers(0, ranks - 1))
    steps = [
        [pace * noise.uniform(0.9, 1.1) * (2.0 if rank == slow else 1.0) for rank in range(ranks)] for _ in range(60)
    ]
    assert [straggler.rank for _, straggler in run([0] * ranks, steps)] == [slow]


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


def nobody():
    return []


def test_numbers_come_back_in_single_precision():
    numbers = [0.0, 0.1, 8.5e10, 1e-30]
    assert unpacked(packed(numbers)) == pytest.approx(numbers, rel=1e-7)
    assert len(packed([0.123456] * 3072)) == 3072 * 16 / 3
    assert unpacked(packed([])) == []


@pytest.mark.parametrize("text", ["?", "AAA", "AAAA", "é"])
def test_text_that_holds_no_numbers_is_refused(text):
    with pytest.raises(ValueError):
        unpacked(text)


def test_sample_is_the_mean_since_the_last_one_and_of_the_last_memory():
    clock = Clock()
    sampler = RankSampler(clock)
    assert sampler.add(1, 1.0, (0.2, 0.4), (5.0, 6.0), nobody) is None
    clock.now += EVERY_SECONDS
    sample = sampler.add(2, 3.0, (0.4, 0.8), (7.0, 8.0), nobody)
    assert (sample.step, sample.seconds, sample.stragglers) == (2, 2.0, ())
    assert unpacked(sample.own_seconds) == pytest.approx([0.3, 0.6])
    assert unpacked(sample.memory_bytes) == [7.0, 8.0]
    clock.now += EVERY_SECONDS / 2
    assert sampler.add(3, 5.0, (5.0, 5.0), (1.0, 1.0), nobody) is None
    clock.now += EVERY_SECONDS / 2
    assert unpacked(sampler.add(4, 5.0, (1.0, 5.0), (1.0, 1.0), nobody).own_seconds) == [3.0, 5.0]


def test_rank_sample_without_known_own_times_has_none():
    clock = Clock()
    sampler = RankSampler(clock)
    clock.now += EVERY_SECONDS
    assert sampler.add(1, 1.0, (0.0, 0.0), (1.0, 1.0), nobody).own_seconds is None


def test_rank_sample_lists_stragglers_as_long_as_they_are_slow():
    clock, stragglers = Clock(), Stragglers([0, 0, 0])
    sampler = RankSampler(clock)

    def steps(count, own):
        for _ in range(count):
            stragglers.add(own)
        clock.now += EVERY_SECONDS
        return sampler.add(1, 1.0, own, (1.0,) * 3, lambda: stragglers.named).stragglers

    (straggler,) = steps(SLOW_STEPS, (0.2, 0.9, 0.2))
    assert (straggler["rank"], straggler["own_seconds"], straggler["usual_seconds"]) == (1, 0.9, 0.2)
    assert straggler["sentence"].startswith("rank 1 slows the others down")
    assert len(steps(5, (0.2, 0.9, 0.2))) == 1, "still, though it was named before"
    assert steps(24, (0.2, 0.2, 0.2)) == ()


def test_sample_travels_as_json():
    sample = RankSample(5, 0.25, packed([0.1]), packed([1e9]), ({"rank": 0},))
    assert from_json(RankSample, to_json(sample)) == sample
