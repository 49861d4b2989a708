"""The copies that a roll back needs are of steps that happened, and the same on all ranks."""

from __future__ import annotations

import pytest
from engine_specs import spec
from one_layer import lone_rank
from rank_threads import connected

from workers.comm.links import Links
from workers.comm.shared_work import SharedWork
from workers.engine import Engine
from workers.numerics.bad_numbers import BadStep, NumericsHistory
from workers.numerics.guard import NumberGuard
from workers.parallel.data.step_statistics import StepStatistics

BAD = BadStep("not_finite", "roll_back", "bad numbers")


def guard_of(rank: int = 0, data: int = 1) -> NumberGuard:
    """The guard of a new process, which undoes three steps at least."""
    job = spec(recovery={"nonfinite": "roll_back", "roll_back_steps": 3}, parallel={"data": data})
    comm = lone_rank(job, rank)
    return NumberGuard(job.recovery, Engine(job, comm), comm)


def restore(guard: NumberGuard, step: int) -> None:
    """Go on from the state of `step`, which tells its step."""
    guard.finish()
    guard.engine.optimizer.exp_avg.fill_(step)
    guard.restored(step, NumericsHistory(), [])


def commit(guard: NumberGuard, steps: range) -> None:
    """Commit good steps."""
    for step in steps:
        guard.finish()
        guard.engine.optimizer.exp_avg.fill_(step)
        guard.committed(step, StepStatistics(1.0, 1.0, 0))


@pytest.mark.parametrize(("resumed", "bad_step", "back_to"), [(7, 8, 3), (6, 7, 3), (5, 6, 3), (2, 3, 2), (0, 2, 0)])
def test_no_roll_back_leads_to_a_step_that_was_given_up(resumed, bad_step, back_to):
    """A process with copies of steps 3 and 6 goes on from `resumed`, and comes to a bad step soon after."""
    guard = guard_of()
    restore(guard, 0)
    commit(guard, range(1, 8))
    assert guard.copies.steps == [3, 6]
    restore(guard, resumed)
    assert guard.copies.steps == ([step for step in (3, 6) if step <= resumed] or [resumed])
    commit(guard, range(resumed + 1, bad_step))
    assert guard.roll_back(bad_step, [range(8)], BAD).back_to == back_to
    assert (guard.engine.optimizer.exp_avg == back_to).all()
    guard.close()


def test_a_copy_that_one_rank_lacks_is_no_place_to_go_back_to():
    """Rank 1 is a new process, rank 0 has lived on with copies of steps 3 and 6."""
    guards = [guard_of(rank, data=2) for rank in range(2)]
    restore(guards[0], 0)
    commit(guards[0], range(1, 8))

    def body(links: Links) -> list[int]:
        guard = guards[links.rank]
        guard.comm.shared_work = SharedWork(links, 2)
        restore(guard, 7)
        return guard.copies.steps

    assert connected(2, body) == [[7], [7]]
    for guard in guards:
        guard.close()
