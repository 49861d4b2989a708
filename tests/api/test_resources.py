"""Metrics, events, logs, ranks, checkpoints and the cluster, over HTTP."""

import json
import time

import pytest

from manta.service.logs.pages import log_file, log_folder
from manta.service.planner.hardware import Cluster, CpuNode
from manta.service.planner.job_plan import planned
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.store import checkpoints, events, exports, generations, jobs, plans, ranks, recoveries
from manta.service.store.tables import Generation
from manta.workers.checkpoint.catalog import checkpoint_path
from manta.workers.liveness.rank_samples import RankSample, packed
from manta.workers.paths import Paths
from manta.workers.spec.reading import parse_job_spec
from tests.api.conftest import DOCUMENT
from tests.api.support.problems import problem_of
from tests.api.test_sse_server import read_stream


def write_log(service, job_id, rank, *texts):
    folder = log_folder(service.control.home, job_id)
    folder.mkdir(parents=True, exist_ok=True)
    with log_file(folder, rank).open("a") as file:
        for number, text in enumerate(texts):
            entry = {"time": 1000.0 + number, "rank": rank, "generation": 1, "stream": "stdout", "text": text}
            file.write(json.dumps(entry) + "\n")


def test_metrics_are_filtered_by_name_step_and_number_of_points(service, job):
    service.report(job["id"], [{"step": n, "loss": 1.0 / n, "mine": n} for n in range(1, 101)])
    path = f"/v1/jobs/{job['id']}/metrics"
    everything = service.http.get(path).json()
    assert everything["steps"] == list(range(1, 101))
    assert "tokens_per_second" in everything["series"]
    some = service.http.get(path, params={"names": "loss,mine,step,nobody", "after_step": 98}).json()
    assert some["steps"] == [99, 100]
    assert some["series"] == {"loss": [1 / 99, 1 / 100], "mine": [99, 100], "nobody": [None, None]}
    few = service.http.get(path, params={"max_points": 10}).json()
    assert len(few["steps"]) <= 10
    assert (few["steps"][0], few["steps"][-1]) == (1, 100)


def test_events_come_in_pages_that_can_be_resumed(service, job):
    service.move(job["id"], "STARTING")
    path = f"/v1/jobs/{job['id']}/events"
    first = service.http.get(path, params={"limit": 1}).json()
    assert [event["type"] for event in first["items"]] == ["submitted"]
    second = service.http.get(path, params={"cursor": first["next_cursor"]}).json()
    assert [event["type"] for event in second["items"]] == ["state_changed"]
    assert set(second["items"][0]) == {"id", "time", "type", "generation", "rank", "step", "message", "data"}
    assert isinstance(second["items"][0]["id"], str)
    assert second["next_cursor"] is None
    service.store.write(lambda session: events.append(session, job["id"], "later", "came later"))
    third = service.http.get(path, params={"cursor": second["resume_cursor"]}).json()
    assert [event["type"] for event in third["items"]] == ["later"]


def test_events_by_type_generation_and_rank_from_either_end(service):
    job = service.submit()["id"]
    appended = [("a", 1, 0), ("b", 1, None), ("a", 2, 1), ("a", 2, 0), ("c", None, None)]

    def tell(session):
        for number, (kind, generation, rank) in enumerate(appended):
            events.append(session, job, kind, str(number), generation=generation, rank=rank)

    service.store.write(tell)

    def said(**parameters):
        page = service.http.get(f"/v1/jobs/{job}/events", params=parameters).json()
        return [event["message"] for event in page["items"]], page

    assert said(type="a")[0] == ["0", "2", "3"]
    assert said(type="c,b")[0] == ["1", "4"]
    assert said(generation=2, rank=0)[0] == ["3"]
    newest, page = said(type="a", order="desc", limit=2)
    assert newest == ["3", "2"]
    oldest, last = said(type="a", order="desc", cursor=page["next_cursor"])
    assert oldest == ["0"]
    service.store.write(lambda session: events.append(session, job, "a", "later"))
    assert said(type="a", cursor=page["resume_cursor"])[0] == ["later"]
    assert said(type="a", cursor=last["resume_cursor"])[0] == ["later"], "of any page, however far back"
    for foreign in ({}, {"type": "a"}, {"type": "b", "order": "desc"}):
        assert service.http.get(
            f"/v1/jobs/{job}/events", params={**foreign, "cursor": page["next_cursor"]}
        ).json()["errors"][0]["path"] == "cursor"  # fmt: skip
    service.move(job, "CANCELLED")
    entries, _ = read_stream(service, f"/v1/jobs/{job}/events?type=a&generation=2")
    assert [event["message"] for _, event in entries] == ["2", "3"]


