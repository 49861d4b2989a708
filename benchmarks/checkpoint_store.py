"""What saving a checkpoint into an S3 store, or on disk, costs the training meanwhile.

One rank trains, its trainer in a process of its own as in a job. In turns it trains alone, while it saves a checkpoint
to an S3 server, while a process that knows nothing of it uploads the same bytes to the same server by boto3, while it
saves on disk, and while another process copies the same bytes there. Trainer, uploads and server share the machine's
cores, so what counts is the step during our upload over the step during the plain one right before or after it. A step
counts for what went on from its beginning to its end. The server has to be there, and is found as the environment says:

    npx s3rver -d /tmp/s3rver -p 4599 --configure-bucket benchmark &
    export AWS_ENDPOINT_URL_S3=http://127.0.0.1:4599 AWS_ACCESS_KEY_ID=S3RVER AWS_SECRET_ACCESS_KEY=S3RVER
    python -m benchmarks.checkpoint_store --store s3://benchmark/checkpoints --server s3rver
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from typing import Any

from benchmarks.support.local_ranks import LocalRanks
from benchmarks.support.report import Report, deliver, parser
from benchmarks.support.store_turns import Plan, Turn, train_in_turns
from manta.workers.storage.locations import parse_location
from manta.workers.storage.object_files import PART_BYTES, PARTS_AT_ONCE

LAYERS = 17
VOCABULARY_SIZE = 65536
"""171 million parameters with so many layers: a checkpoint of 2.05 GB."""
LIMITS = {"upload": 1.10, "wait": 0.01}
"""The step during our upload over that during the plain one; what a save keeps the training waiting, over a step."""
SECONDS = 3600.0

GROUPS = (("plain_upload", "upload"), ("alone", "plain_copy", "local"))
"""Compared with each other, and so measured one right after the other: what else the machine does changes by the
minute."""
ARMS = tuple(arm for group in GROUPS for arm in group)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("checkpoint_store", __doc__)
    options.add_argument("--repetitions", type=int, default=5, help="turns of each (default: 5)")
    options.add_argument("--alone-steps", type=int, default=12, help="steps of a turn alone (default: 12)")
    options.add_argument("--layers", type=int, default=LAYERS, help=f"of the model (default: {LAYERS})")
    options.add_argument(
        "--vocabulary-size", type=int, default=VOCABULARY_SIZE, help=f"of the model (default: {VOCABULARY_SIZE})"
    )
    options.add_argument("--store", metavar="URL", required=True, help="an empty place, s3://BUCKET/PREFIX")
    options.add_argument("--server", metavar="NAME", default="unknown", help="what serves it, for the report")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Let the groups take turns in random order, and in each its arms."""
    report = Report("checkpoint_store", options.seed)
    order = random.Random(options.seed)
    groups = [group for _ in range(options.repetitions) for group in order.sample(GROUPS, len(GROUPS))]
    arms = [arm for group in groups for arm in order.sample(group, len(group))]
    document = job(options.layers, options.vocabulary_size, options.seed)
    with tempfile.TemporaryDirectory(prefix="manta-benchmark-") as folder:
        plan = Plan(tuple(arms), options.alone_steps, str(parse_location(options.store)), folder)
        (seen,) = LocalRanks().run(train_in_turns, document, plan, seconds=SECONDS)
    turns = seen.turns
    _add_steps(report, turns)
    _add_memory(report, seen.first)
    report.add("checkpoint", seen.bytes, "bytes")
    report.settings = {
        "model": document["model"],
        "ranks": 1,
        "threads": 1,
        "repetitions": options.repetitions,
        "server": options.server,
        "part_bytes": PART_BYTES,
        "parts_at_once": PARTS_AT_ONCE,
    }
    report.samples = {
        arm: [
            {"steps": len(turn.steps), "median_step": round(statistics.median(turn.steps), 4),
             "seconds": round(turn.seconds, 2), "wait": round(turn.wait, 5)}
            for turn in turns if turn.arm == arm
        ]
        for arm in ARMS
    }  # fmt: skip
    return report


def job(layers: int, vocabulary_size: int, seed: int) -> dict[str, Any]:
    """The job of one process: short steps for its size, so that there are many of them during an upload."""
    model = {"layers": layers, "hidden_size": 768, "heads": 12, "sequence_length": 64}
    train = {"steps": 1_000_000, "global_batch_size": 1, "micro_batch_size": 1, "seed": seed}
    checkpoint = {"every_steps": 0}
    model["vocabulary_size"] = vocabulary_size
    return {"model": model, "data": {"source": "python-stdlib"}, "train": train, "checkpoint": checkpoint}


def _add_steps(report: Report, turns: list[Turn]) -> None:
    steps = {arm: [step for turn in turns if turn.arm == arm for step in turn.steps] for arm in ARMS}
    medians = {arm: statistics.median(steps[arm]) for arm in ARMS}
    for arm in ARMS:
        report.add(f"{arm}_step", round(medians[arm], 4), "s")
        report.add(f"{arm}_steps", len(steps[arm]), "steps")
    for arm in ARMS[1:]:
        seconds = [turn.seconds for turn in turns if turn.arm == arm]
        report.add(f"{arm}_takes", round(statistics.median(seconds), 2), "s")
    report.add("upload_to_plain_upload", _ratio(turns, "upload", "plain_upload"), "ratio", LIMITS["upload"])
    report.add("local_to_plain_copy", _ratio(turns, "local", "plain_copy"), "ratio")
    report.add("local_to_alone", _ratio(turns, "local", "alone"), "ratio")
    for arm in ("upload", "local"):
        waits = [turn.wait for turn in turns if turn.arm == arm]
        report.add(
            f"{arm}_training_thread_waits",
            round(statistics.median(waits) / medians["alone"], 5),
            "ratio",
            LIMITS["wait"],
        )


def _ratio(turns: list[Turn], arm: str, other: str) -> float:
    """Median, over the repetitions, of the one's median step over the other's."""
    ours, theirs = ([statistics.median(turn.steps) for turn in turns if turn.arm == name] for name in (arm, other))
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 4)


def _add_memory(report: Report, first: list[Turn]) -> None:
    """Of the process's first save on disk, and of its first upload, which comes after it."""
    alone, local, upload = (turn.peak for turn in first)
    report.add("peak_memory_alone", alone, "bytes")
    report.add("local_adds_to_peak_memory", local - alone, "bytes")
    report.add("upload_adds_to_peak_memory", upload - alone, "bytes")
    parts = (PARTS_AT_ONCE + 1) * PART_BYTES
    report.add("upload_adds_to_local", upload - local, "bytes")
    report.add("parts_in_memory", parts, "bytes")


if __name__ == "__main__":
    sys.exit(main())
