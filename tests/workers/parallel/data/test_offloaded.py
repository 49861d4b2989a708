"""The optimizer's state in host memory: the bits of one that lies beside the parameters, whatever else is chosen and
whatever happens to the job."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from checkpoint_programs import load_and_save, load_from_memory, train_and_save, train_and_snapshot
from engine_specs import axes, document, spec
from number_programs import train as train_through_bad_numbers
from offloaded_programs import FEW, in_slices
from one_layer import lone_rank
from plain_gpt import random_weights
from rank_programs import attempts, train_job
from repair_programs import Cut, train_through

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.engine import Engine
from manta.workers.parallel.data import adamw, offloaded
from manta.workers.parallel.data.agreement import Loss
from manta.workers.parallel.data.replica_check import SOUND, UNSOUND, ReplicaCheck
from manta.workers.parallel.data.state import tensors_of
from manta.workers.protocol.messages import Resume
from manta.workers.snapshot.files import snapshot_files
from manta.workers.spec.reading import parse_job_spec

BUCKETS = {"bucket_megabytes": 0.004}
SPLIT = {"tensor": 2, "pipeline": 2, "schedule": "zb-v", "virtual_stages": 2, **BUCKETS}
FREEZES = {"frozen": ["embedding", "layers.1.mlp"]}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped": ({}, {"optimizer": {"clip_norm": 0.05}}),
    "replicas": ({"data": 2, **BUCKETS}, {"precision": "bf16"}),
    "zero 0": ({"data": 2, "zero": 0}, {"precision": "fp16", **FREEZES}),
    "elastic": ({"data": 2, **BUCKETS}, {"deterministic": "elastic"}),
    "beside the forward": ({"data": 2, "gather": "beside_forward", **BUCKETS}, {"precision": "bf16"}),
    "stages": ({"pipeline": 2}, {"optimizer": {"clip_norm": 0.0, "weight_decay_groups": ["bias"]}}),
    "tensor": ({"tensor": 2, "data": 2, "zero": 0}, {"optimizer": {"weight_decay": 0.0}}),
    "everything": ({**SPLIT, "data": 2}, {"precision": "bf16", **FREEZES}),
    "beside the forward, fp32": ({**SPLIT, "data": 2, "gather": "beside_forward"}, FREEZES),
}
QUICK = ("clipped", "replicas", "zero 0", "elastic")


def job(corpus: str, offload: bool, parallel: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """A small job that keeps its optimizer's state there, or not."""
    optimizer = {"learning_rate": 3e-3, **train.pop("optimizer", {}), "offload": offload}
    numbers = {"steps": 3, "global_batch_size": 8, "micro_batch_size": 2}
    return document(
        model={"hidden_size": 16, "vocabulary_size": 257},
        data={"paths": [corpus]},
        train=numbers | train | {"optimizer": optimizer},
        parallel=parallel or {},
    )


def on(ranks: Any, document: dict[str, Any], program: Any, *given: Any, **more: Any) -> list[Any]:
    """What the program returns on each rank of the job."""
    return ranks.run(parse_job_spec(document).layout, in_slices, program, document, *given, **more)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.soak) for n in JOBS])
def test_offloaded_optimizer_gives_the_bits_of_one_on_the_device(ranks, corpus, name):
    parallel, train = JOBS[name]
    runs = [on(ranks, job(corpus, offload, parallel, **train), train_job) for offload in (False, True)]
    for there, here in zip(*runs, strict=True):
        assert len(there.state["exp_avg"]) > 4 * FEW
        assert there.statistics == here.statistics
        assert all(torch.equal(there.state[kind], here.state[kind]) for kind in there.state)
        assert torch.equal(there.parameters, here.parameters)


@pytest.mark.parametrize("layout", [(1, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.soak)], ids=str)
def test_offloaded_fp16_overflow_leaves_the_state_and_is_retried(ranks, corpus, layout):
    runs = []
    for offload in (False, True):
        one = job(corpus, offload, axes(layout), precision="fp16")
        weights = random_weights(parse_job_spec(one), spread=0.03)
        windows = torch.arange(9) + torch.arange(8)[:, None]
        runs.append(on(ranks, one, attempts, weights, windows, 2.0**28))
    for (seen, expected, state), (also_seen, statistics, also_state) in zip(*runs, strict=True):
        assert len(seen) > 2
        for attempt, other in zip(seen, also_seen, strict=True):
            assert attempt[:2] == other[:2] and torch.equal(attempt[2], other[2])
        assert (statistics.loss, statistics.grad_norm) == (expected.loss, expected.grad_norm)
        assert torch.equal(also_state, state) and not torch.equal(state, seen[0][2])


