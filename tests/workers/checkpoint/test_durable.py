"""Durable checkpoints: read by torch's own reader, kept and told of as asked for, resumed to the bit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_specs import axes, document
from plain_gpt import PlainGPT
from rank_processes import RankFailure
from rank_programs import train_job
from torch_reader import state_by_torch

from manta.workers.checkpoint import durable
from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import ParallelConfig
from manta.workers.errors import CheckpointError
from manta.workers.protocol.messages import Resume
from manta.workers.spec.reading import parse_job_spec
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter

WRITER = (2, 2, 2)


def job(corpus: str, layout: tuple[int, int, int], **sections) -> dict:
    """Six steps of a model whose vocabulary does not divide, saved every other step."""
    return document(
        model={"vocabulary_size": 257, "sequence_length": 8},
        data={"paths": [corpus]},
        train={"steps": 6, "micro_batch_size": 2, "optimizer": {"warmup_steps": 2}},
        parallel=axes(layout),
        checkpoint={"every_steps": 2, "keep": 2},
        **sections,
    )


@pytest.fixture(scope="module")
def written(ranks, corpus, tmp_path_factory):
    """(folder, what each rank of the writing layout ended with)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, ranks.run(ParallelConfig(**axes(WRITER)), train_job, job(corpus, WRITER), str(folder))


def newest(folder: Path) -> Resume:
    """Resume from the newest whole checkpoint."""
    path, manifest = complete_checkpoints(folder)[-1]
    return Resume("checkpoint", manifest.step, str(path))


def together(trained: list) -> dict[str, torch.Tensor]:
    """Layout-free tensors by `kind.name`, from all ranks' parts; copies must be equal."""
    shapes = {
        name: parameter.shape for name, parameter in PlainGPT(parse_job_spec(job("x", (1, 1, 1)))).named_parameters()
    }
    whole = {}
    for rank in trained:
        for kind, name, offsets, values in rank.rectangles:
            key = f"{kind}.{name}"
            tensor = whole.setdefault(key, torch.full(shapes[name], float("nan")))
            where = tuple(slice(a, a + n) for a, n in zip(offsets, values.shape, strict=True))
            known = ~tensor[where].isnan()
            assert torch.equal(tensor[where][known], values[known])
            tensor[where] = values
    assert len(whole) == 3 * len(shapes)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def test_torchs_own_reader_reads_the_saved_state_from_a_checkpoint(written, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder, state = written
    path = newest(folder).path
    expected = together(state)
    plain = state_by_torch(path)
    assert all(torch.equal(plain[key], expected[key]) for key in expected)
    dcp_to_torch_save(path, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt")
    assert set(saved) == set(expected)
    assert all(torch.equal(saved[key], expected[key]) for key in expected)


def test_newest_checkpoints_are_kept_and_manifests_have_job_files_and_spec(written):
    folder, _ = written
    whole = complete_checkpoints(folder)
    assert [manifest.step for _, manifest in whole] == [4, 6]
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path, _ in whole)
    path, manifest = whole[-1]
    assert manifest.job == "test"
    assert set(manifest.files) == {each.name for each in path.iterdir()} - {"manifest.json"}
    assert manifest.bytes == sum((path / name).stat().st_size for name in manifest.files)
    assert parse_job_spec(manifest.spec).train.steps == 6


def test_events_of_saves_and_deletions_come_in_order_from_one_rank(written):
    kinds = [(event["type"], event["step"]) for event in written[1][0].events]
    story = [("checkpoint_saving", 2), ("checkpoint_saved", 2), ("checkpoint_saving", 4), ("checkpoint_saved", 4)]
    assert kinds == [*story, ("checkpoint_saving", 6), ("checkpoint_saved", 6), ("checkpoint_deleted", 6)]
    assert all(not rank.events for rank in written[1][1:]), "one rank tells it"


@pytest.mark.parametrize("source", ["checkpoint", "snapshot"])
def test_resumed_run_has_the_same_bits_as_an_unbroken_one(ranks, corpus, tmp_path, source):
    layout, spec = ParallelConfig(**axes(WRITER)), job(corpus, WRITER)
    whole = ranks.run(layout, train_job, spec)
    folders = (str(tmp_path / "checkpoints"), str(tmp_path / "snapshots"))
    begun = ranks.run(layout, train_job, spec, *folders, Resume(), 4)
    path = str(complete_checkpoints(folders[0])[-1][0]) if source == "checkpoint" else None
    ended = ranks.run(layout, train_job, spec, *folders, Resume(source, 4, path))
    for full, first, second in zip(whole, begun, ended, strict=True):
        assert first.statistics + second.statistics == full.statistics
        assert torch.equal(second.parameters, full.parameters)
        assert all(torch.equal(second.state[kind], full.state[kind]) for kind in full.state)


def test_resuming_from_the_snapshot_before_the_newest_gives_the_same_bits(ranks, corpus, tmp_path):
    """A crash in the middle of a step: half of the ranks hold one step more, which is forgotten."""
    layout, spec = ParallelConfig(**axes(WRITER)), job(corpus, WRITER)
    whole = ranks.run(layout, train_job, spec)
    ranks.run(layout, train_job, spec, None, str(tmp_path), Resume(), 5)
    ended = ranks.run(layout, train_job, spec, None, str(tmp_path), Resume("snapshot", 4))
    for full, second in zip(whole, ended, strict=True):
        assert second.statistics == full.statistics[4:]
        assert torch.equal(second.parameters, full.parameters)


def test_restore_from_a_checkpoint_of_another_model_fails_with_the_tensor_that_differs(
    ranks, corpus, written, tmp_path
):
    other = job(corpus, (1, 1, 1))
    other["model"]["ffn_hidden_size"] = 64
    with pytest.raises(
        RankFailure, match=r"is of another model: model\.layers\.0\.mlp\.up\.weight should be \(64, 32\)"
    ):
        ranks.run(ParallelConfig(), train_job, other, str(tmp_path), None, newest(written[0]))


def test_a_save_that_fails_is_an_event_and_training_goes_on(ranks, corpus, tmp_path):
    """The folder of checkpoints is a file."""
    (tmp_path / "file").write_text("in the way")
    layout = (2, 1, 1)
    trained = ranks.run(ParallelConfig(**axes(layout)), train_job, job(corpus, layout), str(tmp_path / "file" / "deep"))
    failed = [event for event in trained[0].events if event["type"] == "checkpoint_failed"]
    assert [event["step"] for event in failed] == [2, 4, 6]
    assert "Not a directory" in failed[0]["message"]
    assert len(trained[0].statistics) == 6


def one_rank(corpus: str, folder: Path) -> Trainer:
    """A trainer at its start, in this process."""
    spec = parse_job_spec(job(corpus, (1, 1, 1)))
    comm = Comm(RankGrid(spec.layout), 0, torch.device("cpu"))
    trainer = Trainer(spec, comm, Reporter(lambda _: None), 1e12, StatePaths("test", None, str(folder)))
    trainer.restore(Resume())
    return trainer


def test_files_are_synced_before_the_manifest_and_the_manifest_before_its_rename(tmp_path, corpus, monkeypatch):
    """Whatever a power cut leaves has a manifest only if it is whole."""
    synced: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted(descriptor):
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()).removesuffix(".tmp"))
        fsync(descriptor)

    def noted_rename(path, target):
        synced.append(f"renamed to {target}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", noted_rename)
    trainer = one_rank(corpus, tmp_path / "folder")
    trainer.state.checkpoints.start(2)
    trainer.state.checkpoints.finish()
    ((path, manifest),) = complete_checkpoints(tmp_path / "folder")
    at = {name: synced.index(str(path / name)) for name in (*manifest.files, ".manifest.json")}
    sealed = synced.index(f"renamed to {path / 'manifest.json'}")
    assert max(at[name] for name in manifest.files) < at[".manifest.json"] < sealed
    assert {str(path), str(path.parent)} <= set(synced[sealed:]), "and then the names in both folders"
    trainer.close()


