"""What the pipeline tells the model of each micro-batch, and what it counts, in training and in evaluation."""

from __future__ import annotations

import pytest
import torch
from engine_specs import spec
from one_layer import lone_rank
from rank_programs import micro_batches

from manta.workers.data.batches import NO_TARGET, MicroBatch
from manta.workers.engine import Engine
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute import NOTHING, Recompute
from manta.workers.parallel.tensor.dropout import sample_keys

CPU = torch.device("cpu")
WINDOWS = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(3))


def recorded_engine(rank: int = 0, **sections) -> tuple[Engine, list[MicroBatch], list[ForwardPass]]:
    """An engine, the four micro-batches of its step, and what its only chunk is told of each, in order."""
    model = {"layers": 2, "hidden_size": 16, **sections.pop("model", {})}
    job = spec(model=model, train={"micro_batch_size": 2, "seed": 5}, **sections)
    engine, passes = Engine(job, lone_rank(job, rank)), []
    engine.initialise(1)
    engine.model.chunks[0].register_forward_pre_hook(lambda chunk, arguments: passes.append(arguments[1]))
    batch = micro_batches(job, 0, WINDOWS)
    engine.reduction.begin(len(batch), len(WINDOWS))
    return engine, batch, passes


def test_pipeline_recomputes_micro_batches_beyond_its_window_only_in_training():
    policy = {"recompute": "selective", "recompute_modules": ["norm"], "recompute_keep": 1}
    engine, batch, passes = recorded_engine(parallel={"schedule": "gpipe", **policy})
    engine.pipeline.train(batch, 1.0)
    assert [each.recompute for each in passes] == [NOTHING, *[Recompute(norm=True)] * 3]
    passes.clear()
    engine.pipeline.evaluate(batch)
    assert [each.recompute for each in passes] == [NOTHING] * 4


def test_training_drops_out_by_the_keys_of_its_samples_and_evaluation_nothing():
    engine, batch, passes = recorded_engine(model={"dropout": 0.1})
    engine.pipeline.train(batch, 1.0)
    expected = sample_keys(5, range(8), CPU).split(2)
    assert all(torch.equal(each.keys_b, keys) for each, keys in zip(passes, expected, strict=True))
    passes.clear()
    engine.pipeline.evaluate(batch)
    assert [each.keys_b for each in passes] == [None] * 4


def test_evaluation_is_independent_of_earlier_passes_and_leaves_gradients_alone():
    engine, batch, _ = recorded_engine()
    phases, gradients = [], engine.flat.gradients.fill_(7.0).clone()
    engine.comm.step.on_phase = lambda step, phase: phases.append(phase)
    alone, _ = engine.pipeline.evaluate(batch)
    assert set(phases) == {"validation"}
    assert torch.equal(engine.flat.gradients, gradients)
    trained = engine.pipeline.train(batch, 1.0).losses_m
    assert "validation" not in phases[len(batch) :]
    again, _ = engine.pipeline.evaluate(batch)
    assert torch.equal(again, alone)
    assert trained.tolist() == pytest.approx(alone.tolist(), rel=1e-6)


def test_evaluation_has_a_loss_per_micro_batch_and_ignores_positions_without_a_target():
    engine, batch, _ = recorded_engine()
    whole, tokens = engine.pipeline.evaluate(batch)
    assert (len(whole), tokens.item()) == (4, 64)
    assert 2 * 8 * 5.0 < whole.min().item() <= whole.max().item() < 2 * 8 * 6.0, "a sum of some ln 256 a token"
    masked = batch[1].targets_sb.clone()
    masked[:, 0] = NO_TARGET
    evaluated, tokens = engine.pipeline.evaluate([batch[0], MicroBatch(batch[1].samples, batch[1].inputs_sb, masked)])
    assert tokens.item() == 24
    assert evaluated[0] == whole[0]
    assert evaluated[1].item() < 8 * 6.0


@pytest.mark.parametrize("rank", [0, 1])
def test_loss_is_reported_by_one_tensor_rank_only(rank):
    engine, batch, _ = recorded_engine(rank, parallel={"tensor": 2})
    losses, tokens = engine.pipeline.evaluate(batch)
    assert tokens.item() == (64 if rank == 0 else 0)
    assert rank == 0 or losses.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("parallel", "again"),
    [
        ({}, False),
        ({"recompute": "selective", "recompute_modules": ["norm"]}, True),
        ({"recompute": "selective", "recompute_modules": ["core_attention"]}, True),
    ],
    ids=["none", "norm", "core attention"],
)
def test_recomputation_in_backward_is_timed_separately(parallel, again):
    engine, batch, _ = recorded_engine(parallel=parallel)
    engine.comm.step.begin(1, measure=True)
    engine.pipeline.train(batch, 1.0)
    seconds = engine.comm.step.parts.end()
    assert (seconds["recompute"] > 0.0) == again
    assert seconds["forward"] > 0.0 and seconds["backward"] > 0.0


def test_the_record_follows_each_action_with_its_micro_batch():
    engine, batch, _ = recorded_engine(parallel={"schedule": "gpipe"})
    phase, passed = engine.comm.step.phase, []

    def noting(name, micro_batch=-1, stage=-1):
        passed.append((name, micro_batch))
        return phase(name, micro_batch, stage)

    engine.comm.step.phase = noting
    engine.pipeline.train(batch, 1.0)
    of_actions = [each for each in passed if each[0] in ("forward", "backward")]
    assert of_actions == [(name, number) for name in ("forward", "backward") for number in range(4)]


@pytest.mark.parametrize(
    ("frozen", "rank", "messages"),
    [
        ([], 0, ["send", "receive"]),
        ([], 1, ["receive", "send"]),
        (["embedding"], 0, ["send", "receive"]),
        (["embedding", "layers.0"], 0, ["send"]),
        (["embedding", "layers.0"], 1, ["receive"]),
    ],
    ids=str,
)
def test_pipeline_sends_no_gradient_to_a_stage_that_needs_none(frozen, rank, messages):
    model = {"layers": 2, "hidden_size": 16, "tie_embeddings": False}
    job = spec(model=model, train={"micro_batch_size": 8, "frozen": frozen}, parallel={"pipeline": 2})
    engine, seen = Engine(job, lone_rank(job, rank)), []
    engine.initialise(1)
    for name in ("send", "receive"):
        usual = getattr(engine.comm, name)

        def noted(*arguments, name=name, usual=usual):
            seen.append(name)
            return usual(*arguments)

        setattr(engine.comm, name, noted)
    engine.reduction.begin(1, 8)
    engine.pipeline.train(micro_batches(job, 0, WINDOWS), 1.0)
    assert sorted(seen) == sorted(messages)


class Sent:
    """A message that is on its way, or has left."""

    def __init__(self, done: bool):
        self.done, self.waited = done, 0

    def wait(self) -> None:
        """Count."""
        self.waited += 1


@pytest.mark.parametrize("done", [True, False])
def test_a_step_ends_when_all_its_messages_have_left(done):
    """Their memory is used again by the next one."""
    engine, batch, _ = recorded_engine(parallel={"pipeline": 2})
    sent = []

    def send(stage, tensor):
        assert stage == 1
        sent.append(Sent(done))
        return sent[-1]

    engine.comm.send = send
    engine.pipeline.evaluate(batch)
    assert [each.waited for each in sent] == [0 if done else 1] * 4
