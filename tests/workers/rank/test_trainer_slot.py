"""A rank's slot: which process carries an order out, and what is made ready when one is killed."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from manta.workers.liveness.stacks import stacks_path
from manta.workers.node.host import Host
from manta.workers.paths import Paths, zygote_socket
from manta.workers.protocol.json_codec import from_json
from manta.workers.protocol.messages import Fault, Launched, LaunchOrder, TrainerArgument
from manta.workers.protocol.reports import KillReason, TrainerStatus
from manta.workers.protocol.requests import Arm, SaveAndEnd
from manta.workers.rank import trainer_slot
from manta.workers.rank.report_buffer import ReportBuffer
from manta.workers.rank.trainer_slot import StaleGeneration, TrainerSlot
from manta.workers.zygote.client import Exit, ZygoteUnavailable


class FakeHandle:
    """A trainer that does what it is asked at once; `end` is its death."""

    def __init__(self, order, process, reports, log, prepared, struck):
        self.process, self.log, self.struck = process, log, struck
        self.generation = 0 if prepared else order.generation
        self.order, self.at_rest, self.rank = order, prepared, order.rank
        self.told, self.alongside, self.killed_for, self.stopped = [], [], None, False
        self._ended = asyncio.get_running_loop().create_future()

    @property
    def ended(self):
        return self._ended.done()

    def end(self, code=None, signal=None):
        self.at_rest = False
        self._ended.set_result(Exit(code, signal))

    def go(self, order):
        self.order, self.generation, self.at_rest = order, order.generation, False

    def tell(self, request):
        self.told.append(request)
        return request.of_generation in (None, self.generation)

    async def flight_record(self):
        return f"flight record of {self.process.pid}"

    def kill(self, reason):
        self.killed_for = reason
        self.end(signal=9)

    def assign_rank(self, rank, log):
        self.rank, self.log = rank, log

    def run_alongside(self, work):
        self.alongside.append(work)
        work.close()

    async def prepared(self):
        return not self.ended

    async def wait(self):
        return await asyncio.shield(self._ended)

    async def stop(self):
        self.stopped = True
        if not self.ended:
            self.end(signal=9)
        return self._ended.result()

    async def rest(self, generation, grace, patience):
        self.at_rest = not self.ended
        return self.at_rest


class FakeWatch:
    """Sees what a test lets it see."""

    def __init__(self, pid, rank, folder, compiles, report):
        self.about, self.report = (pid, rank, folder, compiles), report
        self.sees, self.commits, self.bytes = True, True, 0

    async def run(self):
        """Is closed by `FakeHandle.run_alongside`."""

    def enter_generation(self, ranks):
        self.ranks = ranks

    def poll(self):
        return self.sees

    def describe(self):
        return TrainerStatus(self.about[0])

    async def next_commit(self):
        return self.commits

    def snapshot_bytes(self):
        return self.bytes


@pytest.fixture
def rig(tmp_path, monkeypatch):
    """A slot of rank 3 and the trainers that it forked, oldest first."""
    made = SimpleNamespace(trainers=[], home=tmp_path, zygote=True, forks=[], watches=[], reports=ReportBuffer())

    async def fork(socket, entry, argument, environment, timeout):
        assert entry == "trainer"
        made.forks.append((socket, from_json(TrainerArgument, argument), environment, timeout))
        if not made.zygote:
            raise ZygoteUnavailable("it is gone")
        return SimpleNamespace(pid=100 + len(made.trainers))

    def handle(*arguments):
        made.trainers.append(FakeHandle(*arguments))
        return made.trainers[-1]

    def watch(*arguments):
        made.watches.append(FakeWatch(*arguments))
        return made.watches[-1]

    monkeypatch.setattr(trainer_slot, "fork", fork)
    monkeypatch.setattr(trainer_slot, "TrainerHandle", handle)
    monkeypatch.setattr(trainer_slot, "TrainerWatch", watch)
    made.slot = TrainerSlot("job-1", 3, str(tmp_path), str(tmp_path), str(tmp_path / "shm"), made.reports)
    return made


def order(generation, **changes):
    return LaunchOrder(**{"job": "job-1", "generation": generation, "rank": 3, "spec": {}, "in_place": True, **changes})


async def settled():
    """Whatever can happen by itself has happened."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_slot_passes_requests_on_to_a_running_trainer(rig):
    assert not rig.slot.tell(SaveAndEnd(1)), "there is none"
    await rig.slot.launch(order(1))
    assert rig.slot.tell(SaveAndEnd(1))
    assert not rig.slot.tell(SaveAndEnd(2))
    rig.trainers[0].end(code=77)
    assert not rig.slot.tell(SaveAndEnd(1))
    assert rig.trainers[0].told == [SaveAndEnd(1), SaveAndEnd(2)]


