"""How evenly tokens are spread over experts and ranks, and when that is reported."""

from types import SimpleNamespace

import pytest
from engine_specs import spec

from manta.workers.accounting.activation_bytes import IMBALANCE
from manta.workers.liveness.expert_load import AGAIN_SECONDS, STEPS, ExpertLoads, expert_load
from manta.workers.liveness.rank_samples import WINDOW, Stragglers

EVEN, SKEWED = (10, 10, 10, 10), (25, 5, 6, 4)


def job(**parallel):
    moe = {"experts": 4, "per_token": 2, "ffn_hidden_size": 16, "first_dense": 1}
    return spec(model={"family": "llama", "moe": moe}, parallel=parallel)


def test_load_is_that_of_the_busiest_expert_in_the_worst_layer():
    assert expert_load((EVEN, SKEWED)) == 25 / 10
    assert expert_load((EVEN, (0, 0, 0, 0))) == 1.0, "a layer that no token has reached"
    assert expert_load(()) == 1.0


@pytest.mark.parametrize(("parallel", "loads"), [
    ({"data": 2}, [1, 1]),
    ({"data": 4, "expert": 2}, [90 / 80, 70 / 80] * 2),
    ({"data": 2, "context": 2, "expert": 4}, [45 / 40, 45 / 40, 26 / 40, 44 / 40]),
    ({"data": 2, "expert": 2, "pipeline": 2}, [20 / 20, 70 / 60, 20 / 20, 50 / 60]),
])  # fmt: skip
def test_load_of_a_rank_is_that_of_its_experts_in_its_layers_over_the_mean(parallel, loads):
    """Of three layers with experts the first is on stage 0, with one that has none."""
    tokens = (EVEN, SKEWED, (10, 30, 10, 30))
    assert ExpertLoads(job(**parallel)).by_rank(tokens) == pytest.approx(loads)


def after_steps(loads, *tokens):
    """What is said after STEPS steps, of which the last ones get these tokens, and all others even ones."""
    *before, last = [loads.add(each) for each in [(EVEN,) * 3] * (STEPS - len(tokens)) + list(tokens)]
    assert not any(before)
    return last


def test_ranks_with_more_tokens_than_planned_over_many_steps_are_reported_once_in_a_while():
    clock = SimpleNamespace(now=0.0)
    loads = ExpertLoads(job(data=4, expert=2, tensor=2), lambda: clock.now)
    assert after_steps(loads, *[(EVEN, (12, 13, 10, 10), EVEN)] * STEPS) is None, "within what is planned"
    assert after_steps(loads, *[(EVEN, SKEWED, SKEWED)] * (STEPS // 3)) is None, "in some steps only"
    most = after_steps(loads, *[(EVEN, (18, 10, 8, 4), SKEWED)] * STEPS)
    assert (most.layer, most.ratio, most.expert_ratio, most.ranks) == (3, 30 / 20, 25 / 10, (0, 1, 4, 5))
    assert most.sentence.startswith("over 100 steps the experts of ranks 0, 1, 4, 5 got 1.50 times as many tokens of")
    assert most.to_json()["planned_ratio"] == IMBALANCE
    clock.now = AGAIN_SECONDS - 1
    assert after_steps(loads, *[(SKEWED,) * 3] * STEPS) is None
    clock.now = AGAIN_SECONDS
    assert after_steps(loads, *[(SKEWED,) * 3] * STEPS).layer == 1


def test_experts_that_are_all_on_every_rank_make_no_rank_unbalanced():
    assert after_steps(ExpertLoads(job(data=2)), *[((40, 0, 0, 0),) * 3] * STEPS) is None


def test_rank_whose_experts_have_more_tokens_is_not_slow_because_of_these():
    def named(own, loads=None):
        watch = Stragglers([0] * 4)
        return [straggler.rank for _ in range(WINDOW) for straggler in watch.add(own, loads)]

    loads = [0.5, 1.5, 0.5, 1.5]
    assert named((0.4, 0.7, 0.4, 0.7)) == [1, 3]
    assert named((0.4, 0.7, 0.4, 0.7), loads) == []
    assert named((0.4, 0.7, 0.4, 1.5), loads) == [3], "slower than its load explains"
