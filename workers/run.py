"""The engine alone: `python -m workers.run CONFIG.yaml [--metrics FILE] [--checkpoints FOLDER] [--cache FOLDER]
[--stop-after-step N] [--trace FILE [--trace-steps K] [--trace-first-step N]]`.

One process for a layout of one rank; for more, `torchrun --nproc-per-node N -m workers.run CONFIG.yaml`. CONFIG is a
JobSpec, of which the engine reads what concerns it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from workers.accounting.device_peak import peak_of_rank
from workers.checkpoint.catalog import newest_usable, next_generation, whole_checkpoints
from workers.comm.comm import BackendKind, Comm
from workers.comm.grid import RankGrid
from workers.comm.host_names import ask_for_none
from workers.comm.secret import SECRET_LENGTH
from workers.config import JobSpec
from workers.data.corpus_record import FILE_NAME as CORPUS_RECORD
from workers.data.vocabulary import with_vocabulary
from workers.errors import CheckpointError, MantaError, interrupted
from workers.metric_names import VALIDATION_LOSS
from workers.nonfinite import spell
from workers.protocol.messages import Resume
from workers.protocol.reports import Event, Message, Metrics
from workers.reporter import Reporter
from workers.settings import Launcher, read_launcher, read_token_cache
from workers.spec.problems import Problem, SpecError
from workers.spec.reading import load_job_spec
from workers.storage.places import BadPlace, Place, place_of
from workers.system import gpu
from workers.system.cores import usable_cores
from workers.threads import decided_threads, stored_threads, threads_of, with_threads
from workers.trace_file import TraceFile
from workers.trainer import Places, Trainer


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status. Errors of the user are one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m workers.run", description="Train one job without the service.")
    parser.add_argument("config", type=Path, help="JobSpec in YAML")
    parser.add_argument(
        "--metrics",
        type=Path,
        help="write one JSON object a step to this file; of a run that it resumes, the steps so far stay",
    )
    parser.add_argument(
        "--checkpoints", type=_place, help="save durable checkpoints in, and resume from, this folder or s3:// URL"
    )
    parser.add_argument("--cache", type=Path, help="keep tokens of corpora in this folder (default: MANTA_TOKEN_CACHE)")
    parser.add_argument(
        "--stop-after-step",
        type=_step,
        help="end after this step, as if the job had been interrupted: to look at a few",
    )
    parser.add_argument(
        "--trace", type=Path, help="record single steps, action by action: .json, or .pftrace for Perfetto"
    )
    parser.add_argument("--trace-steps", type=int, default=1, help="how many steps to record (default: 1)")
    parser.add_argument(
        "--trace-first-step", type=int, default=0, help="record none before this step (default: the second)"
    )
    options = parser.parse_args(arguments)
    try:
        spec = with_vocabulary(_spec_in(options.config))
        launcher = read_launcher()
        _check_world(spec, launcher)
        trace = TraceFile(options.trace, options.trace_steps, options.trace_first_step) if options.trace else None
        train(spec, launcher, options.metrics, options.checkpoints, options.stop_after_step, options.cache, trace)
    except SpecError as error:
        print(*error.lines(options.config), sep="\n", file=sys.stderr)
        return 2
    except (MantaError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return interrupted()
    return 0


def _spec_in(file: Path) -> JobSpec:
    """The checked spec in `file`. Raises SpecError."""
    try:
        return load_job_spec(file)
    except OSError as error:
        raise SpecError([Problem("", f"cannot be read ({error.strerror or error})")]) from error


def _place(text: str) -> Place:
    try:
        return place_of(text)
    except BadPlace as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _step(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"the first step is 1, not {number}")
    return number


def _check_world(spec: JobSpec, launcher: Launcher | None) -> None:
    world_size = launcher.world_size if launcher else 1
    needed = spec.layout.world_size
    if world_size != needed:
        raise MantaError(
            f"the layout has {needed} ranks, but {world_size} process(es) were started: use "
            f"torchrun --nproc-per-node {needed} -m workers.run CONFIG.yaml, or change parallel"
        )


def train(
    spec: JobSpec,
    launcher: Launcher | None,
    metrics: Path | None,
    checkpoints: Place | None,
    stop_after_step: int | None = None,
    cache: Path | None = None,
    trace: TraceFile | None = None,
) -> Trainer:
    """Train `spec` in this process as the rank that `launcher` names; returns the trainer after its last step."""
    os.environ.update(spec.resources.environment)  # nothing that reads it has been used yet
    device = pick_device(spec, launcher.local_rank if launcher else 0)
    # Every rank looks before the first of them can write.
    generation = next_generation(checkpoints) if checkpoints else 1
    store = _store_of(launcher)
    spec = _with_threads(spec, device, launcher, store, checkpoints)
    torch.set_num_threads(threads_of(spec))
    comm = _comm_of(spec, launcher, device, generation, store)
    with MetricsFile(metrics if comm.rank == 0 else None, spec.train.steps) as sink:
        reporter = Reporter(sink.write)
        places = Places(
            checkpoints=str(checkpoints) if checkpoints else None,
            corpus_record=checkpoints / CORPUS_RECORD if checkpoints else None,
            token_cache=(cache or read_token_cache()).absolute(),
        )
        trainer = Trainer(
            spec,
            comm,
            reporter,
            peak_of_rank(device, spec),
            places,
        )
        restore_newest(trainer, checkpoints)
        last = min(spec.train.steps, stop_after_step or spec.train.steps)
        if comm.rank == 0 and trainer.step >= last:
            print(f"there is nothing left to train: step {trainer.step} is done, and the last one is {last}")
        if trace is not None:
            trace.begin(trainer, last)
        trainer.train(stop_after_step)
        reporter.close()
        if trace is not None:
            trace.end(trainer, store)
    comm.close()
    return trainer


def _store_of(launcher: Launcher | None) -> dist.Store | None:
    """Where the ranks meet; None where there is only one."""
    if launcher is None or launcher.world_size == 1:
        return None
    ask_for_none()
    is_host = launcher.rank == 0 and not launcher.store_is_running
    return dist.TCPStore(launcher.host, launcher.port, launcher.world_size, is_host)


def _comm_of(
    spec: JobSpec, launcher: Launcher | None, device: torch.device, generation: int, store: dist.Store | None
) -> Comm:
    """This rank's, connected to the others."""
    # More processes than GPUs share them, which NCCL does not allow.
    shared = device.type == "cuda" and launcher is not None and launcher.local_world_size > torch.cuda.device_count()
    backend: BackendKind | None = "links" if shared else None
    comm = Comm(RankGrid(spec.layout), launcher.rank if launcher else 0, device, backend)
    comm.generation = generation
    if launcher is not None and store is not None:
        comm.connect(store, generation, launcher.host, _shared_secret(store))
    return comm


