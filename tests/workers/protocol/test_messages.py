"""The handshake: two releases that cannot talk to each other say so in a sentence."""

import pytest

from manta.workers.protocol import messages
from manta.workers.protocol.messages import PROTOCOL, SPOKEN, Fault, LaunchOrder, ProtocolMismatch, check_protocol


def test_unsupported_protocol_is_refused_with_both_numbers():
    check_protocol("the agent", PROTOCOL)
    with pytest.raises(ProtocolMismatch, match=f"the agent speaks protocol {PROTOCOL + 1} and this process {PROTOCOL}"):
        check_protocol("the agent", PROTOCOL + 1)


def test_own_protocol_version_is_among_the_supported():
    assert PROTOCOL in SPOKEN


def test_protocol_mismatch_names_spoken_versions_and_the_remedy(monkeypatch):
    monkeypatch.setattr(messages, "SPOKEN", (2, 3))
    check_protocol("the agent", 2)
    check_protocol("the agent", 3)
    with pytest.raises(ProtocolMismatch, match=r"^it speaks protocol 1 and this process 2 and 3: wait$") as caught:
        check_protocol("it", 1, "wait")
    assert caught.value.theirs == 1


def test_secret_of_a_launch_order_is_not_in_its_repr():
    assert "hidden" not in repr(LaunchOrder("job-1", 1, 0, {}, secret="hidden"))


def test_launch_order_knows_layout_sizes_and_defaults_missing_ones_to_one():
    assert LaunchOrder("job-1", 1, 0, {"parallel": {"data": 4, "tensor": 2}}).sizes == (2, 1, 4)
    assert LaunchOrder("job-1", 1, 0, {"parallel": None}).sizes == LaunchOrder("job-1", 1, 0, {}).sizes == (1, 1, 1)


def test_fault_sentence_says_where_and_at_which_step_it_strikes():
    assert Fault("f", "kill", 3, 7, "reduction").sentence == (
        "kill of rank 3 in reduction of step 7 or as soon as possible after it"
    )
    assert Fault("f", "kill", 3, 7, "start").sentence == "kill of rank 3 in start or as soon as possible after it"


def test_launch_order_without_optional_fields_gets_safe_defaults():
    """What a control plane of before a field does not send."""
    order = LaunchOrder("job-1", 1, 0, {})
    assert (order.resume.source, order.resume.step, order.resume.began) == ("start", 0, 0)
    assert (order.in_place, order.device, order.faults, order.roll_backs) == (False, "cpu", (), ())
    assert (order.snapshot_folder, order.checkpoint_folder, order.peak_flops) == (None, None, None)
