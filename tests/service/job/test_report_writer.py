"""What a gang's reports leave in the database: each exactly once, and nothing of replaced generations."""

import asyncio
import sqlite3
import time
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from manta.service.job.received_lines import ReceivedLines
from manta.service.job.report_writer import ReportWriter
from manta.service.leases.decisions import LeaseLost
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.states import JobState
from manta.service.store import checkpoints, database, events, generations, jobs, metrics, ranks, recoveries
from manta.workers.checkpoint.catalog import Condition, ListedCheckpoint, Listing, Manifest, checkpoint_path
from manta.workers.liveness.rank_samples import RankSample, packed
from manta.workers.protocol.json_codec import to_json
from manta.workers.protocol.reports import Metrics, Report, payload_of

LINES = ReceivedLines(Path("/nowhere"))


@pytest.fixture
def generation(store, started):
    """Generation 1 of a STARTING job of one rank, which resumes at step 4."""
    number = store.write(lambda s: generations.begin(s, started.id, "submitted", False, "snapshot", 4))
    row = {"rank": 0, "tensor": 0, "pipeline": 0, "data": 0, "generation": number, "state": "starting"}
    store.write(lambda s: ranks.replace(s, started.id, [row]))
    return number


@pytest.fixture
def take(store, started, generation):
    """Hands one report to the writer of generation 1."""
    writer = ReportWriter(store, started.id, generation, resume_step=4, lines=LINES)

    def give(kind, sequence, rank=0, **data):
        asyncio.run(writer.take(Report(payload_of(kind, data), 1, rank, time.time(), sequence)))

    return give


def steps(store, job):
    return store.query(lambda s: metrics.series(s, job.id, names=["loss"])).steps


def kinds(store, job):
    return [event.type for event in store.query(lambda s: events.page(s, job.id)).items]


def row(step, loss=1.0):
    return {"step": step, "loss": loss, "step_seconds": 0.1}


def test_report_counts_once(store, started, take):
    take("metrics", 1, rows=[row(5), row(6)])
    take("metrics", 1, rows=[row(5, loss=9.0)])
    take("event", 2, type="note", step=6, message="hello")
    take("event", 2, type="note", step=6, message="hello")
    points = store.query(lambda s: metrics.series(s, started.id, names=["loss"]))
    assert (points.steps, points.series["loss"]) == ([5, 6], [1.0, 1.0])
    assert kinds(store, started).count("note") == 1


def test_rank_numbers_are_stored_once_with_their_rows(store, started, take):
    sample = to_json(RankSample(6, 0.1, packed([0.05]), packed([1e9])))
    take("metrics", 1, rows=[row(5), row(6)], ranks=sample)
    take("metrics", 1, rows=[row(7)], ranks={**sample, "step": 7})  # the same report again, whatever it says
    assert store.query(lambda s: ranks.newest_numbers(s, started.id)).step == 6
    assert store.query(lambda s: ranks.history(s, started.id)).own_seconds == [[pytest.approx(0.05)]]


def test_reports_of_a_replaced_generation_change_nothing(store, started, take):
    store.write(lambda s: generations.begin(s, started.id, "rank lost", True))
    take("metrics", 1, rows=[row(5)])
    take("event", 2, type="note", step=5, message="late")
    take("exit", 3, code=0, signal=None)
    assert steps(store, started) == []
    assert not {"note", "first_step"} & set(kinds(store, started))
    assert store.query(lambda s: jobs.get(s, started.id)).state == "STARTING"
    assert store.query(lambda s: generations.of_job(s, started.id))[0].first_step_at is None
    assert store.query(lambda s: ranks.of_job(s, started.id))[0].state == "starting"


def test_job_is_running_from_the_first_step_after_its_resume_point(store, started, take):
    take("metrics", 1, rows=[row(3), row(4)])
    assert store.query(lambda s: jobs.get(s, started.id)).state == "STARTING"
    take("metrics", 2, rows=[row(5)])
    assert store.query(lambda s: jobs.get(s, started.id)).state == "RUNNING"
    take("metrics", 3, rows=[row(6)])
    assert kinds(store, started).count("first_step") == 1
    (first,) = [e for e in store.query(lambda s: events.page(s, started.id)).items if e.type == "first_step"]
    assert (first.step, first.generation) == (5, 1)


def test_first_step_event_is_written_once_per_generation(store, started, generation, take):
    take("metrics", 1, rows=[row(5)])
    store.write(lambda s: jobs.transition(s, started.id, JobState.RESIZING))
    next_one = ReportWriter(store, started.id, generation, resume_step=4, lines=LINES)
    asyncio.run(next_one.take(Report(Metrics((row(6),)), 1, 0, 100.0, 2)))
    assert steps(store, started) == [5, 6]
    assert store.query(lambda s: jobs.get(s, started.id)).state == "RESIZING", "a change is under way"
    assert kinds(store, started).count("first_step") == 1


