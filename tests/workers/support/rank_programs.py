"""Programs that the ranks of a layout run for the tests: each takes a connected Comm and returns what can be pickled.

Shapes: B global batch, s sequence; windows are [B, s + 1] token ids.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from reported import events_of, rows_of

from manta.workers import run
from manta.workers import standalone as standalone
from manta.workers.checkpoint import checkpointer
from manta.workers.checkpoint.durable import Rectangle, rectangles_of
from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.data.batch_plan import most_samples, replica_micro_batches
from manta.workers.data.batches import Documents, MicroBatch, with_marks, with_separate_documents
from manta.workers.data.packed_conversations import Marks
from manta.workers.engine import Engine
from manta.workers.parallel import recompute
from manta.workers.parallel.data.agreement import StepStatistics
from manta.workers.parallel.data.state import tensors_of
from manta.workers.protocol.messages import Resume
from manta.workers.spec.reading import parse_job_spec
from manta.workers.spec.sequence_runs import runs_of
from manta.workers.system.threads import threads_of
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.learning_rate import learning_rate
from manta.workers.training.reporter import Reporter

START = Resume()
END = 3
"""The token that ends documents, where a job has them apart."""
Weights = dict[str, torch.Tensor]  # or arrays, which travel faster
Placed = tuple[str, tuple[int, ...], torch.Tensor]
"""A rectangle of a global tensor: name, offsets, values."""


@dataclass
class Steps:
    """What one rank knows after some steps."""

    losses: list[float]
    grad_norms: list[float]
    gradients: list[Placed]
    """Complete gradient of the last step, this rank's part, where the job's beta1 is 0 (else its first moment)."""
    parameters: list[Placed]
    """All parameters of this rank after the last step."""
    z_losses: list[float | None] = field(default_factory=list)
    balance_losses: list[float | None] = field(default_factory=list)
    expert_tokens: list[tuple[tuple[int, ...], ...] | None] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "gradients": _arrays(self.gradients), "parameters": _arrays(self.parameters)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for kind in ("gradients", "parameters"):
            state[kind] = [(name, offsets, torch.as_tensor(values)) for name, offsets, values in state[kind]]
        vars(self).update(state)


def _arrays(placed: list[Placed]) -> list[tuple[str, tuple[int, ...], Any]]:
    """For the way between processes: a tensor's pickle takes many times as long as an array's."""
    return [(name, offsets, values.numpy()) for name, offsets, values in placed]


def light(weights: Weights) -> dict[str, Any]:
    """The weights as arrays, for a quicker way to the ranks."""
    return {name: tensor.numpy() for name, tensor in weights.items()}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Torch's, within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def own_micro_batches(spec: JobSpec, comm: Comm, windows: torch.Tensor, step: int = 1) -> list[MicroBatch]:
    """A rank's micro-batches of a global batch of windows, as the engine cuts it."""
    runs = runs_of(spec.layout, spec.model.sequence_length, comm.index("context"))
    replica, context = comm.index("data"), comm.index("context")
    most = most_samples(range(len(windows)), spec, replica, context)
    batches = micro_batches(spec, replica, windows, step)
    return [replace(each.part(runs), most_samples=n) for each, n in zip(batches, most, strict=True)]


def micro_batches(spec: JobSpec, replica: int, windows: torch.Tensor, step: int = 1) -> list[MicroBatch]:
    """A replica's micro-batches of a global batch of windows, whose ranks share no samples."""
    first = (step - 1) * len(windows)
    samples = range(first, first + len(windows))
    mine = replica_micro_batches(samples, spec, replica)
    parts = [(part, windows[part.start - first : part.stop - first]) for part in mine]
    batches = [MicroBatch(part, tokens[:, :-1].abs().t(), tokens[:, 1:].t()) for part, tokens in parts]
    if spec.data.source == "chat":
        length = windows.shape[1]
        marks = [[marks_of(n, length) for n in each.samples] for each in batches]
        nothing = Documents((), length - 1)
        return [
            with_marks(each, of_each, separate=True) if of_each else replace(each, documents=nothing)
            for each, of_each in zip(batches, marks, strict=True)
        ]
    return batches if spec.data.documents == "together" else [with_separate_documents(each, END) for each in batches]


