"""Which rank waits for which, and the times of a recovery."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.recovery.timeline import PHASES, RecoveryTimeline
from manta.service.recovery.waits import waits_now
from manta.workers.comm.grid import RankGrid
from manta.workers.config import ParallelConfig
from manta.workers.liveness.progress import CONNECTING_CHANNEL, DeviceRecord
from manta.workers.protocol.reports import Position, TrainerStatus

TENSOR, PIPELINE, DATA = 0, 1, 2
COUNTS = dict.fromkeys(("tensor", "pipeline", "data", "embedding", "world", "sent", "received"), 5)


def at(phase="backward", waits_for=None, channel=None, overdue=False, seconds=0.1, micro_batch=None, **more):
    position = Position(1, 1, phase, 7, micro_batch, waits_for, channel, more.pop("sending", False), COUNTS, 6, 6, 9)
    return TrainerStatus(100, overdue, standing_seconds=seconds, record=position, **more)


def seen(*answers, silent=()):
    grid = RankGrid(ParallelConfig(data=len(answers)))
    return waits_now(answers, frozenset(silent), grid.group)


def test_waits_name_the_stalled_rank_that_the_others_wait_for():
    waits = seen(
        at("forward", overdue=True, seconds=9.0, micro_batch=3),
        at("reduction", 0, DATA, seconds=8.5),
        at("data", 1, DATA),
    )
    assert waits.culprits == (0,)
    assert waits.sentence == ("the job stands still because of rank 0: others wait for it, and it waits for no rank")
    first, second, third = waits.ranks
    assert (first.phase, first.doing, first.since_seconds) == ("forward", "forward of micro-batch 3", 9.0)
    assert (first.waits_for, first.step, second.waits_for, third.waits_for) == ((), 7, (0,), (1,))
    assert second.doing == "reduction, in a collective along data, waiting for rank 0"


def test_waits_of_a_running_job_name_whom_most_ranks_wait_for():
    waits = seen(at("optimizer"), at("agreement", 0, DATA), at("agreement", 0, DATA), at("data", 1, DATA))
    assert waits.culprits == ()
    assert waits.sentence == "3 of 4 ranks wait, in the end for rank 0, which is in optimizer"
    split = seen(at("data"), at("agreement", 0, DATA), at("agreement", 0, DATA), at("data"), at("data", 3, DATA))
    assert split.sentence == "3 of 5 ranks wait, most of them in the end for rank 0, which is in data"
    assert seen(at(), at()).sentence == "no rank waits for another one at this moment"
    assert "1 of 2 ranks waits, " in seen(at(), at("data", 0, DATA)).sentence
    assert "for each other" in seen(at("agreement", 1, DATA), at("agreement", 0, DATA)).sentence


def test_waits_say_that_an_overdue_culprit_may_still_continue():
    waits = seen(at("checkpoint"), at("agreement", 0, DATA, overdue=True))
    assert (waits.culprits, waits.sentence.endswith("; rank 0 may still continue")) == ((), True)


def test_waits_name_no_culprit_if_all_ranks_wait_for_each_other():
    waits = seen(at("agreement", 1, DATA, overdue=True), at("agreement", 0, DATA, overdue=True))
    assert waits.culprits == ()
    assert waits.sentence.startswith("the job stands still because of no rank in particular: ")


def test_waits_describe_silent_agents_and_missing_trainers():
    waits = seen(None, None, at("data", 0, DATA, overdue=True), silent=[0])
    assert (waits.ranks[0].phase, waits.ranks[0].doing) == ("unknown", "unknown: its agent does not answer")
    assert (waits.ranks[1].phase, waits.ranks[1].since_seconds) == ("exited", None)
    assert waits.culprits == (0,)


@pytest.mark.parametrize(
    ("status", "doing"),
    [
        (at("forward", 3, PIPELINE), "forward, waiting for rank 3 to send a message"),
        (at("forward", 3, PIPELINE, sending=True), "forward, waiting for rank 3 to take its message"),
        (at("connecting", 3, CONNECTING_CHANNEL), "connecting, waiting for rank 3 to connect"),
        (at("forward", 1, TENSOR, micro_batch=0),
         "forward of micro-batch 0, in a collective along tensor, waiting for rank 1"),
        (at("forward", 1), "forward, waiting for rank 1"),
        (at("forward", stopped=True), "forward, stopped by a signal"),
        (TrainerStatus(100), "starting"),
    ],
)  # fmt: skip
def test_waits_say_in_words_what_a_rank_does(status, doing):
    assert seen(status, at(), at(), at()).ranks[0].doing == doing


def test_waits_describe_the_device_of_a_rank_whose_device_is_behind():
    device = DeviceRecord("backward", 7, 2, 5, True, DATA, 9, None, False, COUNTS)
    status = at("optimizer")
    position = Position(**{**vars(status.record), "device": device})
    (first, _) = seen(TrainerStatus(100, record=position), at()).ranks
    assert (first.phase, first.doing) == (
        "backward", "backward of micro-batch 2, in a collective along data, waiting for its peers",
    )  # fmt: skip


def test_recovery_phases_follow_one_another():
    timeline = RecoveryTimeline(11, 10, 11.5, 11.6, 12, 14, 15)
    assert timeline.phases() == {"detect": 1, "rest": 0.5, "re_form": 0.5, "restore": 2, "redo": 1}
    assert timeline.total_seconds == 5


def test_recovery_phases_that_have_not_ended_are_unknown():
    timeline = RecoveryTimeline(11, 10, 11.5)
    assert timeline.phases() == {"detect": 1, "rest": 0.5, "re_form": None, "restore": None, "redo": None}
    assert timeline.total_seconds is None


def test_recovery_phase_without_an_end_counts_with_the_next():
    timeline = RecoveryTimeline(11, None, 12, restored_at=15, first_step_at=16)
    assert timeline.phases() == {"detect": 0, "rest": 1, "re_form": 0, "restore": 3, "redo": 1}


times = st.one_of(st.none(), st.floats(0, 100))


@given(st.floats(0, 100), times, times, times, times, times, st.floats(0, 200))
def test_recovery_phases_sum_to_the_whole_and_none_is_negative(
    noticed, failed, rested, launched, connected, restored, first
):
    timeline = RecoveryTimeline(noticed, failed, rested, launched, connected, restored, first)
    phases = timeline.phases()
    assert tuple(phases) == PHASES
    assert all(seconds >= 0 for seconds in phases.values())
    assert sum(phases.values()) == pytest.approx(timeline.total_seconds)
    assert RecoveryTimeline.from_times(timeline.to_json()) == timeline


def test_recovery_timeline_without_the_time_of_notice_is_refused():
    with pytest.raises(KeyError, match="noticed_at"):
        RecoveryTimeline.from_times({"failed_at": 1.0})
