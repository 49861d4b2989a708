"""`manta submit`: which document it sends, what it prints, what is wrong with a file; sweeps, and `manta compare`."""

import io
import json
import math
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml
from rich.console import Console
from rich.text import Text

from manta.api.cli import jobs, main
from manta.api.cli import submit as submit_commands
from manta.api.cli.jobs import best_first, differing
from manta.api.cli.submit import read_file, variants
from manta.api.client import Client


def test_submit_prints_only_the_job_id(manta, service, spec_file):
    job_id = manta("submit", spec_file).stdout.strip()
    assert service.http.get(f"/v1/jobs/{job_id}").json()["state"] == "QUEUED"
    assert json.loads(manta("submit", spec_file, "--json").stdout)["state"] == "QUEUED"


def test_submit_on_a_terminal_says_layout_state_and_what_to_do_next(manta, service, spec_file, monkeypatch):
    out = Console(force_terminal=True, file=io.StringIO(), width=200, markup=False, no_color=True)
    monkeypatch.setattr(main, "console", lambda: out)
    monkeypatch.setattr(submit_commands, "START_SECONDS", 0.0)
    assert manta("submit", spec_file, "--name", "mine").stdout == ""
    [(_, job_id)] = service.control.asked
    lines = [line.split(maxsplit=1) for line in Text.from_ansi(out.file.getvalue()).plain.splitlines()]
    assert dict(lines) == {
        "submitted": f"mine ({job_id})", "layout": "2x2x1 (tensor x pipeline x data), 4 ranks",
        "state": "QUEUED, position 1 in the queue", "dashboard": f"{service.url}/ui/jobs/{job_id}",
        "next": f"manta logs -f {job_id}, manta status {job_id}, manta cancel {job_id}",
    }  # fmt: skip
    assert manta("submit", spec_file, "--quiet").stdout.startswith("job_")


HUGE = ("--set", "model.hidden_size=65536", "--set", "model.layers=96")


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--sweep", "train.steps=1,2")])
def test_job_that_needs_more_memory_than_there_is_is_refused(manta, service, spec_file, more):
    refused = manta("submit", spec_file, *HUGE, *more, code=2)
    assert refused.stdout == "" and re.search(r"^.*parallel: does not fit: .* GiB more than", refused.stderr)
    assert service.http.get("/v1/jobs").json()["items"] == []


def test_job_that_needs_more_slots_than_there_are_waits_for_them(manta, spec_file):
    many = ("--set", "parallel.data=64", "--set", "train.global_batch_size=64")
    assert "slots" in manta("submit", spec_file, "--dry-run", *many, code=2).stdout.splitlines()[0]
    assert manta("submit", spec_file, *many).stdout.startswith("job_")


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1)])
def test_waiting_for_jobs_ends_as_they_do(manta, service, spec_file, monkeypatch, state, code):
    submitted = Client.submit

    def submit_and_end(self, document):
        job = submitted(self, document)
        service.move(job.id, "STARTING", "RUNNING", state)
        return job

    monkeypatch.setattr(Client, "submit", submit_and_end)
    said = manta("submit", spec_file, "--wait", code=code)
    job_id = said.stdout.split()[0]
    assert f"{job_id} (small) is {state}" in said.output
    assert f"{job_id} (small) is {state}" in manta("wait", "small", code=code).output
    assert json.loads(manta("wait", job_id, "--json", code=code).stdout)["state"] == state
    swept = manta("submit", spec_file, "--sweep", "train.steps=1,2", "--wait", code=code)
    assert swept.output.count(f"is {state}") == 2


def test_submit_adds_label_options_to_those_of_the_file(manta, service, tmp_path, document):
    file = tmp_path / "labelled.yaml"
    file.write_text(yaml.safe_dump({**document, "labels": {"team": "vision", "a": "old"}}))
    job = json.loads(manta("submit", file, "--label", "a=b", "--label", "empty=", "--json").stdout)
    assert job["labels"] == {"team": "vision", "a": "b", "empty": ""}
    assert [job["id"]] == [each["id"] for each in json.loads(manta("ps", "--label", "a=b", "--json").stdout)["items"]]
    assert "--label KEY=VALUE" in manta("submit", file, "--label", "a", code=2).stderr
    assert "labels" in manta("submit", file, "--label", "-=b", code=2).stderr


def test_submit_resolves_relative_paths_against_the_specs_folder(manta, service, spec_file, document):
    document["data"] = {"source": "text", "paths": ["corpus.txt"]}
    spec_file.write_text(yaml.safe_dump(document))
    job = json.loads(manta("submit", spec_file, "--json").stdout)
    assert job["spec"]["data"]["paths"] == [str(spec_file.parent / "corpus.txt")]


