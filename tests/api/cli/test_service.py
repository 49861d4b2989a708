"""`manta up`, `down`, `serve`: what they are told is what the service gets, what `down` takes with it, and which ends
of a service have it started again."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from manta.api import server
from manta.api.cli import main, service
from manta.api.serving import local_service
from manta.service.cluster.processes import start_of
from manta.service.cluster.ray_head import RayHead
from manta.service.settings import Settings, Tls
from manta.service.states import JobState
from manta.service.store import checkpoints, jobs
from manta.workers import paths
from manta.workers.paths import Paths
from manta.workers.spec.reading import parse_job_spec

ALL_OPTIONS = [
    "--host", "0.0.0.0", "--port", "0", "--slots", "3", "--ray", "there:6379", "--allow-faults",
    "--tls-cert", "/there/cert.pem", "--tls-key", "/there/key.pem", "--tls-terminated",
]  # fmt: skip
ALL_TLS = Tls(Path("/there/cert.pem"), Path("/there/key.pem"), terminated=True)
ALL_TAKEN = ("0.0.0.0", 0, 3, "there:6379")


@pytest.fixture
def manta(tmp_path):
    """Runs a command of the service in a home of its own."""

    def run(*arguments, **environment):
        own = {"MANTA_HOME": str(tmp_path), "MANTA_API_KEY": ""}
        result = CliRunner().invoke(main.app, [*arguments], env={**own, **environment})
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


POSTGRESQL = "postgresql://me:secret@there/manta"


@pytest.fixture
def served(monkeypatch):
    """What the service is run with."""
    runs = []
    monkeypatch.setattr(server, "serve", lambda *arguments, **more: runs.append(arguments))
    monkeypatch.setattr(service, "restart_when_ended_by_ray", lambda run, service_file: run(False))
    monkeypatch.setattr(server, "configure_logging", lambda: None)
    return runs


@pytest.fixture
def started(monkeypatch):
    """Commands that are started in the background, with their environment."""
    commands = []

    def start(command, **options):
        commands.append((command, options["env"]))
        return SimpleNamespace(poll=lambda: 0)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(service, "_wait_until_ready", lambda *arguments: "http://127.0.0.1:1")
    return commands


@pytest.mark.parametrize(
    ("options", "taken", "allow_faults", "tls"),
    [([], ("127.0.0.1", 8400, None, None), False, Tls()), (ALL_OPTIONS, ALL_TAKEN, True, ALL_TLS)],
)
def test_background_service_gets_the_options_of_up(
    manta, served, started, tmp_path, monkeypatch, options, taken, allow_faults, tls
):
    monkeypatch.setattr(server, "refuse_without_protection", lambda settings, host: None)
    everywhere = " and this machine's other addresses" if options else ""
    assert f"Manta is up: http://127.0.0.1:1{everywhere} (home: " in manta("up", *options)
    ((command, environment),) = started
    assert command[:4] == [sys.executable, "-P", "-m", "manta.api.cli"]
    assert environment["MANTA_HOME"] == str(tmp_path)
    manta(*command[4:])
    assert served == [(Settings(tmp_path, allow_faults=allow_faults, tls=tls), *taken)]


def test_background_service_allows_faults_that_the_environment_allows(manta, served, started, tmp_path):
    manta("up", MANTA_ALLOW_FAULTS="1")
    manta(*started[0][0][4:])
    manta("serve", MANTA_ALLOW_FAULTS="1")
    assert [settings.allow_faults for settings, *_ in served] == [True, True]


@pytest.mark.parametrize(("options", "again", "patient"), [
    ((), False, False), ((), True, True), (("--wait-for-ray",), False, True),
])  # fmt: skip
def test_service_waits_for_an_existing_ray_only_when_started_again_or_told_to(
    manta, monkeypatch, options, again, patient
):
    waits = []
    monkeypatch.setattr(server, "serve", lambda *arguments, wait_for_ray: waits.append(wait_for_ray))
    monkeypatch.setattr(service, "restart_when_ended_by_ray", lambda run, service_file: run(again))
    monkeypatch.setattr(server, "configure_logging", lambda: None)
    manta("serve", "--ray", "there:6379", *options)
    assert waits == [patient]


def test_service_that_starts_over_keeps_its_settings(manta, served, tmp_path, monkeypatch):
    replaced = []
    monkeypatch.setattr(os, "execve", lambda *call: replaced.append(call))
    for slots, allow_faults, tls in ((3, True, ALL_TLS), (None, False, Tls())):
        settings = Settings(tmp_path, allow_faults=allow_faults, tls=tls, database_url=POSTGRESQL if slots else None)
        server._start_over(settings, "0.0.0.0", 1234, slots)
        program, command, environment = replaced[-1]
        assert (program, environment["MANTA_HOME"]) == (sys.executable, str(tmp_path))
        manta(*command[4:], **{name: value for name, value in environment.items() if name.startswith("MANTA_")})
        assert served[-1] == (settings, "0.0.0.0", 1234, slots, None)


def test_database_url_is_passed_in_the_environment_to_hide_its_password(manta, served, started):
    manta("up", "--database", POSTGRESQL)
    ((command, environment),) = started
    assert "secret" not in " ".join(command)
    manta(*command[4:], MANTA_DATABASE_URL=environment["MANTA_DATABASE_URL"])
    manta("serve", "--database", POSTGRESQL)
    assert [settings.database_url for settings, *_ in served] == [POSTGRESQL, POSTGRESQL]
    assert "secret" not in repr(served)


def test_down_names_the_external_database_that_keeps_the_jobs(manta, tmp_path, monkeypatch):
    local_service.announce(Settings(tmp_path).service_file, "http://127.0.0.1:1234", "postgresql://me:***@there/manta")
    monkeypatch.setattr(service, "stop_service", lambda home: True)
    assert "Its jobs are in its database, postgresql://me:***@there/manta" in manta("down")


def test_up_waits_for_the_process_that_locks_the_home(manta, started, tmp_path, monkeypatch):
    """It starts, or writes again where it answers."""
    with server.lock_home(tmp_path) as lock:
        local_service.sign(lock)
        say = [lambda: local_service.announce(Settings(tmp_path).service_file, "http://there", "sqlite:///there")]
        monkeypatch.setattr(service, "wait_until_ended", lambda *anything: say.pop()())
        assert manta("up") == "Manta is already running: http://there\n"
    Settings(tmp_path).service_file.unlink()
    (tmp_path / "service.lock").write_text(json.dumps({"pid": os.getpid(), "started": "another boot/1"}))
    assert service._running_and_well(tmp_path) is None, "one that has ended"
    assert started == []


@pytest.mark.parametrize("has_said_where", [True, False])
def test_up_ends_a_service_that_hangs_since_its_jobs_train_on(tmp_path, monkeypatch, capsys, has_said_where):
    """The kernel accepts connections for it. Until it has said where it answers, it may only be starting."""
    monkeypatch.setattr(local_service, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(service, "UNRESPONSIVE_SECONDS", 0.0 if has_said_where else 1000.0)
    monkeypatch.setattr(service, "UP_SECONDS", 1000.0 if has_said_where else 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, subprocess.Popen(["sleep", "1000"]) as hangs:
        said = {"pid": hangs.pid, "started": start_of(hangs.pid)}
        (tmp_path / "service.lock").write_text(json.dumps(said))
        if has_said_where:
            said |= {"url": f"http://127.0.0.1:{silent.getsockname()[1]}", "database": "sqlite:///there"}
            Settings(tmp_path).service_file.write_text(json.dumps(said))
        assert service._running_and_well(tmp_path) is None
        assert hangs.wait(60) == -9
    assert (
        f"(process {hangs.pid}) does not respond and is being replaced; jobs keep training" in capsys.readouterr().err
    )


def test_up_starts_no_second_service(manta, started, tmp_path):
    local_service.announce(Settings(tmp_path).service_file, "http://127.0.0.1:1234", "sqlite:///there")
    assert manta("up") == "Manta is already running: http://127.0.0.1:1234\n"
    answer = {"url": "http://127.0.0.1:1234", "home": str(tmp_path), "started": False}
    assert json.loads(manta("up", "--json")) == answer
    assert started == []


@pytest.mark.parametrize("other_runs", [True, False])
def test_up_that_lost_a_race_says_that_the_service_runs(manta, tmp_path, monkeypatch, other_runs):
    def lose(*arguments):
        if other_runs:
            local_service.announce(Settings(tmp_path).service_file, "http://127.0.0.1:1234", "sqlite:///there")
        raise service.NotStarted("the service did not start: what the other one logs (log: there)")

    monkeypatch.setattr(service, "start_service", lose)
    monkeypatch.setenv("MANTA_HOME", str(tmp_path))
    if other_runs:
        assert manta("up") == "Manta is already running: http://127.0.0.1:1234\n"
    else:
        with pytest.raises(service.NotStarted, match="did not start"):
            service.up()


@pytest.mark.parametrize(("words", "said"), [
    ("echo starting; echo the disk is full; exit 2", "the disk is full"),
    ("echo '.../python(_start+0x21) [0x5555d58d2081] _start'; kill -ABRT $$", "its process ended by signal 6; the end"),
    ("echo 'r local development, use x'; exit 1", "its process ended with status 1; the end of its log"),
    ("exit 2", "its process ended with status 2 and printed nothing"),
])  # fmt: skip
def test_service_that_does_not_start_says_why_and_nothing_of_earlier_times(tmp_path, words, said):
    log = tmp_path / "service.log"
    log.write_text("an error of last week\n")
    began = log.stat().st_size
    with (
        log.open("ab") as output,
        subprocess.Popen(["sh", "-c", words], stdout=output) as process,
        pytest.raises(service.NotStarted, match=f"the service did not start: {re.escape(said)}"),
    ):
        service._wait_until_ready(tmp_path, process, log, began)


@pytest.mark.parametrize("ready", [True, False])
def test_service_counts_as_up_once_it_can_run_jobs(tmp_path, monkeypatch, ready):
    looks = []
    monkeypatch.setattr(service, "running_service", lambda home: {"url": "http://there"} if looks else looks.append(1))
    monkeypatch.setattr(service, "_is_ready", lambda home: ready and home == tmp_path)
    monkeypatch.setattr(service, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(service, "UP_SECONDS", 20.0 if ready else 0.05)
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            if ready:
                assert service._wait_until_ready(tmp_path, process, tmp_path, 0) == "http://there"
            else:
                with pytest.raises(service.NotStarted, match="not ready after"):
                    service._wait_until_ready(tmp_path, process, tmp_path, 0)
        finally:
            process.kill()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home whose jobs have something in shared memory and in the runtime folder."""
    monkeypatch.setattr(paths, "SHARED_MEMORY", tmp_path / "shm")
    ours = Paths.of(tmp_path)
    ours.snapshot_folder("job").mkdir(parents=True)
    (ours.make_runtime_folder() / "zygote.sock").touch()
    yield ours
    ours.remove_runtime_folder()


