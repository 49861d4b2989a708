"""A job is marked when its deletion begins, and its rows go last: all of them, and no others."""

import time

import pytest
from sqlalchemy import delete, func, select

from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.states import JobState
from manta.service.store import (
    checkpoints,
    deletion,
    events,
    exports,
    generations,
    jobs,
    leases,
    metrics,
    pauses_and_retries,
    ranks,
    recoveries,
    step_traces,
)
from manta.service.store.errors import JobBeingDeleted, JobBeingExported, JobNotFinal, JobNotFound
from manta.service.store.tables import Base, MetricBin
from manta.workers.liveness.rank_samples import RankSample, packed
from manta.workers.timing.recording import Recording


def full(session, job_id):
    """Give a job a row in every table."""
    jobs.transition(session, job_id, JobState.STARTING)
    generation = generations.begin(session, job_id, "submitted", False)
    recoveries.begin(session, job_id, generation, RecoveryTimeline(1.0), kind="killed", rank=0, cause="killed")
    place = {"rank": 0, "tensor": 0, "pipeline": 0, "data": 0, "generation": generation, "state": "exited"}
    ranks.replace(session, job_id, [place])
    checkpoints.begin(session, job_id, generation, 5, "/somewhere/5")
    metrics.record(session, job_id, generation, 0, 1, [{"step": step, "loss": 1.0} for step in (5, 6, 7)])
    ranks.store_numbers(session, job_id, generation, RankSample(7, 0.1, None, packed([1.0])), 5.0)
    exports.end(session, exports.begin(session, job_id, "ckpt", "/somewhere/else", "hf", None).id, None)
    step_traces.request(session, job_id, 1)
    step_traces.record_recorded(session, job_id, 1, generation, 5, 0, Recording((), ()).pack())
    jobs.transition(session, job_id, JobState.FAILED, "x", "y")
    jobs.get(session, job_id).memory_kept_until = 1e12


@pytest.fixture
def two(store, submit):
    """Two jobs that failed, with rows in every table."""
    made = [submit(labels={"team": "vision"}).id for _ in range(2)]
    for job_id in made:
        store.write(lambda session, job_id=job_id: full(session, job_id))
    return made


def rows_of(store, job_id):
    """Number of rows by table."""
    with store.read() as session:
        tables = [table for table in Base.metadata.sorted_tables if "job_id" in table.c]
        counts = {
            table.name: session.scalar(select(func.count()).select_from(table).where(table.c.job_id == job_id))
            for table in tables
        }
        jobs_table = Base.metadata.tables["jobs"]
        counts["jobs"] = session.scalar(select(func.count()).select_from(jobs_table).where(jobs_table.c.id == job_id))
    return counts


def test_deletion_removes_every_row_of_the_job_and_no_other(store, two):
    gone, stays = two
    before, others = rows_of(store, gone), rows_of(store, stays)
    assert all(before.values()), "a table is missing in this test"
    store.write(lambda session: deletion.begin(session, gone))
    counted = store.write(lambda session: deletion.end(session, gone))
    assert counted == {**before, "events": before["events"] + 1}
    assert not any(rows_of(store, gone).values())
    assert rows_of(store, stays) == others
    with store.read() as session:
        assert deletion.deleted_ones(session, two) == {gone}
        with pytest.raises(JobNotFound):
            jobs.get(session, gone)


def test_begun_job_deletion_is_recorded_and_releases_the_jobs_snapshots(store, two):
    job_id, _ = two
    store.write(lambda session: deletion.begin(session, job_id))
    with store.read() as session:
        job = jobs.get(session, job_id)
        assert job.deletion_began_at is not None
        assert pauses_and_retries.holding_memory(session, [job_id]) == set()
        assert events.page(session, job_id, limit=1000).items[-1].type == "deletion_began"
    store.write(lambda session: deletion.begin(session, job_id))
    with store.read() as session:
        assert jobs.get(session, job_id).deletion_began_at == job.deletion_began_at
        assert [e.type for e in events.page(session, job_id, limit=1000).items].count("deletion_began") == 1


