"""A rank's slot: which process carries an order out, and what is made ready when one is killed."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from workers.paths import Paths
from workers.protocol.messages import Fault, Launched, LaunchOrder
from workers.protocol.reports import KillReason
from workers.rank import trainer_slot
from workers.rank.report_buffer import ReportBuffer
from workers.rank.trainer_slot import StaleGeneration, TrainerSlot
from workers.zygote.client import Exit, ZygoteUnavailable


class FakeHandle:
    """A trainer that does what it is asked at once; `end` is its death."""

    def __init__(self, order, process, reports, log, prepared, struck):
        self.process, self.log, self.struck = process, log, struck
        self.generation = 0 if prepared else order.generation
        self.order, self.at_rest, self.rank = order, prepared, order.rank
        self.armed, self.alongside, self.killed_for, self.stopped = [], [], None, False
        self._ended = asyncio.get_running_loop().create_future()

    @property
    def ended(self):
        return self._ended.done()

    def end(self, code=None, signal=None):
        self.at_rest = False
        self._ended.set_result(Exit(code, signal))

    def go(self, order):
        self.order, self.generation, self.at_rest = order, order.generation, False

    def save_and_end(self, generation):
        return generation == self.generation

    def arm(self, fault):
        self.armed.append(fault.id)

    def kill(self, reason):
        self.killed_for = reason
        self.end(signal=9)

    def become(self, rank, log):
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


@pytest.fixture
def rig(tmp_path, monkeypatch):
    """A slot of rank 3 and the trainers that it forked, oldest first."""
    made = SimpleNamespace(trainers=[], home=tmp_path, zygote=True)

    async def fork(socket, entry, argument, environment, timeout):
        assert entry == "trainer"
        if not made.zygote:
            raise ZygoteUnavailable("it is gone")
        return SimpleNamespace(pid=100 + len(made.trainers))

    def handle(*arguments):
        made.trainers.append(FakeHandle(*arguments))
        return made.trainers[-1]

    monkeypatch.setattr(trainer_slot, "fork", fork)
    monkeypatch.setattr(trainer_slot, "TrainerHandle", handle)
    made.slot = TrainerSlot("job-1", 3, str(tmp_path), str(tmp_path), str(tmp_path / "shm"), ReportBuffer())
    return made


def order(generation, **changes):
    return LaunchOrder(**{"job": "job-1", "generation": generation, "rank": 3, "spec": {}, "in_place": True, **changes})


async def settled():
    """Whatever can happen by itself has happened."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_only_a_trainer_that_runs_can_be_asked_to_save_and_end(rig):
    async def body():
        assert not rig.slot.save_and_end(1), "there is none"
        await rig.slot.launch(order(1))
        assert rig.slot.save_and_end(1)
        assert not rig.slot.save_and_end(2)
        rig.trainers[0].end(code=77)
        assert not rig.slot.save_and_end(1)

    asyncio.run(body())


def test_a_trainer_at_rest_goes_on_and_any_other_is_replaced(rig):
    async def body():
        assert await rig.slot.launch(order(1)) == Launched(100, kept=False)
        assert await rig.slot.rest(1, 1.0)
        assert await rig.slot.launch(order(2)) == Launched(100, kept=True)
        assert await rig.slot.launch(order(3)) == Launched(101, kept=False), "it did not rest"
        assert rig.trainers[0].stopped
        assert await rig.slot.rest(3, 1.0)
        assert await rig.slot.launch(order(4, in_place=False)) == Launched(102, kept=False)
        assert rig.slot.generation == 4
        assert await rig.slot.stop() == Exit(None, 9)
        assert rig.slot.pid is None

    asyncio.run(body())


def test_orders_that_were_replaced_are_refused(rig):
    async def body():
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

    asyncio.run(body())


def test_a_killed_trainer_has_a_successor_ready_and_one_that_was_stopped_has_none(rig):
    async def body():
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

    asyncio.run(body())


def test_a_successor_that_cannot_be_had_is_left_to_the_next_launch(rig):
    async def body():
        await rig.slot.launch(order(1))
        rig.zygote = False
        rig.trainers[0].end(signal=9)
        await settled()
        with pytest.raises(ZygoteUnavailable):
            await rig.slot.launch(order(2))

    asyncio.run(body())


def test_faults_wait_for_the_trainer_that_they_strike(rig):
    async def body():
        early, late = Fault("early", "kill", 3), Fault("late", "hang", 3)
        rig.slot.arm(early)
        await rig.slot.launch(order(1))
        (first,) = rig.trainers
        assert first.order.faults == (early,)
        rig.slot.arm(late)
        assert first.armed == ["late"]
        first.struck.add("early")
        await rig.slot.launch(order(2))
        assert rig.trainers[1].order.faults == (late,)

    asyncio.run(body())


def test_another_rank_has_another_log_and_another_record(rig):
    async def body():
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
        await rig.slot.close()

    asyncio.run(body())


def test_only_the_trainer_that_was_meant_is_killed_and_looked_at(rig):
    async def body():
        reason = KillReason("hung", "stood still")
        assert not await rig.slot.kill(100, reason)
        await rig.slot.launch(order(1))
        assert not await rig.slot.kill(7, reason)
        assert await rig.slot.stacks(7) == ""
        assert await rig.slot.kill(100, reason)
        assert rig.trainers[0].killed_for == reason
        assert rig.slot.status() is None

    asyncio.run(body())
