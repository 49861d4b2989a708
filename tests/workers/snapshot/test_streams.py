"""On a GPU, nothing of what is copied beside the training is used without a wait; all copies share one stream, into
memory that the driver has pinned. Streams and events are pretended (`tests/workers/support/stream_races.py`)."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from job_cover import FACTORS, SCHEDULES, job_of
from recorded_jobs import recorded_rank
from stepped_snapshots import parts_of
from stream_races import COMPUTE, OrderedWork, PretendedCuda, RaceRecorder, pretended_loader, pretended_streams

from manta.workers.checkpoint import checkpointer
from manta.workers.config import JobSpec
from manta.workers.parallel import recompute
from manta.workers.parallel.context import ring
from manta.workers.parallel.data import offloaded
from manta.workers.parallel.data.units import ElasticUnitReduction, GatheredWeights, UnitReduction
from manta.workers.parallel.data.zero import ArrivingParameters
from manta.workers.parallel.tensor import products
from manta.workers.snapshot import state_copy
from manta.workers.snapshot.snapshots import Snapshots
from manta.workers.system import gpu
from manta.workers.system.gpu import copy_streams

HOST = "the host"
IDENTITY = b"0123456789abcdef"
PLAIN = {name: values[0] for name, values in FACTORS.items()}


def opened(folder: Path) -> Snapshots:
    """Of a state of two tensors."""
    return Snapshots(folder, 0, parts_of([torch.zeros(100), torch.zeros(7)]), IDENTITY)


def update(snapshots: Snapshots) -> None:
    """What an optimizer does, on the compute stream."""
    for tensor in snapshots.state:
        tensor.add_(1.0)


def commit_reads(snapshots: Snapshots, cuda: PretendedCuda) -> None:
    """The marker says that all of a slot is there: as if its thread read it then."""
    commit = snapshots._file.commit

    def committed(slot: int, step: int) -> None:
        cuda.order.runs("thread snapshot", [(view, False) for view in snapshots._slots[slot]], "thread snapshot")
        commit(slot, step)

    snapshots._file.commit = committed


def test_snapshots_and_training_steps_wait_for_each_other(tmp_path):
    with pretended_streams() as cuda:
        snapshots = opened(tmp_path)
        commit_reads(snapshots, cuda)
        for step in range(1, 6):
            update(snapshots)
            snapshots.start(step)
            snapshots.state[0].sum()  # forward and backward read meanwhile
            snapshots.finish()
        snapshots.load(5)
        update(snapshots)
        snapshots.close()
    assert cuda.order.races == []


def test_all_copies_of_a_process_are_made_on_one_stream(tmp_path):
    with pretended_streams() as cuda:
        both = [opened(tmp_path / name) for name in "ab"]
        for step in range(1, 40):  # more than torch has streams
            for snapshots in both:
                snapshots.save(step)
        for snapshots in both:
            snapshots.close()
    assert cuda.made == 1


def test_slots_are_pinned_until_the_snapshots_are_closed(tmp_path):
    with pretended_streams() as cuda:
        snapshots = opened(tmp_path)
        assert len(cuda.registered) == 1
        assert snapshots._slots[0][0].data_ptr() >= cuda.registered[0]
        snapshots.close()
        assert cuda.registered == []


def test_stall_on_a_gpu_is_the_time_that_the_device_waits_and_not_the_host(tmp_path, monkeypatch):
    """By the events: the copy was done two seconds after the compute stream had come so far."""
    monkeypatch.setattr("manta.workers.snapshot.snapshots.time", SimpleNamespace(perf_counter=lambda: 50.0))
    with pretended_streams() as cuda:
        snapshots = opened(tmp_path)
        snapshots.save(1)
        assert snapshots.stall_seconds == 2.0
        cuda.Event.query = lambda _: False  # the device still computes
        snapshots.save(2)
        assert snapshots.stall_seconds == 0.0
        snapshots.close()


def test_memory_that_cannot_be_pinned_is_reported_and_used_unpinned(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "_take_back_error", lambda: None)  # by a kernel of a GPU that is not there
    with pretended_streams() as cuda:
        cuda.cudaHostRegister = lambda *_: 2
        snapshots = opened(tmp_path)
        update(snapshots)
        snapshots.save(1)
        assert snapshots.copied_parts(1)["0"][0][0] == 1.0
        snapshots.close()
    assert "cannot be pinned (CUDA error 2)" in capsys.readouterr().out


def test_snapshot_copy_that_does_not_wait_for_the_state_is_found_as_a_race(tmp_path, monkeypatch):
    with pretended_streams() as cuda:
        monkeypatch.setattr(cuda.Stream, "wait_event", lambda *_: None)
        snapshots = opened(tmp_path)
        update(snapshots)
        snapshots.save(1)
        snapshots.close()
    assert any(race.startswith(f"{COMPUTE} writes") and "stream 1 reads" in race for race in cuda.order.races)


def test_update_that_does_not_wait_for_the_snapshot_copy_is_found_as_a_race(tmp_path):
    with pretended_streams() as cuda:
        snapshots = opened(tmp_path)
        snapshots.start(1)
        snapshots._copier._copying.exception()  # it is made by now, and nobody has waited
        update(snapshots)
        snapshots.close()
    assert any(race.startswith("stream 1 reads") and f"{COMPUTE} writes" in race for race in cuda.order.races)


def test_commit_marker_that_does_not_wait_for_the_snapshot_copy_is_found_as_a_race(tmp_path, monkeypatch):
    with pretended_streams() as cuda:
        monkeypatch.setattr(cuda.Event, "synchronize", lambda _: None)
        snapshots = opened(tmp_path)
        commit_reads(snapshots, cuda)
        snapshots.save(1)
        snapshots.close()
    assert any(race.startswith("stream 1 writes") and "thread snapshot reads" in race for race in cuda.order.races)


def raced(job: JobSpec, rank: int, folder: Path, steps: int = 2, stream: str = COMPUTE) -> PretendedCuda:
    """What a rank of a job did in some steps; `stream`: on which batches are copied to the device."""
    with pretended_streams() as cuda, pretended_loader(cuda, stream):
        recorder = RaceRecorder(rank, job.layout.world_size)
        recorder.order = cuda.order
        recorded_rank(job, rank, steps, folder, recorder=recorder)
    return cuda


IN_TURN = {"gpipe": "gpt", "1f1b": "llama", "interleaved": "gpt", "zb-h1": "gpt", "zb-v": "qwen"}
"""Each schedule with one of the families."""


@pytest.mark.parametrize(
    ("family", "schedule"),
    [
        pytest.param(family, schedule, marks=() if IN_TURN[schedule] == family else pytest.mark.soak)
        for family in FACTORS["family"]
        for schedule in SCHEDULES
    ],
)
def test_whole_steps_have_no_race_between_streams(corpus, tmp_path, family, schedule):
    """Snapshots, checkpoints out of their slots, batches that are read ahead, each communicator and the compute stream
    of every kind of rank."""
    layout = {"layout": (2, 2, 2), "schedule": schedule, "sequence_parallel": True, "family": family}
    job = job_of(PLAIN | layout, corpus, train={"steps": 2})
    for rank in (0, 3):
        cuda = raced(job, rank, tmp_path / str(rank))
        assert cuda.order.races == []
        assert cuda.made == 1


@pytest.mark.parametrize(
    ("method", "forgets"), [("ring", False), ("ring", True), ("all_gather", False), ("all_to_all", False)]
)
def test_keys_and_values_of_other_ranks_are_waited_for(corpus, tmp_path, monkeypatch, method, forgets):
    row = PLAIN | {"layout": (1, 2, 2), "sequence_parallel": False, "context_method": method, "recompute": "full"}
    if forgets:
        monkeypatch.setattr(ring, "_arrived", lambda tensor, work: tensor)
    cuda = raced(job_of(row, corpus, train={"steps": 2}), 1, tmp_path)
    assert any("context" in race and COMPUTE in race for race in cuda.order.races) == forgets
    assert forgets or cuda.order.races == []


def added(
    _: products.TorchProducts, total_oi: torch.Tensor, grads_no: torch.Tensor, inputs_ni: torch.Tensor, keep: bool
) -> None:
    """A weight's gradient, as a CPU can: it has no products whose results are wider."""
    product_oi = grads_no.t() @ inputs_ni
    total_oi.add_(product_oi) if keep else total_oi.copy_(product_oi)


