"""A notice is passed on once; a metadata service that does not answer is asked again."""

import logging
import threading

import pytest
from metadata_service import MetadataService

from manta.workers.node import cloud_notices
from manta.workers.node.cloud_notices import MetadataSource
from manta.workers.node.notices import Notice, NoticeWatch, SourceUnavailable

PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(cloud_notices, "ANSWER_SECONDS", 30.0)  # however busy the machine is
    made = MetadataService()
    yield made
    made.close()


@pytest.fixture
def watch(service):
    noticed = []
    made = NoticeWatch(MetadataSource("gcp", service.url), noticed.append, lambda: noticed.append(None), 0.02)
    made.noticed = noticed
    yield made
    made.stop()


def test_notice_watch_passes_on_each_different_notice_once(service, watch):
    for _ in range(3):
        watch.poll()
    assert watch.noticed == []
    service.answers = {MAINTENANCE: "TERMINATE_ON_HOST_MAINTENANCE"}
    watch.poll()
    watch.poll()
    service.answers[PREEMPTED] = "TRUE"
    watch.poll()
    watch.poll()
    assert [notice.seconds for notice in watch.noticed] == [60.0, 30.0]


def test_notice_that_no_longer_holds_is_withdrawn_once_and_can_return(service, watch):
    for answer in ("TRUE", "FALSE", "FALSE", "TRUE"):
        service.answers = {PREEMPTED: answer}
        watch.poll()
    assert [notice and notice.seconds for notice in watch.noticed] == [30.0, None, 30.0]


def test_notice_is_not_withdrawn_while_its_source_does_not_answer(service, watch):
    for answer in ("TRUE", 503, "TRUE"):
        service.answers = {PREEMPTED: answer}
        watch.poll()
    assert [notice.seconds for notice in watch.noticed] == [30.0]


def test_notice_without_a_deadline_is_passed_on_without_one(caplog):
    class Cordon:
        name = "a cordon"

        def notice(self, now):
            return Notice("cordon", None, "it is cordoned")

    noticed = []
    NoticeWatch(Cordon(), noticed.append, lambda: None).poll()
    assert noticed == [Notice("cordon", None, "it is cordoned")]
    assert [record.message for record in caplog.records] == ["it is cordoned: this machine is being drained"]


def test_notice_source_that_refuses_is_logged_once(caplog):
    class Refuses:
        name = "who refuses"

        def notice(self, now):
            raise SourceUnavailable("you may not ask")

    watch = NoticeWatch(Refuses(), lambda notice: None, lambda: None)
    for _ in range(3):
        watch.poll()
    assert [record.message for record in caplog.records] == ["you may not ask; retrying"]


def test_notice_source_that_is_silent_gives_no_notice_and_is_logged_once(service, watch, caplog):
    service.answers = {PREEMPTED: 503}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watch.poll()
        service.answers = {}
        watch.poll()
    assert watch.noticed == []
    assert [record.message.partition(";")[0].rpartition(" ")[2] for record in caplog.records] == ["503", "again"]


def test_notice_watch_polls_until_it_is_stopped(service, watch):
    passed_on = threading.Event()
    watch._noticed = lambda notice: passed_on.set()
    watch.start()
    service.answers = {PREEMPTED: "TRUE"}
    assert passed_on.wait(30)
    watch.stop()
    watch._thread.join(30)
    assert not watch._thread.is_alive()
