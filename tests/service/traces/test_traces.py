"""A control plane sends the starts and recoveries of its jobs to a collector, and is disturbed by none."""

import contextlib
import logging
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from manta.service.store import generations, jobs
from manta.service.traces import exporter, traces
from manta.service.traces.exporter import SpanSender, traces_endpoint
from manta.service.traces.spans import Span
from manta.service.traces.traces import Traces, TracesNotInstalled, refuse_without_packages
from manta.workers.protocol.reports import Exited, Started
from tests.service.support.control_planes import for_the_next_loop, running
from tests.service.support.fake_agents import SIGKILL
from tests.service.support.otlp_collector import attributes
from tests.service.support.waiting import reached

START = {"job.start", "job.start.queued", "job.start.placing", "job.start.launching", "job.start.first_step"}


@pytest.fixture(autouse=True)
def no_delay(monkeypatch):
    """A batch is what comes within a moment; the end of the service waits for a collector that is merely slow."""
    monkeypatch.setattr(exporter, "DELAY_SECONDS", 0.01)
    monkeypatch.setattr(traces, "FLUSH_SECONDS", 60.0)


@pytest.fixture
def stepped(store, started):
    """A job whose first generation has committed its first step."""
    number = store.write(lambda s: generations.begin(s, started.id, "submitted", False))
    store.write(lambda s: generations.mark_first_step(s, started.id, number))
    return started


def seen(plane, condition):
    """What a condition says once it is true."""
    return plane._call(reached(condition))


def agent_of(cluster, rank):
    return next(agent for agent in cluster.agents.living.values() if agent.rank == rank)


def begun(start, cluster, submit, url):
    """A control plane that sends traces, and a job of two ranks that runs there and goes on running."""
    plane = start(traces=url)
    return plane, running(plane, cluster, submit)


def kill_and_recover(plane, cluster, job):
    """A rank dies, and the next generation commits step 2."""

    def go_on(agent):
        agent.say(Started(agent._pid, time.time()), at=time.time())
        if agent.rank == 0:
            agent.commit(2)

    async def die():
        victim = agent_of(cluster, 1)
        victim.steps = agent_of(cluster, 0).steps
        for agent in cluster.agents.living.values():
            agent.on_launch = go_on
        victim.running = False
        victim.say(Exited(signal=SIGKILL), at=time.time())

    plane._call(die())

    def runs_again():
        row = plane.store.query(jobs.get, job.id)
        return row.generation == 2 and row.state == "RUNNING"

    seen(plane, runs_again)


def test_job_that_is_placed_trains_and_recovers_is_traced(start, cluster, submit, collector):
    plane, job = begun(start, cluster, submit, collector.url)
    kill_and_recover(plane, cluster, job)
    spans = seen(plane, lambda: collector.of(job.id) if ("job.recovery", 2) in collector.of(job.id) else None)
    started, recovered = spans["job.start", 1], spans["job.recovery", 2]
    assert {span.trace_id for span in spans.values()} == {started.trace_id}
    assert {name for name, generation in spans if generation == 1} <= START
    assert all(
        span.parent_span_id == started.span_id for (name, _), span in spans.items() if name in START - {"job.start"}
    )
    values = attributes(recovered)
    assert (values["manta.recovery.kind"], values["manta.recovery.rank"]) == ("killed", 1)
    assert attributes(started)["manta.ranks"] == 2
    assert all(values["service.name"] == "manta" for values in collector.resources)
    assert started.end_time_unix_nano <= recovered.start_time_unix_nano < recovered.end_time_unix_nano


def test_control_plane_that_adopts_a_job_repeats_spans_that_may_be_missing(start, cluster, submit, collector):
    first, job = begun(start, cluster, submit, collector.url)
    seen(first, lambda: ("job.start", 1) in collector.of(job.id))
    first.stop()
    for_the_next_loop(cluster.agents.living.values())
    sent, before = collector.of(job.id), len(collector.spans)
    second = start(traces=collector.url)

    async def go_on():
        agent_of(cluster, 0).commit(2)

    second._call(go_on())
    seen(second, lambda: len(collector.spans) == 2 * before)
    assert collector.of(job.id) == sent


def test_missing_span_collector_does_not_affect_jobs(start, cluster, submit, collector, monkeypatch, caplog):
    monkeypatch.setattr(traces, "FLUSH_SECONDS", 0.1)
    asked = []
    first_step = Traces.first_step
    monkeypatch.setattr(Traces, "first_step", lambda *args: (first_step(*args), asked.append(args[2])))
    collector.close()
    plane, job = begun(start, cluster, submit, collector.url)
    kill_and_recover(plane, cluster, job)
    seen(plane, lambda: asked == [1, 2])  # a moment after the state; what ends in between, the next service sends
    plane.stop()
    plane._traces._thread.join(20)
    assert not plane._traces._thread.is_alive()
    assert plane._traces.lost == 2
    assert len([record for record in caplog.records if "did not reach" in record.message]) == 1


def test_waiting_spans_are_sent_when_the_service_ends(store, stepped, collector, monkeypatch):
    monkeypatch.setattr(exporter, "DELAY_SECONDS", 3600.0)
    sending = Traces(store, collector.url)
    sending.first_step(stepped.id, 1)
    sending.close()
    assert ("job.start", 1) in collector.of(stepped.id)
    assert sending.lost == 0


