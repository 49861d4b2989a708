"""The planner's simulated times of equal stages are those of the papers' formulas and tables."""

from __future__ import annotations

from itertools import pairwise

import papers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.timeline import PassTimes, Timeline
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.action_lists import training_actions
from manta.workers.schedules.schedule import COMPUTE, Action

UNIT = PassTimes(1.0, 1.0, 1.0)
times = st.floats(0.1, 10.0)


def timeline(kind: str, stages: int, virtual_stages: int, micro_batches: int, passes: PassTimes):
    return Timeline.of(passes.pipeline(kind, stages, virtual_stages), micro_batches)


def bubble(kind: str, stages: int, virtual_stages: int, micro_batches: int, passes: PassTimes) -> float:
    """Seconds of the cost in which the costliest rank does not compute."""
    simulated = timeline(kind, stages, virtual_stages, micro_batches, passes)
    work = micro_batches * (passes.forward + passes.backward_input + passes.backward_weight)
    assert simulated.work == pytest.approx(work)
    assert simulated.bubble_ratio == pytest.approx((simulated.cost - work) / simulated.cost)
    return simulated.cost - work


@pytest.mark.parametrize(("column", "kind"), [("1F1B", "1f1b"), ("ZB-H1", "zb-h1"), ("ZB-H2", "zb-h2")])
@pytest.mark.parametrize("row", range(12))
def test_bubble_rates_of_the_zero_bubble_paper(row, column, kind):
    """Table 5 of arXiv:2401.10241 from the times of its table 9."""
    profiled = papers.PASS_TIMES[row]
    published = papers.BUBBLE_RATES[row]
    assert [profiled[name] for name in ("model", "p", "m")] == [published[name] for name in ("model", "p", "m")]
    passes = PassTimes(*(profiled[name] for name in ("TF_ms", "TB_ms", "TW_ms", "Tcomm_ms")))
    assert round(timeline(kind, profiled["p"], 1, profiled["m"], passes).bubble_ratio, 4) == published[column]


@settings(deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 16), st.integers(1, 32), times, times, times)
def test_bubble_of_gpipe_and_1f1b(kind, stages, micro_batches, forward, backward, weight):
    """(p - 1) / m of the work (arXiv:2104.04473, section 2.2.1)."""
    work = micro_batches * (forward + backward + weight)
    idle_time = bubble(kind, stages, 1, micro_batches, PassTimes(forward, backward, weight))
    assert idle_time == pytest.approx((stages - 1) / micro_batches * work, abs=1e-9 * work)


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 4), st.integers(1, 4), times, times, times)
def test_bubble_of_interleaved(stages, virtual_stages, groups, forward, backward, weight):
    """(p - 1) / (m v) of the work (arXiv:2104.04473, section 2.2.2), also where m = p."""
    micro_batches = stages * groups
    work = micro_batches * (forward + backward + weight)
    idle_time = bubble("interleaved", stages, virtual_stages, micro_batches, PassTimes(forward, backward, weight))
    assert idle_time == pytest.approx((stages - 1) / (micro_batches * virtual_stages) * work, abs=1e-9 * work)


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(0, 32), times, times, st.floats(0.0, 1.0))
def test_bubble_of_zb_h1(stages, more, forward, backward, part):
    """(p - 1) (TF + TB - TW) where weights take no longer than the rest (arXiv:2401.10241, table 2)."""
    weight = part * min(forward, backward)
    idle_time = bubble("zb-h1", stages, 1, stages + more, PassTimes(forward, backward, weight))
    assert idle_time == pytest.approx((stages - 1) * (forward + backward - weight), abs=1e-6)


@settings(deadline=None)
@given(st.integers(1, 16), st.data(), times, times, st.floats(0.0, 1.0))
def test_zb_h1_with_few_micro_batches(stages, data, forward, backward, part):
    """(m + p - 1) (TF + TB) + TW where m <= p (arXiv:2401.10241, table 2)."""
    micro_batches = data.draw(st.integers(1, stages))
    weight = part * min(forward, backward)
    simulated = timeline("zb-h1", stages, 1, micro_batches, PassTimes(forward, backward, weight))
    assert simulated.cost == pytest.approx((micro_batches + stages - 1) * (forward + backward) + weight)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 20), st.floats(0.1, 1.0))
