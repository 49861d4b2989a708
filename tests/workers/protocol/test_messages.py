"""The handshake: two releases that cannot talk to each other say so in a sentence."""

import pytest

from workers.protocol import messages
from workers.protocol.messages import PROTOCOL, SPOKEN, ProtocolMismatch, check_protocol


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
