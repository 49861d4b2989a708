"""What rank 0 does for a checkpoint besides its own part, and what each rank does before it reads one, simulated with
the real plans of a model of 1 trillion parameters on 3,072 ranks: tensor 8, pipeline 64, data 6, ZeRO-1.

Stages are built on tensors without memory. A stage in the middle stands for all in the middle, under the names of their
layers. Nothing is sent: the messages are decoded as they would arrive.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.support.faked_comm import FakedComm
from benchmarks.support.report import Report, deliver, parser
from benchmarks.support.resident_memory import forget_peak, status_bytes
from workers.checkpoint.catalog import Manifest
from workers.checkpoint.contents import Contents, StoredRectangle, WrittenRectangles, as_text, merged
from workers.checkpoint.durable import KINDS, Written
from workers.checkpoint.rectangles import Rectangle, rectangles_of
from workers.comm.grid import Coordinates, RankGrid
from workers.config import JobSpec
from workers.model.parallelize import ModelStage
from workers.parallel.data.flat import FlatParameters
from workers.protocol.json_codec import from_json, to_json
from workers.spec.reading import parse_job_spec

MOST_SECONDS, MOST_BYTES = 3.0, 10**9
ARCHIVE_BYTES = 1000
"""Of an archive, besides its elements."""
SHAPE = {"layers": 128, "hidden_size": 25600, "heads": 160, "sequence_length": 2048, "vocabulary_size": 51200}
LAYOUT = {"tensor": 8, "pipeline": 64, "data": 6}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    return deliver(measure, parser("checkpoint_plan", __doc__).parse_args(arguments))


def measure(options: argparse.Namespace, shape: dict[str, Any] = SHAPE, layout: dict[str, int] = LAYOUT) -> Report:
    """Plan, join, read."""
    report = Report("checkpoint_plan", options.seed)
    spec = parse_job_spec({
        "model": shape, "parallel": layout, "data": {"source": "python-stdlib"},
        "train": {"steps": 1, "global_batch_size": 3072, "precision": "bf16"},
    })  # fmt: skip
    messages, first_rank, sizes = _messages(spec)
    report.settings = {"model": shape, "parallel": layout, "messages": len(messages)}
    report.add("messages", sum(map(len, messages)), "bytes")
    whole, seconds, memory = _joined(messages)
    report.add("rectangles", whole.rectangles, "rectangles")
    report.add("contents", len(whole.content), "bytes")
    report.add("join_seconds", round(seconds, 2), "s", MOST_SECONDS)
    report.add("join_memory", memory, "bytes", MOST_BYTES)
    began = time.perf_counter()
    contents = Contents.from_bytes(whole.content)
    contents.check(Manifest("benchmark", 1, 1, sizes, {}))
    overlaps = 0
    for kind in KINDS:
        for each in first_rank:
            rows = contents.tensors[f"{kind}.{each.name}"].overlapping(each.offsets[0], each.offsets[0] + each.sizes[0])
            overlaps += len(rows)
    report.add("a_rank_finds_its_part", round(time.perf_counter() - began, 2), "s", MOST_SECONDS)
    report.add("rectangles_in_the_same_rows", overlaps, "rectangles")
    return report


def _joined(messages: list[bytes]) -> tuple[Any, float, int]:
    forget_peak()
    before, began = status_bytes("VmRSS"), time.perf_counter()
    ranks = [from_json(Written, json.loads(message)) for message in messages]
    whole = merged((each.file, each.tensors) for each in ranks)
    return whole, time.perf_counter() - began, status_bytes("VmHWM") - before


def _messages(spec: JobSpec) -> tuple[list[bytes], list[Rectangle], dict[str, int]]:
    """What each rank says of what it has written; the rectangles of rank 0; bytes of all files."""
    grid, layout = RankGrid(spec.layout), spec.layout
    messages: dict[int, bytes] = {}
    sizes: dict[str, int] = {}
    own: list[Rectangle] = []
    a_stage = spec.model.layers // layout.pipeline
    for stage in (0, min(1, layout.pipeline - 1), layout.pipeline - 1):
        alike = [stage] if stage in (0, layout.pipeline - 1) else range(1, layout.pipeline - 1)
        for tensor, replica, rectangles in _plans(spec, stage):
            own = own or rectangles
            for other in alike:
                rank = grid.rank(Coordinates(tensor, other, replica, 0))
                moved = _renamed(rectangles, (other - stage) * a_stage)
                file = f"__{rank}_0.distcp"
                tensors, sizes[file] = _said(moved, file)
                messages[rank] = json.dumps(to_json(Written(file, tensors, {}))).encode()
    return [messages[rank] for rank in range(grid.world_size)], own, sizes


def _plans(spec: JobSpec, stage: int) -> Iterator[tuple[int, int, list[Rectangle]]]:
    """(tensor index, replica, rectangles) of all ranks of a stage."""
    layout, meta = spec.layout, torch.device("meta")
    for tensor in range(layout.tensor):
        rank = RankGrid(layout).rank(Coordinates(tensor, stage, 0, 0))
        with meta:
            shards = ModelStage(spec, FakedComm(RankGrid(layout), rank, meta, "links")).named_shards()
            flat = FlatParameters(shards, layout.data, meta, torch.bfloat16, layout.bucket_bytes(on_gpu=True))
        for replica in range(layout.data):
            parts = flat.parts(replica)
            yield tensor, replica, rectangles_of(flat, parts, parts, owned_only=True, tensor_index=tensor)


def _renamed(rectangles: list[Rectangle], layers: int) -> list[tuple[str, Rectangle]]:
    def name(each: Rectangle) -> str:
        return re.sub(r"^layers\.(\d+)", lambda match: f"layers.{int(match[1]) + layers}", each.name)

    return [(name(each), each) for each in rectangles]


def _said(rectangles: list[tuple[str, Rectangle]], file: str) -> tuple[dict[str, WrittenRectangles], int]:
    """What a rank says of these, kind after kind, and the bytes of its file."""
    tensors: dict[str, list[StoredRectangle]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    at = 0
    for kind in KINDS:
        for name, each in rectangles:
            size = 4 * math.prod(each.sizes) + ARCHIVE_BYTES
            shapes[f"{kind}.{name}"] = each.shape
            tensors.setdefault(f"{kind}.{name}", []).append(StoredRectangle(each.offsets, each.sizes, file, at, size))
            at += size
    return {name: as_text(shapes[name], "float32", those) for name, those in tensors.items()}, at


if __name__ == "__main__":
    sys.exit(main())
