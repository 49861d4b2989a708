"""`manta checkpoints` and `export`: what there is, whether it is whole, and copies of it."""

import json
from dataclasses import replace
from unittest.mock import Mock, call

import pytest
from typer.testing import CliRunner

from manta.api.cli import checkpoints as commands
from manta.api.cli.main import app
from manta.service.store import checkpoints, generations
from manta.workers.checkpoint.catalog import Manifest, checkpoint_path, seal, verify
from manta.workers.checkpoint.checksums import SummedFiles
from manta.workers.paths import Paths


@pytest.fixture
def manta(manta):
    """What a command prints."""
    return lambda *arguments, code=0: manta(*arguments, code=code).output


def saved(folder, step, generation=1):
    """A whole checkpoint of one file."""
    path = checkpoint_path(folder, step, generation)
    path.mkdir(parents=True)
    files = SummedFiles()
    with files.create(path / "data") as stream:
        stream.write(b"x" * step)
    seal(path, Manifest("j", generation, step, {"data": step}, {}, blocks={"data": list(files.sums["data"].blocks)}))
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def job(service, folder):
    """A job with three checkpoints, the last of which failed; step 20 was saved twice."""
    job_id = service.submit()["id"]
    service.move(job_id, "STARTING", "RUNNING")

    def prepare(session):
        for step, ended in ((10, checkpoints.complete), (20, checkpoints.complete), (30, None)):
            generation = generations.begin(session, job_id, "submitted", False)
            path = saved(folder, step, generation)
            row = checkpoints.begin(session, job_id, generation, step, str(path))
            if ended is None:
                checkpoints.fail(session, row.id)
            else:
                ended(session, row.id, 5)

    service.store.write(prepare)
    return job_id


def test_checkpoints_command_with_a_job_lists_its_checkpoints(manta, job):
    for words in (["checkpoints", job], ["checkpoints", "list", job]):
        assert "complete" in manta(*words) and "failed" in manta(*words)
    assert [row["step"] for row in json.loads(manta("checkpoints", "--json", job))["items"]] == [30, 20, 10]
    assert "pull" in manta("checkpoints", "--help")
    assert "Missing argument 'JOB'" in manta("checkpoints", code=2)


def test_verify_takes_the_newest_complete_checkpoint_of_a_job_or_that_of_a_step(manta, job, folder):
    newest = checkpoint_path(folder, 20, 2)
    assert manta("checkpoints", "verify", job).replace("\n", "") == (f"{newest} is intact: step 20, 1 file, 20 B")
    assert json.loads(manta("checkpoints", "verify", job, "--step", 10, "--json")) == {
        "path": str(checkpoint_path(folder, 10, 1)), "step": 10, "generation": 1, "bytes": 10, "frozen_bytes": 0,
        "job": "j",
    }  # fmt: skip
    sentence = f"{job} has no complete checkpoint of step 30; it has those of steps 10, 20"
    assert sentence in manta("checkpoints", "verify", job, "--step", 30, code=2)


def test_newest_checkpoint_of_a_job_that_went_back_is_the_one_saved_last(manta, service, folder, tmp_path):
    job = service.submit()["id"]

    def prepare(session):
        for generation, step in ((1, 20), (2, 10)):
            row = checkpoints.begin(session, job, generation, step, str(saved(folder, step, generation)))
            checkpoints.complete(session, row.id, 5)

    service.store.write(prepare)
    for number, what in enumerate((job, folder)):
        manta("checkpoints", "pull", what, "--to", tmp_path / f"{number}")
        assert verify(tmp_path / f"{number}" / "step-00000010-generation-2").step == 10
        manta("export", what, "--to", tmp_path / f"exported {number}")
        assert verify(tmp_path / f"exported {number}").step == 10


