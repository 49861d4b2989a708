"""How commands find the service of their home, and what a service that fails leaves running."""

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import uvicorn
from sqlalchemy import text

from manta.api import app as api_app
from manta.api import server, ui
from manta.api.cli import service
from manta.api.client import Client
from manta.api.serving.local_service import announce, running_service, service_process
from manta.service.cluster.existing_ray import ExistingRay
from manta.service.control.control_plane import ControlPlane
from manta.service.identity import Scope
from manta.service.own_files import HomeUnusable
from manta.service.settings import RequestLimits, Settings, Tls
from manta.service.store import Store, deletion, jobs, keys
from manta.service.store.location import url_in
from manta.service.traces.traces import TracesNotInstalled
from manta.workers.spec.reading import parse_job_spec
from manta.workers.storage.locations import ObjectPath
from tests.api import conftest
from tests.api.ui.sample import SampleControl


@pytest.fixture(autouse=True)
def homes_with_keys(monkeypatch):
    """Homes for which a service has made its key; what it makes is tested in tests/service/test_keys.py."""
    homes = []
    monkeypatch.setattr(server.installation_keys, "ensure_automatic", lambda store, home: homes.append(home))
    return homes


@pytest.fixture(autouse=True)
def own_mask():
    """A service sets its process's mask of new files."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("fake", [conftest.FakeControl, SampleControl])
def test_fake_control_plane_is_called_like_the_real_one(fake):
    for name, method in vars(ControlPlane).items():
        if inspect.isfunction(method) and not name.startswith("_") and hasattr(fake, name):
            assert [*signature(getattr(fake, name)).parameters] == [*signature(method).parameters], name


def test_announced_service_is_found_by_the_start_of_its_process(tmp_path, monkeypatch):
    file = Settings(tmp_path).service_file
    announce(file, "http://127.0.0.1:1", "sqlite:///there")
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: 1.0)  # the clock was set
    assert running_service(tmp_path)["url"] == "http://127.0.0.1:1"
    file.write_text(json.dumps({**json.loads(file.read_text()), "started": "another boot/1"}))
    assert running_service(tmp_path) is None


def test_service_of_a_release_before_is_found(tmp_path):
    me = os.getpid()
    announced = {"url": "u", "pid": me, "created": psutil.Process(me).create_time()}
    Settings(tmp_path).service_file.write_text(json.dumps(announced))
    assert running_service(tmp_path) == announced


def test_service_that_fails_leaves_the_jobs_running(tmp_path, monkeypatch):
    control = Mock(store=SimpleNamespace(location="sqlite:///there"))
    monkeypatch.setattr(server, "ControlPlane", Mock(return_value=control))
    monkeypatch.setattr(server, "build_app", lambda *arguments: None)
    monkeypatch.setattr(server, "announce", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        server.serve(Settings(tmp_path), "127.0.0.1", 0, None, None)
    control.stop.assert_called_once_with()


@pytest.mark.parametrize("ray_ran", [True, False])
def test_start_that_times_out_ends_the_service_and_only_a_ray_it_started(tmp_path, monkeypatch, ray_ran):
    sleeper, real, stopped = [], subprocess.Popen, []

    def sleep(command, **options):
        sleeper.append(real(["sleep", "1000"]))
        return sleeper[0]

    monkeypatch.setattr(service.subprocess, "Popen", sleep)
    monkeypatch.setattr(service, "_wait_until_ready", Mock(side_effect=service.NotStarted("the service is not ready")))
    monkeypatch.setattr(service, "stop_service", stopped.append)
    monkeypatch.setattr(service.RayHead, "record", lambda head: "a record" if ray_ran else None)
    with pytest.raises(service.NotStarted):
        service.start_service(Settings(tmp_path), "127.0.0.1", 0, None, None)
    assert sleeper[0].returncode is not None
    assert stopped == ([] if ray_ran else [tmp_path])


BUCKET = ObjectPath("s3", "bucket/manta")


class NotedControl:
    """A control plane that remembers what it was made of."""

    made = None
    kept = threading.Event()
    store = SimpleNamespace(location="postgresql://me:***@there/manta")

    def __init__(self, *arguments, **options):
        NotedControl.made = SimpleNamespace(**signature(ControlPlane).bind(*arguments, **options).arguments)

    def start(self):
        pass

    def restore_token(self):
        NotedControl.kept.set()

    def stop(self):
        pass


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Starts a service whose control plane notes what it is made of, and which ends at once; returns what it has
    announced meanwhile."""
    announced = []
    monkeypatch.setattr(server, "ControlPlane", NotedControl)
    monkeypatch.setattr(server, "build_app", lambda *arguments: None)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **options: announced.append(running_service(tmp_path)))

    def serve(host="127.0.0.1", slots=None, ray=None, **settings):
        server.serve(Settings(tmp_path, **settings), host, 0, slots, ray)
        return announced[-1]

    return serve


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("garbage")])
def test_service_whose_announcement_is_lost_announces_itself_again(tmp_path, monkeypatch, serve, damage):
    monkeypatch.setattr(server, "RESTORE_SECONDS", 0.001)
    file, seen = Settings(tmp_path).service_file, []

    def run(*arguments, **options):
        before = running_service(tmp_path)
        assert json.loads((tmp_path / "service.lock").read_text()) == {
            each: before[each] for each in ("pid", "started")
        }
        with pytest.raises(server.AlreadyRunning):
            server.lock_home(tmp_path)  # leaves what is in the file
        damage(file)
        assert service_process(tmp_path) == os.getpid()
        (tmp_path / "service.lock").unlink()
        (tmp_path / "manta.db.lock").unlink()
        NotedControl.kept.clear()
        for _ in range(2):  # looks, the second of which has begun since
            assert NotedControl.kept.wait(60)
            NotedControl.kept.clear()
        seen.append((before, running_service(tmp_path)))
        for second in (server.lock_home, lambda home: server.lock_database(home, None)):
            with pytest.raises(server.AlreadyRunning):
                second(tmp_path)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    server.serve(Settings(tmp_path), "127.0.0.1", 0, None, None)
    assert seen[0][0] == seen[0][1] is not None
    assert not file.exists()


