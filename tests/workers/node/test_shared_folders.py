"""A mount that does not answer does not keep a daemon from what it does for all jobs."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from manta.workers.node import folders as module
from manta.workers.node.folders import SharedFolders

FOLDERS = ("/here", "/not/here")


@pytest.fixture
def mount(monkeypatch):
    """Answers when it is told to; how often it was asked."""
    answers, asked = threading.Event(), []

    def poll(folders, installation):
        asked.append(installation)
        assert answers.wait(20)
        return folders[1:]

    monkeypatch.setattr(module, "unshared", poll)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)
    answers.asked = asked
    yield answers
    answers.set()


async def test_mount_that_does_not_answer_is_waited_for_once_and_what_was_known_holds(mount, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    folders = SharedFolders(FOLDERS, "manta-1")
    assert await folders.unshared() == (), "at first"
    now[0] += 3600.0
    with monkeypatch.context() as patient:
        patient.setattr(module, "POLL_SECONDS", 3600.0)
        for _ in range(3):  # the time to wait is that of the look, not of each caller
            assert await folders.unshared() == ()
    mount.set()
    folders._check.result(20)
    assert mount.asked == ["manta-1"]
    mount.clear()
    assert await folders.unshared() == ("/not/here",), "the answer that came when nobody waited"
    assert await folders.unshared() == ("/not/here",), "as before"


async def test_concurrent_callers_share_one_check_of_the_shared_folders(mount, monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 20.0)
    folders = SharedFolders(FOLDERS, "manta-1")
    asyncio.get_running_loop().call_later(0.02, mount.set)
    assert await asyncio.gather(*(folders.unshared() for _ in range(3))) == [("/not/here",)] * 3
    assert len(mount.asked) == 1


async def test_shared_folders_are_checked_again_on_each_call(mount, monkeypatch):
    mount.set()
    monkeypatch.setattr(module, "POLL_SECONDS", 20.0)
    folders = SharedFolders(FOLDERS, "manta-1")
    for _ in range(3):
        assert await folders.unshared() == ("/not/here",)
    assert len(mount.asked) == 3


async def test_failed_check_of_shared_folders_does_not_affect_the_next_call(monkeypatch):
    folders = SharedFolders(FOLDERS, "manta-1")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(module, "unshared", lambda *about: (_ for _ in ()).throw(MemoryError("no more")))
        await folders.unshared()
    monkeypatch.setattr(module, "unshared", lambda *about: ())
    assert await folders.unshared() == ()
