"""The `manta` command against a real server: output for people and programs, exit codes, never a traceback."""

import json
from unittest.mock import Mock

import httpx
import pytest
import typer
from typer.testing import CliRunner

from manta.api.cli import jobs, main
from manta.api.cli.main import app
from manta.api.cli.overview import overview
from manta.api.client import Client
from manta.service.logs.pages import log_file, log_folder
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.store import checkpoints, events, generations, ranks, recoveries
from tests.api.support.silent_service import SilentService


def died(session, job_id, generation, cause):
    """The recovery that `generation` begins with, from the loss of rank 3."""
    known = {"kind": "killed", "rank": 3, "cause": cause, "node": "node-a"}
    timeline = RecoveryTimeline(101.0)
    recoveries.begin(session, job_id, generation, timeline, **known, source="snapshot", resume_step=40)
    recoveries.record_replaced(session, job_id, generation, (3,), 7)


@pytest.fixture
def job(service):
    """A job of which everything is known."""
    job_id = service.submit()["id"]
    service.move(job_id, "STARTING", "RUNNING")
    place = {"rank": 0, "tensor": 0, "pipeline": 0, "data": 0, "node": "node-a", "device": "cpu", "pid": 4242}

    def prepare(session):
        generation = generations.begin(session, job_id, "submitted", False)
        ranks.replace(session, job_id, [{**place, "generation": generation, "state": "running"}])
        checkpoints.begin(session, job_id, generation, 5, "/somewhere/5")
        died(session, job_id, generation, "rank 3 [odd] was killed")
        events.append(session, job_id, "told", "something [odd] happened", step=3)

    service.store.write(prepare)
    row = {"loss": 3.5, "mfu_full": 0.25, "tokens_per_second": 1000, "step_seconds": 0.1}
    service.report(job_id, [{**row, "step": n} for n in (1, 2)])
    folder = log_folder(service.control.home, job_id)
    folder.mkdir(parents=True)
    for rank in (0, 1):
        line = {"time": rank, "rank": rank, "generation": 1, "stream": "stdout", "text": f"[hello] from {rank}"}
        log_file(folder, rank).write_text(json.dumps(line) + "\n")
    return job_id


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["ps"], ["small", "RUNNING", "2/10", "3.5000", "2x2x1"]),
        (["status", "JOB"], ["RUNNING", "loss 3.5000", "25.0%", "2x2x1", "4 ranks"]),
        (["logs", "JOB"], ["[0] [hello] from 0", "[1] [hello] from 1"]),
        (["events", "JOB"], ["submitted", "something [odd] happened", "step 3"]),
        (["metrics", "JOB"], ["LOSS", "3.5000", "25.0%", "1,000"]),
        (["checkpoints", "JOB"], ["5", "saving", "/somewhere/5"]),
        (["ledger", "JOB"], ["SHARE", "so far", "goodput"]),
        (["recoveries", "JOB"], ["rank 3 [odd] was killed", "1 of 8", "snapshot 40", "RE-FORM"]),
        (["ranks", "JOB"], ["node-a", "4242", "running"]),
        (["nodes"], ["127.0.0.1", "alive", "16"]),
    ],
)
def test_each_command_shows_its_data_as_text_and_json(manta, job, command, expected):
    arguments = [job if argument == "JOB" else argument for argument in command]
    shown = manta(*arguments).stdout
    for text in expected:
        assert text in shown
    machine = manta(*arguments, "--json").stdout
    documents = [json.loads(line) for line in machine.splitlines()] if command[0] in ("logs", "events") else None
    assert documents or json.loads(machine)


def test_logs_with_a_rank_print_only_the_lines_of_that_rank(manta, job):
    assert manta("logs", job, "--rank", 1).stdout.endswith(" [1] [hello] from 1\n")


def test_logs_and_events_are_printed_to_their_last_page(manta, service, job):
    many = [f"number {number} of many" for number in range(600)]
    notice = "[W1126 02:22:00.5 socket.cpp:752] [c10d] The client socket has failed to connect"
    line = {"time": 2.0, "rank": 0, "generation": 1, "stream": "stdout"}
    with log_file(log_folder(service.control.home, job), 0).open("a") as file:
        file.writelines(json.dumps({**line, "text": text}) + "\n" for text in (*many, notice))
    service.store.write(lambda session: [events.append(session, job, "counted", text) for text in many])
    newest = manta("logs", job)
    assert [line.split(" [0] ")[1] for line in newest.stdout.splitlines()] == many[-200:]
    assert "--all" in newest.stderr
    assert [line.split("] ")[1] for line in manta("logs", job, "--all").stdout.splitlines()[-600:]] == many
    assert manta("logs", job, "--notices", "--tail", 1).stdout.endswith(f"{notice}\n")
    manta("logs", job, "--all", "--tail", 1, code=2)
    printed = [json.loads(line)["message"] for line in manta("events", job, "--json").stdout.splitlines()]
    assert printed[-600:] == many


