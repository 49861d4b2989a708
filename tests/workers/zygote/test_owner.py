"""Whoever owns a zygote sees to it that there is one, and takes it along."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from manta.workers.system.processes import ProcessState
from manta.workers.zygote import owner as owning
from manta.workers.zygote.client import Exit, ZygoteUnavailable, fork
from manta.workers.zygote.owner import ZygoteOwner


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


async def test_dead_zygote_is_restarted_with_the_same_environment(owner, tmp_path, gone):
    async def seen():
        child = await fork(tmp_path / "zygote.sock", "echo", {})
        answer = json.loads(await child.control.readline())
        assert await child.wait() == Exit(0, None)
        child.close()
        return answer["variable"]

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


async def test_zygote_restart_is_retried_until_it_succeeds(owner, tmp_path, gone, monkeypatch):
    """Who took its memory may have the rest of the machine's too, for a moment."""
    start, refused = owning.subprocess.Popen, []

    def once_there_is_room(*arguments, **more):
        if len(refused) < 2:
            refused.append(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
            raise refused[-1]
        return start(*arguments, **more)

    before = pipes()
    await owner.start()
    monkeypatch.setattr(owning.subprocess, "Popen", once_there_is_room)
    os.kill(owner.pid, signal.SIGKILL)
    assert gone(owner.pid)
    (tmp_path / "zygote.sock").unlink(missing_ok=True)
    child = await fork(tmp_path / "zygote.sock", "echo", {}, timeout=20.0)
    await child.wait()
    child.close()
    await owner.close()
    await asyncio.sleep(0)
    assert (len(refused), pipes()) == (2, before)


@pytest.mark.parametrize("how", ["it is stopped", "it is silent", "its queue is full"])
async def test_a_zygote_that_hangs_is_ended_and_started_again(owner, tmp_path, monkeypatch, how):
    """To whoever connects, one that hangs is a listener that accepts nothing."""
    path = tmp_path / "zygote.sock"
    await owner.start()
    (await fork(path, "echo", {})).close()
    first = owner.pid
    with monkeypatch.context() as patch, contextlib.ExitStack() as undo:
        patch.setattr(owning, "POLL_SECONDS", 0.02)
        if how == "it is stopped":
            patch.setattr(owning, "MAX_STOPPED_POLLS", 3)
            os.kill(first, signal.SIGSTOP)
        else:
            patch.setattr(owning, "MAX_UNANSWERED_POLLS", 3)
            hangs, before = (undo.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
            path.unlink()
            hangs.bind(str(path))
            hangs.listen(0 if how == "its queue is full" else 128)
            before.connect(str(path))
        await owning.ended(first)
    (await fork(path, "echo", {})).close()
    assert owner.pid != first
    await owner.close()


async def test_slow_or_briefly_stopped_zygote_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(owning, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(owning, "MAX_STOPPED_POLLS", 3)
    monkeypatch.setattr(owning, "MAX_UNANSWERED_POLLS", 1)
    letters, looked = list("TTRTTSTT"), asyncio.Event()

    def seen(pid):
        if len(letters) == 1:
            looked.set()
        return ProcessState(letters.pop(0) if len(letters) > 1 else "S", 0.0, 0.0, 0.0)

    monkeypatch.setattr(owning, "process_state", seen)
    owner = ZygoteOwner(tmp_path / "zygote.sock", tmp_path / "log", ["--warm=signal:pause"], None)
    await owner.start()
    first = owner.pid
    await looked.wait()
    assert owner.pid == first and owner._process.poll() is None
    os.kill(first, signal.SIGKILL)
    await owner.close()


async def test_a_request_to_a_zygote_with_a_full_queue_waits_for_its_turn(tmp_path):
    with socket.socket(socket.AF_UNIX) as hangs, socket.socket(socket.AF_UNIX) as before:
        hangs.bind(str(tmp_path / "full.sock"))
        hangs.listen(0)
        before.connect(str(tmp_path / "full.sock"))
        with pytest.raises(ZygoteUnavailable, match="did not answer within"):
            await fork(tmp_path / "full.sock", "echo", {}, timeout=0.1)
