"""What the dashboard writes."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from api.schemas import Cluster, Event, Job, LatestMetrics, Ledger, LogLine, Queue, Rank, Recovery
from api.ui import formatting

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


def make_job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "id": "job_1", "name": "small", "state": "RUNNING", "reason": None, "message": None, "spec": {}, "step": 1500,
        "steps": 6000, "eta_seconds": 65.0, "parallel": {"tensor": 2, "pipeline": 4, "data": 8}, "generation": 2,
        "restarts": 1, "goodput": 0.97, "queue": Queue(), "finished_at": None,
        "metrics": LatestMetrics(latest={"loss": 2.34567, "tokens_per_second": 12345.6, "mfu_full": 0.415}),
        "created_at": NOW - timedelta(hours=3), "started_at": NOW - timedelta(hours=2),
    }  # fmt: skip
    return Job(**{**values, **changes})


def test_a_row_says_what_is_known():
    row = formatting.job_row(make_job(), NOW)
    assert (row.step, row.share, row.loss) == ("1,500 / 6,000", 0.25, "2.3457")
    assert (row.tokens_per_second, row.mfu, row.restarts, row.age) == ("12,346", "41.5%", "1", "3 h")


def test_a_row_has_dashes_for_what_is_not_known():
    row = formatting.job_row(make_job(step=0, metrics=LatestMetrics(latest={"loss": None})), NOW)
    assert (row.loss, row.tokens_per_second, row.mfu, row.share) == ("–", "–", "–", 0.0)


def test_numbers_that_are_not_finite_are_spelled():
    job = make_job(metrics=LatestMetrics(latest={"loss": float("nan"), "tokens_per_second": float("inf")}))
    row = formatting.job_row(job, NOW)
    assert (row.loss, row.tokens_per_second) == ("nan", "inf")


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "just now"), (59, "just now"), (60, "1 min"), (7200, "2 h"), (90_000, "1 d")]
)
def test_age_is_coarse(seconds, text):
    assert formatting.age(NOW - timedelta(seconds=seconds), NOW) == text


def test_progress_names_the_expected_end_only_while_there_is_one():
    assert formatting.progress_text(make_job()) == "step 1,500 of 6,000, about 1m05s to go"
    assert formatting.progress_text(make_job(eta_seconds=None)) == "step 1,500 of 6,000"
    assert formatting.progress_text(make_job(step=6000)) == "step 6,000 of 6,000"


def test_why_is_said_when_a_job_is_not_running_well():
    assert formatting.why(make_job(reason="x", message="y")) == ""
    assert formatting.why(make_job(state="FAILED", reason="user_error", message="boom")) == "user_error: boom"
    waiting = make_job(state="QUEUED", reason="insufficient_slots", message="needs 64", queue=Queue(position=2))
    assert formatting.why(waiting) == "place 2 in the queue: insufficient_slots: needs 64"


def test_figures_of_a_job_stop_with_it():
    figures = formatting.job_figures(make_job(finished_at=NOW - timedelta(hours=1)), NOW)
    assert figures["Running for"] == "1h00m"
    assert figures["Ranks (t × p × d)"] == "2 × 4 × 8"
    assert (figures["Goodput"], figures["Generation"], figures["Validation loss"]) == ("97.0%", "2", "–")


def test_the_cluster_counts_living_nodes():
    node = {"id": "n", "address": "a", "accelerator": "slot", "total": 16, "free": 4}
    cluster = Cluster.model_validate({"nodes": [{**node, "alive": True}, {**node, "alive": False}]})
    assert formatting.cluster_text(cluster) == "1 node (1 lost), 4 of 16 slots free"
    gpus = Cluster.model_validate({"nodes": [{**node, "alive": True, "accelerator": "gpu"}] * 2})
    assert formatting.cluster_text(gpus) == "2 nodes, 8 of 32 GPUs free"


def test_gpus_and_slots_of_a_mixed_cluster_are_counted_apart():
    node = {"id": "n", "address": "a", "alive": True, "slots_total": 16, "slots_free": 4}
    with_gpus = {**node, "accelerator": "gpu", "total": 8, "free": 2}
    without = {**node, "accelerator": "cpu", "total": 16, "free": 4}
    mixed = Cluster.model_validate({"nodes": [with_gpus, without]})
    assert formatting.cluster_text(mixed) == "2 nodes, 2 of 8 GPUs and 8 of 32 slots free"


def make_rank(number: int, **changes: Any) -> Rank:
    place = {"rank": number, "tensor": number % 2, "pipeline": number // 2 % 2, "data": number // 4, "context": 0}
    return Rank.model_validate({**place, "node": "n1", "device": "cpu", "pid": 7, "generation": 3, "state": "running",
                                **changes})  # fmt: skip


def test_ranks_lie_by_replica_then_tensor_then_stage():
    cells = formatting.rank_cells([make_rank(number) for number in range(8)])
    assert [cell.rank for cell in cells] == [0, 2, 1, 3, 4, 6, 5, 7]
    assert (cells[1].column, cells[1].line, cells[1].place) == (1, 0, "stage 1, tensor 0")
    assert (cells[0].pid, cells[0].details) == ("pid 7", "node n1, device cpu, generation 3")


def test_a_rank_that_is_nowhere_has_dashes():
    (cell,) = formatting.rank_cells([make_rank(0, node=None, device=None, pid=None, state="exited")])
    assert (cell.pid, cell.tone, cell.details) == ("pid –", "idle", "node –, device –, generation 3")


def test_a_rank_that_is_missing_while_others_train_stands_out():
    cells = formatting.rank_cells([make_rank(0), make_rank(1, state="exited")])
    assert [cell.tone for cell in cells] == ["active", "bad"]


def test_context_ranks_have_lines_of_their_own():
    first, second = formatting.rank_cells([make_rank(0), make_rank(1, tensor=0, context=1)])
    assert (first.line, second.line, second.place) == (0, 1, "stage 0, tensor 0, ctx 1")


def make_ledger(**changes: Any) -> Ledger:
    values = {"seconds": {"queue": 10.0, "start": 0.0, "compute": 180.0, "re_form": 10.0}, "wall_seconds": 200.0,
              "goodput": 0.947, "closed": False, "began_at": NOW, "until": NOW}  # fmt: skip
    return Ledger.model_validate({**values, **changes})


def test_the_ledger_names_what_took_time_and_its_share():
    assert formatting.ledger_rows(make_ledger()) == [
        ("queue", 0.05, "10.0 s", "idle"),
        ("compute", 0.9, "3m00s", "good"),
        ("re-form", 0.05, "10.0 s", "bad"),
    ]
    assert formatting.ledger_rows(make_ledger(wall_seconds=0.0, seconds={"queue": 0.0})) == []
    assert formatting.ledger_note(make_ledger()) == "3m20s so far, goodput 94.7%"
    assert formatting.ledger_note(make_ledger(closed=True, goodput=None)) == "3m20s in all, goodput –"


def test_a_recovery_is_a_row_with_its_phases():
    phases = {"detect": 0.25, "rest": 0.5, "re_form": 0.125, "restore": None, "redo": None}
    recovery = Recovery(
        generation=2, time=NOW, kind="killed", rank=3, node="n1", cause="rank 3 was killed", forked=[3], kept=7,
        source="snapshot", resume_step=1500, steps_redone=None, wait_seconds=0.0, seconds=phases, total_seconds=None,
    )  # fmt: skip
    assert formatting.recovery_row(recovery) == (
        "01-02 12:00:00", "2", "rank 3 was killed", "1 of 8", "snapshot, step 1,500", "0.25 + 0.50 + 0.12 + – + –", "–"
    )  # fmt: skip


def test_events_and_logs():
    event = Event(id="1", time=NOW, type="state_changed", generation=None, rank=None, step=3, message="m",
                  data={"to": "RECOVERING"})  # fmt: skip
    assert formatting.event_row(event) == ("01-02 12:00:00", "state changed", "m", "–")
    assert formatting.event_tone(event) == "warn"
    assert formatting.event_tone(event.model_copy(update={"type": "rank_died"})) == "bad"
    lines = [LogLine(time=NOW, rank=rank, generation=1, stream="stdout", text=f"t{rank}") for rank in (0, 1)]
    assert formatting.log_text(lines, with_rank=True) == "[0] t0\n[1] t1"
    assert formatting.log_text(lines, with_rank=False) == "t0\nt1"
