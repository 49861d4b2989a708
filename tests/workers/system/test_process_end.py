"""A process group is ended as a whole, and the end of a process of somebody else is waited for without asking again."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from manta.workers.system.processes import ended, kill_group

PARENT = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); input()"


def test_process_group_ends_with_its_leader_even_if_stopped():
    command = [sys.executable, "-c", PARENT]
    leader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    child = psutil.Process(int(leader.stdout.readline()))
    os.kill(leader.pid, signal.SIGSTOP)
    kill_group(leader.pid)
    assert leader.wait(10) == -signal.SIGKILL
    psutil.wait_procs([child], 10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    kill_group(leader.pid)
    leader.communicate()


def test_the_end_of_a_process_is_waited_for():
    process = subprocess.Popen(["sleep", "1000"])

    async def body():
        waiting = asyncio.create_task(ended(process.pid))
        await asyncio.sleep(0)
        assert not waiting.done()
        process.kill()
        await asyncio.wait_for(waiting, 10)

    asyncio.run(body())
    process.wait()
    asyncio.run(ended(process.pid))


def _descriptors():
    return {each.name for each in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("given_up", [False, True])
def test_waiting_for_the_end_of_a_process_leaves_no_descriptor_open(given_up):
    process, open_files = subprocess.Popen(["sleep", "1000"]), []

    async def body():
        open_files.append(_descriptors())
        waiting = asyncio.create_task(ended(process.pid))
        await asyncio.sleep(0)
        assert _descriptors() != open_files[0]
        if given_up:
            waiting.cancel()
        else:
            process.kill()
        await asyncio.wait({waiting}, timeout=10)
        assert waiting.done()
        open_files.append(_descriptors())

    asyncio.run(body())
    process.kill()
    process.wait()
    assert open_files[0] == open_files[1]