def test_deletion_of_the_newest_checkpoint_is_confirmed_and_forced(manta, service, tmp_path):
    job = service.submit()["id"]
    folder = Paths.of(tmp_path).checkpoint_folder(job)

    def prepare(session):
        generation = generations.begin(session, job, "submitted", False)
        for step in (10, 20):
            row = checkpoints.begin(session, job, generation, step, str(saved(folder, step, generation)))
            checkpoints.complete(session, row.id, step)

    service.store.write(prepare)
    delete = ("checkpoints", "delete", job, "--step")
    assert "use --yes" in manta(*delete, 10, code=2)
    assert "has no complete checkpoint of step 30" in manta(*delete, 30, "--yes", code=2)
    assert "force" in manta(*delete, 20, "--yes", code=2) and checkpoint_path(folder, 20, 1).is_dir()
    older, newest = (str(checkpoint_path(folder, step, 1)) for step in (10, 20))
    assert f"{older} is deleted" in manta(*delete, 10, "--yes")
    assert json.loads(manta(*delete, 20, "--yes", "--force", "--json"))["path"] == newest
    assert not list(folder.iterdir())


def test_verify_accepts_a_checkpoint_or_its_parent_folder_without_a_service(folder, monkeypatch):
    one, two = saved(folder, 10), saved(folder, 20)
    for what, expected in ((folder, two), (one, one)):
        result = CliRunner().invoke(app, ["checkpoints", "verify", str(what)], env={"MANTA_URL": "http://127.0.0.1:9"})
        assert result.exit_code == 0 and result.output.startswith(f"{expected} is intact")


def test_verify_names_damage_and_exits_with_1(manta, folder):
    path = saved(folder, 10)
    (path / "data").write_bytes(b"y" * 10)
    assert "data is not what was written" in manta("checkpoints", "verify", path, code=1)


def test_checkpoints_are_pulled_and_pushed_to_folders_intact(manta, job, folder, tmp_path):
    manta("checkpoints", "pull", job, "--to", tmp_path / "here")
    assert verify(tmp_path / "here" / "step-00000020-generation-2").step == 20
    manta("checkpoints", "push", folder, "--to", tmp_path / "there", "--step", 10)
    assert verify(tmp_path / "there" / "step-00000010-generation-1").step == 10
    assert f"{tmp_path}/mine is a copy of {folder}/step-" in manta("export", job, "--to", tmp_path / "mine")
    assert "is intact" in manta("checkpoints", "verify", tmp_path / "mine")
    assert "is a checkpoint of step 20, not 10" in manta(
        "checkpoints", "verify", tmp_path / "mine", "--step", 10, code=2
    )
    assert "already exists: choose another folder" in manta("export", job, "--to", tmp_path / "mine", code=2)


def test_export_writes_weights_to_a_folder_and_reports_errors_in_one_sentence(manta, job, folder, tmp_path):
    assert "dcp is an exact copy" in manta("export", job, "--format", "dcp", "--dtype", "bf16", code=2)
    hf = ("export", job, "--format", "hf", "--to")
    assert "hf is written to a local folder" in manta(*hf, "s3://bucket/out", code=2)
    assert "--shard-size 'much' is not a size: use 500MB or 5GB" in manta(
        *hf, tmp_path / "out", "--shard-size", "much", code=2
    )
    assert "Invalid value for '--dtype'" in manta(*hf, tmp_path / "out", "--dtype", "int8", code=2)
    said = manta(*hf, tmp_path / "out", code=2)
    assert said.count("\n") == 1 and str(checkpoint_path(folder, 20, 2)) in said, "the process's own sentence"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "given", "written"), [
        ("llama", [], ("hf", "small-step-20")), ("custom", [], ("safetensors", "small-step-20")),
        ("llama", ["--dtype", "bf16", "--to", "x"], ("hf", "x")),
        ("llama", ["--adapter"], ("adapter", "small-step-20-adapter")),
        ("llama", ["--format", "dcp"], (None, "small-step-20")),
        ("llama", ["--to", "x"], (None, "x")), ("adapted", ["--to", "x"], ("hf", "x")),
    ],
)  # fmt: skip
def test_export_writes_what_a_person_means_unless_a_folder_is_given(manta, job, monkeypatch, family, given, written):
    made = Mock()
    read = commands.manifest_of
    spec = {"name": "small", "model": {"family": family}, "train": {"lora": {} if family == "adapted" else None}}
    monkeypatch.setattr(commands, "manifest_of", lambda at: replace(read(at), spec=spec))
    monkeypatch.setattr(commands, "export_weights", lambda source, to, format, *_: made(format, to))
    monkeypatch.setattr(commands, "_copy", lambda source, target, as_json: made(None, str(target)))
    manta("export", job, *given)
    assert made.mock_calls == [call(*written)]
    assert "leave out --format" in manta("export", job, "--adapter", "--format", "hf", code=2)


