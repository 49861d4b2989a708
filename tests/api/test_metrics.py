"""Prometheus: requests, jobs, the control plane."""

import asyncio
import importlib.metadata
import math
import shutil
import subprocess
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from manta.api.metrics import jobs
from manta.api.metrics.control_plane import RequestTimer
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.control.cluster_view import Measurements, NodeMeasurements
from manta.service.store import events, job_numbers
from manta.service.store.job_numbers import Saved
from manta.workers.protocol.messages import GpuReading
from tests.api.support.keys import bearer
from tests.api.support.scraped_names import FAMILIES, sample_names
from tests.deploy import monitoring


class Route:
    """Of a resource."""

    path = "/v1/jobs/{job_id}"


def measured(scope, status=None):
    """The labels under which a request was measured that was answered with `status`; None: it failed."""
    registry = CollectorRegistry()

    async def app(scope, receive, send):
        if status is None:
            raise RuntimeError
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body"})

    async def main():
        sent = []

        async def send(message):
            sent.append(message["type"])

        try:
            await RequestTimer(app, registry)(scope, None, send)
        except RuntimeError:
            sent.append("failed")
        return sent

    sent = asyncio.run(main())
    counts = [sample for metric in registry.collect() for sample in metric.samples if sample.name.endswith("_count")]
    assert all(sample.value == 1 for sample in counts)
    return sent, [sample.labels for sample in counts]


@pytest.mark.parametrize(
    ("method", "route", "status", "labels"),
    [
        ("GET", Route, 200, {"method": "GET", "route": "/v1/jobs/{job_id}", "status": "200"}),
        ("DELETE", Route, 404, {"method": "DELETE", "route": "/v1/jobs/{job_id}", "status": "404"}),
        ("GET", None, 404, {"method": "GET", "route": "unmatched", "status": "404"}),
        ("BREW", None, 405, {"method": "other", "route": "unmatched", "status": "405"}),
    ],
)
def test_request_is_measured_by_method_route_and_status(method, route, status, labels):
    scope = {"type": "http", "method": method, "path": "/v1/jobs/job_1", **({} if route is None else {"route": route})}
    assert measured(scope, status) == (["http.response.start", "http.response.body"], [labels])


def test_request_on_which_the_service_failed_is_one_of_its_errors():
    sent, (labels,) = measured({"type": "http", "method": "GET", "path": "/", "route": Route})
    assert (sent, labels["status"]) == (["failed"], "500")


def test_websocket_connections_are_not_counted_as_requests():
    assert measured({"type": "websocket", "path": "/"}, 200)[1] == []


GPUS = (GpuReading(0, True, 0.9, 2**30, 2**36, 60, 350.5, 7, 0, {"31": 2}), GpuReading(1, answers=False))
MEASURED = Measurements(
    loop_delay_seconds=0.01,
    owned_jobs=1,
    lag_seconds={"jobs": 0.0, "queue": 2.5},
    nodes=(NodeMeasurements("n1", "host-1", "ready", GPUS), NodeMeasurements("n2", "host-2", "draining")),
    units={"GPU": (8, 3), "manta_slot": (0, 0)},
)


def scraped(service):
    """The value of each series, by its name and its labels' values in the order of their names."""
    families = text_string_to_metric_families(service.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value for sample in samples}


@pytest.fixture
def running(service):
    """A job that runs and has committed a step."""
    job = service.submit(checkpoint={"every_steps": 5})["id"]
    service.move(job, "STARTING", "RUNNING")
    row = {"loss": 2.5, "step_seconds": 0.5, "tokens_per_second": 64.0, "mfu_causal": 0.2, "hfu_full": 0.3}
    service.report(job, [{"step": 3, **row}])
    return job


def test_scraped_metric_names_are_all_declared(service, running):
    service.control.measured = MEASURED
    names = {name for name, *_ in scraped(service)}
    ours = {name for name in names if name.startswith("manta_") and not name.endswith("_created")}
    assert ours <= sample_names()


@pytest.mark.skipif(shutil.which("promtool") is None, reason=monitoring.NO_PROMETHEUS)
def test_scrape_passes_promtool_check(service, running):
    service.control.measured = MEASURED
    text = service.http.get("/metrics").content
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_metric_names_end_in_total_for_counters_only(family):
    assert family.name.startswith("manta_") and family.name.endswith("_total") == (family.kind == "counter")
    assert family.text and not family.text.endswith(".")
    assert "rank" not in family.labels


def test_unfinished_job_is_reported_in_detail(service, running):
    samples = scraped(service)
    assert samples["manta_job_info", running, "small", "default"] == 1
    assert samples["manta_job_state", running, "RUNNING"] == 1
    assert samples["manta_job_step", running] == 3
    assert samples["manta_job_steps", running] == 10
    assert samples["manta_job_step_seconds", running] == 0.5
    assert samples["manta_job_mfu_causal_ratio", running] == 0.2
    assert samples["manta_job_loss_not_finite", running] == 0
    assert samples["manta_job_checkpoint_every_steps", running] == 5
    assert 0 <= samples["manta_job_checkpoint_age_seconds", running] < 3600  # none yet: since it started
    assert samples["manta_job_recent_events", running, "straggler"] == 0
    assert ("manta_job_checkpoint_duration_seconds", running) not in samples


