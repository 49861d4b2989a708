"""The agent over a real zygote: reports are acknowledged, generations fence, output becomes a log, nothing is left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manta.workers.node.host import Host
from manta.workers.paths import Paths
from manta.workers.protocol.json_codec import to_json
from manta.workers.protocol.messages import PROTOCOL, Endpoint, Fault, Launched, LaunchOrder, ProtocolMismatch
from manta.workers.protocol.remote_call import StaleOwner
from manta.workers.protocol.reports import EXIT_SAVED, Exited, Failure, KillReason
from manta.workers.protocol.requests import Arm, SaveAndEnd
from manta.workers.rank import agent as module
from manta.workers.rank import trainer_handle, trainer_slot
from manta.workers.rank.agent import Agent
from manta.workers.rank.trainer_handle import TrainerHandle
from manta.workers.rank.trainer_slot import StaleGeneration, TrainerSlot
from manta.workers.zygote.client import Exit

ROOT = Path(__file__).parents[3]


@pytest.fixture
def make_agent(zygote, tmp_path, monkeypatch):
    """Makes the agent of rank 3 of job-1; must be called in a running event loop. It is as patient with its zygote and
    with a trainer's last words as a busy machine asks for."""
    monkeypatch.setattr(trainer_slot, "PREPARE_WAIT_SECONDS", 30.0)
    monkeypatch.setattr(trainer_handle, "DRAIN_SECONDS", 30.0)

    def make():
        snapshots = tmp_path / "snapshots"
        return Agent("job-1", 3, str(tmp_path / "home"), str(zygote.socket.parent), str(snapshots))

    return make


def order(generation, **spec):
    """A LaunchOrder whose spec tells the stand-in trainer what to do."""
    return LaunchOrder(job="job-1", generation=generation, rank=3, spec=spec)


async def until_exit(agent, after=0):
    """All reports above `after` up to the next exit."""
    reports = []
    while not reports or reports[-1].kind != "exit":
        reports += await agent.reports(reports[-1].sequence if reports else after, 20.0)
    return reports


def log_of(tmp_path):
    text = Paths.of(tmp_path / "home").rank_log("job-1", 3).read_text()
    return [json.loads(line) for line in text.splitlines()]


async def test_agent_numbers_trainer_reports_and_keeps_them_until_acknowledged(make_agent):
    agent = make_agent()
    described = await agent.describe()
    assert (described.generation, described.rank, described.sizes) == (0, None, ())
    layout = {"tensor": 2, "pipeline": 1, "data": 2}
    answer = await agent.launch(order(1, reports=5, code=4, print=["bye"], parallel=layout))
    described = await agent.describe()
    assert (described.generation, described.rank, described.sizes) == (1, 3, (2, 1, 2))
    assert described.trainer_pid in (answer.pid, None)
    reports = await until_exit(agent)
    assert [report.sequence for report in reports] == [1, 2, 3, 4, 5, 6]
    assert [report.payload.data["index"] for report in reports[:5]] == [0, 1, 2, 3, 4]
    assert reports[-1].payload == Exited(code=4, last_output=("bye",))
    assert {report.rank for report in reports} == {3}
    for _ in range(2):
        assert await agent.reports(5, 0.0) == reports[5:], "not acknowledged, so told again"
    assert await agent.reports(6, 0.0) == []
    assert await agent.reports(0, 0.0) == [], "acknowledged means forgotten"
    await agent.launch(order(2, reports=1))
    assert [report.sequence for report in await until_exit(agent, 6)] == [7, 8]
    await agent.close()


async def test_agent_tells_only_the_current_generations_trainer_to_save_and_end(make_agent):
    agent = make_agent()
    assert not await agent.tell(SaveAndEnd(1))
    await agent.launch(order(1, echo_commands=1, code=EXIT_SAVED))
    assert not await agent.tell(SaveAndEnd(2))
    assert await agent.tell(SaveAndEnd(1))
    command, ended = await until_exit(agent)
    assert command.payload.data == {"command": {"do": "save_and_end", "generation": 1}}
    assert ended.payload == Exited(code=EXIT_SAVED)
    assert not await agent.tell(SaveAndEnd(1))
    await agent.close()


async def test_long_poll_wakes_with_the_next_report(make_agent):
    agent = make_agent()
    assert await agent.reports(0, 0.01) == []
    waiting = asyncio.create_task(agent.reports(0, 30.0))
    await agent.launch(order(1, reports=1, wait=True))
    assert [report.kind for report in await waiting] == ["event"]
    await agent.close()