@pytest.mark.parametrize(("hours", "seconds", "dashboard"), [(0.5, 1800, True), (0.0, 0, False)])
def test_settings_reach_the_control_plane_and_the_api(tmp_path, monkeypatch, hours, seconds, dashboard):
    served = []
    monkeypatch.setattr(server, "ControlPlane", NotedControl)
    monkeypatch.setattr(api_app, "create_app", lambda control, *taken: served.append(taken))
    monkeypatch.setattr(ui, "mount", lambda app: served.append("dashboard"))
    monkeypatch.setattr(uvicorn.Server, "run", lambda *arguments, **options: served.append(running_service(tmp_path)))
    few = RequestLimits(requests_per_second=3)
    database = "postgresql://me:secret@there/manta"
    settings = Settings(tmp_path, None, True, ("manta.example.org",), hours, (tmp_path / "data",), database, limits=few)
    settings = dataclasses.replace(
        settings, jobs_kept_days=30, checkpoints=BUCKET, node_notices="aws", dashboard=dashboard, traces="http://there"
    )
    server.serve(settings, "127.0.0.1", 0, 3, None)
    made, ((hosts, limits, secure_cookies, listens_on), *mounted, announced) = NotedControl.made, served
    assert (limits, secure_cookies) == (few, False)
    assert mounted == (["dashboard"] if dashboard else [])
    options = made.options
    assert (options.allow_faults, options.memory_seconds) == (True, seconds)
    assert options.retention_days == 30
    assert (options.checkpoints, options.nodes.notices, options.traces) == (BUCKET, "aws", "http://there")
    assert options.data_roots.folders == (tmp_path / "data",)
    assert (options.database_url, announced["database"]) == (database, "postgresql://me:***@there/manta")
    assert '--resources={"manta_slot": 3}' in made.head._command()
    assert (hosts, listens_on) == (("manta.example.org",), "127.0.0.1")
    assert announced["url"].startswith("http://127.0.0.1:") and not announced["url"].endswith(":0")
    assert running_service(tmp_path) is None, "it is not announced any more"
    assert (tmp_path / "service.lock").stat().st_mode & 0o077 == 0, "what it makes is for its own user alone"


def test_home_with_jobs_in_another_database_is_not_started_with_an_empty_one(tmp_path, monkeypatch, serve):
    serve(database_url="postgresql://me:secret@there/manta")
    assert "secret" not in (tmp_path / "database").read_text()
    monkeypatch.setattr(NotedControl, "store", SimpleNamespace(location="sqlite:///in/the/home"))
    said = r"are in the database postgresql://me:\*\*\*@there/manta: name it"
    with pytest.raises(server.DatabaseMismatch, match=said):
        serve()
    (tmp_path / "database").unlink()
    serve()


class StoringControl(NotedControl):
    """One with a database."""

    def __init__(self, home, head, options, start_over=None):
        self.store = Store(url_in(home, options.database_url))

    def stop(self):
        self.store.close()


def add_job(store, job):
    store.migrate()
    store.write(lambda session: jobs.create(session, job))


def delete_job(store, job):
    add_job(store, job)
    store.write(lambda session: deletion.end(session, jobs.unfinished(session)[0].id))


