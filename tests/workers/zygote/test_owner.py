"""Whoever owns a zygote sees to it that there is one, and takes it along."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from workers.zygote import owner as owning
from workers.zygote.client import Exit, fork
from workers.zygote.owner import ZygoteOwner


@pytest.fixture
def owner(tmp_path, monkeypatch):
    monkeypatch.setattr(owning, "RESTART_SECONDS", 0.01)
    options = ["--warm=json", "--entry=echo=zygote_entries:echo"]
    return ZygoteOwner(tmp_path / "zygote.sock", tmp_path / "logs" / "zygote.log", options, {"MANTA_TEST": "set"})


def pipes():
    """How many ends of pipes this process has open."""
    ends = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            ends += str(descriptor.readlink()).startswith("pipe:")
    return ends


def test_zygote_that_dies_is_started_again_with_the_same_environment(owner, tmp_path, go, gone):
    async def seen():
        child = await fork(tmp_path / "zygote.sock", "echo", {})
        answer = json.loads(await child.control.readline())
        assert await child.wait() == Exit(0, None)
        child.close()
        return answer["variable"]

    async def body():
        assert owner.pid is None
        before = pipes()
        await owner.start()
        first = owner.pid
        await owner.start()
        assert owner.pid == first, "a second time does nothing"
        assert await seen() == "set"
        os.kill(first, signal.SIGKILL)
        assert gone(first)
        (tmp_path / "zygote.sock").unlink()  # nobody listens there
        assert await seen() == "set"
        second = owner.pid
        assert second != first
        await owner.close()
        assert gone(second) and not (tmp_path / "zygote.sock").exists()
        assert "zygote owner" not in {task.get_name() for task in asyncio.all_tasks()}, "nobody starts another one"
        await asyncio.sleep(0)  # what the children wrote into is let go of then
        assert pipes() == before, "none of a zygote that died is kept"

    go(body)