@pytest.mark.parametrize("forgets", [False, True])
def test_parameters_that_come_beside_the_next_forward_are_waited_for(corpus, tmp_path, monkeypatch, forgets):
    beside = {"gather": "beside_forward", "bucket_megabytes": 0.01}
    job = job_of(
        PLAIN | {"layout": (1, 2, 2), "precision": "bf16", "sequence_parallel": False},
        corpus,
        train={"steps": 2},
        parallel=beside,
    )
    monkeypatch.setattr(products.TorchProducts, "add_weight_gradient", added)
    if forgets:
        monkeypatch.setattr(ArrivingParameters, "wait_for", lambda *_: None)
    cuda = raced(job, 0, tmp_path)
    assert any("data" in race and COMPUTE in race for race in cuda.order.races) == forgets


@pytest.mark.parametrize("deterministic", ["layout", "elastic"])
@pytest.mark.parametrize(("zero", "forgets"), [(3, None), (3, "weights"), (2, "gradients")])
def test_units_that_come_and_leave_are_waited_for(corpus, tmp_path, monkeypatch, zero, forgets, deterministic):
    kind = {"schedule": "1f1b", "layout": (1, 1, 4), "zero": zero, "recompute": "full", "deterministic": deterministic}
    job = job_of(PLAIN | kind | {"sequence_parallel": False}, corpus, train={"steps": 2})
    monkeypatch.setattr(products.TorchProducts, "add_weight_gradient", added)
    if forgets == "weights":
        monkeypatch.setattr(GatheredWeights, "wait", GatheredWeights.start)
    if forgets == "gradients":
        monkeypatch.setattr(UnitReduction, "_take_leave", lambda self, buffer: self._leaving.__setitem__(buffer, None))
        monkeypatch.setattr(ElasticUnitReduction, "finish", lambda self: self.reduced)  # nothing was added up
    cuda = raced(job, 0, tmp_path)
    assert any("data" in race and COMPUTE in race for race in cuda.order.races) == (forgets is not None)


