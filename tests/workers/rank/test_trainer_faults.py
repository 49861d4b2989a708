"""Faults that a trainer process is asked for, before it starts or while it trains."""

import signal

import pytest
from trainer_rig import order

from manta.workers.protocol.messages import Fault
from manta.workers.protocol.reports import Event
from manta.workers.protocol.requests import Arm, Rest
from manta.workers.rank import trainer_process
from manta.workers.rank.trainer_process import EXIT_FAILED


def reach_data(trainer):
    """Train until the first step reads its data."""
    trainer.comm.step.on_phase(1, "data")


def test_fault_is_reported_before_it_strikes_in_its_phase(rig):
    def train(trainer):
        trainer.comm.step.on_phase(4, "data")
        trainer.comm.step.on_phase(5, "forward")

    run = rig(train)
    run.start(order(faults=(Fault("f", "exception", 3, 5, "forward"),)))
    payloads = [run.hear().payload for _ in range(3)]
    assert Event("fault_struck", "exception in forward", 5, {"fault": "f"}) in payloads
    assert (payloads[-1].kind, payloads[-1].exception) == ("exception", "InjectedError")
    assert run.ended() == EXIT_FAILED


def test_fault_armed_during_training_strikes(rig):
    """Commands are taken in order: when the end of a generation has come, what was said before it is armed."""

    def train(trainer):
        trainer.comm.until_asked(rest=1)
        trainer.comm.step.on_phase(7, "backward")

    run = rig(train)
    run.start(order())
    run.hear()
    run.say(Arm(Fault("f", "exception", 3, 5, "backward")))
    run.say(Rest(1, after_step=True))
    assert run.hear().payload == Event("fault_struck", "exception in backward", 7, {"fault": "f"})
    assert run.hear().payload.exception == "InjectedError"


def test_partition_fault_cuts_connections_for_its_duration(rig):
    run = rig(reach_data)
    run.start(order(faults=(Fault("f", "partition", 3, 1, seconds=2.5),)))
    assert run.ended() == 0
    assert run.built[0].comm.breaks == 1
    assert run.process._faults._cut_until > 0


HARMS = ("signal_self", "hang", "run_out_of_memory", "kill_node", "kill_store")


@pytest.mark.parametrize(
    ("fault", "harm"),
    [
        (Fault("f", "kill", 3, delay=0.5), ("signal_self", signal.SIGKILL, 0.5)),
        (Fault("f", "stop", 3), ("signal_self", signal.SIGSTOP, 0.0)),
        (Fault("f", "hang", 3, hold_gil=True), ("hang", True)),
        (Fault("f", "hang", 3), ("hang", False)),
        (Fault("f", "oom", 3), ("run_out_of_memory",)),
        (Fault("f", "node", 3), ("kill_node",)),
        (Fault("f", "store", 3), ("kill_store", 7)),
    ],
)
def test_each_fault_kind_does_its_own_harm(rig, monkeypatch, fault, harm):
    done = []
    for name in HARMS:
        monkeypatch.setattr(trainer_process, name, lambda *arguments, name=name: done.append((name, *arguments)))

    run = rig(reach_data)
    run.start(order(faults=(fault,), store_port=7))
    assert run.ended() == 0
    assert done == [harm]


def test_slow_fault_stays_armed(rig):
    run = rig(reach_data)
    run.start(order(faults=(Fault("f", "slow", 3, seconds=0.001),)))
    assert run.ended() == 0
    assert run.process._faults.armed
