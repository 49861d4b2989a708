"""How commands find the service of their home, and what a service that fails leaves running."""

import json
import os
import subprocess

import psutil
import pytest

from api import server
from api.cli import service
from api.server import _announce, running_service
from service.settings import Settings


def test_announced_service_is_found_by_the_start_of_its_process(tmp_path, monkeypatch):
    file = Settings(tmp_path).service_file
    _announce(file, "http://127.0.0.1:1")
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: 1.0)  # the clock was set
    assert running_service(tmp_path)["url"] == "http://127.0.0.1:1"
    file.write_text(json.dumps({**json.loads(file.read_text()), "started": "another boot/1"}))
    assert running_service(tmp_path) is None


def test_service_of_a_release_before_is_found(tmp_path):
    me = os.getpid()
    announced = {"url": "u", "pid": me, "created": psutil.Process(me).create_time()}
    Settings(tmp_path).service_file.write_text(json.dumps(announced))
    assert running_service(tmp_path) == announced


class FakeControl:
    """A control plane that remembers how it was left."""

    left = ""

    def __init__(self, *arguments):
        pass

    def start(self):
        pass

    def stop(self):
        FakeControl.left = "jobs run on"


def test_service_that_fails_leaves_the_jobs_running(tmp_path, monkeypatch):
    def disk_is_full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(server, "ControlPlane", FakeControl)
    monkeypatch.setattr(server, "build_app", lambda *arguments: None)
    monkeypatch.setattr(server, "_announce", disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        server.serve(Settings(tmp_path), "127.0.0.1", 0, None, None)
    assert FakeControl.left == "jobs run on"


@pytest.mark.parametrize("ray_ran", [True, False])
def test_service_that_is_not_ready_in_time_takes_only_what_it_started_with_it(tmp_path, monkeypatch, ray_ran):
    sleeper, real, stopped = [], subprocess.Popen, []

    def sleep(command, **options):
        sleeper.append(real(["sleep", "1000"]))
        return sleeper[0]

    def never(*arguments):
        raise service.NotStarted("the service is not ready")

    monkeypatch.setattr(service.subprocess, "Popen", sleep)
    monkeypatch.setattr(service, "_wait_until_ready", never)
    monkeypatch.setattr(service, "stop_service", stopped.append)
    monkeypatch.setattr(service.RayHead, "record", lambda head: "a record" if ray_ran else None)
    with pytest.raises(service.NotStarted):
        service.start_service(tmp_path, "127.0.0.1", 0, None, None)
    assert sleeper[0].returncode is not None
    assert stopped == ([] if ray_ran else [tmp_path])
