"""Samples of what is known of all ranks: means over their time, and nothing in between."""

import pytest

from manta.workers.liveness.rank_samples import (
    EVERY_SECONDS,
    SLOW_STEPS,
    RankSample,
    RankSampler,
    Stragglers,
    packed,
    unpacked,
)
from manta.workers.protocol.json_codec import from_json, to_json


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
    assert straggler["sentence"].startswith("rank 1 holds up the others")
    assert len(steps(5, (0.2, 0.9, 0.2))) == 1, "still, though it was named before"
    assert steps(24, (0.2, 0.2, 0.2)) == ()


def test_sample_travels_as_json():
    sample = RankSample(5, 0.25, packed([0.1]), packed([1e9]), ({"rank": 0},))
    assert from_json(RankSample, to_json(sample)) == sample
