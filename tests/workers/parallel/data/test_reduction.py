"""Gradients are reduced bucket by bucket while backward still runs, in one order, and a broken step leaves nothing."""

from __future__ import annotations

import pytest
from engine_specs import spec
from one_layer import lone_rank

from manta.workers.engine import Engine


class Started:
    """A reduction under way."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        """Count."""
        self.waited += 1


@pytest.fixture
def rank():
    """An engine of one of two replicas whose weights fill several buckets, and what it starts: (bucket, handle)."""
    job = spec(model={"layers": 2, "hidden_size": 16}, parallel={"data": 2, "bucket_megabytes": 0.004})
    comm, started = lone_rank(job, 1), []
    engine = Engine(job, comm)
    places = [start for start, _ in engine.flat.buckets]

    def start_reduce_scatter(axis, tensor, out=None):
        assert (axis, len(out)) == ("data", len(tensor) // 2)
        started.append((places.index(tensor.storage_offset()), Started()))
        return out, started[-1][1]

    comm.start_reduce_scatter = start_reduce_scatter
    assert len(places) > 4
    return engine, started


def add(engine: Engine, slots) -> None:
    """One micro-batch's gradients, as often as each weight is used in it."""
    for slot in slots:
        for _ in range(engine.reduction.uses[slot.entry.parameter]):
            engine.reduction.added(slot.entry.parameter)


def test_gradient_bucket_starts_once_complete_and_after_those_behind_it(rank):
    engine, started = rank
    reduction, flat = engine.reduction, engine.flat
    head, tail = flat.head(), len(flat.buckets) - 1
    assert {reduction.uses[slot.entry.parameter] for slot in head} == {1, 2}, "the embedding is tied on this rank"
    reduction.begin(2, 8)
    add(engine, head)
    assert started == [], "another micro-batch is to come"
    for slot in reversed(head):
        before = {bucket for bucket, _ in started}
        add(engine, [slot])
        incomplete = [other for other in head if other.start < slot.start]
        needed = {
            bucket for bucket, (start, end) in enumerate(flat.buckets[:-1])
            if not any(other.start < end and start < other.end for other in incomplete)
        }  # fmt: skip
        assert {bucket for bucket, _ in started} == needed | before
    assert [bucket for bucket, _ in started] == list(range(tail - 1, -1, -1))
    reduction.finish()
    assert [bucket for bucket, _ in started] == [*range(tail - 1, -1, -1), tail]
    assert all(work.waited == 1 for _, work in started)


def test_complete_gradient_bucket_waits_for_its_turn(rank):
    """All replicas must start them in the same order, whatever comes first."""
    engine, started = rank
    engine.reduction.begin(1, 8)
    add(engine, engine.flat.head()[:1])
    assert started == []
    engine.reduction.finish()
    tail = len(engine.flat.buckets) - 1
    assert [bucket for bucket, _ in started] == [*range(tail - 1, -1, -1), tail]


def test_step_after_a_broken_off_one_begins_without_gradients(rank):
    engine, started = rank
    reduction, flat = engine.reduction, engine.flat
    reduction.begin(1, 8)
    add(engine, flat.head())
    broken = [work for _, work in started]
    started.clear()
    flat.gradients.fill_(7.0)
    reduction.begin(1, 8)
    add(engine, flat.head()[-1:])
    assert [bucket for bucket, _ in started][:1] == [len(flat.buckets) - 2]
    reduction.finish()
    assert not any(work.waited for work in broken), "nobody waits for what belongs to a generation that is over"
    assert len(started) == len(flat.buckets)
    for slot in flat.slots:
        assert not flat.gradients[slot.start : slot.end].any(), slot.entry.name
