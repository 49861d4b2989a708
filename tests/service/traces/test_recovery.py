"""A recovery is traced from the failure to the next committed step, with the phases of its record."""

from manta.service.recovery.timeline import PHASES, RecoveryTimeline
from manta.service.traces.spans import spans_of
from tests.service.traces.histories import broken_off, history

STATES = "0 QUEUED, 5 STARTING, 20 RUNNING, 31 RECOVERING, 45 RUNNING"
FIRST = (8.0, 18.0, 20.0, 33.0)
OVER = RecoveryTimeline(31, 30, 32, 34, 36, 40, 45)


def test_recovery_span_has_a_child_span_per_phase():
    recovery, *parts = spans_of(history(STATES, [FIRST, (33, 40, 45, None)], {2: OVER}), 2)
    assert (recovery.name, recovery.began_at, recovery.ended_at) == ("job.recovery", 30, 45)
    assert [part.name for part in parts] == [f"job.recovery.{phase}" for phase in PHASES]
    assert [(part.began_at, part.ended_at) for part in parts] == [(30, 31), (31, 32), (32, 36), (36, 40), (40, 45)]
    assert all(part.parent_id == recovery.span_id for part in parts)


def test_recovery_span_has_cause_replaced_ranks_and_cost():
    (recovery, *_) = spans_of(history(STATES, [FIRST, (33, 40, 45, None)], {2: OVER}), 2)
    assert recovery.problem is None
    assert recovery.attributes == {
        "manta.job.id": "job_1", "manta.job.name": "small", "manta.job.project": "default", "manta.generation": 2,
        "manta.recovery.kind": "killed", "manta.recovery.cause": "rank 1 was killed", "manta.recovery.rank": 1,
        "manta.recovery.node": "node-a", "manta.recovery.ranks_replaced": (1,), "manta.recovery.ranks_kept": 3,
        "manta.recovery.wait_seconds": 0.0, "manta.recovery.steps_redone": 1, "manta.resume_source": "snapshot",
        "manta.resume_step": 4,
    }  # fmt: skip


def test_trace_of_an_interrupted_recovery_is_sent_with_the_next_one():
    first = broken_off(noticed_at=31.0, failed_at=30.0, rested_at=32.0)
    second = RecoveryTimeline(41, 40, 42, 44, 46, 50, 55)
    generations = [FIRST, (33.0, None, None, 43.0), (44.0, 50.0, 55.0, None)]
    job = history("0 QUEUED, 5 STARTING, 20 RUNNING, 31 RECOVERING", generations, {2: first, 3: second})
    assert spans_of(job, 2) == []
    wholes = [span for span in spans_of(job, 3) if span.parent_id is None]
    assert [(span.attributes["manta.generation"], span.began_at, span.ended_at) for span in wholes] == [
        (2, 30, 43), (3, 40, 55)
    ]  # fmt: skip
    assert [span.problem for span in wholes] == ["no step was committed before generation 3 began: cause 3", None]
    phases = [span.name for span in spans_of(job, 3) if span.parent_id == wholes[0].span_id]
    assert phases == ["job.recovery.detect", "job.recovery.rest"]


def test_recovery_span_is_sent_once():
    again = RecoveryTimeline(61, 60, 62, 64, 66, 70, 75)
    job = history(STATES, [FIRST, (33.0, 40.0, 45.0, 63.0), (63.0, 70.0, 75.0, None)], {2: OVER, 3: again})
    assert {span.attributes["manta.generation"] for span in spans_of(job, 2)} == {2}
    assert {span.attributes["manta.generation"] for span in spans_of(job, 3)} == {3}
