"""One mark of a phase is followed by the record, the clock and the parts."""

from __future__ import annotations

import pytest
import torch

from manta.workers.liveness.progress import Progress, ProgressReader, progress_path
from manta.workers.timing.step_phases import StepPhases


@pytest.fixture
def step(clock):
    return StepPhases(torch.device("cpu"), Progress(), clock)


@pytest.fixture
def watched(tmp_path):
    """Phases, and a reader of their record."""
    step = StepPhases(torch.device("cpu"), Progress.shared(tmp_path, 0))
    reader = ProgressReader(progress_path(tmp_path, 0))
    yield step, reader
    reader.close()


def test_progress_record_has_the_last_entered_phase(watched):
    step, reader = watched
    step.begin(7)
    with step.phase("backward_weight", micro_batch=3):
        assert (reader.read().step, reader.read().phase, reader.read().micro_batch) == (7, "backward", 3)
    assert (reader.read().phase, reader.read().micro_batch) == ("backward", 3)
    with step.phase("snapshot"):
        assert (reader.read().phase, reader.read().micro_batch) == ("snapshot", None)


@pytest.mark.parametrize("phase", ["recompute", "tensor_communication", "data_communication", "bubble", "other"])
def test_nested_phases_leave_the_progress_record_alone(watched, phase):
    step, reader = watched
    with step.phase("forward", micro_batch=2):
        before = reader.read()
        with step.phase(phase):
            assert reader.read() == before


def test_states_outside_of_steps_last(watched):
    step, reader = watched
    step.enter("connecting")
    assert reader.read().phase == "connecting"
    step.enter("resting")
    assert reader.read().phase == "resting"


def test_waits_are_on_the_clock_whether_or_not_the_step_is_measured(step, clock):
    for measure in (False, True):
        step.begin(1, measure)
        with step.phase("data"):
            clock.seconds += 2
        with step.phase("forward"):
            clock.seconds += 3
        with step.phase("snapshot"):
            clock.seconds += 4
        assert step.clock.lap() == {"wall": 9, "data_wait": 2, "snapshot_stall": 4, "checkpoint_stall": 0}


def test_parts_of_a_measured_step_follow_its_phases(step, clock):
    step.begin(1, measure=True)
    with step.phase("data"):
        clock.seconds += 1
    with step.phase("receive_forward", 0):
        clock.seconds += 2
    with step.phase("forward", 0):
        clock.seconds += 4
        with step.phase("tensor_communication"):
            clock.seconds += 8
    with step.phase("reduction"):
        clock.seconds += 16
    with step.phase("agreement"):
        clock.seconds += 32
    with step.phase("optimizer"):
        clock.seconds += 64
    seconds = step.parts.end()
    assert {part: spent for part, spent in seconds.items() if spent} == {
        "data": 1, "pipeline_communication": 2, "forward": 4, "tensor_communication": 8, "other": 16,
        "optimizer": 96,
    }  # fmt: skip


def test_measured_forward_work_within_backward_is_recomputation(step, clock):
    step.begin(1, measure=True)
    with step.phase("forward"), step.forward_work():
        clock.seconds += 1
    with step.phase("backward"), step.forward_work():
        clock.seconds += 2
    seconds = step.parts.end()
    assert (seconds["forward"], seconds["recompute"], seconds["backward"]) == (1, 2, 0)


def test_a_step_that_is_not_measured_has_no_parts(step, clock):
    with step.phase("forward"), step.forward_work():
        clock.seconds += 1
    step.begin(1, measure=True)
    step.begin(2)  # the first was broken off
    assert not step.parts.measuring


def test_phase_that_raises_ends(step, clock):
    step.begin(1, measure=True)
    with pytest.raises(ValueError, match="bad"), step.phase("data"):
        clock.seconds += 1
        raise ValueError("bad")
    clock.seconds += 2
    assert step.clock.lap()["data_wait"] == 1
    seconds = step.parts.end()
    assert (seconds["data"], seconds["other"]) == (1, 2)


def test_phase_callback_is_called_at_every_recorded_phase(step):
    entered = []
    with step.phase("data"):
        pass  # nobody has asked
    step.on_phase = lambda number, phase: entered.append((number, phase))
    step.begin(4)
    with step.phase("data"), step.phase("tensor_communication"):
        pass
    with step.phase("send_backward", 1):
        pass
    step.enter("restoring")
    assert entered == [(4, "data"), (4, "backward"), (4, "restoring")]


RECORDED = {
    "data": ["data"], "forward": ["receive_forward", "forward", "send_forward"],
    "backward": ["receive_backward", "backward", "backward_input", "backward_weight", "send_backward"],
    "reduction": ["reduction"], "agreement": ["replica_check", "agreement"], "optimizer": ["optimizer"],
    "snapshot": ["snapshot"], "checkpoint": ["checkpoint"], "validation": ["validation"],
}  # fmt: skip
"""As what phases of a step are told to whoever looks where a rank stands."""


@pytest.mark.parametrize(
    ("recorded", "phase"), [(recorded, phase) for recorded, phases in RECORDED.items() for phase in phases]
)
def test_every_phase_of_a_step_is_on_record(watched, recorded, phase):
    step, reader = watched
    step.enter("resting")
    with step.phase(phase):
        assert reader.read().phase == recorded


PARTS_OF_PHASES = {
    "pipeline_communication": [
        "receive_forward", "send_forward", "receive_backward", "send_backward", "pipeline_communication",
    ],
    "backward": ["backward", "backward_input", "backward_weight"],
    "recompute": ["recompute"],
    "data_communication": ["data_communication"],
    "bubble": ["bubble"],
    "optimizer": ["agreement", "optimizer"],
    "other": ["reduction", "replica_check", "snapshot", "checkpoint", "validation", "other"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "phase"), [(part, phase) for part, phases in PARTS_OF_PHASES.items() for phase in phases]
)
def test_every_phase_counts_as_its_part(step, clock, part, phase):
    step.begin(1, measure=True)
    with step.phase(phase):
        clock.seconds += 1
    assert {name: spent for name, spent in step.parts.end().items() if spent} == {part: 1}


def test_a_checkpoint_that_holds_training_up_is_a_wait_of_its_own(step, clock):
    with step.phase("checkpoint"):
        clock.seconds += 2
        with step.phase("snapshot"):
            clock.seconds += 1
    assert step.clock.lap() == {"wall": 3, "data_wait": 0, "snapshot_stall": 0, "checkpoint_stall": 3}
