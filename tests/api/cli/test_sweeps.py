"""Sweeps: one job for each combination of values, and `manta compare` of jobs."""

import json
import math
from types import SimpleNamespace

import pytest
import yaml

from manta.api.cli import compare
from manta.api.cli.submit import variants


@pytest.fixture
def manta(manta, tmp_path, document):
    """Runs a command on a file of a job."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    return lambda *arguments, code=0: manta(*(file if each == "FILE" else each for each in arguments), code=code)


RATES = ("--sweep", "train.optimizer.learning_rate=1e-3,3e-4", "--sweep", "parallel.tensor=1,2")


def test_sweep_submits_a_job_for_each_combination_under_its_own_name(manta, service):
    answer = manta("submit", "FILE", *RATES)
    lines = [line.split(maxsplit=2) for line in answer.stdout.splitlines()]
    assert [(name, values) for _, name, values in lines] == [
        ("small-1", "train.optimizer.learning_rate=0.001, parallel.tensor=1"),
        ("small-2", "train.optimizer.learning_rate=0.001, parallel.tensor=2"),
        ("small-3", "train.optimizer.learning_rate=0.0003, parallel.tensor=1"),
        ("small-4", "train.optimizer.learning_rate=0.0003, parallel.tensor=2"),
    ]
    specs = [service.http.get(f"/v1/jobs/{id}").json()["spec"] for id, *_ in lines]
    assert [spec["parallel"]["tensor"] for spec in specs] == [1, 2, 1, 2]
    assert len({spec["labels"]["sweep"] for spec in specs}) == 1
    assert f"`manta compare --label sweep={specs[0]['labels']['sweep']}`" in answer.stderr


def test_sweep_submits_nothing_if_a_combination_is_invalid_or_it_is_a_dry_run(manta, service):
    assert "train.steps: must be above 0" in manta("submit", "FILE", "--sweep", "train.steps=5,0", code=2).stderr
    assert "--follow works for one job only" in manta("submit", "FILE", "-f", *RATES, code=2).stderr
    dry = manta("submit", "FILE", "--dry-run", *RATES).stdout.splitlines()
    assert dry[1].startswith("small-2  2x2x1  ") and dry[1].endswith("learning_rate=0.001, parallel.tensor=2")
    programs = manta("submit", "FILE", "--dry-run", "--json", *RATES).stdout.splitlines()
    assert [json.loads(line)["layout"]["world_size"] for line in programs] == [2, 4, 2, 4]
    data = ("--set", "data.source=text", "--sweep", "data.paths=[/nowhere],[/neither]")
    lost = manta("submit", "FILE", "--dry-run", *data, code=1).stderr
    assert "no such file or directory: /neither" in lost and "/nowhere" in lost
    assert manta("submit", "FILE", "--dry-run", "--json", *data, code=1).stderr == lost
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


def test_compare_lists_differing_values_and_ranks_jobs_by_loss(manta, service, monkeypatch):
    for rate, loss in ((0.001, 3.5), (0.003, float("nan")), (0.002, 2.5), (0.004, None)):
        train = {"steps": 10, "optimizer": {"learning_rate": rate}}
        job = service.submit(name=f"rate {rate}", train=train, labels={"of": "rates"})["id"]
        if loss is not None:
            service.move(job, "STARTING", "RUNNING")
            service.report(job, [{"step": 3, "loss": loss}])
    names = [f"rate {rate}" for rate in (0.001, 0.002, 0.003, 0.004)]
    rows = json.loads(manta("compare", *names, "--json").stdout)["items"]
    assert [row["name"] for row in rows] == ["rate 0.002", "rate 0.001", "rate 0.003", "rate 0.004"]
    assert rows[0]["differences"] == {"train.optimizer.learning_rate": 0.002}
    assert [row["loss"] for row in rows] == [2.5, 3.5, "nan", None]
    heads, first, *_ = manta("compare", *names).stdout.splitlines()
    assert heads.split()[-2:] == ["TOKENS/S", "train.optimizer.learning_rate"]
    assert first.split()[-1] == "0.002" and "2.5000" in first
    assert manta("compare", "--label", "a=b").stdout == "no job matches\n"
    assert manta("compare", "--label", "of=rates").stderr == ""
    monkeypatch.setattr(compare, "MAX_JOBS", 3)
    cut = manta("compare", "--label", "of=rates", "--json")
    assert {row["name"] for row in json.loads(cut.stdout)["items"]} == {"rate 0.002", "rate 0.003", "rate 0.004"}
    assert cut.stderr == "Only the newest 3 jobs with that label are compared.\n"
    for nothing in ([], [names[0], "--label", "a=b"]):
        assert "give the jobs" in manta("compare", *nothing, code=2).stderr


def test_compare_ranks_by_validation_loss_only_if_all_jobs_with_a_loss_have_one():
    def order(*latest):
        jobs = [SimpleNamespace(number=at, metrics=SimpleNamespace(latest=each)) for at, each in enumerate(latest)]
        return [job.number for job in compare.best_first(jobs)]

    one, other = {"loss": 1.0, "validation_loss": 3.0}, {"loss": 2.0, "validation_loss": 2.0}
    assert order(one, {}, other) == [2, 0, 1]
    assert order(one, other, {"loss": 1.5}) == [0, 2, 1]
    assert order({"loss": math.nan}, {"loss": 2.0}, {"loss": 1.0}) == [2, 1, 0], "what is no number is best of nothing"


def test_compared_specs_show_differing_values_by_key_path():
    specs = [{"a": {"b": 1, "c": [1]}, "name": "x"}, {"a": {"b": 1, "c": [2]}, "d": {}, "name": "y"}]
    assert compare.differing(specs) == [{"a.c": [1], "d": None}, {"a.c": [2], "d": {}}]
    assert compare.differing([]) == []
    named = [{"name": name, "optimizer": {"name": optimizer}} for name, optimizer in ("xa", "yb", "za")]
    assert [each["optimizer.name"] for each in compare.differing(named)] == ["a", "b", "a"]