def test_submit_set_options_override_values_of_the_file(manta, spec_file, tmp_path, document, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    document["data"] = {"source": "text", "paths": ["words.txt"]}
    (folder / "job.yaml").write_text(yaml.safe_dump(document))

    def submitted(*changes, **options):
        words = [word for change in changes for word in ("--set", change)]
        return manta("submit", folder / "job.yaml", "--json", *words, **options)

    spec = json.loads(submitted("train.steps=7", "train.optimizer.learning_rate=1e-3").stdout)["spec"]
    assert (spec["train"]["steps"], spec["train"]["optimizer"]["learning_rate"]) == (7, 0.001)
    assert spec["data"]["paths"] == [str(folder / "words.txt")]
    spec = json.loads(submitted("data.paths=[elsewhere/words.txt]").stdout)["spec"]
    assert spec["data"]["paths"] == [str(folder / "words.txt")], "as whoever types it sees it"
    problem = json.loads(submitted("train.stepps=3", code=2).stderr)
    assert (problem["code"], problem["errors"][0]["path"]) == ("invalid_spec", "train.stepps")
    assert "is not KEY=VALUE (try: train.steps=100)" in json.loads(submitted("train.steps", code=2).stderr)["detail"]
    assert "train.steps: must be an integer" in submitted("train.steps=many", code=2).stderr
    assert "cluster.nodes" in manta("plan", spec_file, "--set", "cluster.nodes=0", code=2).stderr


def test_labels_that_are_no_mapping_are_refused(manta, spec_file, document):
    spec_file.write_text(yaml.safe_dump({**document, "labels": ["a"]}))
    assert "labels: must be a mapping, not a list" in manta("submit", spec_file, "--label", "a=b", code=2).stderr


def test_a_dry_run_shows_the_layout_and_submits_nothing(manta, spec_file):
    shown = manta("submit", spec_file, "--dry-run").stdout
    assert "2x2x1" in shown and "4 ranks" in shown
    assert "planned: " in shown and "tokens/s" in shown
    assert json.loads(manta("submit", spec_file, "--dry-run", "--json").stdout)["layout"]["world_size"] == 4
    assert json.loads(manta("ps", "--json").stdout)["items"] == []


def test_dry_run_of_a_job_with_missing_data_exits_with_1(manta, spec_file, document):
    document["data"] = {"source": "text", "paths": ["corpus.txt"]}
    spec_file.write_text(yaml.safe_dump(document))
    answer = manta("submit", spec_file, "--dry-run", code=main.EXIT_FAILED)
    assert "4 ranks" in answer.stdout and str(spec_file.parent / "corpus.txt") in answer.stderr
    for_programs = manta("submit", spec_file, "--dry-run", "--json", code=main.EXIT_FAILED)
    assert "corpus.txt" in json.loads(for_programs.stdout)["data_problem"]
    assert manta("submit", spec_file).stdout.startswith("job_"), "it may be there by then"


def test_submit_reads_a_spec_from_standard_input(manta, spec_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = yaml.safe_load(Path(spec_file).read_text()) | {"data": {"source": "text", "paths": ["words.txt"]}}
    sent = json.loads(manta("submit", "-", "--json", input=yaml.safe_dump(document)).stdout)
    stored = json.loads(manta("status", sent["id"], "--json").stdout)["spec"]
    assert stored["data"]["paths"] == [str(tmp_path / "words.txt")], "relative paths start where the command runs"
    assert "standard input is not valid YAML" in manta("submit", "-", input="a: [", code=2).stderr
    assert "standard input is empty" in manta("submit", "-", input="", code=2).stderr


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELLED", 1)])
def test_following_a_submission_ends_as_the_job_does(manta, service, spec_file, state, code):
    def live():
        while not service.control.asked:
            threading.Event().wait(0.01)
        job_id = service.control.asked[0][1]
        service.move(job_id, "STARTING", "RUNNING", *(["CANCELLING"] if state == "CANCELLED" else []), state)

    thread = threading.Thread(target=live)
    thread.start()
    shown = manta("submit", spec_file, "--follow", code=code)
    thread.join()
    assert state in shown.output


def test_interrupted_follow_says_that_the_job_continues(manta, service, spec_file, monkeypatch):
    monkeypatch.setattr(submit_commands, "follow_progress", Mock(side_effect=KeyboardInterrupt))
    shown = manta("submit", spec_file, "--follow", code=main.EXIT_INTERRUPTED).output
    [(_, job_id)] = service.control.asked
    assert f"{job_id} continues to run; `manta status {job_id}` shows it, `manta cancel {job_id}` stops it" in shown
    assert service.http.get(f"/v1/jobs/{job_id}").json()["state"] == "QUEUED"


def test_invalid_spec_is_reported_key_by_key_with_suggestions(manta, spec_file, document):
    document["train"]["stepps"] = document["train"].pop("steps")
    document["model"]["layers"] = "four"
    spec_file.write_text(yaml.safe_dump(document))
    lines = manta("submit", spec_file, code=2).stderr.splitlines()
    number = {line.split(":")[0].strip(): at for at, line in enumerate(spec_file.read_text().splitlines(), start=1)}
    assert f"{spec_file}:{number['stepps']}: train.stepps: unknown key; did you mean train.steps?" in lines
    assert any(line.startswith(f"{spec_file}:{number['layers']}: model.layers: must be an integer") for line in lines)
    given = manta("submit", spec_file, "--set", "train.stepps=1", "--name", "no/name", code=2).stderr
    starts = [line.split(":")[0] for line in given.splitlines()]
    assert {"train.stepps", "name"} <= set(starts), "the file has other values"


@pytest.mark.parametrize(
    "content",
    [
        b"a: [", b"\xff\xfe\x00", b"", b"- a\n- b", b"name: 2024-01-01\n", b"x: .nan", b"1: 2", b"a: &a [*a]",
        b"2020-01-01: x",
    ],
)  # fmt: skip
def test_submit_refuses_a_file_that_is_no_spec_with_a_sentence(manta, tmp_path, content):
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    assert manta("submit", path, code=2).stderr.strip()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "cannot read FILE: a pipe, not a regular file"),
        (lambda file: file.symlink_to("/dev/zero"), "cannot read FILE: a device, not a regular file"),
        (
            lambda file: file.write_bytes(b"# x\n" * 2**18 + b"\n"),
            "cannot read FILE: it has 1048577 bytes or more, and",
        ),
        (lambda file: file.write_text("name: 0x" + "f" * 500_000), "FILE is not valid YAML: a number with 500002"),
        (lambda file: file.write_bytes(b"\xff"), "FILE is not valid UTF-8 at byte 1"),
    ],
)
@pytest.mark.parametrize("command", ["submit", "plan", "tokenize", "doctor"])
def test_a_job_file_that_cannot_be_read_is_one_sentence_in_every_command(manta, tmp_path, command, make, why):
    make(tmp_path / "job.yaml")
    said = manta(command, tmp_path / "job.yaml", code=2)
    (line,) = [each for each in said.output.splitlines() if str(tmp_path) in each]
    assert why.replace("FILE", str(tmp_path / "job.yaml")) in line