def test_events_of_an_unknown_rank_are_refused_and_of_a_former_rank_listed(service):
    job = service.submit()["id"]
    service.store.write(lambda session: events.append(session, job, "a", "from before", rank=30))
    path = f"/v1/jobs/{job}/events"
    before = service.http.get(path, params={"rank": 30}).json()
    assert [event["message"] for event in before["items"]] == ["from before"]
    assert service.http.get(path, params={"rank": 30, "type": "b"}).json()["items"] == []
    assert service.http.get(path, params={"rank": 0}).json()["items"] == [], "a rank without events"
    size = service.http.get(f"/v1/jobs/{job}").json()["parallel"]["world_size"]
    for rank, parameters in ((31, {}), (31, {"order": "desc"}), (31, {"follow": True}), (size, {})):
        answer = service.http.get(path, params={"rank": rank, **parameters})
        assert (answer.status_code, answer.json()["code"]) == (404, "rank_not_found")
        assert answer.json()["detail"].startswith(f"{job} has no rank {rank}; its ")


def test_empty_event_page_keeps_its_cursor(service, job):
    """Else whoever comes back with what it was given last would see everything a second time."""
    path = f"/v1/jobs/{job['id']}/events"
    everything = service.http.get(path).json()
    nothing = service.http.get(path, params={"cursor": everything["resume_cursor"]}).json()
    assert (nothing["items"], nothing["resume_cursor"]) == ([], everything["resume_cursor"])


def test_logs_come_by_rank_or_merged(service, job):
    path = f"/v1/jobs/{job['id']}/logs"
    assert service.http.get(path).json()["items"] == []
    write_log(service, job["id"], 0, "a0", "a1")
    write_log(service, job["id"], 1, "b0")
    assert [line["text"] for line in service.http.get(path).json()["items"]] == ["a0", "b0", "a1"]
    assert [line["text"] for line in service.http.get(path, params={"rank": 1}).json()["items"]] == ["b0"]
    page = service.http.get(path, params={"limit": 2}).json()
    rest = service.http.get(path, params={"cursor": page["next_cursor"]}).json()
    assert [line["text"] for line in rest["items"]] == ["a1"]
    assert rest["next_cursor"] is None
    write_log(service, job["id"], 1, "b1")
    later = service.http.get(path, params={"cursor": rest["resume_cursor"]}).json()
    assert [line["text"] for line in later["items"]] == ["b1"]
    assert set(later["items"][0]) == {"time", "rank", "generation", "stream", "text", "level"}


def test_ranks_and_checkpoints_are_shown_as_stored(service, job):
    row = {"rank": 0, "tensor": 0, "pipeline": 0, "data": 0, "node": "n1", "device": "cpu", "pid": 7, "generation": 1}

    def prepare(session):
        generations.begin(session, job["id"], "submitted", False)
        ranks.replace(session, job["id"], [{**row, "state": "running", "actor": "manta-x"}])
        saved = checkpoints.begin(session, job["id"], 1, 5, "/somewhere/5")
        checkpoints.complete(session, saved.id, 123)

    service.store.write(prepare)
    shown = service.http.get(f"/v1/jobs/{job['id']}/ranks").json()
    unknown = dict.fromkeys(("expert", "own_seconds", "wait_seconds", "memory_bytes", "straggler"))
    assert shown == {"items": [{**row, "context": 0, "state": "running", **unknown}], "next_cursor": None}
    saved = service.http.get(f"/v1/jobs/{job['id']}/checkpoints").json()["items"]
    assert [(entry["step"], entry["state"], entry["bytes"]) for entry in saved] == [(5, "complete", 123)]
    assert saved[0].pop("age_seconds") >= 0
    assert (saved[0]["generation"], saved[0]["exists"]) == (1, True)
    assert saved[0]["kept_because"] == "newest: the job would continue from it"


