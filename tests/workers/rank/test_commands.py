"""Commands survive the way over the control socket."""

import pytest

from manta.workers.protocol.json_codec import MalformedMessage
from manta.workers.protocol.messages import Fault, LaunchOrder, Resume, TraceOrder
from manta.workers.rank.control_socket import Arm, Go, Rest, SaveAndEnd, Trace, command_line, read_command

ORDER = LaunchOrder("job-1", 2, 1, {"any": [1]}, resume=Resume("memory", 3, paths=("/a", "/b")), in_place=True)


@pytest.mark.parametrize(
    "command",
    [
        Go(ORDER),
        Rest(4, after_step=True),
        SaveAndEnd(4),
        Arm(Fault("f", "hang", 1, hold_gil=True)),
        Trace(TraceOrder(2, 4, 3, 9)),
    ],
)
def test_trainer_command_survives_a_round_trip(command):
    line = command_line(command)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert read_command(line) == command


@pytest.mark.parametrize("line", [b"[]\n", b"{}\n", b'{"do": "sing"}\n', b'{"do": "rest"}\n'])
def test_malformed_trainer_command_is_refused(line):
    with pytest.raises(MalformedMessage):
        read_command(line)
