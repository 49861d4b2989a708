"""Rows become answers field by field: nothing is left out, and nothing is taken for its neighbour."""

from datetime import UTC, datetime
from typing import Any

import pytest

from manta.api import schemas, views
from manta.api.schemas import access as access_schemas
from manta.service.cluster.sizes import layout_in_use
from manta.service.identity import Identity, Scope
from manta.service.ledger import Ledger
from manta.service.logs.pages import LogLine
from manta.service.states import JobState
from manta.service.store import generations, installation_tables, jobs, metrics, tables
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.liveness.rank_samples import packed


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def shown(answer: Any) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in type(answer).model_fields}


def test_event_view_shows_all_fields_of_an_event():
    fields = {"type": "t", "generation": 2, "rank": 3, "step": 4, "message": "m", "data": {"a": 5}}
    row = tables.Event(id=1, job_id="job_1", time=6.0, **fields)
    assert shown(views.event_view(row)) == {"id": "1", "time": moment(6.0), **fields}
    assert shown(views.job_event_view(row)) == {"id": "1", "time": moment(6.0), "job": "job_1", **fields}


def test_rank_view_shows_the_place_of_a_rank():
    place = {"rank": 7, "tensor": 1, "pipeline": 2, "data": 3, "context": 4, "node": "n", "device": "d"}
    fields = {**place, "pid": 5, "generation": 6, "state": "running"}
    row = tables.Rank(job_id="job_1", actor="a", **fields)
    unknown = dict.fromkeys(("expert", "own_seconds", "wait_seconds", "memory_bytes", "straggler"))
    assert [shown(rank) for rank in views.rank_views([row], None)] == [fields | unknown]
    spread = ParallelConfig(data=4, context=6, expert=8)
    assert views.rank_views([row], None, spread)[0].expert == (3 * 6 + 4) % 8
    assert views.rank_views([row], None, ParallelConfig(data=4, context=6, expert=1))[0].expert is None


def test_rank_views_have_the_numbers_of_each_rank():
    straggler = {"own_seconds": 1.5, "usual_seconds": 0.5, "sentence": "rank 1 is slow"}
    numbers = tables.RankNumbers(
        seconds=1.0, own_seconds=packed([0.25, 1.5]), memory_bytes=packed([7, 8]), stragglers=[{"rank": 1, **straggler}]
    )
    place = {"tensor": 0, "pipeline": 0, "data": 0, "context": 0, "generation": 1, "state": "running"}
    rows = [tables.Rank(rank=rank, **place) for rank in range(3)]
    first, second, third = views.rank_views(rows, numbers)
    assert (first.own_seconds, first.wait_seconds, first.memory_bytes, first.straggler) == (0.25, 0.75, 7, None)
    assert (second.wait_seconds, second.memory_bytes, shown(second.straggler)) == (0.0, 8, straggler)
    assert (third.own_seconds, third.memory_bytes) == (None, None)
    numbers.own_seconds = None
    unknown = views.rank_views(rows, numbers)[0]
    assert (unknown.own_seconds, unknown.wait_seconds, unknown.memory_bytes) == (None, None, 7)


def test_checkpoint_is_shown_with_its_place_and_size():
    fields = {"id": "c", "step": 1, "state": "complete", "path": "/p", "bytes": 2}
    row = tables.Checkpoint(job_id="job_1", generation=3, created_at=4.0, completed_at=5.0, **fields)
    more = {"generation": 3, "exists": True, "age_seconds": 2.0, "kept_because": "k"}
    more |= {"loss": None, "validation_loss": None}
    assert shown(views.checkpoint_view(row, 7.0, {"c": "k"})) == {**fields, "created_at": moment(4.0), **more}
    for state, exists in (("saving", None), ("failed", False), ("deleted", False)):
        row.state = state
        other = views.checkpoint_view(row, 7.0)
        assert (other.exists, other.age_seconds, other.kept_because) == (exists, None, None)


def test_recovery_is_shown_with_its_causes_and_its_phases():
    fields = {
        "generation": 2, "kind": "crash", "rank": 3, "node": "n", "cause": "killed", "forked": [4], "kept": 5,
        "source": "memory", "resume_step": 6, "steps_redone": 7, "wait_seconds": 8.0,
    }  # fmt: skip
    times = {"failed_at": 100.0, "noticed_at": 101.0, "rested_at": 103.0, "launched_at": 106.0, "connected_at": 110.0}
    row = tables.Recovery(job_id="job_1", restored_at=115.0, first_step_at=121.0, **times, **fields)
    answer = shown(views.recovery_view(row))
    assert {name: answer[name] for name in fields} == fields
    assert (answer["time"], answer["total_seconds"]) == (moment(100.0), 21.0)
    assert list(answer["seconds"].values()) == [1.0, 2.0, 7.0, 5.0, 6.0]


def test_ledger_and_log_line_views_show_all_fields():
    seconds = {"queue": 10.0, "pause": 20.0, "compute": 35.0}
    ledger = shown(views.ledger_view(Ledger(1000.0, 1100.0, True, seconds)))
    assert (ledger["seconds"], ledger["wall_seconds"], ledger["goodput"]) == (seconds, 100.0, 0.5)
    assert (ledger["closed"], ledger["began_at"], ledger["until"]) == (True, moment(1000.0), moment(1100.0))
    line = shown(views.answer(schemas.LogLine, LogLine(1.0, 2, 3, "stderr", "text", 4)))
    assert line == {"time": moment(1.0), "rank": 2, "generation": 3, "stream": "stderr", "text": "text", "level": None}


