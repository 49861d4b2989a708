"""ZeRO 2 and 3: bits of sums, what is gathered and when, and the state in other stages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import test_elastic_sums as elastic

ONE_STAGE = [name for name, case in elastic.CASES.items() if case[0][1] == 1 and "schedule" not in case[1]]


@pytest.mark.parametrize("name", ONE_STAGE)
def test_elastic_bits(ranks, corpus, name):
    alone = elastic.train(ranks, elastic.job(corpus, elastic.CASES[name], 1, 0))
    tensor = elastic.CASES[name][0][0]
    for zero in (2, 3):
        for replicas in (1, 2, 3, 4):
            there = elastic.train(ranks, elastic.job(corpus, elastic.CASES[name], replicas, zero))
            assert elastic.same(there, alone), (zero, replicas)