def test_zb_h2_has_no_bubble_if_all_passes_take_equally_long(stages, more, unit):
    """(p - 1)(TF + TB - 2 TW) (arXiv:2401.10241, table 2)."""
    assert bubble("zb-h2", stages, 1, 2 * stages + more, PassTimes(unit, unit, unit)) == pytest.approx(0, abs=1e-6)


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 64), times)
def test_zb_v_has_no_bubble_once_the_pipeline_is_full(stages, micro_batches, unit):
    """Where all passes take equally long (arXiv:2401.10241, section 6); a pass for every micro-batch below 2 p - 1."""
    idle_time = bubble("zb-v", stages, 2, micro_batches, PassTimes(unit, unit, unit))
    assert idle_time == pytest.approx(unit * max(0, 2 * stages - 1 - micro_batches), abs=1e-6)


def test_simulated_message_delays_only_the_stage_that_waits_for_it():
    simulated = timeline("1f1b", 2, 1, 2, PassTimes(1.0, 2.0, 1.0, communication=0.5))
    assert simulated.passes[0] == [
        (Action("forward", 0), 0.0, 1.0),
        (Action("forward", 1), 1.0, 2.0),
        (Action("backward", 0), 6.0, 9.0),
        (Action("backward", 1), 10.0, 13.0),
    ]
    assert simulated.passes[1] == [
        (Action("forward", 0), 1.5, 2.5),
        (Action("backward", 0), 2.5, 5.5),
        (Action("forward", 1), 5.5, 6.5),
        (Action("backward", 1), 6.5, 9.5),
    ]
    assert (simulated.makespan, simulated.cost, simulated.work) == (13.0, 13.0, 8.0)
    assert (simulated.idle(0), simulated.idle(1)) == (5.0, 0.0)


def test_the_cost_is_a_ranks_and_the_makespan_all_ranks_time():
    simulated = timeline("zb-h1", 2, 1, 2, UNIT)
    assert (simulated.makespan, simulated.cost) == (7.0, 7.0)
    full = timeline("zb-v", 2, 2, 3, UNIT)
    assert (full.makespan, full.cost) == (9.5, 9.0)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_chunks_of_one_rank_hand_over_at_no_cost(kind):
    virtual_stages = SCHEDULES[kind].virtual_stages or 2
    assert timeline(kind, 1, virtual_stages, 3, PassTimes(1.0, 1.0, 1.0, communication=100.0)).cost == 9.0


def test_zb_v_turns_on_the_last_rank_without_a_message():
    simulated = timeline("zb-v", 2, 2, 1, PassTimes(2.0, 2.0, 2.0, communication=10.0))
    ends = {(rank, action): end for rank, passes in enumerate(simulated.passes) for action, _, end in passes}
    assert ends[0, Action("forward", 0, 0)] == 1.0
    assert ends[1, Action("forward", 0, 0)] == 12.0
    assert ends[1, Action("forward", 0, 1)] == 13.0
    assert ends[0, Action("forward", 0, 1)] == 24.0


def test_simulated_message_takes_as_long_with_more_chunks():
    """So interleaving sends v times as much (arXiv:2104.04473, section 2.2.2)."""
    passes = PassTimes(2.0, 2.0, 2.0, communication=0.5)
    simulated = Timeline.of(passes.pipeline("interleaved", 2, 2, trains=False), 1)
    assert simulated.makespan == 4 * 1.0 + 3 * 0.5


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 24), times, times, times, st.floats(0.0, 1.0))
def test_simulated_passes_keep_their_order_and_wait_for_their_input(
    stages, micro_batches, forward, backward, weight, wire
):
    lists = training_actions("zb-v", stages, 2, micro_batches)
    simulated = timeline("zb-v", stages, 2, micro_batches, PassTimes(forward, backward, weight, wire))
    ends: dict[tuple[int, int], list[float]] = {}
    for actions, passes in zip(lists, simulated.passes, strict=True):
        assert [action for action, _, _ in passes] == [action for action in actions if action.kind in COMPUTE]
        assert all(before[2] <= after[1] for before, after in pairwise(passes))
    for rank, passes in enumerate(simulated.passes):
        for action, start, end in passes:
            if action.kind == "forward":
                index = rank if action.chunk == 0 else 2 * stages - 1 - rank
                ends.setdefault((action.micro_batch, index), []).extend((start, end))
    for (micro_batch, index), (start, _) in ends.items():
        if index:
            delay = 0.0 if index == stages else wire
            assert start >= ends[micro_batch, index - 1][1] + delay
