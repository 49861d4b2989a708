"""Published plans of other systems are in our space where we say so, and none is faster than what the search finds."""

import argparse

import pytest

from benchmarks import automatic_plans
from benchmarks.automatic_plans import ALPA, best_plan, ideal_seconds, job_of, p3_cluster
from service.planner.memory import fits
from service.planner.search import plan_of
from service.planner.software import engine_on
from workers.spec.rules import find_problems


@pytest.mark.parametrize("case", [case for case in ALPA if case.layout is not None], ids=lambda case: case.name)
def test_a_plan_that_is_in_our_space_obeys_the_rules_and_fits(case):
    spec = job_of(case, case.layout, case.micro_batch)
    assert find_problems(spec) == []
    assert spec.layout.world_size == case.gpus
    assert fits(spec, p3_cluster(case.gpus)).fits


@pytest.mark.parametrize("case", ALPA[:3], ids=lambda case: case.name)
def test_none_is_faster_than_what_is_found(case):
    cluster = p3_cluster(case.gpus)
    best = best_plan(job_of(case), cluster)
    theirs = plan_of(job_of(case, case.layout, case.micro_batch), cluster, engine_on(cluster.machine))
    assert ideal_seconds(best) <= best.time.seconds <= theirs.time.seconds


@pytest.mark.soak
def test_all_cases_are_searched():
    report = automatic_plans.measure(argparse.Namespace(seed=1))
    ratios = [figure.value for name, figure in report.figures.items() if name.endswith("_to_best")]
    assert len(ratios) == 12 and min(ratios) >= 1
    assert 0 < report.figures["alpa_2.6b_costs_at_most"].value < 0.05
    assert 0 < report.figures["nnscaler_t5_costs"].value < 0.5