def offloading(corpus: str, layout: tuple[int, int, int], **parallel: object) -> JobSpec:
    """A job whose first layers' activations wait in host memory."""
    return job_of(
        PLAIN | {"layout": layout, "sequence_parallel": layout[0] > 1, "schedule": parallel.pop("schedule", "1f1b")},
        corpus,
        train={"steps": 2},
        parallel={"offload_layers": 3, **parallel},
    )


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ((1, 2, 2), {}),
        ((1, 1, 4), {"recompute": "full", "offload_layers": 9}),
        pytest.param((2, 2, 2), {"schedule": "zb-v"}, marks=pytest.mark.soak),
        pytest.param((1, 2, 2), {"schedule": "interleaved", "recompute": "selective"}, marks=pytest.mark.soak),
    ],
)
def test_activations_that_wait_in_host_memory_are_waited_for(corpus, tmp_path, monkeypatch, layout, parallel):
    monkeypatch.setattr(recompute, "OFFLOADED_BYTES", 0)
    cuda = raced(offloading(corpus, layout, **parallel), 0, tmp_path)
    assert cuda.order.races == []
    assert cuda.made == 3


@pytest.mark.parametrize(
    ("function", "event", "race"),
    [
        ("_copy", "queued", "stream {out} reads"),
        ("_copy", "queued", "stream {back} writes"),
        ("release", "self._copied", "compute writes"),
        ("unpack", "self._fetched", "compute reads"),
    ],
)
def test_each_missing_wait_for_offloaded_activations_is_found(corpus, tmp_path, monkeypatch, function, event, race):
    """Each wait by itself."""
    monkeypatch.setattr(recompute, "OFFLOADED_BYTES", 0)
    with pretended_streams() as cuda:
        waits = cuda.Stream.wait_event

        def forgets(stream: Any, awaited: Any) -> None:
            frame = sys._getframe(1)
            if frame.f_code.co_name != function or awaited is not eval(event, {}, frame.f_locals):
                waits(stream, awaited)

        monkeypatch.setattr(cuda.Stream, "wait_event", forgets)
        recorder = RaceRecorder(0, 4)
        recorder.order = cuda.order
        recorded_rank(offloading(corpus, (1, 2, 2)), 0, 1, recorder=recorder)
        out, back = copy_streams(torch.device("cpu"))
    wanted = race.format(out=out.name.split()[-1], back=back.name.split()[-1])
    assert any(wanted in message for message in cuda.order.races), cuda.order.races


