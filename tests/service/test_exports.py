"""Exports are written by processes of their own, below the folders that are meant for them, and say how they ended."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from sqlalchemy.exc import OperationalError

from manta.service.control import exports as module
from manta.service.control.exports import MAX_EXPORTS, ExportNotPossible, Exports, InvalidTarget
from manta.service.control.file_work import FileWork
from manta.service.store import checkpoints, events, exports, generations
from manta.service.store.errors import CheckpointNotFound
from tests.service.support.waiting import reached

WRITES = """
import json, pathlib, sys
for done in (50, 100):
    print(json.dumps({"done": done, "of": 100}), flush=True)
pathlib.Path(sys.argv[1]).mkdir()
print(json.dumps({"path": sys.argv[1]}))
"""
FAILS = "import sys; print('first'); print('no such model', file=sys.stderr); sys.exit(1)"
MOVES_WHEN_TOLD = """
import json, sys, time
time.sleep(1)
for done, _ in enumerate(sys.stdin, 1):
    print(json.dumps({"done": done, "of": 20}), flush=True)
"""
IGNORES_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""
CLEANS_UP = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(1)))
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""
WAITS = "import sys; sys.stdin.read()"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def job(store, submit):
    """A job with a complete checkpoint of step 5, and one of step 10 that is being saved."""
    job_id = submit().id

    def save(session):
        generations.begin(session, job_id, "submitted", False)
        for step in (5, 10):
            row = checkpoints.begin(session, job_id, 1, step, f"/nowhere/{step}")
            if step == 5:
                checkpoints.complete(session, row.id, 100)

    store.write(save)
    return job_id


@pytest.fixture
def written_by(monkeypatch):
    """Has a program in the place of the exporter; the processes that were started."""
    started = []

    def use(program):
        def start(source, target, format, dtype):
            command = [sys.executable, "-c", program, str(target)]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=-1, stderr=-1, text=True))
            return started[-1]

        monkeypatch.setattr(module, "_started", start)
        return started

    yield use
    for process in started:
        process.kill()


@pytest.fixture
def ended(monkeypatch):
    """Waits until an export has ended."""
    over, changed = set(), threading.Condition()
    note_end = module._record_end

    def note(session, run, *about):
        note_end(session, run, *about)
        with changed:
            over.add(run.id)
            changed.notify_all()

    monkeypatch.setattr(module, "_record_end", note)

    def wait(store, job, row):
        with changed:
            assert changed.wait_for(lambda: row.id in over, 60)
        store.write(lambda session: None)  # behind the write that notes the end
        return store.query(exports.get, job, row.id)

    return wait


def id_of(job, step):
    return f"ckpt_{job.removeprefix('job_')}_{step}_1"


def test_export_writes_weights_and_reports_its_progress(store, job, root, written_by, ended):
    written_by(WRITES)
    row = Exports(store, (root,), FileWork()).begin(job, id_of(job, 5), "mine", "hf", None)
    assert (row.state, row.path) == ("running", str(root / "mine"))
    over = ended(store, job, row)
    assert (over.state, over.done_bytes, over.total_bytes, over.message) == ("done", 100, 100, None)
    assert (root / "mine").is_dir()
    assert store.query(events.page, job, limit=100).items[-1].type == "exported"


def test_export_failure_has_the_message_of_the_exporter(store, job, root, written_by, ended):
    written_by(FAILS)
    over = ended(store, job, Exports(store, (root,), FileWork()).begin(job, id_of(job, 5), "mine", "hf", "bf16"))
    assert (over.state, over.message, over.dtype) == ("failed", "no such model", "bf16")


def test_export_of_a_missing_checkpoint_fails_with_its_path(store, job, root, ended):
    over = ended(
        store,
        job,
        Exports(store, (root,), FileWork()).begin(job, id_of(job, 5), str(root / "a" / "b"), "safetensors", None),
    )
    assert over.state == "failed" and "/nowhere/5" in over.message
    assert not (root / "a" / "b").exists()


def test_export_that_cannot_start_is_recorded_as_failed(store, job, root, monkeypatch):
    monkeypatch.setattr(module, "_started", Mock(side_effect=BlockingIOError(11, "Resource temporarily unavailable")))
    with pytest.raises(ExportNotPossible, match=r"cannot be started .*temporarily unavailable.*: try again"):
        Exports(store, (root,), FileWork()).begin(job, id_of(job, 5), "mine", "hf", None)
    (row,) = store.query(exports.of_job, job)
    assert (row.state, store.query(exports.any_runs, job, row.updated_at)) == ("failed", False)


def test_exports_are_limited_in_number_and_end_with_the_service(store, job, root, written_by, ended):
    started = written_by(WAITS)
    writer = Exports(store, (root,), FileWork())
    rows = [writer.begin(job, id_of(job, 5), f"out-{number}", "hf", None) for number in range(MAX_EXPORTS)]
    with pytest.raises(ExportNotPossible, match="when one has finished"):
        writer.begin(job, id_of(job, 5), "one more", "hf", None)
    writer.close()
    for process in started:
        assert process.wait(60) != 0
    assert ended(store, job, rows[0]).state == "failed"


def test_database_that_is_away_for_a_while_hides_no_end(store, job, root, written_by, ended, monkeypatch):
    written = written_by(WAITS)
    monkeypatch.setattr(module, "UPDATE_SECONDS", 0.01)
    writer, write = Exports(store, (root,), FileWork()), store.write
    row = writer.begin(job, id_of(job, 5), "mine", "hf", None)
    refused = threading.Semaphore(0)

    def away(operation):
        refused.release()
        raise OperationalError("UPDATE exports", {}, Exception("the database is away"))

    monkeypatch.setattr(store, "write", away)
    assert refused.acquire(timeout=60), "how far it is"
    written[0].stdin.close()
    written[0].wait(60)
    while refused.acquire(blocking=False):
        pass
    assert refused.acquire(timeout=60), "that it has ended"
    monkeypatch.setattr(store, "write", write)
    assert ended(store, job, row).state == "done"


@pytest.mark.parametrize(
    "to", ["../elsewhere", "/etc/weights", "/", ".", "link/weights", "there", "", " \n", "s3://there/a"]
)
def test_export_refuses_targets_outside_its_folder_and_existing_ones(store, job, root, tmp_path, to):
    (root / "link").symlink_to(tmp_path)
    (root / "there").mkdir()
    with pytest.raises(InvalidTarget):
        Exports(store, (root,), FileWork()).begin(job, id_of(job, 5), to, "hf", None)
    assert store.query(exports.of_job, job) == []


def test_export_folder_may_be_a_link(store, job, root, tmp_path, written_by, ended):
    (tmp_path / "linked").symlink_to(root)
    written_by(WRITES)
    row = Exports(store, (tmp_path / "linked",), FileWork()).begin(job, id_of(job, 5), "mine", "hf", None)
    assert (ended(store, job, row).state, row.path) == ("done", str(root / "mine"))


def test_exporter_gets_all_arguments_and_no_secrets(root, monkeypatch):
    monkeypatch.setenv("MANTA_API_KEY", "secret")
    started = Mock()
    monkeypatch.setattr(module.subprocess, "Popen", started)
    for dtype in (None, "bf16"):
        module._started("/ckpt", root / "mine", "hf", dtype)
    words = ["/ckpt", "--to", str(root / "mine"), "--format", "hf", "--json"]
    assert [call.args[0][4:] for call in started.call_args_list] == [words, [*words, "--dtype", "bf16"]]
    assert all("MANTA_API_KEY" not in call.kwargs["env"] for call in started.call_args_list)


@pytest.mark.parametrize(("code", "words"), [(-9, "was ended by signal 9"), (3, "it ended with exit status 3")])
def test_silent_exporter_failure_is_described_by_its_exit_code(code, words):
    assert module._problem(module._Run("export_1", Mock(returncode=code))).endswith(words)


def test_finished_export_frees_its_place(store, job, root, written_by, ended, monkeypatch):
    monkeypatch.setattr(module, "MAX_EXPORTS", 1)
    written_by(WRITES)
    writer = Exports(store, (root,), FileWork())
    for name in ("one", "another"):
        assert ended(store, job, writer.begin(job, id_of(job, 5), name, "hf", None)).state == "done"
        asyncio.run(reached(lambda: not writer._runs))


def test_export_needs_a_complete_checkpoint_of_the_job(store, job, root):
    writer = Exports(store, (root,), FileWork())
    with pytest.raises(ExportNotPossible, match="is saving"):
        writer.begin(job, id_of(job, 10), "mine", "hf", None)
    with pytest.raises(CheckpointNotFound):
        writer.begin(job, "ckpt_other", "mine", "hf", None)


def test_export_of_which_nothing_is_heard_any_more_has_ended(store, job):
    row = store.write(lambda session: exports.begin(session, job, id_of(job, 5), "/out", "hf", None))
    assert exports.is_running(row, row.updated_at + exports.ABANDONED_SECONDS - 1)
    assert not exports.is_running(row, row.updated_at + exports.ABANDONED_SECONDS)


def test_running_export_needs_its_checkpoint_only_until_it_ends_or_falls_silent(store, submit):
    job = submit().id
    export = store.write(lambda session: exports.begin(session, job, "ckpt_a", "/out", "hf", None)).id

    def runs(checkpoint=None, later=0.0):
        return store.query(exports.any_runs, job, time.time() + later, checkpoint)

    assert (runs(), runs("ckpt_a"), runs("ckpt_b"), runs(later=exports.ABANDONED_SECONDS)) == (True, True, False, False)
    store.write(lambda session: exports.note(session, export, 7, 9))
    store.write(lambda session: exports.end(session, export, "the disk is full"))
    store.write(lambda session: exports.note(session, export, 9, 9))  # what was read of it late
    row = store.query(exports.get, job, export)
    assert (row.state, row.done_bytes, row.total_bytes, runs()) == ("failed", 7, 9, False)


def test_export_that_stands_still_is_given_up_and_leaves_its_place(store, job, root, written_by, ended, monkeypatch):
    (started,) = (written_by(WAITS),)
    for name, value in (("UPDATE_SECONDS", 0.01), ("STALLED_SECONDS", 0.05), ("MAX_EXPORTS", 1)):
        monkeypatch.setattr(module, name, value)
    writer = Exports(store, (root,), FileWork())
    over = ended(store, job, writer.begin(job, id_of(job, 5), "mine", "hf", None))
    assert over.state == "failed" and over.message.startswith("nothing was written for 0.05 s: see that")
    assert started[0].wait(60) != 0
    asyncio.run(reached(lambda: not writer._runs))


@pytest.mark.parametrize("late", [True, False])
def test_export_that_moves_is_not_given_up_after_one_slow_write(store, job, root, written_by, ended, monkeypatch, late):
    """The database answers once only after the time in which an export has to move. It moves during each write, and
    time passes then alone."""
    monkeypatch.setattr(module, "UPDATE_SECONDS", 0.01)
    clock, moves = [0.0], []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    started = written_by(MOVES_WHEN_TOLD)
    writer, write = Exports(store, (root,), FileWork()), store.write

    def slow(operation):
        if started and len(moves) < 20:
            moves.append(1.6 if late and not moves else 0.4)
            started[0].stdin.write("go on\n")
            started[0].stdin.flush()
            (run,) = writer._runs.values()
            asyncio.run(reached(lambda: run.done == len(moves)))
            clock[0] += moves[-1] * module.STALLED_SECONDS
        elif started:
            started[0].stdin.close()
        return write(operation)

    monkeypatch.setattr(store, "write", slow)
    assert ended(store, job, writer.begin(job, id_of(job, 5), "mine", "hf", None)).state == "done"
    assert len(moves) == 20 and max(moves) == (1.6 if late else 0.4)


def test_abandoned_export_is_killed_after_its_time_to_clean_up(written_by, monkeypatch):
    monkeypatch.setattr(module, "CLEANUP_SECONDS", 0.3)
    written_by(IGNORES_SIGTERM)
    process = module._started("/ckpt", "/out", "hf", None)
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    module._terminate(process)
    assert process.wait(60) == -signal.SIGKILL and time.monotonic() - began >= 0.3


def test_end_of_the_service_ends_exports_and_does_not_wait_long(store, job, root, written_by, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    (started,) = (written_by(IGNORES_SIGTERM),)
    writer = Exports(store, (root,), FileWork())
    writer.begin(job, id_of(job, 5), "mine", "hf", None)
    asyncio.run(reached(lambda: next(iter(writer._runs.values())).output == ["ready"]))
    began = time.monotonic()
    writer.close()
    assert time.monotonic() - began < 10 and started[0].poll() is None
    with pytest.raises(ExportNotPossible, match="the service is shutting down"):
        writer.begin(job, id_of(job, 5), "another", "hf", None)


def test_end_of_the_service_waits_until_exports_have_cleaned_up(store, job, root, written_by, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_SECONDS", 60.0)
    (started,) = (written_by(CLEANS_UP),)
    writer = Exports(store, (root,), FileWork())
    row = writer.begin(job, id_of(job, 5), "mine", "hf", None)
    asyncio.run(reached(lambda: next(iter(writer._runs.values())).output == ["ready"]))
    writer.close()
    assert started[0].poll() is not None
    over = store.query(exports.get, job, row.id)
    assert (over.state, over.message) == ("failed", "the service ended meanwhile: export it again")


def test_export_to_a_hanging_file_system_is_refused(store, job, root, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(module.os.path, "realpath", lambda path: answers.wait(60))
    monkeypatch.setattr(module, "FILE_SECONDS", 0.01)
    with pytest.raises(
        ExportNotPossible, match=r"^it is not known yet what is at mine \(that takes .*: check .*, and exp"
    ):
        Exports(store, (root,), FileWork()).begin(job, id_of(job, 5), "mine", "hf", None)
    answers.set()
    assert store.query(exports.of_job, job) == []
