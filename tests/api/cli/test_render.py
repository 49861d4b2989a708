"""What commands print for people."""

import io
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from manta.api import schemas
from manta.api.cli import render
from manta.api.cli.render import GAP, table, widths_of
from manta.api.schemas import access as access_schemas

MOMENT = datetime(2026, 1, 2, 12, 30, 15, tzinfo=UTC)


def later(hours):
    return MOMENT + timedelta(hours=hours)


def printed(show, *arguments):
    console = Console(file=io.StringIO(), width=300)
    show(console, *arguments)
    return console.file.getvalue()


def rows(show, *arguments):
    """The table as one dictionary a row."""
    lines = printed(show, *arguments).splitlines()
    starts = [0, *(place + 1 for place in range(1, len(lines[0])) if lines[0][place - 1 : place + 1] == "  ")]
    starts = [place for place in starts if lines[0][place : place + 1].strip()]
    ends = [*starts[1:], None]
    cells = [[line[start:end].strip() for start, end in zip(starts, ends, strict=True)] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]


def make_job(**changes):
    values = {
        "id": "job_1", "name": "small [odd]", "state": "FAILED", "reason": "user_error", "message": "boom", "step": 15,
        "spec": {"priority": 7}, "steps": 60, "eta_seconds": None, "generation": 3, "restarts": 2, "goodput": 0.875,
        "parallel": {"tensor": 2, "pipeline": 4, "data": 8, "world_size": 64}, "queue": schemas.Queue(),
        "metrics": schemas.LatestMetrics(latest={
            "loss": 2.34567, "validation_loss": 2.5, "memory_bytes": 3.5 * 2**30, "snapshot_every_steps": 4.0,
        }, mean={"tokens_per_second": 12345.6, "mfu_full": 0.415, "mfu_causal": 0.305}),
        "created_at": later(0), "started_at": later(1), "finished_at": later(2),
    }  # fmt: skip
    return schemas.Job(**{**values, **changes})


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * 2**20, "1.5 MiB"), (2**30, "1.0 GiB"),
     (2048 * 2**40, "2048.0 TiB")],
)  # fmt: skip
def test_byte_sizes_are_printed_in_binary_units(count, text):
    assert render.size(count) == text


def test_job_list_shows_one_row_per_job():
    (row,) = rows(render.job_list, [make_job(owner="ada", labels={"b": "2", "a": "1"}, running_seconds=125.0)])
    assert row == {
        "JOB": "job_1", "NAME": "small [odd]", "STATE": "FAILED", "STEP": "15/60", "LOSS": "2.3457",
        "TOKENS/S": "12,346", "TIME": "2m05s", "OWNER": "ada", "LAYOUT": "2x4x8", "RESTARTS": "2",
        "SUBMITTED": render.moment(later(0)), "LABELS": "a=1, b=2", "WHY": "boom",
    }  # fmt: skip


def test_job_list_on_a_narrow_terminal_has_reasons_below_the_table():
    waits = make_job(id="job_00000000000a", state="QUEUED", queue=schemas.Queue(position=2), message="needs 8 slots")
    jobs = [waits, make_job(id="job_00000000000b"), make_job(state="RUNNING", message="of no interest")]
    out = Console(width=80, force_terminal=True, file=io.StringIO(), markup=False, no_color=True)
    render.job_list(out, jobs)
    lines = Text.from_ansi(out.file.getvalue()).plain.splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].split()[:4] == ["JOB", "NAME", "STATE", "STEP"]
    assert lines[-2:] == [
        "small [odd] (job_00000000000a): position 2 in the queue: needs 8 slots",
        "small [odd] (job_00000000000b): boom",
    ]


def test_job_page_shows_what_is_known_and_nothing_else():
    job = make_job(memory_kept_until=later(3), queue=schemas.Queue(position=5), owner="ada", labels={"team": "x"})
    lines = dict(line.split("  ", 1) for line in printed(render.job_page, job).splitlines())
    said = {name.strip(): value.strip() for name, value in lines.items()}
    assert said.pop("progress").endswith("15/60  loss 2.3457  12,346 tokens/s  MFU 41.5%  restarts 2")
    assert said == {
        "job": "job_1 (small [odd])", "reason": "boom", "queue": "position 5", "validation loss": "2.5000",
        "layout": "2x4x8 (tensor x pipeline x data), 64 ranks", "memory of the largest rank": "3.5 GiB",
        "MFU": "41.5%", "MFU, causal attention": "30.5%", "goodput": "87.5%", "generation": "3, after 2 restarts",
        "steps redone after a crash": "at most 4", "owner": "ada", "labels": "team=x",
        "submitted": render.moment(later(0)), "started": render.moment(later(1)), "finished": render.moment(later(2)),
        "snapshots kept until": render.moment(later(3)),
    }  # fmt: skip
    sets = {"data": {"source": "python-stdlib", "validation": [{"name": "code"}, {"name": "prose"}]}}
    latest = schemas.LatestMetrics(latest={"validation_loss_code": 1.25})
    page = printed(render.job_page, make_job(spec=sets, metrics=latest, reason=None, message=None))
    assert [line.split()[-2:] for line in page.splitlines() if "validation" in line] == [["code", "1.2500"]]
    assert "reason" not in page and "queue" not in page