@pytest.mark.parametrize(("make", "record", "refused"), [
    (lambda store, job: None, True, True), (lambda store, job: None, False, True),
    (lambda store, job: store.database.file.touch(), True, True), (lambda store, job: store.migrate(), True, True),
    (add_job, True, False), (delete_job, True, False),
], ids=["no file", "no file and no record", "empty file", "tables", "a job", "a deleted job"])  # fmt: skip
def test_home_with_files_of_jobs_is_not_started_with_a_database_without_jobs(
    tmp_path, monkeypatch, document, serve, make, record, refused
):
    monkeypatch.setattr(server, "ControlPlane", StoringControl)
    store = Store(url_in(tmp_path, None))
    make(store, parse_job_spec(document))
    store.close()
    (tmp_path / "jobs" / "job_0w1bg0yqhw1e").mkdir(parents=True)
    if record:
        (tmp_path / "database").write_text(store.location)
    before = sorted(each.name for each in tmp_path.iterdir() if each.suffix != ".lock")
    if not refused:
        serve()
        return
    said = (
        rf"{store.location} is missing .*job_0w1bg0yqhw1e, which may be .*`manta db restore FILE`.*`mv {tmp_path}/jobs "
    )
    with pytest.raises(server.DatabaseMissing, match=said):
        serve()
    assert (
        sorted(each.name for each in tmp_path.iterdir() if each.suffix not in (".lock", ".db-wal", ".db-shm")) == before
    )
    if record:  # another one is named on purpose
        serve(database_url=f"sqlite:///{tmp_path}/other.db")
        (tmp_path / "database").unlink()
    (tmp_path / "jobs").rename(tmp_path / "jobs.old")
    serve()


def test_full_disk_at_start_keeps_the_homes_recorded_database(tmp_path, monkeypatch, serve):
    (tmp_path / "database.part").symlink_to("/dev/full")
    said = rf"the home {tmp_path} cannot be used \(.*: No space left on device\): see to"
    with pytest.raises(HomeUnusable, match=said):
        serve(database_url="postgresql://me:secret@there/manta")
    assert not (tmp_path / "database").exists()
    (tmp_path / "database.part").unlink()
    (tmp_path / "database").write_text("sqlite:///in/the/home")
    (tmp_path / "service.part").symlink_to("/dev/full")
    monkeypatch.setattr(NotedControl, "store", SimpleNamespace(location="sqlite:///in/the/home"))
    with pytest.raises(HomeUnusable, match="No space left"):
        serve()


@pytest.mark.parametrize("begin", [
    lambda home: server.serve(Settings(home), "127.0.0.1", 0, None, None),
    lambda home: service.start_service(Settings(home), "127.0.0.1", 0, None, None),
])  # fmt: skip
def test_home_that_cannot_be_created_is_reported(tmp_path, begin):
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeUnusable, match=r"the home .*/file/home cannot be used \(.*file.*: Not a directory\)"):
        begin(tmp_path / "file" / "home")


def test_unusable_log_or_lock_file_in_the_home_is_reported(tmp_path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(HomeUnusable, match="logs: File exists"):
        service.start_service(Settings(tmp_path), "127.0.0.1", 0, None, None)
    (tmp_path / "service.lock").mkdir()
    with pytest.raises(HomeUnusable, match=r"service\.lock: Is a directory"):
        server.lock_home(tmp_path)


def test_service_uses_an_existing_ray_cluster_when_its_address_is_given(serve):
    serve(ray="there:6379")
    assert isinstance(NotedControl.made.head, ExistingRay)


def test_second_service_of_a_home_is_refused(tmp_path):
    with server.lock_home(tmp_path), pytest.raises(server.AlreadyRunning, match="manta down"):
        server.lock_home(tmp_path)


def test_second_service_on_one_sqlite_file_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/shared.db"
    (held,) = server.lock_database(tmp_path / "one", url)
    with held, pytest.raises(server.AlreadyRunning, match=r"another service uses .*/shared.db already, and an SQLite"):
        server.lock_database(tmp_path / "two", url)
    assert server.lock_database(tmp_path, "postgresql://manta@/jobs") == []


def test_address_in_use_is_reported_in_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(server.PortTaken, match=rf"cannot listen on 127.0.0.1:{port} \(Address already in use\);"):
            server._listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "reached"),
    [("127.0.0.1", "4"), ("localhost", "4"), ("0.0.0.0", "4"), ("", "4"), ("::1", "6"), ("::", "46")],
)
def test_service_listens_on_addresses_of_both_families(host, reached):
    with server._listen(host, 0) as listener:
        port = listener.getsockname()[1]
        for family, loopback in (("4", "127.0.0.1"), ("6", "::1")):
            with contextlib.nullcontext() if family in reached else pytest.raises(OSError, match="refused"):
                socket.create_connection((loopback, port)).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_address_of_another_machine_is_refused_with_advice(host):
    with pytest.raises(server.PortTaken, match=r"cannot listen on .*; --host takes an address of this machine"):
        server._listen(host, 0)


