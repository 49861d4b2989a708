"""Makes the dashboards in `dashboards/` from the panels below: `python deploy/grafana/make_dashboards.py`.

Every control plane tells of all jobs, so what is said of a job is taken once, by `max by (job)`; what a control plane
says of itself is shown by its `instance`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
COLUMNS, WIDTH, HEIGHT = 24, 8, 8
GPU_SERIES = "{{host}} GPU {{gpu}}"


@dataclass(frozen=True)
class Query:
    """One line of PromQL, and how each of its series is called."""

    expression: str
    series: str


@dataclass(frozen=True)
class Panel:
    """One chart over time."""

    title: str
    unit: str
    """As Grafana calls it."""
    queries: tuple[Query, ...]
    text: str = ""


@dataclass(frozen=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    of_one_job: bool = False


def panel(title: str, unit: str, *queries: tuple[str, str], text: str = "") -> Panel:
    """A panel of (PromQL, name of series)."""
    return Panel(title, unit, tuple(Query(*each) for each in queries), text)


def by_job(expression: str) -> tuple[str, str]:
    """What has one series a job, under the names of the jobs."""
    names = "max by (job, name) (manta_job_info)"
    return f"{expression} * on (job) group_left (name) {names}", "{{name}} ({{job}})"


def each_job(metric: str) -> tuple[str, str]:
    """A metric of all jobs."""
    return by_job(f"max by (job) ({metric})")


def of_job(metric: str, series: str) -> tuple[str, str]:
    """A metric of the job that was chosen."""
    return f'max by (job) ({metric}{{job="$job"}})', series


FLEET = Dashboard(
    "manta-fleet",
    "Manta: fleet",
    (
        panel("Jobs", "short", ("max by (state) (manta_jobs) > 0", "{{state}}")),
        panel("Longest wait in the queue", "s", ("max(manta_queue_oldest_wait_seconds)", "oldest job in the queue")),
        panel(
            "GPUs and slots",
            "short",
            ("max by (unit) (manta_units)", "{{unit}}"),
            ("max by (unit) (manta_units_free)", "{{unit}}, free"),
        ),
        panel("Nodes", "short", ("max by (state) (manta_nodes)", "{{state}}")),
        panel("Throughput, tokens per second", "short", each_job("manta_job_tokens_per_second")),
        panel("MFU, attention in full", "percentunit", each_job("manta_job_mfu_full_ratio")),
        panel("Goodput", "percentunit", each_job("manta_job_goodput_ratio")),
        panel("Progress", "percentunit", by_job("max by (job) (manta_job_step / manta_job_steps)")),
        panel(
            "Failures of the last hour",
            "short",
            ("max by (reason) (manta_jobs_failed_recently) or vector(0)", "{{reason}}"),
        ),
        panel(
            "GPU utilisation",
            "percentunit",
            ("max by (host, gpu) (manta_gpu_utilization_ratio)", GPU_SERIES),
            text="Where nodes have GPUs, and nvidia-ml-py",
        ),
        panel(
            "GPU memory in use",
            "percentunit",
            ("max by (host, gpu) (manta_gpu_memory_used_bytes / manta_gpu_memory_bytes)", GPU_SERIES),
        ),
        panel("GPU temperature", "celsius", ("max by (host, gpu) (manta_gpu_temperature_celsius)", GPU_SERIES)),
        panel("GPU power", "watt", ("max by (host, gpu) (manta_gpu_power_watts)", GPU_SERIES)),
        panel(
            "GPU errors reported by the driver",
            "short",
            ("max by (host, gpu, xid) (manta_gpu_xid_errors_total)", GPU_SERIES + " XID {{xid}}"),
        ),
        panel(
            "GPU memory errors",
            "short",
            ("max by (host, gpu, kind) (manta_gpu_ecc_errors_total)", GPU_SERIES + " {{kind}}"),
        ),
        panel(
            "GPUs that the driver does not reach",
            "short",
            ("count(min by (host, gpu) (manta_gpu_up) == 0) or vector(0)", "GPUs"),
        ),
    ),
)

JOB = Dashboard(
    "manta-job",
    "Manta: one job",
    (
        panel("State", "short", ('max by (state) (manta_job_state{job="$job"})', "{{state}}")),
        panel("Step", "short", of_job("manta_job_step", "committed"), of_job("manta_job_steps", "of")),
        panel("Loss, nats per token", "short", of_job("manta_job_loss", "loss")),
        panel("Gradient norm", "short", of_job("manta_job_grad_norm", "before clipping")),
        panel("Step time", "s", of_job("manta_job_step_seconds", "last step")),
        panel("Throughput, tokens per second", "short", of_job("manta_job_tokens_per_second", "tokens per second")),
        panel(
            "Utilisation",
            "percentunit",
            of_job("manta_job_mfu_full_ratio", "MFU, attention in full"),
            of_job("manta_job_mfu_causal_ratio", "MFU, half of attention"),
            of_job("manta_job_hfu_full_ratio", "HFU, attention in full"),
        ),
        panel("Highest memory of a rank", "bytes", of_job("manta_job_memory_bytes", "memory")),
        panel(
            "Where the time went",
            "s",
            ('max by (class) (manta_job_ledger_seconds{job="$job"})', "{{class}}"),
            text="Since submission, by class of the ledger",
        ),
        panel(
            "Waiting for data",
            "percentunit",
            (
                'max(manta_job_ledger_seconds{job="$job", class="data_wait"})'
                ' / sum(max by (class) (manta_job_ledger_seconds{job="$job", class!~"queue|pause"}))',
                "of the time since it left the queue",
            ),
        ),
        panel("Goodput", "percentunit", of_job("manta_job_goodput_ratio", "goodput")),
        panel("Age of the newest checkpoint", "s", of_job("manta_job_checkpoint_age_seconds", "age")),
        panel("Saving the newest checkpoint", "s", of_job("manta_job_checkpoint_duration_seconds", "took")),
        panel("Restarts", "short", of_job("manta_job_restarts_total", "restarts")),
        panel(
            "Trouble within the last hour",
            "short",
            ('max by (type) (manta_job_recent_events{job="$job"})', "{{type}}"),
        ),
    ),
    of_one_job=True,
)

RECOVERY = Dashboard(
    "manta-recovery",
    "Manta: recovery and goodput",
    (
        panel("Goodput", "percentunit", each_job("manta_job_goodput_ratio")),
        panel(
            "Time that was not computing",
            "s",
            (
                'sum by (class) (max by (job, class) (manta_job_ledger_seconds{class!~"compute|queue|pause"}))',
                "{{class}}",
            ),
            text="Of all unfinished jobs, since their submission",
        ),
        panel(
            "Recoveries by cause",
            "short",
            ("sum by (cause) (max by (job, cause) (manta_job_recoveries_total))", "{{cause}}"),
            text="Of all unfinished jobs",
        ),
        panel(
            "Mean time of a recovery, by phase",
            "s",
            (
                "sum by (phase) (max by (job, phase) (manta_job_recovery_seconds_total))"
                " / on () group_left () sum(max by (job) (manta_job_recoveries_ended_total))",
                "{{phase}}",
            ),
        ),
        panel("Restarts", "short", each_job("manta_job_restarts_total")),
        panel("Steps done again", "short", each_job("manta_job_steps_redone_total")),
        panel("Age of the newest checkpoint", "s", each_job("manta_job_checkpoint_age_seconds")),
        panel("Saving the newest checkpoint", "s", each_job("manta_job_checkpoint_duration_seconds")),
        panel(
            "Stragglers within the last hour",
            "short",
            by_job('max by (job) (manta_job_recent_events{type="straggler"})'),
        ),
        panel(
            "Hangs within the last hour",
            "short",
            by_job('sum by (job) (max by (job, type) (manta_job_recent_events{type=~"rank_hung|gang_hung"}))'),
        ),
        panel(
            "Bad numbers within the last hour",
            "short",
            by_job(
                'sum by (job) (max by (job, type) (manta_job_recent_events{type=~"spike|step_skipped|rolled_back"}))'
            ),
        ),
        panel("Losses that are not finite", "short", ("sum(max by (job) (manta_job_loss_not_finite))", "jobs")),
    ),
)

CONTROL_PLANE = Dashboard(
    "manta-control-plane",
    "Manta: control plane",
    (
        panel(
            "Control planes that answer",
            "short",
            ('sum(up{job="manta"})', "scraped"),
            ("max(manta_control_planes)", "living"),
        ),
        panel("Releases", "short", ("count by (version) (manta_build_info)", "{{version}}")),
        panel(
            "Requests per second",
            "reqps",
            ("sum by (status) (rate(manta_http_request_duration_seconds_count[$__rate_interval]))", "{{status}}"),
        ),
        panel(
            "Time of requests, 95th percentile",
            "s",
            (
                "histogram_quantile(0.95, sum by (le, route)"
                " (rate(manta_http_request_duration_seconds_bucket[$__rate_interval])))",
                "{{route}}",
            ),
        ),
        panel(
            "Requests that the service failed",
            "percentunit",
            (
                '(sum(rate(manta_http_request_duration_seconds_count{status=~"5.."}[$__rate_interval])) or vector(0))'
                " / sum(rate(manta_http_request_duration_seconds_count[$__rate_interval]))",
                "of all",
            ),
        ),
        panel("How far loops are behind", "s", ("manta_reconcile_lag_seconds", "{{instance}} {{loop}}")),
        panel("Delay of the control thread", "s", ("manta_control_thread_delay_seconds", "{{instance}}")),
        panel(
            "Control thread and Ray answer",
            "short",
            ("manta_control_thread_up", "{{instance}} thread"),
            ("manta_ray_up", "{{instance}} Ray"),
        ),
        panel(
            "Owners of jobs",
            "short",
            ("manta_owned_jobs", "{{instance}}"),
            ("max(manta_jobs_without_owner)", "no owner"),
        ),
        panel(
            "Jobs without series of their own",
            "short",
            ("max(manta_jobs_unlisted)", "unfinished jobs"),
        ),
        panel(
            "Connections to the database in use",
            "percentunit",
            ("manta_database_connections / manta_database_connections_max", "{{instance}} {{purpose}}"),
        ),
        panel("Writes that wait", "short", ("manta_database_writes_waiting", "{{instance}}")),
        panel("Oldest write that waits", "s", ("manta_database_oldest_write_seconds", "{{instance}}")),
        panel(
            "Mean time of a write",
            "s",
            (
                "rate(manta_database_write_seconds_total[$__rate_interval])"
                " / (rate(manta_database_writes_total[$__rate_interval]) > 0)",
                "{{instance}}",
            ),
        ),
        panel("Memory", "bytes", ('process_resident_memory_bytes{job="manta"}', "{{instance}}")),
        panel(
            "Processor",
            "percentunit",
            ('rate(process_cpu_seconds_total{job="manta"}[$__rate_interval])', "{{instance}}"),
        ),
    ),
)

DASHBOARDS = (FLEET, JOB, RECOVERY, CONTROL_PLANE)


def as_grafana_has_it(dashboard: Dashboard) -> dict[str, Any]:
    """The JSON model of a dashboard."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["manta"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_choice_of_job()] if dashboard.of_one_job else []},
        "panels": [
            _chart(number, each, place)
            for number, (each, place) in enumerate(
                zip(dashboard.panels, _places(len(dashboard.panels)), strict=True), 1
            )
        ],
    }