def test_down_leaves_snapshots_and_zygotes_on_a_ray_cluster_of_others(manta, home, monkeypatch):
    monkeypatch.setattr(RayHead, "freeze_ranks", None)
    service.stop_service(home.home)
    assert home.snapshot_folder("job").exists()
    assert (home.runtime_folder / "zygote.sock").exists()


@pytest.mark.parametrize("is_recorded", [True, False])
def test_down_ends_its_own_ray_and_removes_snapshots_and_runtime_folder(home, monkeypatch, is_recorded):
    """Also one whose start was interrupted before it was recorded."""
    left = []
    monkeypatch.setattr(RayHead, "freeze_ranks", lambda head: left.append("ranks frozen"))
    monkeypatch.setattr(service, "service_process", lambda home: left.append("service found"))
    monkeypatch.setattr(RayHead, "stop", lambda head: left.append(home.snapshot_folder("job").exists()))
    if is_recorded:
        home.ray_record.write_text("{}")
    else:
        monkeypatch.setattr("manta.service.cluster.ray_head.session_leader", lambda mark, words: os.getpid())
    assert service.stop_service(home.home), "a Ray without a service is something that was stopped"
    assert left == ["service found", "ranks frozen", True], "first whoever writes there"
    assert not home.snapshot_root.exists()
    assert not home.runtime_folder.exists()


