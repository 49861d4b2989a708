"""Stages of unequal layers: found where they are faster, or where only they fit, and told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from manta.service.planner.bounds import Bounds
from manta.service.planner.candidates import Candidate
from manta.service.planner.explain import explain
from manta.service.planner.hardware import Cluster
from manta.service.planner.memory import fits, layers_with_room, memory_of, usable_bytes, worst_rank
from manta.service.planner.search import evaluate, fastest, fitted, refined, search
from manta.service.planner.software import MANTA
from manta.service.planner.step_time import StepModel
from manta.workers.config import JobSpec
from manta.workers.schedules.stages import layer_counts
from tests.service.support.planned import a100s, job

LARGE_VOCABULARY = {"vocabulary_size": 128256, "sequence_length": 2048, "family": "llama"}


def with_memory(cluster: Cluster, bytes_of_device: float) -> Cluster:
    """The same with devices of so much memory."""
    device = replace(cluster.machine.accelerator, memory_bytes=bytes_of_device)
    return replace(cluster, machine=replace(cluster.machine, accelerator=device))


def large_vocabulary(layers: int = 16, batch: int = 32, **layout) -> JobSpec:
    """Logits that cost as much as several layers."""
    return job(layers, 2048, 16, model=LARGE_VOCABULARY, train={"global_batch_size": batch}, **layout)


def seconds(spec: JobSpec, cluster: Cluster) -> float:
    """Of a step."""
    return StepModel(spec, cluster).time().seconds


def test_balanced_stages_give_the_last_one_fewer_layers_for_a_large_vocabulary():
    spec, cluster = large_vocabulary(), a100s(1, 4)
    candidate = Candidate(4, 1, 1, 1, "1f1b", 1, "none")
    bounds = Bounds(spec, cluster, MANTA)
    balanced = bounds.balanced(candidate)
    assert balanced is not None
    assert balanced.stage_layers[-1] < 4 < max(balanced.stage_layers[:-1]) and sum(balanced.stage_layers) == 16
    assert seconds(balanced.spec(spec), cluster) < 0.95 * seconds(candidate.spec(spec), cluster)
    ranks = [StepModel(each.spec(spec), cluster).pipeline().rank_work() for each in (candidate, balanced)]
    assert max(ranks[1]) < max(ranks[0])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved"])
def test_uneven_search_is_as_fast_as_the_best_stage_list(schedule):
    """Of one layout, with memory for all."""
    spec, cluster = large_vocabulary(6, batch=8), a100s(1, 3)
    chunks = 1 if schedule in ("1f1b", "zb-h1") else 2
    bounds = Bounds(spec, cluster, MANTA)
    even = Candidate(3 if chunks == 1 else 2, 1, 1, chunks, schedule, 1, "none")
    start = min(bounds.with_min_seconds(even))[1]
    chosen = refined(start, bounds.model(start).time().seconds, bounds, usable_bytes(cluster))
    stages = even.pipeline * chunks
    lists = (tuple(b - a for a, b in zip((0, *ends), (*ends, 6), strict=True)) for ends in _increasing(stages - 1, 6))
    best = min(seconds(even._replace(stage_layers=each).spec(spec), cluster) for each in lists)
    assert seconds(chosen.spec(spec), cluster) <= 1.01 * best


def _increasing(count: int, below: int):
    """Tuples of so many increasing numbers from 1 on."""
    if count == 0:
        yield ()
        return
    for rest in _increasing(count - 1, below):
        yield from ((*rest, each) for each in range((rest[-1] if rest else 0) + 1, below))


def test_uneven_stages_that_fit_are_found_if_even_ones_do_not(monkeypatch):
    """Under 1F1B the first stage holds four micro-batches, and the last one."""
    spec = job(16, 2048, 16, model={"sequence_length": 4096}, train={"global_batch_size": 32})
    candidate = Candidate(4, 1, 1, 1, "1f1b", 1, "none")
    even = worst_rank(candidate.spec(spec))
    cluster = with_memory(a100s(1, 4), 0.9 * even.total)
    bounds, usable = Bounds(spec, cluster, MANTA), usable_bytes(cluster)
    split = fitted(candidate, even.total, bounds, usable)
    assert split is not None
    assert split.stage_layers[0] < 4 <= split.stage_layers[-1]
    assert worst_rank(split.spec(spec)).total <= usable
    assert fitted(candidate, even.total, bounds, usable, max_seconds=0.1 * seconds(split.spec(spec), cluster)) is None
    assert fitted(candidate, even.total, bounds, 0.3 * usable) is None
    # Of what seems to find room each list is counted.
    with monkeypatch.context() as patch:
        patch.setattr(bounds, "room", lambda *each: [n + 1 for n in layers_with_room(each[0].spec(spec), usable)])
        assert worst_rank(fitted(candidate, even.total, bounds, usable).spec(spec)).total <= usable
    given = candidate.spec(spec)
    (rejected,) = evaluate(given, cluster).rejected
    assert "try: parallel.stage_layers: [" in rejected.reason
    change = fits(given, cluster).change
    counts = tuple(int(each) for each in change.partition("[")[2].rstrip("]").split(","))
    assert evaluate(candidate._replace(stage_layers=counts).spec(spec), cluster).plans
    (plan,) = fastest([candidate], bounds, 1).plans()
    assert plan.spec.layout.stage_layers and plan.memory.total == worst_rank(plan.spec).total <= usable


def test_uneven_layer_room_matches_the_full_memory_count():
    """By whole counts of memory, of each rank, with a number of layers that is far from what is looked at."""
    spec = job(24, 1024, 16, model={"sequence_length": 2048}, pipeline=6, train={"micro_batch_size": 2})
    usable = 1.2 * worst_rank(spec).total
    for rank, room in enumerate(layers_with_room(spec, usable)):
        for layers, there in ((room, True), (room + 1, False)):
            counts = [layers if stage == rank else 4 for stage in range(6)]
            model = spec.model.model_copy(update={"layers": sum(counts)})
            layout = spec.layout.model_copy(update={"stage_layers": tuple(counts)})
            needs = memory_of(spec.model_copy(update={"model": model, "parallel": layout}), rank).total
            assert (needs <= usable * (1.001 if there else 1.0)) is there, (rank, layers)


def test_plan_with_uneven_stages_reports_the_effect_of_moving_layers():
    spec, cluster = large_vocabulary(), a100s(1, 4)
    plans = search(spec, cluster, limit=8).plans
    chosen = next(plan for plan in plans if plan.spec.layout.stage_layers)
    again = evaluate(chosen.spec, cluster).plans[0]
    assert again.time == chosen.time and again.memory == chosen.memory
    even = chosen.spec.model_copy(update={"parallel": chosen.spec.layout.model_copy(update={"stage_layers": None})})
    changes = {each.change: each for each in explain(chosen, cluster).changes}
    assert changes["stage_layers: null"].seconds == seconds(even, cluster) > chosen.time.seconds
    moved = [each for change, each in changes.items() if change.startswith("stage_layers: [")]
    assert moved and all(each.seconds > chosen.time.seconds * 0.999 for each in moved), "nothing nearby is faster"


class Distance:
    """Bounds of steps that take as many seconds as layers are not where they are in the `best` list, and one more."""

    def __init__(self, best: tuple[int, ...]):
        self._best = best
        self.cluster, self.job = SimpleNamespace(machine=None), job(sum(best))

    def counts(self, candidate: Candidate) -> tuple[int, ...]:
        return candidate.stage_layers or layer_counts(sum(self._best), candidate.spec(self.job).layout)

    def min_seconds(self, candidate: Candidate) -> float:
        weights = range(1, len(self._best) + 1)
        pairs = zip(weights, self.counts(candidate), self._best, strict=True)
        return 1.0 + sum(weight * abs(a - b) for weight, a, b in pairs)

    def time(self, candidate: Candidate) -> SimpleNamespace:
        return SimpleNamespace(seconds=self.min_seconds(candidate))


@pytest.mark.parametrize(
    "best", [(7, 3, 4, 2), (4, 4, 4, 4), (4, 4, 2, 6), (1, 1, 8, 6), (2,) * 4 + (4, 2, 2, 2, 1, 3)]
)
def test_uneven_layers_move_to_the_fastest_list_that_has_room(best, monkeypatch):
    memory, asked = SimpleNamespace(total=1.0), []
    monkeypatch.setattr(
        "manta.service.planner.search.worst_rank", lambda spec, _: asked.append(spec.layout.stage_layers) or memory
    )
    bounds = Distance(best)
    even = Candidate(len(best), 1, 1, 1, "1f1b", 1, "none")
    moved = refined(even, bounds.min_seconds(even), bounds, 1.0)
    apart = sum(abs(a - b) for a, b in zip(bounds.counts(even), best, strict=True)) // 2
    assert (bounds.counts(moved) == best) == (apart <= 4), (bounds.counts(moved), best)
    assert len(asked) == min(apart, 4), "each move was the best of all, and the first that fits"
    back = refined(even._replace(stage_layers=best), 1.0, bounds, 1.0)
    assert back.stage_layers == best, "nothing is better than the best"
    if best == bounds.counts(even):
        other = even._replace(stage_layers=(best[0] - 1, best[1] + 1, *best[2:]))
        assert refined(other, bounds.min_seconds(other), bounds, 1.0) == even, "without a list"
    assert refined(even, bounds.min_seconds(even), bounds, 0.5) == even, "where nothing else has room"


def test_uneven_lists_that_seem_to_fit_are_tried_a_few_times(monkeypatch):
    """The rank that has not gets a layer less than it had, or than there seemed to be room for."""
    asked, lists = [], iter([(3, 1), (2, 2), (1, 3)])
    bounds = Distance((2, 2))
    bounds.min_seconds_uneven, bounds.room = (lambda _: 0.0), (lambda *_: (5, 6))
    bounds.shared_out = lambda _, room: asked.append(tuple(room)) or next(lists)
    bounds.layers_of_rank = lambda candidate, rank: candidate.stage_layers[rank]
    monkeypatch.setattr("manta.service.planner.search.worst_rank", lambda *_: SimpleNamespace(total=2.0, rank=0))
    assert fitted(Candidate(2, 1, 1, 1, "1f1b", 1, "none"), 1.2, bounds, 1.0) is None
    assert asked == [(5, 6), (2, 6), (1, 6)]
    bounds.room, bounds.shared_out = (lambda *_: (1, 2)), (lambda _, room: asked.append(tuple(room)))
    assert fitted(Candidate(2, 1, 1, 1, "1f1b", 1, "none"), 1.0, bounds, 1.0) is None
    assert asked[3:] == [(2, 3)], "one layer more than there seems to be room for"