def _choice_of_job() -> dict[str, Any]:
    return {
        "name": "job",
        "label": "Job",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(manta_job_info, job)", "refId": "job"},
        "refresh": 2,
        "sort": 2,
    }


def _places(number: int) -> Iterator[dict[str, int]]:
    """From left to right, row after row."""
    a_row = COLUMNS // WIDTH
    for place in range(number):
        yield {"x": place % a_row * WIDTH, "y": place // a_row * HEIGHT, "w": WIDTH, "h": HEIGHT}


def _chart(number: int, of: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": of.title,
        "description": of.text,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": of.unit, "min": 0 if of.unit == "percentunit" else None}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": _targets(of.queries),
    }


def _targets(queries: Sequence[Query]) -> list[dict[str, Any]]:
    return [
        {
            "refId": chr(ord("A") + place),
            "datasource": DATASOURCE,
            "expr": query.expression,
            "legendFormat": query.series,
        }
        for place, query in enumerate(queries)
    ]


def as_files() -> dict[Path, str]:
    """What is to be in each file."""
    return {
        FOLDER / f"{dashboard.uid.removeprefix('manta-')}.json": json.dumps(as_grafana_has_it(dashboard), indent=1)
        + "\n"
        for dashboard in DASHBOARDS
    }


if __name__ == "__main__":
    for path, text in as_files().items():
        path.write_text(text)