def test_key_and_audit_views_show_all_fields_but_the_secret():
    held = {"id": "k", "name": "laptop", "user": "ada", "project": "theirs", "scope": "read", "installation": True}
    held["highest_priority"] = 5
    key = installation_tables.ApiKey(digest="secret", created_at=1.0, expires_at=2.0, revoked_at=3.0, **held)
    times = {"created_at": moment(1.0), "expires_at": moment(2.0), "revoked_at": moment(3.0)}
    assert shown(views.answer(access_schemas.ApiKey, key)) == {**held, **times}
    who = Identity("k", "laptop", "ada", "theirs", Scope.READ, installation=True, highest_priority=5)
    me = shown(views.me_view(who, browser=False))
    assert me == {"key": "k", "key_name": "laptop", "browser": False} | {
        name: held[name] for name in ("user", "project", "scope", "installation", "highest_priority")
    }
    record = {"project": "p", "key_name": "laptop", "user": "ada", "operation": "o", "target": "t", "address": "a"}
    entry = installation_tables.AuditEntry(id=7, time=1.0, key_id="k", status=409, code="c", **record)
    expected = {"id": "7", "time": moment(1.0), "key": "k", "status": 409, "code": "c", **record}
    assert shown(views.audit_view(entry)) == expected


def viewed(store, job_id: str) -> Any:
    return store.query(lambda session: views.job_view(session, jobs.get(session, job_id)))


@pytest.fixture
def job(store, document) -> Any:
    spec = JobSpec.model_validate(document)
    return store.write(lambda session: jobs.create(session, spec)[0])


def test_job_is_shown_with_all_its_numbers_and_times(store, job):
    fields = {"reason": "r", "message": "m", "step": 3, "steps": 10, "generation": 4, "restarts": 5}
    times = {"created_at": 1e9, "started_at": 2e9, "finished_at": 3e9, "memory_kept_until": 4e9}
    times["deletion_began_at"] = 5e9

    def change(session):
        row = jobs.get(session, job.id)
        for name, value in {**fields, **times, "metrics": {"loss": 1.5}}.items():
            setattr(row, name, value)

    store.write(change)
    answer = viewed(store, job.id)
    assert {name: getattr(answer, name) for name in fields} == fields
    assert {name: getattr(answer, name) for name in times} == {name: moment(at) for name, at in times.items()}
    assert (answer.metrics.latest["loss"], answer.metrics.latest["tokens"]) == (1.5, None)


def test_eta_of_a_training_job_is_that_of_its_remaining_steps(store, job):
    def train(session):
        generation = generations.begin(session, job.id, "test", False)
        rows = [{"step": step, "step_seconds": 2.0} for step in (1, 2, 3)]
        metrics.record(session, job.id, generation, 0, 1, rows)

    store.write(lambda session: jobs.transition(session, job.id, JobState.STARTING))
    assert viewed(store, job.id).eta_seconds is None, "before its first step"
    store.write(train)
    assert viewed(store, job.id).eta_seconds == pytest.approx(2.0 * 7)
    store.write(lambda session: jobs.transition(session, job.id, JobState.RUNNING))
    assert viewed(store, job.id).eta_seconds == pytest.approx(2.0 * 7)
    store.write(lambda session: jobs.transition(session, job.id, JobState.SUCCEEDED))
    assert viewed(store, job.id).eta_seconds is None, "it is over"


def test_layout_is_the_one_in_use_with_nothing_left_open(store, job):
    store.write(lambda session: setattr(jobs.get(session, job.id), "replicas", 3))
    row = store.query(jobs.get, job.id)
    layout = layout_in_use(ParallelConfig.model_validate(row.spec["parallel"]), row)
    parallel = viewed(store, job.id).parallel
    assert (parallel["data"], parallel["world_size"]) == (3, 12)
    assert parallel["sequence_parallel"] is layout.sequence_parallel_on


def test_dry_run_places_every_rank_up_to_as_many_as_are_listed(document, monkeypatch):
    spec = JobSpec.model_validate(document)
    layout = views.dry_run_view(spec, None, None, False, None, ()).layout
    assert layout.ranks is not None
    assert [place.rank for place in layout.ranks] == [0, 1, 2, 3]
    places = {(place.tensor, place.pipeline, place.data, place.context) for place in layout.ranks}
    assert places == {(tensor, stage, 0, 0) for tensor in (0, 1) for stage in (0, 1)}
    assert (layout.world_size, layout.micro_batches) == (4, spec.micro_batches)
    monkeypatch.setattr(views, "MAX_RANKS_LISTED", 4)
    assert views.dry_run_view(spec, None, None, False, None, ()).layout.ranks is not None
    monkeypatch.setattr(views, "MAX_RANKS_LISTED", 3)
    assert views.dry_run_view(spec, None, None, False, None, ()).layout.ranks is None
