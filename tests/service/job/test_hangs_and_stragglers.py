"""The control plane and a hang, over agents that say what a test lets them say."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from manta.service.job import hangs_and_stragglers
from manta.service.job.hangs_and_stragglers import HangWatch
from manta.workers.comm.grid import AXES
from manta.workers.liveness.flight_record import FlightRecord, read_flight_record
from manta.workers.liveness.progress import DeviceRecord
from manta.workers.protocol.reports import Event, KillReason, Position, ProcessUse, Report, TrainerStatus
from tests.service.support.fake_agents import FakeAgent
from tests.service.support.waiting import reached
from tests.workers.support.flight_dumps import FlightDump

COUNTS = {"tensor": 5, "pipeline": 0, "data": 3, "embedding": 0, "world": 2, "sent": 0, "received": 0}


def agent(overdue=False, moving=False, waits_for=None, silent=False, dead=False):
    """An agent that answers `progress` with that; `overdue` may depend on how often it was asked."""
    made = FakeAgent()

    def status(asked):
        record = Position(
            100,
            1,
            "backward",
            step=12,
            micro_batch=1,
            waits_for=waits_for,
            channel=2,
            counts=COUNTS,
            committed=11,
            heartbeat=asked if moving else 7,
        )
        late = overdue(asked) if callable(overdue) else overdue
        return TrainerStatus(100, late, standing_seconds=1.6, record=record, process=ProcessUse("S"))

    made.status, made.silent, made.lost = status, silent, dead
    return made


def report(payload):
    return Report(payload, 1, 0, 0.0)


STALLED = report(TrainerStatus(100, overdue=True))


@pytest.fixture
def watch(monkeypatch):
    """Runs a watch over agents until `done` holds, after it has heard `reports`; the events and the lost ranks."""
    monkeypatch.setattr(hangs_and_stragglers, "REQUEST_SECONDS", 0.05)
    monkeypatch.setattr(hangs_and_stragglers, "CONFIRM_SECONDS", 0.0)
    monkeypatch.setattr(hangs_and_stragglers, "RETRY_SECONDS", 0.0)

    def run(agents, done, reports=(STALLED,), policy="report", replaced=None, look_first=False):
        events, lost = [], []

        async def tell(kind, message, rank, step, data):
            events.append(SimpleNamespace(kind=kind, message=message, rank=rank, step=step, data=data))

        async def body():
            watching = HangWatch(
                agents,
                lambda axis, rank: range(len(agents)),
                tell,
                lambda rank, why: lost.append((rank, why)),
                policy,
                replaced if replaced is not None else {},
            )
            for report in reports:
                watching.note(report)
            task = asyncio.create_task(watching.run(look_first))
            async with asyncio.timeout(20):
                while not done(events, lost):
                    await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(body())
        return events, lost

    return run


def test_hang_watch_ends_the_rank_others_wait_for_with_evidence(watch):
    agents = [agent(waits_for=1), agent(overdue=True), agent(waits_for=0)]
    ((hung,), _) = watch(agents, lambda events, lost: agents[1].kills)
    assert (hung.kind, hung.rank, hung.step) == ("rank_hung", 1, 12)
    assert hung.message == "rank 1 made no progress for 1.6 s in backward of micro-batch 1"
    assert (hung.data["phase"], hung.data["counts"], hung.data["waiting_ranks"]) == ("backward", COUNTS, [0, 2])
    assert hung.data["stacks"] == "stacks of 100"
    assert (hung.data["rank"], hung.data["waiting"], hung.data["axis"]) == (1, 2, "data")
    assert (hung.data["step"], hung.data["micro_batch"], hung.data["committed"]) == (12, 1, 11)
    assert (hung.data["stopped"], hung.data["burning"], hung.data["standing_seconds"]) == (False, False, 1.6)
    assert hung.data["process"]["state"] == "S"
    assert agents[1].kills == [
        (100, KillReason("hung", "made no progress for 1.6 s in backward of micro-batch 1"), False)
    ]
    assert not agents[0].kills + agents[2].kills


def after(looks):
    """Holds once it was asked so often: the watch has had its turns."""
    turns = iter(range(looks))
    return lambda events, lost: next(turns, None) is None


def test_hang_watch_asks_no_agent_before_a_rank_reports_a_standstill(watch):
    agents = [agent(overdue=True)]
    watch(agents, after(10), reports=[report(TrainerStatus(100))])
    assert agents[0].asked == 0


def test_hang_watch_asks_all_agents_once_after_a_takeover(watch):
    agents = [agent(overdue=True), agent(waits_for=0)]
    events, _ = watch(agents, lambda events, lost: agents[0].kills, reports=[], look_first=True)
    assert [event.rank for event in events] == [0]


def test_hang_watch_spares_a_rank_that_moves_between_two_looks(watch):
    agents = [agent(overdue=lambda asked: asked < 20, moving=True), agent(waits_for=0)]
    events, _ = watch(agents, lambda events, lost: agents[0].asked >= 20)
    assert events == []
    assert agents[0].kills == []


@pytest.mark.parametrize(("overdue", "asked"), [(lambda asked: asked != 2, 4), (lambda asked: asked > 5, 7)])
def test_hang_watch_keeps_looking_until_two_looks_in_a_row_agree(watch, overdue, asked):
    agents = [agent(overdue=overdue), agent(waits_for=0, overdue=True)]
    events, _ = watch(agents, lambda events, lost: agents[0].kills)
    assert ([event.rank for event in events], agents[0].asked) == ([0], asked)


def test_hang_watch_gives_up_a_silent_agent_that_others_wait_for(watch):
    agents = [agent(waits_for=1, overdue=True), agent(silent=True)]
    (hung,), lost = watch(agents, lambda events, lost: lost)
    assert (hung.rank, hung.message) == (1, "rank 1 makes no progress, and its agent does not answer")
    assert lost == [(1, "makes no progress, and its agent does not answer")]


def test_hang_watch_gives_up_an_agent_that_falls_silent_before_the_kill(watch, monkeypatch):
    monkeypatch.setattr(hangs_and_stragglers, "KILL_SECONDS", 0.05)
    agents = [agent(waits_for=1), agent(overdue=True)]
    agents[1].kill = lambda *arguments: asyncio.Event().wait()
    (hung,), lost = watch(agents, lambda events, lost: lost)
    assert (hung.kind, hung.rank) == ("rank_hung", 1)
    assert lost == [(1, "makes no progress, and its agent does not answer")]


@pytest.mark.parametrize("has_agent", [True, False])
def test_hang_watch_ignores_a_dead_agent_or_a_rank_without_one(watch, has_agent):
    agents = [agent(waits_for=1, overdue=lambda asked: asked < 9), agent(dead=True) if has_agent else None]
    assert watch(agents, lambda events, lost: agents[0].asked >= 9) == ([], [])


def test_hang_without_a_culprit_ends_the_whole_gang(watch):
    agents = [agent(waits_for=1, overdue=True), agent(waits_for=0, overdue=True)]
    (hung,), _ = watch(agents, lambda events, lost: all(each.kills for each in agents))
    assert hung.kind == "gang_hung"
    assert "is not known" in hung.message
    assert [each["rank"] for each in hung.data["ranks"]] == [0, 1]


SLOW = report(Event("straggler", data={"straggler": 1}))


def test_straggler_is_replaced_after_a_commit_and_once_in_ten_minutes(watch):
    agents = [agent(), agent()]
    watch(agents, lambda events, lost: agents[1].kills, [SLOW, SLOW], "replace", replaced := {})
    assert [(reason.kind, after) for _, reason, after in agents[1].kills] == [("straggler", True)]
    assert list(replaced) == [1] and replaced[1] <= time.monotonic(), "by the clock that the ten minutes are counted by"


def test_straggler_can_be_replaced_again_after_ten_minutes(watch):
    for minutes, kills in ((11, 1), (9, 0)):
        agents, replaced = [agent(), agent()], {1: time.monotonic() - 60 * minutes}
        other = report(Event("straggler", data={"straggler": 0}))  # heard after it
        watch(agents, lambda events, lost, of=agents: of[0].kills, [SLOW, other], "replace", replaced)
        assert len(agents[1].kills) == kills


def test_straggler_that_could_not_be_replaced_is_tried_again(watch):
    """Such as one that has committed no step in time: nothing has been done to it."""
    agents, asked = [agent(), agent()], []
    kill = agents[1].kill

    async def refuse_once(*arguments):
        asked.append(arguments)
        return False if len(asked) == 1 else await kill(*arguments)

    agents[1].kill = refuse_once
    watch(agents, lambda events, lost: agents[1].kills, [SLOW, SLOW], "replace")
    assert len(asked) == 2


def test_straggler_is_only_reported_unless_the_policy_says_more(watch):
    agents = [agent(), agent()]
    watch(agents, after(10), [SLOW])
    assert agents[1].kills == []


def test_a_straggler_whose_agent_is_gone_keeps_no_other_from_being_replaced(watch):
    agents, replaced = [agent(), None], {}
    other = report(Event("straggler", data={"straggler": 0}))
    watch(agents, lambda events, lost: agents[0].kills, [SLOW, other], "replace", replaced)
    assert [reason for _, reason, _ in agents[0].kills] == [
        KillReason("straggler", "slowed the other ranks down and was replaced")
    ]
    assert list(replaced) == [0], "nothing was done to the other"


def test_hang_of_a_large_gang_ends_all_ranks_with_evidence_of_sixteen(watch):
    agents = [agent(waits_for=(rank + 1) % 18, overdue=True) for rank in range(18)]
    (hung,), lost = watch(agents, lambda events, lost: all(each.kills for each in agents))
    assert (hung.kind, hung.rank, hung.message.split(":")[0]) == ("gang_hung", None, "all ranks are restarted")
    assert [each["rank"] for each in hung.data["ranks"]] == list(range(16))
    assert [each["stacks"] for each in hung.data["ranks"]] == ["stacks of 100"] * 16
    assert lost == []


def test_hang_of_a_gang_gives_up_ranks_whose_agents_do_not_answer(watch):
    agents = [agent(waits_for=1, overdue=True), agent(waits_for=0, overdue=True), agent(silent=True), agent(dead=True)]
    (hung,), lost = watch(agents, lambda events, lost: agents[0].kills and agents[1].kills and lost)
    assert [each["rank"] for each in hung.data["ranks"]] == [0, 1]
    assert lost == [(2, "makes no progress, and its agent does not answer")]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (TrainerStatus(100, True, stopped=True, standing_seconds=2.0), "was stopped for 2.0 s in starting"),
        (
            TrainerStatus(100, True, standing_seconds=2.0, record=Position(100, 1, "optimizer", step=3, counts=COUNTS)),
            "made no progress for 2.0 s in optimizer",
        ),
    ],
)
def test_hang_event_says_in_words_where_the_rank_stands(watch, status, words):
    hanging = agent()
    hanging.status = status
    (hung,), _ = watch([hanging], lambda events, lost: hanging.kills)
    assert hung.message == f"rank 0 {words}"
    assert hung.step == (3 if status.record else None)
    assert hung.data["axis"] is None
    assert hung.data["phase"] == (status.record and "optimizer")


@pytest.mark.parametrize(("phase", "stopped", "kind"), [
    ("checkpoint", False, "not_saved"), ("checkpoint", True, "hung"), ("restoring", False, "hung"),
    ("snapshot", False, "hung"),
])  # fmt: skip
def test_rank_waiting_for_checkpoint_storage_is_killed_as_not_saved_not_as_hung(watch, phase, stopped, kind):
    waiting = agent()
    record = Position(100, 1, phase, step=3, counts=COUNTS)
    waiting.status = TrainerStatus(100, True, stopped=stopped, standing_seconds=300.0, record=record)
    watch([waiting], lambda events, lost: waiting.kills)
    ((_, reason, _),) = waiting.kills
    assert reason == KillReason(kind, f"{'was stopped' if stopped else 'made no progress'} for 300.0 s in {phase}")


def test_messages_between_stages_are_of_no_axis(watch):
    hanging = agent()
    record = Position(100, 1, "forward", step=3, channel=len(AXES), counts=COUNTS)
    hanging.status = TrainerStatus(100, True, standing_seconds=2.0, record=record)
    (hung,), _ = watch([hanging], lambda events, lost: hanging.kills)
    assert hung.data["axis"] is None


def test_hang_watch_ends_a_rank_whose_stacks_are_unavailable(watch):
    agents = [agent(waits_for=1), agent(overdue=True)]
    agents[1].refuse("stacks", "py-spy is not there")
    (hung,), _ = watch(agents, lambda events, lost: agents[1].kills)
    assert hung.data["stacks"] == ""


async def test_hang_watch_checks_again_ranks_that_stall_later(monkeypatch):
    monkeypatch.setattr(hangs_and_stragglers, "CONFIRM_SECONDS", 0.0)
    late, events = [agent(overdue=lambda asked: asked > 1), agent(waits_for=0)], []

    async def tell(kind, *about):
        events.append(kind)

    watching = HangWatch(late, lambda axis, rank: range(2), tell, lambda *about: None, "report", {})
    task = asyncio.create_task(watching.run())
    watching.note(STALLED)
    await reached(lambda: late[1].asked)
    await asyncio.sleep(0)
    assert (late[0].asked, late[0].kills) == (1, []), "it moved on, and nobody is asked without a reason"
    watching.note(STALLED)
    await reached(lambda: late[0].kills)
    task.cancel()
    assert events == ["rank_hung"]


def on_device(waits=True, kind="all_reduce", pending=3, known=True):
    """The agent of an overdue rank over NCCL, whose device waits in the third collective of the world, to which all
    have come; the last one is `kind`. `known`: whether it tells what NCCL has recorded."""
    place = {"channel": AXES.index("world"), "number": 3} if waits else {"channel": None, "number": 0}
    counts = {**COUNTS, "world": 3}
    device = DeviceRecord("forward", 11, 2, pending, waits, waits_for=None, sending=False, counts=counts, **place)
    made, dump = FakeAgent(), FlightDump()
    record = Position(100, 1, "backward", step=12, micro_batch=1, counts=counts, heartbeat=7, device=device)
    made.status = TrainerStatus(100, True, standing_seconds=1.6, record=record, process=ProcessUse("R"))
    for _ in range(2):
        dump.collective("default_pg", range(3))
    dump.collective("default_pg", range(3), kind, state="scheduled")
    made.flight = read_flight_record(dump.text) if known else None
    return made


def test_hang_of_devices_is_blamed_on_the_rank_that_called_another_collective(watch):
    agents = [on_device(), on_device(kind="all_gather"), on_device()]
    ((hung,), _) = watch(agents, lambda events, lost: agents[1].kills)
    assert (hung.kind, hung.rank) == ("rank_hung", 1)
    assert hung.data["why"] == "at number 3 of world all_gather meets all_reduce"
    assert hung.data["device"]["number"] == 3
    assert not agents[0].kills + agents[2].kills


@pytest.mark.parametrize("known", [True, False])
def test_hang_of_devices_with_agreeing_nccl_records_ends_the_whole_gang(watch, known):
    agents = [on_device(known=known) for _ in range(3)]
    if not known:
        agents[1].refuse("flight_record", "is of a release before")
    ((hung,), _) = watch(agents, lambda events, lost: all(agent.kills for agent in agents))
    assert hung.kind == "gang_hung"
    assert (
        "all that share collective 3 along world with rank 0 have reached it, and it does not complete" in hung.message
    )


@pytest.mark.parametrize(("pending", "where"), [(3, "forward of micro-batch 2"), (0, "backward of micro-batch 1")])
def test_hang_of_a_known_culprit_is_described_by_its_device_or_the_host_of_an_idle_one(watch, pending, where):
    agents = [on_device(), on_device(waits=False, pending=pending), on_device()]
    agents[1].flight = FlightRecord()
    ((hung,), _) = watch(agents, lambda events, lost: agents[1].kills)
    assert (hung.rank, hung.message) == (1, f"rank 1 made no progress for 1.6 s in {where}")
