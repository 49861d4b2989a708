"""`manta submit`: which document it sends, what it prints, and what is wrong with a file."""

import json
import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
import yaml

from manta.api.cli import main
from manta.api.cli import submit as submit_commands
from manta.api.cli.submit import read_file


def test_submit_prints_only_the_job_id(manta, service, spec_file):
    job_id = manta("submit", spec_file).stdout.strip()
    assert service.http.get(f"/v1/jobs/{job_id}").json()["state"] == "QUEUED"
    assert json.loads(manta("submit", spec_file, "--json").stdout)["state"] == "QUEUED"


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
    assert submitted("train.stepps=3", code=2).stderr == "train.stepps: unknown key (try: steps)\n"
    assert submitted("train.steps", code=2).stderr.endswith("is not KEY=VALUE (try: train.steps=100)\n")
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
    assert "train.stepps: unknown key (try: steps)" in lines
    assert any(line.startswith("model.layers: must be an integer") for line in lines)


@pytest.mark.parametrize(
    "content",
    [
        b"a: [",
        b"\xff\xfe\x00",
        b"",
        b"- a\n- b",
        b"name: 2024-01-01\n",
        b"x: .nan",
        b"1: 2",
        b"a: &a [*a]",
        b"2020-01-01: x",
    ],
)
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
        (lambda file: file.write_text("name: 0x" + "f" * 500_000), "FILE is not valid YAML: a number of 500002"),
        (lambda file: file.write_bytes(b"\xff"), "FILE is not text in UTF-8: see byte 1"),
    ],
)
@pytest.mark.parametrize("command", ["submit", "plan", "tokenize", "doctor"])
def test_a_job_file_that_cannot_be_read_is_one_sentence_in_every_command(manta, tmp_path, command, make, why):
    make(tmp_path / "job.yaml")
    said = manta(command, tmp_path / "job.yaml", code=2)
    (line,) = [each for each in said.output.splitlines() if str(tmp_path) in each]
    assert why.replace("FILE", str(tmp_path / "job.yaml")) in line


def test_submit_from_a_closed_standard_input_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(typer.Exit):
        read_file(Path("-"))
    assert (
        capsys.readouterr().err
        == "standard input is closed: name a file, or pass the job's document on standard input\n"
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"# x\n" * 2**18 + b"\n", "it has more than 1048576 bytes"), (b"\xff", "is not text in UTF-8: see byte 1")],
)
def test_submit_limits_what_it_reads_from_standard_input(manta, content, why):
    said = manta("submit", "-", code=2, input=content).stderr
    assert "standard input" in said and why in said and len(said.splitlines()) == 1