def test_copied_checkpoint_with_a_changed_name_gets_its_proper_name(manta, folder, tmp_path):
    renamed = saved(folder, 10).rename(folder / "step-10 (copy)")
    for command in ("push", "pull"):
        manta("checkpoints", command, renamed, "--to", tmp_path / command)
        found = checkpoint_path(tmp_path / command, 10, 1)
        assert f"{found} is intact" in manta("checkpoints", "verify", tmp_path / command)


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 5 * 10**8), ("5GB", 5 * 10**9), ("1.5 gib", 3 * 2**29), ("64KiB", 2**16), ("9", 9)]
)
def test_shard_size_accepts_decimal_and_binary_units(text, size):
    assert commands._bytes(text) == size


def test_unreadable_checkpoint_or_unwritable_target_is_one_sentence(manta, folder, tmp_path):
    nothing = manta("checkpoints", "verify", folder, code=2)
    assert f"{folder} is neither a job's id nor an existing folder" in nothing
    folder.mkdir()
    assert manta("checkpoints", "verify", folder, code=2) == f"there is no complete checkpoint in {folder}\n"
    saved(folder, 10)
    assert "of step 7" in manta("checkpoints", "verify", folder, "--step", 7, code=2)
    (tmp_path / "file").write_text("")
    is_file = manta("checkpoints", "verify", tmp_path / "file", code=2)
    assert is_file == f"{tmp_path / 'file'} is a file, not the folder of a checkpoint\n"
    for nothing in ("", "small"):
        said = manta("checkpoints", "push", nothing, "--to", tmp_path / "there", code=2)
        assert said.startswith(f"there is no folder '{nothing}'; for a checkpoint of a job there is `manta checkpoints")
    assert "no job can have the id or the name ''" in manta("checkpoints", "verify", "", code=2)
    assert "cannot be written: Not a directory" in manta(
        "checkpoints", "push", folder, "--to", tmp_path / "file", code=2
    )
    assert "is in no store that Manta knows" in manta("checkpoints", "verify", "ftp://there", code=2)


def test_checkpoints_are_pushed_to_an_object_store_and_pulled_back(manta, folder, tmp_path, bucket):
    saved(folder, 10)
    manta("checkpoints", "push", folder, "--to", bucket / "pushed")
    there = bucket / "pushed" / "step-00000010-generation-1"
    assert f"{there} is intact" in manta("checkpoints", "verify", bucket / "pushed")
    manta("checkpoints", "pull", bucket / "pushed", "--to", tmp_path / "back")
    assert verify(tmp_path / "back" / there.name).step == 10


def test_checkpoint_of_a_job_in_an_object_store_is_exported_there_and_here(manta, service, tmp_path, bucket, folder):
    there = bucket / "manta" / "step-00000010-generation-1"
    manta("checkpoints", "push", saved(folder, 10), "--to", bucket / "manta")
    job = service.submit()["id"]
    service.store.write(
        lambda session: checkpoints.complete(session, checkpoints.begin(session, job, 1, 10, str(there)).id, 5)
    )
    for target in (tmp_path / "mine", bucket / "mine"):
        assert f"{target} is a copy of {there}" in manta("export", job, "--to", target)
        assert verify(target).step == 10


def test_verify_takes_a_name_as_a_folder_here_or_else_as_a_job(manta, service, job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "step 20" in manta("checkpoints", "verify", "small")
    nothing = manta("checkpoints", "verify", "tall", code=2)
    assert "there is no folder tall, and no job has the id or the name 'tall'; `manta ps` lists" in nothing
    unreachable = manta("checkpoints", "verify", "small", "--url", "http://127.0.0.1:9", code=3)
    assert "there is no folder small, and for a job with that name: cannot reach Manta" in unreachable
    saved(tmp_path / "small", 7)
    assert "step 7" in manta("checkpoints", "verify", "small")
    service.submit(name="tall")
    service.submit(name="tall")
    assert "several jobs are called 'tall'" in manta("checkpoints", "verify", "tall", code=2)