def test_events_without_a_job_lists_those_of_all_jobs_and_filters_by_type(manta, service, job):
    other = service.submit()["id"]
    lines = manta("events").stdout.splitlines()
    assert {line.split()[0] for line in lines} == {job, other}
    assert [line["job"] for line in map(json.loads, manta("events", "--json").stdout.splitlines())][-1] == other
    (line_of_event,) = manta("events", "--type", "told").stdout.splitlines()
    assert line_of_event.startswith(job) and line_of_event.endswith("something [odd] happened")
    assert manta("events", job, "--type", "told").stdout.count("\n") == 1


def test_empty_results_are_explained_to_people_and_not_to_programs(manta, job):
    assert manta("ps", "--state", "paused").stdout == "no job matches\n"
    assert manta("ps", "--name", "").stdout == manta("ps", "--owner", "nobody").stdout == "no job matches\n"
    assert manta("ps", "--state", "paused", "--json").stderr == ""
    assert manta("metrics", job, "--after-step", 10).stdout == "no step above 10 is committed yet\n"
    some = manta("metrics", job, "--names", "loss,lose,mfu")
    assert some.stderr.startswith("no value of lose, mfu (did you mean loss or mfu_full?)")
    assert some.stdout.split()[:2] == ["STEP", "LOSS"]
    none = manta("metrics", job, "--names", "unlike_any_other")
    assert none.stderr == f"no value of unlike_any_other: `manta metrics {job}` lists the metrics\n"
    assert none.stdout == "", "no table of no values"
    assert list(json.loads(manta("metrics", job, "--names", "lose", "--json").stdout)["series"]) == ["lose"]
    assert manta("logs", job, "--level", "CRITICAL").stderr == "no line matches\n"
    assert manta("events", job, "--type", "recoverd").stderr == "no event matches\n"
    assert manta("events", job, "--type", "recoverd", "--json").stderr == ""


@pytest.mark.parametrize("filters", ["events --rank", "events --generation", "logs --rank"])
def test_filter_by_rank_or_generation_0_is_applied(manta, service, filters):
    command, option = filters.split()
    sentence = f"no {command.removesuffix('s').replace('log', 'line')} matches\n"
    assert manta(command, service.submit()["id"], option, 0).stderr == sentence


def test_invalid_names_are_refused_with_the_rule(manta, service, job):
    assert "name: must be letters, digits, '.', '_'" in manta("edit", job, "--name", "a/b", code=2).stderr
    assert "name: must have at least 1 character" in manta("edit", job, "--name", "", code=2).stderr
    assert "labels.a b: must be letters, digits" in manta("edit", job, "--label", "a b=c", code=2).stderr
    assert "`manta nodes` lists the nodes" in manta("drain", "the-first", code=2).stderr
    assert "must be lower-case letters" in service.http.post("/v1/projects", json={"name": "A B"}).json()["detail"]


@pytest.mark.parametrize("command", ["logs", "events"])
def test_followed_job_output_ends_once_the_job_is_final(manta, service, job, command):
    service.move(job, "SUCCEEDED")
    assert manta(command, job, "-f").stdout.startswith(manta(command, job).stdout)


def test_cancel_moves_a_job_to_cancelling_and_is_refused_once_it_is_final(manta, service, job):
    assert manta("cancel", job).stdout == f"{job} is CANCELLING\n"
    assert manta("cancel", job).stdout == f"{job} is CANCELLING\n", "who did not hear the answer may ask again"
    service.move(job, "CANCELLED")
    assert "CANCELLED" in manta("cancel", job, code=2).stderr


def test_waits_and_stack_commands_show_culprits_and_where_a_rank_stands(manta, job):
    lines = manta("waits", job).stdout.splitlines()
    assert lines[0] == "the job is stuck because of rank 0: it waits for nobody"
    assert lines[-1].split() == [
        "1", "7", "2.0", "backward,", "waiting", "for", "rank", "0", "to", "send", "a", "message",
    ]  # fmt: skip
    assert json.loads(manta("waits", job, "--json").stdout)["culprits"] == [0]
    assert manta("stack", job, 1).stdout == "Current thread (most recent call first)\n"
    assert "its ranks are 0 to 1" in manta("stack", job, 2, code=2).stderr


