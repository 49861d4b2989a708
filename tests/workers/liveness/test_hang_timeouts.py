"""When a standstill is an alarm: quickly where steps are quick, never for what is slow by nature or starved."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.liveness.hang_detection import (
    BURNING_FACTOR,
    FIRST_STEP_SECONDS,
    LONG,
    MIN_SECONDS,
    STEPS,
    WAITING_FACTOR,
    Standstill,
    hang_timeout,
    slowest_ordinary,
)
from manta.workers.liveness.progress import PHASES
from manta.workers.system.processes import ProcessState

ORDINARY = sorted(set(PHASES) - set(LONG))
phases = st.sampled_from(PHASES)
durations = st.lists(st.floats(0.001, 100.0), min_size=1, max_size=32)


def allowed(phase, steps, compiles=False, burning=False, waiting=False):
    return hang_timeout(phase, steps, compiles, burning, waiting)


@given(st.sampled_from(ORDINARY), durations)
def test_hang_timeout_exceeds_any_ordinary_step(phase, steps):
    assert allowed(phase, steps) >= STEPS * slowest_ordinary(steps)
    assert allowed(phase, steps) >= MIN_SECONDS


@given(phases, st.just([]) | durations, st.booleans(), st.booleans(), st.booleans())
def test_doubts_only_lengthen_the_hang_timeout(phase, steps, compiles, burning, waiting):
    least = allowed(phase, steps)
    assert allowed(phase, steps, compiles, burning, waiting) >= least
    assert allowed(phase, steps, compiles) >= least


@given(st.sampled_from(ORDINARY), durations, st.floats(1.0, 10.0))
def test_patience_follows_the_jobs_own_pace(phase, steps, factor):
    slower = [factor * seconds for seconds in steps]
    assert allowed(phase, steps) <= allowed(phase, slower)


def test_quick_steps_are_watched_closely_and_one_outlier_does_not_blind_the_watch():
    assert allowed("backward", [0.02] * 32) == MIN_SECONDS
    assert allowed("backward", [0.02] * 31 + [40.0]) == MIN_SECONDS
    assert allowed("backward", [1.0] * 32) == 6.0


def test_copy_of_many_bytes_has_a_longer_hang_timeout():
    large = [hang_timeout(phase, (), False, False, False, 1, 50 * 10**9) for phase in ("snapshot", "checkpoint")]
    assert large == [LONG["snapshot"] + 250.0, LONG["checkpoint"]]


@pytest.mark.parametrize("phase", sorted(LONG))
def test_long_phases_have_their_own_hang_timeout(phase):
    assert allowed(phase, [0.02] * 32) == LONG[phase] >= 30.0


def test_rest_and_end_have_no_hang_timeout():
    assert allowed("resting", [0.02]) == allowed("done", [0.02]) == math.inf


def test_first_step_and_compilation_get_time():
    assert allowed("forward", []) == FIRST_STEP_SECONDS
    assert allowed("forward", [], compiles=True) == LONG["compiling"]
    assert allowed("forward", [0.02] * 9, compiles=True) == FIRST_STEP_SECONDS, "the compiler works beside the process"
    assert allowed("forward", [0.02] * 9, compiles=True, burning=True) == LONG["compiling"]
    assert allowed("optimizer", [0.02] * 9, compiles=True) == MIN_SECONDS


SLEEPING = ProcessState("S", 0.0, 0.0, 0.0)


def stand(looks, between=0.25):
    """A Standstill after `looks` of (heartbeat, process), `between` seconds apart."""
    still = Standstill(0.5)
    for number, (heartbeat, process) in enumerate(looks):
        still.update(number * between, heartbeat, process)
    return still


def test_standstill_counts_from_the_last_change():
    assert stand([(1, SLEEPING)] * 9).seconds == 2.0
    assert stand([(1, SLEEPING)] * 9 + [(2, SLEEPING)]).seconds == 0.0
    assert stand([(1, SLEEPING)] * 9 + [(2, SLEEPING)] * 3).seconds == 0.5
    assert not stand([(1, SLEEPING)] * 9).burning
    late = stand([(1, SLEEPING)] * 2, between=3600.0)
    assert late.seconds == 0.5, "whoever held up the agent, as a machine that swaps, held up its trainer too"


@pytest.mark.parametrize(
    ("states", "seconds", "burning"),
    [
        ([ProcessState("R", 0.0, 0.0, 0.0)] * 40, 0.0, False),  # it gets no processor
        ([ProcessState("S", 0.0, 0.0, 0.24 * n) for n in range(41)], 0.4, False),
        # The kernel books the wait for a processor only when it is over, and other threads of the process get theirs.
        ([ProcessState("R", 0.25 * n, 0.0, 0.0) for n in range(9)], 0.0, True),
        ([ProcessState("R", 90.0, 90.0, 0.0)] * 9, 0.0, False),  # the thread had one long ago
        ([ProcessState("R", 0.25 * n, 0.25 * n, 0.0) for n in range(9)], 2.0, True),
        ([ProcessState("D", 0.0, 0.0, 0.0)] * 9, 2.0, True),  # waiting for a device counts as work
        ([ProcessState("S", 0.125 * n, 0.0, 0.0) for n in range(9)], 2.0, False),
    ],
)
def test_process_stands_still_unless_it_waits_for_a_processor_and_burns_if_it_works(states, seconds, burning):
    still = stand([(1, state) for state in states])
    assert still.seconds == pytest.approx(seconds)
    assert still.burning is burning or not seconds


def test_a_stopped_process_is_told_from_one_that_a_debugger_holds():
    stopped = stand([(1, ProcessState("T", 0.0, 0.0, 0.0))] * 9)
    assert stopped.stopped_seconds == stopped.seconds == 2.0
    traced = stand([(1, ProcessState("t", 0.0, 0.0, 0.0))] * 9)
    assert (traced.stopped_seconds, traced.seconds) == (0.0, 0.0)
    assert stand([(1, ProcessState("T", 0.0, 0.0, 0.0))] * 9 + [(1, SLEEPING)]).stopped_seconds == 0.0


def test_standstill_counts_only_cpu_time_after_the_last_change():
    burned = [ProcessState("R", 0.25 * number, 0.25 * number, 0.0) for number in range(9)]
    sleeps = ProcessState("S", 2.0, 2.0, 0.0)
    still = stand([(1, process) for process in burned] + [(2, sleeps)] * 9)
    assert (still.seconds, still.burning) == (2.0, False)
    stopped = ProcessState("T", 0.0, 0.0, 0.0)
    assert stand([(1, stopped)] * 9 + [(2, stopped)]).stopped_seconds == 0.0
    assert stand([(1, stopped)] * 9 + [(2, stopped)] * 3).stopped_seconds == 0.5


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.none() | st.builds(ProcessState, st.sampled_from("RSDTt"), *[st.floats(0, 9)] * 3),
        ),
        max_size=30,
    )
)
def test_time_is_never_negative_and_never_more_than_has_passed(looks):
    still = stand(looks)
    assert 0.0 <= still.seconds <= 0.25 * max(0, len(looks) - 1)


def test_doubts_lengthen_the_wait_by_their_factor():
    for steps, least in (([0.02] * 9, MIN_SECONDS), ([1.0] * 9, 6.0)):
        assert allowed("forward", steps, burning=True) == BURNING_FACTOR * least
        assert allowed("forward", steps, waiting=True) == WAITING_FACTOR * least
        assert allowed("forward", steps, burning=True, waiting=True) == BURNING_FACTOR * least
    assert allowed("forward", [], waiting=True) == WAITING_FACTOR * FIRST_STEP_SECONDS


def test_the_slowest_step_counts_that_is_no_outlier():
    assert slowest_ordinary([1.0, 1.0, 2.5]) == 2.5
    assert slowest_ordinary([1.0, 1.0, 3.0]) == 3.0
    assert slowest_ordinary([1.0, 1.0, 3.1]) == 1.0


def test_a_large_gang_has_longer_to_connect():
    """NCCL's set-up at 512 ranks takes minutes: a rank that was killed in it would be killed again and again."""
    seconds = [hang_timeout("connecting", (), False, False, False, ranks) for ranks in (1, 8, 512, 3072)]
    assert seconds == [60.0, 61.75, 187.75, 827.75]
    assert hang_timeout("backward", [0.02], False, False, False, 3072) == MIN_SECONDS


def test_hang_timeout_of_a_first_meeting_grows_with_the_number_of_ranks():
    """Also in a first step: NCCL makes what was not used before when it is used."""
    for phase, alone in (("restoring", LONG["restoring"]), ("forward", FIRST_STEP_SECONDS)):
        assert [hang_timeout(phase, (), False, False, False, ranks) - alone for ranks in (1, 513)] == [0.0, 128.0]
    assert hang_timeout("checkpoint", (), False, False, False, 513) == LONG["checkpoint"]
    assert hang_timeout("agreement", (), False, False, True, 513) == WAITING_FACTOR * (FIRST_STEP_SECONDS + 128.0)
