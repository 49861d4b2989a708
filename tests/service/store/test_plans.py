"""What was planned of a job is kept with its generations; what its steps took beside it, and said where they differ."""

import pytest

from manta.service.planner.drift import MEASURED_STEPS, SETTLING_STEPS
from manta.service.store import events, generations, jobs, metrics, plans
from manta.service.store.errors import JobNotFound

ENOUGH = SETTLING_STEPS + MEASURED_STEPS
PARALLEL = {"tensor": 1, "pipeline": 1, "data": 2}


def plan(step=0.1, parallel=None):
    parts = [{"name": "products", "seconds": step, "fraction": 1.0, "what": "", "help": None}]
    memory = {"total": 1000}
    of_step = {"step_seconds": step, "parts": parts, "memory_bytes": memory, "assumed": False, "has_gpus": False}
    return {"parallel": parallel or PARALLEL, "planned": of_step, "problem": None}


class Training:
    """One job's generations and steps."""

    def __init__(self, store, job_id):
        self.store, self.id, self.sequence, self.generation = store, job_id, 0, 0

    def begin(self, resume_step=0, of_plan=None):
        self.sequence = 0
        self.generation = self.store.write(
            lambda s: generations.begin(s, self.id, "submitted", False, resume_step=resume_step)
        )
        if of_plan is not None:
            self.store.write(lambda s: plans.store(s, self.id, self.generation, of_plan))

    def steps(self, first, count, seconds=0.1):
        tokens = self.store.write(lambda s: plans.full_tokens(jobs.get(s, self.id).spec))
        self.sequence += 1
        rows = [
            {"step": step, "step_seconds": seconds, "tokens_per_second": tokens / seconds, "forward_seconds": seconds}
            for step in range(first, first + count)
        ]
        self.store.write(lambda s: metrics.record(s, self.id, self.generation, 0, self.sequence, rows))
        last = first + count - 1
        return self.store.write(lambda s: plans.settle(s, self.id, self.generation, last))

    def newest(self):
        return self.store.write(lambda s: plans.newest(s, self.id))

    def drifts(self):
        with self.store.read() as session:
            return [each for each in events.page(session, self.id, limit=1000).items if each.type == plans.DRIFT]


@pytest.fixture
def training(store, started):
    return Training(store, started.id)


def test_steps_that_match_the_plan_are_measured_without_an_event(training):
    training.begin(of_plan=plan())
    assert not training.steps(1, ENOUGH - 1)
    assert training.newest().measured.last_step == ENOUGH - 1
    assert training.steps(ENOUGH, 1)
    kept = training.newest()
    assert (kept.generation, kept.plan["planned"]["step_seconds"], kept.drift) == (1, 0.1, None)
    assert (kept.measured.first_step, kept.measured.last_step) == (SETTLING_STEPS + 1, ENOUGH)
    assert kept.measured.step_seconds == pytest.approx(0.1)
    assert training.drifts() == []


def test_a_drift_is_an_event_that_names_the_part_once_a_layout(training):
    training.begin(of_plan=plan())
    assert training.steps(1, ENOUGH, seconds=0.3)
    (event,) = training.drifts()
    assert (event.generation, event.step, event.data["part"]) == (1, ENOUGH, "computing")
    assert event.data["ratio"] == pytest.approx(3.0) and event.data["parts"][0]["name"] == "computing"
    assert training.newest().drift["message"] == event.message
    training.begin(ENOUGH, plan())
    assert training.steps(ENOUGH + 1, ENOUGH, seconds=0.3)
    assert len(training.drifts()) == 1
    training.begin(2 * ENOUGH, plan(parallel={**PARALLEL, "data": 1}))
    assert training.steps(2 * ENOUGH + 1, ENOUGH, seconds=0.3)
    assert [each.generation for each in training.drifts()] == [1, 3]


def test_drift_is_judged_once_a_late_plan_arrives(training):
    training.begin()
    assert not training.steps(1, ENOUGH, seconds=0.3)
    training.store.write(lambda s: plans.store(s, training.id, 1, plan()))
    assert training.steps(ENOUGH + 1, 1)
    assert len(training.drifts()) == 1


def test_thinned_out_rows_do_not_count_as_enough_steps(training):
    training.begin(of_plan=plan())
    assert not training.steps(ENOUGH, ENOUGH - 1)
    assert training.steps(2 * ENOUGH, 1)
    assert training.newest().measured.first_step == ENOUGH + SETTLING_STEPS


def test_generation_that_could_not_be_planned_is_measured(training):
    nothing = {"parallel": PARALLEL, "planned": None, "problem": "nobody knows"}
    training.begin(of_plan=nothing)
    assert training.steps(1, ENOUGH, seconds=0.3)
    kept = training.newest()
    assert (kept.plan, kept.drift, kept.measured.step_seconds) == (nothing, None, pytest.approx(0.3))


def test_a_plan_of_another_release_costs_no_metrics(training):
    training.begin(of_plan={"parallel": PARALLEL, "planned": {"seconds": 1}, "problem": None})
    assert training.steps(1, ENOUGH)
    assert training.drifts() == []


def test_measurement_uses_only_steps_that_the_generation_committed_itself(training):
    training.begin(of_plan=plan())
    training.steps(1, 10, seconds=9.0)
    training.begin(10, plan())
    assert training.steps(11, ENOUGH)
    assert training.newest().measured.step_seconds == pytest.approx(0.1)


def test_plan_of_the_same_layout_and_nodes_is_used_again(training):
    training.begin(of_plan={**plan(), "on": [[2, 8]]})
    training.begin(5)
    with training.store.read() as session:
        assert plans.of_layout(session, training.id, PARALLEL, [[2, 8]])["planned"]["step_seconds"] == 0.1
        assert plans.of_layout(session, training.id, {**PARALLEL, "data": 1}, [[2, 8]]) is None
        assert plans.of_layout(session, training.id, PARALLEL, [[2, 4]]) is None
        assert [plans.is_stored(session, training.id, number) for number in (1, 2, 3)] == [True, False, False]


def test_job_that_never_began_has_no_plan(store, started):
    with store.read() as session:
        assert plans.newest(session, started.id) is None
        with pytest.raises(JobNotFound):
            plans.newest(session, "job_000000000000")