async def test_slot_keeps_a_resting_trainer_and_replaces_any_other(rig):
    assert await rig.slot.launch(order(1)) == Launched(100, kept=False)
    assert await rig.slot.rest(1, 1.0)
    assert await rig.slot.launch(order(2)) == Launched(100, kept=True)
    assert await rig.slot.launch(order(3)) == Launched(101, kept=False), "it did not rest"
    assert rig.trainers[0].stopped
    assert await rig.slot.rest(3, 1.0)
    assert await rig.slot.launch(order(4, in_place=False)) == Launched(101, kept=True), "it was asked to rest"
    assert await rig.slot.launch(order(5, in_place=False)) == Launched(102, kept=False)
    assert rig.slot.generation == 5
    assert await rig.slot.stop() == Exit(None, 9)
    assert rig.slot.pid is None


async def test_slot_refuses_stale_orders(rig):
    await rig.slot.launch(order(2))
    for stale in (1, 2):
        with pytest.raises(StaleGeneration, match="at generation 2"):
            await rig.slot.launch(order(stale))
    with pytest.raises(StaleGeneration, match="belongs to job-1, not to other"):
        await rig.slot.launch(order(9, job="other"))
    async with rig.slot._lock:  # as while a trainer comes to rest
        launches = [asyncio.create_task(rig.slot.launch(order(generation))) for generation in (3, 4)]
        await settled()
    with pytest.raises(StaleGeneration, match="replaced by 4 before it started"):
        await launches[0]
    assert await launches[1] == Launched(101, kept=False)


async def test_slot_prepares_a_successor_for_a_killed_trainer_but_not_a_stopped_one(rig):
    await rig.slot.launch(order(1))
    rig.trainers[0].end(signal=11)
    await settled()
    assert len(rig.trainers) == 2
    assert await rig.slot.launch(order(2)) == Launched(101, kept=False), "it was only prepared"
    rig.trainers[1].end(code=1)
    await settled()
    assert len(rig.trainers) == 2, "one that ended by itself may do so again"
    await rig.slot.launch(order(3))
    await rig.slot.stop()
    await settled()
    assert len(rig.trainers) == 3


async def test_slot_leaves_an_unavailable_successor_to_the_next_launch(rig):
    await rig.slot.launch(order(1))
    rig.zygote = False
    rig.trainers[0].end(signal=9)
    await settled()
    with pytest.raises(ZygoteUnavailable):
        await rig.slot.launch(order(2))


async def test_slot_keeps_faults_for_the_trainer_they_strike(rig):
    early, late = Fault("early", "kill", 3), Fault("late", "hang", 3)
    assert not rig.slot.tell(Arm(early))
    await rig.slot.launch(order(1))
    (first,) = rig.trainers
    assert first.order.faults == (early,)
    assert rig.slot.tell(Arm(late))
    assert first.told == [Arm(late)]
    first.struck.add("early")
    await rig.slot.launch(order(2))
    assert rig.trainers[1].order.faults == (late,)


