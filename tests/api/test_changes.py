"""Streams hear of what is new, with one look for all of them, and nobody looks while there is no stream."""

import asyncio
import shutil

import pytest

from manta.api.streams import POLL_SECONDS, Changes, StoredVersions, Watched
from manta.service.logs.pages import LogsInHome, log_folder
from manta.service.states import JobState
from manta.service.store import Store, deletion, events, jobs
from tests.service.support.virtual_time import run_with_answers_at_once

ONE, OTHER = Watched("one"), Watched("other")


class Versions:
    """What is watched, and how often it was looked at."""

    def __init__(self):
        self.now, self.looks, self.broken = {ONE: 1, OTHER: 1}, [], False

    def __call__(self, watched):
        self.looks.append(sorted(each.job for each in watched))
        if self.broken:
            raise OSError("the database does not answer")
        return {each: self.now[each] for each in watched}


@pytest.fixture
def versions():
    return Versions()


def test_logs_of_a_job_that_has_printed_nothing_have_a_version_too(tmp_path):
    assert LogsInHome(tmp_path).version("job_000000000001") == frozenset()
    (log_folder(tmp_path, "job_000000000001")).mkdir(parents=True)
    (log_folder(tmp_path, "job_000000000001") / "0.log").write_text("abc")
    assert LogsInHome(tmp_path).version("job_000000000001") == {("0.log", 3)}


def test_change_watch_polls_once_for_all_streams_and_wakes_only_those_with_news(versions):
    async def main():
        changes = Changes(versions)
        with changes.of(ONE) as first, changes.of(ONE) as second, changes.of(OTHER) as third:
            await asyncio.sleep(POLL_SECONDS / 2)
            for each in (first, second, third):
                each.clear()
            versions.looks.clear()
            versions.now[ONE] = 2
            await asyncio.sleep(POLL_SECONDS)
            assert [each.is_set() for each in (first, second, third)] == [True, True, False]
            assert versions.looks == [["one", "other"]]
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.sleep(POLL_SECONDS)
        versions.looks.clear()
        await asyncio.sleep(100 * POLL_SECONDS)
        assert versions.looks == []

    run_with_answers_at_once(main())


def test_new_subscriber_of_changes_is_woken_once(versions):
    async def main():
        changes = Changes(versions)
        with changes.of(ONE):
            await asyncio.sleep(POLL_SECONDS / 2)
            with changes.of(OTHER) as late:
                await asyncio.sleep(POLL_SECONDS)
                assert late.is_set()
                late.clear()
                await asyncio.sleep(5 * POLL_SECONDS)
                assert not late.is_set()
        await asyncio.sleep(2 * POLL_SECONDS)

    run_with_answers_at_once(main())


def test_change_watch_wakes_all_streams_when_the_database_answers_again(versions, caplog):
    async def main():
        changes = Changes(versions)
        with changes.of(ONE) as first, changes.of(OTHER) as second:
            await asyncio.sleep(POLL_SECONDS / 2)
            for versions.broken, notified in ((True, False), (False, True), (True, False), (False, True)):
                for each in (first, second):
                    each.clear()
                await asyncio.sleep(5 * POLL_SECONDS)
                assert [each.is_set() for each in (first, second)] == [notified, notified]
        await asyncio.sleep(2 * POLL_SECONDS)

    run_with_answers_at_once(main())
    assert len(caplog.records) == 2


def test_versions_change_with_events_states_files_and_the_end_of_a_job(service, tmp_path):
    store, job, other = service.store, service.submit()["id"], service.submit()["id"]
    logs = log_folder(tmp_path, job)
    logs.mkdir(parents=True)
    watched = [Watched(job), Watched(other), Watched(), Watched(job, logs=True)]
    look = StoredVersions(lambda: store, lambda: LogsInHome(tmp_path))
    look(watched)

    def changed_by(operation):
        before = look(watched)
        operation()
        after = look(watched)
        return [before[each] != after[each] for each in watched]

    assert changed_by(lambda: None) == [False] * 4
    tell = lambda: store.write(lambda session: events.append(session, job, "told", "news"))  # noqa: E731
    assert changed_by(tell) == [True, False, True, False]
    assert changed_by(lambda: (logs / "rank-0.jsonl").write_text("line")) == [False, False, False, True]
    move = lambda: store.write(lambda session: jobs.transition(session, other, JobState.CANCELLED))  # noqa: E731
    assert changed_by(move) == [False, True, True, False]
    gone = lambda: store.write(lambda s: (deletion.begin(s, other), deletion.end(s, other)))  # noqa: E731
    assert changed_by(gone)[1] is True


def test_change_watch_reports_everything_as_new_after_a_database_switch(service, empty_database, tmp_path):
    other = Store(f"sqlite:///{shutil.copy(empty_database, tmp_path / 'other.db')}")
    current, watched = [service.store], [Watched()]
    look = StoredVersions(lambda: current[0], lambda: LogsInHome(service.control.home))
    assert look(watched) == {}
    assert look(watched) == look(watched) != {}
    current[0] = other
    assert look(watched) == {}, "whatever its numbers are"
    assert look(watched) == look(watched) != {}
    other.close()