@pytest.mark.parametrize(
    ("assumed", "measured", "drift", "problem", "text"),
    [
        (False, None, None, None, "0.4 s"),
        (False, 0.5, None, None, "0.4 s; measured: 0.5 s (+25%)"),
        (True, 0.3, None, None, "0.4 s; measured: 0.3 s (a rough estimate: `manta calibrate` measures this machine)"),
        (False, 0.9, "0.9 s instead of 0.4 s", None, "0.9 s instead of 0.4 s"),
        (None, None, None, "no node has started yet", "no node has started yet"),
        (None, None, None, None, "-"),
    ],
)
def test_planned_step_is_shown_next_to_the_measured_one(assumed, measured, drift, problem, text):
    plan = schemas.JobPlan.model_construct(
        planned=None if assumed is None else schemas.PlannedStep.model_construct(step_seconds=0.4, assumed=assumed),
        measured=measured and schemas.MeasuredStep.model_construct(step_seconds=measured),
        drift=drift and schemas.PlanDrift.model_construct(message=drift),
        problem=problem,
    )
    assert render.planned_line(plan) == text


def test_edit_and_deletion_are_printed_as_one_line():
    assert printed(render.edited, make_job()) == "job_1 has name small [odd], priority 7; labels: none\n"
    gone = schemas.DeletedJob(id="job_1", rows={"jobs": 1, "events": 4}, checkpoints=1, logs=2, bytes=2048)
    assert printed(render.deletion, gone) == "job_1 is deleted: 1 checkpoint, 2 log files, 5 rows, 2.0 KiB\n"


def test_layout_page_shows_sizes_and_the_place_of_each_rank():
    place = schemas.RankPlace(rank=9, tensor=1, pipeline=2, data=3, context=0)
    layout = schemas.Layout(
        parallel={"tensor": 2, "pipeline": 4, "data": 8}, world_size=64, micro_batches=16, ranks=[place]
    )
    said = printed(render.layout_page, schemas.DryRun(spec={}, layout=layout)).splitlines()
    assert said[0] == "the spec is valid: 2x4x8 (tensor x pipeline x data), 64 ranks, 16 micro-batches per step"
    assert (said[1].split(), said[2].split()) == (["RANK", "TENSOR", "PIPELINE", "DATA"], ["9", "1", "2", "3"])


def test_event_and_log_lines_show_the_place_and_leave_out_what_is_unknown():
    happened = {"id": "1", "time": MOMENT, "type": "rank_lost", "generation": 0, "rank": 0, "step": 0, "data": {},
                "message": "it died"}  # fmt: skip
    when = render.moment(MOMENT)
    assert (
        render.event_line(schemas.Event(**happened))
        == f"{when}  rank_lost           generation 0 rank 0 step 0  it died"
    )
    nowhere = {**happened, "generation": None, "rank": None, "step": None}
    assert render.job_event_line(schemas.JobEvent(**nowhere, job="job_1")) == f"job_1  {when}  rank_lost{'':33}it died"
    line = schemas.LogLine(time=MOMENT, rank=3, generation=2, stream="stdout", text="hello")
    assert render.log_line(line) == f"{when} [3] hello"


def test_metric_table_has_columns_with_values_only():
    series = {
        "loss": [2.0, None], "tokens": [64.0, 128.0], "tokens_per_second": [1234.5, 2.0], "mfu_full": [0.5, 0.25],
        "memory_bytes": [1024.0, None], "learning_rate": [0.0003, None], "validation_loss": [None, None],
    }  # fmt: skip
    first, second = rows(render.metric_table, schemas.MetricSeries(steps=[4, 8], series=series))
    assert first == {
        "STEP": "4", "LOSS": "2.0000", "TOKENS": "64", "TOKENS_PER_SECOND": "1,234", "MFU_FULL": "50.0%",
        "MEMORY_BYTES": "1.0 KiB", "LEARNING_RATE": "0.0003",
    }  # fmt: skip
    assert (second["STEP"], second["LOSS"], second["MEMORY_BYTES"], second["LEARNING_RATE"]) == ("8", "-", "-", "-")


