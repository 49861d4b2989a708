"""Schedules of the soak: the same for the same seed, each possible, all ways drawn."""

import itertools

import pytest

from benchmarks.support.chaos_schedule import ERRORS, HANGS_IN, LAYOUTS, METHODS, STEPS, WAYS, schedule, short_form
from benchmarks.support.chaos_strikes import CARRIED_OUT
from manta.workers.spec.reading import parse_job_spec

MANY = range(300)


def test_chaos_schedule_is_reproduced_by_its_seed_and_number():
    assert [schedule(7, number) for number in MANY] == [schedule(7, number) for number in reversed(MANY)][::-1]
    assert schedule(7, 3) != schedule(8, 3)


@pytest.mark.parametrize("number", range(60 + len(short_form())))
def test_a_schedule_is_a_job_that_can_be_run_with_strikes_that_can_happen(number):
    drawn = schedule(7, number) if number < 60 else short_form()[number - 60]
    assert parse_job_spec(drawn.job.document(7)).layout.world_size == drawn.ranks
    assert 2 <= drawn.ranks <= 8
    assert 1 <= len(drawn.strikes) <= 3
    assert [strike.step for strike in drawn.strikes] == sorted(strike.step for strike in drawn.strikes)
    for strike in drawn.strikes:
        assert 0 <= strike.rank < drawn.ranks
        assert 0 <= strike.other < drawn.ranks
        assert 0 < strike.step < STEPS
        assert strike.way != "hang" or strike.phase in HANGS_IN, "a hang elsewhere is noticed much later"


def test_chaos_schedules_draw_every_fault_and_all_can_be_carried_out():
    drawn = {strike.way for number in range(len(WAYS)) for strike in schedule(7, number).strikes}
    assert drawn == set(WAYS) == set(CARRIED_OUT)


def test_chaos_schedules_draw_every_kind_of_layout():
    jobs = [schedule(7, number).job for number in MANY]
    assert {job.layout for job in jobs} == set(LAYOUTS)
    assert {(job.method, job.zero) for job in jobs} == set(itertools.product((None, *METHODS), range(4)))
    assert {(job.zero, job.adapters) for job in jobs} == set(itertools.product(range(4), (False, True)))
    assert {(job.zero, job.expert) for job in jobs if job.expert > 1} == set(itertools.product((0, 1), (2, 3, 4)))


def test_chaos_schedule_injects_each_error_at_most_once():
    for number in MANY:
        ways = [strike.way for strike in schedule(1, number).strikes]
        assert all(ways.count(way) <= 1 for way in ERRORS)


def test_short_chaos_schedule_covers_ten_kinds_of_faults():
    assert len({strike.way for each in short_form() for strike in each.strikes}) >= 10
