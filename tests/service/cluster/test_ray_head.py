"""Ray heads of two homes live side by side; one is reused while it lives, and stopping ends only its own processes."""

import asyncio
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from manta.service.cluster import ray_head as module
from manta.service.cluster.existing_ray import ExistingRay
from manta.service.cluster.processes import same_process, start_of, wait_until_ended
from manta.service.cluster.ray_head import MARK, HeadRecord, RayHead, RayUnavailable
from manta.service.cluster.ray_private import HEAD_PROCESSES, NO_AUTOSCALER, outlives_head, sockets_of
from manta.service.own_files import HomeUnusable
from manta.service.settings import SECRETS
from manta.workers.paths import Paths
from tests.service.conftest import SLOTS
from tests.service.support.stand_in_ray import ray_processes

ROOT = Path(__file__).parents[3]


@pytest.fixture
def second_home(tmp_path):
    """A home of its own, whose head is ended with the test."""
    home = tmp_path / "home"
    yield home
    RayHead(home).stop()
    Paths.of(home).remove_runtime_folder()


def test_processes_of_ray_inherit_no_secrets_but_the_path_of_the_token(tmp_path, monkeypatch):
    given = {}
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setattr(module.subprocess, "Popen", lambda command, env, **options: given.update(env))
    head = RayHead(tmp_path / "home", slots=3)
    head._prepare()
    head._spawn()
    Paths.of(tmp_path / "home").remove_runtime_folder()
    assert "secret" not in given.values() and not given.keys() & set(SECRETS)
    assert given["RAY_AUTH_MODE"] == "token"
    assert Path(given["RAY_AUTH_TOKEN_PATH"]).read_text()
    assert given[MARK] == Paths.of(tmp_path / "home").tag
    assert int(given[module.STARTUP_CONCURRENCY]) >= 3


def test_ray_of_our_own_follows_no_settings_of_another_ray(tmp_path, monkeypatch):
    declared, seen = {"RAY_OVERRIDE_RESOURCES": '{"GPU": 2}', "HOME": "/here"}, []
    others = {
        "PYTHONOPTIMIZE": "2",
        "RAY_ADDRESS": "10.9.9.9:6379",
        "RAY_RUNTIME_ENV_HOOK": "theirs",
        "RAY_memory_usage_threshold": "0.01",
    }
    monkeypatch.setattr(os, "environ", {**declared, **others, "RAY_AUTH_TOKEN": "theirs"})
    monkeypatch.setattr(module.subprocess, "Popen", lambda command, env, **options: seen.append(env))
    monkeypatch.setattr(module, "connect", lambda *given: seen.append(dict(os.environ)))
    head = RayHead(tmp_path, slots=3)
    monkeypatch.setattr(head, "record", lambda: HeadRecord("here:1", 1, "now", "session"))
    head._paths.ray_log.parent.mkdir()
    head._spawn()
    head.connect()
    for environment in seen:
        assert environment.items() >= declared.items()
        assert not environment.keys() & {*others, "RAY_AUTH_TOKEN"} - {"PYTHONOPTIMIZE"}
    assert len(seen) == 2 and "PYTHONOPTIMIZE" not in seen[0]


def test_ray_head_is_found_again_without_its_record(ray_head):
    head = ray_head.head
    record, paths = head.record(), Paths.of(ray_head.home)
    as_it_was = paths.ray_record.read_text()
    try:
        for damaged in ('{"address": "', record_text(record, started="another boot/1")):
            paths.ray_record.write_text(damaged)
            assert head.record() == record, "a damaged record is no dead head"
        paths.ray_record.unlink()
        assert head.exists(), "`manta down` ends it"
        assert head.ensure() == record and paths.ray_record.read_text() == as_it_was
    finally:
        paths.ray_record.write_text(as_it_was)
    assert stat.S_IMODE(paths.ray_token.stat().st_mode) == 0o600
    family = psutil.Process(record.pid).children(recursive=True)
    assert not [word for process in family for word in process.cmdline() if word.endswith("monitor.py")], NO_AUTOSCALER


def test_ray_head_of_our_own_does_not_persist_its_state(ray_head):
    """It is started anew on the same machine, beside which there is none; with a Redis: tests/e2e."""
    assert not outlives_head(ray_head.head.record().address)


@pytest.mark.soak  # every service of tests/e2e starts and stops a head
def test_ray_head_of_a_second_home_runs_beside_the_first(ray_head, second_home):
    first = ray_head.head.record()
    started = time.monotonic()
    head = RayHead(second_home, slots=2)
    record = head.ensure()
    print(f"\nhead up after {time.monotonic() - started:.2f} s")
    assert record.address != first.address
    assert head.ensure() == record, "a living head is reused"
    assert RayHead(second_home).record() == record, "also by the next service of that home"
    assert _slots_seen_by_another_process(second_home) == "2.0"
    family = psutil.Process(record.pid).children(recursive=True)
    started = time.monotonic()
    head.stop()
    print(f"stopped after {time.monotonic() - started:.2f} s")
    assert wait_until_ended(family, 0.0)
    assert not same_process(record.pid, record.started)
    assert head.record() is None
    assert not Paths.of(second_home).ray_folder.exists()
    assert ray_head.head.record() == first
    assert ray_head.ray.cluster_resources()["manta_slot"] == SLOTS