def test_edit_changes_name_priority_and_labels_of_a_job(manta, service, job):
    assert manta("edit", job, "--priority", 3).stdout == f"{job} has name small, priority 3; labels: none\n"
    assert json.loads(manta("edit", job, "--name", "better", "--json").stdout)["name"] == "better"
    labelled = manta("edit", job, "--label", "team=vision", "--label", "a=b").stdout
    assert labelled.endswith("; labels: a=b, team=vision\n")
    assert json.loads(manta("edit", job, "--label", "a-", "--json").stdout)["labels"] == {"team": "vision"}
    assert json.loads(manta("edit", job, "--label", "team=", "--json").stdout)["labels"] == {"team": ""}
    assert "--label team=VALUE" in manta("edit", job, "--label", "team", code=2).stderr
    assert "priority" in manta("edit", job, "--priority", 5000, code=2).stderr
    assert "--name, --priority" in manta("edit", job, code=2).stderr


def test_delete_command_asks_for_confirmation(manta, service, job, monkeypatch):
    assert f"manta cancel {job}" in manta("delete", job, "--yes", code=2).stderr
    service.move(job, "FAILED")
    refused = manta("delete", job, code=1, input="n\n")
    assert f"Delete {job} (small, FAILED, step 2 of 10)" in refused.stderr
    unasked = manta("delete", job, code=2)
    assert unasked.stderr.endswith("\nthere is no terminal to ask for confirmation: use --yes\n")
    with monkeypatch.context() as closed:
        closed.setattr(typer, "confirm", Mock(side_effect=RuntimeError("input(): lost sys.stdin")))
        assert manta("delete", job, code=2).stderr.endswith("there is no terminal to ask for confirmation: use --yes\n")
    assert manta("status", job).stdout
    assert manta("delete", job, input="y\n").stdout.count(f"{job} is deleted: 0 checkpoints, 2 log files, ")
    assert "manta ps" in manta("status", job, code=2).stderr


def test_delete_command_prints_json_for_programs(manta, service, job):
    service.move(job, "FAILED")
    assert json.loads(manta("delete", job, "--yes", "--json").stdout)["rows"]["jobs"] == 1


def test_pause_and_resume_print_the_new_state_and_resume_refuses_an_unpaused_job(manta, service, job):
    assert "it is not paused" in manta("resume", job, code=2).stderr
    assert manta("pause", job).stdout == f"{job} is PAUSING\n"
    service.move(job, "PAUSED")
    assert manta("resume", job).stdout == f"{job} is QUEUED\n"
    assert json.loads(manta("pause", job, "--json").stdout)["state"] == "PAUSED"


def test_retry_requeues_a_failed_job_and_no_other(manta, service, job):
    assert "retry works only while it is FAILED" in manta("retry", job, code=2).stderr
    service.move(job, "FAILED")
    assert manta("retry", job).stdout == f"{job} is QUEUED\n"
    service.move(job, "STARTING", "FAILED")
    assert json.loads(manta("retry", job, "--json").stdout)["state"] == "QUEUED"


def test_bad_input_is_one_sentence_and_exit_code_2(manta, tmp_path):
    assert "missing.yaml" in manta("submit", tmp_path / "missing.yaml", code=2).stderr
    assert "manta ps" in manta("status", "job_000000000000", code=2).stderr
    assert "manta ps" in manta("logs", "../../etc/passwd", code=2).stderr
    assert "manta ps" in manta("events", "nobody", "-f", code=2).stderr
    assert "state" in manta("ps", "--state", "asleep", code=2).stderr
    manta("logs", "job_000000000000", "--rank", "x", code=2)
    manta("dance", code=2)


def test_errors_name_the_option_or_command_as_it_was_typed(manta, job):
    assert "--fault: must be 'kill', 'stop'" in manta("inject", job, "--fault", "x", "--rank", 0, code=2).stderr
    assert manta("edit", job, "--priority", 1001, code=2).stderr == "priority: must be at most 1000\n"
    assert "No such command 'veryfy'. Did you mean 'verify'?" in manta("checkpoints", "veryfy", job, code=2).stderr
    nobody = manta("ps", code=3, MANTA_URL="http://127.0.0.1:9").stderr
    assert "(Connection refused)" in nobody and "Errno" not in nobody
    for given, example in (("localhost:8400", "http://localhost:8400"), ("ftp://there", "http://127.0.0.1:8400")):
        assert f"begins with http:// or https://, such as {example})" in manta("ps", code=3, MANTA_URL=given).stderr


