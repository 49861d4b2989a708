"""Products take what their tiles and waves make of them, and never less than arithmetic or memory allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.planner.communication import groups_of
from manta.service.planner.hardware import ASSUMED_CORE, cpu_machine
from manta.service.planner.layer_time import LayerTime
from manta.service.planner.operations import Budget, memory_seconds, product_seconds
from manta.service.planner.software import MANTA
from tests.service.support.planned import a100s, job

MACHINE = a100s().machine
sizes = st.integers(1, 20_000)


@given(sizes, sizes, sizes, st.integers(1, 64))
def test_planned_products_never_beat_the_peak_of_the_device(m, n, k, batch):
    device, seconds = MACHINE.accelerator, product_seconds(MACHINE, m, n, k, batch)
    assert seconds >= 2 * m * n * k * batch / device.peak_16bit
    assert seconds >= 2 * batch * (m * k + k * n + m * n) / device.memory_bandwidth


@given(sizes, sizes, sizes)
def test_planned_products_never_take_less_time_with_more_rows(m, n, k):
    assert product_seconds(MACHINE, m + 128, n, k) >= product_seconds(MACHINE, m, n, k)


def test_planned_product_with_one_extra_tile_costs_another_wave():
    # 256 x 128 tiles: 12 x 9 fill 108 multiprocessors once, a row more needs a second wave.
    full = product_seconds(MACHINE, 12 * 256, 9 * 128, 8192)
    more = product_seconds(MACHINE, 12 * 256 + 1, 9 * 128, 8192)
    assert 1.3 * full < more <= 2 * full


def test_large_products_reach_the_constant_and_thin_ones_the_memory():
    rate = 2 * 8192**3 / product_seconds(MACHINE, 8192, 8192, 8192)
    assert rate == pytest.approx(MACHINE.constants.product * 312e12, rel=0.06)
    thin = product_seconds(MACHINE, 8192, 8192, 1)
    assert thin == pytest.approx(memory_seconds(MACHINE, 2 * (8192 * 8192 + 2 * 8192)))


def test_planned_fp32_product_uses_the_fp32_peak():
    assert product_seconds(MACHINE, 4096, 4096, 4096, 1, 4) > 10 * product_seconds(MACHINE, 4096, 4096, 4096)


def test_planned_pass_takes_at_least_the_time_of_its_host():
    budget = Budget(products=1e-3, operations=100).wait_for_host(MACHINE)
    assert budget.seconds == pytest.approx(100 * 6e-5) and budget.host == pytest.approx(5e-3)
    assert Budget(products=1.0, operations=100).wait_for_host(MACHINE).seconds == 1.0


def test_operations_on_a_core_cost_time_beside_their_arithmetic():
    machine = cpu_machine(1, 1, 1e9, replace(ASSUMED_CORE, operation_seconds=1e-3))
    assert Budget(products=1.0, operations=100).wait_for_host(machine).seconds == pytest.approx(1.1)


def test_budgets_of_operations_add_up_with_a_factor():
    total = Budget(products=1.0, operations=2).plus(Budget(products=2.0, tensor=0.5, operations=3), 2)
    assert total == Budget(products=5.0, tensor=1.0, operations=8)


@pytest.mark.parametrize(("unit", "rate"), [(16, 1.0), (8, 1.0), (4, 0.6), (2, 0.6), (1, 0.3)])
def test_planned_product_with_unaligned_rows_is_slower(unit, rate):
    aligned, seconds = (product_seconds(MACHINE, 8192, 51200, 14336, 1, 2, each) for each in (16, unit))
    assert aligned / seconds == pytest.approx(rate)
    assert product_seconds(MACHINE, 4096, 4096, 4096, 1, 4, unit) == product_seconds(MACHINE, 4096, 4096, 4096, 1, 4)


def layer(**changes) -> Budget:
    """Forward and backward of a layer with heads of 112 elements, which makes its scores."""
    model = {"sequence_length": 2048, "ffn_hidden_size": 7168, **changes.pop("model", {})}
    spec = job(1, 1792, 16, model=model, train={"attention": "explicit"}, **changes)
    times = LayerTime(spec, groups_of(spec.layout, a100s(), MANTA), MANTA)
    return times.forward().plus(times.backward_input()).plus(times.backward_weight())


def test_heads_and_widths_that_8_does_not_divide_are_slower_but_token_counts_are_not():
    even, heads, inner = layer(), layer(model={"head_dim": 108}), layer(model={"ffn_hidden_size": 7166})
    assert heads.attention > 1.15 * even.attention  # though it is less work
    assert inner.products > 1.3 * even.products and inner.attention == even.attention
    assert layer(model={"sequence_length": 2047}).products == pytest.approx(even.products, rel=0.01)
