"""What is decided after a failure, for every failure; how often a job may fail, how long it waits: pure functions."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.recovery.decisions import (
    AVOID_FAILURES,
    AVOID_SECONDS,
    INITIAL_WAIT_SECONDS,
    MAX_WAIT_SECONDS,
    NOT_SAVED,
    SKEW_SECONDS,
    SUSPECTED,
    UNREADABLE,
    Death,
    GiveUp,
    PastFailure,
    Restart,
    avoided_nodes,
    choose_resume,
    count_by_kind,
    culprit_of,
    decide,
    describe_exit,
    failure_of,
    past_failures,
    recurs,
    snapshot_source,
    unusable_sources,
    wait_seconds,
    within,
)
from manta.workers.errors import FAILURE_KINDS
from manta.workers.protocol.messages import Resume

KINDS = tuple(FAILURE_KINDS)
steps_of_ranks = st.lists(st.sets(st.integers(0, 6), max_size=2), max_size=4)
checkpoint_steps = st.lists(st.integers(0, 8), unique=True, max_size=4).map(sorted)
deaths = st.lists(st.builds(Death, rank=st.integers(0, 7), kind=st.sampled_from(KINDS)), min_size=1, max_size=8)
SURVIVED_KINDS = ("killed", "agent_lost", "hung", "exception", "bad_checkpoint", "peer_lost")
failures = st.builds(
    PastFailure,
    kind=st.sampled_from(SURVIVED_KINDS),
    at=st.floats(0, 10_000),
    step=st.one_of(st.none(), st.integers(1, 20)),
    exception=st.sampled_from([None, "ValueError", "KeyError"]),
    node=st.sampled_from([None, "a", "b", "c"]),
    committed=st.integers(0, 20),
    progressed=st.booleans(),
)
histories = st.lists(failures, max_size=20)


def paths_of(steps):
    return [(step, f"step-{step}") for step in steps]


@given(steps_of_ranks, checkpoint_steps, st.sets(st.sampled_from(["snapshot", *(f"step-{s}" for s in range(9))])))
def test_resume_is_the_newest_state_that_all_ranks_can_reach(snapshots, saved, unusable):
    common = set.intersection(*snapshots) if snapshots and "snapshot" not in unusable else set()
    usable = {step for step, path in paths_of(saved) if path not in unusable}
    chosen = choose_resume(snapshots, paths_of(saved), unusable)
    assert chosen.step == max(common | usable, default=0)
    if chosen.source == "snapshot":
        assert chosen.path is None
        assert all(chosen.step in steps for steps in snapshots)
    elif chosen.source == "checkpoint":
        assert chosen.path == f"step-{chosen.step}"
        assert chosen.path not in unusable
        assert chosen.step not in common, "a snapshot of the same step is nearer"
    else:
        assert not common | usable


OTHERS = [(6, ["a", "b"])]


@pytest.mark.parametrize(("snapshots", "saved", "unusable", "others", "source", "step"), [
    ([[4, 5], [4, 5]], [3], [snapshot_source(5)], (), "snapshot", 4),
    ([[5], [4, 5]], [3], [snapshot_source(5)], (), "checkpoint", 3),
    ([[4, 5], []], [3], (), (), "checkpoint", 3),
    ([[4, 5], []], [], (), (), "start", 0),
    ([[4, 5], [5, 6]], [], (), (), "snapshot", 5),
    ([[4, 5], [5]], [3], (), OTHERS, "memory", 6),
    ([[5, 6], [6]], [], (), OTHERS, "snapshot", 6),  # of one step the nearer one
    ([[], []], [7], (), OTHERS, "checkpoint", 7),
    ([[], []], [6], (), OTHERS, "memory", 6),
    ([[4], [4]], [], [snapshot_source(6)], OTHERS, "snapshot", 4),
    ([[6], [6]], [3], ["snapshot"], [(7, ["a"])], "checkpoint", 3),
])  # fmt: skip
def test_resume_source_is_the_nearest_with_the_newest_usable_step(snapshots, saved, unusable, others, source, step):
    chosen = choose_resume(snapshots, paths_of(saved), unusable, others)
    assert (chosen.source, chosen.step) == (source, step)
    assert chosen.source != "memory" or chosen.paths == ("a", "b")


@given(deaths)
def test_culprit_is_the_first_death_that_is_no_consequence(gang_deaths):
    culprit = culprit_of(gang_deaths)
    guilty = [death for death in gang_deaths if death.kind not in ("peer_lost", "stopped")]
    lost = [death for death in gang_deaths if death.kind == "peer_lost"]
    assert culprit == [*guilty, *lost, *gang_deaths][0]


def test_sentence_of_a_rank_whose_message_is_one_is_read_as_such():
    damaged = Death(1, "bad_checkpoint", 1, "DamagedCheckpoint", "the snapshot file /f is damaged at byte 9")
    assert damaged.sentence == "rank 1 failed: the snapshot file /f is damaged at byte 9"


def died(**changes):
    known = {
        "rank": 2, "kind": "exception", "step": 7, "exception": "ValueError", "message": "failed", "traceback": "T",
    }  # fmt: skip
    return Death(**{**known, **changes})


def failure(death, **changes):
    return replace(failure_of(death, at=100.0, committed=(death.step or 1) - 1, progressed=True), **changes)


def judge(death, history=(), max_restarts=20, window=0.0):
    return decide(death, failure(death), history, max_restarts, window)


def test_exception_recurring_at_one_step_is_given_up_as_user_error():
    killed = PastFailure("killed", 50.0, committed=6)
    decision = judge(died(), [failure(died(rank=0)), killed])
    assert isinstance(decision, GiveUp)
    assert decision.reason == "user_error"
    assert decision.message.endswith("\nT")


def test_exception_at_another_step_or_of_another_kind_is_restarted():
    for before in (died(step=6), died(exception="KeyError"), died(kind="killed", exception=None)):
        assert isinstance(judge(died(), [failure(before)]), Restart)
    assert isinstance(judge(died()), Restart)


KILLED = Death(1, "killed", message="was killed by SIGKILL")


@given(st.integers(0, 5), st.integers(0, 5))
def test_kills_are_survived_as_often_as_restarts_are_allowed(before, allowed):
    decision = judge(KILLED, [failure(KILLED)] * before, allowed)
    if before < allowed:
        assert decision == Restart("rank 1 was killed by SIGKILL")
    else:
        assert isinstance(decision, GiveUp)
        assert decision.reason == "restarts_exhausted"
        assert f"restarted {before} times" in decision.message


def test_restart_budget_refills_over_time():
    old, new = failure(KILLED, at=10.0), failure(KILLED, at=90.0)
    assert isinstance(judge(KILLED, [old, old, new], 2, 50.0), Restart)
    decision = judge(KILLED, [old, new, new], 2, 50.0)
    assert decision == GiveUp(
        "restarts_exhausted", "restarted 2 times in 50 s (2 killed); last failure: rank 1 was killed by SIGKILL"
    )


def test_give_up_message_names_restarts_and_the_last_failure():
    assert judge(KILLED, [], 0, 50.0).message == "restarted 0 times; last failure: rank 1 was killed by SIGKILL"
    assert judge(KILLED, [failure(KILLED)], 1).message.startswith("restarted 1 times (1 killed); last failure: ")
    assert judge(died(kind="hung"), [], 0).message == "restarted 0 times; last failure: rank 2 failed at step 7\nT"


@pytest.mark.parametrize("kind", [UNREADABLE, "unreadable_data", "node_exhausted"])
def test_waiting_for_data_or_nodes_is_never_given_up(kind):
    waits = Death(0, kind, step=7, exception="E", message="not now")
    assert isinstance(judge(waits, [failure(KILLED)] * 3, 3), Restart)
    assert isinstance(judge(waits, [failure(waits, progressed=False)] * 9, 3), Restart), "nor twice at the same step"


def test_unsaved_last_checkpoint_is_retried_until_steps_would_be_repeated():
    unsaved = Death(0, NOT_SAVED, message="the last checkpoint could not be saved")
    tries = [failure(unsaved, progressed=False)] * 9
    assert decide(unsaved, tries[0], tries, 3, 0.0) == Restart(unsaved.sentence, MAX_WAIT_SECONDS)
    assert isinstance(judge(KILLED, [failure(KILLED), *tries], 2), Restart)
    assert isinstance(judge(unsaved, [failure(unsaved)] * 3, 3), GiveUp)


def test_failure_without_progress_restarts_after_a_wait_and_counts():
    assert judge(KILLED, [failure(KILLED)] * 3).wait_seconds == 0
    again = decide(KILLED, failure(KILLED, progressed=False), [failure(KILLED)], 20, 0.0)
    assert again == Restart("rank 1 was killed by SIGKILL", INITIAL_WAIT_SECONDS)
    idle = failure(KILLED, progressed=False)
    assert isinstance(decide(KILLED, idle, [idle] * 3, 3, 0.0), GiveUp), "and counts"


def test_failure_time_is_what_the_agent_saw_but_never_in_the_future():
    assert failure_of(KILLED, 100.0, 3, True).at == 100.0
    assert failure_of(replace(KILLED, at=99.5), 100.0, 3, True).at == 99.5
    assert failure_of(replace(KILLED, at=120.0), 100.0, 3, True).at == 100.0


def test_failure_that_no_restart_cures_is_given_up_with_its_own_message():
    for kind in ("no_shared_memory", "bad_data", "bad_model", "not_finite", "spike"):
        assert judge(died(kind=kind, message="why")) == GiveUp(kind, "why")


def test_process_exit_is_described_in_words():
    assert describe_exit(None, 9).startswith("was killed (SIGKILL: out of memory, unless a user sent the signal")
    assert describe_exit(None, 9, 0) == "was killed (SIGKILL; not the OOM killer)"
    assert describe_exit(None, 9, 1).endswith(
        "SIGKILL: out of memory; the OOM killer has ended a process of its machine since it started)"
    )
    assert "has ended 3 processes of" in describe_exit(None, 9, 3)
    assert describe_exit(None, 11, 3) == "was killed (SIGSEGV)"
    assert describe_exit(None, 7).startswith("was killed (SIGBUS: a file that it maps, of weights or in /dev/shm")
    assert describe_exit(None, 250) == "was killed (signal 250)"
    assert describe_exit(3, None) == "exited with code 3"
    assert describe_exit(None, None) == "is gone"


def life(path=None, failure=None, stepped=False, step=4):
    """A generation as its row tells it."""
    data = {"resume_path": path, "failure": None if failure is None else {"kind": failure}}
    return SimpleNamespace(first_step_at=1.0 if stepped else None, resume_step=step, data=data)


def test_unreadable_checkpoint_stays_unusable_for_later_resumes():
    lives = [life(stepped=True), life("/c/2", "killed"), life("/c/1", "bad_checkpoint"), life("/c/1", "killed")]
    assert unusable_sources(lives, "killed") == {"/c/2"}
    assert unusable_sources(lives, "bad_checkpoint") == {"/c/2", "/c/1"}
    assert unusable_sources([*lives, life(stepped=True, failure="killed")], None) == {"/c/2"}


def test_checkpoint_that_the_system_did_not_give_out_is_tried_again_and_never_given_up():
    lives = [life(stepped=True), life("/c/2", UNREADABLE)]
    assert unusable_sources(lives, UNREADABLE) == set()
    unread = Death(0, UNREADABLE, message="cannot read the checkpoint")
    history = [failure(unread, progressed=False)] * 30
    decision = decide(unread, failure(unread, progressed=False), history, 3, 0.0)
    assert decision == Restart("rank 0 cannot read the checkpoint", MAX_WAIT_SECONDS)
    assert isinstance(judge(KILLED, history, 1), Restart), "they leave the budget to others"


def test_unknown_generation_makes_no_source_unusable():
    lives = [SimpleNamespace(first_step_at=None, resume_step=4, data=None) for _ in range(2)]
    assert unusable_sources(lives, "killed") == set()
    assert unusable_sources(lives, "bad_checkpoint") == {snapshot_source(4)}
    assert unusable_sources([], None) == set()


def test_snapshots_are_good_again_once_a_step_was_committed():
    lives = [life(stepped=True), life(failure="killed")]
    assert unusable_sources(lives, "bad_checkpoint") == {snapshot_source(4)}
    assert unusable_sources([*lives, life("/c/1", "bad_checkpoint")], "killed") == {snapshot_source(4)}
    assert unusable_sources([*lives, life("/c/1", "bad_checkpoint", stepped=True)], "killed") == set()


def differing(step, stepped=False):
    """A generation that followed one in which ranks differed."""
    made = life(failure="corrupt", stepped=stepped)
    made.data["failure"]["step"] = step
    return made


@pytest.mark.parametrize("stepped", [False, True], ids=["at once", "some steps later"])
def test_snapshots_in_which_ranks_differ_are_abandoned_for_a_checkpoint(stepped):
    """Each would load what it had, and the job would fail for good."""
    once = [life(stepped=True), differing(7, stepped)]
    assert unusable_sources(once[:1], "corrupt", 7) == set()
    assert unusable_sources(once, "corrupt", 8) == set(), "another time"
    assert unusable_sources(once, "killed", 7) == set()
    assert unusable_sources([life(), differing(None, stepped)], "corrupt") == set(), "nobody knows at which steps"
    again = unusable_sources(once, "corrupt", 7)
    assert again == {SUSPECTED}
    held, foreign = [[5, 6], [6]], [(6, ["a"])]
    assert choose_resume(held, paths_of([3]), again, foreign).source == "checkpoint"
    assert choose_resume(held, [], again, foreign) == Resume(), "it would fail at that step until no restart is left"
    assert unusable_sources([*once, differing(7)], "killed") == {SUSPECTED}
    assert unusable_sources([*once, differing(7, stepped=True)], "killed") == set(), "it has gone on from there"


def test_resume_takes_the_newest_state_of_other_layouts():
    assert choose_resume([[], []], [], others=[(6, ["a"]), (7, ["b"]), (5, ["c"])]).paths == ("b",)


def test_job_is_given_up_after_more_failed_launches_than_restarts():
    """They have no rows: the history says nothing of them."""
    launched, failed = (decide(KILLED, failure(KILLED), [], 3, 0.0, failed_launches=count) for count in (3, 4))
    message = "could not be launched 4 times in a row; last failure: rank 1 was killed by SIGKILL"
    assert launched == Restart("rank 1 was killed by SIGKILL")
    assert failed == GiveUp("restarts_exhausted", message)


def test_failure_record_keeps_everything_later_decisions_need():
    known = PastFailure("exception", 100.0, 7, "ValueError", 2, "n1", committed=6, progressed=False)
    assert failure_of(died(), 100.0, 6, False, "n1") == known


def stuck(kind="killed", **known):
    """A failure before any step was committed since the one before."""
    return PastFailure(kind, 0.0, progressed=False, **known)


@given(histories, failures)
def test_recovery_wait_is_bounded_and_only_for_recurring_faults_without_progress(history, failure):
    waits = wait_seconds(history, failure)
    assert waits == 0 or INITIAL_WAIT_SECONDS <= waits <= MAX_WAIT_SECONDS
    if waits:
        assert history[-1].kind == failure.kind and not failure.progressed
    assert wait_seconds(history, replace(failure, progressed=True)) == wait_seconds([], failure) == 0


def test_recovery_wait_doubles_while_the_same_fault_recurs():
    history = [replace(stuck(), progressed=True)]
    waits = []
    for _ in range(12):
        waits.append(wait_seconds(history, stuck()))
        history.append(stuck())
    assert waits == [0.25, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert wait_seconds([stuck()] * 5000, stuck()) == 60, "a checkpoint cannot be read for days"
    assert wait_seconds(history, stuck("hung")) == 0, "another failure is another matter"
    assert wait_seconds([*history, replace(stuck(), progressed=True)], stuck()) == INITIAL_WAIT_SECONDS


@given(histories, st.floats(0, 20_000), st.floats(0, 10_000))
def test_fault_history_drops_faults_outside_the_window(history, now, window):
    counted = within(history, now, window)
    assert set(counted) <= set(history)
    if window == 0:
        assert counted == history
    else:
        assert all(failure.at > now - window for failure in counted)
        assert within(history, max(failure.at for failure in history) + window + 1, window) == [] if history else True


def on_node(node, *times, kind="killed"):
    return [PastFailure(kind, at, node=node) for at in times]


ON_A = [*on_node("a", 10, 20), *on_node("b", 30), *on_node("a", 40)]


@pytest.mark.parametrize(("history", "now", "avoided"), [
    (ON_A, 50, {"a"}),
    (ON_A, 10 + AVOID_SECONDS, set()),
    ([*on_node(None, 1, 2, 3, 4), *on_node("a", 5)], 6, set()),
    (on_node("a", 1, 2, 3, 4, kind="exception"), 5, set()),
    (on_node("b", 1, 2, 3, 4, kind="bad_checkpoint"), 5, set()),
])  # fmt: skip
def test_only_a_node_whose_machine_keeps_failing_is_avoided_for_an_hour(history, now, avoided):
    assert avoided_nodes(history, now) == avoided


@given(histories, st.floats(0, 20_000))
def test_nodes_with_enough_recent_faults_are_avoided_and_no_others(history, now):
    for node in avoided_nodes(history, now):
        assert sum(failure.node == node and failure.at > now - AVOID_SECONDS for failure in history) >= AVOID_FAILURES


def raised(step=7, exception="ValueError", **known):
    return PastFailure("exception", 0.0, step, exception, **known)


def killed(committed):
    return PastFailure("killed", 1.0, committed=committed)


BEFORE = raised(committed=6)


@pytest.mark.parametrize(("history", "now", "again"), [
    ([BEFORE, killed(6), PastFailure("hung", 2.0, committed=6), raised(6, committed=5)], BEFORE, True),
    ([BEFORE, killed(6)], BEFORE, True),
    ([BEFORE, killed(7)], raised(committed=7), False),  # step 7 raised, so 7 committed is past it
    ([BEFORE, killed(9)], raised(committed=9), False),
    ([raised(None, committed=6), killed(9)], raised(None, committed=9), True),  # outside of any step none is past it
    ([raised(None), killed(3)], raised(None), True),
    ([killed(3)], raised(None), False),
    ([raised(6), raised(exception="KeyError"), PastFailure("killed", 0.0, 7)], raised(), False),
    ([PastFailure("killed", 0.0, 7)], PastFailure("killed", 0.0, 7), False),
])  # fmt: skip
def test_exception_recurs_at_its_step_until_that_was_committed(history, now, again):
    assert recurs(history, now) is again


def test_fault_message_counts_faults_by_kind():
    assert count_by_kind([stuck(), stuck("agent_lost"), stuck()]) == "2 killed, 1 agent lost"


def test_fault_history_is_read_from_the_generations():
    past = past_failures([
        SimpleNamespace(started_at=at, first_step_at=stepped, resume_step=0, data=data)
        for at, stepped, data in (
            (1.0, 5.0, {"failure": None}),
            (10.0, None, {"failure": raised(node="a", committed=6, rank=3).to_json() | {"at": 9.5}}),
            (20.0, None, None),  # it was resized
            (30.0, None, {"failure": {"kind": "killed", "step": None, "exception": None}}),  # of an older release
        )
    ])  # fmt: skip
    assert past == [
        PastFailure("exception", 9.5, 7, "ValueError", 3, "a", 6, progressed=True),
        PastFailure("killed", 30.0, progressed=False),
    ]


@pytest.mark.parametrize(("cause", "kinds"), [
    ("machine", "killed hung straggler stopped agent_lost peer_lost no_shared_memory corrupt device_lost "
                "unreadable_data node_exhausted"),
    ("user", "exception bad_data bad_model not_finite spike"),
    ("checkpoint", "bad_checkpoint unreadable_checkpoint not_saved"),
])  # fmt: skip
def test_fault_kinds_all_have_a_cause(cause, kinds):
    assert {stuck(kind).cause for kind in kinds.split()} == {cause}
    assert {kind for kind, about in FAILURE_KINDS.items() if about.cause == cause} == set(kinds.split())


def test_fault_window_is_not_extended_by_a_clock_set_back():
    window, hour = 1800.0, 3600.0
    kept_within_budget = [PastFailure("killed", at) for at in (500.0, 1500.0, 4000.0, 5000.0)]
    assert len(within(kept_within_budget, 5500.0, window)) == 2
    assert len(within(kept_within_budget, 5500.0 - hour, window)) == 2, "an hour is set back"
    assert len(within(kept_within_budget, 5500.0 + hour, window)) == 0


def test_failure_on_a_node_whose_clock_is_a_little_ahead_counts():
    ahead = [PastFailure("killed", 1000.0 + SKEW_SECONDS), PastFailure("killed", 1001.0 + SKEW_SECONDS)]
    assert within(ahead, 1000.0, 100.0) == ahead[:1]
