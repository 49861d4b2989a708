"""Pruning deletes what newer checkpoints of the same training replace, and nothing else."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.checkpoint import pruning
from workers.checkpoint.catalog import MANIFEST, Condition, ListedCheckpoint, Listing, Manifest, checkpoint_path, seal
from workers.checkpoint.pruning import prune, remove_after, remove_newer, to_prune, to_undo
from workers.storage.local_files import LocalFiles

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
    return [each for each in listed if each.condition is Condition.WHOLE]


@given(listed, keep, generation, undoes, began)
def test_what_cannot_be_read_is_never_deleted(listed, keep, generation, undoes, began):
    deleted = [*to_prune(listed, keep, generation, undoes, began), *to_undo(listed, 3, began)]
    assert Condition.UNKNOWN not in [each.condition for each in deleted]


@given(listed, keep, generation, undoes, began)
def test_what_cannot_be_read_is_never_counted(listed, keep, generation, undoes, began):
    readable = [each for each in listed if each.condition is not Condition.UNKNOWN or each.generation < began]
    assert to_prune(listed, keep, generation, undoes, began) == to_prune(readable, keep, generation, undoes, began)


@given(listed, keep, generation, undoes, began)
def test_nothing_is_deleted_across_a_start_from_nothing(listed, keep, generation, undoes, began):
    earlier = [each for each in listed if each.generation < began]
    deleted = to_prune(listed, keep, generation, undoes, began)
    if any(each.condition is not Condition.NOT_WHOLE for each in earlier):
        assert not [each for each in deleted if each in earlier]
    assert not [each for each in whole_ones(deleted) if each in earlier]
    assert not [each for each in to_undo(listed, 0, began) if each in earlier]


@given(listed, keep, generation, undoes, began, saved_step)
def test_newest_ones_stay_and_what_this_generation_writes_stays(listed, keep, generation, undoes, began, saved_step):
    deleted = to_prune(listed, keep, generation, undoes, began, saved_step)
    own = whole_ones([each for each in listed if each.generation >= began])
    assert not [each for each in own[-keep:] if each in deleted]
    not_whole = [each for each in deleted if each.condition is Condition.NOT_WHOLE]
    assert all((each.generation, each.step) < (generation, saved_step) for each in not_whole)


@given(listed, keep, generation)
def test_no_more_than_asked_for_are_left_where_all_can_be_read(listed, keep, generation):
    listed = [each for each in listed if each.condition is not Condition.UNKNOWN]
    left = [each for each in listed if each not in to_prune(listed, keep, generation)]
    assert len(whole_ones(left)) == min(keep, len(whole_ones(listed)))


@given(listed, keep, generation, undoes)
def test_one_from_before_what_may_be_undone_stays(listed, keep, generation, undoes):
    newest = whole_ones(listed)[-1:]
    old_enough = [each for each in whole_ones(listed) if newest and each.step <= newest[0].step - undoes]
    deleted = to_prune(listed, keep, generation, undoes)
    assert not undoes or not old_enough or [each for each in old_enough if each not in deleted]


def saved(folder: Path, step: int, generation: int, whole: bool = True) -> Path:
    path = checkpoint_path(folder, step, generation)
    path.mkdir(parents=True)
    if whole:
        seal(path, Manifest("j", generation, step, {}, {}))
    return path


@pytest.mark.parametrize("began", [0, 2])
def test_what_a_roll_back_goes_back_to_stays_and_what_it_undoes_goes(tmp_path, began):
    """Also in the generation that began at step 0 itself."""
    kept = [saved(tmp_path, 10, 1), saved(tmp_path, 20, 2)]
    undone = [saved(tmp_path, 21, 2), saved(tmp_path, 30, 2)]
    under_way = saved(tmp_path, 40, 2, whole=False)
    assert remove_after(tmp_path, 20, began) == undone
    assert sorted(tmp_path.iterdir()) == [*kept, under_way]


def test_all_that_was_made_after_one_goes_whole_or_not(tmp_path):
    kept = [saved(tmp_path, 10, 1), saved(tmp_path, 30, 1)]
    newer = [saved(tmp_path, 40, 1, whole=False), saved(tmp_path, 20, 2)]
    assert remove_newer(tmp_path, "step-00000050-generation-1") == [], "that one is not here"
    assert remove_newer(tmp_path, kept[-1].name) == newer
    assert sorted(tmp_path.iterdir()) == kept


def test_checkpoint_that_was_put_elsewhere_stays_there_when_its_link_is_pruned(tmp_path):
    newest, elsewhere = saved(tmp_path, 30, 1), tmp_path / "elsewhere"
    link = saved(tmp_path, 10, 1)
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    assert prune(tmp_path, 1, generation=1) == [link]
    assert sorted(tmp_path.iterdir()) == [elsewhere, newest] and (elsewhere / MANIFEST).exists()


def test_training_that_began_anew_leaves_what_was_there(tmp_path):
    before = [saved(tmp_path, 30, 1), saved(tmp_path, 40, 1), saved(tmp_path, 50, 1, whole=False)]
    new = [saved(tmp_path, step, 3) for step in (10, 20, 35)]
    assert prune(tmp_path, 1, generation=3, began=2) == new[:2]
    assert remove_after(tmp_path, 32, began=2) == new[2:]
    assert sorted(tmp_path.iterdir()) == before


def test_interrupted_saves_of_before_a_start_from_nothing_go_where_nothing_else_is_left(tmp_path):
    interrupted = saved(tmp_path, 50, 1, whole=False)
    new = saved(tmp_path, 10, 2)
    assert prune(tmp_path, 1, generation=2, began=2) == [interrupted]
    assert list(tmp_path.iterdir()) == [new]


def test_nothing_is_pruned_where_nothing_is(tmp_path):
    with contextlib.suppress(FileNotFoundError):
        tmp_path.rmdir()
    assert prune(tmp_path, 1, generation=2) == remove_after(tmp_path, 0) == []


def test_the_generation_that_began_at_step_0_prunes_its_own(tmp_path):
    paths = [saved(tmp_path, step, 2) for step in (10, 20)]
    assert prune(tmp_path, 1, generation=2, began=2) == paths[:1]


def test_what_this_generation_could_neither_save_nor_remove_goes_with_its_next_checkpoint(tmp_path):
    remains, _, under_way = (
        saved(tmp_path, 10, 1, whole=False),
        saved(tmp_path, 20, 1),
        saved(tmp_path, 30, 1, whole=False),
    )
    assert prune(tmp_path, 1, generation=1, step=20) == [remains]
    assert under_way.exists()


def test_the_newest_one_from_before_what_may_be_undone_is_enough(tmp_path):
    paths = [saved(tmp_path, step, 1) for step in (5, 10, 15, 17, 20)]
    assert prune(tmp_path, 1, generation=1, undoes=10) == [paths[0], paths[3]]


def test_what_cannot_be_deleted_is_not_called_deleted_and_whole_no_more(tmp_path, monkeypatch):
    paths = [saved(tmp_path, step, 1) for step in (10, 20)]
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    assert prune(tmp_path, 1, generation=1) == []
    assert sorted(tmp_path.iterdir()) == paths
    assert not (paths[0] / MANIFEST).exists() and (paths[1] / MANIFEST).exists()


def test_what_may_not_be_looked_at_is_not_called_deleted(tmp_path, monkeypatch):
    saved(tmp_path, 10, 1)
    saved(tmp_path, 20, 1)

    def refuse(self, path):
        raise PermissionError

    monkeypatch.setattr(LocalFiles, "is_there", refuse)
    assert prune(tmp_path, 1, generation=1) == []


def test_of_those_made_later_what_cannot_be_read_now_stays(tmp_path, monkeypatch):
    conditions = enumerate((Condition.WHOLE, Condition.UNKNOWN, Condition.NOT_WHOLE), start=1)
    listed = tuple(ListedCheckpoint(checkpoint_path(tmp_path, step, 1), step, 1, each) for step, each in conditions)
    for each in listed:
        each.path.mkdir()
    monkeypatch.setattr(pruning, "list_checkpoints", lambda folder: Listing(tmp_path, listed))
    assert remove_newer(tmp_path, listed[0].path.name) == [listed[2].path]
    assert [each.path.exists() for each in listed] == [True, True, False]
