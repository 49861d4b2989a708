"""Parameters that come from other replicas beside the next forward: a layer waits for its own, and no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_specs import axes, document, spec
from one_layer import lone_rank
from rank_programs import train_job

from manta.workers.config import ParallelConfig
from manta.workers.engine import Engine
from manta.workers.model.stage import Chunk
from manta.workers.parallel.data.zero import ArrivingParameters
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.tensor.positions import Positions

BUCKETS = {"bucket_megabytes": 0.01}
"""So small that a layer lies in several."""


class Work:
    """A gather under way."""

    def __init__(self, waited: list[int], number: int):
        self._waited, self._number = waited, number

    def wait(self) -> None:
        """Note that it was waited for."""
        self._waited.append(self._number)


@pytest.fixture
def rank(monkeypatch) -> tuple[Engine, ArrivingParameters, list[int], list[int]]:
    """One of two replicas; the buckets whose gathers were begun, and those that were waited for."""
    job = spec(
        model={"layers": 3},
        train={"precision": "bf16"},
        parallel={"data": 2, "gather": "beside_forward", **BUCKETS},
    )
    comm, begun, waited = lone_rank(job, 0), list[int](), list[int]()
    engine = Engine(job, comm)
    numbers = {start: number for number, (start, _) in enumerate(engine.flat.buckets)}

    def start(axis: str, part: torch.Tensor, out: torch.Tensor) -> Any:
        begun.append(numbers[out.storage_offset()])
        return out, Work(waited, begun[-1])

    monkeypatch.setattr(comm, "start_all_gather", start)
    assert engine.optimizer.arriving is not None
    return engine, engine.optimizer.arriving, begun, waited


def test_forward_waits_for_the_tail_first_and_for_each_layers_own_buckets(rank):
    engine, arriving, begun, waited = rank
    engine.optimizer.publish_parameters()
    tail = len(engine.flat.buckets) - 1
    assert begun == [tail, *range(tail)] and tail > 6 and waited == []
    (chunk,) = engine.model.chunks
    first, last = chunk.layers["0"], chunk.layers["2"]
    arriving.wait_for(first)
    of_first = set(waited)
    assert tail in of_first, "its norms"
    for slot in engine.flat.slots:
        here = {n for n, (start, end) in enumerate(engine.flat.buckets) if slot.start < end and start < slot.end}
        if any(slot.entry.parameter is each for each in first.parameters()):
            assert here <= of_first, slot.entry.name
    arriving.wait_for(last)
    assert len(waited) == len(set(waited)), "each is waited for once"
    assert set(waited) != set(begun)
    arriving.wait()
    assert set(waited) == set(begun)


def test_forward_waits_for_all_parameters_part_by_part(rank):
    engine, _, begun, waited = rank
    seen: list[tuple[str, int]] = []
    (chunk,) = engine.model.chunks
    for name, part in (("embedding", chunk.embedding), ("0", chunk.layers["0"]), ("output", chunk.output)):
        part.register_forward_pre_hook(lambda *_, name=name: seen.append((name, len(waited))))
    engine.optimizer.publish_parameters()
    length = engine.spec.model.sequence_length
    chunk(torch.zeros(length, 1, dtype=torch.int64), ForwardPass(Positions.of(length)))
    counts = dict(seen)
    assert 0 < counts["embedding"] <= counts["0"] < counts["output"] == len(begun)


def test_arriving_gathers_of_lost_groups_are_not_waited_for(rank):
    engine, _, _, waited = rank
    engine.optimizer.publish_parameters()
    engine.optimizer.forget_arriving()
    engine.optimizer.publish_parameters()
    assert waited == []
    engine.optimizer.publish_parameters()
    assert len(waited) == len(engine.flat.buckets), "the next gathers of the same groups come after these"


@pytest.mark.parametrize(
    ("precision", "parallel"),
    [
        ("fp32", {"data": 2}),
        ("bf16", {}),
        ("bf16", {"data": 2, "zero": 0}),
    ],
    ids=["the state itself", "one replica", "nothing is gathered"],
)
def test_parameter_gather_beside_forward_is_off_where_it_gains_nothing(precision, parallel):
    job = spec(train={"precision": precision}, parallel={**parallel, "gather": "beside_forward"})
    engine = Engine(job, lone_rank(job, 0))
    assert engine.optimizer.arriving is None
    assert all(isinstance(chunk, Chunk) for chunk in engine.model.chunks)


LAYOUTS = {
    "replicas": ((1, 1, 2), {}),
    "everything": ((2, 2, 2), {"schedule": "interleaved", "virtual_stages": 2}),
    "zb-v": ((1, 2, 2), {"schedule": "zb-v", "virtual_stages": 2, "recompute": "full"}),
    "tensor": ((2, 1, 3), {"recompute": "selective"}),
}
QUICK = {("replicas", "links"), ("replicas", "process_groups")}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=() if (name, backend) in QUICK else pytest.mark.soak)
        for name in LAYOUTS
        for backend in ("links", "process_groups")
    ],
)
def test_gathering_beside_the_forward_has_the_bits_of_a_waiting_update(ranks, tmp_path, name, backend):
    layout, parallel = LAYOUTS[name]
    corpus = tmp_path / "numbers.txt"
    corpus.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(300)))
    train = {"steps": 3, "global_batch_size": 12, "micro_batch_size": 1, "precision": "bf16", "validate_every": 2}
    runs = []
    for gather in ("after_update", "beside_forward"):
        sections = {"model": {"layers": 4}, "data": {"paths": [str(corpus)], "validation_fraction": 0.1}}
        job = document(**sections, train=train, parallel={**axes(layout), **parallel, **BUCKETS, "gather": gather})
        runs.append(ranks.run(ParallelConfig(**axes(layout), **parallel), train_job, job, backend=backend))
    for waits, later in zip(*runs, strict=True):
        assert waits.statistics == later.statistics
        assert all(torch.equal(waits.state[kind], later.state[kind]) for kind in waits.state)
    assert [row.get("validation_loss") for row in runs[0][0].rows] == [
        row.get("validation_loss") for row in runs[1][0].rows
    ]
