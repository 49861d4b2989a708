"""What the dashboard costs, and how soon it is there.

First Chromium opens the list of 10,000 jobs, the page of one of them and a series of a million steps, and zooms in: how
long until it is painted, and until what was asked for is drawn. Then a real job of one rank runs on core 0 while 20
viewers follow it, with all of the service (Ray, the rank's agent) and the viewers on core 1, in turns with no viewers:
what they cost the service, and whether the rank's steps become slower. Needs two cores and the system's Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.filled_database import fill
from benchmarks.support.jobs import quickstart
from benchmarks.support.own_processes import of_service
from benchmarks.support.own_service import OwnService, own_service
from benchmarks.support.report import ROOT, Report, deliver, parser
from manta.api.serving.local_service import running_service
from manta.service.identity import Scope, digest_of, new_key
from manta.service.installation_keys import read_key
from manta.service.store import Store, keys
from manta.service.store.location import sqlite_url
from manta.workers.errors import MantaError

PAINT_TARGET, SERIES_TARGET = 1.0, 1.0
CORE_TARGET, MEMORY_TARGET, STEP_TARGET = 0.5, 200.0, 1.01
START_SECONDS = 300.0
SETTLE_STEPS = 20


class CannotMeasure(MantaError):
    """The machine lacks what this needs."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("dashboard", __doc__)
    options.add_argument("--jobs", type=int, default=10_000, help="jobs in the list (default: 10000)")
    options.add_argument("--longest", type=int, default=1_000_000, help="steps of one of them (default: a million)")
    options.add_argument("--viewers", type=int, default=20, help="who follow the job (default: 20)")
    options.add_argument("--turns", type=int, default=6, help="with viewers and without (default: 6 each)")
    options.add_argument("--seconds", type=float, default=20.0, help="of each turn (default: 20)")
    options.add_argument("--repeats", type=int, default=5, help="each page is opened so often (default: 5)")
    options.add_argument("--only", choices=("pages", "viewers"), help="one of the two parts")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Both parts. Raises CannotMeasure."""
    report = Report("dashboard", options.seed)
    report.settings = {name: getattr(options, name) for name in ("jobs", "longest", "viewers", "turns", "seconds")}
    if options.only != "viewers":
        _pages(report, options)
    if options.only != "pages":
        if len(os.sched_getaffinity(0)) < 2:
            raise CannotMeasure("viewers are measured on a core other than the rank's: this process may use only one")
        _viewers(report, options)
    return report


def _pages(report: Report, options: argparse.Namespace) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise CannotMeasure("pages are opened in the system's Chromium, which is not there")
    with tempfile.TemporaryDirectory(prefix="manta-dashboard-") as folder:
        store, key = Store(sqlite_url(Path(folder) / "manta.db")), new_key()
        store.migrate()
        filled = fill(store, options.jobs, 20 * options.jobs + options.longest, options.longest)
        store.write(lambda session: keys.create(session, digest_of(key), "bench", Scope.ADMIN, installation=True))
        try:
            with _rest(Path(folder)) as url:
                _open_pages(report, url, key, chromium, filled.longest, filled.some, options.repeats)
        finally:
            store.close()


@contextlib.contextmanager
def _rest(home: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.support.api_process", str(home), sqlite_url(home / "manta.db")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
    finally:
        process.terminate()
        process.wait(60)


def _open_pages(report: Report, url: str, key: str, chromium: str, longest: str, some: str, repeats: int) -> None:
    from playwright.sync_api import sync_playwright

    pages = {
        "list": ("/ui/", "tbody tr", PAINT_TARGET),
        "job": (f"/ui/jobs/{some}", "[aria-label^='Loss. train']", PAINT_TARGET),
        "million_steps": (f"/ui/jobs/{longest}/charts", "[aria-label^='Loss. train']", SERIES_TARGET),
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(extra_http_headers={"Authorization": f"Bearer {key}"})
        for name, (path, there, target) in pages.items():
            paints, draws = zip(*(_open(context, url + path, there) for _ in range(repeats)), strict=True)
            report.add(f"{name}_first_paint", round(statistics.median(paints), 3), "s", target)
            report.add(f"{name}_drawn", round(statistics.median(draws), 3), "s", target)
            report.samples[f"{name}_drawn"] = [round(each, 3) for each in draws]
        zooms = [_zoom(context, url + pages["million_steps"][0]) for _ in range(repeats)]
        report.add("zoom_drawn", round(statistics.median(zooms), 3), "s", SERIES_TARGET)
        browser.close()


def _open(context: Any, address: str, there: str) -> tuple[float, float]:
    """Seconds from the beginning of the navigation to the first paint, and until `there` is on the page."""
    page = context.new_page()
    page.add_init_script(_note_when(there))
    page.goto(address)
    page.locator(there).first.wait_for(timeout=60_000)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    drawn = page.evaluate("window.drawnAt")
    page.close()
    return paint / 1e3, drawn / 1e3


def _note_when(there: str) -> str:
    element = f"document.querySelector({json.dumps(there)})"
    return (
        "new MutationObserver((_, observer) => {"
        f"if (!{element}) return; observer.disconnect();"
        "requestAnimationFrame(() => (window.drawnAt = performance.now()));"
        "}).observe(document, {childList: true, subtree: true, attributes: true});"
    )


def _zoom(context: Any, address: str) -> float:
    """Seconds from the end of a drag over a tenth of a chart until the answer with more detail is drawn."""
    page = context.new_page()
    page.goto(address)
    box = page.locator("[aria-label^='Loss. train']").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.4 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], middle, steps=3)
    with page.expect_response(lambda answer: "until_step=" in answer.url):
        began = time.perf_counter()
        page.mouse.up()
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    seconds = time.perf_counter() - began
    page.close()
    return seconds


def _viewers(report: Report, options: argparse.Namespace) -> None:
    cores = os.sched_getaffinity(0)
    try:
        _watch(report, options)
    finally:
        os.sched_setaffinity(0, cores)


def _watch(report: Report, options: argparse.Namespace) -> None:
    with own_service() as service:
        job = service.client.submit(_one_rank(options)).id
        service.wait_for_step(job, SETTLE_STEPS, START_SECONDS)
        ((pid, _),) = service.processes(job).values()
        running = running_service(service.home)
        if running is None:
            raise CannotMeasure("the service has ended")
        process = psutil.Process(int(str(running["pid"])))
        for each in (*of_service(process, service.paths), psutil.Process()):
            _pin(each, 1)
        _pin(psutil.Process(pid), 0)
        began = process.memory_info().rss
        quiet, watched, cores = _turns(service, job, process, options)
        added = (process.memory_info().rss - began) / 1e6
        service.give_up(job, START_SECONDS)
    report.add("service_cores_quiet", round(statistics.median(cores[False]), 3), "cores")
    report.add("service_cores_watched", round(statistics.median(cores[True]), 3), "cores")
    costs = [on - off for on, off in zip(cores[True], cores[False], strict=True)]
    report.add("viewers_cost_cores", round(statistics.median(costs), 3), "cores", CORE_TARGET)
    report.add("viewers_cost_memory", round(added, 1), "MB", MEMORY_TARGET)
    report.add("step_quiet_median", round(1e3 * statistics.median(quiet), 3), "ms")
    report.add("step_watched_median", round(1e3 * statistics.median(watched), 3), "ms")
    report.add("step_ratio", round(statistics.median(watched) / statistics.median(quiet), 4), "ratio", STEP_TARGET)


def _one_rank(options: argparse.Namespace) -> dict[str, Any]:
    document = quickstart((1, 1, 1), 1_000_000, options.seed)
    document["train"].update(global_batch_size=2, micro_batch_size=2)
    document["resources"] = {"threads": 1}
    document["checkpoint"] = {"every_steps": 0}
    return document


def _pin(process: psutil.Process, core: int) -> None:
    """Let a process, and what it starts from now on, use one core only."""
    with contextlib.suppress(psutil.Error):
        for thread in process.threads():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.sched_setaffinity(thread.id, {core})


def _turns(
    service: OwnService, job: str, process: psutil.Process, options: argparse.Namespace
) -> tuple[list[float], list[float], dict[bool, list[float]]]:
    """Seconds of steps without and with viewers, and cores that the service took, in turns."""
    steps: dict[bool, list[float]] = {False: [], True: []}
    cores: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * options.turns):
        watched = turn % 2 == 1
        with _following(service, job, options.viewers if watched else 0):
            first = service.client.job(job).step
            spent, began = sum(process.cpu_times()[:2]), time.monotonic()
            time.sleep(options.seconds)
            cores[watched].append((sum(process.cpu_times()[:2]) - spent) / (time.monotonic() - began))
            last = service.client.job(job).step
        series = service.client.metrics(job, ["step_seconds"], after_step=first, max_points=10_000)
        known = zip(series.steps, series.series["step_seconds"], strict=True)
        steps[watched] += [float(seconds) for step, seconds in known if step <= last and seconds is not None]
    return steps[False], steps[True], cores


@contextlib.contextmanager
def _following(service: OwnService, job: str, count: int) -> Iterator[None]:
    if not count:
        yield
        return
    key = read_key(service.home)
    module = "benchmarks.support.dashboard_viewers"
    command = [sys.executable, "-m", module, service.client.url, str(key), job, str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    try:
        _pin(psutil.Process(process.pid), 1)
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        yield
        process.stdin.close()
        process.wait(30)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
