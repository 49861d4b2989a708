"""`make demo`: the main job from nothing to its summary, on a service of its own that is gone afterwards."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from api.cli.progress import duration, figure, follow, percent
from api.cli.service import start_service, stop_service
from api.client import ApiError, MantaClient, ServiceUnreachable
from api.schemas import Job
from service.states import JobState, is_final
from workers.errors import MantaError
from workers.spec.problems import SpecError
from workers.spec.reading import read_document

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".demo"
SPEC = ROOT / "examples" / "quickstart.yaml"


def main() -> int:
    """Run the demo; returns the exit status."""
    console = Console()
    try:
        return _demo(console)
    except (MantaError, ApiError, SpecError, ServiceUnreachable) as error:
        console.print(f"The demo failed: {error}", style="red", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; stopping.")
        return 130
    finally:
        stop_service(HOME)


def _demo(console: Console) -> int:
    console.print(f"Starting Manta (home {HOME.name}/, a local Ray, SQLite) ...", highlight=False)
    began = time.monotonic()
    url = start_service(HOME, "127.0.0.1", 0, None, None)
    console.print(f"Manta is up after {duration(time.monotonic() - began)}: {url}/ui", highlight=False)
    with MantaClient(url) as client:
        _cancel_leftovers(client)
        job = client.submit(read_document(SPEC))
        console.print(f"Submitted {SPEC.relative_to(ROOT)} as {job.id}", highlight=False)
        job = follow(client, job.id, console)
        _summary(console, client, job)
    return 0 if job.state == JobState.SUCCEEDED else 1


def _cancel_leftovers(client: MantaClient) -> None:
    """End what an interrupted demo left: the service has just taken it up again."""
    for job in client.jobs().items:
        if not is_final(job.state):
            client.cancel(job.id)


def _summary(console: Console, client: MantaClient, job: Job) -> None:
    metrics = client.metrics(job.id)
    losses = [loss for loss in metrics.series["loss"] if isinstance(loss, float)]
    latest = job.metrics.latest
    layout = job.parallel
    saved = [entry for entry in client.checkpoints(job.id).items if entry.state == "complete"]
    table = Table(title=f"{job.name}: {job.state}", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    rows = {
        "layout": f"tensor {layout['tensor']} x pipeline {layout['pipeline']} x data {layout['data']}",
        "loss, first step": figure(losses[0], 4) if losses else "-",
        "loss, last step": figure(losses[-1], 4) if losses else "-",
        "validation loss": figure(_number(latest.get("validation_loss")), 4),
        "tokens/s, median": figure(_median(metrics.series["tokens_per_second"]), 0),
        "MFU, attention in full, median": percent(_median(metrics.series["mfu_full"])),
        "MFU, causal half, median": percent(_median(metrics.series["mfu_causal"])),
        "MFU is measured against": "a matrix product on one core of this machine for each rank"
        if job_runs_on_cpu(client, job)
        else "the device's peak",
        "goodput": percent(job.goodput),
        "restarts": str(job.restarts),
        "checkpoint": _short(saved[0].path) if saved else "none",
        "open the dashboard": f"MANTA_HOME={HOME.name} {_short(str(Path(sys.executable).parent))}/manta up",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    if job.state != JobState.SUCCEEDED:
        console.print(job.message or job.reason or "no reason given", style="red", highlight=False)


def _short(path: str) -> str:
    """`path` as seen from the project's folder, where the demo is run."""
    return str(Path(path).relative_to(ROOT)) if Path(path).is_relative_to(ROOT) else path


def _median(values: Sequence[object]) -> float | None:
    found = [value for value in values if isinstance(value, int | float)]
    return statistics.median(found) if found else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def job_runs_on_cpu(client: MantaClient, job: Job) -> bool:
    """Whether the job's ranks had no GPU."""
    return all(rank.device in (None, "cpu") for rank in client.ranks(job.id).items)


if __name__ == "__main__":
    sys.exit(main())
