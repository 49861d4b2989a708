"""What a service says at its start about somebody else's Ray, and how long it does without that one's head."""

import os

import pytest

from manta.service.cluster import existing_ray as module
from manta.service.cluster.existing_ray import (
    HEAD_IS_PERSISTENT,
    HEAD_NOT_PERSISTENT,
    HEAD_RECONNECT_SECONDS,
    ExistingRay,
)
from manta.service.cluster.ray_private import RECONNECT_SECONDS

ADDRESS = "10.0.0.1:6379"


@pytest.fixture
def ray(monkeypatch, tmp_path, caplog):
    """One that answers; its head keeps what it knows as `keeps` says. The seconds that a raylet waits for it."""
    waits = []
    monkeypatch.setitem(os.environ, RECONNECT_SECONDS, "")
    del os.environ[RECONNECT_SECONDS]
    monkeypatch.setattr(module, "answers", lambda address: True)
    monkeypatch.setattr(module, "ensure_raylet", lambda *about: waits.append(os.environ[RECONNECT_SECONDS]))
    monkeypatch.setattr(module, "connect", lambda address, namespace, environment: "ray")
    caplog.set_level("INFO")

    def connected(keeps):
        monkeypatch.setattr(module, "outlives_head", keeps)
        assert ExistingRay(ADDRESS, tmp_path).connect() == "ray"
        return waits

    return connected


@pytest.mark.parametrize(
    ("keeps", "level", "said"), [(True, "INFO", HEAD_IS_PERSISTENT), (False, "WARNING", HEAD_NOT_PERSISTENT)]
)
def test_connection_to_an_existing_ray_logs_whether_its_head_is_persistent(ray, caplog, keeps, level, said):
    ray(lambda address: keeps)
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [(level, said)]


def test_existing_ray_that_does_not_say_where_its_head_persists_is_used(ray, caplog):
    def fails(address):
        raise RuntimeError("no\nanswer")

    ray(fails)
    assert "does not report where its head stores its state: no answer" in caplog.text


def test_ray_head_reconnection_waits_ten_minutes_unless_configured(ray, monkeypatch):
    assert ray(lambda address: True) == [HEAD_RECONNECT_SECONDS] == ["600"]
    monkeypatch.setenv(RECONNECT_SECONDS, "90")
    assert ray(lambda address: True) == ["600", "90"]
