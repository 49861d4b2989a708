"""The handshake: two releases that cannot talk to each other say so in a sentence."""

import pytest

from workers.protocol.messages import PROTOCOL, ProtocolMismatch, check_protocol


def test_another_protocol_is_refused_with_a_sentence():
    check_protocol("the agent", PROTOCOL)
    with pytest.raises(ProtocolMismatch, match=f"the agent speaks protocol {PROTOCOL + 1} and this process {PROTOCOL}"):
        check_protocol("the agent", PROTOCOL + 1)