def test_first_step_time_is_the_one_its_rank_reports(store, started, take):
    take("metrics", 1, rows=[{**row(step), "time": 100.0 + step} for step in (4, 5, 6)])
    (of_job,) = store.query(lambda s: generations.of_job(s, started.id))
    assert of_job.first_step_at == 105.0


def test_finished_report_without_extra_time_adds_nothing(store, started, take):
    take("metrics", 1, rows=[{**row(5), "time": 50.0, "seconds": {"wall": 2.0}}])
    take("finished", 2, step=5)
    assert "report_left_out" not in kinds(store, started)
    assert store.query(lambda s: generations.of_job(s, started.id))[0].compute_seconds == 2.0


def test_first_step_leaves_a_cancelling_job_cancelling(store, started, take):
    store.write(lambda s: jobs.request_cancel(s, started.id))
    take("metrics", 1, rows=[row(5)])
    assert store.query(lambda s: jobs.get(s, started.id)).state == "CANCELLING"


def test_first_step_after_a_failure_ends_the_recovery_and_says_how_long_each_phase_took(store, started, take):
    def recover(session):
        number = generations.begin(session, started.id, "rank 0 was killed", True, "snapshot", 4)
        timeline = RecoveryTimeline(noticed_at=101.0, failed_at=100.0, rested_at=102.0)
        known = {"kind": "killed", "rank": 0, "cause": "rank 0 was killed", "source": "snapshot", "resume_step": 4}
        recoveries.begin(session, started.id, number, timeline, **known)
        recoveries.record_replaced(session, started.id, number, (0,), 0)
        return number

    take("metrics", 1, rows=[row(5), row(6)])
    number = store.write(recover)
    writer = ReportWriter(store, started.id, number, resume_step=4, lines=LINES)

    def tell(kind, sequence, at, **data):
        asyncio.run(writer.take(Report(payload_of(kind, data), number, 0, at, sequence)))

    tell("started", 1, 104.0, pid=7, connected_at=102.5)
    tell("metrics", 2, 105.0, rows=[{**row(step), "time": 100.0 + step} for step in (5, 6, 7)])
    (entry,) = [e for e in store.query(lambda s: events.page(s, started.id)).items if e.type == "recovered"]
    phases = {"detect": 1, "rest": 1, "re_form": 0.5, "restore": 1.5, "redo": 1}
    assert (entry.data["seconds"], entry.data["total_seconds"]) == (phases, 5)
    assert (entry.data["steps_redone"], entry.data["forked"], entry.generation, entry.step) == (2, [0], number, 5)
    assert (entry.rank, entry.data["source"], entry.data["resume_step"], entry.data["kept"]) == (0, "snapshot", 4, 0)
    assert "recovered in 5.00 s (detect 1.00, rest 1.00, re-form 0.50" in entry.message
    (stored,) = store.query(lambda s: recoveries.of_job(s, started.id))
    assert (stored.steps_redone, stored.first_step_at) == (2, 105.0)


def test_first_step_after_a_change_of_size_ends_the_change(store, started, take):
    store.write(lambda s: jobs.transition(s, started.id, JobState.RUNNING))
    store.write(lambda s: jobs.transition(s, started.id, JobState.RESIZING))
    take("metrics", 1, rows=[row(5)])
    assert store.query(lambda s: jobs.get(s, started.id)).state == "RUNNING"


def test_recovery_past_the_last_reported_step_redid_no_steps(store, started, generation):
    """What a killed rank 0 had committed and not shipped: the job's row is behind the state."""

    def recover(session):
        number = generations.begin(session, started.id, "rank 0 was killed", True, "snapshot", 4)
        timeline = RecoveryTimeline(noticed_at=101.0, failed_at=100.0)
        recoveries.begin(session, started.id, number, timeline, kind="killed", rank=0, cause="rank 0 was killed")
        return number

    number = store.write(recover)
    writer = ReportWriter(store, started.id, number, resume_step=4, lines=LINES)
    asyncio.run(writer.take(Report(Metrics(({**row(5), "time": 105.0},)), number, 0, 105.0, 1)))
    (recovery,) = store.query(lambda s: recoveries.of_job(s, started.id))
    assert (recovery.first_step_at, recovery.steps_redone) == (105.0, 0)


def test_event_time_is_when_it_happened(store, started, generation):
    """Its report may come much later: with the next control plane."""
    writer = ReportWriter(store, started.id, generation, resume_step=4, lines=LINES)
    payload = payload_of("event", {"type": "note", "step": 5, "message": "hello"})
    asyncio.run(writer.take(Report(payload, 1, 0, 100.0, 1)))
    (event,) = [each for each in store.query(lambda s: events.page(s, started.id)).items if each.type == "note"]
    assert event.time == 100.0