def test_submit_from_a_closed_standard_input_is_one_sentence(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(main.Failed) as refused:
        read_file(Path("-"))
    assert (
        refused.value.message == "standard input is closed: name a file, or pass the job's document on standard input"
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"# x\n" * 2**18 + b"\n", "it is larger than 1048576 bytes"), (b"\xff", "is not valid UTF-8 at byte 1")],
)
def test_submit_limits_what_it_reads_from_standard_input(manta, content, why):
    said = manta("submit", "-", code=2, input=content).stderr
    assert "standard input" in said and why in said and len(said.splitlines()) == 1


@pytest.fixture
def on_file(manta, tmp_path, document):
    """Runs a command on a file of a job."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    return lambda *arguments, code=0: manta(*(file if each == "FILE" else each for each in arguments), code=code)


RATES = ("--sweep", "train.optimizer.learning_rate=1e-3,3e-4", "--sweep", "parallel.tensor=1,2")


def test_sweep_submits_a_job_for_each_combination_under_its_own_name(on_file, service):
    answer = on_file("submit", "FILE", *RATES)
    lines = [line.split(maxsplit=2) for line in answer.stdout.splitlines()]
    assert [(name, values) for _, name, values in lines] == [
        ("small-1", "train.optimizer.learning_rate=0.001, parallel.tensor=1"),
        ("small-2", "train.optimizer.learning_rate=0.001, parallel.tensor=2"),
        ("small-3", "train.optimizer.learning_rate=0.0003, parallel.tensor=1"),
        ("small-4", "train.optimizer.learning_rate=0.0003, parallel.tensor=2"),
    ]
    specs = [service.http.get(f"/v1/jobs/{id}").json()["spec"] for id, *_ in lines]
    assert [spec["parallel"]["tensor"] for spec in specs] == [1, 2, 1, 2]
    assert len({spec["labels"].pop("sweep") for spec in specs}) == 1
    assert specs[0]["labels"] == {"learning_rate": "0.001", "tensor": "1"}
    assert "`manta compare --label sweep=" in answer.stderr


def test_sweep_submits_nothing_if_a_combination_is_invalid_or_it_is_a_dry_run(on_file, service):
    assert "train.steps: must be above 0" in on_file("submit", "FILE", "--sweep", "train.steps=5,0", code=2).stderr
    assert "--follow works for one job only" in on_file("submit", "FILE", "-f", *RATES, code=2).stderr
    dry = on_file("submit", "FILE", "--dry-run", *RATES).stdout.splitlines()
    assert dry[1].startswith("small-2  2x2x1  ") and dry[1].endswith("learning_rate=0.001, parallel.tensor=2")
    programs = on_file("submit", "FILE", "--dry-run", "--json", *RATES).stdout.splitlines()
    assert [json.loads(line)["layout"]["world_size"] for line in programs] == [2, 4, 2, 4]
    data = ("--set", "data.source=text", "--sweep", "data.paths=[/nowhere],[/neither]")
    lost = on_file("submit", "FILE", "--dry-run", *data, code=1).stderr
    assert "no such file or directory: /neither" in lost and "/nowhere" in lost
    said = json.loads(on_file("submit", "FILE", "--dry-run", "--json", *data, code=1).stderr)
    assert said == {"code": "failed", "detail": lost.removesuffix("\n")}
    assert service.http.get("/v1/jobs").json()["items"] == []


def test_sweep_shortens_long_job_names_and_can_vary_names(document):
    made = variants(document | {"name": "n" * 100}, ["train.steps=1,2"], "s")
    assert [len(each.document["name"]) for each in made] == [100, 100]
    assert [each.document["name"][-3:] for each in made] == ["n-1", "n-2"]
    made = variants(document, ["name=one,two"], "s")
    assert [(each.document["name"], each.values) for each in made] == [("one", "name=one"), ("two", "name=two")]


def test_sweep_resolves_relative_paths_against_the_working_directory(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = variants(document | {"data": {"source": "text"}}, ["data.paths=[a.txt],[b.txt]"], "s")
    assert [each.document["data"]["paths"] for each in made] == [[f"{tmp_path}/a.txt"], [f"{tmp_path}/b.txt"]]


def test_compare_lists_differing_values_and_ranks_jobs_by_loss(on_file, service, monkeypatch):
    for rate, loss in ((0.001, 3.5), (0.003, float("nan")), (0.002, 2.5), (0.004, None)):
        train = {"steps": 10, "optimizer": {"learning_rate": rate}}
        job = service.submit(name=f"rate {rate}", train=train, labels={"of": "rates"})["id"]
        if loss is not None:
            service.move(job, "STARTING", "RUNNING")
            service.report(job, [{"step": 3, "loss": loss}])
    names = [f"rate {rate}" for rate in (0.001, 0.002, 0.003, 0.004)]
    rows = json.loads(on_file("compare", *names, "--json").stdout)["items"]
    assert [row["name"] for row in rows] == ["rate 0.002", "rate 0.001", "rate 0.003", "rate 0.004"]
    assert rows[0]["differences"] == {"train.optimizer.learning_rate": 0.002}
    assert [row["loss"] for row in rows] == [2.5, 3.5, "nan", None]
    heads, first, *_ = on_file("compare", *names).stdout.splitlines()
    assert heads.split()[-2:] == ["TOKENS/S", "train.optimizer.learning_rate"]
    assert first.split()[-1] == "0.002" and "2.5000" in first
    assert on_file("compare", "--label", "a=b").stdout == "no job matches\n"
    assert on_file("compare", "--label", "of=rates").stderr == ""
    monkeypatch.setattr(jobs, "MAX_COMPARED", 3)
    cut = on_file("compare", "--label", "of=rates", "--json")
    assert {row["name"] for row in json.loads(cut.stdout)["items"]} == {"rate 0.002", "rate 0.003", "rate 0.004"}
    assert cut.stderr == "Only the newest 3 jobs with that label are compared.\n"
    for nothing in ([], [names[0], "--label", "a=b"]):
        assert "name the jobs to compare" in on_file("compare", *nothing, code=2).stderr


def test_compare_ranks_by_validation_loss_only_if_all_jobs_with_a_loss_have_one():
    def order(*latest):
        made = [SimpleNamespace(number=at, metrics=SimpleNamespace(latest=each)) for at, each in enumerate(latest)]
        return [job.number for job in best_first(made)]

    one, other = {"loss": 1.0, "validation_loss": 3.0}, {"loss": 2.0, "validation_loss": 2.0}
    assert order(one, {}, other) == [2, 0, 1]
    assert order(one, other, {"loss": 1.5}) == [0, 2, 1]
    assert order({"loss": math.nan}, {"loss": 2.0}, {"loss": 1.0}) == [2, 1, 0], "what is no number is best of nothing"


def test_compared_specs_show_differing_values_by_key_path():
    specs = [{"a": {"b": 1, "c": [1]}, "name": "x"}, {"a": {"b": 1, "c": [2]}, "d": {}, "name": "y"}]
    assert differing(specs) == [{"a.c": [1], "d": None}, {"a.c": [2], "d": {}}]
    assert differing([]) == []
    named = [{"name": name, "optimizer": {"name": optimizer}} for name, optimizer in ("xa", "yb", "za")]
    assert [each["optimizer.name"] for each in differing(named)] == ["a", "b", "a"]
