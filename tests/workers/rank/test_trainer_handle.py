"""An agent's handle on its trainer: which commands go down, what is made of the reports, and when it is at rest."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest

from manta.workers.liveness.flight_record import FlightRecord
from manta.workers.protocol.messages import FAULT_STRUCK, Fault, LaunchOrder, TraceOrder
from manta.workers.protocol.reports import Event, Exited, Failure, KillReason, Prepared, Report, Resting, Started
from manta.workers.protocol.requests import Arm, DumpFlightRecord, Go, RecordSteps, Rest, SaveAndEnd
from manta.workers.rank import trainer_handle
from manta.workers.rank.control_socket import read_command
from manta.workers.rank.report_buffer import ReportBuffer
from manta.workers.rank.trainer_handle import TrainerHandle
from manta.workers.zygote.client import Exit

SECONDS = 20.0
ARM = Arm(Fault("f1", "kill", 3))


class FakeProcess:
    """A trainer that says what a test lets it say, and keeps the commands that it gets."""

    pid = 100

    def __init__(self):
        self.control, self.stdout, self.stderr = (asyncio.StreamReader() for _ in range(3))
        self.control_writer, self.commands = self, []
        self.on_command = lambda command: None
        self._exit = asyncio.get_running_loop().create_future()

    def write(self, line):
        self.commands.append(read_command(line))
        self.on_command(self.commands[-1])

    def say(self, payload, generation=1, time=5.0):
        report = Report(payload, generation, 3, time)
        self.control.feed_data(json.dumps(report.to_json()).encode() + b"\n")

    def end(self, code=None, signal=None):
        if not self._exit.done():
            for stream in (self.control, self.stdout, self.stderr):
                stream.feed_eof()
            self._exit.set_result(Exit(code, signal))

    @property
    def ended(self):
        return self._exit.done()

    async def wait(self):
        return await asyncio.shield(self._exit)

    def kill(self):
        self.end(signal=9)

    closed = False

    def close(self):
        self.closed = True


class FakeLog:
    def __init__(self):
        self.lines = []

    def write(self, generation, stream, lines):
        self.lines += [(generation, stream, line) for line in lines]


def order(generation):
    return LaunchOrder(job="job-1", generation=generation, rank=3, spec={})


class Rig:
    """A handle on a trainer of generation 1, and what it has reported."""

    def __init__(self, prepared=False):
        self.process, self.reports, self.struck, self.log = FakeProcess(), ReportBuffer(), set(), FakeLog()
        self.trainer = TrainerHandle(order(1), self.process, self.reports, self.log, prepared, self.struck)


@pytest.fixture
@asynccontextmanager
async def rig(request):
    """The parameter says whether the trainer is only prepared."""
    made = Rig(getattr(request, "param", False))
    yield made
    made.process.end(code=0)
    await made.trainer.wait()


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


async def test_trainer_may_finish_its_step_before_it_is_told_to_break_it_off(rig):
    resting = asyncio.create_task(rig.trainer.rest(1, grace=1000.0, patience=0.01))
    await until(lambda: len(rig.process.commands) == 2)
    rig.process.say(Resting(7))
    assert await resting
    assert rig.process.commands == [Rest(1, after_step=True), Rest(1, after_step=False)]
    assert rig.trainer.at_rest


async def test_trainer_that_rests_after_its_step_is_asked_once(rig):
    rig.process.on_command = lambda command: rig.process.say(Resting(7))
    assert await rig.trainer.rest(1, grace=1000.0, patience=1000.0)
    assert await rig.trainer.rest(1, grace=1000.0), "it rests already"
    assert rig.process.commands == [Rest(1, after_step=True)]


async def test_trainer_rest_without_patience_does_not_wait_for_the_step(rig):
    rig.process.on_command = lambda command: rig.process.say(Resting(7))
    assert await rig.trainer.rest(1, grace=1000.0)
    assert rig.process.commands == [Rest(1, after_step=False)]


async def test_trainer_that_ends_on_its_way_to_rest_is_not_at_rest(rig):
    rig.process.on_command = lambda command: rig.process.end(signal=11)
    assert not await rig.trainer.rest(1, grace=1000.0)
    assert await rig.trainer.wait() == Exit(None, 11)


async def test_trainer_that_resumes_leaves_rest_and_reports_its_new_generation(rig):
    rig.process.say(Resting(7))
    await until(lambda: rig.trainer.at_rest)
    rig.trainer.go(order(2))
    assert not rig.trainer.at_rest
    assert rig.process.commands == [Go(order(2))]
    assert not await rig.trainer.rest(1, grace=0.0), "that was ordered before it went on"
    assert not rig.process.ended
    rig.process.say(Event("late", "of the generation before"), generation=1)
    rig.process.say(Started(100), generation=2)
    await until(lambda: rig.reports._last == 2)
    assert [(report.kind, report.generation) for report in await rig.reports.read(0, 0.0)] == [
        ("resting", 1), ("started", 2)
    ]  # fmt: skip


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("rig", [True], indirect=True)
async def test_prepared_trainer_waits_for_its_order(rig, ends):
    assert rig.trainer.at_rest and rig.trainer.generation == 0
    ready = asyncio.create_task(rig.trainer.prepared())
    rig.process.end(signal=9) if ends else rig.process.say(Prepared(), generation=0)
    assert await ready is not ends


async def test_end_report_has_the_cause_and_the_trainers_last_rank_and_generation(rig):
    rig.trainer.assign_rank(1, FakeLog())
    rig.process.say(Failure("exception", 4, "ValueError", "no"), time=17.0)
    rig.trainer.kill(KillReason("hung", "stood still"))
    await rig.trainer.wait()
    (report,) = await rig.reports.read(0, 0.0)
    failure = Failure("exception", 4, "ValueError", "no", at=17.0)
    assert report.payload == Exited(None, 9, (), failure, KillReason("hung", "stood still"))
    assert (report.rank, report.generation) == (1, 1)


REQUESTS = [(SaveAndEnd(1), True), (SaveAndEnd(2), False), (RecordSteps(TraceOrder(1, 1, 2)), True), (ARM, True)]


@pytest.mark.parametrize(("request_to_rank", "fits"), REQUESTS)
async def test_request_reaches_a_trainer_of_its_generation_that_trains(rig, request_to_rank, fits):
    assert rig.trainer.tell(request_to_rank) is fits
    assert rig.process.commands == [request_to_rank] * fits
    rig.process.say(Resting(7))
    await until(lambda: rig.trainer.at_rest)
    assert rig.trainer.tell(request_to_rank) is (request_to_rank == ARM), "a fault may wait"
    await rig.trainer.stop()
    assert not rig.trainer.tell(request_to_rank)
    assert len(rig.process.commands) == fits + (request_to_rank == ARM)


async def test_fault_that_strikes_is_noted(rig):
    rig.process.say(Event(FAULT_STRUCK, "f1 strikes", 2, {"fault": "f1"}))
    await until(lambda: rig.struck == {"f1"})


async def test_background_task_of_a_trainer_ends_with_it_or_when_replaced(rig):
    ended = []

    async def beside(name):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    for name in ("first", "second"):
        rig.trainer.run_alongside(beside(name))
        await asyncio.sleep(0)
    await until(lambda: ended == ["first"])
    await rig.trainer.stop()
    await until(lambda: ended == ["first", "second"])


@pytest.mark.parametrize("rig", [True], indirect=True)
async def test_trainer_that_has_ended_is_not_at_rest(rig):
    assert rig.trainer.at_rest
    rig.process.end(code=0)
    assert not rig.trainer.at_rest


async def test_trainer_that_does_not_come_to_rest_is_ended(rig):
    assert not rig.trainer.stopped
    assert not await rig.trainer.rest(1, grace=0.01)
    assert rig.process.ended and rig.trainer.stopped


async def test_trainer_of_an_earlier_generation_is_ended_instead_of_told_to_rest(rig):
    assert not await rig.trainer.rest(2, grace=1000.0, patience=1000.0)
    assert rig.process.ended
    assert rig.process.commands == []


async def test_trainer_output_is_logged_and_its_last_errors_are_in_its_exit(rig):
    rig.process.stdout.feed_data(b"a line\nand ")
    rig.process.stderr.feed_data(b"why\n")
    rig.process.stdout.feed_data(b"another")
    rig.process.end(code=1)
    await rig.trainer.wait()
    assert sorted(rig.log.lines) == [(1, "stderr", "why"), (1, "stdout", "a line"), (1, "stdout", "and another")]
    (report,) = await rig.reports.read(0, 0.0)
    assert report.payload == Exited(1, None, ("why",))
    assert rig.process.closed, "its connections are given back"


async def test_trainer_output_as_another_rank_goes_to_that_ranks_log(rig):
    log = FakeLog()
    rig.trainer.assign_rank(1, log)
    rig.process.stdout.feed_data(b"a line\n")
    rig.process.end(code=0)
    await rig.trainer.wait()
    assert (rig.log.lines, log.lines) == ([], [(1, "stdout", "a line")])


async def test_end_of_a_trainer_does_not_wait_for_a_grandchild_holding_its_output(rig, monkeypatch):
    monkeypatch.setattr(trainer_handle, "DRAIN_SECONDS", 0.01)
    rig.process._exit.set_result(Exit(0, None))  # while nothing is closed
    assert await rig.trainer.wait() == Exit(0, None)
    assert [report.kind for report in await rig.reports.read(0, 0.0)] == ["exit"]
    names = [task.get_coro().__name__ for task in asyncio.all_tasks()]
    assert not [name for name in names if "pump" in name], "nobody reads on"


async def test_trainer_output_is_read_to_the_end_by_an_agent_that_stalls(rig, monkeypatch):
    monkeypatch.setattr(trainer_handle, "DRAIN_SECONDS", 0.01)
    left = [b"why\n", b"and\n", b"where\n"]

    def stand_still_and_read():
        time.sleep(2 * trainer_handle.DRAIN_SECONDS)
        if left:
            rig.process.stderr.feed_data(left.pop(0))
            asyncio.get_running_loop().call_soon(stand_still_and_read)

    rig.process._exit.set_result(Exit(1, None))
    asyncio.get_running_loop().call_soon(stand_still_and_read)
    await rig.trainer.wait()
    (report,) = await rig.reports.read(0, 0.0)
    assert report.payload == Exited(1, None, ("why", "and", "where"))


async def test_end_of_a_trainer_does_not_wait_for_a_grandchild_that_keeps_writing(rig, monkeypatch):
    monkeypatch.setattr(trainer_handle, "DRAIN_SECONDS", 0.01)

    async def write():
        while True:
            rig.process.stdout.feed_data(b"a line\n")
            await asyncio.sleep(0)

    writing = asyncio.create_task(write())
    rig.process._exit.set_result(Exit(0, None))
    assert await rig.trainer.wait() == Exit(0, None)
    writing.cancel()


async def test_trainer_report_cut_off_by_death_is_dropped_and_earlier_ones_kept(rig):
    rig.process.say(Started(100))
    rig.process.control.feed_data(b'{"kind": "resting", "gener')
    rig.process.end(signal=9)
    await rig.trainer.wait()
    assert [report.kind for report in await rig.reports.read(0, 0.0)] == ["started", "exit"]
    assert rig.log.lines == []


async def test_trainer_reports_keep_their_time_and_get_the_agents_rank(rig):
    rig.trainer.assign_rank(1, rig.log)
    rig.process.say(Started(100), time=11.0)
    (report,) = await rig.reports.read(0, SECONDS)
    assert (report.time, report.rank) == (11.0, 1)


async def test_flight_record_is_requested_once_for_all_who_ask(rig, monkeypatch):
    monkeypatch.setattr(trainer_handle, "FLIGHT_RECORD_SECONDS", SECONDS)
    record = FlightRecord(whole=False)
    asking = [asyncio.create_task(rig.trainer.flight_record()) for _ in range(2)]
    await until(lambda: rig.process.commands)
    rig.process.say(record)
    assert await asyncio.gather(*asking) == [record, record]
    assert rig.process.commands == [DumpFlightRecord()]
    rig.process.say(FlightRecord())  # nobody has asked
    rig.process.on_command = lambda command: rig.process.say(FlightRecord())
    assert await rig.trainer.flight_record() == FlightRecord()
    assert await rig.reports.read(0, 0.0, None) == [], "it stays here"


async def test_trainer_without_a_flight_record_answer_has_none(rig, monkeypatch):
    monkeypatch.setattr(trainer_handle, "FLIGHT_RECORD_SECONDS", 0.01)
    assert await rig.trainer.flight_record() is None
    assert await rig.trainer.flight_record() is None
    assert rig.process.commands == [DumpFlightRecord()], "it has been asked"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda it: it.rest(1, grace=0.0), "was killed by its agent: it did not stop within 0 s"),
        (lambda it: it.stop(), "was stopped by its agent"),
    ],
)
@pytest.mark.parametrize("before", ["runs", "had ended", "hung"])
async def test_end_report_names_a_kill_by_the_agent_only_if_it_caused_the_end(end, said, before, monkeypatch):
    monkeypatch.setattr(trainer_handle, "killed_for_memory", lambda: 2)
    rig, reason, kills = Rig(), KillReason("stopped", said), {}
    if before == "had ended":
        rig.process.end(signal=9)
        reason, kills = None, {"memory_kills": 0}
    elif before == "hung":
        rig.trainer.kill(reason := KillReason("hung", "stood still"))
    await end(rig.trainer)
    (report,) = await rig.reports.read(0, 0.0)
    assert report.payload == Exited(None, 9, killed_for=reason, **kills)


@pytest.mark.parametrize(("before", "after", "reported"), [(2, 3, 1), (2, 2, 0), (None, 3, None), (2, None, None)])
async def test_end_report_counts_memory_kills_since_the_trainer_began(monkeypatch, before, after, reported):
    said = [before, after]
    monkeypatch.setattr(trainer_handle, "killed_for_memory", lambda: said.pop(0))
    rig = Rig()
    rig.process.end(signal=9)
    await rig.trainer.wait()
    (report,) = await rig.reports.read(0, 0.0)
    assert (report.payload.signal, report.payload.memory_kills) == (9, reported)
