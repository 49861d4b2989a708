"""Pruning deletes what newer checkpoints of the same training replace, and nothing else."""

from __future__ import annotations

import contextlib
import shutil
from unittest.mock import Mock

import pytest
from checkpoint_files import saved
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.checkpoint import pruning
from manta.workers.checkpoint.catalog import (
    MANIFEST,
    Condition,
    ListedCheckpoint,
    Listing,
    checkpoint_path,
)
from manta.workers.checkpoint.pruning import prune, remove_after, remove_newer, to_prune, to_undo
from manta.workers.storage.files import LocalFiles

names = st.tuples(st.integers(1, 6), st.integers(0, 12))
"""(Generation, step)."""


@st.composite
def folders(draw: st.DrawFn) -> list[ListedCheckpoint]:
    """What a folder may hold, in the order of making."""
    drawn = []
    for generation, step in sorted(draw(st.sets(names, max_size=12))):
        path = checkpoint_path("/c", step, generation)
        drawn.append(ListedCheckpoint(path, step, generation, draw(st.sampled_from(Condition))))
    return drawn


listed, keep, generation = folders(), st.integers(1, 4), st.integers(1, 6)
saved_step = st.integers(0, 12)
undoes, began = st.integers(0, 8), st.integers(0, 6)


def whole_ones(listed: list[ListedCheckpoint]) -> list[ListedCheckpoint]:
    return [each for each in listed if each.condition is Condition.COMPLETE]


@given(listed, keep, generation, undoes, began)
def test_unreadable_checkpoint_is_never_deleted(listed, keep, generation, undoes, began):
    deleted = [*to_prune(listed, keep, generation, undoes, began), *to_undo(listed, 3, began)]
    assert Condition.UNKNOWN not in [each.condition for each in deleted]


@given(listed, keep, generation, undoes, began)
def test_unreadable_checkpoint_does_not_count_towards_those_kept(listed, keep, generation, undoes, began):
    readable = [each for each in listed if each.condition is not Condition.UNKNOWN or each.generation < began]
    assert to_prune(listed, keep, generation, undoes, began) == to_prune(readable, keep, generation, undoes, began)


@given(listed, keep, generation, undoes, began)
def test_no_whole_checkpoint_from_before_a_start_from_scratch_is_deleted(listed, keep, generation, undoes, began):
    earlier = [each for each in listed if each.generation < began]
    deleted = to_prune(listed, keep, generation, undoes, began)
    if any(each.condition is not Condition.INCOMPLETE for each in earlier):
        assert not [each for each in deleted if each in earlier]
    assert not [each for each in whole_ones(deleted) if each in earlier]
    assert not [each for each in to_undo(listed, 0, began) if each in earlier]


@given(listed, keep, generation, undoes, began, saved_step)
def test_newest_checkpoints_and_saves_under_way_are_not_pruned(listed, keep, generation, undoes, began, saved_step):
    deleted = to_prune(listed, keep, generation, undoes, began, saved_step)
    own = whole_ones([each for each in listed if each.generation >= began])
    assert not [each for each in own[-keep:] if each in deleted]
    not_whole = [each for each in deleted if each.condition is Condition.INCOMPLETE]
    assert all((each.generation, each.step) < (generation, saved_step) for each in not_whole)


@given(listed, keep, generation)
def test_pruning_keeps_exactly_the_number_asked_for_if_all_checkpoints_are_readable(listed, keep, generation):
    listed = [each for each in listed if each.condition is not Condition.UNKNOWN]
    left = [each for each in listed if each not in to_prune(listed, keep, generation)]
    assert len(whole_ones(left)) == min(keep, len(whole_ones(listed)))


@given(listed, keep, generation, undoes)
def test_pruning_leaves_a_checkpoint_that_a_roll_back_cannot_undo(listed, keep, generation, undoes):
    newest = whole_ones(listed)[-1:]
    old_enough = [each for each in whole_ones(listed) if newest and each.step <= newest[0].step - undoes]
    deleted = to_prune(listed, keep, generation, undoes)
    assert not undoes or not old_enough or [each for each in old_enough if each not in deleted]


@pytest.mark.parametrize("began", [0, 2])
def test_roll_back_keeps_the_checkpoint_it_returns_to_and_removes_later_ones(tmp_path, began):
    """Also in the generation that began at step 0 itself."""
    kept = [saved(tmp_path, 10, 1), saved(tmp_path, 20, 2)]
    undone = [saved(tmp_path, 21, 2), saved(tmp_path, 30, 2)]
    under_way = saved(tmp_path, 40, 2, whole=False)
    assert remove_after(tmp_path, 20, began) == undone
    assert sorted(tmp_path.iterdir()) == [*kept, under_way]


