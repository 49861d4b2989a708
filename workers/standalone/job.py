"""Trains one job without the service, in this process as one of its ranks."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

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
from workers.errors import CheckpointError, MantaError
from workers.protocol.messages import Resume
from workers.settings import Launcher, read_token_cache
from workers.standalone.metrics_file import MetricsFile
from workers.standalone.trace_file import TraceFile
from workers.storage.files import files_of
from workers.storage.places import Place
from workers.system import gpu
from workers.system.resources import usable_cores
from workers.system.threads import decided_threads, stored_threads, threads_of, with_threads
from workers.trainer import Places, Trainer
from workers.training.reporter import Reporter


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
    os.environ.update(spec.resources.environment)  # before anything that reads it is used
    device = pick_device(spec, launcher.local_rank if launcher else 0)
    # Before ranks meet, so that every rank looks before any can write.
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
    ask_for_none()
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
        comm.connect(store, generation, launcher.host, _shared_secret(store))
    return comm


def _with_threads(
    spec: JobSpec, device: torch.device, launcher: Launcher | None, store: dist.Store | None, checkpoints: Place | None
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


def _threads_for(spec: JobSpec, device: torch.device, launcher: Launcher | None, checkpoints: Place | None) -> int:
    """The number that the job began with; for a new job, the one that suits this machine."""
    begun_with = threads_begun_with(checkpoints) if checkpoints else None
    if begun_with is not None:
        return begun_with
    ranks = launcher.local_world_size if launcher else 1
    return decided_threads(spec, [(usable_cores(), ranks)] if device.type == "cpu" else [])


def threads_begun_with(checkpoints: Place) -> int | None:
    """Threads of the job that saved checkpoints in this folder; None if no checkpoint is complete."""
    whole = whole_checkpoints(checkpoints)
    return stored_threads(whole[-1][1].spec) if whole else None


def _shared_secret(store: dist.Store) -> str:
    """A random secret, the same on all ranks. It is passed through torchrun's store, so it does not protect against
    processes that can reach that store."""
    return store.compare_set("manta/secret", "", secrets.token_hex(SECRET_LENGTH // 2)).decode()


def restore_newest(trainer: Trainer, checkpoints: Place | None) -> None:
    """Continue from the newest undamaged checkpoint, or start if none was ever complete. Raises CheckpointError if all
    complete ones are damaged now."""
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


def refuse_unwritable(checkpoints: Place) -> None:
    """Before steps are trained that nothing could save. Raises CheckpointError."""
    files, probe = files_of(checkpoints), checkpoints / f".probe-{secrets.token_hex(8)}"
    try:
        files.make_folder(checkpoints)
        files.write_whole(probe, b"manta")
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