def test_checkpoint_list_says_why_each_is_kept(service):
    job = service.submit(checkpoint={"keep": 2})["id"]

    def save(session):
        generations.begin(session, job, "submitted", False)
        for step in (5, 10, 15, 20):
            row = checkpoints.begin(session, job, 1, step, f"/somewhere/{step}")
            if step < 20:
                checkpoints.complete(session, row.id, 1)

    service.store.write(save)
    shown = service.http.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert [(each["step"], each["exists"], each["kept_because"]) for each in shown] == [
        (20, None, None), (15, True, "newest: the job would continue from it"),
        (10, True, "kept: among the newest 2"), (5, True, None),
    ]  # fmt: skip
    assert (shown[0]["age_seconds"], shown[1]["age_seconds"] >= 0) == (None, True)
    for state, why in (("FAILED", shown[1]["kept_because"]), ("SUCCEEDED", "final state")):
        service.store.write(lambda session, state=state: setattr(jobs.get(session, job), "state", state))
        listed = service.http.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
        assert listed[1]["kept_because"] == why


def test_checkpoints_have_the_losses_of_their_steps(service):
    job = service.submit()["id"]
    rows = [{"loss": 3.5, "validation_loss": 3.25}, {"loss": 3.0}, {"loss": 2.5, "validation_loss_chats": 2.75}]
    service.report(job, [{"step": step, **row} for step, row in zip((5, 7, 8), rows, strict=True)])
    for step in (5, 7, 8, 9):
        service.store.write(lambda session, step=step: checkpoints.begin(session, job, 1, step, f"/{step}"))
    shown = service.http.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    losses = [(each["loss"], each["validation_loss"]) for each in shown]
    assert losses == [(None, None), (2.5, 2.75), (3.0, None), (3.5, 3.25)]


def test_spec_of_a_job_is_shown_as_it_was_written_and_with_all_defaults(service):
    job = service.submit(train={**DOCUMENT["train"], "steps": 7})
    shown = service.http.get(f"/v1/jobs/{job['id']}/spec").json()
    assert shown["spec"] == job["spec"] and shown["written"]["train"] == {**DOCUMENT["train"], "steps": 7}
    assert "checkpoint" not in shown["written"]


def test_checkpoint_deletion_is_refused_if_the_job_needs_it_unless_forced(service):
    job = service.submit()["id"]
    place = checkpoint_path(Paths.of(service.control.home).checkpoint_folder(job), 5, 1)
    place.mkdir(parents=True)

    def save(session):
        generations.begin(session, job, "submitted", False)
        row = checkpoints.begin(session, job, 1, 5, str(place))
        checkpoints.complete(session, row.id, 1)
        return row.id

    path = f"/v1/jobs/{job}/checkpoints/{service.store.write(save)}"
    refused = service.http.delete(path)
    assert (refused.status_code, refused.json()["code"], place.exists()) == (409, "checkpoint_needed", True)
    deleted = service.http.delete(path, params={"force": "true"}).json()
    assert (deleted["state"], deleted["exists"], place.exists()) == ("deleted", False, False)
    assert problem_of(service.http.delete(f"/v1/jobs/{job}/checkpoints/ckpt_x")) == (404, "checkpoint_not_found")


