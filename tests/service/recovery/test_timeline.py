"""The phases of a recovery follow one another without a gap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.recovery.timeline import PHASES, RecoveryTimeline


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
