"""Schedules run to their end under blocking receives, do every piece of work once, and hold no more than they may."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.parallel.schedules import Action, most_in_flight, schedule

sizes = st.tuples(st.integers(1, 16), st.integers(1, 64))
kinds = st.sampled_from(["gpipe", "1f1b"])


class Simulator:
    """Runs all stages' actions: sends never block, receives wait, each direction between two stages is a queue."""

    def __init__(self, actions: list[list[Action]]):
        self.todo = [deque(stage) for stage in actions]
        self.wires: dict[tuple[int, int], deque[int]] = {}
        self.done: list[list[tuple[str, int]]] = [[] for _ in actions]
        self.held: list[dict[str, set[int]]] = [
            {"forward": set(), "backward": set(), "input": set(), "gradient": set()} for _ in actions
        ]
        self.most = [0] * len(actions)

    def run(self) -> None:
        """Until nothing is left. Fails where nobody can move."""
        while any(self.todo):
            moved = [stage for stage in range(len(self.todo)) if self.advance(stage)]
            assert moved, f"deadlock: {[stage[0] if stage else None for stage in self.todo]}"
        assert not any(self.wires.values()), "a message was sent that nobody received"

    def advance(self, stage: int) -> bool:
        """Run `stage` until it must wait. Whether it did anything."""
        moved = False
        while self.todo[stage] and self.act(stage, self.todo[stage][0]):
            self.todo[stage].popleft()
            moved = True
        return moved

    def act(self, stage: int, action: Action) -> bool:
        kind, index, held = action.kind, action.micro_batch, self.held[stage]
        last = len(self.todo) - 1
        if kind == "receive_forward":
            return self.receive(stage - 1, stage, index, held["input"])
        if kind == "receive_backward":
            return self.receive(stage + 1, stage, index, held["gradient"])
        if kind == "send_forward":
            assert index in held["forward"], "sent before it was computed"
            self.wires.setdefault((stage, stage + 1), deque()).append(index)
        elif kind == "send_backward":
            assert index in held["backward"], "sent before it was computed"
            self.wires.setdefault((stage, stage - 1), deque()).append(index)
        elif kind == "forward":
            assert stage == 0 or index in held["input"], "computed before its input arrived"
            held["forward"].add(index)
            self.done[stage].append((kind, index))
        else:
            assert index in held["forward"], "backward before forward"
            assert stage == last or index in held["gradient"], "backward before its gradient arrived"
            held["backward"].add(index)
            self.done[stage].append((kind, index))
        self.most[stage] = max(self.most[stage], len(held["forward"]) - len(held["backward"]))
        return True

    def receive(self, source: int, stage: int, index: int, into: set[int]) -> bool:
        wire = self.wires.get((source, stage))
        if not wire:
            return False
        assert wire.popleft() == index, "received in another order than sent"
        into.add(index)
        return True


@given(kinds, sizes)
def test_every_micro_batch_goes_forward_and_backward_once_on_every_stage(kind, size):
    stages, micro_batches = size
    simulator = Simulator(schedule(kind, stages, micro_batches))
    simulator.run()
    for done in simulator.done:
        for work in ("forward", "backward"):
            assert [index for what, index in done if what == work] == list(range(micro_batches))


@given(sizes)
def test_evaluation_goes_forward_alone(size):
    stages, micro_batches = size
    simulator = Simulator(schedule("forward_only", stages, micro_batches))
    simulator.run()
    assert all(done == [("forward", index) for index in range(micro_batches)] for done in simulator.done)


@given(sizes)
def test_1f1b_holds_at_most_as_many_micro_batches_as_stages_follow(size):
    stages, micro_batches = size
    actions = schedule("1f1b", stages, micro_batches)
    simulator = Simulator(actions)
    simulator.run()
    assert simulator.most == [min(stages - stage, micro_batches) for stage in range(stages)]
    assert [most_in_flight(stage) for stage in actions] == simulator.most


@given(sizes)
def test_gpipe_holds_all_micro_batches(size):
    stages, micro_batches = size
    simulator = Simulator(schedule("gpipe", stages, micro_batches))
    simulator.run()
    assert simulator.most == [micro_batches] * stages


def test_1f1b_of_two_stages_and_three_micro_batches_is_the_one_of_the_paper():
    letters = {
        "forward": "F", "backward": "B", "send_forward": ">", "receive_forward": "r",
        "send_backward": "<", "receive_backward": "g",
    }  # fmt: skip
    first, last = (
        " ".join(letters[action.kind] + str(action.micro_batch) for action in stage) for stage in schedule("1f1b", 2, 3)
    )
    assert first == "F0 >0 F1 >1 g0 B0 F2 >2 g1 B1 g2 B2"
    assert last == "r0 F0 B0 <0 r1 F1 B1 <1 r2 F2 B2 <2"


def test_the_simulator_notices_a_deadlock():
    waits = [[Action("receive_backward", 0), Action("forward", 0)], [Action("receive_forward", 0)]]
    with pytest.raises(AssertionError, match="deadlock"):
        Simulator(waits).run()


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match="unknown schedule 'zb-h1'; known: gpipe, 1f1b, forward_only"):
        schedule("zb-h1", 2, 2)