def test_rank_numbers_are_shown_for_the_last_step_and_as_history(service):
    job = service.submit()["id"]
    place = {"rank": 0, "tensor": 0, "pipeline": 0, "data": 0, "generation": 1, "state": "running"}

    def prepare(session):
        generations.begin(session, job, "submitted", False)
        ranks.replace(session, job, [place, {**place, "rank": 1, "data": 1}])
        for step in (5, 6):
            sample = RankSample(step, 1.0, packed([0.25, 0.5]), packed([7.0, 8.0]))
            ranks.store_numbers(session, job, 1, sample, 2.0 * step)

    service.store.write(prepare)
    first, second = service.http.get(f"/v1/jobs/{job}/ranks").json()["items"]
    assert (first["own_seconds"], first["wait_seconds"], first["memory_bytes"]) == (0.25, 0.75, 7)
    assert (second["own_seconds"], second["straggler"]) == (0.5, None)
    history = service.http.get(f"/v1/jobs/{job}/ranks/history").json()
    assert (history["steps"], history["own_seconds"]) == ([5, 6], [[0.25, 0.5]] * 2)
    assert service.http.get(f"/v1/jobs/{job}/ranks/history?after_step=5&max_points=1").json()["steps"] == [6]
    assert service.http.get(f"/v1/jobs/{job}/ranks/history?max_points=301").status_code == 422


def test_tokens_of_experts_are_shown_by_layer(service, document):
    moe = {"experts": 4, "per_token": 2, "ffn_hidden_size": 16, "first_dense": 1}
    job = service.submit(model={**document["model"], "family": "llama", "layers": 3, "moe": moe})["id"]
    path = f"/v1/jobs/{job}/experts"
    assert service.http.get(path).json() == {"step": None, "layers": [], "tokens": [], "load": []}

    def prepare(session):
        generations.begin(session, job, "submitted", False)
        counts = packed([10, 10, 10, 10, 25, 5, 6, 4])
        sample = RankSample(5, 1.0, None, packed([7.0]), expert_tokens=counts)
        ranks.store_numbers(session, job, 1, sample, 10.0)

    service.store.write(prepare)
    assert service.http.get(path).json() == {
        "step": 5, "layers": [1, 2], "tokens": [[10] * 4, [25, 5, 6, 4]], "load": [1.0, 2.5],
    }  # fmt: skip


def test_weights_are_exported_below_the_folder_for_that(service):
    job = service.submit()["id"]

    def save(session):
        row = checkpoints.begin(session, job, 0, 5, "/somewhere/5")
        checkpoints.complete(session, row.id, 1)
        return row.id

    checkpoint = service.store.write(save)
    path = f"/v1/jobs/{job}/checkpoints/{checkpoint}/export"
    begun = service.http.post(path, json={"to": "mine", "dtype": "bf16"})
    assert (begun.status_code, begun.json()["state"], begun.json()["format"]) == (202, "running", "hf")
    assert begun.json()["to"] == str(service.control.home / "exports" / "mine")
    assert service.http.get(f"/v1/jobs/{job}/exports").json()["items"] == [begun.json()]
    one = f"/v1/jobs/{job}/exports/{begun.json()['id']}"
    service.store.write(lambda session: exports.end(session, begun.json()["id"], "no room"))
    assert {"state": "failed", "message": "no room"}.items() <= service.http.get(one).json().items()
    begun = service.http.post(path, json={"to": "again"}).json()
    service.store.write(lambda session: setattr(exports.get(session, job, begun["id"]), "updated_at", 5.0))
    lost = service.http.get(f"/v1/jobs/{job}/exports/{begun['id']}").json()
    assert lost["state"] == "failed" and "has ended" in lost["message"]
    (service.control.home / "exports").mkdir()
    wrong = [({"to": to}, "to") for to in ("/etc/x", "", "a" * 300)]
    for body, field in (*wrong, ({"to": "a", "format": "gguf"}, "format")):
        refused = service.http.post(path, json=body)
        assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, field)
    assert problem_of(service.http.get(f"/v1/jobs/{job}/exports/export_x")) == (404, "export_not_found")