def _with_threads(
    spec: JobSpec, device: torch.device, launcher: Launcher | None, store: dist.Store | None, checkpoints: Place | None
) -> JobSpec:
    """`spec` with the number of threads that rank 0 finds for all ranks."""
    if spec.resources.threads != "auto":
        return spec
    is_first = launcher is None or launcher.rank == 0
    threads = _threads_for(spec, device, launcher, checkpoints) if is_first else 0
    if store is not None:
        if is_first:
            store.set("manta/threads", str(threads))
        threads = int(store.get("manta/threads"))
    return with_threads(spec, threads)


def _threads_for(spec: JobSpec, device: torch.device, launcher: Launcher | None, checkpoints: Place | None) -> int:
    """What the job has begun with, else what suits this machine."""
    begun_with = threads_begun_with(checkpoints) if checkpoints else None
    if begun_with is not None:
        return begun_with
    ranks = launcher.local_world_size if launcher else 1
    return decided_threads(spec, [(usable_cores(), ranks)] if device.type == "cpu" else [])


def threads_begun_with(checkpoints: Place) -> int | None:
    """Threads of the job that has saved checkpoints in this folder; None where none is whole."""
    whole = whole_checkpoints(checkpoints)
    return stored_threads(whole[-1][1].spec) if whole else None


