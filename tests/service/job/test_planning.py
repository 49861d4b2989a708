"""A generation is planned where it runs, beside the training, and no failure of that is the job's."""

import asyncio
from dataclasses import replace

import pytest

from manta.service.job import planning
from manta.service.job.context import JobContext
from manta.service.job.planning import plan_generation
from manta.service.planner.machines import InvalidCalibration
from manta.service.store import generations, plans
from manta.workers.protocol.messages import AgentDescription
from tests.service.support.fake_cluster import FakeCluster


@pytest.fixture
def job(store, submit, tmp_path):
    """A job of four ranks in its first generation."""
    cluster = FakeCluster(tmp_path, one=2, two=2)
    context = JobContext.of(store, cluster, submit(parallel={"tensor": 2, "data": 2}))
    store.write(lambda s: generations.begin(s, context.id, "submitted", False))
    return context


WHERE = {
    rank: AgentDescription(f"host{rank // 2}", "127.0.0.1", 1, node="one" if rank < 2 else "two", cores=2)
    for rank in range(4)
}


def plan(job, generation=1, where=None):
    asyncio.run(plan_generation(job, generation, WHERE if where is None else where))
    return job.record.store.query(plans.newest, job.id)


def test_plan_of_a_running_job_is_for_the_nodes_it_runs_on(job, monkeypatch):
    clusters = []
    planned = planning.planned
    monkeypatch.setattr(planning, "planned", lambda spec, cluster: clusters.append(cluster) or planned(spec, cluster))
    kept = plan(job)
    assert (kept.generation, kept.plan["problem"]) == (1, None)
    assert kept.plan["planned"]["step_seconds"] > 0 and kept.plan["parallel"]["tensor"] == 2
    (cluster,) = clusters
    assert (cluster.nodes, cluster.gpus_per_node, cluster.machine.cores) == (2, 2, 2)


def test_plan_of_a_running_job_uses_the_threads_of_its_ranks(job, monkeypatch):
    """Which may have been decided after its spec was read."""
    threads = []

    def noted(spec, cluster):
        threads.append(spec.resources.threads)
        raise planning.NotPlanned("enough is known")

    monkeypatch.setattr(planning, "planned", noted)
    job.gang.threads = 2
    plan(job)
    assert threads == [2]


def test_layout_of_a_running_job_is_planned_once(job, monkeypatch):
    first = plan(job)
    monkeypatch.setattr(planning, "planned", lambda *_: pytest.fail("planned again"))
    job.record.store.write(lambda s: generations.begin(s, job.id, "rank_died", True))
    second = plan(job, 2)
    assert (second.generation, second.plan) == (2, first.plan)
    assert plan(job, 2).plan == first.plan


def test_plan_of_a_layout_is_made_again_on_other_nodes(job):
    """Else what its steps take there would be told of the nodes that it was on before."""
    first = plan(job)
    job.record.store.write(lambda s: generations.begin(s, job.id, "node_lost", True))
    larger = {rank: replace(place, cores=16) for rank, place in WHERE.items()}
    second = plan(job, 2, larger)
    assert second.plan["planned"]["cluster"]["cores"] == 16 != first.plan["planned"]["cluster"]["cores"]


def test_plan_that_failed_is_tried_again_in_the_next_generation(job, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(planning, "this_node", lambda _: (_ for _ in ()).throw(InvalidCalibration("cut short")))
        assert "cut short" in plan(job).plan["problem"]
    job.record.store.write(lambda s: generations.begin(s, job.id, "rank_died", True))
    assert plan(job, 2).plan["problem"] is None


def test_plan_for_gpus_of_an_unknown_type_has_a_problem_text(job):
    kept = plan(job, where={0: AgentDescription("host", "127.0.0.1", 1, node="one", devices=("0",))})
    assert kept.plan["planned"] is None
    assert "could not be planned" in kept.plan["problem"] and "Ray does not know" in kept.plan["problem"]


def test_errors_of_planning_are_stored_as_a_problem_and_never_raised(job, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(planning, "planned", broken)
    kept = plan(job)
    assert (kept.plan["planned"], "ZeroDivisionError" in kept.plan["problem"]) == (None, True)
    monkeypatch.setattr(plans, "store", broken)
    job.record.store.write(lambda s: generations.begin(s, job.id, "rank_died", True))
    assert plan(job, 3).generation == 1
