"""One training step of the engine in one process on a CPU, compared with the same model written plainly in PyTorch and
that of `transformers`: forward, backward, clipping and AdamW (fused in all three) on the same tokens.

Each is a process of its own, as a user would run it: the engine tells its C library to keep freed memory, and a plain
program does not. What is left of the difference when they are set to do so too is measured as well. They take turns in
blocks of steps, in any order, so that the machine's other work meets all of them, and they are started several times:
where a process's pages happen to lie makes it faster or slower by some percent for as long as it lives. Ratios are the
engine's median step time over theirs: below 1 the engine is faster. Also the host's time a layer: the parallel path
with groups of size 2 whose collectives return at once, on tensors so small that arithmetic does not count. And two
replicas over links whose weights and gradients are in parts (ZeRO 3), against the same with ZeRO 1.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch

from benchmarks.support.faked_comm import FakedComm
from benchmarks.support.hugging_face import transformers_like
from benchmarks.support.local_ranks import LocalRanks
from benchmarks.support.plain_gpt import Layer as PlainLayer
from benchmarks.support.plain_gpt import PlainLoop
from benchmarks.support.report import Report, deliver, parser
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec
from manta.workers.data.batches import MicroBatch
from manta.workers.engine import Engine
from manta.workers.model.families import parts_of
from manta.workers.model.shared import Shared
from manta.workers.model.stage import ModelStage
from manta.workers.parallel.data.flat import FlatParameters
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.parallel.tensor.products import TorchProducts
from manta.workers.parallel.tensor.sequence_parallel import Region
from manta.workers.parallel.tensor.shards import fill_initial, named_shards
from manta.workers.spec.reading import parse_job_spec
from manta.workers.system.host_memory import keep_freed_memory

LEARNING_RATE = 1e-4
LIMITS = {"plain": 1 / 0.97, "transformers": 1.0}
KEEPING = "_keeping_memory"
"""At the end of a program's name: it is set to keep freed memory, as the engine is."""

Step = Callable[[], object]
Block = Callable[[], list[float]]
"""Does some steps; the seconds that each took."""


@dataclass(frozen=True)
class Size:
    """A model and a batch."""

    layers: int
    hidden_size: int
    heads: int
    sequence_length: int
    batch: int
    vocabulary_size: int
    family: str = "gpt"
    kv_heads: int | None = None

    @property
    def others(self) -> tuple[str, ...]:
        """The programs that the engine is compared with."""
        return tuple(LIMITS) if self.family == "gpt" else ("transformers",)


SIZES = {
    "nanogpt": Size(4, 128, 4, 64, 12, 256),
    "middle": Size(4, 384, 6, 256, 4, 8192),
    "llama": Size(4, 384, 6, 256, 4, 8192, "llama", 2),
}
SHARDED_SIZE = SIZES["middle"]
SHARDED = {1: 1.35, 8: None}
"""By micro-batches of a replica: limit of a step's time with ZeRO 3 over that with ZeRO 1; None: reported alone."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("step", __doc__)
    options.add_argument("--starts", type=int, default=8, help="times that each program is started (default: 8)")
    options.add_argument(
        "--rounds", type=int, default=4, help="blocks of steps of each contestant a start (default: 4)"
    )
    options.add_argument("--only", choices=SIZES, help="one size alone")
    options.add_argument("--seconds", type=float, default=0.4, help="length of a block, roughly (default: 0.4)")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Let the contestants race at each size."""
    report = Report("step", options.seed)
    torch.set_num_threads(1)
    for name, size in SIZES.items():
        if options.only not in (None, name):
            continue
        races = []
        for _ in range(options.starts):
            with _processes(size, options.seed, options.seconds) as contestants:
                races.append(_race(contestants, options.rounds))
        medians = {contestant: statistics.median(race[contestant] for race in races) for contestant in races[0]}
        for contestant, seconds in medians.items():
            report.add(f"{name}_{contestant}_step", round(1e3 * seconds, 3), "ms")
        # Targets are limits from above: the engine's time over theirs.
        for program in size.others:
            for other in (program, program + KEEPING):
                ratio = medians["engine"] / medians[other]
                report.add(f"{name}_engine_to_{other}", round(ratio, 4), "ratio", LIMITS[program])
        # The cost if the parts of every step were measured; they are of every tenth.
        measuring = medians["engine_measured"] / medians["engine"] - 1
        report.add(f"{name}_cost_of_measuring_parts", round(measuring, 4), "ratio", 0.01)
    layers = {name: partial(_block, step, _steps_in(step, options.seconds / 3)) for name, step in _layers().items()}
    host = _race(layers, options.rounds * options.starts)
    for contestant, seconds in host.items():
        report.add(f"host_time_{contestant}_layer", round(1e6 * seconds, 1), "us")
    report.add("host_time_parallel_to_plain", round(host["parallel"] / host["plain"], 4), "ratio", 1.5)
    for micro_batches, limit in SHARDED.items():
        by_stage = _sharded(options, micro_batches)
        for zero, taken in by_stage.items():
            report.add(f"zero_{zero}_m{micro_batches}_step", round(1e3 * taken, 3), "ms")
        report.add(f"zero_3_to_1_m{micro_batches}", round(by_stage[3] / by_stage[1], 4), "ratio", limit)
    report.settings = {
        "sizes": {name: vars(size) for name, size in SIZES.items()},
        "threads": 1,
        "starts": options.starts,
        "rounds_a_start": options.rounds,
        "seconds_a_round": options.seconds,
    }
    return report


