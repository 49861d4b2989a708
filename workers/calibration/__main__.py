"""`python -m manta.workers.calibration`: measures this machine and prints what it found as one JSON document. The
service's and the command's processes have no torch; this one does."""

from __future__ import annotations

if __name__ == "__main__":  # before anything is loaded, which takes seconds
    from manta.workers.interruption import run_command

    run_command("manta.workers.calibration.__main__")

import argparse
import dataclasses
import json
import statistics
import sys
import traceback
from collections.abc import Callable

import torch

from manta.workers.calibration import clock
from manta.workers.calibration.collectives import between_gpus, collective_times, gpu_devices
from manta.workers.calibration.device import (
    ON_GPU,
    as_busy,
    attention_times,
    busy_seconds,
    layout_document,
    measure_gpu,
    product_times,
    step_times,
)
from manta.workers.calibration.local_ranks import LocalRanks
from manta.workers.calibration.measurements import Measurements
from manta.workers.comm.lost_peers import first_line
from manta.workers.errors import MantaError
from manta.workers.system.host_memory import keep_freed_memory
from manta.workers.system.resources import OtherCpuLoad, processor_name, usable_cores

MAX_RANKS = 8
DEVICES = ("cpu", "cuda")


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    options = argparse.ArgumentParser(prog="python -m manta.workers.calibration", description=__doc__)
    options.add_argument(
        "--device", choices=("auto", *DEVICES), default="auto", help="auto (the default): a GPU where there is one"
    )
    chosen = options.parse_args(arguments)
    try:
        measurements = measure(chosen.device, lambda part: print(f"measuring: {part}", file=sys.stderr, flush=True))
    except (MantaError, OSError, RuntimeError) as error:
        traceback.print_exc()
        print(first_line(error), file=sys.stderr)  # torch says more behind it, of which the last line helps nobody
        return 1
    print(json.dumps(dataclasses.asdict(measurements)))
    return 0


def measure(kind: str, say: Callable[[str], None]) -> Measurements:
    """Everything; `say` is told what is measured next. Raises MantaError if `kind` asks for a GPU and there is none."""
    clock.spreads.clear()
    has_gpus = kind != "cpu" and torch.cuda.is_available()
    if kind == "cuda" and not has_gpus:
        raise MantaError("torch finds no GPU here (`manta doctor` may say why)")
    return _measure_gpus(say) if has_gpus else _measure_cores(say)


def _measure_gpus(say: Callable[[str], None]) -> Measurements:
    # First what lies between them: some GPUs are for one process at a time, and so far this one is on none.
    collectives, problem = between_gpus(gpu_devices(), say)
    others = OtherCpuLoad()
    measurements = _with_disturbances(measure_gpu(torch.device("cuda", 0), ON_GPU, say), others)
    return dataclasses.replace(measurements, collectives=collectives, links_problem=problem)


def _measure_cores(say: Callable[[str], None]) -> Measurements:
    torch.set_num_threads(1)
    keep_freed_memory()
    cores = usable_cores()
    first = _measure_one_rank(cores, say)
    say("several ranks")
    gangs, counts = LocalRanks(), busy_ranks(cores)
    busy = as_busy(counts, gangs.run(busy_seconds, layout_document(data=counts[-1]), counts))
    collectives = [
        row for ranks in (2, 4, MAX_RANKS) for row in gangs.run(collective_times, layout_document(tensor=ranks))[0]
    ]
    # Twice, half a minute apart: where others share the processor, a machine may be slower for some seconds.
    second = _measure_one_rank(cores, say)
    return dataclasses.replace(
        first,
        products=first.products + second.products,
        attention=first.attention + second.attention,
        steps=first.steps + second.steps,
        busy=busy,
        collectives=collectives,
        other_cores=max((each for each in (first.other_cores, second.other_cores) if each is not None), default=None),
        spread=second.spread,  # of everything
    )


def _measure_one_rank(cores: int, say: Callable[[str], None]) -> Measurements:
    """What one rank does alone. Ranks are not children of this process, so their work would count as other work."""
    others, device = OtherCpuLoad(), torch.device("cpu")
    say("matrix products and attention")
    products = product_times(device, torch.float32) + product_times(device, torch.bfloat16)
    attention = attention_times(device, torch.float32)
    say("steps of one rank")
    measurements = Measurements(processor_name(), cores, products, attention, step_times(device))
    return _with_disturbances(measurements, others)


def busy_ranks(cores: int) -> list[int]:
    """How many ranks compute at once: one, and as many as keep all cores busy, with one each and with up to four."""
    return sorted({1, cores, max(cores, min(MAX_RANKS, 4 * cores))})


def _with_disturbances(measurements: Measurements, others: OtherCpuLoad) -> Measurements:
    """With what says whether something else ran on this machine while this was measured."""
    return dataclasses.replace(measurements, other_cores=others.cores(), spread=statistics.median(clock.spreads))
