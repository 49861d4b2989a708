"""What disk and database say about checkpoints together, and from which beginning a state descends."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.recovery.durable_state import (
    FIRST_HOLD_SECONDS,
    LONGEST_HOLD_SECONDS,
    CheckpointsUnreadable,
    beginning_of,
    durable_state,
    hold_seconds,
)
from workers.checkpoint.catalog import Condition, ListedCheckpoint, Listing, Manifest, checkpoint_path
from workers.protocol.messages import Resume

FOLDER = Path("/c")


def path_of(step, generation=1):
    return str(checkpoint_path(FOLDER, step, generation))


def row(step, generation=1):
    return SimpleNamespace(step=step, generation=generation, path=path_of(step, generation))


def stored(step, condition, generation=1):
    manifest = Manifest("j", generation, step, {}, {}) if condition is Condition.WHOLE else None
    return ListedCheckpoint(Path(path_of(step, generation)), step, generation, condition, manifest, "a problem")


@given(st.sets(st.integers(0, 9), max_size=6), st.data())
def test_what_is_whole_or_cannot_be_read_counts(steps, data):
    there = [stored(step, data.draw(st.sampled_from(Condition))) for step in sorted(steps)]
    state = durable_state(Listing(FOLDER, tuple(there)), [row(step) for step in steps])
    counted = [each for each in there if each.condition is not Condition.NOT_WHOLE]
    assert state.checkpoints == tuple((each.step, str(each.path)) for each in counted)
    assert set(state.unknown) == {str(each.path) for each in there if each.condition is Condition.UNKNOWN}


def test_folder_that_is_not_there_makes_all_that_was_saved_unknown():
    state = durable_state(Listing(FOLDER, exists=False), [row(10), row(5, 2)])
    assert [step for step, _ in state.checkpoints] == [10, 5], "in the order of their making"
    with pytest.raises(
        CheckpointsUnreadable, match=r"step 5, .*: the folder /c is not there\. .* `manta cancel job_1`"
    ):
        state.refuse_unknown("job_1", Resume("checkpoint", 5, path_of(5, 2)))
    state.refuse_unknown("job_1", Resume("snapshot", 5))
    assert durable_state(Listing(FOLDER, exists=False), []).checkpoints == ()


def test_looks_are_further_and_further_apart():
    waits = [hold_seconds(holds) for holds in range(100)]
    assert (waits[0], waits[-1], waits == sorted(waits)) == (FIRST_HOLD_SECONDS, LONGEST_HOLD_SECONDS, True)


def test_job_may_be_held_for_years():
    assert hold_seconds(10**7) == LONGEST_HOLD_SECONDS


def lives(*sources):
    """Generations by what each resumed from: a source, or the path of a checkpoint."""
    return [
        SimpleNamespace(
            generation=number,
            resume_source="checkpoint" if source.startswith("/") else source,
            data={"resume_path": source if source.startswith("/") else None},
        )
        for number, source in enumerate(sources, start=1)
    ]


@pytest.mark.parametrize(("before", "resume", "began"), [
    ([], Resume(), 0),
    (["start"], Resume(), 0),
    (["start"], Resume("snapshot", 3), 1),
    (["start", "snapshot", "memory"], Resume("snapshot", 3), 1),
    (["start", "snapshot", "start", "snapshot"], Resume("memory", 3), 3),
    (["start", "start", "snapshot"], Resume("checkpoint", 5, path_of(5, 1)), 1),
    (["start", "start", path_of(5, 1)], Resume("snapshot", 7), 1),
    (["start", "start", path_of(5, 2)], Resume("snapshot", 7), 2),
    (["start", "/elsewhere"], Resume("snapshot", 7), 0),
])  # fmt: skip
def test_beginning_from_which_a_state_descends(before, resume, began):
    assert beginning_of(resume, lives(*before)) == began


@given(st.lists(st.sampled_from(["start", "snapshot", *(path_of(5, g) for g in range(1, 9))]), max_size=8))
def test_beginning_is_always_found_or_unknown(sources):
    before = lives(*sources)
    began = beginning_of(Resume("snapshot", 3), before)
    assert began == 0 or before[began - 1].resume_source == "start"
