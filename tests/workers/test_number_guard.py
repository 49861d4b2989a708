"""The copies that a roll back needs are of steps that happened, and the same on all ranks."""

from __future__ import annotations

import threading

import pytest
from engine_specs import spec
from one_layer import lone_rank
from rank_threads import connected

from manta.workers.comm.links import Links
from manta.workers.comm.shared_work import SharedWork
from manta.workers.engine import Engine
from manta.workers.errors import NonFiniteError, SpikeError
from manta.workers.parallel.data.agreement import StepStatistics
from manta.workers.training.bad_numbers import NO_LIMITS, BadStep, NumericsHistory, RollBack
from manta.workers.training.number_guard import NumberGuard

BAD = BadStep("not_finite", "roll_back", "bad numbers")


def guard_of(rank: int = 0, data: int = 1) -> NumberGuard:
    """The guard of a new process, which undoes three steps at least."""
    job = spec(recovery={"nonfinite": "roll_back", "roll_back_steps": 3}, parallel={"data": data})
    comm = lone_rank(job, rank)
    return NumberGuard(job.recovery, Engine(job, comm), comm)


def restore(guard: NumberGuard, step: int) -> None:
    """Go on from the state of `step`, which tells its step."""
    guard.finish()
    guard.engine.optimizer.moments["exp_avg"].fill_(step)
    guard.restored(step, NumericsHistory(), [])


def commit(guard: NumberGuard, steps: range) -> None:
    """Commit good steps."""
    for step in steps:
        guard.finish()
        guard.engine.optimizer.moments["exp_avg"].fill_(step)
        guard.committed(step, StepStatistics(1.0, 1.0, 0))


@pytest.mark.parametrize(("resumed", "bad_step", "back_to"), [(7, 8, 3), (6, 7, 3), (5, 6, 3), (2, 3, 2), (0, 2, 0)])
def test_roll_back_never_returns_to_a_step_that_was_given_up(resumed, bad_step, back_to):
    """A process with copies of steps 3 and 6 goes on from `resumed`, and comes to a bad step soon after."""
    guard = guard_of()
    restore(guard, 0)
    commit(guard, range(1, 8))
    assert guard.copies.steps == [3, 6]
    restore(guard, resumed)
    assert guard.copies.steps == ([step for step in (3, 6) if step <= resumed] or [resumed])
    commit(guard, range(resumed + 1, bad_step))
    assert guard.roll_back(bad_step, [range(8)], BAD).back_to == back_to
    assert (guard.engine.optimizer.moments["exp_avg"] == back_to).all()
    guard.close()


def test_snapshot_that_one_rank_lacks_is_not_rolled_back_to():
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


SPIKE = {"policy": "skip", "window": 5}


def lone_guard(**recovery) -> NumberGuard:
    """The guard of a job of one rank."""
    job = spec(recovery=recovery)
    comm = lone_rank(job)
    return NumberGuard(job.recovery, Engine(job, comm), comm)


def calm(guard: NumberGuard, steps: int = 5) -> None:
    """Steps of loss 2 and gradient norm 1, after which limits are 2.8 and 2 where steps are judged."""
    for step in range(1, steps + 1):
        guard.begin_step()
        guard.committed(step, StepStatistics(2.0, 1.0, 0))
    guard.begin_step()


@pytest.mark.parametrize(
    ("policy", "refused_above", "judged"),
    [("skip", (2.8, 2.0), "spike"), ("report", NO_LIMITS, "spike"), ("ignore", NO_LIMITS, None)],
)
def test_spike_is_refused_before_the_update_unless_only_reported(policy, refused_above, judged):
    guard = lone_guard(spike={**SPIKE, "policy": policy}, nonfinite="roll_back")
    calm(guard)
    assert guard.engine.optimizer.limits == pytest.approx(refused_above)
    bad = guard.judge(6, StepStatistics(3.0, 1.0, 0))
    assert (bad and bad.kind) == judged
    assert guard.history.recent == (() if policy == "ignore" else ((2.0, 1.0),) * 5)
    guard.close()


def test_numerics_guard_without_a_look_back_policy_keeps_no_copies_or_history():
    guard = lone_guard()
    guard.comm.shared_work = None
    assert guard.restored(3, NumericsHistory(((1.0, 1.0),)), []) == []
    calm(guard)
    assert (guard.active, guard.copies, guard.history) == (False, None, NumericsHistory())


ONE, TWO, THREE = (RollBack(step, step - 2, (range(8 * step, 8 * step + 8),)) for step in (4, 6, 8))


def test_roll_backs_from_every_source_count_and_new_ones_are_reported():
    """One that this process knows by itself, one that came with the state, one that the control plane has heard of."""
    guard = lone_guard(nonfinite="roll_back", spike=SPIKE)
    guard.history = NumericsHistory(((9.0, 9.0),), (ONE,))
    news = guard.restored(9, NumericsHistory(((2.0, 1.0),), (TWO,)), iter([THREE]))
    assert guard.history == NumericsHistory(((2.0, 1.0),), (ONE, TWO, THREE))
    assert news == [ONE, TWO]
    assert guard.restored(9, None, [ONE, TWO, THREE]) == []
    assert guard.history.recent == ((2.0, 1.0),), "this process never lost it"
    guard.close()


@pytest.mark.parametrize(("kind", "error"), [("not_finite", NonFiniteError), ("spike", SpikeError)])
def test_job_with_too_many_bad_steps_fails_with_the_error_of_their_kind(kind, error):
    guard = lone_guard(nonfinite="roll_back", roll_back_steps=3, max_roll_backs=2)
    restore(guard, 0)
    commit(guard, range(1, 8))
    for bad_step, first in ((8, 0), (5, 8)):
        guard.roll_back(bad_step, [range(first, first + 8)], BAD)
    assert [each.step for each in guard.history.roll_backs] == [5, 8]
    with pytest.raises(error, match=r"too much; the job has rolled back 2 times"):
        guard.roll_back(5, [range(16, 24)], BadStep(kind, "roll_back", "too much"))
    guard.close()


def test_roll_back_restores_optimizer_clock_parameters_and_recent_history():
    job = spec(train={"precision": "bf16"}, recovery={"nonfinite": "roll_back", "roll_back_steps": 3, "spike": SPIKE})
    comm, threads = lone_rank(job), set(threading.enumerate())
    guard = NumberGuard(job.recovery, Engine(job, comm), comm)
    restore(guard, 0)
    optimizer = guard.engine.optimizer
    for step in range(1, 8):
        guard.finish()
        optimizer.set_step(step)
        optimizer.parameters[0].fill_(step)
        optimizer.publish_parameters()
        guard.committed(step, StepStatistics(float(step), 1.0, 0))
    guard.finish()
    assert guard.roll_back(8, [range(8)], BAD).back_to == 3
    assert (guard.engine.flat.parameters == 3.0).all()
    assert {float(piece.steps) for pieces in optimizer._groups.values() for piece in pieces} == {3.0}
    assert [loss for loss, _ in guard.history.recent] == [1.0, 2.0, 3.0]
    assert guard.copies.steps == [3], "later ones are of steps that will be done again"
    assert set(threading.enumerate()) - threads, "one that copies"
    guard.close()
    assert set(threading.enumerate()) <= threads