def test_ranks_and_checkpoints():
    rank = schemas.Rank(rank=5, tensor=1, pipeline=2, data=3, context=0, node="node-a", device="cuda:1", pid=4242,
                        generation=6, state="running")  # fmt: skip
    slow = {"own_seconds": 1.5, "usual_seconds": 0.5, "sentence": "it is slow"}
    known = schemas.Rank(
        **rank.model_dump(exclude={"own_seconds", "wait_seconds", "memory_bytes", "straggler"}),
        own_seconds=1.5,
        wait_seconds=0.25,
        memory_bytes=1024,
        straggler=slow,
    )
    (row,) = rows(render.rank_table, [known])
    assert list(row.values())[-4:] == ["1.500", "0.250", "1.0 KiB", "yes"]
    nowhere = rank.model_copy(update={"node": None, "device": None, "pid": None})
    first, second = rows(render.rank_table, [rank, nowhere])
    assert list(first.values()) == ["5", "1", "2", "3", "running", "node-a", "cuda:1", "4242", "6", "-", "-", "-", ""]
    assert (second["NODE"], second["DEVICE"], second["PID"]) == ("-", "-", "-")
    saved = schemas.Checkpoint(id="c", step=50, state="complete", path="/somewhere/50", bytes=4096, created_at=MOMENT)
    (row,) = rows(render.checkpoint_table, [saved])
    assert list(row.values()) == ["50", "complete", "4.0 KiB", render.moment(MOMENT), "/somewhere/50"]


def test_ledger_page_lists_classes_of_time_largest_first():
    spent = schemas.Ledger(seconds={"queue": 2.0, "compute": 6.0, "re_form": 0.5, "pause": 0.0}, wall_seconds=8.5,
                           goodput=0.75, closed=True, began_at=MOMENT, until=MOMENT)  # fmt: skip
    said = [line.split() for line in printed(render.ledger_page, spent).splitlines()]
    assert said == [
        ["CLASS", "SECONDS", "SHARE"], ["compute", "6.00", "70.6%"], ["queue", "2.00", "23.5%"],
        ["re-form", "0.50", "5.9%"], ["in", "all", "8.50"],
        ["goodput", "75.0%", "=", "compute", "/", "(wall", "-", "queue", "-", "pause)"],
    ]  # fmt: skip
    assert "so far" in printed(render.ledger_page, spent.model_copy(update={"closed": False}))


def test_recovery_table_shows_cause_source_and_phases():
    phases = {"detect": 0.1, "rest": 0.2, "re_form": 0.3, "restore": 0.4, "redo": None}
    entry = schemas.Recovery(
        generation=4, time=MOMENT, kind="killed", rank=3, node=None, cause="rank 3 was killed", forked=[3], kept=7,
        source="snapshot", resume_step=40, steps_redone=0, wait_seconds=0.0, seconds=phases, total_seconds=1.25,
    )  # fmt: skip
    (row,) = rows(render.recovery_table, [entry])
    assert row == {
        "GEN": "4", "TIME": render.moment(MOMENT), "CAUSE": "rank 3 was killed", "REPLACED": "1 of 8",
        "FROM": "snapshot 40", "REDONE": "0", "DETECT": "0.10", "REST": "0.20", "RE-FORM": "0.30", "RESTORE": "0.40",
        "REDO": "-", "TOTAL": "1.25",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("alive", "draining", "state"), [(True, False, "alive"), (True, True, "draining"), (False, True, "dead")]
)
def test_node_table_shows_state_units_and_jobs_of_a_node(alive, draining, state):
    held = [schemas.RunningRank(job=job, rank=rank) for rank, job in enumerate(("job_2", "job_1", "job_2"))]
    node = schemas.Node(id="n1", address="10.0.0.1", alive=alive, draining=draining, accelerator="slot", total=8.0,
                        free=5.0, ranks=held)  # fmt: skip
    (row,) = rows(render.node_table, schemas.Cluster(nodes=[node]))
    assert list(row.values()) == ["n1", "10.0.0.1", state, "slot", "5", "8", "job_1, job_2"]


def test_node_table_shows_slots_beside_the_gpus_of_a_node():
    node = schemas.Node(id="n1", address="10.0.0.1", alive=True, accelerator="gpu", total=8.0, free=5.0,
                        slots_total=16.0, slots_free=15.0)  # fmt: skip
    (row,) = rows(render.node_table, schemas.Cluster(nodes=[node]))
    assert list(row.values()) == ["n1", "10.0.0.1", "alive", "gpu", "5 + 15 slots", "8 + 16 slots", "-"]


