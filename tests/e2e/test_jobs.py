"""A job's way through the real service: from REST to its end, however it ends."""

import contextlib
import mmap
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from manta.api.client import ApiError
from manta.service.states import is_final
from manta.workers.snapshot.files import snapshot_files
from manta.workers.snapshot.snapshot_file import SLOTS, SnapshotFile

MIDDLE = 10


def until_final(manta, job):
    """Wait until the job is final, however; the job."""
    return manta.until("the end", lambda: (seen := manta.client.job(job)) and is_final(seen.state) and seen)


def test_job_runs_from_submission_to_success_and_leaves_nothing_behind(manta):
    spec = manta.spec(steps=40, layout=(2, 1, 2), checkpoint={"every_steps": 20}, train={"validate_every": 20})
    job = manta.submit_held(spec, 3, 5)
    ranks = manta.client.ranks(job).items
    assert [(rank.rank, rank.tensor, rank.pipeline, rank.data) for rank in ranks] == [
        (rank, rank % 2, 0, rank // 2) for rank in range(4)
    ]
    zygote = manta.zygote()
    assert all(psutil.Process(rank.pid).parent() == zygote for rank in ranks)
    assert {rank.state for rank in ranks} == {"running"}
    assert open_to_others(manta.paths.snapshot_root) == []
    manta.until("its plan, with which the steps to come are compared", lambda: manta.client.job_plan(job).planned)
    manta.release_job(job, 3)
    ended = manta.until_state(job, "SUCCEEDED")
    assert (ended.step, ended.restarts, ended.generation) == (40, 0, 1)
    assert [step for step, _, _ in manta.curve(job)] == list(range(1, 41))
    validated = manta.client.metrics(job, names=["validation_loss"]).series["validation_loss"]
    assert [index + 1 for index, value in enumerate(validated) if value is not None] == [20, 40]
    assert checkpoints_agree_with_the_disk(manta, job) == [20, 40]
    others = [folder for folder in (manta.home / "jobs").iterdir() if folder.name != job]  # tests may have made them
    assert [path for path in open_to_others(manta.home) if not path.startswith(tuple(map(str, others)))] == []
    kinds = [event.type for event in manta.events(job)]
    assert kinds[0] == "submitted"
    assert kinds.count("generation_started") == kinds.count("first_step") == 1
    assert kinds[-1] == "state_changed"
    assert_planned(manta.client.job_plan(job), kinds.count("plan_drift"))
    assert {rank.state for rank in manta.client.ranks(job).items} == {"exited"}
    assert manta.leftovers(job) == []
    manta.until("free slots", lambda: manta.client.cluster().totals["free"] == 8)  # Ray's own view lags a little


def assert_planned(plan, drifts):
    """The plan of a generation of 40 steps stands beside what they took."""
    assert (plan.generation, plan.problem, plan.parallel["data"]) == (1, None, 2)
    assert plan.planned.step_seconds > 0
    assert (plan.measured.first_step, plan.measured.last_step) == (6, 25)
    # Other work may slow down just the steps that are measured in parts: then these are compared with nothing.
    assert (sum(part.measured for part in plan.compared) > 0) == (plan.measured.parts is not None)
    ratio = plan.measured.step_seconds / plan.planned.step_seconds
    judged = abs(ratio - 1) > 0.2 and not plan.planned.assumed
    assert drifts == judged == (plan.drift is not None)


def open_to_others(folder):
    """What in `folder` others than its user may read or write, given that they came in."""
    found = []
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            with contextlib.suppress(FileNotFoundError):  # jobs and the service make and remove files meanwhile
                mode = path.lstat().st_mode
                found += [str(path)] if mode & 0o077 and not stat.S_ISLNK(mode) else []
    return found


def checkpoints_agree_with_the_disk(manta, job):
    """Steps of the complete checkpoints, each of which lies where and as large as its row says."""
    complete = [row for row in manta.client.checkpoints(job).items if row.state == "complete"]
    folders = {str(path) for path in manta.paths.checkpoint_folder(job).iterdir()}
    assert folders == {row.path for row in complete}
    return sorted(row.step for row in complete)


def test_cancelled_job_ends_at_once_and_cannot_be_cancelled_again(manta):
    job = manta.submit(manta.spec(steps=10_000, layout=(1, 1, 2)))
    manta.until_step(job, 1)
    assert manta.client.cancel(job).state == "CANCELLING"
    manta.until_state(job, "CANCELLED")
    assert manta.leftovers(job) == []
    with pytest.raises(ApiError) as refused:
        manta.client.cancel(job)
    assert refused.value.problem.status == 409


def test_cancel_while_recovering(manta, kill):
    job = manta.submit(manta.spec(steps=10_000, layout=(1, 1, 2)))
    manta.until_step(job, 1)
    with manta.zygote_stopped():
        kill(manta.pids(job)[1])
        manta.until_state(job, "RECOVERING")
        manta.client.cancel(job)
    manta.until_state(job, "CANCELLED")
    assert manta.leftovers(job) == []


def test_cancel_while_starting(manta):
    with manta.zygote_stopped():
        job = manta.submit(manta.spec(steps=10_000, layout=(1, 1, 2)))
        manta.until_state(job, "STARTING")
        manta.client.cancel(job)
    manta.until_state(job, "CANCELLED")
    assert manta.leftovers(job) == []


def test_changed_corpus_is_named_and_the_job_resumes_once_it_is_restored(manta, corpus, tmp_path, kill):
    text = tmp_path / "changing.txt"
    shutil.copy(corpus, text)
    job = manta.submit(manta.spec(steps=10_000, layout=(1, 1, 2), data={"paths": [str(text)]}))
    manta.until_step(job, 1)
    with text.open("a") as file:
        file.write("more")
    manta.until_step(job, manta.client.job(job).step + 5)
    kill(manta.pids(job)[1])
    failed = until_final(manta, job)
    assert (failed.state, failed.reason) == ("FAILED", "bad_data")
    assert f"{text} has" in failed.message and "when the job began" in failed.message
    shutil.copy(corpus, text)
    manta.client.retry(job)
    manta.until_step(job, failed.step + 5)
    text.write_text("gone")
    ended = until_final(manta, job)
    assert (ended.state, ended.reason) == ("FAILED", "bad_data")
    assert str(text) in ended.message
    manta.until("the end of its processes", lambda: manta.keeps_only_snapshots(job))


def test_missing_corpus_fails_the_job_before_placement(manta, tmp_path):
    job = manta.submit(manta.spec(data={"paths": [str(tmp_path / "nowhere.txt")]}))
    ended = until_final(manta, job)
    assert (ended.state, ended.reason, ended.generation) == ("FAILED", "bad_data", 0)
    assert "nowhere.txt" in ended.message


def test_exception_recurring_at_one_step_fails_the_job_as_user_error(manta, kill):
    # Rank 0 reads notes of its own from its snapshot; here they make no sense, so it fails whenever it resumes.
    job = manta.submit(manta.spec(steps=10_000, layout=(1, 1, 2)))
    manta.until_step(job, 1)
    first = manta.pids(job)[0]
    with manta.zygote_stopped():  # nobody takes its place meanwhile
        kill(first)
        manta.until_ended(first)
        replace_notes(snapshot_files(manta.paths.snapshot_folder(job))[0].path)
    ended = until_final(manta, job)
    assert (ended.state, ended.reason) == ("FAILED", "user_error")
    assert "JSONDecodeError" in ended.message
    assert "Traceback" in ended.message
    assert ended.restarts == 2
    assert any("JSONDecodeError" in line.text for line in manta.client.logs(job, rank=0).items)
    manta.until("the end of its processes", lambda: manta.keeps_only_snapshots(job))


def replace_notes(path):
    """Put notes that make no sense in each slot that holds a step, with sums as if the trainer had written them."""
    file = SnapshotFile.open(path, mmap.ACCESS_WRITE)
    held = {slot: step for slot in range(SLOTS) if (step := file.step(slot)) is not None}
    assert held, "a step that is committed is in a slot, also while the next one is written to the other"
    for slot, step in held.items():
        file.write_note(slot, b"this is no JSON")
        file.seal(slot, step, list(file.sums(slot)))
    file.close()


def test_failed_checkpoint_is_an_event_and_the_last_one_is_retried(manta):
    with manta.starting(manta.spec(steps=30, layout=(1, 1, 2), checkpoint={"every_steps": 10})) as (job, _):
        folder = manta.paths.checkpoint_folder(job)
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.write_text("a file where the folder belongs")
    (lost, *_) = manta.until("a second try", lambda: manta.events(job, "rank_lost"))
    assert lost.data["kind"] == "not_saved"
    assert "the last checkpoint, of step 30, could not be saved: " in lost.message
    assert [event.step for event in manta.events(job, "checkpoint_failed")][:3] == [10, 20, 30]
    folder.unlink()
    ended = manta.until_state(job, "SUCCEEDED")
    assert ended.restarts >= 1
    assert [row.step for row in manta.client.checkpoints(job).items if row.state != "failed"] == [30]


@pytest.mark.soak
def test_job_starts_from_transformers_weights_and_exports_its_own(manta, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=263, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    spec = manta.spec(steps=4, layout=(2, 2, 1), checkpoint={"every_steps": 2})
    spec["model"] = {"from": str(tmp_path / "llama"), "sequence_length": 8}
    job = manta.submit(spec)
    assert manta.until_state(job, "SUCCEEDED").spec["model"]["kv_heads"] == 2
    command = [sys.executable, "-m", "manta.api.cli", "export", job, "--to", str(tmp_path / "out"), "--format", "hf"]
    subprocess.run(command, env={**os.environ, "MANTA_HOME": str(manta.home)}, check=True, timeout=300)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    (tmp_path / "llama" / "model.safetensors").write_bytes(b"cut")
    job = manta.submit(spec)
    failed = manta.until_state(job, "FAILED")
    assert failed.reason == "bad_data"
    assert f"{tmp_path}/llama/model.safetensors is cut off" in failed.message
