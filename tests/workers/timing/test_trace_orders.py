"""Orders wait for their step and their generation, and are carried out once."""

from manta.workers.protocol.messages import TraceOrder
from manta.workers.timing.recording import TraceOrders


def test_an_order_waits_for_its_step_and_the_first_goes_first():
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


def test_orders_of_other_generations_do_not_count():
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