def job(size: Size, seed: int) -> JobSpec:
    """The job of one process."""
    model = {key: value for key, value in vars(size).items() if key != "batch"}
    train = {"steps": 1000, "global_batch_size": size.batch, "micro_batch_size": size.batch, "seed": seed}
    return parse_job_spec({"model": model, "data": {"source": "python-stdlib"}, "train": train})


def _sharded(options: argparse.Namespace, micro_batches: int) -> dict[int, float]:
    """Median seconds of a step by ZeRO stage, of two replicas with so many micro-batches of the middle size each."""
    size = SHARDED_SIZE
    document = job(size, options.seed).model_dump(mode="json")
    at_once = max(1, size.batch // micro_batches)
    document["train"] |= {"global_batch_size": 2 * at_once * micro_batches, "micro_batch_size": at_once}
    document["parallel"]["data"] = 2
    rounds = max(1, options.rounds // micro_batches)
    by_rank: list[dict[int, float]] = LocalRanks().run(_sharded_steps, document, rounds, options.seconds)
    return by_rank[0]


def _sharded_steps(comm: Comm, spec: JobSpec, rounds: int, seconds: float) -> dict[int, float]:
    """Blocks of steps of both stages in turn, in one order on all ranks."""
    torch.set_num_threads(1)
    train, steps = spec.train, {}
    shape = (spec.model.sequence_length + 1, train.micro_batch_size)
    for zero in (1, 3):
        engine = Engine(spec.model_copy(update={"parallel": spec.layout.model_copy(update={"zero": zero})}), comm)
        engine.initialise(train.seed)
        tokens = [torch.randint(spec.model.vocabulary_size or 256, shape) for _ in range(spec.micro_batches)]
        batch = [MicroBatch(range(train.micro_batch_size), each[:-1], each[1:]) for each in tokens]
        steps[zero] = partial(engine.step, batch, train.global_batch_size, LEARNING_RATE, 0)
    counts = torch.tensor([_steps_in(step, seconds) for step in steps.values()], dtype=torch.float64)
    comm.all_reduce("world", counts, largest=True)
    blocks = {
        zero: partial(_block, step, int(count)) for (zero, step), count in zip(steps.items(), counts, strict=True)
    }
    taken: dict[int, list[float]] = {zero: [] for zero in blocks}
    for _ in range(rounds):
        for zero, block in blocks.items():
            taken[zero] += block()
    return {zero: statistics.median(values) for zero, values in taken.items()}


def _steps_of(program: str, size: Size, seed: int) -> dict[str, Step]:
    """The contestants of one program, by name; all begin with the same weights, and have the same tokens."""
    spec = job(size, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (size.sequence_length + 1, size.batch)
    tokens_sb = torch.randint(size.vocabulary_size, shape, generator=generator)
    batch = MicroBatch(range(size.batch), tokens_sb[:-1], tokens_sb[1:])
    if program == "transformers":
        return {program: _transformers_step(spec, tokens_sb.t().contiguous())}
    comm = Comm(RankGrid(spec.layout), 0, torch.device("cpu"))
    if program == "plain":
        plain = PlainLoop(spec, _initial_weights(spec, comm, seed), fused=True)
        return {program: lambda: plain.step(batch, LEARNING_RATE)}
    engine = Engine(spec, comm)
    engine.initialise(seed)

    def step() -> None:
        engine.step([batch], size.batch, LEARNING_RATE, 0)

    def measured_step() -> None:
        comm.step.parts.begin()
        step()
        comm.step.parts.end()

    return {"engine": step, "engine_measured": measured_step}


def _initial_weights(spec: JobSpec, comm: Comm, seed: int) -> dict[str, torch.Tensor]:
    """What an engine begins with, without one: it would change how this process's memory is kept."""
    entries = ModelStage(spec, comm).named_shards()
    weights = {entry.name: torch.zeros(entry.parameter.shape) for entry in entries}
    for entry in entries:
        fill_initial(entry, weights[entry.name], seed)
    return weights


@contextlib.contextmanager
def _processes(size: Size, seed: int, seconds: float) -> Iterator[dict[str, Block]]:
    """The contestants, each program in a process of its own; a block takes `seconds`, roughly."""
    server = multiprocessing.get_context("forkserver")
    models = ("gpt2.modeling_gpt2", "llama.modeling_llama")
    server.set_forkserver_preload([__name__, *(f"transformers.models.{each}" for each in models)])
    contestants: dict[str, Block] = {}
    with contextlib.ExitStack() as stack:
        for program in ("engine", *size.others, *(program + KEEPING for program in size.others)):
            pipe, theirs = server.Pipe()
            process = server.Process(target=_serve, args=(theirs, program, size, seed, seconds), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(pipe.close)
            contestants.update({name: partial(_ask, pipe, name) for name in pipe.recv()})
        yield contestants


def _serve(pipe: Connection, program: str, size: Size, seed: int, seconds: float) -> None:
    """Say the names of the program's contestants, and answer each that is called with a block of its steps, until
    nobody asks any more."""
    torch.set_num_threads(1)
    if program.endswith(KEEPING):
        keep_freed_memory()
    steps = _steps_of(program.removesuffix(KEEPING), size, seed)
    if program.endswith(KEEPING):
        steps = {name + KEEPING: step for name, step in steps.items()}
    counts = {name: _steps_in(step, seconds) for name, step in steps.items()}
    pipe.send(list(steps))
    with contextlib.suppress(EOFError):
        while True:
            name = pipe.recv()
            pipe.send(_block(steps[name], counts[name]))


def _ask(pipe: Connection, name: str) -> list[float]:
    pipe.send(name)
    seconds: list[float] = pipe.recv()
    return seconds


def _transformers_step(spec: JobSpec, tokens_bs: torch.Tensor) -> Step:
    model = transformers_like(spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        logits = model(tokens_bs[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_bs[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def _layers() -> dict[str, Step]:
    """Forward and backward of one small layer: the parallel path, and the plain one."""
    model = {"layers": 1, "hidden_size": 32, "heads": 4, "sequence_length": 8}
    parallel = {"tensor": 2, "sequence_parallel": True}
    document = {"model": model, "data": {"source": "python-stdlib"}, "train": {"steps": 1}, "parallel": parallel}
    spec = parse_job_spec(document)
    region = Region(FakedComm(RankGrid(spec.layout), 0, torch.device("cpu")), True, TorchProducts())
    layer = parts_of(spec.model).layer(Shared(spec, region), 0)
    FlatParameters(named_shards(layer), 1, torch.device("cpu"))
    plain = PlainLayer(spec.model)
    x_sbh = torch.randn(8 // 2, 1, 32, requires_grad=True)
    x_bsh = torch.randn(1, 8, 32, requires_grad=True)
    run = ForwardPass(Positions.of(8))
    grad_sbh, grad_bsh = torch.ones(8 // 2, 1, 32), torch.ones(1, 8, 32)
    return {
        "parallel": lambda: torch.autograd.backward(layer(x_sbh, run), grad_sbh),
        "plain": lambda: torch.autograd.backward(plain(x_bsh), grad_bsh),
    }


def _block(step: Step, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds


def _steps_in(step: Step, seconds: float) -> int:
    """How many steps take so long; at least one."""
    step()
    return max(1, int(seconds / _block(step, 1)[0]))


def _race(contestants: Mapping[str, Block], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each, who take turns in random order."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name in random.sample(list(contestants), len(contestants)):
            seconds[name] += contestants[name]()
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