def test_waits_and_stack_of_a_rank_are_served(service):
    job = service.submit()["id"]
    waits = service.http.get(f"/v1/jobs/{job}/waits").json()
    assert (waits["culprits"], waits["sentence"][:19]) == ([0], "the job is stuck be")
    assert waits["ranks"][1] == {
        "rank": 1, "phase": "backward", "doing": "backward, waiting for rank 0 to send a message",
        "since_seconds": 2.0, "waits_for": [0], "step": 7,
    }  # fmt: skip
    stack = service.http.get(f"/v1/jobs/{job}/ranks/1/stack").json()
    assert (stack["rank"], stack["pid"], stack["text"][:14]) == (1, 4711, "Current thread")
    assert problem_of(service.http.get(f"/v1/jobs/{job}/ranks/2/stack")) == (404, "rank_not_found")
    assert service.http.get(f"/v1/jobs/{job}/ranks/x/stack").status_code == 422


CLASSES = [
    "queue", "start", "compute", "data_wait", "snapshot_stall", "checkpoint_stall", "detect", "re_form", "restore",
    "redo", "idle_without_capacity", "pause",
]  # fmt: skip


def test_ledger_accounts_for_every_second_of_a_job(service, job):
    path = f"/v1/jobs/{job['id']}/ledger"
    waiting = service.http.get(path).json()
    assert list(waiting["seconds"]) == CLASSES
    assert (waiting["closed"], waiting["goodput"], waiting["began_at"]) == (False, None, job["created_at"])
    service.move(job["id"], "STARTING", "RUNNING")
    row = {"step": 1, "time": time.time(), "seconds": {"wall": 0.002, "data_wait": 0.001}}
    service.report(job["id"], [row])
    service.move(job["id"], "SUCCEEDED")
    ended, shown = service.http.get(path).json(), service.http.get(f"/v1/jobs/{job['id']}").json()
    assert set(ended) == {"seconds", "wall_seconds", "goodput", "closed", "began_at", "until", "intervals"}
    assert ended["intervals"] is None
    line = service.http.get(f"{path}?intervals=true").json()["intervals"]
    assert (line[0]["begin"], line[-1]["end"]) == (ended["began_at"], ended["until"])
    assert sum(ended["seconds"].values()) == pytest.approx(ended["wall_seconds"])
    assert (ended["closed"], ended["until"], ended["goodput"]) == (True, shown["finished_at"], shown["goodput"])
    assert service.http.get("/v1/jobs/job_000000000000/ledger").json()["code"] == "job_not_found"


def test_job_plan_is_shown_beside_measured_steps(service, job):
    path = f"/v1/jobs/{job['id']}/plan"
    before = service.http.get(path).json()
    assert (before["planned"], before["measured"], before["compared"]) == (None, None, [])
    assert before["problem"] == "a job is planned when it starts"
    parallel = {"tensor": 2, "pipeline": 2, "data": 1}
    spec = parse_job_spec(DOCUMENT)
    of_step = planned(spec, Cluster(CpuNode(4, 2.0**33).machine(4), 1, 4))
    service.move(job["id"], "STARTING", "RUNNING")
    kept = {"parallel": parallel, "planned": of_step, "problem": None}
    parts = {f"{part}_seconds": 0.01 for part in ("forward", "backward", "bubble")}
    rows = [
        {"step": step, "step_seconds": 0.04, "tokens_per_second": 800.0, "memory_bytes": 7, **parts}
        for step in range(1, 8)
    ]
    service.report(job["id"], rows)
    service.control.store.write(lambda s: plans.store(s, job["id"], 1, kept))
    shown = service.http.get(path).json()
    assert (shown["generation"], shown["parallel"], shown["problem"], shown["drift"]) == (1, parallel, None, None)
    assert sum(part["fraction"] for part in shown["planned"]["parts"]) == pytest.approx(1)
    measured = shown["measured"]
    assert (measured["first_step"], measured["last_step"], measured["step_seconds"]) == (6, 7, 0.04)
    groups = {each["name"]: each for each in shown["compared"]}
    assert groups["computing"]["measured"] == pytest.approx(0.02) and groups["computing"]["planned"] > 0
    assert service.http.get("/v1/jobs/job_000000000000/plan").json()["code"] == "job_not_found"


