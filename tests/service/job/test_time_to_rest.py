"""A trainer has as long to come to rest as its snapshot takes."""

from __future__ import annotations

import pytest
from engine_specs import spec

from manta.service.job.generation import REST_SECONDS, time_to_rest

LARGE = {"layers": 32, "hidden_size": 4096, "heads": 32, "sequence_length": 8192, "vocabulary_size": 128_256}


def seconds(**sections):
    return time_to_rest(spec(**sections)) - REST_SECONDS


def test_a_small_snapshot_takes_no_time_and_one_of_seven_billion_parameters_a_minute_and_more():
    assert 0 < seconds() < 0.1
    alone = seconds(model=LARGE)
    assert 80 < alone < 90
    assert seconds(model=LARGE, parallel={"data": 4}) == pytest.approx(alone / 4)
    assert seconds(model=LARGE, parallel={"data": 4, "zero": 0}) == alone
    assert alone / 4 < seconds(model=LARGE, parallel={"pipeline": 4}) < alone / 3, "of the rank that has most"


def test_time_to_rest_is_not_extended_without_snapshots_or_known_size():
    assert seconds(model=LARGE, checkpoint={"snapshots": "off"}) == 0
    assert seconds(model={"family": "custom", "entrypoint": "mine:build"}) == 0