def _shared_secret(store: dist.Store) -> str:
    """The same random one on all ranks. It goes through torchrun's store, so it does not keep out processes that reach
    that."""
    return store.compare_set("manta/secret", "", secrets.token_hex(SECRET_LENGTH // 2)).decode()


def restore_newest(trainer: Trainer, checkpoints: Place | None) -> None:
    """Go on from the newest checkpoint that is not damaged; from the start where none was ever whole. Raises
    CheckpointError when all that were are damaged now."""
    path: Place | None = None
    skipped: list[str] = []
    if checkpoints is not None:
        any_whole = bool(whole_checkpoints(checkpoints))

        def use(path: Place, step: int) -> None:
            trainer.restore(Resume("checkpoint", step, str(path)))

        path, skipped = newest_usable(checkpoints, use)
        if path is None and any_whole:
            raise CheckpointError("; ".join(skipped))
    if trainer.comm.rank == 0:
        for reason in skipped:
            print(f"skipped: {reason}", file=sys.stderr)
    if path is None:
        trainer.restore(Resume())


def pick_device(spec: JobSpec, local_rank: int) -> torch.device:
    """The device that `resources.accelerator` asks for. Raises MantaError for a GPU where there is none."""
    wanted = spec.resources.accelerator
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MantaError("resources.accelerator is gpu, but this machine has none (try: auto)")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    gpu.use_for(spec, device)
    return device


class MetricsFile:
    """Writes metrics as JSON lines, and a short line a step for the person who waits."""

    def __init__(self, path: Path | None, steps: int):
        self._path, self._steps = path, steps
        self._file: BinaryIO | None = None
        self._has_begun = False
        self._failure: OSError | None = None
        self._is_heard = True

    def __enter__(self) -> MetricsFile:
        """Raises MantaError for a file that cannot be written."""
        if self._path is not None:
            try:
                self._file = self._path.open("ab")
            except OSError as error:
                raise self._unwritable(error) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close()
        if self._failure is not None and kind is None:
            raise self._unwritable(self._failure) from self._failure

    def _unwritable(self, error: OSError) -> MantaError:
        return MantaError(f"--metrics: {self._path} cannot be written ({error.strerror or error})")

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._failure = self._failure or error

    def write(self, messages: list[Message]) -> None:
        """Take a batch of the reporter's messages."""
        for payload in (message.payload for message in messages):
            if isinstance(payload, Metrics):
                for row in payload.rows:
                    self._metrics(row)
            elif isinstance(payload, Event):
                self._say(payload.message)

    def _metrics(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            try:
                self._add(self._file, row)
            except OSError as error:  # a full disk: that ends no training, and words still go out
                self._failure = error
                self._close()
                print(f"{self._unwritable(error)}; training goes on", file=sys.stderr, flush=True)
        losses = {name: row[name] for name in row if name.startswith(VALIDATION_LOSS)}
        utilisation = f"  mfu_causal {row['mfu_causal']:.1%}" if "mfu_causal" in row else ""
        validation = "".join(f"  {name.replace('_', ' ', 2)} {loss:.4f}" for name, loss in losses.items())
        self._say(
            f"step {row['step']}/{self._steps}  loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3f}  "
            f"{row['tokens_per_second']:.0f} tokens/s{utilisation}{validation}"
        )

    def _say(self, words: str) -> None:
        """To the person who waits, as long as somebody reads: the end of a pipe (`| head`) ends no file."""
        if not self._is_heard:
            return
        try:
            print(words, flush=True)
        except OSError:
            self._is_heard = False
            with contextlib.suppress(OSError):  # or what could not be written would be an error at the end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _add(self, file: BinaryIO, row: dict[str, Any]) -> None:
        if not self._has_begun and self._path is not None and self._path.is_file():  # and no pipe
            file.truncate(_end_of_rows_before(self._path, row["step"]))
        self._has_begun = True
        file.write(json.dumps(spell(row), allow_nan=False).encode() + b"\n")
        file.flush()


def _end_of_rows_before(path: Path, step: int) -> int:
    """Bytes at the beginning of a file of metrics that are rows of steps before `step`."""
    end = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or not json.loads(line)["step"] < step:
                break
        except (ValueError, KeyError, TypeError):  # of something else
            break
        end += len(line)
    return end


if __name__ == "__main__":
    sys.exit(main())