def test_problem_of_a_node_is_printed_below_the_node_table():
    node = schemas.Node(
        id="n1", address="10.0.0.1", alive=True, accelerator="slot", total=8.0, free=0.0, problem="it has no Manta"
    )
    console = Console(width=200, record=True, file=io.StringIO())
    render.node_table(console, schemas.Cluster(nodes=[node]))
    printed = console.export_text()
    assert " problem " in printed and "no ranks are placed on n1: it has no Manta" in printed


def test_keys_projects_and_the_audit():
    key = access_schemas.ApiKey(id="k1", name="laptop", user=None, project="default", scope="read", installation=False,
                                created_at=MOMENT, expires_at=later(1), revoked_at=None)  # fmt: skip
    of_all = key.model_copy(update={"user": "ada", "installation": True, "expires_at": None, "highest_priority": 5})
    revoked = key.model_copy(update={"revoked_at": later(2)})
    shown = rows(render.key_table, [key, of_all, revoked])
    assert list(shown[0].values())[:6] == ["k1", "laptop", "-", "default", "read", render.moment(MOMENT)]
    assert [row["STATE"] for row in shown] == [f"until {render.moment(later(1))}", "good", "revoked"]
    assert (shown[1]["USER"], shown[1]["PROJECT"], shown[1]["SCOPE"]) == (
        "ada",
        "default",
        "read, all projects, priority 5 at most",
    )
    (row,) = rows(render.project_table, [access_schemas.Project(name="vision", created_at=MOMENT)])
    assert list(row.values()) == ["vision", render.moment(MOMENT)]
    entry = access_schemas.AuditEntry(
        id="1", time=MOMENT, project="vision", key="k1", key_name="laptop", user="ada", operation="cancel_job",
        target="job_1", address="10.0.0.9", status=409, code="wrong_state",
    )  # fmt: skip
    (row,) = rows(render.audit_table, [entry])
    assert list(row.values()) == [render.moment(MOMENT), "ada", "laptop", "vision", "cancel_job", "job_1", "10.0.0.9",
                                  "409 wrong_state"]  # fmt: skip


def test_empty_tables_print_a_sentence():
    assert printed(render.job_list, []) == "no jobs yet; submit one with `manta submit FILE`\n"
    assert printed(render.table, ["A"], [], "[none]") == "[none]\n"


JOB = "job_0vyq68q7jhxr"
HEADINGS = ("JOB", "NAME", "LOSS", "SUBMITTED")
ROW = (JOB, "quickstart", "5.2807", "2026-11-26 22:52:49")
WORDS = st.lists(st.text("abc0.漢", max_size=12), min_size=1, max_size=4).map(" ".join)


def table_of(width, *rows, headings=HEADINGS, spare=(), terminal=True):
    file = io.StringIO()
    table(Console(file=file, width=width, force_terminal=terminal, no_color=True), headings, rows, "none", spare)
    return [line.replace("\x1b[1m", "").replace("\x1b[0m", "").rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [30, 40, 50, 60, 80, 200])
def test_tables_break_no_word_at_any_width(width):
    text = "\n".join(table_of(width, ROW))
    assert all(word in text.split() for word in " ".join((*HEADINGS, *ROW)).split())


def test_table_cells_are_wrapped_between_words_when_space_is_short():
    assert table_of(49, ROW) == [
        "JOB               NAME        LOSS    SUBMITTED",
        f"{JOB}  quickstart  5.2807  2026-11-26",
        "                                      22:52:49",
    ]


def test_table_too_wide_for_the_terminal_keeps_its_rows_on_long_lines():
    assert table_of(30, ROW)[1] == "  ".join(ROW)


def test_table_omits_spare_columns_on_narrow_terminals_only_and_says_so():
    assert table_of(49, ROW, spare=("NAME", "LOSS")) == [
        "JOB               LOSS    SUBMITTED",
        f"{JOB}  5.2807  2026-11-26 22:52:49",
        "\x1b[2mColumns omitted for lack of room: NAME.",
    ]
    assert "quickstart" in table_of(49, ROW, spare=("NAME", "LOSS"), terminal=False)[1]
    assert len(table_of(80, ROW, spare=("NAME", "LOSS"))) == 2


def test_table_without_rows_prints_a_sentence():
    assert table_of(80) == ["none"]


@given(st.lists(st.lists(WORDS, min_size=3, max_size=3), min_size=1, max_size=4), st.integers(1, 120))
def test_table_columns_are_as_wide_as_the_terminal_allows(rows, width):
    columns = [["A", *(row[at] for row in rows)] for at in range(3)]
    widths = widths_of(columns, width)
    words = widths_of(columns, 0)
    assert all(one >= other for one, other in zip(widths, widths_of(columns, width - 1), strict=True))
    if sum(words) + 2 * GAP <= width:
        assert sum(widths) + 2 * GAP <= width
