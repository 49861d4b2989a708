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
from manta.service.store import IllegalTransition

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
    "PAUSING": "PAUSED CANCELLING FAILED SUCCEEDED",
    "PAUSED": "QUEUED CANCELLED",
    "CANCELLING": "CANCELLED",
    "SUCCEEDED": "",
    "FAILED": "QUEUED",
    "CANCELLED": "",
}
"""Every edge, written out a second time: one that is added or removed by mistake is seen here."""


@pytest.mark.parametrize("source", JobState)
def test_the_table_has_these_edges_and_no_others(source):
    assert set(TRANSITIONS) == set(JobState)
    assert {target.value for target in JobState if can(source, target)} == set(EDGES[source.value].split())


@given(states)
def test_every_state_reaches_a_final_one(state):
    assert reachable(state) & FINAL


@given(states)
def test_no_state_leads_to_itself(state):
    assert not can(state, state)


@given(states)
def test_every_state_but_the_first_can_be_reached_from_it(state):
    assert state in reachable(JobState.QUEUED)


def test_the_final_states_are_these_three():
    assert {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED} == FINAL
    assert {state.value for state in JobState if is_final(state)} == {"SUCCEEDED", "FAILED", "CANCELLED"}
    assert [is_final(name) for name in ("FAILED", "CANCELLING")] == [True, False]


@given(st.sampled_from(sorted(ACTIONS)), states)
def test_what_a_user_may_ask_for_follows_the_edges(action, state):
    target = after_action(action, state)
    assert target in (None, state) or can(state, target)


def test_a_user_may_cancel_until_the_job_is_over():
    legal = {state for state in JobState if after_action("cancel", state)}
    assert legal == set(JobState) - FINAL
    assert after_action("cancel", JobState.QUEUED) is JobState.CANCELLED
    assert after_action("cancel", JobState.CANCELLING) is JobState.CANCELLING, "asked for twice"


def test_a_user_may_pause_what_is_not_over_and_resume_what_is_paused():
    assert {state for state in JobState if after_action("pause", state)} == set(JobState) - FINAL - {"CANCELLING"}
    assert after_action("pause", JobState.QUEUED) is after_action("pause", JobState.PAUSED) is JobState.PAUSED
    assert after_action("pause", JobState.RESIZING) is after_action("pause", JobState.PAUSING) is JobState.PAUSING
    assert {state: after_action("resume", state) for state in JobState if after_action("resume", state)} == {
        JobState.PAUSED: JobState.QUEUED
    }


def test_somebody_owns_every_job_that_may_hold_places_and_it_leaves_in_limited_time():
    assert set(JobState) - FINAL - {JobState.QUEUED, JobState.PAUSED} == SUPERVISED
    assert set(TIME_LIMITS) == SUPERVISED - {JobState.RUNNING}
    assert min(TIME_LIMITS[JobState.PAUSING], TIME_LIMITS[JobState.RESIZING]) > SAVE_SECONDS


def test_advice_is_given_where_an_action_is_refused():
    assert all(after_action(action, state) is None for action, state in ADVICE)


def test_a_refusal_is_one_sentence_and_no_list_of_states():
    refused = [(action, state) for action in ACTIONS for state in JobState if after_action(action, state) is None]
    for action, state in refused:
        said = str(IllegalTransition("job_1", state, action=action))
        named = [each for each in JobState if re.search(rf"\b{each}\b", said)]
        assert state in named and len(named) <= 2, said
        assert re.search(r"; \w+ works only while|: ", said), said
    over = str(IllegalTransition("job_1", JobState.SUCCEEDED, action="cancel"))
    assert over == "job job_1 is SUCCEEDED: it is over, and there is nothing to cancel"


def test_the_contract_names_eleven_states_and_all_of_ours_are_among_them():
    assert len(STATE_NAMES) == len(set(STATE_NAMES)) == 11
    assert set(JobState) <= set(STATE_NAMES)


def test_a_name_that_is_no_state_is_refused():
    with pytest.raises(ValueError, match="ASLEEP"):
        is_final("ASLEEP")
