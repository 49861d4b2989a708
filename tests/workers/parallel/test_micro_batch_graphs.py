"""Micro-batches that are replayed give the bits of those that are computed: losses, gradients and parameters of several
steps, over a stand-in for CUDA graphs that repeats the operations of torch and nothing else
(benchmarks/support/replayed_operations.py). What a graph would get wrong is found by it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engine_specs import spec
from one_layer import CPU, LoneRank

from benchmarks.support.replayed_operations import ReplayedOperations
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.data.batches import NO_TARGET, MicroBatch
from manta.workers.engine import Engine
from manta.workers.model.layer import Layer
from manta.workers.parallel.pipeline import graphed
from manta.workers.parallel.pipeline.graphed import GraphedPipeline, Inputs, MicroBatchRecorder
from manta.workers.parallel.tensor.weight_gradients import forget

STEPS = 3
BATCH = 7
"""Sequences: three micro-batches of two, and one of one."""


def job(graphs: bool, **sections: dict[str, Any]):
    """Of one small rank."""
    model = {"layers": 2, "hidden_size": 16, "heads": 2} | sections.pop("model", {})
    train = {"global_batch_size": BATCH, "micro_batch_size": 2, "cuda_graphs": graphs} | sections.pop("train", {})
    return spec(model=model, train=train, **sections)


class Replica(LoneRank):
    """One of several, which keeps what it gives to each sum over them, and where in the step."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.given: list[torch.Tensor] = []

    def start_reduce_scatter(self, axis: Any, tensor: torch.Tensor, out: Any = None) -> Any:
        """As of LoneRank."""
        self.given += [tensor.clone(), torch.tensor(self.progress.position)]
        return super().start_reduce_scatter(axis, tensor, out)


@dataclass
class Run:
    """What some steps come to."""

    engine: Engine
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    recordings: list[ReplayedOperations] = field(default_factory=list)

    @property
    def outcome(self) -> list[Any]:
        """Everything that must have the same bits."""
        comm = self.engine.comm
        sums = comm.given if isinstance(comm, Replica) else []
        state = [self.engine.flat.parameters, *self.gradients, *sums, *self.engine.state()]
        return [self.losses, self.norms, *(each.to(torch.float64).tolist() for each in state)]

    @property
    def replays(self) -> int:
        """Micro-batches that were replayed, besides those that were recorded."""
        return sum(each.replays for each in self.recordings)


def micro_batches(job_spec, step: int) -> list[MicroBatch]:
    """Other ones in each step, with some positions without a target."""
    generator = torch.Generator().manual_seed(step)
    size, length = job_spec.train.micro_batch_size, job_spec.model.sequence_length
    count = job_spec.train.global_batch_size // job_spec.layout.data
    windows = torch.randint(job_spec.vocabulary_size, (count, length + 1), generator=generator)
    windows[step % count, 3:] = NO_TARGET
    parts = [range(first, min(first + size, count)) for first in range(0, count, size)]
    samples = [range(step * 100 + part.start, step * 100 + part.stop) for part in parts]
    return [
        MicroBatch(which, windows[part.start : part.stop, :-1].abs().t(), windows[part.start : part.stop, 1:].t())
        for which, part in zip(samples, parts, strict=True)
    ]


def run(
    graphs: bool,
    before: Callable[[Engine, int], None] = lambda engine, step: None,
    kind: type[ReplayedOperations] = ReplayedOperations,
    steps: int = STEPS,
    **sections: Any,
) -> Run:
    """`before` is called before each step; `kind`: of recordings."""
    job_spec = job(graphs, **sections)
    made: list[ReplayedOperations] = []

    def new_recording() -> ReplayedOperations:
        made.append(kind())
        return made[-1]

    ranks = Replica if job_spec.layout.data > 1 else Comm
    engine = Engine(job_spec, ranks(RankGrid(job_spec.layout), 0, CPU), new_recording=new_recording)
    engine.initialise(1)
    result = Run(engine, recordings=made)
    for step in range(1, steps + 1):
        before(engine, step)
        batch, sequences = micro_batches(job_spec, step), job_spec.train.global_batch_size
        if job_spec.train.deterministic == "layout":
            sequences += step  # as if others had more and more: the loss has another factor in each step
        statistics = engine.step(batch, sequences, 1e-2, 0)
        result.losses.append(statistics.loss)
        result.norms.append(statistics.grad_norm)
        result.gradients.append(engine.flat.gradients.clone())
        engine.settle()
    return result


