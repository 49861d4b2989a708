"""ZB-H2, which the engine does not run, is a sound schedule, with the bubbles and the memory that its paper says."""

from __future__ import annotations

import papers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.workers.parallel.pipeline.schedules import with_messages
from manta.workers.parallel.pipeline.schedules.action import Action
from manta.workers.parallel.pipeline.schedules.check import check
from manta.workers.parallel.pipeline.schedules.simulate import PassTimes, simulate
from manta.workers.parallel.pipeline.schedules.zero_bubble_h2 import zero_bubble_h2


def lists(stages: int, micro_batches: int) -> list[list[Action]]:
    """Placed as ZB-H1: one chunk a rank."""
    return with_messages([list(zero_bubble_h2(rank, stages, 1, micro_batches)) for rank in range(stages)], "zb-h1", 1)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 40))
def test_zero_bubble_h2_runs_every_pass_once_without_deadlock(stages, micro_batches):
    check(lists(stages, micro_batches), "zb-h1", stages, 1, micro_batches)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 20), st.floats(0.1, 1.0))
def test_zb_h2_has_no_bubble_if_all_passes_take_equally_long(stages, more, unit):
    """(p - 1)(TF + TB - 2 TW) (arXiv:2401.10241, table 2)."""
    simulated = simulate(lists(stages, 2 * stages + more), "zb-h1", 1, PassTimes(unit, unit, unit))
    assert simulated.cost == pytest.approx(simulated.work)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_the_first_rank_holds_twice_the_micro_batches(stages):
    """(2p - 2i + 1) MB + (2i - 2) MW on rank i from 1 (arXiv:2401.10241, section 2.3)."""
    for rank, actions in enumerate(lists(stages, 4 * stages)):
        forwards, inputs, weights = 0, 0, 0
        most_whole = most_half = 0
        for action in actions:
            forwards += action.kind == "forward"
            inputs += action.kind == "backward_input"
            weights += action.kind == "backward_weight"
            most_whole = max(most_whole, forwards - inputs)
            most_half = max(most_half, inputs - weights)
        assert most_whole == 2 * (stages - rank) - 1
        assert most_half <= 2 * rank + 1


@pytest.mark.parametrize("row", range(12))
def test_zero_bubble_h2_bubble_rates_match_the_paper(row):
    """Table 5 of arXiv:2401.10241 from the times of its table 9."""
    profiled, published = papers.PASS_TIMES[row], papers.BUBBLE_RATES_ZB_H2[row]
    passes = PassTimes(*(profiled[name] for name in ("TF_ms", "TB_ms", "TW_ms", "Tcomm_ms")))
    simulated = simulate(lists(profiled["p"], profiled["m"]), "zb-h1", 1, passes)
    assert round(simulated.bubble_ratio, 4) == published
