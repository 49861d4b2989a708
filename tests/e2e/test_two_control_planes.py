"""Two control planes on one PostgreSQL and one Ray: one takes over what the other has, however that ends, and the job
never notices; both answer whatever is asked about any job. And of two services with nothing in common one is ended."""

import signal

import psutil
import pytest
from s3_server import environment_of

from manta.api.cli.service import stop_service
from manta.api.serving.local_service import running_service
from manta.service.cluster.ray_head import RayHead
from tests.e2e.manta import EVERY_STEP, PAIR, Manta
from tests.e2e.traces import traces_of


@pytest.fixture
def planes(on_postgres, tmp_path_factory, corpus, monkeypatch, object_store):
    """The first has a Ray of its own, which the second uses too. They share no home: checkpoints and logs are in the
    object store."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(on_postgres.paths.ray_token))
    address = RayHead(on_postgres.home).record().address
    home = tmp_path_factory.mktemp("second")
    try:
        yield (
            on_postgres,
            Manta(
                home,
                corpus,
                slots=None,
                database=on_postgres.database,
                ray=address,
                environment={**environment_of(object_store.url), "MANTA_CHECKPOINTS": "s3://checkpoints/manta"},
            ),
        )
    finally:
        stop_service(home)
        on_postgres.end_all_jobs()


def taken_over(by, job, times):
    """Wait until the job was taken over so often, as `by` says."""
    by.until(f"take-over {times}", lambda: len(by.events(job, "adopted")) == times)


def goes_on(manta, job):
    step = manta.client.job(job).step
    manta.until("another step", lambda: manta.client.job(job).step > step)


def gives_way(manta, job):
    """Whether it says so: at its next write, or when it looks who owns what, whichever comes first."""
    said = (manta.home / "logs" / "service.log").read_text()
    sentences = ("is no longer owned by this control plane", "is owned by another control plane now")
    return any(f"{job} {sentence}" in said for sentence in sentences)


@pytest.mark.soak  # what is decided and written: tests/service/leases
def test_job_keeps_training_whatever_happens_to_its_control_plane(planes):
    first, second = planes
    job = second.submit(second.spec(steps=20_000, layout=PAIR))  # and the first one places it
    first.hold(job, 1, step=3)
    pids = first.pids(job)
    assert second.pids(job) == pids

    first.kill_service()
    taken_over(second, job, 1)
    goes_on(second, job)

    first.start()
    other = first.submit(first.spec(steps=20_000, layout=(1, 1, 1)))  # and the second one places it
    first.until_step(other, 1)
    first.client.cancel(other)
    first.until_state(other, "CANCELLED")

    second.kill_service(signal.SIGTERM)
    taken_over(first, job, 2)
    goes_on(first, job)

    second.start()
    stale = psutil.Process(int(str(running_service(first.home)["pid"])))
    stale.send_signal(signal.SIGSTOP)
    try:
        taken_over(second, job, 3)
        goes_on(second, job)
    finally:
        stale.send_signal(signal.SIGCONT)
    first.until("giving way", lambda: gives_way(first, job))
    goes_on(first, job)

    seen = first.client.job(job)
    assert (seen.state, seen.generation, seen.restarts) == ("RUNNING", 1, 0)
    assert first.pids(job) == pids
    steps = [step for step, _, _ in second.curve(job)]
    assert steps == list(range(1, len(steps) + 1))
    assert {event.generation for event in first.events(job, "generation_started")} == {1}
    first.client.cancel(job)
    second.until_state(job, "CANCELLED")
    second.until("the end of its processes", lambda: not first.trainers() and not first.agents())


def printed(manta, job, **options):
    """All lines of the job, page by page."""
    texts, cursor = [], None
    while True:
        page = manta.client.logs(job, cursor=cursor, **options)
        texts += [(line.rank, line.text) for line in page.items]
        if page.next_cursor is None:
            return texts
        cursor = page.next_cursor


def prints_something(manta, job, times):
    """Have rank 1 print a traceback, and the job recover from that."""
    manta.inject(job, "exception", 1)
    manta.until("the recovery", lambda: len(manta.events(job, "recovered")) == times)


@pytest.mark.soak  # what is kept and read: tests/service/log_archive
def test_both_control_planes_serve_all_logs_and_a_killed_one_loses_no_line(planes, object_store):
    first, second = planes
    job = first.submit(first.spec(steps=20_000, layout=PAIR, checkpoint=EVERY_STEP))
    first.leave_room(job)
    prints_something(second, job, 1)
    mine = first.until("lines", lambda: printed(first, job))
    second.until("the same lines", lambda: printed(second, job) == printed(first, job))
    object_store.meddle = lambda head: "cut"
    try:
        prints_something(first, job, 2)
        before = printed(first, job)
        assert before[: len(mine)] == mine and len(before) > len(mine), "the store holds nothing up"
        first.kill_service()
        taken_over(second, job, 1)
    finally:
        object_store.meddle = lambda head: None
    second.until("all that the dead one knew", lambda: printed(second, job)[: len(before)] == before)
    second.client.cancel(job)
    second.until_state(job, "CANCELLED")
    first.start()
    first.until("the lines from the store", lambda: printed(first, job) == printed(second, job))
    followed = [(line.rank, line.text) for line in first.client.follow_logs(job)]
    assert followed == printed(second, job) and len(followed) >= len(before)
    assert not list(second.home.rglob("rank-*.jsonl")), "what is kept leaves the disk"
    second.client.delete(job)
    first.until("its files being gone", lambda: not list(first.home.rglob(f"{job}/logs/rank-*")))


# The last one that uses `on_postgres`: it is gone afterwards.
@pytest.mark.soak  # what is ended and what stays: tests/api/cli/test_service.py
def test_down_of_one_service_leaves_the_other_and_its_job_alone(manta, on_postgres):
    job, its_own = manta.submit(manta.spec(layout=PAIR)), on_postgres.submit(on_postgres.spec(20_000, layout=PAIR))
    manta.until_step(job, 1)
    on_postgres.until_step(its_own, 1)
    assert stop_service(on_postgres.home)
    assert traces_of(on_postgres.home) == []
    assert not stop_service(on_postgres.home)
    ended = manta.until_state(job, "SUCCEEDED")
    assert ended.restarts == 0