def test_service_that_ignores_sigterm_is_killed_by_down(home, monkeypatch):
    with subprocess.Popen(["sh", "-c", "trap '' TERM; echo ready; while :; do read line; done"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as deaf:  # fmt: skip
        assert deaf.stdout.readline() == b"ready\n"
        (home.home / "service.lock").write_text(json.dumps({"pid": deaf.pid, "started": start_of(deaf.pid)}))
        monkeypatch.setattr(service, "DOWN_SECONDS", 0.05)
        assert service.stop_service(home.home)
        assert deaf.wait(10) == -9


@pytest.mark.parametrize(
    ("own_ray", "fate"),
    [(True, "was stopped at step 3 of 10, and continues from its checkpoint of step 2"),
     (False, "keeps running on the existing Ray cluster, at step 3 or later")],
)  # fmt: skip
def test_down_says_what_happens_to_each_job(manta, home, store, database_url, document, monkeypatch, own_ray, fate):
    spec = parse_job_spec(document)
    running, queued, over = [store.write(lambda s: jobs.create(s, spec))[0].id for _ in range(3)]
    store.write(lambda s: jobs.transition(s, running, JobState.STARTING))
    store.write(lambda s: setattr(jobs.get(s, running), "step", 3))
    saved = store.write(lambda s: checkpoints.begin(s, running, 1, 2, "folder").id)
    store.write(lambda s: checkpoints.complete(s, saved, 1))
    store.write(lambda s: jobs.transition(s, over, JobState.CANCELLED))
    if own_ray:
        home.ray_record.write_text("{}")
    monkeypatch.setattr(service, "stop_service", lambda home: True)
    said = manta("down", "--database", database_url).splitlines()
    assert said[0] == "Manta is down."
    assert set(said[1:3]) == {f"  {running} (small) {fate}", f"  {queued} (small) waits in the queue"}
    assert over not in "".join(said)
    answer = json.loads(manta("down", "--database", database_url, "--json"))
    states = {running: ("STARTING", 3), queued: ("QUEUED", 0)}
    assert {each["id"]: (each["state"], each["step"]) for each in answer["jobs"]} == states and answer["stopped"]
    monkeypatch.setattr(service, "stop_service", lambda home: False)
    assert manta("down") == f"No service is running with home {home.home}.\n"


@pytest.mark.parametrize(
    ("state", "step", "saved", "own_ray", "words"),
    [
        ("QUEUED", 0, None, True, "waits in the queue"),
        ("QUEUED", 3, 2, True, "waits in the queue, and continues from its checkpoint of step 2"),
        ("PAUSED", 3, 3, True, "stays paused at step 3 of 10; if resumed, it continues from its checkpoint of step 3"),
        ("PAUSED", 3, 3, False, "stays paused at step 3 of 10; if resumed, it continues from its checkpoint of step 3"),
        ("RUNNING", 3, 2, False, "keeps running on the existing Ray cluster, at step 3 or later"),
        ("RUNNING", 3, 2, True, "was stopped at step 3 of 10, and continues from its checkpoint of step 2"),
        (
            *("RUNNING", 3, None, True),
            "was stopped at step 3 of 10, and continues from the beginning, since it has no checkpoint",
        ),
    ],
)
def test_down_says_for_each_job_how_much_is_lost(state, step, saved, own_ray, words):
    job = SimpleNamespace(state=state, step=step, steps=10)
    assert service._describe_consequences(job, saved, own_ray) == words


ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from manta.api.app_state import state_of
from manta.api.cli import service
service.RESTART_PAUSE_SECONDS = 0.0
file, ending, says = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "says"

def run(again):
    print("again" if again else "first", flush=True)
    if says:
        file.write_text(json.dumps({"pid": os.getpid()}))
    if again:
        file.unlink(missing_ok=True)
        sys.exit(7)
    if ending == "waits":
        print(os.getpid(), flush=True)
        signal.signal(signal.SIGTERM, lambda number, frame: (file.unlink(), sys.exit(0)))
        while True:
            time.sleep(10)
    if ending == "exit":
        os._exit(1)
    if ending == "in order":
        file.unlink(missing_ok=True)
        sys.exit(3)
    os.kill(os.getpid(), getattr(signal, ending))

service.restart_when_ended_by_ray(run, file)
"""


def start_restartable(tmp_path, ending, says="says", before=()):
    command = [*before, sys.executable, "-c", PROGRAM, str(tmp_path / "service.json"), ending, says]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize(("ending", "says", "lines", "code"), [
    ("SIGABRT", "says", ["first", "again"], 7),
    ("exit", "says", ["first", "again"], 7),
    ("exit", "does not", ["first"], 1),
    ("in order", "says", ["first"], 3),
    ("SIGKILL", "says", ["first"], -signal.SIGKILL),
    ("SIGABRT", "does not", ["first"], -signal.SIGABRT),
])  # fmt: skip
def test_service_that_crashes_while_serving_is_restarted_and_any_other_end_is_final(
    tmp_path, ending, says, lines, code
):
    process = start_restartable(tmp_path, ending, says)
    printed, _ = process.communicate(timeout=30)
    assert (printed.split(), process.returncode) == (lines, code)


def test_restarting_parent_passes_signals_to_the_service(tmp_path):
    process = start_restartable(tmp_path, "waits")
    assert process.stdout.readline() == "first\n"
    child = int(process.stdout.readline())
    assert child != process.pid and json.loads((tmp_path / "service.json").read_text()) == {"pid": child}
    until(lambda: caught(child, signal.SIGTERM))
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0 and not (tmp_path / "service.json").exists()


def test_service_that_a_signal_ended_ends_the_first_process_of_a_container_too(tmp_path):
    """Which no signal of its own ends: it says so as a shell does."""
    own = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*own, "true"], check=False, capture_output=True).returncode:
        pytest.skip("a namespace of processes cannot be made here")
    process = start_restartable(tmp_path, "SIGTERM", before=own)
    printed, _ = process.communicate(timeout=30)
    assert (printed.split(), process.returncode) == (["first"], 128 + signal.SIGTERM)


def test_service_process_ends_when_its_parent_command_is_killed(tmp_path):
    process = start_restartable(tmp_path, "waits")
    process.stdout.readline()
    child = int(process.stdout.readline())
    process.kill()
    process.wait(30)
    process.stdout.close()
    until(lambda: not Path(f"/proc/{child}").exists() or state_of(child) == "Z")


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def caught(pid, number):
    """Whether a process has a handler of its own for a signal."""
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("SigCgt:"))
    return bool(int(line.split()[1], 16) & 1 << (number - 1))


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()