def test_end_times_of_ranks_other_than_the_reporting_one_are_ignored(store, started, take):
    take("metrics", 1, rows=[{**row(5), "time": 50.0, "seconds": {"wall": 2.0}}])
    take("finished", 1, rank=1, step=5, seconds={"wall": 9.0})
    (of_job,) = store.query(lambda s: generations.of_job(s, started.id))
    assert of_job.compute_seconds == 2.0


def test_time_after_the_last_step_is_added_to_the_generation_once(store, started, take):
    take("metrics", 1, rows=[{**row(5), "time": 50.0, "seconds": {"wall": 2.0}}])
    for _ in range(2):
        take("finished", 2, step=5, seconds={"wall": 1.5, "checkpoint_stall": 1.0})
    (ledger,) = store.query(lambda s: generations.of_job(s, started.id))
    assert (ledger.committed_steps, ledger.compute_seconds, ledger.checkpoint_stall_seconds) == (1, 2.5, 1.0)


def test_rank_row_is_running_with_its_pid_until_it_exits(store, started, take):
    take("started", 1, pid=42)
    (rank,) = store.query(lambda s: ranks.of_job(s, started.id))
    assert (rank.state, rank.pid) == ("running", 42)
    take("exit", 2, code=None, signal=9)
    (rank,) = store.query(lambda s: ranks.of_job(s, started.id))
    assert (rank.state, rank.pid) == ("exited", None)


def saved(store, job):
    return {row.step: row.state for row in store.query(lambda s: checkpoints.page(s, job.id)).items}


def test_checkpoints_become_rows(store, started, take):
    for sequence, step in ((1, 5), (3, 6), (5, 7)):
        take("event", sequence, type="checkpoint_saving", step=step, message="saving", data={"path": f"/c/{step}"})
    take("event", 6, type="checkpoint_saved", step=5, message="saved", data={"path": "/c/5", "bytes": 10})
    take("event", 7, type="checkpoint_failed", step=6, message="failed", data={"path": "/c/6"})
    assert saved(store, started) == {5: "complete", 6: "failed", 7: "saving"}
    rows = {row.step: row for row in store.query(lambda s: checkpoints.page(s, started.id)).items}
    assert [(rows[step].path, rows[step].bytes, rows[step].generation) for step in (5, 7)] == [
        ("/c/5", 10, 1), ("/c/7", None, 1)
    ]  # fmt: skip
    take("event", 8, type="checkpoint_deleted", step=7, message="deleted", data={"path": "/c/5"})
    assert saved(store, started) == {5: "deleted", 6: "failed", 7: "saving"}


def test_checkpoint_finished_in_a_later_generation_keeps_its_own_row(store, started, take):
    """The store took its manifest when its ranks had left each other."""
    about = {"step": 5, "message": "m", "data": {"path": str(checkpoint_path("/c", 5, 1)), "bytes": 10}}
    take("event", 1, type="checkpoint_saving", **about)
    second = store.write(lambda s: generations.begin(s, started.id, "rank lost", True))
    writer = ReportWriter(store, started.id, second, resume_step=5, lines=LINES)
    payload = payload_of("event", {"type": "checkpoint_saved", **about})
    asyncio.run(writer.take(Report(payload, second, 0, time.time(), 2)))
    assert saved(store, started) == {5: "complete"}


def test_events_about_no_checkpoint_that_began_change_no_checkpoint_row(store, started, take):
    take("event", 1, type="checkpoint_saving", step=5, message="saving", data={"path": "/c/5"})
    take("event", 2, type="note", step=5, message="hello")
    take("event", 3, type="checkpoint_skipped", message="of no step")
    take("event", 4, type="checkpoint_saved", step=9, message="saved", data={"path": "/c/9", "bytes": 1})
    take("event", 5, type="checkpoint_failed", step=9, message="failed", data={"path": "/c/9"})
    take("event", 6, type="checkpoint_delayed", step=5, message="waits", data={"writing": 4, "seconds": 1.5})
    assert saved(store, started) == {5: "saving"}
    assert "report_left_out" not in kinds(store, started)


def test_checkpoint_deletion_is_matched_by_path(store, started, take):
    for sequence, step in ((1, 5), (3, 6)):
        take("event", sequence, type="checkpoint_saving", step=step, message="saving", data={"path": f"/c/{step}"})
        data = {"path": f"/c/{step}", "bytes": 10}
        take("event", sequence + 1, type="checkpoint_saved", step=step, message="saved", data=data)
    take("event", 5, type="checkpoint_deleted", step=6, message="deleted", data={"path": "/c/5"})
    assert saved(store, started) == {5: "deleted", 6: "complete"}


