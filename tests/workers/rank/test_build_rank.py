"""What a trainer process is made of: devices, threads, links, its records."""

import pytest
import torch
from engine_specs import document
from trainer_rig import order

from manta.workers.data.corpus_record import FILE_NAME as CORPUS_RECORD
from manta.workers.liveness.progress import Progress, ProgressReader, progress_path
from manta.workers.rank import trainer_process
from manta.workers.rank.trainer_process import build_rank
from manta.workers.trainer import StatePaths


@pytest.fixture
def build(monkeypatch, tmp_path):
    """Builds a rank of a job of two without its model; (communication, what the trainer was made of, answers)."""
    made, threads = [], torch.get_num_threads()
    monkeypatch.setattr(trainer_process, "Trainer", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(trainer_process, "answer_with_stacks", lambda *where: made.append(("stacks", *where)))
    spec = document(parallel={"data": 2})

    def build(progress=None, **changes):
        made.clear()
        comm, _ = build_rank(order(rank=1, **{"spec": spec, **changes}), progress, "reporter")
        return comm, made

    yield build
    torch.set_num_threads(threads)


def test_a_rank_is_built_with_its_places_and_the_record_that_its_agent_reads(build, tmp_path):
    torch.set_num_threads(2)
    shared, durable = str(tmp_path / "shared"), str(tmp_path / "job" / "checkpoints")
    comm, (stacks, trainer) = build(snapshot_folder=shared, checkpoint_folder=durable, peak_flops=5e9)
    assert torch.get_num_threads() == 1, "as before a job could say it"
    assert (comm.rank, comm.size("data"), comm.device.type) == (1, 2, "cpu")
    assert stacks == ("stacks", shared, 1)
    record = tmp_path / "job" / CORPUS_RECORD
    assert trainer[1:] == (comm, "reporter", 5e9, StatePaths("job-1", shared, durable, record))
    reader = ProgressReader(progress_path(shared, 1))
    assert reader.read().phase == "preparing", "what has minutes"
    comm.progress.begin_step(7)
    assert reader.read().step == 7
    reader.close()


def test_a_rank_computes_with_as_many_threads_as_its_job_says(build):
    torch.set_num_threads(1)
    spec = document(parallel={"data": 2}, resources={"threads": 3})
    _, ((_, _, _, peak, _),) = build(spec=spec, peak_flops=5e9)
    assert (torch.get_num_threads(), peak) == (3, 15e9), "what one thread can do, times threads"


def test_gpu_rank_told_by_a_test_to_compute_on_the_cpu_communicates_as_on_the_gpu(build, monkeypatch, capsys):
    monkeypatch.setenv("MANTA_COMPUTE_ON_CPU_FOR_TESTS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    comm, ((_, _, _, peak, _),) = build(device="cuda:0")
    assert (comm.device.type, comm._kind, peak > 0) == ("cpu", "process_groups", True)
    assert capsys.readouterr().out == "rank 1 computes on the CPU, as if on GPU 3\n"
    comm, _ = build(device="cpu")
    assert (comm._kind, capsys.readouterr().out) == ("links", "")


@pytest.mark.parametrize(("said", "kind"), [(None, "links"), ("0", "links"), ("1", "process_groups")])
def test_slot_ranks_communicate_over_links_unless_a_test_says_otherwise(build, monkeypatch, capsys, said, kind):
    monkeypatch.delenv("MANTA_PROCESS_GROUPS_FOR_TESTS", raising=False)
    if said is not None:
        monkeypatch.setenv("MANTA_PROCESS_GROUPS_FOR_TESTS", said)
    comm, _ = build()
    assert comm._kind == kind
    assert ("communicates over process groups" in capsys.readouterr().out) == (kind == "process_groups")


def test_rebuilt_rank_keeps_its_progress_record_and_has_a_private_one_without_memory(build, tmp_path):
    shared, own = str(tmp_path / "shared"), Progress()
    comm, made = build(own, snapshot_folder=shared)
    assert comm.progress is own
    assert len(made) == 1, "it answers with its stacks already"
    assert not (tmp_path / "shared").exists()
    _, ((_, _, _, peak, places),) = build()
    assert places == StatePaths("job-1")
    assert peak > 0, "measured, since nobody has said it"
