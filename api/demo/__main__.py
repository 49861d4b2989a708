"""`make demo`: the main job from nothing to its summary, with one of its ranks killed on the way, on a service of its
own that is gone afterwards."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from manta.api.cli.progress import duration, follow
from manta.api.cli.service import start_service, stop_service
from manta.api.client import ApiError, Client, ServiceUnreachable
from manta.api.demo.failure import RankKiller, outcome_of, replay
from manta.api.demo.summary import show
from manta.api.schemas import Cluster, Job
from manta.service.settings import Settings
from manta.service.states import JobState, is_final
from manta.workers.config import JobSpec
from manta.workers.errors import MantaError
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec, read_document

ROOT = Path(__file__).parents[4]
HOME = ROOT / ".demo"
SPEC = ROOT / "examples" / "quickstart.yaml"
STEPS_BEFORE_KILL, STEPS_REPLAYED = 4, 8
"""Counted from the checkpoint that the steps around the failure are trained again from."""


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
    url = start_service(Settings(HOME), "127.0.0.1", 0, None, None)
    with Client.of_home(HOME) as client:
        up = f"Manta is up after {duration(time.monotonic() - began)}"
        console.print(f"{up}: {url}{client.link().path} (dashboard, good once)", highlight=False, soft_wrap=True)
        _cancel_leftovers(client)
        document: dict[str, Any] = read_document(SPEC)
        spec = parse_job_spec(document)
        document, note = slots_where_gpus_are_scarce(document, spec, client.cluster())
        if note:
            console.print(note, highlight=False)
        job = client.submit(document)
        console.print(f"Submitted {SPEC.relative_to(ROOT)} as {job.id}", highlight=False)
        saved = last_intermediate_checkpoint(spec)
        killer = RankKiller(client, job.id, saved + STEPS_BEFORE_KILL, console)
        job = follow(client, job.id, console, on_progress=killer.poll)
        return 0 if _judge(console, client, document, job, killer, saved) else 1


def _judge(
    console: Console, client: Client, document: dict[str, Any], job: Job, killer: RankKiller, saved: int
) -> bool:
    """Train the steps around the failure again, show the summary; whether all is as promised."""
    outcome, same_bits = None, None
    if job.state == JobState.SUCCEEDED and killer.killed is not None:
        outcome = outcome_of(client.recoveries(job.id).items, killer.killed)
        last = min(saved + STEPS_REPLAYED, job.steps)
        console.print(f"Training steps {saved + 1} to {last} again, without the service and undisturbed ...")
        same_bits = replay(client, document, job.id, saved, last, HOME / "replay")
    show(console, client, job, outcome, same_bits, ROOT)
    return job.state == JobState.SUCCEEDED and outcome is not None and same_bits is not None and same_bits.holds


def last_intermediate_checkpoint(spec: JobSpec) -> int:
    """Step of the newest checkpoint that the job saves before its last step."""
    every = spec.checkpoint.every_steps
    return every * ((spec.train.steps - 1) // every)


def _cancel_leftovers(client: Client) -> None:
    """End what an interrupted demo left: the service has just taken it up again."""
    for job in client.jobs().items:
        if not is_final(job.state):
            client.cancel(job.id)


def slots_where_gpus_are_scarce(
    document: dict[str, Any], spec: JobSpec, cluster: Cluster
) -> tuple[dict[str, Any], str | None]:
    """The document to submit, and a sentence for the user if it differs from the given one.

    By default a job uses GPUs if the cluster has any; with more ranks than GPUs it would wait forever."""
    gpus = sum(int(node.total) for node in cluster.nodes if node.accelerator == "gpu")
    ranks = spec.layout.world_size
    if gpus == 0 or gpus >= ranks:
        return document, None
    resources = {**document.get("resources", {}), "accelerator": "cpu"}
    has = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    note = (
        f"This machine has {has} and the job has {ranks} ranks, so it runs on CPU slots (resources.accelerator: cpu)."
    )
    return {**document, "resources": resources}, note


if __name__ == "__main__":
    sys.exit(main())