def record_text(record, **changes):
    return json.dumps({**asdict(record), **changes})


def _slots_seen_by_another_process(home):
    script = "import sys; from manta.service.cluster.ray_head import RayHead; r = RayHead(sys.argv[1]).connect()\n"
    script += "print(r.cluster_resources()['manta_slot'])"
    command = [sys.executable, "-c", script, str(home)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.strip()


def test_missing_ray_head_is_reported_in_one_sentence(tmp_path):
    with pytest.raises(RayUnavailable, match="There is no Ray of this service"):
        RayHead(tmp_path).connect()
    with pytest.raises(RayUnavailable, match=r"No Ray answers at 127\.0\.0\.1:1;"):
        ExistingRay("127.0.0.1:1", tmp_path).connect()


def test_failed_start_of_a_ray_head_names_its_log_and_had_our_python_path_first(second_home, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    head = RayHead(second_home)
    script = "import os; raise SystemExit(os.environ['PYTHONPATH'])"
    monkeypatch.setattr(head, "_command", lambda: [sys.executable, "-c", script])
    with pytest.raises(RayUnavailable, match=r"Ray did not start; its log is .*ray\.log"):
        head.start()
    assert Paths.of(second_home).ray_log.read_text() == f"{ROOT}/src{os.pathsep}/of/the/user\n"
    assert not Paths.of(second_home).runtime_folder.exists(), "nothing is left in /tmp"


@pytest.mark.parametrize("key", ["started", "created"])
def test_ray_head_record_of_older_releases_is_readable(tmp_path, key):
    me = os.getpid()
    started = {"started": start_of(me), "created": psutil.Process(me).create_time()}
    record = {"address": "127.0.0.1:1", "pid": me, key: started[key], "session": "x"}
    Paths.of(tmp_path).ray_record.write_text(json.dumps(record))
    assert RayHead(tmp_path).record() == HeadRecord("127.0.0.1:1", me, started[key], "x")


@pytest.fixture
def living(tmp_path, monkeypatch):
    """A head whose processes live, with its record; where it would start anew it says so."""
    head, session = RayHead(tmp_path), tmp_path / "session"
    (session / "sockets").mkdir(parents=True)
    for file in sockets_of(session):
        file.touch()
    monkeypatch.setattr(head, "start", lambda: "another")
    with ray_processes(*HEAD_PROCESSES) as processes:
        pid = processes["start"]
        record = HeadRecord("127.0.0.1:1", pid, start_of(pid), str(session), "a token")
        Paths.of(tmp_path).ray_record.write_text(record_text(record))
        yield SimpleNamespace(head=head, record=record, processes=processes, session=session)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("start", "it has ended"),
        ("gcs_server", "its gcs_server has ended"),
        ("raylet", "its raylet has ended"),
        ("socket", r"its socket .*/sockets/raylet is gone"),
        ("folder", r"its socket .*/sockets/raylet is gone"),
    ],
)
async def test_ray_head_with_an_ended_process_is_noticed_and_replaced(living, broken, why):
    """Its first process stays when another one ends without an error."""
    watch = asyncio.create_task(living.head.until_gone())
    await asyncio.sleep(0)
    assert not watch.done() and living.head.ensure() == living.record, "it is whole"
    if broken == "folder":
        shutil.rmtree(living.session)
    elif broken == "socket":
        sockets_of(living.session)[0].unlink()
    else:
        os.kill(living.processes[broken], signal.SIGKILL if broken == "start" else signal.SIGTERM)
    assert re.fullmatch(why, await asyncio.wait_for(watch, 60))
    assert living.head.ensure() == "another"


@pytest.mark.parametrize("silent", HEAD_PROCESSES)
def test_ray_head_with_a_hanging_process_is_replaced_after_a_wait(living, monkeypatch, silent):
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    process = psutil.Process(living.processes[silent])
    process.suspend()
    tries = iter([None, process.resume])
    monkeypatch.setattr(living.head, "problem_of", lambda record: (next(tries) or (lambda: None))())
    assert living.head.ensure() == living.record, "it goes on in time"
    process.suspend()
    monkeypatch.undo()
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(module, "UNRESPONSIVE_SECONDS", 0.0)
    monkeypatch.setattr(living.head, "start", lambda: "another")
    assert living.head.ensure() == "another"