def test_offloaded_job_rolls_back_to_the_same_state(ranks, corpus):
    """And passes over the same samples with the same numbers."""
    recovery = {"nonfinite": "roll_back", "roll_back_steps": 2}
    runs = []
    for offload in (False, True):
        bad = job(corpus, offload, {"data": 2, **BUCKETS}, steps=6) | {"recovery": recovery}
        runs.append(on(ranks, bad, train_through_bad_numbers, {8 * 4 + 1: float("nan")}))
    for there, here in zip(*runs, strict=True):
        assert here.steps == there.steps and 2 in here.steps[4:]
        assert here.statistics == there.statistics
        assert (here.parameters == there.parameters).all()


@pytest.mark.parametrize("way", ["checkpoint", pytest.param("memory", marks=pytest.mark.soak)])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.soak)])
def test_offloaded_optimizer_state_is_interchangeable_in_snapshots_and_checkpoints(
    ranks, corpus, tmp_path, way, precision
):
    """From what one such job left, jobs of another layout that have the state here or there go on alike."""
    write, read = (train_and_save, load_and_save) if way == "checkpoint" else (train_and_snapshot, load_from_memory)
    runs = []
    for offload in (True, False):
        folder = tmp_path / str(offload)
        on(ranks, job(corpus, True, {"data": 2, **BUCKETS}, precision=precision), write, str(folder), 2)
        if way == "checkpoint":
            left: Any = str(complete_checkpoints(folder)[-1][0])
        else:
            left = tuple(str(each.path) for each in snapshot_files(folder))
        other = job(corpus, offload, {"pipeline": 2}, precision=precision)
        runs.append(on(ranks, other, read, left, 2, str(folder), 1))
    for here, there in zip(*runs, strict=True):
        assert here.statistics == there.statistics
        for kind in ("loaded", "computing"):
            for (name, _, values), (_, _, others) in zip(getattr(here, kind), getattr(there, kind), strict=True):
                assert torch.equal(values, others), name


