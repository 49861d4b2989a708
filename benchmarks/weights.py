"""A random Llama in Hugging Face's format in and out: how long that takes compared with copying the same files, and how
much memory it takes besides what a rank keeps anyway.

In: four ranks (tensor 2, pipeline 2) in bf16 begin with the weights, all at the same time. So that 1 billion parameters
fit on a small machine, all of them but the last norm are frozen, in bf16 and without a gradient: 2 bytes each.
`--whole-state` trains them all, so that master weights and moments are filled as well: 18 bytes each.

Out: a checkpoint, by the checkpointer's own writer and in fp32, as that of a job that trains all parameters, but
without the moments (no export reads them), becomes the same files again, by the process that
`python -m workers.weights.export` is: its start included, which is measured by itself as well. It reads twice the bytes
that it writes, and checks their sums.

What is copied for comparison in each turn, by one process, is on the disk at the end, like what is exported; what is
read is in the page cache. Processor seconds, of all processes together, say what either way costs where others keep
the machine busy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.local_ranks import LocalRanks
from benchmarks.support.report import Report, deliver, parser
from benchmarks.support.resident_memory import bytes_in, forget_peak, status_bytes
from workers.checkpoint import durable
from workers.checkpoint.catalog import Manifest, checkpoint_path, seal
from workers.checkpoint.rectangles import rectangles_of
from workers.comm.comm import Comm
from workers.config import JobSpec
from workers.engine import Engine
from workers.errors import MantaError
from workers.spec.reading import parse_job_spec
from workers.weights.config_keys import CONFIG
from workers.weights.config_out import their_config
from workers.weights.folder import INDEX, tensors_of
from workers.weights.mapping import their_tensors
from workers.weights.reading import Weights
from workers.weights.safetensors_files import NewFiles, NewTensor, index_of, plan_files
from workers.weights.submitted import with_shape_of_weights

BEYOND = 300 * 10**6
"""Bytes that reading may take besides a rank's own part and the largest tensor."""
MOST_TIMES_COPYING = 2.0
SHAPE = {
    "family": "llama", "hidden_size": 2048, "heads": 32, "kv_heads": 8, "ffn_hidden_size": 5632,
    "vocabulary_size": 32000, "sequence_length": 1024,
}  # fmt: skip
PER_LAYER = 2048 * (2 * 2048 + 2 * 512 + 3 * 5632)
OUTSIDE = 2 * 32000 * 2048
DTYPE = "bfloat16"
ALL_BUT_LAST_NORM = ["embedding", "layers", "output"]
SECONDS = 1800.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("weights", __doc__)
    options.add_argument("--billions", type=float, default=1.0, help="parameters in 10^9 (default: 1)")
    options.add_argument("--shard-megabytes", type=float, default=500.0, help="size of the files (default: 500)")
    options.add_argument("--repeats", type=int, default=5, help="turns of each measurement (default: 5)")
    options.add_argument("--whole-state", action="store_true", help="train all parameters, which takes 9 x the memory")
    options.add_argument("--folder", type=Path, help="where the files go; default: the folder for temporary files")
    return deliver(measure, options.parse_args(arguments))


@dataclass
class Began:
    """What one rank saw."""

    seconds: float
    processor: float
    """Processor seconds."""
    before: int
    """Resident bytes before it read anything."""
    peak: int
    """Most resident bytes while it did."""
    own: int
    """Bytes of its parameters, master weights and moments."""


def measure(options: argparse.Namespace) -> Report:
    """In, then out, then whether the bytes are the same."""
    report = Report("weights", options.seed)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="weights-") as name:
        folder = Path(name)
        document = _job(options.billions, options.seed, options.whole_state)
        _write_random(folder / "in", parse_job_spec(document), options)
        document = with_shape_of_weights({**document, "model": {"from": str(folder / "in")}})
        spec = parse_job_spec(document)
        sizes = [math.prod(tensor.shape) for tensor in their_tensors(spec)]
        report.settings = {"layers": spec.model.layers, "parameters": sum(sizes), "ranks": 4} | vars(options)
        report.settings = {k: v for k, v in report.settings.items() if k not in ("json", "out", "folder", "seed")}
        report.add("weights", 2 * sum(sizes), "bytes")
        _measure_in(report, document, folder, options.repeats, 2 * max(sizes))
        _measure_out(report, folder, options, 2 * max(sizes))
        report.add("same_bytes", _same_tensors(spec, folder), "bool", True)
    return report