def without_last_row(rectangle):
    return replace(rectangle, sizes=(rectangle.sizes[0] - 1, *rectangle.sizes[1:]))


@pytest.mark.parametrize("left", [lambda each: (), lambda each: (without_last_row(each),)], ids=["none", "all but one"])
def test_a_checkpoint_that_lacks_some_elements_is_not_loaded_with_zeros_in_their_place(
    tmp_path, corpus, monkeypatch, left
):
    """What lies where names less than was written."""
    trainer = one_rank(corpus, tmp_path)
    checkpoints = trainer.state.checkpoints
    checkpoints.start(2)
    checkpoints.finish()
    ((path, _),) = complete_checkpoints(tmp_path)
    read, name = durable.read_contents, "exp_avg.final_norm.weight"

    def lacking(*arguments):
        contents = read(*arguments)
        *others, last = contents.tensors[name].rectangles
        contents.tensors[name] = replace(contents.tensors[name], rectangles=(*others, *left(last)))
        return contents

    checkpoints.restore(str(path))
    monkeypatch.setattr(durable, "read_contents", lacking)
    before = [tensor.clone() for tensor in trainer.engine.state()]
    with pytest.raises(CheckpointError, match=f"does not hold all of {name}"):
        checkpoints.restore(str(path))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.engine.state(), strict=True))
    trainer.close()


def test_rectangle_is_saved_without_its_surroundings_and_whole_rows_without_a_copy():
    part = torch.arange(40.0)
    rows, columns = part.as_strided((3, 4), (4, 1), 8), part.as_strided((3, 2), (4, 1), 8)
    for view in (rows, columns):
        alone = durable._alone(view)
        assert torch.equal(alone, view)
        assert alone.untyped_storage().nbytes() == view.numel() * 4
    assert durable._alone(rows).data_ptr() == rows.data_ptr()


def test_saving_leaves_torchs_own_checksums_switched_on(tmp_path, corpus):
    trainer = one_rank(corpus, tmp_path)
    trainer.state.checkpoints.start(1)
    trainer.state.checkpoints.finish()
    assert trainer.state.checkpoints.failure is None
    assert torch.serialization.get_crc32_options()
    trainer.close()
