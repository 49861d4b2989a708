"""The job state machine has no dead ends, one way back from the end, which only users take, and known names."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.job.leave import SAVE_SECONDS
from manta.service.states import (
    ACTIONS,
    ADVICE,
    FINAL,
    STATE_NAMES,
    SUPERVISED,
    TIME_LIMITS,
    TRANSITIONS,
    JobState,
    after_action,
    can,
    is_final,
)
from manta.service.store.errors import IllegalTransition

states = st.sampled_from(JobState)


def reachable(state: JobState) -> set[JobState]:
    seen, frontier = {state}, [state]
    while frontier:
        for following in TRANSITIONS[frontier.pop()] - seen:
            seen.add(following)
            frontier.append(following)
    return seen


EDGES = {
    "QUEUED": "STARTING PAUSED CANCELLED FAILED",
    "STARTING": "RUNNING RECOVERING QUEUED PAUSING CANCELLING FAILED SUCCEEDED",
    "RUNNING": "RECOVERING RESIZING PAUSING CANCELLING SUCCEEDED FAILED",
    "RECOVERING": "RUNNING RESIZING QUEUED PAUSING CANCELLING FAILED SUCCEEDED",
    "RESIZING": "RUNNING RECOVERING QUEUED PAUSING CANCELLING FAILED SUCCEEDED",
    "PAUSING": "PAUSED CANCELLING FAILED SUCCEEDED", "PAUSED": "QUEUED CANCELLED", "CANCELLING": "CANCELLED",
    "SUCCEEDED": "", "FAILED": "QUEUED", "CANCELLED": "",
}  # fmt: skip
"""Every edge, written out a second time: one that is added or removed by mistake is seen here."""


@pytest.mark.parametrize("source", JobState)
def test_job_states_have_exactly_the_listed_transitions(source):
    assert set(TRANSITIONS) == set(JobState)
    assert {target.value for target in JobState if can(source, target)} == set(EDGES[source.value].split())


@given(states)
def test_job_state_always_reaches_a_final_one(state):
    assert reachable(state) & FINAL


@given(states)
def test_job_state_never_leads_to_itself(state):
    assert not can(state, state)


@given(states)
def test_job_states_are_all_reachable_from_queued(state):
    assert state in reachable(JobState.QUEUED)


def test_final_job_states_are_succeeded_failed_and_cancelled():
    assert {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED} == FINAL
    assert {state.value for state in JobState if is_final(state)} == {"SUCCEEDED", "FAILED", "CANCELLED"}
    assert [is_final(name) for name in ("FAILED", "CANCELLING")] == [True, False]


@given(st.sampled_from(sorted(ACTIONS)), states)
def test_user_actions_follow_the_job_state_transitions(action, state):
    target = after_action(action, state)
    assert target in (None, state) or can(state, target)


def test_job_can_be_cancelled_until_it_is_final():
    legal = {state for state in JobState if after_action("cancel", state)}
    assert legal == set(JobState) - FINAL
    assert after_action("cancel", JobState.QUEUED) is JobState.CANCELLED
    assert after_action("cancel", JobState.CANCELLING) is JobState.CANCELLING, "asked for twice"


def test_job_can_be_paused_until_final_and_resumed_when_paused():
    assert {state for state in JobState if after_action("pause", state)} == set(JobState) - FINAL - {"CANCELLING"}
    assert after_action("pause", JobState.QUEUED) is after_action("pause", JobState.PAUSED) is JobState.PAUSED
    assert after_action("pause", JobState.RESIZING) is after_action("pause", JobState.PAUSING) is JobState.PAUSING
    assert {state: after_action("resume", state) for state in JobState if after_action("resume", state)} == {
        JobState.PAUSED: JobState.QUEUED
    }


def test_job_states_that_hold_places_are_supervised_and_limited_in_time():
    assert set(JobState) - FINAL - {JobState.QUEUED, JobState.PAUSED} == SUPERVISED
    assert set(TIME_LIMITS) == SUPERVISED - {JobState.RUNNING}
    assert min(TIME_LIMITS[JobState.PAUSING], TIME_LIMITS[JobState.RESIZING]) > SAVE_SECONDS


def test_advice_on_job_states_is_given_only_for_refused_actions():
    assert all(after_action(action, state) is None for action, state in ADVICE)


def test_refused_action_is_one_sentence_without_a_list_of_states():
    refused = [(action, state) for action in ACTIONS for state in JobState if after_action(action, state) is None]
    for action, state in refused:
        said = str(IllegalTransition("job_1", state, action=action))
        named = [each for each in JobState if re.search(rf"\b{each}\b", said)]
        assert state in named and len(named) <= 2, said
        assert re.search(r"; \w+ works only while|: ", said), said
    over = str(IllegalTransition("job_1", JobState.SUCCEEDED, action="cancel"))
    assert over == "job_1 is SUCCEEDED: it has ended, and there is nothing to cancel"


def test_documented_job_states_are_eleven_and_include_all_of_ours():
    assert len(STATE_NAMES) == len(set(STATE_NAMES)) == 11
    assert set(JobState) <= set(STATE_NAMES)


def test_unknown_job_state_is_refused():
    with pytest.raises(ValueError, match="ASLEEP"):
        is_final("ASLEEP")
