"""The data of queued jobs is checked before they are placed; a file system that does not answer delays its own job."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from manta.service.control import data_checks
from manta.service.control.scheduler import Scheduler
from manta.service.store.checkpoints import begin, complete
from manta.workers.data import roots
from tests.service.support.queue import LARGE, has, job_now
from tests.service.support.waiting import reached


def test_job_with_bad_data_fails_before_placement_with_the_path(store, submit, look, cluster):
    job = submit(data={"source": "text", "paths": ["/nowhere/to/be/found.txt"]})
    assert look() == []
    stored = job_now(store, job)
    assert (stored.state, stored.reason) == ("FAILED", "bad_data")
    assert "/nowhere/to/be/found.txt" in stored.message
    assert cluster.groups.acquired == []


AWAY = {"source": "text", "paths": ["/away"]}


async def until_placed(scheduler, placed, job):
    """PlacementDecision at the queue until `job`, and no other, is placed."""
    async with asyncio.timeout(60):
        while not placed:
            assert await scheduler._round()
    assert placed == [job.id]


async def until_none_waits(scheduler):
    """PlacementDecision at the queue until each job has been placed or refused."""
    async with asyncio.timeout(60):
        while await scheduler._round():
            await asyncio.sleep(0.001)


@pytest.fixture
def silent(store, cluster, monkeypatch):
    """A file system that does not answer for `paths` until `answers` is set, what was looked at there, a scheduler, and
    the jobs that it has placed."""
    answers, looked, placed = threading.Event(), [], []

    def check(spec):
        if spec.data.paths:
            looked.append(spec.data.paths)
            answers.wait(60)

    monkeypatch.setattr(data_checks, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(roots, "check_data", check)
    scheduler = Scheduler(store, cluster, lambda job, generation: placed.append(job.id))
    yield SimpleNamespace(answers=answers, looked=looked, placed=placed, scheduler=scheduler)
    answers.set()


@pytest.mark.parametrize("is_remote", [False, True])
async def test_unresponsive_data_delays_its_job_and_briefly_the_queue(
    store, submit, silent, cluster, monkeypatch, is_remote
):
    """What a node is asked may take a minute, and the next node is asked then."""
    slow, fine, node_answers = submit(data=AWAY), submit(), asyncio.Event()

    async def problem(spec, folders, begins):
        if spec["data"]["paths"]:
            await node_answers.wait()

    cluster.is_remote, cluster.daemons.problem_of_data = is_remote, problem
    assert await silent.scheduler._round() and silent.placed == []
    monkeypatch.setattr(data_checks, "TURN_SECONDS", 0.0)
    await until_placed(silent.scheduler, silent.placed, fine)
    assert job_now(store, slow).reason == "data_silent"
    silent.answers.set()
    node_answers.set()
    await until_none_waits(silent.scheduler)
    assert silent.placed == [fine.id, slow.id]


async def test_unresponsive_data_delays_the_queue_one_turn_for_a_whole_sweep(store, submit, silent):
    """A sweep on a file system that hangs: one look at the same files is enough, and other files there get a moment."""
    sweep = [submit(data={"source": "text", "paths": ["/away/a"]}) for _ in range(3)]
    beside, fine = submit(data={"source": "text", "paths": ["/away/b"]}), submit()
    await silent.scheduler._round()
    assert silent.placed == [], "the first one has its turn"
    look = silent.scheduler._data_checks._under_way[sweep[0].id]
    look.began -= data_checks.TURN_SECONDS
    await until_placed(silent.scheduler, silent.placed, fine)
    await reached(lambda: len(silent.looked) >= 2)
    assert sorted(silent.looked) == [("/away/a",), ("/away/b",)]
    assert {job_now(store, each).reason for each in (*sweep, beside)} == {"data_silent"}
    silent.answers.set()
    await until_none_waits(silent.scheduler)
    assert sorted(silent.placed[1:]) == sorted(each.id for each in (*sweep, beside))


def test_corpus_is_checked_on_the_nodes_where_ranks_will_run(store, submit, look, cluster):
    """The control plane of a cluster elsewhere may not see it, and a node that does not answer proves nothing."""
    cluster.is_remote = True
    paths = {"source": "text", "paths": ["/on/the/nodes/only"]}
    bad, good, later = (submit(name=name, data=paths) for name in ("bad", "good", "later"))
    asked = []

    async def problem(spec, folders, begins):
        asked.append((spec["name"], spec["data"]["paths"], folders, begins))
        return "it is empty" if spec["name"] == "bad" else None

    cluster.daemons.problem_of_data = problem
    assert [job for job, _ in look()] == [good.id, later.id]
    assert asked[0] == ("bad", ["/on/the/nodes/only"], None, True)
    assert (job_now(store, bad).state, job_now(store, bad).message) == ("FAILED", "it is empty")


def test_initial_weights_of_a_job_with_a_checkpoint_are_not_needed_any_more(store, submit, look, monkeypatch):
    looked = []
    monkeypatch.setattr(roots.DataRoots, "check", lambda self, spec, begins: looked.append((spec.name, begins)))
    saved, new = submit(name="saved"), submit(name="new")
    store.write(lambda session: complete(session, begin(session, saved.id, 0, 5, "/path").id, 100))
    assert len(look()) == 2
    assert sorted(looked) == [("new", True), ("saved", False)] and new


def test_data_of_a_waiting_job_is_checked_once_and_again_before_placement(store, submit, cluster, nodes, monkeypatch):
    looked, placed = [], []
    monkeypatch.setattr(roots.DataRoots, "check", lambda self, spec, begins: looked.append(spec.layout.data))
    never, later = submit(parallel={"data": 12}, train=LARGE), submit(parallel={"data": 2})
    scheduler = Scheduler(store, cluster, lambda job, generation: placed.append(job.id))
    has(nodes, 8, free=0)
    written = []
    for _ in range(3):
        asyncio.run(scheduler._round())
        written.append((job_now(store, never).updated_at, job_now(store, later).updated_at))
    assert (looked, placed) == ([2], []), "and that of a job that the cluster could never hold not at all"
    assert len(set(written)) == 1, "and what it says of itself is not written again"
    has(nodes, 8)
    asyncio.run(scheduler._round())
    assert (looked, placed) == ([2, 2], [later.id])
    has(nodes, 12)
    asyncio.run(scheduler._round())
    assert (looked, placed) == ([2, 2, 12], [later.id, never.id])