def marks_of(sample: int, length: int) -> Marks:
    """Conversations in a sample, which differ from sample to sample; in every third one there is no answer."""
    begins = (0, 1 + sample % 4, 6)
    learned = (np.arange(length) + sample) % 3 != 0
    learned[list(begins)] = False
    return Marks(learned & (sample % 3 != 1), begins)


def run_steps(comm: Comm, jobs: list[dict[str, Any]], weights: list[Weights], windows: list[Any], dtype: Any) -> list:
    """For each job: as many steps as it has batches of windows, from the given weights. No schedule of the learning
    rate unless the job has more than one step."""
    results = []
    for document, start, batches in zip(jobs, weights, windows, strict=True):
        with default_dtype(dtype):
            results.append(_run_steps(comm, parse_job_spec(document), start, batches, dtype))
    return results


def run_steps_offloaded(comm: Comm, *given: Any) -> list:
    """The same, and even the smallest activations go to the host where a job has some go there."""
    with mock.patch.object(recompute, "OFFLOADED_BYTES", 0):
        return run_steps(comm, *given)


def run_steps_beside_nothing(comm: Comm, *given: Any) -> list:
    """What `run_steps` does, with micro-batches without samples before and after those of each step."""
    with_samples = own_micro_batches

    def all_of_them(spec: JobSpec, *where: Any) -> list[MicroBatch]:
        batch = with_samples(spec, *where)
        first, unit = batch[0], spec.layout.micro_batch_unit

        def none_of(tokens: torch.Tensor | None) -> torch.Tensor | None:
            return None if tokens is None else tokens[:, :0]

        documents = None if first.documents is None else Documents((), first.documents.length)
        nothing = MicroBatch(range(0), none_of(first.inputs_sb), none_of(first.targets_sb), documents)
        return [*[nothing] * unit, *batch, *[nothing] * unit]

    with mock.patch(f"{__name__}.own_micro_batches", all_of_them):
        return run_steps(comm, *given)


def _loaded(comm: Comm, spec: JobSpec, weights: Weights, dtype: torch.dtype | None) -> tuple[Engine, list[Rectangle]]:
    """An engine with the given weights, and the parameters that it keeps as rectangles of what it stores of them."""
    engine = Engine(spec, comm, dtype)
    whole = [(0, engine.flat.total_size)]
    everything = rectangles_of(engine.flat, whole, whole, owned_only=False, tensor_index=comm.index("tensor"))
    start = torch.zeros(engine.flat.total_size, dtype=torch.float64)
    for rectangle in everything:
        where = tuple(slice(a, a + n) for a, n in zip(rectangle.offsets, rectangle.sizes, strict=True))
        rectangle.view(start).copy_(torch.as_tensor(weights[rectangle.name][where]))
    engine.optimizer.load_range(0, start)
    leave_gradients_behind(engine)
    kept = engine.flat.values.ranges
    return engine, rectangles_of(engine.flat, kept, kept, owned_only=False, tensor_index=comm.index("tensor"))


def leave_gradients_behind(engine: Engine) -> None:
    """What a step that was broken off may leave in the gradients' place."""
    for slot in engine.flat.slots:
        slot.entry.parameter.main_grad.fill_(float("nan"))


def _run_steps(comm: Comm, spec: JobSpec, weights: Weights, batches: list[torch.Tensor], dtype: torch.dtype) -> Steps:
    engine, everything = _loaded(comm, spec, weights, dtype)
    flat, optimizer = engine.flat, engine.optimizer
    losses, z_losses, norms, balance_losses, expert_tokens = [], [], [], [], []
    for number, windows in enumerate(batches, start=1):
        batch = own_micro_batches(spec, comm, windows, number)
        statistics = engine.step(batch, len(windows), learning_rate(spec.train.optimizer, number, spec.train.steps), 0)
        losses.append(statistics.loss)
        z_losses.append(statistics.z_loss)
        norms.append(statistics.grad_norm)
        balance_losses.append(statistics.balance_loss)
        expert_tokens.append(statistics.expert_tokens)
    part = rectangles_of(flat, optimizer.held, optimizer.held, owned_only=False, tensor_index=comm.index("tensor"))
    means = optimizer.moments["exp_avg"]
    return Steps(
        losses,
        norms,
        [(rectangle.name, rectangle.offsets, rectangle.view(means).clone()) for rectangle in part],
        [(rectangle.name, rectangle.offsets, rectangle.view(flat.parameters).clone()) for rectangle in everything],
        z_losses,
        balance_losses,
        expert_tokens,
    )