LLAMA = {"family": "llama", "kv_heads": 1}
REPLICAS: dict[str, dict[str, Any]] = {
    "parallel": {"data": 2, "bucket_megabytes": 0.002},
    "train": {"global_batch_size": 2 * BATCH},
}
BF16 = {"precision": "bf16"}
JOBS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt, bf16, not tied": {"model": {"tie_embeddings": False}, "train": BF16},
    "gpt, fp16, frozen": {"train": {"precision": "fp16", "frozen": ["embedding", "layers.0"]}},
    "gpt, elastic, state on the host": {"train": {"deterministic": "elastic", "optimizer": {"offload": True}}},
    "gpt, full, dropout": {"model": {"dropout": 0.1}, "parallel": {"recompute": "full"}},
    "llama, selective, z-loss": {
        "model": LLAMA,
        "train": {"z_loss": 1e-3},
        "parallel": {"recompute": "selective", "recompute_modules": ["norm", "mlp_activation", "core_attention"]},
    },
    "llama, bf16, few logits, window": {
        "model": LLAMA | {"sliding_window": 4},
        "train": BF16 | {"head_tokens": 5, "z_loss": 1e-3},
    },
    "qwen, bf16, every other layer": {
        "model": {"family": "qwen", "kv_heads": 1},
        "train": BF16,
        "parallel": {"recompute": "full", "recompute_every": 2},
    },
    "llama, replicas, zero 0": {
        "model": LLAMA,
        "parallel": REPLICAS["parallel"] | {"zero": 0},
        "train": REPLICAS["train"],
    },
    "gpt, adapters": {"train": {"lora": {"rank": 3, "dropout": 0.3}}},
    "gpt, bf16, replicas beside forward": {
        "parallel": REPLICAS["parallel"] | {"gather": "beside_forward"},
        "train": REPLICAS["train"] | BF16,
    },
}


@functools.cache
def computed(replicas: bool = False) -> Run:
    """Without graphs, of a GPT alone or one of two."""
    return run(False, **(REPLICAS if replicas else {}))


@pytest.mark.parametrize("name", JOBS)
def test_replayed_micro_batches_have_the_bits_of_computed_ones(name):
    eager, graphed = run(False, **JOBS[name]), run(True, **JOBS[name])
    pipeline = graphed.engine.pipeline
    assert isinstance(pipeline, GraphedPipeline) and pipeline.recorder.refusal is None
    assert graphed.outcome == eager.outcome
    assert len(graphed.recordings) == 1 and graphed.replays >= STEPS - 1


def differ(one: Run, other: Run) -> bool:
    """Whether the two came to other bits, though all micro-batches were recorded."""
    assert one.replays + other.replays > 0
    return one.outcome != other.outcome


@pytest.mark.parametrize("name", ["inputs_sb", "targets_sb", "scale", "keys_b"])
def test_graph_replay_with_a_stale_input_is_noticed(monkeypatch, name):
    """`keys_b`: a seed that is frozen in."""

    def others(self: Inputs) -> list[torch.Tensor]:
        return [each for key, each in vars(self).items() if key != name and each is not None]

    dropout = {"model": {"dropout": 0.2}} if name == "keys_b" else {}
    eager = run(False, **dropout)
    monkeypatch.setattr(Inputs, "tensors", others)
    assert differ(run(True, **dropout), eager)


def test_a_loss_that_is_not_read_before_the_next_replay_is_found(monkeypatch):
    eager, right = computed(), MicroBatchRecorder.run
    late: list[torch.Tensor] = []

    def wrong(self: MicroBatchRecorder, *given: Any) -> Any:
        recorded = right(self, *given)
        late.append(recorded.sums.clone())
        recorded.sums.copy_(late[-2:][0])
        return recorded

    monkeypatch.setattr(MicroBatchRecorder, "run", wrong)
    assert differ(run(True), eager)


def test_gradients_that_are_written_over_are_found(monkeypatch):
    class Overwriting(ReplayedOperations):
        """Of the first micro-batch of a step, whose gradients take the place of what is there."""

        def capture(self, compute: Callable[[], None]) -> None:
            forget(parameters)
            super().capture(compute)

    parameters: list[torch.nn.Parameter] = []

    def know(engine: Engine, step: int) -> None:
        parameters[:] = [slot.entry.parameter for slot in engine.flat.slots if not slot.entry.by_autograd]

    assert differ(run(True, know, Overwriting), computed())