async def test_slot_gives_a_trainer_of_another_rank_another_log_and_record(rig):
    await rig.slot.launch(order(1))
    await rig.slot.rest(1, 1.0)
    await rig.slot.launch(order(2))
    (trainer,) = rig.trainers
    assert len(trainer.alongside) == 1, "the same record is watched on"
    await rig.slot.rest(2, 1.0)
    await rig.slot.launch(order(3, rank=1))
    assert (rig.slot.rank, trainer.rank, len(trainer.alongside)) == (1, 1, 2)
    trainer.log.write(3, "stdout", ["here"])
    (line,) = Paths.of(rig.home).rank_log("job-1", 1).read_text().splitlines()
    assert json.loads(line)["rank"] == 1
    await rig.slot.stop()


async def test_slot_kills_or_inspects_only_the_trainer_with_the_given_pid(rig):
    reason = KillReason("hung", "stood still")
    assert not await rig.slot.kill(100, reason)
    await rig.slot.launch(order(1))
    assert not await rig.slot.kill(7, reason)
    assert await rig.slot.stacks(7) == ""
    assert await rig.slot.kill(100, reason)
    assert rig.trainers[0].killed_for == reason
    assert rig.slot.status() is None


async def test_a_trainer_is_forked_with_its_devices_by_the_zygote_of_its_node(rig, monkeypatch):
    monkeypatch.setattr(trainer_slot, "this_host", lambda: Host("machine", "192.0.2.7", "a" * 32, ("2", "3")))
    assert await rig.slot.prepare(order(1))
    await rig.slot.launch(order(2, rank=3))
    await rig.slot.stop()
    await rig.slot.launch(order(3))
    sockets, arguments, environments, waits = zip(*rig.forks, strict=True)
    assert set(sockets) == {zygote_socket(rig.home, "a" * 32)}
    assert arguments == (TrainerArgument(order(1), prepare=True), TrainerArgument(order(3), prepare=False))
    assert environments == ({"CUDA_VISIBLE_DEVICES": "2,3"},) * 2
    assert waits == (trainer_slot.PREPARE_WAIT_SECONDS, trainer_slot.ZYGOTE_WAIT_SECONDS)


@pytest.mark.parametrize(
    ("devices", "given", "expected"),
    [
        ((), {}, {"CUDA_VISIBLE_DEVICES": ""}),
        (("1",), {"NCCL_SOCKET_IFNAME": "eth1", "CUDA_VISIBLE_DEVICES": "0"},
         {"NCCL_SOCKET_IFNAME": "eth1", "CUDA_VISIBLE_DEVICES": "1"}),
    ],
)  # fmt: skip
async def test_a_trainer_has_the_variables_of_its_job_but_the_devices_of_its_node(
    rig, monkeypatch, devices, given, expected
):
    monkeypatch.setattr(trainer_slot, "this_host", lambda: Host("machine", "192.0.2.7", None, devices))
    await rig.slot.launch(order(1, spec={"resources": {"environment": given}}))
    assert [environment for _, _, environment, _ in rig.forks] == [expected]


async def test_slot_with_a_running_trainer_prepares_no_other(rig):
    await rig.slot.launch(order(1))
    assert await rig.slot.prepare(order(1))
    assert len(rig.trainers) == 1


async def test_slot_without_a_trainer_cannot_rest_and_stops_without_an_exit_status(rig):
    assert not await rig.slot.rest(1, 1.0)
    assert await rig.slot.stop() == Exit(None, None)


async def test_patience_and_grace_of_a_rest_reach_the_trainer(rig):
    await rig.slot.launch(order(1))
    given = []

    async def rest(*arguments):
        given.append(arguments)
        return True

    rig.trainers[0].rest = rest
    await rig.slot.rest(1, 2.0, 3.0)
    rig.watches[0].bytes = 7_000_000_000
    await rig.slot.rest(1, 2.0, 3.0)
    assert given == [(1, 2.0, 3.0), (1, 7.0, 3.0)], "a snapshot of 7 GB may take 7 s to be whole and summed"


