"""The zygote: what a child gets, how its end is told, and that nothing outlives whoever it belongs to."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from engine_specs import document

from manta.workers.protocol import messages
from manta.workers.protocol.messages import PROTOCOL, ForkAnswer
from manta.workers.zygote import server
from manta.workers.zygote import server as forked
from manta.workers.zygote.client import Exit, ZygoteUnavailable, fork
from manta.workers.zygote.server import Connection, InvalidRequest, _answer, _parse_request

ROOT = Path(__file__).parents[3]


async def test_zygote_child_gets_argument_environment_and_channels(zygote):
    child = await fork(zygote.socket, "echo", {"code": 7, "text": "päivää"}, {"MANTA_TEST": "set"})
    seen = json.loads(await child.control.readline())
    assert seen["argument"] == {"code": 7, "text": "päivää"}
    assert seen["pid"] == child.pid == seen["group"]
    assert seen["variable"] == "set"
    assert seen["descriptors"] == 5, "stdin, stdout, stderr, control, and the listing itself"
    assert await child.stdout.read() == b"hello from stdout\n"
    assert await child.stderr.read() == b"hello from stderr\n"
    assert await child.wait() == Exit(7, None)
    assert child.ended
    child.kill()
    child.close()


def test_children_compute_with_threads_of_their_own(warm_zygote, go):
    """OpenMP does not survive a fork of a process in which it has begun threads."""

    async def seen(threads):
        child = await fork(warm_zygote.socket, "compute", {"threads": threads})
        said = json.loads(await child.control.readline())
        assert await child.wait() == Exit(0, None)
        child.close()
        return said["before"], said["after"], said["spins"]

    async def body():
        one, two, three = [await seen(threads) for threads in (1, 2, 3)]
        assert one == (1, 1, "1000")
        assert two[0] == three[0] == 1, "the zygote has no thread beside its own"
        assert 1 < two[1] < three[1]

    go(body)


async def test_zygote_child_with_an_uncaught_exception_prints_it_and_exits_with_1(zygote):
    child = await fork(zygote.socket, "fail", {})
    assert "RuntimeError: it went wrong" in (await child.stderr.read()).decode()
    assert await child.wait() == Exit(1, None)
    child.close()
    child = await fork(zygote.socket, "leave", {})
    assert await child.stderr.read() == b"no more\n"
    assert await child.wait() == Exit(1, None)
    child.close()


async def test_signal_is_reported_and_group_dies_with_its_leader(zygote, gone):
    child = await fork(zygote.socket, "wait", {"grandchild": True})
    await child.control.readline()
    grandchild = json.loads(await child.control.readline())["grandchild"]
    os.kill(child.pid, signal.SIGTERM)
    assert await child.wait() == Exit(None, signal.SIGTERM)
    assert gone(grandchild)
    child.close()


async def test_ends_of_several_children_at_once_are_all_reported(zygote):
    """The kernel sends one signal for all that end while it is not heard."""
    children = [await fork(zygote.socket, "wait", {}) for _ in range(3)]
    for child in children:
        await child.control.readline()
    zygote.process.send_signal(signal.SIGSTOP)
    try:
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
        for child in children:
            while "\nState:\tZ" not in Path(f"/proc/{child.pid}/status").read_text():
                await asyncio.sleep(0.001)
    finally:
        zygote.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(10):
        assert [await child.wait() for child in children] == [Exit(None, signal.SIGKILL)] * 3
    for child in children:
        child.close()


@pytest.mark.parametrize("stopped", [False, True])
async def test_child_dies_when_its_requester_hangs_up(zygote, gone, stopped):
    child = await fork(zygote.socket, "wait", {"stop": stopped})
    await child.control.readline()
    child.close()
    assert await asyncio.to_thread(gone, child.pid)


def test_requester_that_is_killed_takes_its_child_along(zygote, gone):
    script = (
        "import asyncio, os, signal, sys\n"
        "from manta.workers.zygote.client import fork\n"
        "async def main():\n"
        "    child = await fork(sys.argv[1], 'wait', {'stop': True})\n"
        "    await child.control.readline()\n"
        "    print(child.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(zygote.socket)], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert process.returncode == -signal.SIGKILL
    assert gone(int(process.stdout))


def test_death_of_the_owner_leaves_no_process_and_no_socket(zygote_to_end, go, gone):
    async def body():
        children = [await fork(zygote_to_end.socket, "wait", {"stop": stop}) for stop in (False, True)]
        for child in children:
            await child.control.readline()
        zygote_to_end.disown()
        exits = [await child.wait() for child in children]
        for child in children:
            child.close()
        return [child.pid for child in children], exits

    pids, exits = go(body)
    assert zygote_to_end.process.wait(10) == 0
    assert all(gone(pid) for pid in pids)
    assert exits == [Exit(None, signal.SIGKILL)] * 2
    assert not zygote_to_end.socket.exists()


async def test_zygote_that_ends_leaves_the_socket_of_its_successor(tmp_path, start_zygote):
    async def works(running):
        child = await fork(running.socket, "echo", {})
        assert await child.wait() == Exit(0, None)
        child.close()

    first = start_zygote(tmp_path, "--warm=json")
    await works(first)
    own = first.socket.stat().st_ino
    second = start_zygote(tmp_path, "--warm=json")
    while second.socket.stat().st_ino == own:
        await asyncio.sleep(0.01)
    first.disown()
    assert await asyncio.to_thread(first.process.wait, 10) == 0
    await works(second)


async def test_zygote_whose_socket_is_removed_is_reached_again_and_keeps_its_children(zygote_to_end):
    child = await fork(zygote_to_end.socket, "wait", {})
    await child.control.readline()
    zygote_to_end.socket.unlink()
    other = await fork(zygote_to_end.socket, "echo", {})
    assert await other.wait() == Exit(0, None)
    assert not child.ended and zygote_to_end.process.poll() is None
    for each in (child, other):
        each.close()


async def test_death_of_the_zygote_takes_its_children_along(zygote_to_end, gone):
    child = await fork(zygote_to_end.socket, "wait", {})
    await child.control.readline()
    zygote_to_end.process.kill()
    assert await child.wait() == Exit(None, signal.SIGKILL)
    child.close()
    assert await asyncio.to_thread(gone, child.pid)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"not json\n", "one JSON object"),
        (b"[1, 2]\n", "one JSON object"),
        (b'{"entry": "echo", "argument": [], "environment": {}}\n', "argument an object"),
        (b'{"entry": "echo", "argument": {}, "environment": {"A": 1}}\n', "object of strings"),
        (b'{"entry": "echo", "argument": {}, "environment": {}}\n', "descriptors, not 0."),
    ],
)
async def test_zygote_answers_a_malformed_request_and_serves_on(zygote, line, reason):
    with pytest.raises(ZygoteUnavailable, match="no entry 'absent'"):
        await fork(zygote.socket, "absent", {})
    reader, writer = await asyncio.open_unix_connection(zygote.socket)
    writer.write(line)
    assert reason in json.loads(await reader.readline())["error"]
    assert await reader.read() == b""
    writer.close()
    child = await fork(zygote.socket, "echo", {})
    assert await child.wait() == Exit(0, None)
    child.close()


async def test_zygote_tells_a_requester_of_another_release_both_protocol_numbers(zygote):
    await (await fork(zygote.socket, "echo", {})).wait()  # it is there
    reader, writer = await asyncio.open_unix_connection(zygote.socket)
    writer.write(b'{"entry": "echo", "argument": {}, "environment": {}, "protocol": 99}\n')
    answer = json.loads(await reader.readline())
    assert f"speaks protocol 99 and this process {PROTOCOL}: " in answer["error"]
    assert answer["protocol"] == PROTOCOL and answer["pid"] is None
    writer.close()


async def test_zygote_of_another_release_is_refused_with_one_clear_error(zygote, monkeypatch):
    monkeypatch.setattr(messages, "SPOKEN", (99,))
    with pytest.raises(ZygoteUnavailable, match=f"zygote speaks protocol {PROTOCOL} and this process 99: end what"):
        await fork(zygote.socket, "echo", {})


def test_zygote_answers_in_the_protocol_that_it_is_asked_in(monkeypatch):
    monkeypatch.setattr(messages, "SPOKEN", (1, PROTOCOL))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(theirs)
        line = b'{"entry": "e", "argument": {}, "environment": {}, "protocol": 1}'
        connection.protocol = _parse_request(line, 3).protocol
        assert _answer(connection, ForkAnswer(7))
        assert json.loads(ours.recv(1000))["protocol"] == 1


async def test_request_may_be_large_and_hanging_up_early_is_no_harm(zygote):
    await (await fork(zygote.socket, "echo", {})).wait()
    with socket.socket(socket.AF_UNIX) as early:
        early.connect(str(zygote.socket))
        early.send(b'{"entry"')
    child = await fork(zygote.socket, "echo", {"text": "x" * 3_000_000})
    assert len(json.loads(await child.control.readline())["argument"]["text"]) == 3_000_000
    assert await child.wait() == Exit(0, None)
    child.close()


async def test_zygote_ignores_further_requests_on_the_connection_of_a_child(zygote):
    child = await fork(zygote.socket, "wait", {})
    await child.control.readline()
    child._requests.write(b'{"entry": "echo", "argument": {}, "environment": {}}\n')
    await child._requests.drain()
    other = await fork(zygote.socket, "echo", {})
    assert await other.wait() == Exit(0, None)
    os.kill(child.pid, signal.SIGTERM)
    assert await child.wait() == Exit(None, signal.SIGTERM), "it was left alone"
    for each in (child, other):
        each.close()


async def test_absent_zygote_is_one_clear_error(tmp_path):
    with pytest.raises(ZygoteUnavailable, match="did not answer within"):
        await fork(tmp_path / "zygote.sock", "echo", {}, timeout=0.1)


async def test_zygote_socket_left_by_a_dead_process_counts_as_absent(tmp_path):
    path = tmp_path / "zygote.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(ZygoteUnavailable, match="did not answer within"):
        await fork(path, "echo", {}, timeout=0.1)


@pytest.mark.parametrize(("name", "seconds"), [("zygote.sock", 60.0), ("nobody.sock", 0.1)], ids=["refused", "absent"])
async def test_failed_fork_request_leaves_no_descriptor_open(zygote, name, seconds):
    gc.collect()  # what earlier tests have left goes now or stays
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(ZygoteUnavailable):
            await fork(zygote.socket.with_name(name), "no such entry", {}, timeout=seconds)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_fork_request_that_timed_out_does_not_disturb_the_next(zygote, go):
    """Whoever handles the error of the first still has it then, and with it all that the call knew."""

    async def end(child):
        await child.wait()
        child.close()
        for _ in range(3):
            await asyncio.sleep(0)  # its descriptors are free now

    async def body():
        await end(await fork(zygote.socket, "echo", {}))  # from here on it listens
        os.kill(zygote.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(ZygoteUnavailable, match="did not answer within") as given_up:
                await fork(zygote.socket, "echo", {}, timeout=0.1)
        finally:
            os.kill(zygote.process.pid, signal.SIGCONT)
        await end(await fork(zygote.socket, "echo", {}, timeout=30.0))
        return given_up

    go(body)


def test_warm_zygote_has_one_thread_and_forks_fast(warm_zygote, go):
    async def body():
        seconds = []
        for _ in range(10):
            before = time.time()
            child = await fork(warm_zygote.socket, "echo", {})
            seconds.append(json.loads(await child.control.readline())["time"] - before)
            await child.wait()
            child.close()
        return min(seconds[1:])

    seconds = go(body)
    status = Path(f"/proc/{warm_zygote.process.pid}/status").read_text()
    assert "Threads:\t1\n" in status
    maps = Path(f"/proc/{warm_zygote.process.pid}/maps").read_text()
    assert "libtorch" in maps
    assert "_raylet" not in maps
    print(f"\nfork to first line of the child: {seconds * 1000:.1f} ms")
    assert seconds < 0.5


async def test_a_trainer_finds_all_imported_that_it_uses(warm_zygote, corpus, tmp_path):
    """Steps, backward passes and saves included: what it imported itself, each would after every fork."""
    job = document(data={"paths": [corpus]}, train={"steps": 2}, checkpoint={"every_steps": 1})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    places = {"config": str(tmp_path / "job.yaml"), "checkpoints": str(tmp_path / "checkpoints")}
    child = await fork(warm_zygote.socket, "train", places)
    said, printed = await child.control.readline(), await child.stderr.read()
    assert await child.wait() == Exit(0, None), printed
    child.close()
    assert json.loads(said)["imported"] == []


def request(**changes):
    return json.dumps({"entry": "e", "argument": {}, "environment": {}, **changes}).encode()


@pytest.mark.parametrize("environment", [{"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "x\0y"}])
def test_zygote_refuses_impossible_environment_variables(environment):
    with pytest.raises(InvalidRequest, match="environment variables"):
        _parse_request(request(environment=environment), 3)
    assert _parse_request(request(environment={"A": "x=y", "B": ""}), 3).environment == {"A": "x=y", "B": ""}


@pytest.mark.parametrize("descriptors", [2, 4])
def test_a_child_gets_as_many_descriptors_as_it_has_channels(descriptors):
    with pytest.raises(InvalidRequest, match=rf"3 descriptors, not {descriptors}; .*\(`ulimit -n`\)"):
        _parse_request(request(), descriptors)


def test_a_request_without_an_end_does_not_take_all_memory(monkeypatch):
    monkeypatch.setattr(server, "MAXIMUM_REQUEST_BYTES", 4)
    assert server._complete_line(bytearray(b"abcd")) is None
    assert server._complete_line(bytearray(b"ab\nc")) == b"ab"
    with pytest.raises(InvalidRequest, match="may have at most 4 bytes"):
        server._complete_line(bytearray(b"abcde"))


def test_an_end_is_reported_as_a_status_or_as_a_signal():
    assert server._exit_of(7, 3 << 8) == ForkAnswer(7, code=3)
    assert server._exit_of(7, 0) == ForkAnswer(7, code=0)
    assert server._exit_of(7, int(signal.SIGKILL)) == ForkAnswer(7, signal=int(signal.SIGKILL))


@pytest.mark.parametrize("item", ["trainer", "=json:loads", "trainer=json", "trainer=:loads"])
def test_a_table_of_entries_that_makes_no_sense_is_refused(item):
    with pytest.raises(ValueError, match="NAME=module:function"):
        server._resolve([item])
    assert server._resolve(["a=json:loads", "b=json:dumps"]) == {"a": json.loads, "b": json.dumps}


def test_a_requester_that_is_dropped_gives_back_what_it_has_sent():
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    connection = Connection(theirs, descriptors=[write])
    connection.close()
    assert os.read(read, 1) == b"", "its end is closed"
    assert (ours.recv(1), connection.descriptors) == (b"", [])
    assert not _answer(connection, ForkAnswer(7)), "nobody hears it"
    os.close(read)
    ours.close()


@pytest.mark.parametrize(("asked", "status"), [(None, 0), (0, 0), (7, 7), ("no more", 1)])
def test_a_status_that_is_asked_for_is_the_childs(asked, status, capsys):
    assert forked._code_of(SystemExit(asked)) == status
    assert capsys.readouterr().err == ("no more\n" if asked == "no more" else "")