@pytest.mark.parametrize(
    ("words", "completion"),
    [("manta che", "checkpoints"), ("manta metrics --na", "--names"), ("manta checkpoints ver", "verify")],
)
def test_commands_and_options_are_completed_by_the_shell(words, completion):
    asked = {"_MANTA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert CliRunner().invoke(overview(), [], prog_name="manta", env=asked).stdout.split() == [completion]


def test_failure_of_the_service_exits_with_1(manta, service, monkeypatch):
    """A script must be able to tell what it has to mend from what it may try again."""
    monkeypatch.setattr(service.control, "cluster", Mock(side_effect=RuntimeError("a defect")))
    assert manta("nodes", code=1).stderr.strip()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://["])
def test_unreachable_service_is_one_sentence_and_exit_code_3(manta, job, url):
    for command in (["ps"], ["nodes"], ["events", job, "-f"], ["status", job, "--url", url]):
        assert "manta up" in manta(*command, code=3, MANTA_URL=url).stderr


def test_service_url_is_found_in_the_home(manta, service, tmp_path):
    (tmp_path / "service.json").write_text(json.dumps({"url": service.url, "pid": 1}))
    assert "no jobs yet" in manta("ps", MANTA_URL="").stdout


JOB = "job_000000000001"
FAULT = {"kind": "kill", "rank": 0, "at_step": 0, "phase": "data", "seconds": 0.0, "delay": 0.0, "hold_gil": False}


REQUESTS = {
    "ps": "GET /v1/jobs?limit=50",
    "ps --state failed --name a --limit 7": "GET /v1/jobs?state=FAILED&name=a&limit=7",
    "ps --state failed,queued --label a=b --label c --search x --owner me --sort loss --order asc": (
        "GET /v1/jobs?state=FAILED,QUEUED&limit=50&search=x&label=a=b&label=c&owner=me&sort=loss&order=asc"
    ),
    "status JOB": "GET /v1/jobs/JOB",
    "logs JOB --rank 0": "GET /v1/jobs/JOB/logs?rank=0&limit=500&tail=200&notices=false",
    "logs JOB --rank 0 --follow": "GET /v1/jobs/JOB/logs?follow=true&rank=0&tail=200&notices=false",
    "logs JOB --tail 5 --stream stderr --search a --regex b+ --level error": (
        "GET /v1/jobs/JOB/logs?limit=500&stream=stderr&search=a&regex=b+&level=error&tail=5&notices=false"
    ),
    "logs JOB -f --tail 5": "GET /v1/jobs/JOB/logs?follow=true&tail=5&notices=false",
    "events JOB --type a --rank 0 --generation 2": "GET /v1/jobs/JOB/events?limit=100&type=a&rank=0&generation=2",
    "logs JOB -f --all --notices": "GET /v1/jobs/JOB/logs?follow=true",
    "events JOB": "GET /v1/jobs/JOB/events?limit=100",
    "events JOB --follow": "GET /v1/jobs/JOB/events?follow=true",
    "events --type told": "GET /v1/events?type=told&limit=1000",
    "events --type told -f": "GET /v1/events?follow=true&type=told",
    "metrics JOB": "GET /v1/jobs/JOB/metrics?after_step=0&max_points=20",
    "metrics JOB --names loss,tokens --after-step 3 --max-points 7": (
        "GET /v1/jobs/JOB/metrics?names=loss,tokens&after_step=3&max_points=7"
    ),
    "cancel JOB": "POST /v1/jobs/JOB/cancel",
    "delete JOB": "GET /v1/jobs/JOB",
    "delete JOB -y": "DELETE /v1/jobs/JOB",
    "retry JOB": "POST /v1/jobs/JOB/retry",
    "checkpoints JOB": "GET /v1/jobs/JOB/checkpoints?limit=1000",
    "ranks JOB": "GET /v1/jobs/JOB/ranks",
    "ledger JOB": "GET /v1/jobs/JOB/ledger",
    "recoveries JOB": "GET /v1/jobs/JOB/recoveries?limit=1000",
    "drain abcd --undo": "DELETE /v1/nodes/abcd/drain",
    "nodes": "GET /v1/cluster",
}
"""What a command without a body asks for."""
CHANGES = [
    ("edit JOB --name a --priority 0", "PATCH /v1/jobs/JOB", {"name": "a", "priority": 0}),
    ("edit JOB --priority 0", "PATCH /v1/jobs/JOB", {"priority": 0}),
    ("resize JOB --data 3", "POST /v1/jobs/JOB/resize", {"data": 3}),
    ("inject JOB --fault kill --rank 0", "POST /v1/jobs/JOB/faults", FAULT),
    (
        "inject JOB --fault stop --rank 3 --at-step 5 --phase reduction --delay 0.5",
        "POST /v1/jobs/JOB/faults",
        {**FAULT, "kind": "stop", "rank": 3, "at_step": 5, "phase": "reduction", "delay": 0.5},
    ),
    (
        "inject JOB --fault slow --rank 1 --seconds 2",
        "POST /v1/jobs/JOB/faults",
        {**FAULT, "kind": "slow", "rank": 1, "seconds": 2.0},
    ),
    (
        "inject JOB --fault hang --rank 1 --hold-gil",
        "POST /v1/jobs/JOB/faults",
        {**FAULT, "kind": "hang", "rank": 1, "hold_gil": True},
    ),
    ("drain abcd", "POST /v1/nodes/abcd/drain", {"deadline_seconds": 120.0}),
    ("drain abcd --deadline 0", "POST /v1/nodes/abcd/drain", {"deadline_seconds": 0.0}),
]


@pytest.mark.parametrize(("command", "line", "body"), [*((*each, None) for each in REQUESTS.items()), *CHANGES])
def test_arguments_of_each_command_reach_its_request(command, line, body, monkeypatch):
    service = SilentService()
    monkeypatch.setattr(main, "Client", lambda url: Client(url, service))
    words = command.replace("JOB", JOB).split()
    result = CliRunner().invoke(app, [*words, "--url", "http://there:1"], env={"MANTA_URL": "http://elsewhere:1"})
    assert (result.exit_code, result.stderr) == (1, "ask again later\n")
    assert [(asked.line, asked.body) for asked in service.asked] == [(line.replace("JOB", JOB), body)]
    assert service.asked[0].host == "there"


BY_NAME = (
    *("status", "logs", "logs -f", "logs --tail 1", "events", "events -f", "metrics", "ledger", "recoveries", "ranks"),
    *("waits", "stack 0", "checkpoints", "checkpoints delete --step 5", "export --to x", "pause", "resume", "retry"),
    *("cancel", "delete", "delete -y", "edit --priority 1", "resize --data 1", "inject --fault kill --rank 0"),
)


@pytest.mark.parametrize("command", BY_NAME)
def test_job_commands_accept_a_name_for_an_id(service, command, monkeypatch, tmp_path):
    job, asked = service.submit(name="small"), []
    monkeypatch.chdir(tmp_path)

    def answer(request):
        asked.append(request.url)
        if request.url.path == "/v1/jobs":
            return httpx.Response(200, json={"items": [job], "next_cursor": None})
        return httpx.Response(503, json={"code": "not_ready", "title": "", "status": 503, "detail": "ask again later"})

    monkeypatch.setattr(main, "Client", lambda url: Client(url, httpx.MockTransport(answer)))
    first, *then = command.split()
    words = [first, then.pop(0), "small", *then] if then[:1] == ["delete"] else [first, "small", *then]
    result = CliRunner().invoke(app, [*words, "--url", "http://there:1"])
    assert (result.exit_code, result.stderr) == (1, "ask again later\n")
    assert [url.path == "/v1/jobs" for url in asked] == [True, False], "it is looked up once"
    assert asked[0].params["name"] == "small" and job["id"] in asked[1].path


def test_job_name_shared_by_several_jobs_is_refused(manta, service):
    job, newer = (service.submit(name="same name")["id"] for _ in range(2))
    refused = manta("pause", "same name", code=2).stderr
    assert refused.index(newer) < refused.index(job) and refused.startswith("several jobs are called 'same name'")
    assert {manta("status", each, "--json").stdout.count("QUEUED") for each in (job, newer)} == {1}


def test_changing_commands_print_a_sentence_or_json(manta, service, document):
    service.control.allow_faults = True
    elastic = {**document, "parallel": {"data": 2}, "elastic": {"min_data": 1}}
    job = service.http.post("/v1/jobs", json=elastic).json()["id"]

    def said_by(*command):
        return manta(*command).stdout.strip(), json.loads(manta(*command, "--json").stdout)

    assert (said := said_by("resize", job, "--data", 1))[0] == f"{job} will continue with 1 replica"
    assert said[1]["id"] == job
    assert (said := said_by("drain", "abcd"))[0] == "abcd1234 is being drained"
    assert said[1]["draining"] is True
    assert (said := said_by("drain", "abcd", "--undo"))[0] == "abcd1234 accepts ranks again"
    assert said[1]["draining"] is False
    service.move(job, "STARTING", "RUNNING")
    fault = json.loads(manta("inject", job, "--fault", "kill", "--rank", 1, "--json").stdout)
    assert fault["id"] == service.control.faults[-1].id
    assert (said := said_by("cancel", job))[0] == f"{job} is CANCELLING"
    assert said[1]["state"] == "CANCELLING"


def test_job_list_can_be_ids_only_or_repeated_until_it_is_interrupted(manta, service, monkeypatch):
    newer = [service.submit()["id"] for _ in range(2)][::-1]
    assert manta("ps", "-q").stdout.split() == newer and manta("ps", "-q", "--state", "FAILED").stdout == ""
    monkeypatch.setattr(jobs.time, "sleep", Mock(side_effect=[None, KeyboardInterrupt]))
    assert manta("ps", "--watch").stdout.count(newer[0]) == 2
    assert "--quiet" in manta("ps", "-w", "-q", code=2).stderr


def test_errors_are_json_on_stderr_for_programs(manta, service, job):
    def said(*command, code):
        return json.loads(manta(*command, "--json", code=code).stderr)

    assert said("status", "nothing", code=2)["code"] == "job_not_found"
    assert said("ps", "--url", "http://127.0.0.1:9", code=3)["code"] == "unreachable"
    refused = said("keys", "create", code=2)
    assert refused == {"code": "bad_input", "detail": "give a name for the key: `manta keys create NAME`"}


def test_metrics_show_the_steps_with_a_validation_and_say_what_is_left_out(manta, service, document):
    job = service.http.post("/v1/jobs", json=document | {"train": {"steps": 40, "validate_every": 10}}).json()["id"]
    service.move(job, "STARTING", "RUNNING")
    service.store.write(lambda session: generations.begin(session, job, "submitted", False))
    losses = {n: {"validation_loss": 2.5} if n % 10 == 0 else {} for n in range(1, 36)}
    service.report(job, [{"step": n, "loss": 3.0, "step_seconds": 0.1, **more} for n, more in losses.items()])
    shown = manta("metrics", job, "--max-points", 3)
    assert [line.split()[0] for line in shown.stdout.splitlines()][-4:] == ["10", "20", "30", "35"]
    assert "of 35 steps are shown; --max-points 10000 shows more" in shown.stderr
    assert len(json.loads(manta("metrics", job, "--max-points", 3, "--json").stdout)["steps"]) == 3
    service.move(job, "SUCCEEDED")
    followed = manta("metrics", job, "--follow", "--after-step", 33, "--names", "loss").stdout.splitlines()
    assert [line.split() for line in followed] == [["STEP", "LOSS"], ["34", "3.0000"], ["35", "3.0000"]]
    lines = manta("metrics", job, "-f", "--after-step", 34, "--names", "loss", "--json").stdout
    assert json.loads(lines) == {"step": 35, "loss": 3.0}


def test_truncated_job_list_says_that_there_are_more(manta, service):
    for _ in range(3):
        service.submit()
    cut = manta("ps", "--limit", 2)
    assert "there are more: use --limit" in cut.stderr and cut.stdout.count("job_") == 2
    assert manta("ps", "--limit", 3).stderr == ""
    programs = manta("ps", "--limit", 2, "--json")
    assert programs.stderr == "" and json.loads(programs.stdout)["next_cursor"]


def test_checkpoints_and_recoveries_are_listed_across_pages(manta, service, job, monkeypatch):
    def save(session):
        for step in range(10, 15):
            checkpoints.begin(session, job, 9, step, f"/somewhere/{step}")
        for generation in range(2, 7):
            died(session, job, generation, "killed")

    service.store.write(save)
    monkeypatch.setattr(main, "PAGE", 2)
    listed = json.loads(manta("checkpoints", job, "--json").stdout)
    assert [each["step"] for each in listed["items"]] == [14, 13, 12, 11, 10, 5]
    listed = json.loads(manta("recoveries", job, "--json").stdout)
    assert [each["generation"] for each in listed["items"]] == [1, 2, 3, 4, 5, 6] and listed["next_cursor"] is None
