"""What a job does not train is written once, and each of its checkpoints refers to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoint_programs import bits, job, lone, save, train_and_save
from torch_reader import state_by_torch

from manta.workers.checkpoint import catalog
from manta.workers.checkpoint.catalog import (
    Condition,
    checkpoint_path,
    complete_checkpoints,
    frozen_folders,
    frozen_path,
    inspect,
    manifest_of,
    newest_usable,
    verify,
)
from manta.workers.checkpoint.pruning import prune, remove, remove_after, remove_unused_frozen
from manta.workers.checkpoint.transfer import copy
from manta.workers.protocol.messages import Resume
from manta.workers.spec.parameters import frozen_names
from manta.workers.spec.reading import parse_job_spec
from manta.workers.storage.files import files_of
from manta.workers.trainer import Trainer

FROZEN = ["embedding", "layers.0", "layers.1", "layers.2.attention"]


def document(corpus: str, layout: dict[str, Any] | None = None, frozen: list[str] = FROZEN) -> dict[str, Any]:
    return job(corpus, layout or {}, train={"frozen": frozen, "steps": 50}, checkpoint={"every_steps": 0, "keep": 9})


def trained(made: dict[str, Any], folder: Any, steps: int = 1, generation: int = 1) -> Trainer:
    """A job of one rank that has saved after each of its first steps."""
    trainer = lone(made, folder, generation)
    trainer.restore(Resume())
    for _ in range(steps):
        trainer.train_step()
        save(trainer)
    return trainer


def resumed(made: dict[str, Any], folder: Any, step: int, generation: int, of: int = 1) -> Trainer:
    trainer = lone(made, folder, generation)
    trainer.restore(Resume("checkpoint", step, str(checkpoint_path(folder, step, of)), began=1))
    return trainer


def names(folder: Any) -> list[str]:
    return [path.name for path, _, _ in frozen_folders(folder)]


@pytest.mark.parametrize("place", ["folder", "store"])
def test_first_save_writes_frozen_parameters_and_later_ones_refer_to_them(corpus, tmp_path, request, place):
    folder = tmp_path if place == "folder" else request.getfixturevalue("bucket") / "job"
    made = document(corpus)
    trainer = trained(made, folder, steps=3)
    assert names(folder) == [frozen_path(folder, 1, 1).name]
    manifests = [manifest for _, manifest in complete_checkpoints(folder)]
    assert [each.frozen.folder for each in manifests] == names(folder) * 3
    elements = sum(slot.end - slot.start for slot in trainer.engine.flat.slots)
    frozen = sum(slot.end - slot.start for slot in trainer.engine.flat.frozen)
    assert all(12 * elements <= each.bytes < 12 * elements + 300_000 for each in manifests)
    assert manifests[0].frozen.manifest.bytes > 4 * frozen
    assert verify(checkpoint_path(folder, 2, 1)).all_bytes == manifests[1].bytes + manifests[1].frozen.manifest.bytes
    expected = bits(trainer)
    again = resumed(made, folder, 3, 2)
    assert all(torch.equal(a, b) for a, b in zip(bits(again), expected, strict=True))
    assert torch.equal(again.engine.flat.parameters, trainer.engine.flat.parameters)
    again.train_step()
    save(again)
    assert names(folder) == [frozen_path(folder, 1, 1).name]
    trainer.close(), again.close()


def test_checkpoints_of_another_layout_refer_to_what_the_first_layout_has_written(ranks, corpus, tmp_path):
    wide = document(corpus, {"tensor": 2, "pipeline": 2, "data": 2})
    ranks.run(parse_job_spec(wide).layout, train_and_save, wide, str(tmp_path), 2)
    (path, manifest) = complete_checkpoints(tmp_path)[0]
    lonely = lone(document(corpus), tmp_path, manifest.generation + 1)
    lonely.restore(Resume("checkpoint", 2, str(path), began=manifest.generation))
    lonely.train_step()
    save(lonely)
    assert names(tmp_path) == [manifest.frozen.folder] == [complete_checkpoints(tmp_path)[-1][1].frozen.folder]
    parts = lonely.engine.flat.parameters.clone()
    lonely.restore(Resume("checkpoint", 3, str(complete_checkpoints(tmp_path)[-1][0])))
    assert torch.equal(lonely.engine.flat.parameters, parts)


def test_job_whose_checkpoints_hold_everything_writes_frozen_parameters_apart_from_now_on(corpus, tmp_path):
    """As those of 0.3.0 do, and copies."""
    made, old, folder = document(corpus), tmp_path / "old", tmp_path / "new"
    trained(made, old)
    copy(checkpoint_path(old, 1, 1), checkpoint_path(folder, 1, 1))
    assert not names(folder) and manifest_of(checkpoint_path(folder, 1, 1)).frozen is None
    trainer = resumed(made, folder, 1, 2)
    trainer.train_step()
    save(trainer)
    assert names(folder) == [frozen_path(folder, 2, 2).name]


def seal_fails(when: Callable[[str], bool]) -> Any:
    """Seals nothing whose name is `when`."""
    seal = catalog.seal

    def sealed(path: Path, manifest: Any) -> int:
        if when(path.name):
            raise OSError("killed")
        return seal(path, manifest)

    return patch.object(catalog, "seal", sealed)


@pytest.mark.parametrize("dies", ["frozen", "step"])
@pytest.mark.parametrize("new_generation", [True, False])
def test_first_save_that_fails_with_its_frozen_parameters_is_never_half_used(corpus, tmp_path, dies, new_generation):
    made = document(corpus)
    with seal_fails(lambda name: name.startswith(dies)):
        trainer = trained(made, tmp_path)
    assert not complete_checkpoints(tmp_path) and names(tmp_path) == ["frozen-00000001-generation-1"] * (dies == "step")
    if new_generation:
        trainer = lone(made, tmp_path, 2)
        trainer.restore(Resume())
        trainer.train_step()
    trainer.train_step()
    save(trainer)
    path, manifest = complete_checkpoints(tmp_path)[0]
    kept = "frozen-00000001-generation-1" if dies == "step" and not new_generation else names(tmp_path)[-1]
    assert names(tmp_path) == [kept] == [manifest.frozen.folder]
    verify(path)


@pytest.mark.parametrize("harm", ["removed", "cut", "unsealed"])
def test_frozen_parameters_that_are_gone_are_written_again_by_the_next_save(corpus, tmp_path, harm):
    trainer = trained(document(corpus), tmp_path)
    place = frozen_path(tmp_path, 1, 1)
    if harm == "removed":
        shutil.rmtree(place)
    elif harm == "cut":
        (place / "__0_1.distcp").write_bytes(b"")
    else:
        (place / "manifest.json").unlink()
    assert inspect(checkpoint_path(tmp_path, 1, 1))[0] is Condition.INCOMPLETE
    trainer.train_step()
    save(trainer)
    verify(checkpoint_path(tmp_path, 2, 1))


def test_damage_of_frozen_parameters_is_named_and_so_is_their_absence(corpus, tmp_path):
    trained(document(corpus), tmp_path)
    place, path = frozen_path(tmp_path, 1, 1), checkpoint_path(tmp_path, 1, 1)
    content = bytearray((place / "__0_1.distcp").read_bytes())
    content[20_000] ^= 1
    (place / "__0_1.distcp").write_bytes(content)
    usable, (problem,) = newest_usable(tmp_path)
    assert usable is None
    assert f"the frozen weights at {place} are damaged: __0_1.distcp is not what was written" in problem
    shutil.rmtree(place)
    condition, _, problem = inspect(path)
    assert condition is Condition.INCOMPLETE
    assert f"refers to the frozen weights in {place}, which are not there: they belong beside it" in problem


def test_frozen_parameters_of_other_patterns_or_another_beginning_are_not_referred_to(corpus, tmp_path):
    made = document(corpus)
    trained(made, tmp_path)
    other = resumed(document(corpus, frozen=["embedding"]), tmp_path, 1, 2)
    other.train_step()
    save(other)
    trained(made, tmp_path, generation=3)
    assert [each.frozen.folder for _, each in complete_checkpoints(tmp_path)] == names(tmp_path)
    assert len(names(tmp_path)) == 3


def test_frozen_parameters_are_deleted_with_the_last_checkpoint_that_refers_to_them(corpus, tmp_path):
    made = document(corpus)
    trained(made, tmp_path, steps=2)
    trained(made, tmp_path, generation=2)
    prune(tmp_path, keep=2, generation=2, step=1)
    assert names(tmp_path) == ["frozen-00000001-generation-1", "frozen-00000001-generation-2"]
    prune(tmp_path, keep=1, generation=2, step=1)
    assert names(tmp_path) == ["frozen-00000001-generation-2"]
    listed = catalog.list_checkpoints(tmp_path).checkpoints
    remove(listed[0].path)
    remove_unused_frozen(tmp_path, listed)
    assert names(tmp_path), "it is referred to"
    remove_unused_frozen(tmp_path, [catalog.ListedCheckpoint(tmp_path / "x", 1, 2, Condition.UNKNOWN)])
    assert names(tmp_path), "something may refer to it"
    remove_unused_frozen(tmp_path, [])
    assert not names(tmp_path)


@pytest.mark.parametrize("place", ["folder", "store"])
def test_copy_holds_frozen_parameters_itself_and_torch_reads_it(corpus, tmp_path, request, place):
    folder = tmp_path / "job" if place == "folder" else request.getfixturevalue("bucket") / "job"
    trainer = trained(document(corpus), folder, steps=2)
    source, target = checkpoint_path(folder, 2, 1), tmp_path / "copy"
    told = []
    manifest = copy(source, target, lambda done, of: told.append((done, of)))
    assert verify(target) == manifest and manifest.frozen is None and told[-1][0] <= told[-1][1]
    frozen, spec = frozen_names(trainer.spec), trainer.spec
    state = state_by_torch(target)
    for entry in trainer.engine.model.named_shards():
        assert torch.equal(state[f"model.{entry.name}"], entry.parameter.detach()), entry.name
    again = lone(document(corpus), tmp_path / "none")
    again.restore(Resume("checkpoint", 2, str(target)))
    assert torch.equal(again.engine.flat.parameters, trainer.engine.flat.parameters)
    if place == "folder":  # of the two parts, torch reads each by itself
        assert {name for name in state_by_torch(source) if name.startswith("model.")} == {
            f"model.{name}" for name in named(trainer) - frozen
        }
        assert state_by_torch(frozen_path(folder, 1, 1)).keys() == {f"model.{name}" for name in frozen}
    assert spec.train.frozen


def named(trainer: Trainer) -> set[str]:
    return {entry.name for entry in trainer.engine.model.named_shards()}


def test_rolled_back_training_refers_to_what_a_deleted_checkpoint_has_written(corpus, tmp_path):
    trainer = trained(document(corpus), tmp_path, steps=2)
    assert len(remove_after(tmp_path, 0, 1)) == 2 and len(names(tmp_path)) == 1
    save(trainer)
    assert complete_checkpoints(tmp_path)[-1][1].frozen.folder == frozen_path(tmp_path, 1, 1).name


def test_frozen_parameters_that_cannot_be_read_fail_the_save_and_are_not_written_twice(corpus, tmp_path):
    trainer = trained(document(corpus), tmp_path)
    files = type(files_of(tmp_path))
    read = files.read

    def away(self: Any, file: Path) -> bytes:
        if file.parent.name.startswith("frozen"):
            raise PermissionError(13, "Permission denied")
        return read(self, file)

    trainer.train_step()
    with patch.object(files, "read", away):
        save(trainer)
    assert "Permission denied" in trainer.state.checkpoints.failure
    save(trainer)
    assert trainer.state.checkpoints.failure is None and len(names(tmp_path)) == 1
