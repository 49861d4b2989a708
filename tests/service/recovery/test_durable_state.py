"""What disk and database say about checkpoints together, and from which beginning a state descends."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.recovery.durable_state import (
    INITIAL_HOLD_SECONDS,
    MAX_HOLD_SECONDS,
    CheckpointsUnreadable,
    beginning_of,
    durable_state,
    hold_seconds,
)
from manta.workers.checkpoint.catalog import Condition, ListedCheckpoint, Listing, Manifest, checkpoint_path
from manta.workers.protocol.messages import Resume

FOLDER = Path("/c")


def path_of(step, generation=1):
    return str(checkpoint_path(FOLDER, step, generation))


def row(step, generation=1):
    return SimpleNamespace(step=step, generation=generation, path=path_of(step, generation))


def stored(step, condition, generation=1):
    manifest = Manifest("j", generation, step, {}, {}) if condition is Condition.COMPLETE else None
    return ListedCheckpoint(Path(path_of(step, generation)), step, generation, condition, manifest, "a problem")


@given(st.sets(st.integers(0, 9), max_size=6), st.data())
def test_durable_state_counts_whole_and_unreadable_checkpoints(steps, data):
    there = [stored(step, data.draw(st.sampled_from(Condition))) for step in sorted(steps)]
    state = durable_state(Listing(FOLDER, tuple(there)), [row(step) for step in steps])
    counted = [each for each in there if each.condition is not Condition.INCOMPLETE]
    assert state.checkpoints == tuple((each.step, str(each.path)) for each in counted)
    assert set(state.unknown) == {str(each.path) for each in there if each.condition is Condition.UNKNOWN}


def test_durable_state_of_a_missing_folder_is_unknown():
    state = durable_state(Listing(FOLDER, exists=False), [row(10), row(5, 2)])
    assert [step for step, _ in state.checkpoints] == [10, 5], "in the order of their making"
    with pytest.raises(CheckpointsUnreadable, match=r"step 5, .*: the folder /c is not there\. .* manta cancel job_1"):
        state.refuse_unknown("job_1", Resume("checkpoint", 5, path_of(5, 2)))
    state.refuse_unknown("job_1", Resume("snapshot", 5))
    assert durable_state(Listing(FOLDER, exists=False), []).checkpoints == ()


def test_durable_state_counts_a_save_in_progress_as_possibly_newest():
    listing = Listing(FOLDER, (stored(4, Condition.COMPLETE), stored(5, Condition.UNKNOWN)))
    state = durable_state(listing, [row(4)], [row(5)])
    assert (state.checkpoints, state.unreported) == (((4, path_of(4)), (5, path_of(5))), {path_of(5)})
    with pytest.raises(
        CheckpointsUnreadable, match=r"step 5, .*: whether its save was completed is unknown, a problem"
    ):
        state.refuse_unknown("job_1", Resume("checkpoint", 5, path_of(5)))
    assert durable_state(Listing(FOLDER, problem="no answer"), [], [row(5)]).unknown.keys() == {path_of(5)}
    for known in (Condition.COMPLETE, Condition.INCOMPLETE):
        assert not durable_state(Listing(FOLDER, (stored(5, known),)), [], [row(5)]).unreported
    assert durable_state(Listing(FOLDER, exists=False), [], [row(5)]).checkpoints == (), "it had not made its folder"


def test_durable_state_error_says_if_no_state_is_in_memory():
    state = durable_state(Listing(FOLDER, problem="no answer in 20 s"), [row(5)])
    for has_snapshots in (True, False):
        with pytest.raises(CheckpointsUnreadable) as caught:
            state.refuse_unknown("job_1", Resume("checkpoint", 5, path_of(5)), has_snapshots)
        said = "of step 5 (with checkpoint.snapshots: off no state is in memory), which" in str(caught.value)
        assert said is not has_snapshots


def test_durable_state_error_advises_an_older_checkpoint_only_if_readable():
    advice = "; to continue from an older checkpoint instead, delete its folder"
    for older, advised in ((Condition.COMPLETE, True), (Condition.UNKNOWN, False), (Condition.INCOMPLETE, False)):
        listing = Listing(FOLDER, (stored(4, older), stored(5, Condition.UNKNOWN)))
        state = durable_state(listing, [row(4), row(5)])
        with pytest.raises(CheckpointsUnreadable) as caught:
            state.refuse_unknown("job_1", Resume("checkpoint", 5, path_of(5)))
        assert (advice in str(caught.value)) is advised
        if older is Condition.COMPLETE:
            state.refuse_unknown("job_1", Resume("checkpoint", 4, path_of(4)))


def test_durable_state_lists_a_checkpoint_once_despite_several_rows():
    state = durable_state(Listing(FOLDER, (stored(4, Condition.COMPLETE),)), [row(4), row(4)])
    assert (state.checkpoints, state.unknown) == (((4, path_of(4)),), {})


def test_hold_pauses_double_up_to_the_longest_even_after_millions_of_holds():
    waits = [hold_seconds(holds) for holds in range(100)]
    assert [seconds / INITIAL_HOLD_SECONDS for seconds in waits[:4]] == [1, 2, 4, 8]
    assert waits == sorted(waits) and waits[-1] == hold_seconds(10**7) == MAX_HOLD_SECONDS


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
def test_beginning_of_a_state_is_found_through_its_generations(before, resume, began):
    assert beginning_of(resume, lives(*before)) == began


@pytest.mark.parametrize("data", [None, {}])
def test_beginning_of_a_checkpoint_without_a_path_is_that_of_the_generation_before(data):
    before = lives("start", "start", "checkpoint")
    before[-1].data = data
    assert beginning_of(Resume("snapshot", 7), before) == 2


@given(st.lists(st.sampled_from(["start", "snapshot", *(path_of(5, g) for g in range(1, 9))]), max_size=8))
def test_beginning_of_a_state_is_a_start_or_unknown(sources):
    before = lives(*sources)
    began = beginning_of(Resume("snapshot", 3), before)
    assert began == 0 or before[began - 1].resume_source == "start"