def test_job_plan_picture_shows_the_stored_plan(service, job):
    path = f"/v1/jobs/{job['id']}/plan/picture"
    assert problem_of(service.http.get(path)) == (409, "nothing_planned")
    layout = {"tensor": 2, "pipeline": 2, "data": 1}
    of_step = planned(parse_job_spec(DOCUMENT), Cluster(CpuNode(4, 2.0**33).machine(4), 1, 4))
    service.move(job["id"], "STARTING", "RUNNING")
    service.report(job["id"], [{"step": 1, "step_seconds": 0.04}])

    def keep(plan):
        kept = {"parallel": layout, "planned": plan, "problem": None}
        service.control.store.write(lambda s: plans.store(s, job["id"], 1, kept))

    keep(of_step)
    drawn = service.http.get(path)
    assert drawn.headers["content-type"].startswith("image/svg+xml") and drawn.text.startswith("<svg ")
    assert job["id"] in drawn.text and "stage 1" in drawn.text and "<script" not in drawn.text
    keep({name: value for name, value in of_step.items() if name != "cluster"})
    assert "planned by another release" in service.http.get(path).json()["detail"]
    layout["folds"] = 2
    keep(of_step)
    assert "planned by another release" in service.http.get(path).json()["detail"]


@pytest.mark.parametrize(
    "kept",
    [
        {"plan": {"parallel": {}, "planned": {"seconds": 1.0}, "problem": None}},
        {"plan": {"layout": {}}},
        {"plan": {"parallel": {}, "planned": None, "problem": "unknown"}, "measured": {"steps": {"seconds": 1.0}}},
    ],
)
def test_stored_plan_of_another_release_is_a_problem_text_and_no_error(service, job, kept):
    service.move(job["id"], "STARTING", "RUNNING")
    service.report(job["id"], [{"step": step, "step_seconds": 0.04} for step in range(1, 8)])
    row = (job["id"], 1)
    service.control.store.write(lambda session: setattr(session.get(Generation, row), "data", kept))
    answer = service.http.get(f"/v1/jobs/{job['id']}/plan")
    assert (answer.status_code, answer.json()["planned"], answer.json()["generation"]) == (200, None, 1)
    assert answer.json()["problem"]


def fail_once(service, job_id):
    """Two generations, the second one begun because rank 3 of the first was killed."""

    def operation(session):
        generations.begin(session, job_id, "submitted", False)
        number = generations.begin(session, job_id, "rank 3 was killed", True)
        timeline = RecoveryTimeline(noticed_at=101.0, failed_at=100.0, rested_at=102.0)
        known = {"kind": "killed", "rank": 3, "cause": "rank 3 was killed", "node": "n1"}
        recoveries.begin(session, job_id, number, timeline, **known, source="snapshot", resume_step=40)
        recoveries.record_replaced(session, job_id, number, (3,), 7)

    service.store.write(operation)


def test_recoveries_list_cause_replaced_ranks_and_duration(service, job):
    path = f"/v1/jobs/{job['id']}/recoveries"
    assert service.http.get(path).json() == {"items": [], "next_cursor": None}
    fail_once(service, job["id"])
    (recovery,) = service.http.get(path).json()["items"]
    assert recovery == {
        "generation": 2, "time": "1970-01-01T00:01:40.000000Z", "kind": "killed", "rank": 3, "node": "n1",
        "cause": "rank 3 was killed", "forked": [3], "kept": 7, "source": "snapshot", "resume_step": 40,
        "steps_redone": None, "wait_seconds": 0.0, "total_seconds": None,
        "seconds": {"detect": 1, "rest": 1, "re_form": None, "restore": None, "redo": None},
    }  # fmt: skip
    assert service.http.get("/v1/jobs/job_000000000000/recoveries").json()["code"] == "job_not_found"
    assert service.http.get(path, params={"cursor": "nonsense!"}).status_code == 422