def evaluate(comm: Comm, document: dict[str, Any], weights: Weights, windows: torch.Tensor) -> float:
    """Mean loss of a global batch in fp64, forward alone."""
    with default_dtype(torch.float64):
        spec = parse_job_spec(document)
        engine, _ = _loaded(comm, spec, weights, torch.float64)
        losses_m, tokens = engine.pipeline.evaluate(own_micro_batches(spec, comm, windows))
        both = torch.stack([losses_m.sum(), tokens])
        comm.all_reduce("world", both)
    return (both[0] / both[1]).item()


def assemble(like: Mapping[str, torch.Tensor], placed: list[Placed]) -> Weights:
    """The layout-free tensors, shaped `like` these, from all ranks' rectangles. Where ranks hold the same
    element they must hold the same bits, and every element must be there."""
    whole = {name: torch.full(each.shape, float("nan"), dtype=placed[0][2].dtype) for name, each in like.items()}
    for name, offsets, values in placed:
        where = tuple(slice(a, a + n) for a, n in zip(offsets, values.shape, strict=True))
        known = ~whole[name][where].isnan()
        assert torch.equal(whole[name][where][known], values[known]), f"ranks disagree about {name}"
        whole[name][where] = values
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"nobody holds all of {name}"
    return whole


def gradients_of(steps: list[Steps], like: Weights) -> Weights:
    """Gradients of one step of all ranks, whole."""
    return assemble(like, [placed for rank in steps for placed in rank.gradients])


def assert_like(model: torch.nn.Module, loss: torch.Tensor, steps: list[Steps], gradients: Weights) -> None:
    """All ranks' one step in fp64 had the `loss`, and the `gradients` under the model's names, of a model on one
    machine whose backward has run."""
    losses = torch.tensor(steps[0].losses, dtype=torch.float64)
    torch.testing.assert_close(losses, loss.detach().view(1), rtol=1e-10, atol=0.0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-12, msg=name)


@dataclass
class Trained:
    """What one rank knows after training with the real trainer."""

    rows: list[dict[str, Any]]
    """Metrics (rank 0 alone has any)."""
    events: list[dict[str, Any]]
    statistics: list[tuple[float, float]]
    """(loss, gradient norm) of each step of this run."""
    state: dict[str, torch.Tensor]
    """This rank's part of parameters and moments."""
    parameters: torch.Tensor
    """All flat parameters of this rank."""
    rectangles: list[tuple[str, str, tuple[int, ...], torch.Tensor]]
    """(kind, name, offsets, values) of this rank's part."""


@mock.patch.object(checkpointer, "PATIENCE_SECONDS", 60.0)  # each save at its step, however slow the disk is
def train_job(
    comm: Comm,
    document: dict[str, Any],
    checkpoints: str | None = None,
    snapshots: str | None = None,
    resume: Resume = START,
    until: int | None = None,
    cache: str | None = None,
) -> Trained:
    """Train a job with the real trainer, from `resume` to step `until` (or its end); `cache`: folder for tokens."""
    spec, messages = parse_job_spec(document), []
    reporter = Reporter(messages.extend)
    places = StatePaths("test", snapshots, checkpoints, token_cache=Path(cache) if cache else None)
    trainer = Trainer(spec, comm, reporter, 1e12, places)
    trainer.restore(resume)
    statistics = []
    while trainer.step < (spec.train.steps if until is None else until):
        step_statistics = trainer.train_step()
        statistics.append((step_statistics.loss, step_statistics.grad_norm))
    trainer.state.snapshots.finish()
    trainer.state.checkpoints.finish()
    comm.barrier()
    reporter.close()
    optimizer = trainer.engine.optimizer
    held, state = optimizer.held, {part.name: torch.cat(part.tensors) for part in optimizer.parts()}
    rectangles = rectangles_of(optimizer.flat, held, held, owned_only=False, tensor_index=comm.index("tensor"))
    return Trained(
        rows_of(messages),
        events_of(messages),
        statistics,
        state,
        optimizer.flat.parameters.clone(),
        [
            (kind, rectangle.name, rectangle.offsets, rectangle.view(part).clone())
            for kind, part in state.items()
            for rectangle in rectangles
        ],
    )


