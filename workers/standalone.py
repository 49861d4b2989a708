"""Trains one job without the service, in this process as one of its ranks, and writes the files of its metrics and its
trace."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from manta.workers.accounting.device_peak import peak_of_rank
from manta.workers.accounting.flops import adapters_in_words
from manta.workers.checkpoint.catalog import complete_checkpoints, manifest_of, newest_usable, next_generation
from manta.workers.comm.comm import BackendKind, Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.comm.host_names import skip_reverse_lookups
from manta.workers.comm.secret import SECRET_LENGTH
from manta.workers.config import JobSpec, LoraConfig, ModelConfig
from manta.workers.data.batch_plan import changed_sample_keys
from manta.workers.data.corpus_record import FILE_NAME as CORPUS_RECORD
from manta.workers.errors import CheckpointError, MantaError
from manta.workers.protocol.json_codec import from_json, spell
from manta.workers.protocol.messages import Resume, TraceOrder
from manta.workers.protocol.reports import Message, Metrics
from manta.workers.settings import Launcher, read_token_cache
from manta.workers.spec.layer_table import lora_targets
from manta.workers.spec.parameters import parameter_names
from manta.workers.step_traces.analysis import analysis_document, rank_documents
from manta.workers.step_traces.assembly import StepTrace, assembled
from manta.workers.step_traces.perfetto import perfetto
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location
from manta.workers.system import gpu
from manta.workers.system.regular_files import open_regular
from manta.workers.system.resources import usable_cores
from manta.workers.system.threads import decided_threads, stored_threads, threads_of, with_threads
from manta.workers.timing.recording import PackedRecording, Recording
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.log_lines import LogLines
from manta.workers.training.reporter import Reporter
from manta.workers.training.tracing import BuildRecording


def train(
    spec: JobSpec,
    launcher: Launcher | None,
    metrics: Path | None,
    checkpoints: Location | None,
    stop_after_step: int | None = None,
    cache: Path | None = None,
    trace: TraceFile | None = None,
) -> Trainer:
    """Train `spec` in this process as the rank that `launcher` names; returns the trainer after its last step."""
    os.environ.update(spec.resources.environment)  # before anything that reads it is used
    device = pick_device(spec, launcher.local_rank if launcher else 0)
    # Before ranks meet, so that every rank looks before any can write.
    generation = next_generation(checkpoints) if checkpoints else 1
    store = _store_of(launcher)
    spec = _with_threads(spec, device, launcher, store, checkpoints)
    torch.set_num_threads(threads_of(spec))
    comm = _comm_of(spec, launcher, device, generation, store)
    with MetricsFile(metrics if comm.rank == 0 else None, LogLines(spec.train.steps, spec.train.log_every)) as sink:
        reporter = Reporter(sink.write)
        places = StatePaths(
            checkpoints=str(checkpoints) if checkpoints else None,
            corpus_record=checkpoints / CORPUS_RECORD if checkpoints else None,
            token_cache=(cache or read_token_cache()).absolute(),
        )
        trainer = Trainer(spec, comm, reporter, peak_of_rank(device, spec), places)
        restore_newest(trainer, checkpoints)
        last = min(spec.train.steps, stop_after_step or spec.train.steps)
        if comm.rank == 0 and spec.train.lora is not None:
            print(adapters_in_words(spec), flush=True)
        if comm.rank == 0 and trainer.step >= last:
            print(f"there is nothing left to train: step {trainer.step} is done, and the last one is {last}")
        elif comm.rank == 0 and checkpoints is not None:
            refuse_unwritable(checkpoints)
        if trace is not None:
            trace.begin(trainer, last)
        trainer.train(stop_after_step)
        reporter.close()
        if trace is not None:
            trace.end(trainer, store)
    comm.close()
    return trainer


def _store_of(launcher: Launcher | None) -> dist.Store | None:
    """The store through which the ranks meet; None if there is only one rank."""
    if launcher is None or launcher.world_size == 1:
        return None
    skip_reverse_lookups()
    is_host = launcher.rank == 0 and not launcher.store_is_running
    return dist.TCPStore(launcher.host, launcher.port, launcher.world_size, is_host)


def _comm_of(
    spec: JobSpec, launcher: Launcher | None, device: torch.device, generation: int, store: dist.Store | None
) -> Comm:
    """This rank's communication, connected to the other ranks."""
    # If there are more processes than GPUs, they share GPUs, which NCCL does not allow.
    shared = device.type == "cuda" and launcher is not None and launcher.local_world_size > torch.cuda.device_count()
    backend: BackendKind | None = "links" if shared else None
    comm = Comm(RankGrid(spec.layout), launcher.rank if launcher else 0, device, backend)
    comm.generation = generation
    if launcher is not None and store is not None:
        # The same on all ranks. It is passed through torchrun's store, so it does not protect against processes that
        # can reach that store.
        secret = store.compare_set("manta/secret", "", secrets.token_hex(SECRET_LENGTH // 2)).decode()
        comm.connect(store, generation, launcher.host, secret)
    return comm


def _with_threads(
    spec: JobSpec,
    device: torch.device,
    launcher: Launcher | None,
    store: dist.Store | None,
    checkpoints: Location | None,
) -> JobSpec:
    """`spec` with the number of threads, which rank 0 decides for all ranks."""
    if spec.resources.threads != "auto":
        return spec
    is_first = launcher is None or launcher.rank == 0
    threads = _threads_for(spec, device, launcher, checkpoints) if is_first else 0
    if store is not None:
        if is_first:
            store.set("manta/threads", str(threads))
        threads = int(store.get("manta/threads"))
    return with_threads(spec, threads)


def _threads_for(spec: JobSpec, device: torch.device, launcher: Launcher | None, checkpoints: Location | None) -> int:
    """The number that the job began with; for a new job, the one that suits this machine."""
    initial = initial_threads(checkpoints) if checkpoints else None
    if initial is not None:
        return initial
    ranks = launcher.local_world_size if launcher else 1
    return decided_threads(spec, [(usable_cores(), ranks)] if device.type == "cpu" else [])


def initial_threads(checkpoints: Location) -> int | None:
    """Threads of the job that saved checkpoints in this folder; None if no checkpoint is complete."""
    complete = complete_checkpoints(checkpoints)
    return stored_threads(complete[-1][1].spec) if complete else None


def restore_newest(trainer: Trainer, checkpoints: Location | None) -> None:
    """Continue from the newest undamaged checkpoint, or start if none was ever complete. Raises CheckpointError if all
    complete ones are damaged now."""
    path: Location | None = None
    skipped: list[str] = []
    if checkpoints is not None:
        any_complete = bool(complete_checkpoints(checkpoints))

        def use(path: Location, step: int) -> None:
            _refuse_other_samples(trainer.spec, path)
            _refuse_other_adapters(trainer.spec, path)
            _refuse_smaller_model(trainer.spec, path)
            trainer.restore(Resume("checkpoint", step, str(path)))

        path, skipped = newest_usable(checkpoints, use)
        if path is None and any_complete:
            raise CheckpointError("; ".join(skipped))
    if trainer.comm.rank == 0:
        for reason in skipped:
            print(f"skipped: {reason}", file=sys.stderr)
    if path is None:
        trainer.restore(Resume())


def _refuse_other_samples(spec: JobSpec, checkpoint: Location) -> None:
    """Raise CheckpointError if the steps after `checkpoint` would repeat or leave out samples of those before it."""
    changed = ", ".join(changed_sample_keys(spec, manifest_of(checkpoint).spec))
    if changed:
        raise CheckpointError(
            f"{checkpoint} was trained on other samples, so continuing would repeat some or leave some out: {changed}; "
            "change that back, or begin a new job with its exported weights (model.from)"
        )


def _refuse_other_adapters(spec: JobSpec, checkpoint: Location) -> None:
    """Raise CheckpointError if the state in `checkpoint` has other adapters than the job, or another scale of them."""
    written = manifest_of(checkpoint).spec["train"].get("lora")
    before = None if written is None else LoraConfig.model_validate(written)
    if _kind_of(before, spec) != _kind_of(spec.train.lora, spec):
        raise CheckpointError(
            f"{checkpoint} was trained with other adapters: the rank, alpha, targets and scaling of train.lora cannot "
            "change; change that back, or begin a new job with its exported weights (model.from)"
        )


def _kind_of(lora: LoraConfig | None, spec: JobSpec) -> tuple[object, ...] | None:
    if lora is None:
        return None
    return lora.rank, lora.alpha, lora.scaling, set(lora.targets or lora_targets(spec.model))


def _refuse_smaller_model(spec: JobSpec, checkpoint: Location) -> None:
    """Raise CheckpointError if the job's model would leave out some of the state in `checkpoint`."""
    before, model = ModelConfig.model_validate(manifest_of(checkpoint).spec["model"]), spec.model
    if not before.is_counted or not model.is_counted:
        return
    missing = sorted(set(parameter_names(before)) - set(parameter_names(model)))
    if missing:
        raise CheckpointError(f"{checkpoint} is of another model: the job's has no {missing[0]}")
    if before.has_router_bias and not model.has_router_bias:
        raise CheckpointError(
            f"{checkpoint} has a bias with which experts are chosen, and the job has none: set "
            "model.moe.balance.bias_rate above 0 (1e-12 hardly moves it)"
        )


@contextlib.contextmanager
def alone_in(checkpoints: Location | None) -> Iterator[None]:
    """Within the block, no other run that is within such a block saves to this folder, if its file system has locks
    (an object store has none). Raises CheckpointError if another one does."""
    if not isinstance(checkpoints, Path):
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # whoever reads the folder, or writes to it, finds out what is wrong with it
            checkpoints.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(checkpoints, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"--checkpoints: another run is saving to {checkpoints}: name another") from None
        yield


def refuse_unwritable(checkpoints: Location) -> None:
    """Before steps are trained that nothing could save. Raises CheckpointError."""
    files, probe = files_of(checkpoints), checkpoints / f".probe-{secrets.token_hex(8)}"
    try:
        files.make_folder(checkpoints)
        files.write_atomically(probe, b"manta")
        files.remove(probe)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"--checkpoints: {checkpoints} cannot be written ({reason})") from error


def pick_device(spec: JobSpec, local_rank: int) -> torch.device:
    """The device that `resources.accelerator` asks for. Raises MantaError for a GPU if there is none."""
    wanted = spec.resources.accelerator
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MantaError("resources.accelerator is gpu, but this machine has none (try: auto)")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    gpu.use_for(spec, device)
    return device


_MAX_ROW_BYTES = 2**20


class MetricsFile:
    """Writes metrics as JSON lines, and prints `lines` of what is reported."""

    def __init__(self, path: Path | None, lines: LogLines):
        self._path, self._lines = path, lines
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
            for line in self._lines.of(payload):
                self._print(line)

    def _metrics(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            try:
                self._add(self._file, row)
            except OSError as error:  # such as a full disk, which does not end the training
                self._failure = error
                self._close()
                print(f"{self._unwritable(error)}; training goes on", file=sys.stderr, flush=True)

    def _print(self, words: str) -> None:
        """Print `words`, until stdout is closed: a closed pipe (`| head`) must not end the file."""
        if not self._is_heard:
            return
        try:
            print(words, flush=True)
        except OSError:
            self._is_heard = False
            with contextlib.suppress(OSError):  # otherwise flushing the rest would fail at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _add(self, file: BinaryIO, row: dict[str, Any]) -> None:
        if not self._has_begun and self._path is not None and self._path.is_file():  # not a pipe
            file.truncate(_end_of_rows_before(self._path, row["step"]))
        self._has_begun = True
        file.write(json.dumps(spell(row), allow_nan=False).encode() + b"\n")
        file.flush()


def _end_of_rows_before(path: Path, step: int) -> int:
    """Length in bytes of the rows of steps before `step` at the beginning of a file of metrics."""
    end = 0
    with open_regular(path) as file:
        while line := file.readline(_MAX_ROW_BYTES):
            try:
                if not line.endswith(b"\n") or not json.loads(line)["step"] < step:
                    break
            except (ValueError, KeyError, TypeError):  # not a row of metrics
                break
            end += len(line)
    return end


NUMBER = 1
SUFFIXES = (".json", ".pftrace")
"""Suffixes of our own format, and of Perfetto's."""


class TraceFile:
    """The file of one trace."""

    def __init__(self, path: Path, steps: int = 1, first_step: int = 0):
        """`steps`: how many to record, not before `first_step`, or the job's second step. Raises MantaError."""
        if steps < 1:
            raise MantaError(f"--trace-steps must be at least 1, not {steps}")
        if path.suffix not in SUFFIXES:
            raise MantaError(f"--trace: {path} must end with {' or '.join(SUFFIXES)}")
        if path.is_dir() or not path.parent.is_dir():
            problem = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
            raise MantaError(f"--trace: {path} {problem}")
        self._path, self._steps, self._first_step = path, steps, first_step
        self._recording: Recording | None = None

    def begin(self, trainer: Trainer, last: int) -> None:
        """Have a rank's `trainer` record steps, up to `last` at most. Raises MantaError if there is none to record."""
        if max(self._first_step, trainer.step + 2) > last:  # ranks agree on it one step earlier
            raise self._nothing_recorded()
        trainer.tracing.sink = self._take
        if trainer.comm.rank == 0:
            order = TraceOrder(NUMBER, trainer.comm.generation, self._steps, self._first_step)
            trainer.comm.requests.traces.add(order)

    def _nothing_recorded(self) -> MantaError:
        return MantaError(f"no step is traced: from step {max(2, self._first_step)} on there is none to record")

    def _take(self, _number: int, make: BuildRecording) -> None:
        self._recording = make()

    def end(self, trainer: Trainer, store: dist.Store | None) -> None:
        """Write the file on rank 0. `store`: where ranks met. Raises MantaError if no step was recorded, OSError."""
        if self._recording is None:
            raise self._nothing_recorded()
        recordings = {trainer.comm.rank: self._recording}
        if store is not None:
            recordings = self._exchanged(trainer.comm.rank, trainer.comm.size("world"), store)
        if trainer.comm.rank == 0:
            trace = assembled(recordings, trainer.comm.grid)
            self._path.write_bytes(perfetto(trace) if self._path.suffix == ".pftrace" else _as_json(trace))
            for problem in sorted({recording.problem for recording in recordings.values()} - {""}):
                print(f"the trace in {self._path} is incomplete: {problem}", file=sys.stderr)

    def _exchanged(self, rank: int, world: int, store: dist.Store) -> dict[int, Recording]:
        """All ranks' recordings, on rank 0 only."""
        assert self._recording is not None
        store.set(f"manta/trace/{rank}", json.dumps(asdict(self._recording.pack())))
        if rank != 0:
            return {}
        texts = {rank: store.get(f"manta/trace/{rank}").decode() for rank in range(world)}
        return {rank: from_json(PackedRecording, json.loads(text)).unpack() for rank, text in texts.items()}


def _as_json(trace: StepTrace) -> bytes:
    nodes = {rank.rank: platform.node() for rank in trace.ranks}
    return json.dumps({**analysis_document(trace), "ranks": rank_documents(trace, nodes)}).encode()