async def test_agent_refuses_launches_of_stale_generations_and_replaces_its_trainer_for_a_newer_one(make_agent, gone):
    agent = make_agent()
    first = await agent.launch(order(2, reports=1, wait=True, stop=True))
    for generation in (1, 2):
        with pytest.raises(StaleGeneration, match="at generation 2"):
            await agent.launch(order(generation))
    with pytest.raises(StaleGeneration, match="belongs to job-1, not to job-2"):
        await agent.launch(LaunchOrder(job="job-2", generation=9, rank=3, spec={}))
    second = await agent.launch(order(3, wait=True))
    assert gone(first.pid)
    assert (await agent.describe()).trainer_pid == second.pid
    exits = [r for r in await agent.reports(0, 5.0) if r.kind == "exit"]
    assert [(r.generation, r.payload.signal) for r in exits] == [(2, 9)]
    assert await agent.stop() == Exit(None, 9)
    assert await agent.stop() == Exit(None, 9), "stopping twice is no harm"
    assert gone(second.pid)
    await agent.close()


async def test_agent_drops_unreadable_and_stale_trainer_reports(make_agent, tmp_path):
    agent = make_agent()
    stale = json.dumps({"kind": "event", "generation": 4, "rank": 3, "time": 1.0, "data": {}})
    invented = json.dumps({"kind": "exit", "generation": 5, "rank": 3, "time": 1.0, "data": {}})
    await agent.launch(order(5, raw=[stale, "junk", "[]", invented], reports=1))
    assert [report.kind for report in await until_exit(agent)] == ["event", "exit"]
    assert sum("unreadable report" in line["text"] for line in log_of(tmp_path)) == 2
    await agent.close()


async def test_fault_armed_during_a_fork_reaches_the_new_trainer(make_agent, monkeypatch):
    agent, fork = make_agent(), TrainerSlot._fork

    async def slow_fork(self, order, prepared=False):
        self.tell(Arm(Fault("late", "kill", 3)))
        return await fork(self, order, prepared)

    armed = []
    monkeypatch.setattr(TrainerSlot, "_fork", slow_fork)
    monkeypatch.setattr(TrainerHandle, "tell", lambda run, request: armed.append(request.fault))
    await agent.tell(Arm(Fault("early", "kill", 3)))
    await agent.launch(order(1, wait=True))
    assert [fault.id for fault in armed] == ["late"], "the other one was in the order"
    await agent.close()


async def test_agent_reports_the_failure_of_a_trainer_with_its_exit(make_agent):
    agent = make_agent()
    said = {"kind": "exception", "step": 1, "exception": "E", "message": "why"}
    failure = json.dumps({"kind": "failure", "generation": 1, "rank": 3, "time": 1.0, "data": said})
    await agent.launch(order(1, raw=[failure], code=1))
    (report,) = await until_exit(agent)
    assert report.payload.failure == Failure(**said, at=1.0)
    await agent.close()


async def test_agent_reports_the_signal_that_ended_a_trainer_with_its_last_output(make_agent):
    agent = make_agent()
    await agent.launch(order(1, print=[f"line {n}" for n in range(50)], signal=int(signal.SIGSEGV)))
    (report,) = await until_exit(agent)
    assert report.payload.signal == signal.SIGSEGV
    assert report.payload.last_output == tuple(f"line {n}" for n in range(30, 50))
    await agent.close()


async def test_agent_logs_trainer_output_as_json_lines(make_agent, tmp_path):
    agent = make_agent()
    await agent.launch(order(1, print=["ä", "x" * 20_000], bytes=[*b"a\xff\x00b\n", *b"no newline"]))
    await until_exit(agent)
    await agent.close()
    lines = log_of(tmp_path)
    stdout = [line["text"] for line in lines if line["stream"] == "stdout"]
    stderr = [line["text"] for line in lines if line["stream"] == "stderr"]
    assert stdout == ["a\ufffd\x00b", "no newline"]
    assert stderr[0] == "ä"
    assert "".join(stderr[1:]) == "x" * 20_000
    assert all(len(text) < 20_000 for text in stderr)
    assert {(line["rank"], line["generation"]) for line in lines} == {(3, 1)}


async def test_log_that_cannot_be_written_does_not_stop_the_trainer(make_agent, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "jobs").write_text("a file where a folder should be")
    agent = make_agent()
    await agent.launch(order(1, print=["x" * 500_000], reports=1))
    reports = await until_exit(agent)
    assert [report.kind for report in reports] == ["event", "exit"]
    assert reports[-1].payload.code == 0
    await agent.close()


