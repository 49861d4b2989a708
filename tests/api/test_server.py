"""The file by which commands find the service of their home."""

import json
import os

import psutil

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