def test_jobs_without_series_of_their_own_are_counted(service, running, monkeypatch):
    assert scraped(service)["manta_jobs_unlisted",] == 0
    monkeypatch.setattr(job_numbers, "MAX_JOBS", 1)
    waiting = [service.submit()["id"] for _ in range(2)]
    samples = scraped(service)
    assert (samples["manta_jobs_unlisted",], samples["manta_job_step", running]) == (2, 3)
    assert not any(("manta_job_step", job) in samples for job in waiting)


def test_trouble_of_the_last_hour_is_that_of_jobs_that_hold_places(service, running):
    service.store.write(lambda session: events.append(session, running, "rank_hung", "rank 1 hangs"))
    assert scraped(service)["manta_job_recent_events", running, "rank_hung"] == 1
    service.move(running, "PAUSING", "PAUSED")
    assert ("manta_job_recent_events", running, "rank_hung") not in scraped(service)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_scrape_flags_a_loss_that_is_not_finite(service, running, loss):
    service.report(running, [{"step": 4, "loss": loss}])
    samples = scraped(service)
    assert samples["manta_job_loss_not_finite", running] == 1
    assert not math.isfinite(samples["manta_job_loss", running])


def test_scrape_has_no_checkpoint_age_for_a_job_that_saves_none(service):
    job = service.submit(checkpoint={"every_steps": 0})["id"]
    service.move(job, "STARTING", "RUNNING")
    assert ("manta_job_checkpoint_age_seconds", job) not in scraped(service)


@pytest.mark.parametrize(
    ("placed_at", "began_at", "age"),
    [(100.0, None, 50.0), (100.0, 120.0, 30.0), (120.0, 100.0, 30.0), (160.0, None, 0.0), (None, 100.0, None)],
)
def test_checkpoint_age_counts_from_the_later_of_placement_and_last_save(placed_at, began_at, age):
    saved = None if began_at is None else Saved(began_at, began_at + 1.0)
    job = SimpleNamespace(
        placed_at=placed_at, saved=saved, row=SimpleNamespace(spec={"checkpoint": {"every_steps": 5}})
    )
    assert jobs._checkpoint_age(job, now=150.0) == age


def test_job_in_the_queue_waits(service):
    service.submit()
    samples = scraped(service)
    assert samples["manta_jobs", "QUEUED"] == 1
    assert 0 < samples["manta_queue_oldest_wait_seconds",] < 3600


def test_control_plane_tells_of_itself_and_of_the_nodes(service):
    service.control.measured = MEASURED
    samples = scraped(service)
    assert samples["manta_control_thread_up",] == samples["manta_ray_up",] == 1
    assert samples["manta_reconcile_lag_seconds", "queue"] == 2.5
    assert samples["manta_nodes", "ready"] == samples["manta_nodes", "draining"] == 1
    assert samples["manta_nodes", "lost"] == 0
    assert (samples["manta_units", "GPU"], samples["manta_units_free", "GPU"]) == (8, 3)
    assert samples["manta_database_connections_max", "read"] >= 5
    assert samples["manta_database_writes_waiting",] == 0
    version = importlib.metadata.version("manta-train")
    assert [labels[-1] for name, *labels in samples if name == "manta_build_info"] == [version]
    assert any(name == "process_resident_memory_bytes" for name, *_ in samples)


def test_gpus_are_reported_by_node_and_number(service):
    service.control.measured = MEASURED
    samples = scraped(service)
    assert samples["manta_gpu_utilization_ratio", "0", "host-1", "n1"] == 0.9
    assert samples["manta_gpu_power_watts", "0", "host-1", "n1"] == 350.5
    used, whole = (samples[f"manta_gpu_memory{name}_bytes", "0", "host-1", "n1"] for name in ("_used", ""))
    assert (used, whole) == (2**30, 2**36)
    assert samples["manta_gpu_ecc_errors_total", "0", "host-1", "corrected", "n1"] == 7
    assert samples["manta_gpu_xid_errors_total", "0", "host-1", "n1", "31"] == 2
    assert samples["manta_gpu_up", "1", "host-1", "n1"] == 0
    assert ("manta_gpu_temperature_celsius", "1", "host-1", "n1") not in samples


def test_scrape_reports_a_stuck_control_thread_and_still_reports_jobs(service, running):
    service.control.measurements = Mock(side_effect=ClusterUnavailable(TimeoutError("busy")))
    samples = scraped(service)
    del service.control.measurements
    assert samples["manta_control_thread_up",] == 0
    assert samples["manta_job_step", running] == 3
    assert not any(name == "manta_ray_up" for name, *_ in samples)


def test_ray_that_does_not_answer_is_reported_down(service):
    service.control.measured = Measurements(0.0, 0, {}, ray_answers=False)
    samples = scraped(service)
    assert samples["manta_ray_up",] == 0
    assert not any(name in ("manta_nodes", "manta_units") for name, *_ in samples)


def test_scrape_with_a_project_key_has_no_machine_metrics(service):
    service.control.measured = MEASURED
    service.http.post("/v1/projects", json={"name": "theirs"})
    made = service.http.post("/v1/keys", json={"name": "k", "project": "theirs", "scope": "read"})
    service.http.headers.update(bearer(made.json()["key"]))
    names = {name for name, *_ in scraped(service)}
    assert names and all(name.startswith(("manta_job", "manta_queue", "manta_control_planes")) for name in names)