def test_checkpoint_rows_are_reconciled_with_the_disk(store, started, take):
    for sequence, step in enumerate((5, 6, 7), start=1):
        take("event", sequence, type="checkpoint_saving", step=step, message="saving", data={"path": f"/c/{step}"})
    take("event", 4, type="checkpoint_saved", step=5, message="saved", data={"path": "/c/5", "bytes": 10})
    manifest = Manifest(started.id, 1, 6, {"data": 11}, {})
    listing = Listing(Path("/c"), (ListedCheckpoint(Path("/c/6"), 6, 1, Condition.COMPLETE, manifest),))
    store.write(lambda s: checkpoints.reconcile(s, started.id, listing))
    assert saved(store, started) == {5: "deleted", 6: "complete", 7: "failed"}


def test_unstorable_report_is_omitted_with_an_event(store, started, take, monkeypatch):
    monkeypatch.setattr(metrics, "record", Mock(side_effect=ValueError("no such thing\nat all")))
    take("metrics", 1, rows=[row(5)])
    monkeypatch.undo()
    take("metrics", 2, rows=[row(6)])
    assert kinds(store, started).count("report_left_out") == 1
    (event,) = [e for e in store.query(lambda s: events.page(s, started.id)).items if e.type == "report_left_out"]
    assert "a report of rank 0 (metrics)" in event.message and event.message.endswith(
        "ValueError: no such thing at all"
    )
    assert (event.data, event.generation, event.rank) == ({"kind": "metrics"}, 1, 0)
    assert steps(store, started) == [6]


def test_omitted_report_is_announced_once_and_not_for_replaced_generations(store, started, take, monkeypatch):
    monkeypatch.setattr(metrics, "record", Mock(side_effect=ValueError("no such thing")))
    take("metrics", 1, rows=[row(5)])
    take("metrics", 1, rows=[row(5)])
    store.write(lambda s: generations.begin(s, started.id, "rank lost", True))
    take("metrics", 2, rows=[row(6)])
    assert kinds(store, started).count("report_left_out") == 1


def test_report_of_a_job_with_a_lost_lease_is_not_written(store, started, generation, monkeypatch):
    """It is not acknowledged, and nothing is written of it."""
    writer = ReportWriter(store, started.id, generation, resume_step=4, lines=LINES)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_async", AsyncMock(side_effect=LeaseLost(started.id)))
        with pytest.raises(LeaseLost):
            asyncio.run(writer.take(Report(Metrics((row(5),)), 1, 0, 100.0, 1)))
    assert steps(store, started) == []
    assert "report_left_out" not in kinds(store, started)


def test_event_row_has_its_rank_and_generation(store, started, take):
    take("event", 1, rank=3, type="note", step=6, message="hello", data={"x": 1})
    (event,) = [each for each in store.query(lambda s: events.page(s, started.id)).items if each.type == "note"]
    assert (event.rank, event.generation, event.step, event.data) == (3, 1, 6, {"x": 1})


def test_event_text_with_surrogates_or_nul_is_stored_escaped(store, started, take):
    """An exception's message may hold a lone surrogate, which no database takes, or a NUL, which PostgreSQL refuses."""
    take("event", 1, type="note", step=5, message="a \ud800 b \0 c", data={"k\ud800": ["\0", {"x": "\udfff"}]})
    (event,) = [each for each in store.query(lambda s: events.page(s, started.id)).items if each.type == "note"]
    assert event.message == "a \\ud800 b \\x00 c"
    assert event.data == {"k\\ud800": ["\\x00", {"x": "\\udfff"}]}


@pytest.mark.parametrize("kind_of_database", ["sqlite"], indirect=True)
async def test_database_that_is_locked_for_a_while_is_waited_for(store, started, generation, monkeypatch, tmp_path):
    monkeypatch.setattr(database, "INITIAL_BACKOFF_SECONDS", 0.001)
    with store.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout=1")  # of the connection that the writer takes next
    other = sqlite3.connect(store.engine.url.database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writer = ReportWriter(store, started.id, generation, resume_step=4, lines=LINES)
    report = Report(payload_of("metrics", {"rows": [row(5)]}), 1, 0, time.time(), 1)
    taking = asyncio.create_task(writer.take(report))
    done, _ = await asyncio.wait([taking], timeout=0.3)
    assert not done, "the report is not acknowledged"
    other.execute("ROLLBACK")
    await asyncio.wait_for(taking, 30)
    other.close()
    assert steps(store, started) == [5]
    assert "report_left_out" not in kinds(store, started)
