"""What jobs took is in the database; from there the next plans have it."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from sqlalchemy import update

from manta.service.job.context import JobContext
from manta.service.job.planning import JobMeasurements, plan_generation
from manta.service.planner.hardware import ASSUMED_CORE, MACHINES, Cluster, Core
from manta.service.planner.job_plan import planned
from manta.service.planner.machines import Calibrated, ignore_earlier_jobs, save
from manta.service.planner.refinement import MIN_JOBS, moved
from manta.service.states import JobState
from manta.service.store import Generation, generations, jobs, plans, ranks
from manta.workers.liveness.rank_samples import EVERY_SECONDS, RankSample
from manta.workers.protocol.messages import AgentDescription
from manta.workers.system.resources import node_type
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.measured_jobs import ENOUGH, begin, train, train_on


class Jobs:
    """Jobs of one rank each, on nodes without GPUs."""

    def __init__(self, store, cluster, submit):
        self.store, self.cluster, self.submit = store, cluster, submit

    def planned(self, **changes):
        """A job that has begun, on node one; its id."""
        job = JobContext.of(self.store, self.cluster, self.submit(**changes))
        begin(self.store, job.id)
        place = {"rank": 0, "tensor": 0, "pipeline": 0, "data": 0, "generation": 1, "state": "running", "node": "one"}
        self.store.write(lambda session: ranks.replace(session, job.id, [place]))
        where = {0: AgentDescription("host", "127.0.0.1", 1, node="one", cores=2)}
        asyncio.run(plan_generation(job, 1, where))
        return job.id

    def next_plan(self):
        """Of a job that begins now, and ends at once."""
        job = self.planned()
        self.store.write(lambda session: generations.end(session, job, 1))
        return self.plan_of(job)

    def plan_of(self, job_id):
        return self.store.query(plans.newest, job_id).plan["planned"]

    def seen(self):
        return self.store.query(JobMeasurements.read, self.folder)

    @property
    def folder(self):
        return self.cluster.paths.machines


@pytest.fixture
def trained(store, submit, tmp_path):
    return Jobs(store, FakeCluster(tmp_path, one=2), submit)


def test_measured_jobs_refine_the_plan_of_the_next_one(trained):
    for _ in range(MIN_JOBS - 1):
        train(trained.store, trained.planned())
    old = trained.next_plan()
    train(trained.store, trained.planned())
    new = trained.next_plan()
    assert (old["refined_by_jobs"], new["refined_by_jobs"]) == (0, MIN_JOBS)
    assert new["step_seconds"] == pytest.approx(2 * old["step_seconds"], rel=0.05)
    assert old["assumed"] and not new["assumed"] and new["machine"] == node_type()


def test_jobs_planned_with_refined_constants_keep_them_stable(trained):
    for _ in range(MIN_JOBS):
        train(trained.store, trained.planned())
    first = trained.next_plan()
    for _ in range(2):
        train(trained.store, trained.planned(), slower=1.0)
    second = trained.next_plan()
    assert second["refined_by_jobs"] == MIN_JOBS + 2
    assert second["step_seconds"] == pytest.approx(first["step_seconds"], rel=0.02)


def test_measured_cpu_jobs_do_not_refine_gpu_plans(trained):
    for _ in range(MIN_JOBS):
        train(trained.store, trained.planned())
    cluster = Cluster(MACHINES["h100-80gb"], 1, 8)
    assert trained.seen().cluster(cluster) == cluster


def test_nodes_of_all_kinds_are_refined(trained, make_spec, submit):
    h100, l40s = (Cluster(MACHINES[name], 1, 8, name) for name in ("h100-80gb", "l40s-48gb"))
    model = {"layers": 8, "hidden_size": 4096, "heads": 32, "sequence_length": 2048, "vocabulary_size": 51200}
    spec = make_spec(
        model=model, train={"steps": 1, "micro_batch_size": 1, "global_batch_size": 4, "precision": "bf16"}
    )
    for _ in range(MIN_JOBS):
        train_on(trained.store, submit().id, spec, l40s)
    cluster = trained.seen().cluster(replace(h100, others=(l40s,)))
    assert cluster.machine == h100.machine and cluster.others[0].machine.refined.jobs == MIN_JOBS
    assert planned(spec, replace(h100, others=(l40s,)))["dependence"] is None


def test_disturbed_job_does_not_refine_constants(trained):
    one, two, three = (trained.planned() for _ in range(3))
    for each in (one, three):
        in_state(trained.store, each, JobState.RUNNING)
    train(trained.store, two, end=False)
    assert not trained.seen().by_type, "others run on its node"
    trained.store.write(lambda session: [generations.end(session, each, 1) for each in (one, two, three)])
    slow = [{"rank": 0, "own_seconds": 2.0, "usual_seconds": 1.0, "sentence": "slow"}]
    store_sample(trained.store, one, slow)
    train(trained.store, one)
    assert not trained.seen().by_type, "it has a straggler"
    four = trained.planned()
    store_sample(trained.store, four, slow, generation=0)  # which it had before, elsewhere
    store_sample(trained.store, four, [], at=1.0 + EVERY_SECONDS)
    train(trained.store, four)
    assert [each.job for each in trained.seen().by_type[node_type()]] == [four]


def test_newest_measured_job_is_the_one_that_began_last():
    assert JobMeasurements({"a": [SimpleNamespace(at=3.0), SimpleNamespace(at=5.0)], "b": []}).newest("a") == 5.0


def test_jobs_waiting_for_places_do_not_disturb_the_measurement_of_others(trained):
    """Their last generation is on the nodes of one that runs, and its end was not noted."""
    waiting, runs = trained.planned(), trained.planned()
    in_state(trained.store, runs, JobState.RUNNING)
    train(trained.store, runs)
    assert [each.job for each in trained.seen().by_type[node_type()]] == [runs] != [waiting]


def in_state(store, job_id, state):
    store.write(lambda session: setattr(jobs.get(session, job_id), "state", state))


def store_sample(store, job_id, stragglers, generation=1, at=1.0):
    sample = RankSample(ENOUGH, 1.0, None, "", tuple(stragglers))
    store.write(lambda session: ranks.store_numbers(session, job_id, generation, sample, at))


def keep(store, job_id, generation, planned):
    plan = {"parallel": {}, "planned": planned, "problem": None}
    store.write(lambda session: plans.store(session, job_id, generation, plan))


def test_measured_job_counts_once_with_its_newest_measurement(trained, store):
    job = trained.planned()
    train(store, job)
    plan = trained.plan_of(job)
    for number in (2, 3):
        assert begin(store, job) == number
        keep(store, job, number, plan)
        if number == 2:
            train(store, job, slower=3.0)
    (said,) = trained.seen().by_type[node_type()]
    assert said.rows[0].measured == pytest.approx(3 * said.rows[0].planned)


def test_plans_stored_by_another_release_do_not_refine_constants(trained, store):
    job = trained.planned()
    train(store, job)
    plan = {**trained.plan_of(job), "dependence": {"constants": 8}}
    keep(store, job, 1, plan)
    assert trained.seen().by_type == {}
    del plan["dependence"]
    keep(store, job, 1, plan)
    assert trained.seen().by_type == {}


def test_refinements_by_jobs_can_be_discarded(trained):
    for _ in range(MIN_JOBS):
        train(trained.store, trained.planned())
    assert trained.seen().of_type(node_type(), trained.folder).refined.jobs == MIN_JOBS
    trained.store.write(
        lambda session: session.execute(update(Generation).values(started_at=Generation.started_at - 1))
    )
    path = ignore_earlier_jobs(trained.folder)  # the times of files lag behind the clock by some milliseconds
    assert trained.seen().by_type == {}
    os.utime(path, (0, 0))
    assert trained.seen().by_type


def test_calibration_replaces_refined_constants(trained):
    for _ in range(MIN_JOBS):
        train(trained.store, trained.planned())
    known = trained.seen().of_type(node_type(), trained.folder)
    assert set(moved(known)) and known.core.operation_seconds > ASSUMED_CORE.operation_seconds
    path = save(
        trained.folder, Calibrated(node_type(), "Abacus", 2, Core(9e10, 1.8e11, 30.0, 2e10, 2e-5, 2e9, 4e-5, 0.9))
    )
    assert trained.seen().of_type(node_type(), trained.folder) is None
    assert trained.next_plan()["refined_by_jobs"] == 0
    path.write_text("{}")
    assert trained.seen().of_type(node_type(), trained.folder) is None