def offloaded_state(corpus: str, **keys: Any) -> JobSpec:
    """A job whose optimizer's state lies in host memory, with all that copies it."""
    row = PLAIN | {"layout": (1, 2, 2), "sequence_parallel": False} | keys
    train = {"steps": 2, "optimizer": {"offload": True}}
    return job_of(row, corpus, train=train, parallel={"bucket_megabytes": 0.01})


@pytest.mark.parametrize("keys", [pytest.param({"zero": 0}, marks=pytest.mark.soak), {"precision": "bf16"}], ids=str)
def test_an_optimizers_state_in_host_memory_is_waited_for(corpus, tmp_path, monkeypatch, keys):
    """By the stream that updates a slice, by those that bring and take slices, by whoever is given their places in the
    end, and by the host's threads, which copy it."""
    monkeypatch.setattr(offloaded, "SLICE_ELEMENTS", 1024)
    monkeypatch.setattr(products.TorchProducts, "add_weight_gradient", added)
    cuda = raced(offloaded_state(corpus, **keys), 0, tmp_path)
    assert cuda.order.races == []


def test_weights_of_a_step_before_wait_for_parameters_that_are_on_their_way(corpus, tmp_path, monkeypatch):
    """A step that was refused has begun to gather them, and what is rolled back goes to the same place."""
    monkeypatch.setattr(state_copy, "PinnedMemory", MagicMock())  # which would be let go of after the test
    monkeypatch.setattr(offloaded, "SLICE_ELEMENTS", 1024)
    monkeypatch.setattr(products.TorchProducts, "add_weight_gradient", added)
    row = PLAIN | {"layout": (1, 2, 2), "sequence_parallel": False, "precision": "bf16", "validates": False}
    spec = job_of(
        row,
        corpus,
        train={"steps": 5, "time_parts_every": 0, "optimizer": {"offload": True}},
        parallel={"bucket_megabytes": 0.01, "gather": "beside_forward"},
        recovery={"check_replicas_every": 1, "nonfinite": "roll_back", "roll_back_steps": 1},
        checkpoint={"every_steps": 0},
    )
    with pretended_streams() as cuda:
        recorder = RaceRecorder(0, 4, (2,))
        recorder.order = cuda.order
        recorded_rank(spec, 0, 4, tmp_path, recorder=recorder)
    assert cuda.order.races == []