async def test_close_removes_the_snapshots_of_this_rank_only(make_agent, tmp_path):
    folder = tmp_path / "snapshots"
    folder.mkdir()
    (folder / "rank-00003.snapshot").touch()
    (folder / "rank-00004.snapshot").touch()
    await make_agent().close()
    assert [file.name for file in folder.iterdir()] == ["rank-00004.snapshot"]
    (folder / "rank-00004.snapshot").unlink()
    await make_agent().close()
    assert not folder.exists()


def test_stopped_trainer_dies_with_its_agent(zygote, tmp_path, gone):
    script = (
        "import asyncio, json, os, signal, sys\n"
        "from manta.workers.protocol.json_codec import from_json\n"
        "from manta.workers.protocol.messages import LaunchOrder\n"
        "from manta.workers.rank.agent import Agent\n"
        "async def main():\n"
        "    agent = Agent('job-1', 3, sys.argv[1], sys.argv[2], None)\n"
        "    answer = await agent.launch(from_json(LaunchOrder, json.loads(sys.argv[3])))\n"
        "    await agent.reports(0, 20.0)\n"
        "    print(answer.pid, 'torch' in sys.modules, 'ray' in sys.modules, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    stop = json.dumps(to_json(order(1, reports=1, wait=True, stop=True)))
    arguments = [sys.executable, "-c", script, str(tmp_path / "home"), str(zygote.socket.parent), stop]
    process = subprocess.run(arguments, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=30)
    pid, torch, ray = process.stdout.split()
    assert gone(int(pid))
    assert (torch, ray) == ("False", "False"), "the agent must stay light"


async def test_standstill_and_its_stacks_are_reported_and_its_end_says_why(make_agent):
    agent = make_agent()
    assert await agent.progress() is None
    answer = await agent.launch(order(4, reports=1, wait=True, stop=True))
    (first,) = await agent.reports(0, 20.0)
    assert first.kind == "event"
    (stalled,) = await agent.reports(first.sequence, 20.0)
    assert (stalled.kind, stalled.generation) == ("stalled", 4)
    assert stalled.payload.stopped
    assert (await agent.progress()).overdue
    assert await agent.stacks(answer.pid + 1) == ""
    assert "stopped" in await agent.stacks(answer.pid)
    assert not await agent.kill(answer.pid + 1, "hung", "of another")
    assert await agent.kill(answer.pid, "hung", "stood still")
    exits = [report for report in await until_exit(agent) if report.kind == "exit"]
    assert exits[0].payload.killed_for == KillReason("hung", "stood still")
    assert await agent.progress() is None
    await agent.close()


async def test_a_killed_trainer_of_a_repairable_gang_has_a_successor_ready(make_agent):
    """The next order goes to a process that is there already, unless that one is not: nobody asked for it."""
    agent = make_agent()
    first = LaunchOrder(job="job-1", generation=1, rank=3, spec={"wait": True, "signal": 9}, in_place=True)
    launched = await agent.launch(first)
    os.kill(launched.pid, signal.SIGKILL)
    (exit_report,) = await until_exit(agent)
    assert exit_report.payload.signal == signal.SIGKILL
    ready = await until_trainer_other_than(agent, launched.pid)
    second = LaunchOrder(job="job-1", generation=2, rank=3, spec={"reports": 1}, in_place=True)
    assert await agent.launch(second) == Launched(ready, kept=False)
    await agent.close()


async def until_trainer_other_than(agent, pid):
    """Process id of the trainer, once it is another."""
    while (trainer_pid := (await agent.describe()).trainer_pid) in (None, pid):
        await asyncio.sleep(0.01)
    return trainer_pid


async def test_agent_sends_no_backups_in_a_new_generation_until_told_to_whom(make_agent):
    """The partner of before may have gone, or keep another rank's backup now."""
    agent = make_agent()
    await agent.launch(order(1, wait=True))
    assert await agent.backup_progress() is None
    await agent.send_backups(Endpoint("127.0.0.1", 1), "token", 1, "0a0a0a0a")
    assert await agent.backup_progress() is not None
    await agent.launch(order(2, wait=True))
    assert await agent.backup_progress() is None
    await agent.send_backups(Endpoint("127.0.0.1", 1), "token", 2, "0a0a0a0a")
    await agent.stop_backups()
    assert await agent.backup_progress() is None
    await agent.close()


async def test_agent_describes_its_placement(tmp_path):
    agent = Agent("job-1", 3, str(tmp_path), str(tmp_path), None, "replica/job-1/1/0")
    about = await agent.describe()
    assert (about.group, about.pid, about.generation, about.trainer_pid) == (
        "replica/job-1/1/0", os.getpid(), 0, None
    )  # fmt: skip
    assert await agent.stop() == Exit(None, None), "none ran"
    await agent.close()


async def test_trainer_that_has_gone_on_since_is_not_brought_to_rest(make_agent):
    """Who ordered the rest of an earlier generation was slower than the launch of this one."""
    agent = make_agent()
    launched = await agent.launch(order(2, reports=1, wait=True))
    await agent.reports(0, 20.0)
    assert await agent.rest(1, grace=0.0) is False
    assert (await agent.describe()).trainer_pid == launched.pid
    assert await agent.reports(1, 0.0) == []
    await agent.close()


async def test_a_trainer_that_does_not_come_to_rest_is_killed(make_agent, gone):
    agent = make_agent()
    launched = await agent.launch(order(1, wait=True))
    assert await agent.rest(1, grace=0.2) is False
    assert gone(launched.pid)
    await agent.close()


class Asked:
    """Stands for a part of an agent: notes what it is asked for, and answers it."""

    def __init__(self, **fields):
        self.__dict__.update(fields)
        self.calls = []

    def __getattr__(self, name):
        async def later(*arguments):
            self.calls.append((name, *arguments))
            return name

        def now(*arguments):
            self.calls.append((name, *arguments))
            return name

        return now if name in ("status", "tell") else later


@pytest.fixture
def parts(tmp_path):
    """An agent whose trainer's slot only notes what it is asked for."""
    agent = Agent("job-1", 3, str(tmp_path), str(tmp_path), None)
    agent._slot = Asked(rank=5, generation=2)
    return agent, agent._slot.calls


async def test_agent_forwards_trainer_requests(parts):
    agent, asked = parts
    request = Arm(Fault("f", "kill", 3))
    assert await agent.prepare(order(1)) == "prepare"
    assert await agent.rest(2, 3.0, 4.0) == "rest"
    assert await agent.tell(request) == "tell"
    assert await agent.progress() == "status"
    assert await agent.kill(100, "hung", "stood still", after_commit=True) == "kill"
    assert await agent.stacks(100) == "stacks"
    assert await agent.flight_record(100) == "flight_record"
    assert asked == [
        ("prepare", order(1)),
        ("rest", 2, 3.0, 4.0),
        ("tell", request),
        ("status",),
        ("kill", 100, KillReason("hung", "stood still"), True),
        ("stacks", 100),
        ("flight_record", 100),
    ]


def test_agent_close_ends_the_trainer(parts, go):
    agent, asked = parts
    go(agent.close)
    assert asked == [("stop",)]


def test_agent_refuses_a_launch_order_of_another_protocol(parts, go):
    agent, asked = parts
    with pytest.raises(ProtocolMismatch, match=f"the control plane speaks protocol {PROTOCOL + 9}"):
        go(lambda: agent.launch(LaunchOrder("job-1", 1, 3, {}, protocol=PROTOCOL + 9)))
    assert asked == []


async def test_agent_refuses_orders_of_a_replaced_owner(parts):
    agent, asked = parts
    fault = Arm(Fault("f", "kill", 3))
    await agent.call("tell", {"request": SaveAndEnd(1).to_json(), "owner_epoch": 4})
    with pytest.raises(StaleOwner, match="tell save_and_end was refused"):
        await agent.call("tell", {"request": SaveAndEnd(2).to_json(), "owner_epoch": 3})
    await agent.call("tell", {"request": fault.to_json(), "owner_epoch": 3})
    assert asked == [("tell", SaveAndEnd(1)), ("tell", fault)]


def test_agent_describes_its_address_and_last_owner(tmp_path, monkeypatch, go):
    monkeypatch.setattr(module, "this_host", lambda: Host("machine", "192.0.2.7", "n1", ("2",)))

    async def body():
        agent = Agent("job-1", 3, str(tmp_path), str(tmp_path), None)
        await agent.call("progress", {"owner_epoch": 4})
        about = await agent.call("describe", {})
        await agent.close()
        return about

    about = go(body)
    assert (about["host"], about["address"], about["node"]) == ("machine", "192.0.2.7", "n1")
    assert (about["devices"], about["owner_epoch"]) == (["2"], 4)