@pytest.mark.parametrize("compiles", [False, True])
async def test_a_trainer_is_watched_at_the_record_of_its_rank(rig, compiles):
    await rig.slot.launch(order(1, spec={"train": {"compile": compiles}}))
    (watch,) = rig.watches
    assert watch.about == (100, 3, str(rig.home / "shm"), compiles)
    status = rig.slot.status()
    assert status == TrainerStatus(100)
    watch.report(status)
    (report,) = await rig.reports.read(0, 0.0)
    assert (report.payload, report.generation, report.rank) == (status, 1, 3)
    watch.sees = False
    assert rig.slot.status() is None, "its process is gone"


async def test_slot_without_shared_memory_watches_no_trainer(rig):
    slot = TrainerSlot("job-1", 3, str(rig.home), str(rig.home), None, ReportBuffer())
    launched = await slot.launch(order(1))
    assert (rig.watches, slot.status(), await slot.stacks(launched.pid)) == ([], None, "")
    assert not await slot.kill(launched.pid, KillReason("hung", "stood still"), after_commit=True)
    assert await slot.kill(launched.pid, KillReason("hung", "stood still"))


@pytest.mark.parametrize("commits", [False, True])
async def test_slot_kills_after_a_commit_only_if_one_comes(rig, commits):
    await rig.slot.launch(order(1))
    rig.watches[0].commits = commits
    assert await rig.slot.kill(100, KillReason("straggler", "slow"), after_commit=True) is commits
    assert (rig.trainers[0].killed_for is not None) is commits


async def test_stacks_are_taken_of_the_trainer_and_written_into_its_log(rig, monkeypatch):
    asked = []

    async def capture_stacks(pid, path):
        asked.append((pid, path))
        return "here\nthere"

    monkeypatch.setattr(trainer_slot, "capture_stacks", capture_stacks)
    await rig.slot.launch(order(4))
    assert await rig.slot.stacks(100) == "here\nthere"
    await rig.slot.stop()
    assert asked == [(100, stacks_path(rig.home / "shm", 3))]
    lines = [json.loads(line) for line in Paths.of(rig.home).rank_log("job-1", 3).read_text().splitlines()]
    assert [(line["text"], line["stream"], line["generation"], line["rank"]) for line in lines] == [
        ("here", "agent", 4, 3),
        ("there", "agent", 4, 3),
    ]


async def test_a_flight_record_is_that_of_the_trainer_that_runs(rig):
    assert await rig.slot.flight_record(100) is None
    await rig.slot.launch(order(1))
    assert await rig.slot.flight_record(100) == "flight record of 100"
    assert await rig.slot.flight_record(7) is None


async def test_slot_order_is_unknown_while_a_newer_launch_is_under_way(rig):
    assert rig.slot.order is None
    await rig.slot.launch(order(1))
    assert rig.slot.order == order(1)
    async with rig.slot._lock:
        launch = asyncio.create_task(rig.slot.launch(order(2)))
        await settled()
        assert (rig.slot.generation, rig.slot.order) == (2, None)
    await launch
    assert rig.slot.order == order(2)


@pytest.mark.parametrize("tries_repair", [False, True])
async def test_slot_prepares_a_successor_only_if_it_may_repair_in_place(rig, tries_repair):
    await rig.slot.launch(order(1, in_place=False, tries_repair=tries_repair))
    rig.trainers[0].end(signal=9)
    await settled()
    assert len(rig.trainers) == 1 + tries_repair


async def test_slot_keeps_one_successor_for_a_trainer_of_several_generations(rig):
    for generation in (1, 2, 3):
        await rig.slot.launch(order(generation))
        await rig.slot.rest(generation, 1.0)
    assert len(rig.slot._successors) == 1
    rig.trainers[0].end(signal=9)
    await settled()
    assert [each.generation for each in rig.trainers] == [3, 0]
    assert rig.trainers[1].order == order(3), "like the last one"
    assert len(rig.slot._successors) == 0