@pytest.mark.parametrize(
    ("backend", "parallel"),
    [
        ("links", {"data": 2, **BUCKETS}),
        pytest.param("process_groups", {"data": 2, "gather": "beside_forward", **BUCKETS}, marks=pytest.mark.soak),
        pytest.param("links", {**SPLIT, "data": 2, "zero": 0}, marks=pytest.mark.soak),
    ],
)
def test_offloaded_job_has_the_same_bits_after_losing_a_peer(ranks, corpus, tmp_path, backend, parallel):
    """A cut at a message of the last collectives of a step, in which parameters are gathered, and one before."""
    (tmp_path / "clean").mkdir(), (tmp_path / "broken").mkdir()
    one = job(corpus, True, parallel, precision="bf16")
    clean = on(ranks, one, train_through, str(tmp_path / "clean"), ranks.port, [], backend=backend)
    cuts = [Cut(0, 1, clean[1].messages * 2 // 3), Cut(1, 0, clean[0].messages // 4)]
    broken = on(ranks, one, train_through, str(tmp_path / "broken"), ranks.port, cuts, backend=backend)
    plain = job(corpus, False, parallel, precision="bf16")
    (tmp_path / "plain").mkdir()
    expected = on(ranks, plain, train_through, str(tmp_path / "plain"), ranks.port, [], backend=backend)
    for through, without in zip(broken, expected, strict=True):
        assert through.generations == 3
        assert through.state == without.state
    assert broken[0].rows == expected[0].rows


def test_offloaded_job_has_the_same_bits_if_new_processes_resume_from_snapshots(ranks, corpus, tmp_path):
    """As after a kill: with the bits of a job that was not killed."""
    one = job(corpus, True, {"data": 2, **BUCKETS}, precision="bf16")
    expected = on(ranks, one, train_job)
    on(ranks, one, train_job, None, str(tmp_path), Resume(), 2)
    again = on(ranks, one, train_job, None, str(tmp_path), Resume("snapshot", 2))
    for rank, without in zip(again, expected, strict=True):
        assert rank.statistics == without.statistics[2:]
        assert all(torch.equal(rank.state[kind], without.state[kind]) for kind in without.state)


def one_step(offload: bool, precision: str, parallel: dict[str, Any], one_pass: bool) -> Engine:
    """A rank after an update."""
    train = {"precision": precision, "optimizer": {"offload": offload}}
    engine = Engine(one := spec(train=train, parallel=parallel), lone_rank(one))
    engine.optimizer.one_pass = one_pass
    engine.initialise(1)
    engine.optimizer.publish_parameters()
    update(engine)
    return engine


def update(engine: Engine) -> None:
    """From gradients that differ everywhere."""
    engine.reduction.begin(1, 8)
    drawn = torch.randn(engine.flat.size, generator=torch.Generator().manual_seed(2))
    engine.flat.gradients.copy_(drawn)
    for slot in engine.flat.slots:
        slot.entry.parameter.holds_gradient = True
    loss = Loss(torch.tensor([64.0], dtype=torch.float64), torch.tensor(64.0, dtype=torch.float64), 1.0)
    engine.optimizer.step(1e-3, loss, 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parallel", [{}, {"data": 2}, {"data": 2, "zero": 0}], ids=str)
def test_one_pass_kernel_has_the_same_bits_slice_by_slice(monkeypatch, precision, parallel):
    monkeypatch.setattr(offloaded, "SLICE_ELEMENTS", FEW)
    monkeypatch.setattr(adamw, "compiled_pass", adamw.one_pass)
    there, here = (one_step(offload, precision, parallel, one_pass=True) for offload in (False, True))
    for (start, end), weights in zip(here.optimizer.held, here.optimizer.parameters, strict=True):
        assert torch.equal(here.flat.parameters[start:end], weights.to(here.flat.parameters.dtype))
    states = [torch.cat(tensors_of(engine.optimizer.parts())) for engine in (there, here)]
    assert torch.equal(*states) and states[0].abs().sum() > 0


def test_offloaded_optimizer_uses_at_most_three_device_slices_during_the_update(monkeypatch):
    made: list[weakref.ref[torch.Tensor]] = []

    def noted(kinds: int, elements: int, like: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(place := torch.empty(kinds, elements)))
        return place

    monkeypatch.setattr(offloaded, "slice_buffer", noted)
    monkeypatch.setattr(offloaded, "SLICE_ELEMENTS", FEW)
    one_step(True, "bf16", {}, one_pass=False)
    assert len(made) == 3 and all(place() is None for place in made)
    monkeypatch.setattr(offloaded, "SLICE_ELEMENTS", 10**9)
    one_step(True, "bf16", {}, one_pass=False)
    assert len(made) == 4, "all of it is one slice"


def test_pending_parameters_arrive_before_the_next_update_begins(monkeypatch):
    """Even where no forward needed them."""
    engine, order = one_step(True, "bf16", {"data": 2, "gather": "beside_forward"}, one_pass=False), []
    arriving, queue = engine.optimizer.arriving, offloaded._Queue
    assert arriving is not None
    monkeypatch.setattr(arriving, "wait", lambda: order.append("come"))
    monkeypatch.setattr(offloaded, "_Queue", lambda *given: order.append("update") or queue(*given))
    update(engine)
    assert order[:2] == ["come", "update"]


def test_interrupted_offloaded_update_waits_for_its_copies_and_stays_unsettled(monkeypatch):
    engine, ended = one_step(True, "bf16", {}, one_pass=False), []
    engine.settle()
    monkeypatch.setattr(offloaded._Queue, "end", lambda _: ended.append(True))
    monkeypatch.setattr(adamw, "update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        update(engine)
    assert ended == [True] and not engine.settled


def test_host_memory_stays_pinned_while_its_optimizer_exists(monkeypatch):
    events: list[str] = []

    class Noted:
        def __init__(self, memory: torch.Tensor, on_gpu: bool):
            events.append(f"{memory.dtype} {on_gpu}")

        def release(self) -> None:
            events.append("released")

    monkeypatch.setattr(offloaded, "PinnedMemory", Noted)
    engine = one_step(True, "bf16", {}, one_pass=False)
    assert events == ["torch.float32 False"]
    del engine
    gc.collect()
    assert events[1:] == ["released"]


def test_a_rank_knows_by_its_state_that_its_parameters_have_changed(corpus):
    """In fp32 too, where without it they are the state themselves."""
    engine = one_step(True, "fp32", {"data": 2}, one_pass=False)
    check = ReplicaCheck(engine.optimizer, engine.comm)
    assert check._own_verdict(None) == SOUND
    engine.flat.parameters.view(torch.uint8)[4 * engine.optimizer.held[0][0]] ^= 1
    assert check._own_verdict(None) == UNSOUND
