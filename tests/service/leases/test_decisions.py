"""Who may claim what, and when an owner must be still: pure functions, and what follows from them whatever happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from manta.service.leases.decisions import (
    LEASE_SECONDS,
    MARGIN_SECONDS,
    MIN_SURPLUS,
    RENEW_SECONDS,
    JobSummary,
    is_claimable,
    is_over,
    lost,
    may_order,
    strays,
    to_claim,
    to_hand_over,
)
from manta.service.states import SUPERVISED, JobState

states, owners = st.sampled_from(list(JobState)), st.sampled_from([None, "me", "other"])
briefs = st.lists(st.builds(JobSummary, st.uuids().map(str), states, st.none(), st.just(0), owners, st.integers(0, 5)))


@given(briefs, st.data(), st.integers(1, 5))
def test_only_supervised_jobs_without_a_living_owner_are_claimed(jobs, data, living):
    held = {job.id for job in jobs if job.owner == "me" and data.draw(st.booleans())}
    claimed = to_claim(jobs, held, "me", living)
    by_id = {job.id: job for job in jobs}
    assert all(by_id[job].state in SUPERVISED and by_id[job].owner != "other" for job in claimed)
    assert not held & set(claimed)
    forgotten = {job.id for job in jobs if job.owner == "me" and job.state in SUPERVISED} - held
    assert forgotten <= set(claimed)
    orphans = [job.id for job in jobs if job.owner is None and job.state in SUPERVISED]
    taken = [job for job in claimed if job in orphans]
    assert len(taken) * living >= len(orphans) >= len(taken)


def test_living_control_planes_share_the_jobs_of_a_dead_one():
    jobs = [JobSummary(str(i), JobState.RUNNING, None, 0, None, 1) for i in range(9)]
    assert [len(to_claim(jobs, (), "me", living)) for living in (1, 2, 3, 20)] == [9, 5, 3, 1]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_jobs_are_handed_over_until_all_have_about_as_many_and_then_no_more(counts):
    planes = [f"plane-{i}" for i in range(len(counts))]
    owner = {f"{plane}-{i}": plane for plane, count in zip(planes, counts, strict=True) for i in range(count)}
    for _ in range(200):
        jobs = [JobSummary(job, JobState.RUNNING, None, 0, plane, 1) for job, plane in owner.items()]
        moves = [to_hand_over(jobs, plane, planes) for plane in planes]
        if not any(moves):
            break
        for each in moves:  # all at once, none knows of the others
            owner.update(each)
    had = [sum(each == plane for each in owner.values()) for plane in planes]
    assert max(had) - min(had) < MIN_SURPLUS and sum(had) == sum(counts)


@pytest.mark.parametrize("state", JobState)
def test_only_running_jobs_of_its_own_are_handed_over(state):
    def owned_by(me):
        jobs = [JobSummary(f"{owner}-{i}", state, None, 0, owner, 1) for owner in (None, "third") for i in range(9)]
        jobs += [JobSummary(f"me-{i}", state, None, 0, me, 1) for i in range(6)]
        return to_hand_over(jobs, "me", ["me", "other"])

    assert owned_by("me") == (dict.fromkeys(["me-0", "me-1", "me-2"], "other") if state == JobState.RUNNING else {})
    assert owned_by("other") == {}


@given(st.sets(st.text()), st.sets(st.text()))
def test_lease_that_the_database_does_not_confirm_is_lost(held, confirmed):
    assert lost(held, confirmed) == held - confirmed


def test_lease_outlasts_three_failed_renewals():
    assert LEASE_SECONDS - MARGIN_SECONDS > 3 * RENEW_SECONDS


def test_no_job_is_handed_over_to_a_control_plane_that_missed_renewals():
    assert is_claimable(lease_until=1006.0, now=1000.0 + RENEW_SECONDS)
    assert not is_claimable(lease_until=1006.0, now=1000.0 + 3 * RENEW_SECONDS)


@given(briefs, st.sets(st.sampled_from("abc")))
def test_held_leases_are_strays_only_if_their_job_is_not_supervised(jobs, others):
    stray = strays({job.id for job in jobs} | others, others, jobs)
    assert stray == {job.id for job in jobs if job.state not in SUPERVISED}


class OneOrderingOwner(RuleBasedStateMachine):
    """A control plane and a rival that waits for its end. Its own clock and the database's show other times, and go on
    alike; it may stand still at any moment, and renewals take time both ways."""

    def __init__(self):
        super().__init__()
        self.time, self.offset = 0.0, 1000.0
        self.lease_until, self.requested_at, self.taken = self.offset + LEASE_SECONDS, 0.0, False

    @rule(seconds=st.floats(0.0, 2 * LEASE_SECONDS))
    def time_passes(self, seconds):
        self.time += seconds

    @rule(there=st.floats(0.0, 10.0), back=st.floats(0.0, 10.0))
    def renews(self, there, back):
        requested_at = self.time
        self.time += there
        self.rival_looks()
        answered = not self.taken
        if answered:
            self.lease_until = self.time + self.offset + LEASE_SECONDS
        self.time += back
        if answered:
            self.requested_at = requested_at

    @rule()
    def rival_looks(self):
        self.taken = self.taken or is_over(self.lease_until, self.time + self.offset)

    @invariant()
    def no_order_is_given_once_another_may_have_taken_over(self):
        if may_order(self.requested_at, self.time):
            assert not self.taken
            assert not is_over(self.lease_until, self.time + MARGIN_SECONDS + self.offset)


TestOneOrderingOwner = OneOrderingOwner.TestCase