@pytest.mark.parametrize(
    ("wait", "waiting", "race"),
    [
        ("wait_event", "stream {back}", "stream {back} writes"),
        ("wait_event", "stream {out}", "stream {out} reads"),
        ("wait_event", COMPUTE, f"{COMPUTE} reads"),
        ("synchronize", HOST, "thread snapshot reads"),
        ("synchronize", HOST, f"{COMPUTE} writes"),
    ],
)
def test_each_missing_wait_for_a_slice_of_offloaded_state_is_found(corpus, tmp_path, monkeypatch, wait, waiting, race):
    """A stream's for another one, and the host's."""
    monkeypatch.setattr(offloaded, "SLICE_ELEMENTS", 1024)
    with pretended_streams() as cuda:
        out, back = (each.name.split()[-1] for each in copy_streams(torch.device("cpu")))
        whose = cuda.Stream if wait == "wait_event" else cuda.Event
        forgetful = waiting.format(out=out, back=back)
        waits = getattr(whose, wait)

        def forgets(waiter: Any, *awaited: Any) -> None:
            here = sys._getframe(1).f_code.co_filename == offloaded.__file__
            if not here or getattr(waiter, "name", HOST) != forgetful:
                waits(waiter, *awaited)

        monkeypatch.setattr(whose, wait, forgets)
        recorder = RaceRecorder(0, 4)
        recorder.order = cuda.order
        recorded_rank(offloaded_state(corpus), 0, 2, tmp_path, recorder=recorder)
    assert any(race.format(out=out, back=back) in message for message in cuda.order.races), cuda.order.races


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_missing_wait_for_chunks_of_a_forward_product_is_found_as_a_race(
    corpus, tmp_path, monkeypatch, sequence_parallel, forgets
):
    chunks = {"layout": (2, 2, 2), "sequence_parallel": sequence_parallel}
    job = job_of(PLAIN | chunks, corpus, train={"steps": 1}, parallel={"forward_chunks": 3})
    if forgets:
        wait = OrderedWork.wait

        def in_chunks() -> bool:
            return any(each.name.endswith("_in_chunks") for each in traceback.extract_stack()[:-1])

        monkeypatch.setattr(OrderedWork, "wait", lambda work: in_chunks() or wait(work))
    cuda = raced(job, 0, tmp_path, 1)
    assert any("tensor" in race and COMPUTE in race for race in cuda.order.races) == forgets


def test_missing_wait_for_batches_copied_on_another_stream_is_found(corpus, tmp_path):
    """torch gives a thread the device's own stream, on which the engine computes too; another one would be a race."""
    alone = {"layout": (1, 1, 4), "schedule": "1f1b", "sequence_parallel": False}
    cuda = raced(job_of(PLAIN | alone, corpus, train={"steps": 3}), 0, tmp_path, 3, "loader")
    assert any(race.startswith("loader writes") and f"{COMPUTE} reads" in race for race in cuda.order.races)


@pytest.mark.parametrize("unprotect", ["too early", "without a poll", "after a poll"])
def test_a_slot_that_is_overwritten_while_it_is_saved_is_found(tmp_path, unprotect):
    with pretended_streams() as cuda:
        snapshots, saver = opened(tmp_path), checkpointer.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        for step in (1, 2):
            snapshots.save(step)
        held = snapshots.protect(2, bytes)

        def read() -> None:
            held.wait()
            cuda.order.runs("thread checkpoint", [(held.part("0"), False)], "thread checkpoint")

        saving = saver.submit(read)
        if unprotect == "too early":
            snapshots.unprotect()
        for step in (3, 4):
            update(snapshots)
            snapshots.save(step)
        saving.exception()  # it has ended, which nobody knows yet
        if unprotect == "without a poll" or saving.done():
            snapshots.unprotect()
        snapshots.save(5)
        snapshots.close()
        saver.shutdown()
    raced = [race for race in cuda.order.races if "thread checkpoint reads" in race and "stream 1 writes" in race]
    assert (raced == []) == (unprotect == "after a poll"), cuda.order.races
    assert len(raced) == len(cuda.order.races)


def test_missing_wait_for_a_collective_is_found(corpus, monkeypatch):
    job = job_of(PLAIN | {"layout": (1, 2, 2), "sequence_parallel": False}, corpus)
    with pretended_streams() as cuda:
        monkeypatch.setattr(OrderedWork, "wait", lambda _: True)
        recorder = RaceRecorder(0, 4)
        recorder.order = cuda.order
        recorded_rank(job, 0, 1, recorder=recorder)
    assert any(race.startswith("data") and COMPUTE in race for race in cuda.order.races)


def test_copy_stream_is_shared_in_a_process_and_not_between_processes():
    """The stream belongs to a process, and a test's to its block."""
    with pretended_streams():
        first = state_copy.copy_stream(torch.device("cpu"))
        assert state_copy.copy_stream(torch.device("cpu")) is first
    with pretended_streams():
        assert state_copy.copy_stream(torch.device("cpu")) is not first
