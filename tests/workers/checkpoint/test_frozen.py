"""Jobs with frozen parameters go on from checkpoints and snapshots, also under another layout, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_programs import job, load_and_save, load_from_memory, lone, save, train_and_save, train_and_snapshot

from manta.workers.checkpoint.catalog import complete_checkpoints, manifest_of, verify
from manta.workers.checkpoint.durable import read_contents
from manta.workers.comm.comm import Comm
from manta.workers.config import ParallelConfig
from manta.workers.protocol.messages import Resume
from manta.workers.snapshot.files import snapshot_files
from manta.workers.spec.parameters import frozen_names, parameter_names
from manta.workers.spec.reading import parse_job_spec
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter

FROZEN = ["embedding", "layers.0-1", "*.mlp.down"]
WRITER = {"tensor": 2, "pipeline": 2, "schedule": "zb-v", "virtual_stages": 2, "data": 2, "bucket_megabytes": 0.004}
READERS: dict[str, dict[str, Any]] = {
    "1": {},
    "d3": {"data": 3, "bucket_megabytes": 0.004},
    "t4 p2": {"tensor": 4, "pipeline": 2},
    "d2 zero 0": {"data": 2, "zero": 0},
    "d3 zero 3": {"data": 3, "zero": 3},
}


def document(corpus: str, layout: dict[str, Any], **train: Any) -> dict[str, Any]:
    return job(corpus, layout, model={"hidden_size": 16}, train={"frozen": FROZEN, **train})


def whole(placed: list[Any]) -> dict[str, torch.Tensor]:
    """Layout-free tensors from rectangles, which agree where they overlap."""
    ends: dict[str, list[int]] = {}
    for name, offsets, values in placed:
        end = [at + size for at, size in zip(offsets, values.shape, strict=True)]
        ends[name] = [max(a, b) for a, b in zip(end, ends.get(name, end), strict=True)]
    tensors = {name: torch.full(size, float("nan")) for name, size in ends.items()}
    for name, offsets, values in placed:
        where = tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))
        known = ~tensors[name][where].isnan()
        assert torch.equal(tensors[name][where][known], values.float()[known]), name
        tensors[name][where] = values.float()
    return tensors


def loaded(by_rank: list[Any], which: str = "loaded") -> dict[str, torch.Tensor]:
    return whole([each for rank in by_rank for each in getattr(rank, which)])


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def saved(ranks, corpus, tmp_path_factory):
    """(Folder, what each rank had) of a checkpoint after two steps."""
    folder = tmp_path_factory.mktemp("saved")
    made = document(corpus, WRITER)
    return folder, ranks.run(parse_job_spec(made).layout, train_and_save, made, str(folder), 2)


def test_a_checkpoint_holds_each_parameter_and_moments_of_those_that_are_trained(saved, corpus):
    (path, manifest) = complete_checkpoints(saved[0])[0]
    verify(path)
    spec = parse_job_spec(document(corpus, WRITER))
    names, frozen = set(parameter_names(spec.model)), frozen_names(spec)
    tensors = read_contents(str(path), manifest).tensors
    assert {name for name in tensors if name.startswith("model.")} == {f"model.{name}" for name in names}
    assert {name for name in tensors if name.startswith("exp_avg.")} == {f"exp_avg.{name}" for name in names - frozen}


@pytest.fixture(scope="module")
def going_on(ranks, corpus, saved, tmp_path_factory):
    """What each rank found that went on from that checkpoint in the layout in which it was written."""
    made, folder = document(corpus, WRITER), str(tmp_path_factory.mktemp("on"))
    path = str(complete_checkpoints(saved[0])[0][0])
    return ranks.run(parse_job_spec(made).layout, load_and_save, made, path, 2, folder, 2)


@pytest.mark.parametrize("layout", [pytest.param("1", marks=pytest.mark.soak), *list(READERS)[1:]])
def test_training_with_frozen_parameters_resumes_from_a_checkpoint_in_any_layout(
    ranks, corpus, saved, going_on, tmp_path, layout
):
    folder, written = saved
    path = complete_checkpoints(folder)[0][0]
    made, sizes = document(corpus, READERS[layout]), ParallelConfig(**READERS[layout])
    by_rank = ranks.run(sizes, load_and_save, made, str(path), 2, str(tmp_path), 2)
    assert_same(loaded(by_rank), loaded(written))
    assert_same(loaded(by_rank, "computing"), loaded(written, "computing"))
    for (loss, norm), (other_loss, other_norm) in zip(by_rank[0].statistics, going_on[0].statistics, strict=True):
        assert loss == pytest.approx(other_loss, rel=2e-6)
        assert norm == pytest.approx(other_norm, rel=2e-5)


@pytest.mark.parametrize("layout", [pytest.param("1", marks=pytest.mark.soak), "t4 p2"])
def test_frozen_parameters_and_moments_load_from_snapshots_of_another_layout(ranks, corpus, tmp_path, layout):
    made = document(corpus, WRITER)
    written = ranks.run(parse_job_spec(made).layout, train_and_snapshot, made, str(tmp_path), 2)
    paths = tuple(str(each.path) for each in snapshot_files(tmp_path))
    sizes = ParallelConfig(**READERS[layout])
    by_rank = ranks.run(sizes, load_from_memory, document(corpus, READERS[layout]), paths, 2, str(tmp_path), 1)
    assert_same(loaded(by_rank), loaded(written))
    assert_same(loaded(by_rank, "computing"), loaded(written, "computing"))


def train_from_snapshot(comm: Comm, made: dict[str, Any], folder: str, step: int, more: int) -> Any:
    """Go on for `more` steps from this rank's own snapshot of `step` (0: from the start) in a trainer that knows
    nothing: (statistics of each step, all flat parameters)."""
    trainer = Trainer(parse_job_spec(made), comm, Reporter(lambda _: None), 1e12, StatePaths("test", folder))
    trainer.engine.flat.parameters.fill_(7.0)
    trainer.restore(Resume("snapshot", step) if step else Resume())
    done = [trainer.train_step() for _ in range(more)]
    trainer.state.finish_copies()
    comm.barrier()
    return [(each.loss, each.grad_norm) for each in done], trainer.engine.flat.parameters.clone()


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.soak), "bf16"])
def test_new_process_restores_frozen_parameters_too_from_its_snapshot(ranks, corpus, tmp_path, precision):
    """With ZeRO each replica's snapshot has its part of what is frozen as well, and the others gather it."""
    made = document(corpus, WRITER, precision=precision)
    layout = parse_job_spec(made).layout
    straight = ranks.run(layout, train_from_snapshot, made, str(tmp_path / "straight"), 0, 4)
    ranks.run(layout, train_from_snapshot, made, str(tmp_path / "broken"), 0, 2)
    on = ranks.run(layout, train_from_snapshot, made, str(tmp_path / "broken"), 2, 2)
    for (statistics, parameters), (all_statistics, all_parameters) in zip(on, straight, strict=True):
        assert statistics == all_statistics[2:]
        assert torch.equal(parameters, all_parameters)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_resumes_from_a_checkpoint_with_other_parameters_frozen(corpus, tmp_path, precision):
    """Moments begin at zero where there are none."""
    frozen = lone(document(corpus, {}, precision=precision), tmp_path)
    frozen.restore(Resume())
    frozen.train_step()
    save(frozen)
    path = complete_checkpoints(tmp_path)[0][0]
    assert manifest_of(path).step == 1
    trained = lone(document(corpus, {}, precision=precision, frozen=[]), tmp_path, generation=2)
    trained.restore(Resume("checkpoint", 1, str(path)))
    values = {name: parameter.detach() for name, parameter in named(trained)}
    assert all(torch.equal(values[name], parameter) for name, parameter in named(frozen))
    for slot in trained.engine.flat.slots:
        moments = trained.engine.optimizer.moments["exp_avg"][slot.start : slot.end]
        assert moments.any() == (slot.entry.name not in frozen_names(frozen.spec)), slot.entry.name
    (weights,) = trained.engine.optimizer.parameters
    before = weights.clone()
    trained.train_step()
    save(trained)
    for slot in trained.engine.flat.slots:
        assert not torch.equal(before[slot.start : slot.end], weights[slot.start : slot.end]), slot.entry.name
    again = lone(document(corpus, {}, precision=precision), tmp_path, generation=3)
    again.restore(Resume("checkpoint", 2, str(complete_checkpoints(tmp_path)[-1][0])))
    values = {name: parameter.detach() for name, parameter in named(trained)}
    assert all(torch.equal(values[name], parameter) for name, parameter in named(again))


def named(trainer: Trainer) -> list[tuple[str, torch.Tensor]]:
    return [(entry.name, entry.parameter) for entry in trainer.engine.model.named_shards()]