@pytest.mark.parametrize(("resource", "number", "expected"), [
    ("checkpoints", "step", [30, 20, 10]), ("recoveries", "generation", [1, 2, 3]),
])  # fmt: skip
def test_resource_lists_are_paged_by_the_requested_limit(service, job, resource, number, expected):
    def prepare(session):
        for step in (10, 20, 30):
            begun = generations.begin(session, job["id"], "rank 3 was killed", True)
            known = {"kind": "killed", "rank": 3, "cause": "rank 3 was killed"}
            recoveries.begin(session, job["id"], begun, RecoveryTimeline(101.0), **known)
            checkpoints.begin(session, job["id"], begun, step, f"/somewhere/{step}")

    service.store.write(prepare)
    path = f"/v1/jobs/{job['id']}/{resource}"
    first = service.http.get(path, params={"limit": 2}).json()
    rest = service.http.get(path, params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert [[item[number] for item in page["items"]] for page in (first, rest)] == [expected[:2], expected[2:]]
    assert rest["next_cursor"] is None


def test_cluster_resource_shows_the_control_planes_view(service):
    node = service.http.get("/v1/cluster").json()["nodes"][0]
    assert (node["total"], node["free"], node["ranks"]) == (16, 15, [{"job": "job_000000000001", "rank": 0}])


def test_a_node_is_drained_by_the_start_of_its_id(service):
    answer = service.http.post("/v1/nodes/abcd/drain", json={"deadline_seconds": 30})
    assert (answer.status_code, answer.json()["id"], answer.json()["draining"]) == (202, "abcd1234", True)
    assert service.http.post("/v1/nodes/abcd/drain", json={"deadline_seconds": 0}).status_code == 202
    assert service.http.post("/v1/nodes/abcd/drain", json={}).status_code == 202
    deadlines = [f"drain within {seconds} s" for seconds in (30, 0, 120)]
    assert service.control.asked == [(each, "abcd") for each in deadlines]
    assert problem_of(service.http.post("/v1/nodes/0123/drain", json={})) == (404, "node_not_found")
    assert service.http.post("/v1/nodes/abcd/drain", json={"deadline_seconds": -1}).status_code == 422


def test_health_is_about_the_process_and_readiness_about_the_rest(service):
    for path in ("/healthz", "/readyz"):
        assert service.http.head(path).status_code == 200, "as some probes ask"
    assert service.http.get("/readyz").json() == {"status": "ready"}
    service.control.reasons = ["Ray does not answer"]
    response = service.http.get("/readyz")
    assert (response.status_code, response.json()["code"]) == (503, "not_ready")
    assert response.json()["errors"][0]["rule"] == "Ray does not answer"
    assert service.http.get("/healthz").status_code == 200


def test_prometheus_sees_unfinished_jobs(own_service):
    done, running = own_service.submit(), own_service.submit()
    own_service.move(done["id"], "STARTING", "SUCCEEDED")
    own_service.move(running["id"], "STARTING", "RUNNING")
    own_service.report(running["id"], [{"step": 3, "loss": 2.5, "mfu_full": 0.25, "step_seconds": 0.001}])
    own_service.http.get("/v1/jobs/job_000000000000")
    own_service.http.get("/nothing/here")
    text = own_service.http.get("/metrics").text
    assert 'manta_jobs{state="RUNNING"} 1.0' in text
    assert 'manta_jobs{state="FAILED"} 0.0' in text
    assert f'manta_job_step{{job="{running["id"]}"}} 3.0' in text
    assert f'manta_job_loss{{job="{running["id"]}"}} 2.5' in text
    assert f'manta_job_mfu_full_ratio{{job="{running["id"]}"}} 0.25' in text
    assert f'manta_job_goodput_ratio{{job="{running["id"]}"}}' in text
    assert f'manta_job_ledger_seconds{{class="redo",job="{running["id"]}"}} 0.0' in text
    assert f'manta_job_restarts_total{{job="{running["id"]}"}} 0.0' in text
    assert done["id"] not in text
    assert 'route="/v1/jobs/{job_id}",status="404"' in text
    assert 'route="unmatched",status="404"' in text
    assert "nothing/here" not in text