def test_job_that_is_being_deleted_is_not_tried_again(store, two):
    job_id, _ = two
    store.write(lambda session: deletion.begin(session, job_id))
    with pytest.raises(JobBeingDeleted, match="manta delete"):
        store.write(lambda session: pauses_and_retries.request_retry(session, job_id))


def test_job_is_not_deleted_while_its_weights_are_exported(store, two, monkeypatch):
    job_id, _ = two
    about = ("ckpt", "/somewhere/more", "hf", None)
    monkeypatch.setattr(leases, "now", lambda session: 1000.0)
    export = store.write(lambda session: exports.begin(session, job_id, *about)).id
    ahead = time.time() + 1000.0
    monkeypatch.setattr(time, "time", lambda: ahead)  # of another machine, which asks
    with pytest.raises(JobBeingExported, match="once that is done"):
        store.write(lambda session: deletion.begin(session, job_id))
    assert store.query(jobs.get, job_id).deletion_began_at is None
    store.write(lambda session: exports.end(session, export, None))
    store.write(lambda session: deletion.begin(session, job_id))
    with pytest.raises(JobBeingDeleted):
        store.write(lambda session: exports.begin(session, job_id, *about))


@pytest.mark.parametrize("retried", [False, True])
def test_unfinished_job_cannot_be_deleted(store, two, submit, retried):
    job_id = two[0] if retried else submit().id
    if retried:
        store.write(lambda session: pauses_and_retries.request_retry(session, job_id))
    with pytest.raises(JobNotFinal, match=f"is QUEUED.*manta cancel {job_id}"):
        store.write(lambda session: deletion.begin(session, job_id))
    assert store.query(jobs.get, job_id).deletion_began_at is None


def test_metrics_of_the_deleted_job_alone_are_removed_in_parts(store, two, monkeypatch):
    monkeypatch.setattr(deletion, "METRICS_BATCH_ROWS", 2)
    job_id, other = two
    counts = [store.write(lambda session: deletion.delete_metrics_batch(session, job_id)) for _ in range(3)]
    assert counts == [2, 1, 0]
    assert rows_of(store, other)["metrics"] == 3


def test_event_ids_of_a_deleted_job_are_not_reused(store, two, submit):
    """Whoever reads the events of all jobs goes on after the last id that it saw."""
    job_id, other = two
    newest = store.write(lambda session: events.append(session, job_id, "told", "the newest of all"))
    store.write(lambda session: deletion.begin(session, job_id))
    store.write(lambda session: deletion.end(session, job_id))
    assert store.write(lambda session: events.append(session, other, "told", "later")) > newest


def test_metric_bins_of_the_deleted_job_alone_are_removed_in_parts(store, two, monkeypatch):
    monkeypatch.setattr(deletion, "METRICS_BATCH_ROWS", 2)
    job_id, other = two
    store.write(lambda session: session.execute(delete(MetricBin)))
    bins = [(job_id, 0, 0), (job_id, 0, 1), (job_id, 1, 0), (other, 0, 5), (other, 1, 0)]
    rows = [MetricBin(job_id=of, level=level, bin=number, step=1) for of, level, number in bins]
    store.write(lambda session: session.add_all(rows))
    counts = [store.write(lambda session: deletion.delete_bins_batch(session, job_id)) for _ in range(3)]
    assert counts == [2, 1, 0]
    assert rows_of(store, other)["metric_bins"] == 2


def test_obstacle_to_a_deletion_is_noted_as_an_event_of_the_job(store, two):
    job_id, other = two
    store.write(lambda session: deletion.begin(session, job_id))
    store.write(lambda session: deletion.record_obstacle(session, job_id, "a disk is read-only"))
    with store.read() as session:
        last = events.page(session, job_id, limit=1000).items[-1]
        assert "deletion_failed" not in {event.type for event in events.page(session, other, limit=1000).items}
    assert (last.type, last.message) == ("deletion_failed", "a disk is read-only")
    with pytest.raises(JobNotFound):
        store.write(lambda session: deletion.record_obstacle(session, "job_000000000000", "no such job"))