def _job(billions: float, seed: int, whole_state: bool) -> dict[str, Any]:
    layers = max(2, round((billions * 1e9 - OUTSIDE) / PER_LAYER))
    frozen = [] if whole_state else ALL_BUT_LAST_NORM
    return {
        "model": {**SHAPE, "layers": layers},
        "data": {"source": "python-stdlib"},
        "train": {"steps": 1, "global_batch_size": 1, "seed": seed, "precision": "bf16", "frozen": frozen},
        "parallel": {"tensor": 2, "pipeline": 2},
    }


def _write_random(folder: Path, spec: JobSpec, options: argparse.Namespace) -> None:
    folder.mkdir()
    generator = torch.Generator().manual_seed(options.seed)
    tensors = [NewTensor(tensor.name, tensor.shape) for tensor in their_tensors(spec)]
    files = plan_files(tensors, DTYPE, int(options.shard_megabytes * 1e6))
    with NewFiles(folder, files, DTYPE) as new:
        for tensor in tensors:
            values = torch.empty(tensor.shape, dtype=torch.bfloat16).uniform_(-1.0, 1.0, generator=generator)
            new.write(tensor.name, 0, values.view(torch.uint8).numpy().data)
    if len(files) > 1:
        (folder / INDEX).write_text(index_of(files, DTYPE))
    (folder / CONFIG).write_text(json.dumps(their_config(spec, DTYPE)))


def _measure_in(report: Report, document: dict[str, Any], folder: Path, repeats: int, largest: int) -> None:
    ratios, costs, slowest, ranks = [], [], [], LocalRanks()
    for turn in range(repeats):
        copied, copying = _copied(folder / "in", folder / "copy")
        to = str(folder / "checkpoint") if turn == repeats - 1 else None
        began = ranks.run(_begin, document, to, seconds=SECONDS)
        slowest.append(max(each.seconds for each in began))
        ratios.append(slowest[-1] / copied)
        costs.append(sum(each.processor for each in began) / copying)
        report.samples.setdefault("in_seconds", []).append([round(each.seconds, 2) for each in began])
        report.samples.setdefault("in_copy_seconds", []).append(round(copied, 2))
        report.samples.setdefault("in_load", []).append(round(os.getloadavg()[0], 1))
    report.add("in_slowest_rank", _median(slowest), "s")
    report.add("in_to_copying", _median(ratios), "ratio", MOST_TIMES_COPYING)
    report.add("in_to_copying_processor", _median(costs), "ratio")
    report.add("largest_tensor", largest, "bytes")
    report.samples["own_bytes_by_rank"] = [each.own for each in began]
    report.samples["added_bytes_by_rank"] = [each.peak - each.before for each in began]
    most = max(each.peak - each.before for each in began)
    report.add("in_most_memory_beside_own_part", most, "bytes", largest + BEYOND)


def _begin(comm: Comm, spec: JobSpec, checkpoint: str | None) -> Began:
    """Begin with the weights; then save them to `checkpoint`, if it is given."""
    engine = Engine(spec, comm)
    optimizer = engine.optimizer
    state = [engine.flat.parameters, *optimizer.parameters, optimizer.exp_avg, optimizer.exp_avg_sq]
    for tensor in state:
        tensor.zero_()  # all of it lies in memory before
    comm.barrier()
    with _peak() as memory:
        began, processor = time.perf_counter(), time.process_time()
        engine.begin_with(Weights(spec).fill)
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
    own = sum(tensor.numel() * tensor.element_size() for tensor in state)
    if checkpoint is not None:
        _save(engine, spec, comm, checkpoint)
    comm.barrier()
    return Began(seconds, processor, memory[0], memory[1], own)