def move_the_embedding(engine: Engine, step: int) -> None:
    """Before the third step, out of the memory that the optimizer updates."""
    if step == 3:
        weight = engine.model.chunks[0].embedding.token.weight
        weight.data = weight.data.clone()


def test_moved_parameter_is_recorded_again_in_the_graph(monkeypatch):
    eager, again = (run(graphs, move_the_embedding, steps=4) for graphs in (False, True))
    assert again.outcome == eager.outcome
    assert len(again.recordings) == 2
    monkeypatch.setattr(graphed, "_addresses", lambda parameter: ())
    stale = run(True, move_the_embedding, steps=4)
    assert len(stale.recordings) == 1 and differ(stale, eager)


def test_gradients_that_are_reported_too_seldom_or_too_often_are_found(monkeypatch):
    eager, right = computed(replicas=True), GraphedPipeline._computed
    for wrong in (lambda *given: right(*given)[1:], lambda *given: right(*given) * 2):
        monkeypatch.setattr(GraphedPipeline, "_computed", wrong)
        assert differ(run(True, **REPLICAS), eager)


@pytest.mark.parametrize(
    ("reads", "says"),
    [
        (lambda x: float(x.sum()), "__float__: the host reads a value"),
        (lambda x: x.sum().item(), "item: the host reads a value"),
        (lambda x: x[x > 0], "aten.index.Tensor: its shape depends on values"),
        (lambda x: torch.tensor([1.0]), "tensor: a tensor is made of the host's values"),
    ],
)
def test_unrecordable_operation_in_a_micro_batch_is_refused_and_named(monkeypatch, reads, says):
    right = Layer.forward

    def wrong(self: Layer, x: torch.Tensor, given: Any) -> torch.Tensor:
        reads(x.detach())
        return right(self, x, given)

    monkeypatch.setattr(Layer, "forward", wrong)
    assert run(True).engine.not_recorded == f"NotRecordable: {says}"


class Refusing(ReplayedOperations):
    """A device that records nothing."""

    def capture(self, compute: Callable[[], None]) -> None:
        """As a capture that fails on a GPU, it has computed nothing."""
        raise RuntimeError("operation not permitted\nand more")


@pytest.mark.parametrize("replicas", [False, True], ids=["alone", "replicas"])
def test_micro_batch_that_cannot_be_recorded_is_computed_and_not_tried_again(replicas):
    refused, eager = run(True, kind=Refusing, **(REPLICAS if replicas else {})), computed(replicas)
    assert refused.outcome == eager.outcome
    assert len(refused.recordings) == 1
    assert refused.engine.not_recorded == "RuntimeError: operation not permitted"
    assert eager.engine.not_recorded is None


def test_device_marks_are_the_same_with_graphs_and_none_is_recorded():
    """An event that was recorded into a graph may not be asked."""
    capturing: list[bool] = []

    class Watched(ReplayedOperations):
        def capture(self, compute: Callable[[], None]) -> None:
            capturing.append(True)
            super().capture(compute)
            capturing.pop()

    def marks(graphs: bool) -> list[int]:
        passed: list[int] = []

        class Trail:
            def at(self, position: int) -> None:
                assert not capturing
                passed.append(position)

        def watch(engine: Engine, step: int) -> None:
            engine.comm.step._trail = Trail()

        result = run(graphs, watch, Watched)
        assert len(result.recordings) == int(graphs)
        return passed

    assert marks(True) == marks(False)


def test_steps_that_are_measured_are_computed():
    def measure(engine: Engine, step: int) -> None:
        engine.comm.step.begin(step, measure=step == 3)

    eager, measured, never = computed(), run(True, measure), run(True)
    assert measured.outcome == eager.outcome
    assert 0 < measured.replays < never.replays


def test_an_evaluation_between_steps_changes_nothing_and_is_computed():
    losses: dict[bool, list[list[float]]] = {False: [], True: []}

    def evaluate(engine: Engine, step: int) -> None:
        batch = micro_batches(engine.spec, 50 + step)
        losses[engine.spec.train.cuda_graphs].append(engine.pipeline.evaluate(batch)[0].tolist())

    eager, graphed_run = run(False, evaluate), run(True, evaluate)
    assert graphed_run.outcome == eager.outcome
    assert losses[False] == losses[True] and len(losses[True]) == STEPS