def test_service_for_this_machine_only_makes_its_user_a_key(tmp_path, monkeypatch, serve, homes_with_keys):
    serve()
    assert homes_with_keys == [tmp_path]
    monkeypatch.setattr(server, "_has_any_key", lambda settings: True)
    announced = serve("0.0.0.0", tls=Tls(terminated=True))
    assert homes_with_keys == [tmp_path], "one that others reach makes none"
    assert announced["url"].startswith("http://127.0.0.1:"), "no browser opens 0.0.0.0"
    assert serve("::", tls=Tls(terminated=True))["url"].startswith("http://[::1]:")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_unusable_tls_certificate_is_refused_before_the_home_is_created(tmp_path, host):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    settings = Settings(tmp_path / "home", tls=Tls(certificate, key))
    for file in (certificate, key):
        with pytest.raises(server.CertificateUnusable, match=f"{file} cannot be read: No such file or directory"):
            server.serve(settings, host, 0, None, None)
        file.write_text("no PEM")
    with pytest.raises(server.CertificateUnusable, match="no certificate and its private key, in PEM"):
        server.serve(settings, host, 0, None, None)
    assert not settings.home.exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.7.3", "trainer7", "::"])
def test_shared_service_needs_tls_and_a_key_before_it_starts(tmp_path, host):
    home = tmp_path / "home"
    with pytest.raises(server.UnprotectedService, match=r"--tls-cert and --tls-key, or use --tls-terminated"):
        server.serve(Settings(home), host, 0, None, None)
    with pytest.raises(server.UnprotectedService, match="make one with `manta keys create --admin`"):
        server.serve(Settings(home, tls=Tls(terminated=True)), host, 0, None, None)
    assert not home.exists()


def test_service_with_traces_but_no_exporter_package_does_not_start(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "manta.service.traces.exporter", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracesNotInstalled, match=r"pip install 'manta-train\[traces\]'"):
        server.serve(Settings(tmp_path / "home", traces="http://collector:4318"), "127.0.0.1", 0, None, None)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(("more", "enough"), [
    ({}, True), ({"expires_at": 1.0}, False), ({"scope": Scope.SUBMIT}, False), ({"installation": False}, False),
])  # fmt: skip
def test_shared_service_needs_an_unlimited_admin_key(tmp_path, database_url, store, more, enough):
    given = {"scope": Scope.ADMIN, "installation": True, **more}
    store.write(lambda session: keys.create(session, "digest", "a", **given))
    settings = Settings(tmp_path, database_url=database_url, tls=Tls(terminated=True))
    if enough:
        server.refuse_without_protection(settings, "0.0.0.0")
    else:
        with pytest.raises(server.UnprotectedService):
            server.refuse_without_protection(settings, "0.0.0.0")


def test_shared_service_with_a_database_without_key_table_needs_a_key_first(tmp_path, store):
    store.write(lambda session: session.execute(text("DROP TABLE browser_tokens")))
    store.write(lambda session: session.execute(text("DROP TABLE api_keys")))
    with pytest.raises(server.UnprotectedService, match="keys create"):
        server.refuse_without_protection(Settings(tmp_path, tls=Tls(terminated=True)), "0.0.0.0")


@pytest.mark.parametrize("proxies", [(), ("10.0.0.0/8",)])
def test_client_addresses_from_a_proxy_are_used_only_if_it_is_trusted(tmp_path, monkeypatch, proxies):
    monkeypatch.setattr(server, "ControlPlane", NotedControl)
    monkeypatch.setattr(server, "build_app", lambda *arguments: address_app)
    monkeypatch.setattr(uvicorn.Server, "run", lambda served, **options: seen.append(ask(served.config)))
    seen = []

    async def address_app(scope, receive, send):
        seen.append(scope["client"][0])

    def ask(config):
        config.load()
        forwarded = [(b"x-forwarded-for", b"203.0.113.5")]
        scope = {"type": "http", "headers": forwarded, "client": ("10.1.2.3", 1), "scheme": "http"}
        asyncio.run(config.loaded_app(scope, None, None))

    server.serve(Settings(tmp_path, trusted_proxies=proxies), "127.0.0.1", 0, None, None)
    assert seen[0] == ("203.0.113.5" if proxies else "10.1.2.3")


def test_idle_connections_outlive_the_clients_keepalive(tmp_path, monkeypatch, serve):
    kept = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda served, **options: kept.append(served.config.timeout_keep_alive))
    server.serve(Settings(tmp_path), "127.0.0.1", 0, None, None)
    with Client("http://127.0.0.1:1") as client:
        used_again = client._http._transport._pool._keepalive_expiry
    assert kept[0] > 60 > used_again, "load balancers use them for a minute"