def test_ray_head_record_of_another_process_is_ignored(tmp_path):
    head = RayHead(tmp_path)
    record = f'{{"address": "127.0.0.1:1", "pid": {os.getpid()}, "created": 1.0, "session": "x"}}'
    Paths.of(tmp_path).ray_record.write_text(record)
    assert head.record() is None
    head.stop()
    assert not Paths.of(tmp_path).ray_record.exists()


def test_ray_head_without_an_address_yet_exists_but_has_no_record(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "session_leader", lambda mark, words: os.getpid())
    head = RayHead(tmp_path)
    assert (head.record(), head.exists()) == (None, True), "`manta down` ends it, too"


class RayError(Exception):
    """As Ray's own."""


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, RayError])
def test_ray_that_refuses_the_connection_is_reported_in_one_sentence(monkeypatch, error):
    # Not the real one: it reads what says how to come in when it is imported, and is needed by other tests.
    monkeypatch.setitem(
        sys.modules,
        "ray",
        SimpleNamespace(init=Mock(side_effect=error("no\nentry")), exceptions=SimpleNamespace(RayError=RayError)),
    )
    with pytest.raises(RayUnavailable, match=r"Ray at 127\.0\.0\.1:1 refused the connection: no entry"):
        module.connect("127.0.0.1:1", "manta")


@pytest.mark.parametrize(("slots", "gpus", "warm"), [(3, 0, 4), (0, 2, 3), (2, 5, 6), (100, 0, 9)])
def test_ray_head_prestarts_workers_for_all_agents_and_the_daemon(tmp_path, monkeypatch, slots, gpus, warm):
    monkeypatch.setattr(module, "count_gpus", lambda: gpus)
    command = RayHead(tmp_path, slots)._command()
    assert f"--num-cpus={warm}" in command
    assert f'--resources={{"manta_slot": {slots}}}' in command
    assert "--object-store-memory=104857600" in command, "the rest of /dev/shm is for snapshots"
    assert {"--head", "--block", "--disable-usage-stats", "--port=0", "--include-dashboard=false"} <= set(command)


@pytest.fixture
def sound(tmp_path, monkeypatch):
    """Writes the record of a head without problems, with further fields: (the head, what was written)."""

    def write(**known):
        head = RayHead(tmp_path)
        record = HeadRecord("127.0.0.1:1", os.getpid(), start_of(os.getpid()), "there", **known)
        Paths.of(tmp_path).ray_record.write_text(record_text(record))
        monkeypatch.setattr(head, "problem_of", lambda record: None)
        monkeypatch.setattr(module, "_unresponsive_process", lambda pid: None)
        monkeypatch.setattr(head, "start", lambda: "another one")
        return head, record

    return write


@pytest.mark.parametrize("said", [None, "", "garbage"])
def test_removed_or_damaged_ray_token_is_restored_from_the_head_record(tmp_path, sound, said):
    (head, known), token = sound(token="a token"), Paths.of(tmp_path).ray_token
    for write_again in (head.ensure, head.restore_token):
        if said is None:
            token.unlink(missing_ok=True)
        else:
            token.write_text(said)
        write_again()
        assert token.read_text() == "a token" and stat.S_IMODE(token.stat().st_mode) == 0o600
    assert "a token" not in repr(known)


def test_ray_head_with_an_unknown_token_is_replaced(sound):
    head, _ = sound()
    assert head.ensure() == "another one"


def test_ray_token_is_the_same_for_all_heads_of_a_home(tmp_path):
    """Else whoever is connected would be shut out."""
    head, token = RayHead(tmp_path / "home"), Paths.of(tmp_path / "home").ray_token
    head._prepare()
    before = token.read_text()
    head._prepare()
    assert token.read_text() == before and len(before) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    Paths.of(tmp_path / "home").remove_runtime_folder()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device on which no room is left is Linux's")
def test_full_disk_stops_the_ray_head_and_leaves_no_partial_file(tmp_path, monkeypatch):
    home = tmp_path / "home"
    head, paths, make = RayHead(home), Paths.of(home), os.open
    monkeypatch.setattr(os, "open", lambda path, *how: make("/dev/full" if "/." in str(path) else path, *how))
    monkeypatch.setattr(os, "O_EXCL", 0)
    with pytest.raises(HomeUnusable, match=rf"the home {home} cannot be used \({home}: No space left on device\): see"):
        head._prepare()
    assert not paths.ray_token.exists()
    paths.ray_token.write_text("a token")
    monkeypatch.setattr(head, "stop", lambda: None)
    monkeypatch.setattr(head, "_spawn", lambda: SimpleNamespace(pid=os.getpid()))
    monkeypatch.setattr(head, "_wait_for_address", lambda process: "127.0.0.1:6379")
    with pytest.raises(HomeUnusable, match="No space left on device"):
        head.start()
    assert not paths.ray_record.exists()
    paths.remove_runtime_folder()