def test_end_of_the_service_does_not_wait_for_a_silent_collector(store, stepped, collector, monkeypatch):
    monkeypatch.setattr(traces, "FLUSH_SECONDS", 0.1)
    collector.answers.clear()
    sending = Traces(store, collector.url)
    sending.first_step(stepped.id, 1)
    assert collector.asked.wait(60)
    sending.close()
    assert sending._thread.is_alive() and sending._thread.daemon


def test_spans_beyond_the_limit_are_dropped_and_counted(collector, monkeypatch):
    monkeypatch.setattr(exporter, "MAX_WAITING", 8)
    monkeypatch.setattr(exporter, "DELAY_SECONDS", 3600.0)
    lost = []
    sender = SpanSender(collector.url, lost.append)
    for generation in range(1, 7):
        if generation == 6:
            sender._provider.force_flush()
        whole = Span(
            "job.recovery", 1, 10 * generation, 1.0, 4.0, {"manta.job.id": "a", "manta.generation": generation}
        )
        parts = [
            Span(f"job.recovery.{name}", 1, 10 * generation + place, 1.0, 2.0, whole.attributes, whole.span_id)
            for place, name in enumerate(("detect", "rest"), 1)
        ]
        sender.send([whole, *parts])
    sender.close()
    assert lost == [1, 1, 1]
    assert {generation for _, generation in collector.of("a")} == {1, 2, 6} and len(collector.spans) == 9


def test_spans_beyond_the_reading_limit_are_dropped_and_counted(monkeypatch, collector):
    monkeypatch.setattr(traces, "MAX_TO_READ", 3)
    reading, goes_on = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def database_that_hangs():
        reading.set()
        goes_on.wait()
        raise OSError("the database is away")
        yield

    sending = Traces(SimpleNamespace(read=database_that_hangs), collector.url)
    sending.first_step("job_1", 1)
    reading.wait()
    for _ in range(5):
        sending.first_step("job_1", 1)
    assert sending.lost == 2
    goes_on.set()
    sending.close()
    assert sending.lost == 6


def test_refused_export_of_spans_is_logged_once(store, stepped, collector, caplog):
    collector.status = 400
    sending = Traces(store, collector.url)
    for _ in range(3):
        sending.first_step(stepped.id, 1)
    sending.close()
    assert sending.lost == 3
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line for line in said if "400" in line] == ["Failed to export spans batch code: 400, reason: Bad Request"]
    assert len([line for line in said if f"did not reach {collector.url}" in line]) == 1


def test_job_that_is_deleted_meanwhile_has_no_spans(store, collector):
    sending = Traces(store, collector.url)
    sending.first_step("job_gone", 1)
    sending.close()
    assert (sending.lost, collector.spans) == (0, [])


def test_collector_secret_is_read_from_the_opentelemetry_variable(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20hush")
    sender = SpanSender(collector.url, lambda count: None)
    sender.send([Span("job.start", 7, 8, 1.0, 2.0, {})])
    sender.close()
    assert [headers["Authorization"] for headers in collector.headers] == ["Bearer hush"]


def test_span_problem_is_sent_as_its_status(collector):
    sender = SpanSender(collector.url, lambda count: None)
    sender.send([Span("job.recovery", 7, 8, 1.5, 2.25, {"manta.ranks": (1, 2)}, None, "it was broken off")])
    sender.close()
    (span,) = collector.spans
    assert (span.trace_id, span.span_id) == ((7).to_bytes(16), (8).to_bytes(8))
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (1_500_000_000, 2_250_000_000)
    assert (span.status.code, span.status.message) == (span.status.STATUS_CODE_ERROR, "it was broken off")
    assert attributes(span) == {"manta.ranks": [1, 2]}


@pytest.mark.parametrize(
    ("said", "used"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://there/otlp", "https://there/otlp/v1/traces"),
        ("https://there/otlp/v1/traces", "https://there/otlp/v1/traces"),
    ],
)
def test_collector_address_may_be_the_base_or_full_url(said, used):
    assert traces_endpoint(said) == used


def test_service_without_traces_imports_no_exporter():
    """FastAPI imports OpenTelemetry's API by itself, which does nothing without an SDK."""
    script = "import manta.api.server, manta.api.app, sys; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    sends = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto", "manta.service.traces.exporter")
    assert [name for name in printed.split() if name.startswith(sends)] == []


def test_missing_opentelemetry_package_is_reported_in_one_sentence(monkeypatch):
    monkeypatch.delitem(sys.modules, "manta.service.traces.exporter")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    refuse_without_packages(None)
    with pytest.raises(TracesNotInstalled, match=r"^MANTA_TRACES needs OpenTelemetry, .*'manta-train\[traces\]'$"):
        refuse_without_packages("http://collector:4318")


def test_repeated_collector_error_is_logged_once_in_five_minutes(monkeypatch):
    at, quiet, record = [0.0], exporter._ThrottleFilter(), logging.makeLogRecord({"msg": "no answer"})
    monkeypatch.setattr(exporter, "time", SimpleNamespace(monotonic=lambda: at[0]))
    heard = []
    for at[0] in (
        0.0,
        exporter.LOG_INTERVAL_SECONDS - 1,
        exporter.LOG_INTERVAL_SECONDS,
        exporter.LOG_INTERVAL_SECONDS + 1,
    ):
        heard.append(quiet.filter(record))
    assert heard == [True, False, True, False]
