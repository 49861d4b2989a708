"""What lies between GPUs, measured between processes on CPUs over gloo; and what is said where it cannot be."""

from __future__ import annotations

import multiprocessing
from unittest.mock import Mock

import local_rank_programs
import pytest
import torch

from manta.service.planner.fitting import fit_links
from manta.service.planner.hardware import MACHINES
from manta.workers.calibration import __main__ as program
from manta.workers.calibration import collectives as module
from manta.workers.calibration.collectives import between_gpus, gpu_devices, of_all
from manta.workers.calibration.device import layout_document
from manta.workers.calibration.local_ranks import LocalRanks, RankDevice, RanksFailed, end_with_reader
from manta.workers.calibration.measurements import CollectiveTime, Measurements
from manta.workers.errors import MantaError

ON_GLOO = RankDevice(backend="process_groups")
TWO = layout_document(tensor=2)


@pytest.fixture(scope="module")
def gangs() -> LocalRanks:
    return LocalRanks()


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Other tests of this process may have processes of their own."""
    before = set(multiprocessing.active_children())
    yield
    assert not set(multiprocessing.active_children()) - before


def test_calibration_of_links_measures_all_collectives_and_fits_constants():
    said: list[str] = []
    rows, problem = between_gpus([ON_GLOO] * 2, said.append, (4096, 65536))
    assert (problem, said) == (None, ["links between 2 GPUs"])
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "message")
    assert [(row.kind, row.ranks, row.size) for row in rows] == [(k, 2, s) for s in (4096, 65536) for k in kinds]
    links = fit_links(rows, MACHINES["h100-80gb"])
    assert links.bandwidth > 0 and links.hop_seconds > 0


@pytest.mark.soak
@pytest.mark.parametrize(("count", "pairs"), [(3, 0), (4, 2), (5, 2)])
def test_collectives_are_measured_in_concurrent_pairs_and_then_on_all_gpus(count, pairs):
    rows, problem = between_gpus([ON_GLOO] * count, print, (4096,))
    kinds = ["all_gather", "reduce_scatter", "all_reduce"]
    expected = [(kind, 2) for kind in kinds] if pairs else []
    assert problem is None
    assert [(row.kind, row.ranks) for row in rows] == [*expected, *((kind, count) for kind in [*kinds, "message"])]


def test_each_process_sees_its_gpu_alone(gangs):
    devices = [RankDevice(visible_gpu=name) for name in ("2", "GPU-5b")]
    assert gangs.run(local_rank_programs.see, TWO, devices=devices) == [("2", False), ("GPU-5b", False)]


def test_ranks_compute_with_the_threads_of_their_job(gangs):
    assert gangs.run(local_rank_programs.threads, {**TWO, "resources": {"threads": 3}}) == [3, 3]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("dies", "the process of rank 1 was killed by SIGKILL before it had a result"),
        ("leaves", "the process of rank 1 ended before it had a result"),
        ("says", "rank 1: nothing is here"),
        (
            "raises",
            "rank 1: RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error (no shared memory)",
        ),
    ],
)
def test_failed_calibration_of_links_names_the_rank_that_failed(gangs, how, why):
    """The others, who lose it, are not what went wrong."""
    with pytest.raises(RanksFailed) as raised:
        gangs.run(local_rank_programs.fail, TWO, how, devices=[ON_GLOO])
    assert str(raised.value) == why


def test_hanging_calibration_gang_is_given_up(gangs):
    with pytest.raises(RanksFailed, match="after 0 s there was nothing from ranks 0, 1"):
        gangs.run(local_rank_programs.fail, TWO, "hangs", seconds=0.2)


def test_calibration_rank_ends_if_nobody_reads_its_result(gangs):
    """Else one that hangs on its GPU outlives a command that was killed."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = gangs._context.Process(target=end_with_reader, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert process.is_alive()
    ours.close()
    process.join(60)
    assert process.exitcode == 1


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RanksFailed("rank 1: no"), "rank 1: no"),
        (BlockingIOError(11, "no more processes"), "BlockingIOError: [Errno 11] no more processes"),
        (RuntimeError("The server socket has failed to listen\nmore"), "RuntimeError: The server socket has failed to"),
    ],
)
def test_unmeasurable_links_give_no_rows_and_a_reason(monkeypatch, error, why):
    monkeypatch.setattr(LocalRanks, "run", Mock(side_effect=error))
    rows, problem = between_gpus([ON_GLOO] * 2, print)
    assert rows == [] and problem.startswith(why)


def test_links_of_a_single_gpu_are_not_measured(monkeypatch):
    monkeypatch.setattr(module, "LocalRanks", None)
    assert between_gpus([ON_GLOO], print) == ([], "there is one GPU")


def test_collective_time_is_that_of_the_slowest_rank():
    def seen(*seconds):
        return "H100", [CollectiveTime("message", 2, 4096, each) for each in seconds]

    assert [row.seconds for row in of_all([seen(1.0, 4.0), seen(2.0, 3.0)])] == [2.0, 4.0]
    with pytest.raises(MantaError, match="of several kinds: A100, H100"):
        of_all([seen(1.0), ("A100", seen(1.0)[1])])


@pytest.mark.parametrize(
    ("said", "count", "names"),
    [("", 2, ["0", "1"]), ("3,5", 2, ["3", "5"]), ("GPU-5b, GPU-7c", 2, ["GPU-5b", "GPU-7c"]), ("1,-1,0", 1, ["1"])],
)
def test_calibration_measures_only_gpus_visible_to_the_process(monkeypatch, said, count, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert gpu_devices() == [RankDevice("cuda:0", "process_groups", name) for name in names]


@pytest.mark.parametrize("problem", [None, "rank 1: no"])
def test_gpu_is_measured_after_its_links_even_if_they_failed(monkeypatch, problem):
    """And after them: it may be for one process at a time."""
    order: list[str] = []
    rows = [] if problem else [CollectiveTime("message", 2, 4096, 1.0)]

    def measure_gpu(*_: object) -> Measurements:
        order.append("gpu")
        program.clock.spreads.append(0.01)
        return Measurements("NVIDIA H100", 16, gpu_memory_bytes=1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(program, "gpu_devices", lambda: [ON_GLOO] * 2)
    monkeypatch.setattr(program, "between_gpus", lambda devices, say: order.append("links") or (rows, problem))
    monkeypatch.setattr(program, "measure_gpu", measure_gpu)
    measurements = program.measure("auto", print)
    assert order == ["links", "gpu"]
    assert (measurements.collectives, measurements.links_problem) == (rows, problem)
    assert (measurements.device, measurements.spread) == ("NVIDIA H100", 0.01)


def test_calibration_for_a_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MantaError, match="torch finds no GPU here"):
        program.measure("cuda", print)