def _save(engine: Engine, spec: JobSpec, comm: Comm, folder: str) -> None:
    """A checkpoint of all parameters in fp32, without moments."""
    path, everything = checkpoint_path(folder, 1, 1), [(0, engine.flat.whole)]
    rectangles = rectangles_of(engine.flat, everything, everything, owned_only=True, tensor_index=comm.index("tensor"))
    values = {"model": engine.flat.parameters.float()}
    sums = durable.save(str(path), {"model": rectangles}, lambda: nullcontext(values), comm.shared_work)
    if comm.rank == 0:
        files, blocks = {n: s.size for n, s in sums.items()}, {n: list(s.blocks or ()) for n, s in sums.items()}
        seal(path, Manifest("benchmark", 1, 1, files, spec.model_dump(mode="json"), blocks=blocks))


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Resident bytes of this process before, and the most within."""
    forget_peak()
    memory = [status_bytes("VmRSS")]
    yield memory
    memory.append(status_bytes("VmHWM"))


def _measure_out(report: Report, folder: Path, options: argparse.Namespace, largest: int) -> None:
    shard = str(int(options.shard_megabytes * 1e6))
    checkpoint = checkpoint_path(folder / "checkpoint", 1, 1)
    seconds, starts, ratios, costs, peaks, idle = [], [], [], [], [], []
    for _ in range(options.repeats):
        copied, copying = _copied(folder / "in", folder / "copy")
        shutil.rmtree(folder / "out", ignore_errors=True)
        where = [str(checkpoint), "--to", str(folder / "out"), "--shard-bytes", shard]
        peak, taken, processor = _run("from workers.weights.export import main; assert main() == 0", *where)
        imports, start, loading = _run("import workers.weights.export")
        peaks.append(peak)
        idle.append(imports)
        seconds.append(taken)
        starts.append(start)
        ratios.append(taken / copied)
        costs.append((processor - loading) / copying)
        report.samples.setdefault("out_seconds", []).append(round(taken, 2))
        report.samples.setdefault("out_start_seconds", []).append(round(start, 2))
        report.samples.setdefault("out_copy_seconds", []).append(round(copied, 2))
        report.samples.setdefault("out_load", []).append(round(os.getloadavg()[0], 1))
    report.add("out", _median(seconds), "s")
    report.add("out_start", _median(starts), "s")
    report.add("out_to_copying", _median(ratios), "ratio", MOST_TIMES_COPYING)
    report.add("out_without_start_to_copying_processor", _median(costs), "ratio")
    report.add("out_most_memory", max(peaks), "bytes")
    report.add("out_most_memory_beside_imports", max(peaks) - min(idle), "bytes", largest + BEYOND)


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def _run(program: str, *arguments: str) -> tuple[int, float, float]:
    """Run a Python program to its end: its most resident bytes, the seconds it took, and the processor seconds."""
    began, before = time.perf_counter(), _children()
    # What the kernel counts for a child that has ended is at least what its parent had.
    command = [sys.executable, "-c", f"{program}\nprint(open('/proc/self/status').read())", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise MantaError(f"{program!r} ended with exit code {done.returncode}")
    return bytes_in(done.stdout, "VmHWM"), seconds, _children() - before


def _children() -> float:
    """Processor seconds of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _copied(source: Path, target: Path) -> tuple[float, float]:
    """Seconds until a copy of the files is on the disk, and processor seconds that it takes."""
    shutil.rmtree(target, ignore_errors=True)
    began, processor = time.perf_counter(), time.process_time()
    target.mkdir()
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("rb") as stream:
            os.fsync(stream.fileno())
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    shutil.rmtree(target)
    return seconds, processor


def _same_tensors(spec: JobSpec, folder: Path) -> bool:
    names = {here.file.name for here in tensors_of(spec).values()}
    return all((folder / "in" / name).read_bytes() == (folder / "out" / name).read_bytes() for name in names)


if __name__ == "__main__":
    sys.exit(main())
