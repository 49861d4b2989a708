"""Runs the engine inside Ray Train: each worker of a TorchTrainer is one rank of the job.

Recovery is Ray Train's: when a worker dies, all of them end and start again from the last reported checkpoint; the
mechanisms of Manta's service (snapshots, replacing single ranks) are not used. Checkpoints are in the run's folder,
with Manta's usual names and format, so that both can read them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import ray.util
import torch
import torch.distributed as dist
from ray.train.collective import broadcast_from_rank_zero

from manta.workers.accounting.device_peak import peak_of_rank
from manta.workers.checkpoint import pruning
from manta.workers.checkpoint.catalog import checkpoint_path, next_generation
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.comm.host_names import skip_reverse_lookups
from manta.workers.comm.secret import SECRET_LENGTH
from manta.workers.config import JobSpec
from manta.workers.data.corpus_record import FILE_NAME as CORPUS_RECORD
from manta.workers.errors import MantaError
from manta.workers.protocol.json_codec import spell
from manta.workers.settings import read_token_cache
from manta.workers.spec.reading import parse_job_spec, with_absolute_paths
from manta.workers.spec.submitted import with_shape_of_weights, with_vocabulary
from manta.workers.standalone import initial_threads, restore_newest
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location, ObjectPath, parse_location
from manta.workers.system import gpu
from manta.workers.system.threads import threads_of, with_threads
from manta.workers.trainer import Trainer
from manta.workers.training.rank_state import StatePaths
from manta.workers.training.reporter import Reporter

METRICS_FOLDER = "metrics"
"""Folder in the run's folder, with a file for each checkpoint: the rows of the steps since the previous one."""

_SHOWN_BY_REPORTS = ("checkpoint_saving", "checkpoint_saved")

Row = dict[str, Any]
"""Numbers of one step, by the names of the REST contract."""


class RayTrainError(MantaError):
    """The job and the options of Ray Train do not fit together; the message says what would."""


def torch_trainer(
    job: Mapping[str, Any],
    scaling_config: ray.train.ScalingConfig | None = None,
    report_every_steps: int = 0,
    **run_options: Any,
) -> ray.train.torch.TorchTrainer:
    """A TorchTrainer that trains `job`, a JobSpec as a mapping, with one worker for each rank of its layout.

    `scaling_config`: by default one CPU for each worker, or one GPU, depending on `resources.accelerator`;
    `report_every_steps`: see `train`; `run_options`: fields of Ray Train's RunConfig, such as `name`, `storage_path`,
    `callbacks`. By default `recovery.max_restarts` failures are tolerated and `checkpoint.keep` checkpoints kept.
    Relative paths are resolved against the current folder. Raises SpecError, RayTrainError.
    """
    spec = _checked(job)
    scaling = scaling_config or ray.train.ScalingConfig(num_workers=spec.layout.world_size, use_gpu=_wants_gpus(spec))
    _check_workers(spec, scaling.num_workers)
    defaults = {
        "failure_config": ray.train.FailureConfig(max_failures=spec.recovery.max_restarts),
        "checkpoint_config": ray.train.CheckpointConfig(num_to_keep=spec.checkpoint.keep),
    }
    return ray.train.torch.TorchTrainer(
        train_loop,
        train_loop_config={"job": with_absolute_paths(dict(job), Path.cwd()), "report_every_steps": report_every_steps},
        scaling_config=scaling,
        run_config=ray.train.RunConfig(**defaults | run_options),
    )


def train_loop(config: Mapping[str, Any]) -> None:
    """The function that each worker of `torch_trainer` runs: `train` with `config`'s job and report_every_steps."""
    train(config["job"], config["report_every_steps"])


def train(job: Mapping[str, Any], report_every_steps: int = 0, on_row: Callable[[Row], object] | None = None) -> None:
    """Train `job`, a JobSpec as a mapping, as this Ray Train worker's rank; to be called in a training function.

    Each due checkpoint is reported to Ray Train when it is complete, with the last step's row of metrics; rows alone
    are reported every `report_every_steps` steps (0: never). Workers wait for each report, of which Ray Train takes one
    every two seconds. `on_row` is called on rank 0 with each step's row. Raises SpecError, RayTrainError, and the
    errors of `Trainer.train`.
    """
    spec = _checked(job)
    context, reported = ray.train.get_context(), ray.train.get_checkpoint()
    _check_workers(spec, context.get_world_size())
    folder, rows = _run_folder(), _Rows(on_row)
    with _connected(spec, context.get_world_rank(), folder, reported) as (comm, threads):
        spec = with_threads(spec, threads)
        torch.set_num_threads(threads)
        places = StatePaths(
            job=context.get_experiment_name(),
            checkpoints=str(folder),
            corpus_record=folder / CORPUS_RECORD,
            token_cache=read_token_cache(),
            deletes_old_checkpoints=False,  # Ray Train deletes the reported ones
        )
        trainer = Trainer(spec, comm, rows, peak_of_rank(comm.device, spec), places)
        restore_newest(trainer, folder)
        while trainer.step < spec.train.steps:
            trainer.train(_next_stop(spec, trainer.step, report_every_steps))
            _report(trainer, folder, rows)
        trainer.close()
        rows.close()


def _next_stop(spec: JobSpec, step: int, report_every_steps: int) -> int:
    """The step after `step` at which the training stops to report."""
    periods = [every for every in (spec.checkpoint.every_steps, report_every_steps) if every > 0]
    return min([spec.train.steps, *(step - step % every + every for every in periods)])


