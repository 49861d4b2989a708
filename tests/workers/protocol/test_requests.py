"""Requests survive the way to a trainer, and are remembered there until all ranks carry them out."""

from dataclasses import astuple

import pytest

from manta.workers.protocol.json_codec import MalformedMessage
from manta.workers.protocol.messages import Fault, LaunchOrder, Resume, TraceOrder
from manta.workers.protocol.requests import (
    COMMANDS,
    Arm,
    Asked,
    Command,
    DumpFlightRecord,
    Go,
    RankRequest,
    RecordSteps,
    Requests,
    Rest,
    SaveAndEnd,
    TraceOrders,
)
from manta.workers.rank.control_socket import command_line, read_command

ORDER = LaunchOrder("job-1", 2, 1, {"any": [1]}, resume=Resume("memory", 3, paths=("/a", "/b")), in_place=True)
EXAMPLES = [
    Go(ORDER),
    Rest(4, after_step=True),
    DumpFlightRecord(),
    SaveAndEnd(4),
    RecordSteps(TraceOrder(2, 4, 3, 9)),
    Arm(Fault("f", "hang", 1, hold_gil=True)),
]


def test_every_command_survives_the_control_socket():
    assert [type(each) for each in EXAMPLES] == [*COMMANDS.values()]
    for command in EXAMPLES:
        line = command_line(command)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert read_command(line) == command


@pytest.mark.parametrize("line", [b"[]\n", b"{}\n", b'{"do": "sing"}\n', b'{"do": []}\n', b'{"do": "rest"}\n'])
def test_malformed_command_is_refused(line):
    with pytest.raises(MalformedMessage):
        read_command(line)


def test_agents_take_requests_to_ranks_but_no_other_commands():
    for command in EXAMPLES:
        if isinstance(command, RankRequest):
            assert RankRequest.from_json(command.to_json()) == Command.from_json(command.to_json()) == command
        else:
            with pytest.raises(MalformedMessage, match="is not a RankRequest"):
                RankRequest.from_json(command.to_json())


@pytest.mark.parametrize(("request_of", "field"), [(SaveAndEnd, "end"), (Rest, "rest")])
def test_request_to_end_or_rest_holds_up_to_its_generation(request_of, field):
    requests = Requests()
    assert requests.of(0) == Asked()
    requests.add(request_of(3))
    requests.add(request_of(2))  # a late one takes back no newer one
    assert requests.of(2) == requests.of(3) == Asked(**{field: 1})
    assert requests.of(4) == Asked()


def test_due_trace_is_asked_for_only_by_a_rank_that_may_begin_one():
    requests = Requests()
    requests.saving = True
    requests.add(RecordSteps(TraceOrder(7, 1, 2, first_step=5)))
    assert requests.of(1) == requests.of(1, next_step=4) == Asked(saving=1)
    assert requests.of(1, next_step=5) == Asked(saving=1, trace=7, traced_steps=2)


def test_asked_numbers_survive_their_sum_over_ranks():
    one, other = Asked(end=1, trace=7, traced_steps=2), Asked(end=1, rest=1)
    summed = [float(a + b) for a, b in zip(astuple(one), astuple(other), strict=True)]
    assert Asked.of(summed) == Asked(end=2, rest=1, trace=7, traced_steps=2)


def test_trace_orders_wait_for_their_step_in_the_order_of_their_numbers():
    orders = TraceOrders()
    assert orders.due(1, 5) is None
    late, soon, later = TraceOrder(1, 1, 2, 9), TraceOrder(2, 1, 2, 0), TraceOrder(3, 1, 1)
    for each in (later, late, soon):
        orders.add(each)
    assert orders.due(1, 5) == soon
    assert orders.due(1, 5) == soon, "it stays until it begins"
    assert orders.take(1, 2) == soon
    assert orders.due(1, 5) == later
    orders.take(1, 3)
    assert orders.due(1, 8) is None
    assert orders.due(1, 9) == late


def test_trace_orders_of_other_generations_are_not_due():
    orders = TraceOrders()
    orders.add(TraceOrder(1, 1, 2))
    orders.add(TraceOrder(2, 3, 2))
    assert orders.due(2, 5) is None
    assert orders.due(3, 5) == TraceOrder(2, 3, 2)
    assert orders.due(1, 5) is None, "it was forgotten"


def test_trace_order_that_came_too_late_to_profile_is_known():
    orders = TraceOrders()
    orders.take(1, 4)
    orders.add(TraceOrder(4, 1, 2, profiler_ranks=(3,)))
    assert orders.is_late(4, 3)
    assert not orders.is_late(4, 0) and not orders.is_late(5, 3)
    orders.add(TraceOrder(5, 1, 2, profiler_ranks=(3,)))
    assert not orders.is_late(5, 3)


def test_trace_order_that_has_begun_is_not_due_again():
    """A control plane that takes over asks for all that it does not know to be recorded."""
    orders = TraceOrders()
    orders.add(TraceOrder(1, 1, 2))
    orders.take(1, 1)
    orders.add(TraceOrder(1, 1, 2))
    assert orders.due(1, 5) is None
    orders.add(TraceOrder(1, 2, 2))
    assert orders.due(2, 5) == TraceOrder(1, 2, 2), "in the next generation it is"
    assert orders.take(2, 7) is None