def run_as_launched(comm: Comm, command: list[str], port: int) -> int:
    """`python -m manta.workers.run` with `command`, told what torchrun tells its processes; it hosts the store on
    `port`."""
    here, count = str(comm.rank), str(comm.size("world"))
    places = {"RANK": here, "LOCAL_RANK": here, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with (
        mock.patch.dict(os.environ, places | store),
        mock.patch.object(standalone, "usable_cores", lambda: comm.size("world")),
    ):
        return run.main(command)


def initial_parameters(comm: Comm, document: dict[str, Any]) -> list[Placed]:
    """Every parameter of this rank as the engine initialises it."""
    engine = Engine(parse_job_spec(document), comm)
    engine.initialise(engine.spec.train.seed)
    flat, whole = engine.flat, [(0, engine.flat.size)]
    rectangles = rectangles_of(flat, whole, whole, owned_only=False, tensor_index=comm.index("tensor"))
    return [(rectangle.name, rectangle.offsets, rectangle.view(flat.parameters).clone()) for rectangle in rectangles]


@dataclass
class Precise:
    """What one rank knows after steps in the job's own precision."""

    losses: list[float]
    grad_norms: list[float]
    scales: list[float]
    """Loss scale after each step."""
    masters: list[Placed]
    """The optimizer's weights, this rank's part."""
    gradients: list[Placed]
    """Gradient of the last step, this rank's part, where the job's beta1 is 0."""
    parameters: list[Placed]
    """All parameters of this rank, as compute has them."""


def run_precise(
    comm: Comm, jobs: list[dict[str, Any]], weights: Weights, batches: list[torch.Tensor], scale: float | None = None
) -> list[Precise]:
    """Each job from the same weights on the same batches, one a step, in its own precision; `scale`: first loss scale
    in place of the usual one."""
    results = []
    for document in jobs:
        spec = parse_job_spec(document)
        engine, everything = _loaded(comm, spec, weights, None)
        if scale is not None:
            engine.loss_scale.state[0] = scale
        precise = Precise([], [], [], [], [], [])
        for number, windows in enumerate(batches, start=1):
            statistics = _step(comm, engine, windows, number)
            precise.losses.append(statistics.loss)
            precise.grad_norms.append(statistics.grad_norm)
            precise.scales.append(engine.loss_scale.value)
        optimizer = engine.optimizer
        optimizer.wait_for_parameters()
        masters, means = torch.cat(optimizer.parameters), optimizer.moments["exp_avg"]
        for rectangle in rectangles_of(engine.flat, optimizer.held, optimizer.held, False, comm.index("tensor")):
            precise.masters.append((rectangle.name, rectangle.offsets, rectangle.view(masters).clone()))
            precise.gradients.append((rectangle.name, rectangle.offsets, rectangle.view(means).clone()))
        for rectangle in everything:
            precise.parameters.append(
                (rectangle.name, rectangle.offsets, rectangle.view(engine.flat.parameters).clone())
            )
        results.append(precise)
    return results


def _step(comm: Comm, engine: Engine, windows: torch.Tensor, number: int) -> StepStatistics:
    train = engine.spec.train
    batch = own_micro_batches(engine.spec, comm, windows, number)
    return engine.step(batch, len(windows), learning_rate(train.optimizer, number, train.steps), 0)


def _bits(engine: Engine) -> torch.Tensor:
    """All that a step may change: parameters, master weights, moments."""
    state = (each.double() for each in tensors_of(engine.optimizer.parts()))
    return torch.cat([engine.flat.parameters.double(), *state])


def attempts(
    comm: Comm, document: dict[str, Any], weights: Weights, windows: torch.Tensor, scale: float
) -> tuple[list[tuple[float, list[range], torch.Tensor]], Any, torch.Tensor]:
    """One step that begins with loss scale `scale`: (scale, samples, state before) of each attempt, the step's
    statistics, and the state after."""
    engine, _ = _loaded(comm, parse_job_spec(document), weights, None)
    engine.loss_scale.state[0] = scale
    seen, begin = [], engine.reduction.begin
    train = engine.pipeline.train

    def begun(*arguments: Any) -> None:
        leave_gradients_behind(engine)
        begin(*arguments)

    def watched(batch: list[MicroBatch], loss_scale: float, *routing: Any) -> Any:
        seen.append((engine.loss_scale.value, [each.samples for each in batch], _bits(engine)))
        return train(batch, loss_scale, *routing)

    engine.reduction.begin, engine.pipeline.train = begun, watched
    return seen, _step(comm, engine, windows, 1), _bits(engine)


def poisoned_steps(
    comm: Comm, document: dict[str, Any], weights: Weights, batches: list[torch.Tensor], poison: str | None
) -> tuple[list[tuple[bool, bool]], torch.Tensor]:
    """A step for each batch. `poison` puts something that is not finite into the second one: 'gradient' into the
    gradients of the last rank once all backwards are done, 'weight' into a weight of the last stage's last tensor rank,
    on all replicas, until the step is over. Without, that step is left out.

    Returns for each step whether its statistics were finite and whether anything changed, and the state at the end.
    """
    engine, _ = _loaded(comm, parse_job_spec(document), weights, None)
    flat, seen = engine.flat, []
    last = all(comm.index(axis) == comm.size(axis) - 1 for axis in ("tensor", "pipeline"))
    usual, value = engine.optimizer.step, None

    def state() -> torch.Tensor:
        return torch.cat([_bits(engine), engine.loss_scale.state.double()])

    def poisoned_step(*arguments: Any) -> StepStatistics:
        if comm.rank == comm.size("world") - 1:
            flat.gradients[flat.slots[-1].start] = float("nan")
        return usual(*arguments)

    for number, windows in enumerate(batches, start=1):
        now = poison if number == 2 else "nothing"
        if now is None:
            continue
        if now == "weight" and last:
            value = flat.parameters[0].clone()
            flat.parameters[0] = float("inf")
        engine.optimizer.step = poisoned_step if now == "gradient" else usual
        before = state()
        finite = _step(comm, engine, windows, number).finite
        seen.append((finite, not torch.equal(before, state())))
        if now == "weight" and last:
            flat.parameters[0] = value
    return seen, state()


def broken_off(comm: Comm, document: dict[str, Any], weights: Weights, windows: torch.Tensor) -> Steps:
    """A step on `windows` after one that broke off behind its last backward, in fp32."""
    spec = parse_job_spec(document)
    engine, everything = _loaded(comm, spec, weights, torch.float32)
    engine.reduction.begin(len(own_micro_batches(spec, comm, windows)), len(windows))
    engine.pipeline.train(own_micro_batches(spec, comm, windows.flip(0)), 1.0)
    statistics = _step(comm, engine, windows, 1)
    parameters = [
        (rectangle.name, rectangle.offsets, rectangle.view(engine.flat.parameters).clone()) for rectangle in everything
    ]
    return Steps([statistics.loss], [statistics.grad_norm], [], parameters)


def hang(comm: Comm, folder: str) -> None:
    """Rank 0 waits for a message that rank 1 never sends; each makes a file in `folder` once it stands there."""
    stands = Path(folder) / str(comm.rank)
    if comm.rank == 0:
        with mock.patch.object(type(comm.progress), "waits_for", lambda *_, **__: stands.touch()):
            comm.receive(1, torch.zeros(1)).wait()
    else:
        stands.touch()
        threading.Event().wait()


def fail_on_rank_one(comm: Comm) -> None:
    """Rank 1 raises while the others wait for it."""
    if comm.rank == 1:
        raise RuntimeError("rank one was told to fail")
    comm.barrier()


def train_with_threads(comm: Comm, document: dict[str, Any], *arguments: Any) -> Trained:
    """`train_job` with as many threads as the job says."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_of(parse_job_spec(document)))
    try:
        return train_job(comm, document, *arguments)
    finally:
        torch.set_num_threads(before)