def _report(trainer: Trainer, folder: Location, rows: _Rows) -> None:
    """Report the completed step to Ray Train, on all ranks, with its checkpoint if it is complete: for one that could
    not be saved Ray Train would delete an older one."""
    step, saved = trainer.step, trainer.state.checkpoints
    if trainer.comm.rank != 0:
        ray.train.report({"step": step})
        return
    row, checkpoint = rows.newest, None
    if saved.due(step) and saved.failure is None:
        rows.save(folder / METRICS_FOLDER, step)
        location = checkpoint_path(folder, step, trainer.comm.generation)
        filesystem = ray.train.get_context().get_storage().storage_filesystem
        path = location.key if isinstance(location, ObjectPath) else str(location)
        checkpoint = ray.train.Checkpoint(path, filesystem)
    # It is already where Ray Train would copy it.
    ray.train.report(row, checkpoint, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD)


class _Rows(Reporter):
    """Keeps a rank's rows until the next checkpoint, and prints its events."""

    def __init__(self, on_row: Callable[[Row], object] | None):
        super().__init__(lambda messages: None)
        self._on_row, self._rows = on_row, list[Row]()
        self.newest: Row = {}
        """The row of the last step."""

    def metrics(self, row: Row) -> None:
        self.newest = row
        self._rows.append(row)
        if self._on_row is not None:
            self._on_row(row)

    def event(self, kind: str, step: int, message: str, data: dict[str, Any]) -> None:
        if kind not in _SHOWN_BY_REPORTS:
            print(message, flush=True)

    def save(self, folder: Location, step: int) -> None:
        """Write the rows since the last call, up to `step`'s, as JSON lines; a run that repeats them overwrites it."""
        lines = [json.dumps(spell(row), allow_nan=False) + "\n" for row in self._rows]
        files_of(folder).make_folder(folder)
        files_of(folder).write_atomically(folder / f"step-{step:08d}.jsonl", "".join(lines).encode())
        self._rows.clear()


@dataclass(frozen=True)
class _Meeting:
    """What rank 0 broadcasts to the others through Ray."""

    host: str
    port: int
    """Of the rendezvous store."""
    secret: str
    generation: int
    threads: int
    """CPU threads of each worker."""


@contextlib.contextmanager
def _connected(
    spec: JobSpec, rank: int, folder: Location, reported: ray.train.Checkpoint | None
) -> Iterator[tuple[Comm, int]]:
    """This rank's communication with all others, and the number of threads of each rank: one if the job sets none,
    since Ray Train gives a worker one CPU. Each start of the workers is a new generation."""
    skip_reverse_lookups()
    details, store = None, None
    if rank == 0:
        if reported is not None:
            pruning.remove_newer(folder, parse_location(reported.path).name)  # which Ray Train does not know
        store = dist.TCPStore(ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False)
        secret, generation = secrets.token_hex(SECRET_LENGTH // 2), next_generation(folder)
        initial = initial_threads(folder) if spec.resources.threads == "auto" else None
        details = asdict(_Meeting(store.host, store.port, secret, generation, initial or threads_of(spec)))
    meeting = _Meeting(**broadcast_from_rank_zero(details))
    comm = Comm(RankGrid(spec.layout), rank, _device(spec))
    comm.generation = meeting.generation
    if spec.layout.world_size > 1:
        if comm.device.type == "cuda" and dist.is_initialized():
            dist.destroy_process_group()  # TorchTrainer's: the engine creates its own
        store = store or dist.TCPStore(meeting.host, meeting.port, is_master=False)
        comm.connect(store, meeting.generation, meeting.host, meeting.secret)
    try:
        yield comm, meeting.threads
    finally:
        comm.close()


def _checked(job: Mapping[str, Any]) -> JobSpec:
    """The JobSpec, if all it asks for is possible with Ray Train's recovery. Raises SpecError, RayTrainError."""
    spec = parse_job_spec(with_shape_of_weights(job))
    if spec.recovery.rolls_back:
        raise RayTrainError(
            "recovery: roll_back deletes checkpoints that Ray Train knows of: set recovery.nonfinite and "
            "recovery.spike.policy to skip or fail"
        )
    return with_vocabulary(spec)


def _device(spec: JobSpec) -> torch.device:
    """The device that Ray Train gives this worker. Raises RayTrainError if the job requires another."""
    wanted = spec.resources.accelerator
    device = torch.device("cpu") if wanted == "cpu" else ray.train.torch.get_device()
    if wanted == "gpu" and device.type != "cuda":
        raise RayTrainError("resources.accelerator is gpu, but the workers have none: set ScalingConfig(use_gpu=True)")
    gpu.use_for(spec, device)
    return device


def _wants_gpus(spec: JobSpec) -> bool:
    """Whether each worker gets a GPU: as `resources.accelerator` says; with auto, if the cluster has any."""
    if spec.resources.accelerator != "auto":
        return spec.resources.accelerator == "gpu"
    if not ray.is_initialized():
        ray.init()  # as TorchTrainer.fit would
    return bool(ray.cluster_resources().get("GPU"))


def _check_workers(spec: JobSpec, workers: int | tuple[int, int]) -> None:
    if workers != spec.layout.world_size:
        raise RayTrainError(
            f"the layout has {spec.layout.world_size} ranks, but ScalingConfig says {workers} workers: set "
            f"num_workers={spec.layout.world_size}, or change parallel"
        )


def _run_folder() -> Location:
    """The run's folder on its storage. Raises RayTrainError if checkpoints cannot be stored there."""
    storage = ray.train.get_context().get_storage()
    kind, path = storage.storage_filesystem.type_name, storage.experiment_fs_path
    if kind not in ("local", "s3"):
        raise RayTrainError(f"{path} is on storage of kind {kind}: use a folder that all nodes share, or s3://")
    return Path(path) if kind == "local" else ObjectPath("s3", path)
