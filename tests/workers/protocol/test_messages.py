"""The handshake: two releases that cannot talk to each other say so in a sentence."""

import pytest

from manta.workers.protocol import messages
from manta.workers.protocol.messages import PROTOCOL, SPOKEN, Fault, LaunchOrder, ProtocolMismatch, check_protocol


def test_another_protocol_is_refused_with_a_sentence():
    check_protocol("the agent", PROTOCOL)
    with pytest.raises(ProtocolMismatch, match=f"the agent speaks protocol {PROTOCOL + 1} and this process {PROTOCOL}"):
        check_protocol("the agent", PROTOCOL + 1)


def test_own_protocol_is_spoken():
    assert PROTOCOL in SPOKEN


def test_sentence_names_all_that_is_spoken_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(messages, "SPOKEN", (2, 3))
    check_protocol("the agent", 2)
    check_protocol("the agent", 3)
    with pytest.raises(ProtocolMismatch, match=r"^it speaks protocol 1 and this process 2 and 3: wait$") as caught:
        check_protocol("it", 1, "wait")
    assert caught.value.theirs == 1


def test_what_the_ranks_of_a_generation_know_is_in_no_log():
    assert "hidden" not in repr(LaunchOrder("job-1", 1, 0, {}, secret="hidden"))


def test_an_order_knows_the_sizes_of_its_layout_and_takes_one_for_what_is_not_said():
    assert LaunchOrder("job-1", 1, 0, {"parallel": {"data": 4, "tensor": 2}}).sizes == (2, 1, 4)
    assert LaunchOrder("job-1", 1, 0, {"parallel": None}).sizes == LaunchOrder("job-1", 1, 0, {}).sizes == (1, 1, 1)


def test_a_fault_says_where_it_strikes_and_at_which_step_where_that_means_something():
    assert Fault("f", "kill", 3, 7, "reduction").sentence == (
        "kill of rank 3 in reduction of step 7 or as soon as possible after it"
    )
    assert Fault("f", "kill", 3, 7, "start").sentence == "kill of rank 3 in start or as soon as possible after it"


def test_an_order_that_says_nothing_else_begins_at_the_start_and_is_repaired_by_no_one():
    """What a control plane of before a field does not send."""
    order = LaunchOrder("job-1", 1, 0, {})
    assert (order.resume.source, order.resume.step, order.resume.began) == ("start", 0, 0)
    assert (order.in_place, order.device, order.faults, order.roll_backs) == (False, "cpu", (), ())
    assert (order.snapshot_folder, order.checkpoint_folder, order.peak_flops) == (None, None, None)
