"""A feed fetches only what is new, through the real API."""

import asyncio
import itertools
import json

import pytest

from api.client import ApiError, AsyncMantaClient
from api.schemas import MetricSeries
from api.ui import polling
from api.ui.polling import Curves, JobFeed, LogTail
from service.logs import log_file, log_folder
from service.store import events, generations, metrics, ranks

_SEQUENCE = itertools.count(1)


class Watched(AsyncMantaClient):
    """A client that remembers what it sent."""

    def __init__(self, url):
        super().__init__(url)
        self.sent = []

    async def send(self, call):
        self.sent.append(call)
        return await super().send(call)

    def last(self, ending):
        return [dict(call.parameters) for call in self.sent if call.path.endswith(ending)][-1]


def follow(service, job_id, *between):
    """Polls once, and once more after each of the changes `between`; returns the feed and the client."""

    async def main():
        async with Watched(service.url) as client:
            feed = JobFeed(client, job_id)
            await feed.poll()
            for change in between:
                change()
                await feed.poll()
            return feed, client

    return asyncio.run(main())


def report(service, job_id, rows):
    """One more report of the job's one generation."""

    def operation(session):
        begun = generations.of_job(session, job_id)
        generation = begun[0].generation if begun else generations.begin(session, job_id, "test", False)
        metrics.record(session, job_id, generation, 0, next(_SEQUENCE), rows)

    service.store.write(operation)


def test_curves_grow_by_increments(service):
    job_id = service.submit()["id"]
    report(service, job_id, [{"step": n, "loss": 5.0 - n / 10} for n in range(1, 21)])
    more = [{"step": 21, "loss": float("nan"), "mfu_full": 0.5}, {"step": 20, "validation_loss": 4.0}]
    feed, client = follow(service, job_id, lambda: report(service, job_id, more), lambda: None)
    assert sorted(feed.curves.points) == list(range(1, 22))
    assert feed.curves.points[20] == {"loss": 3.0, "validation_loss": 4.0}
    assert feed.curves_version == 2, "the last poll has found nothing new"
    assert client.last("/metrics")["after_step"] == 13


def test_the_losses_of_validation_sets_are_kept_too(service, monkeypatch):
    monkeypatch.setattr(polling, "MAX_POINTS", 10)
    sets = [{"name": "code", "source": "python-stdlib"}]
    train = {"steps": 100, "global_batch_size": 4, "validate_every": 25}
    job_id = service.submit(data={"source": "python-stdlib", "validation": sets}, train=train)["id"]
    report(service, job_id, [{"step": n, "loss": 5.0 - n / 100} for n in range(1, 96)])
    report(service, job_id, [{"step": n, "validation_loss_code": 4.0} for n in (25, 50)])
    feed, _ = follow(service, job_id)
    assert feed.validation_sets == {"code": "validation_loss_code"}
    known = {step: values["validation_loss_code"] for step, values in feed.curves.points.items()
             if "validation_loss_code" in values}  # fmt: skip
    assert known == {25: 4.0, 50: 4.0}
    assert len(feed.curves.points) <= 10 + 2


def test_long_curves_are_thinned_out_but_keep_validation(service, monkeypatch):
    monkeypatch.setattr(polling, "MAX_POINTS", 10)
    job_id = service.submit(train={"steps": 100, "global_batch_size": 4})["id"]
    report(service, job_id, [{"step": n, "loss": 5.0 - n / 100} for n in range(1, 96)])
    report(service, job_id, [{"step": n, "validation_loss": 4.0} for n in (25, 50, 75)])
    feed, _ = follow(service, job_id)
    assert len(feed.curves.points) <= 10 + 3
    validated = [step for step, values in feed.curves.points.items() if "validation_loss" in values]
    assert sorted(validated) == [25, 50, 75]
    assert feed.curves.last_step == 95


def test_events_ranks_and_the_end(service):
    job_id = service.submit()["id"]
    place = {"rank": 0, "tensor": 0, "pipeline": 0, "data": 0, "generation": 0, "state": "running"}

    def crash():
        service.store.write(lambda session: ranks.replace(session, job_id, [place]))
        service.move(job_id, "STARTING", "RUNNING", "RECOVERING")

    def happen():
        service.store.write(lambda session: events.append(session, job_id, "note", "something happened"))

    feed, client = follow(service, job_id, crash)
    assert [event.data.get("to") for event in feed.events] == [None, "STARTING", "RUNNING", "RECOVERING"]
    assert feed.restarts == [0]
    assert follow(service, job_id, happen)[0].restarts == [0], "news of something else takes no mark away"
    assert [rank.state for rank in feed.ranks] == ["running"], "an event makes the feed look at the ranks"
    assert client.last("/events")["cursor"] is not None
    assert not feed.done
    service.move(job_id, "FAILED")
    assert follow(service, job_id)[0].done


def test_the_log_keeps_its_last_lines(service):
    job_id = service.submit()["id"]
    folder = log_folder(service.control.home, job_id)
    folder.mkdir(parents=True)

    def print_lines(rank, numbers):
        with log_file(folder, rank).open("a") as file:
            for number in numbers:
                file.write(json.dumps({"time": number, "rank": rank, "text": f"{rank}.{number}"}) + "\n")

    async def main():
        async with AsyncMantaClient(service.url) as client:
            tail, one = LogTail(), LogTail(1)
            print_lines(0, range(150))
            await tail.poll(client, job_id)
            print_lines(1, [200])
            await tail.poll(client, job_id)
            await one.poll(client, job_id)
            return tail, one

    tail, one = asyncio.run(main())
    assert len(tail.lines) == polling.LOG_LINES_SHOWN
    assert (tail.lines[-2].text, tail.lines[-1].text) == ("0.149", "1.200")
    assert [line.text for line in one.lines] == ["1.200"]


@pytest.mark.parametrize(("lines", "happenings"), [(3, 0), (0, 3)])
def test_the_page_of_a_job_that_is_over_is_done_when_all_was_read(service, monkeypatch, lines, happenings):
    monkeypatch.setattr(polling, "_PAGE", 2)
    monkeypatch.setattr(polling, "_MOST_PAGES", 1)
    job_id = service.submit()["id"]
    folder = log_folder(service.control.home, job_id)
    folder.mkdir(parents=True)
    with log_file(folder, 0).open("w") as file:
        file.writelines(json.dumps({"time": number, "rank": 0, "text": "a line"}) + "\n" for number in range(lines))
    for _ in range(happenings):
        service.store.write(lambda session: events.append(session, job_id, "told", "something happened"))
    service.move(job_id, "CANCELLED")
    assert not follow(service, job_id)[0].done
    polls = 3 if happenings else 2
    assert follow(service, job_id, *[lambda: None] * (polls - 1))[0].done


def test_an_unknown_job_is_told_to_the_page(service):
    with pytest.raises(ApiError):
        follow(service, "job_000000000000")


def test_merging_the_same_again_is_no_change():
    curves = Curves()
    series_sent = MetricSeries(steps=[1], series={"loss": [float("nan")]})
    assert curves.merge(series_sent)
    assert not curves.merge(series_sent)