def test_remove_newer_removes_all_checkpoints_made_later_whole_or_not(tmp_path):
    kept = [saved(tmp_path, 10, 1), saved(tmp_path, 30, 1)]
    newer = [saved(tmp_path, 40, 1, whole=False), saved(tmp_path, 20, 2)]
    assert remove_newer(tmp_path, "step-00000050-generation-1") == [], "that one is not here"
    assert remove_newer(tmp_path, kept[-1].name) == newer
    assert sorted(tmp_path.iterdir()) == kept


def test_pruning_a_linked_checkpoint_removes_the_link_and_not_its_target(tmp_path):
    newest, elsewhere = saved(tmp_path, 30, 1), tmp_path / "elsewhere"
    link = saved(tmp_path, 10, 1)
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    assert prune(tmp_path, 1, generation=1) == [link]
    assert sorted(tmp_path.iterdir()) == [elsewhere, newest] and (elsewhere / MANIFEST).exists()


def test_training_begun_from_scratch_leaves_earlier_checkpoints(tmp_path):
    before = [saved(tmp_path, 30, 1), saved(tmp_path, 40, 1), saved(tmp_path, 50, 1, whole=False)]
    new = [saved(tmp_path, step, 3) for step in (10, 20, 35)]
    assert prune(tmp_path, 1, generation=3, began=2) == new[:2]
    assert remove_after(tmp_path, 32, began=2) == new[2:]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("there", "options", "pruned"),
    [
        ([(10, 2), (20, 2)], {"keep": 1, "generation": 2, "began": 2}, [0]),  # begun at step 0, its own
        ([(10, 1, False), (20, 1), (30, 1, False)], {"keep": 1, "generation": 1, "step": 20}, [0]),  # 30 is under way
        ([(5, 1), (10, 1), (15, 1), (17, 1), (20, 1)], {"keep": 1, "generation": 1, "undoes": 10}, [0, 3]),
        ([(50, 1, False), (10, 2)], {"keep": 1, "generation": 2, "began": 2}, [0]),  # no earlier training is left
        ([(10, 1), (20, 1, False), (30, 2), (30, 3), (40, 3, False)], {"keep": 2, "generation": 3}, [0, 1]),
    ],
)
def test_pruning_deletes_what_newer_checkpoints_replace(tmp_path, there, options, pruned):
    paths = [saved(tmp_path, *each) for each in there]
    (tmp_path / "notes").mkdir()
    assert prune(tmp_path, **options) == [paths[number] for number in pruned]
    left = [path for number, path in enumerate(paths) if number not in pruned]
    assert set(tmp_path.iterdir()) == {*left, tmp_path / "notes"}


def test_pruning_a_folder_that_does_not_exist_removes_nothing(tmp_path):
    with contextlib.suppress(FileNotFoundError):
        tmp_path.rmdir()
    assert prune(tmp_path, 1, generation=2) == remove_after(tmp_path, 0) == []


def test_checkpoint_that_cannot_be_deleted_loses_its_manifest_and_is_not_reported(tmp_path, monkeypatch):
    paths = [saved(tmp_path, step, 1) for step in (10, 20)]
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    assert prune(tmp_path, 1, generation=1) == []
    assert sorted(tmp_path.iterdir()) == paths
    assert not (paths[0] / MANIFEST).exists() and (paths[1] / MANIFEST).exists()


def test_checkpoint_whose_deletion_cannot_be_verified_is_not_reported(tmp_path, monkeypatch):
    saved(tmp_path, 10, 1)
    saved(tmp_path, 20, 1)
    monkeypatch.setattr(LocalFiles, "is_there", Mock(side_effect=PermissionError))
    assert prune(tmp_path, 1, generation=1) == []


def test_remove_newer_keeps_later_checkpoints_that_cannot_be_read(tmp_path, monkeypatch):
    conditions = enumerate((Condition.COMPLETE, Condition.UNKNOWN, Condition.INCOMPLETE), start=1)
    listed = tuple(ListedCheckpoint(checkpoint_path(tmp_path, step, 1), step, 1, each) for step, each in conditions)
    for each in listed:
        each.path.mkdir()
    monkeypatch.setattr(pruning, "list_checkpoints", lambda folder: Listing(tmp_path, listed))
    assert remove_newer(tmp_path, listed[0].path.name) == [listed[2].path]
    assert [each.path.exists() for each in listed] == [True, True, False]
