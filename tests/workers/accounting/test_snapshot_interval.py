"""How many steps lie between two snapshots follows from what each costs."""

from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from manta.workers.accounting.state_costs import FREE_SECONDS, STALL_SHARE, steps_between

seconds = st.floats(1e-6, 1e3)


@given(seconds, seconds)
def test_the_fewest_steps_that_keep_the_stalls_to_their_share(stall, step):
    every = steps_between(stall, step)
    assert every >= 1
    if stall > FREE_SECONDS:
        assert stall / every <= STALL_SHARE * step * (1 + 1e-9)
    if every > 1:
        assert stall > FREE_SECONDS
        assert stall / (every - 1) > STALL_SHARE * step * (1 - 1e-9)


@given(seconds, seconds, seconds)
def test_a_longer_stall_never_means_more_snapshots(stall, more, step):
    assume(math.isfinite(stall + more))
    assert steps_between(stall + more, step) >= steps_between(stall, step)
