"""AdamW in one pass, against torch's own."""

from __future__ import annotations

import pytest
import torch
from engine_specs import spec
from one_layer import lone_rank

from manta.workers.config import OptimizerConfig
from manta.workers.engine import Engine
from manta.workers.parallel.data import adamw
from manta.workers.parallel.data.agreement import Loss
from manta.workers.parallel.data.state import Piece
from manta.workers.parallel.data.zero import ZeroOptimizer

CONFIG = OptimizerConfig(weight_decay=0.2, beta1=0.85, beta2=0.97, epsilon=1e-7)
RATE, FACTOR = 0.05, 0.3


@pytest.fixture
def not_compiled(monkeypatch):
    monkeypatch.setattr(adamw, "compiled_pass", adamw.one_pass)


def pieces(values: torch.Tensor, rounded: torch.Tensor | None = None) -> dict[float, list[Piece]]:
    """A decayed half, and one that is not."""
    zeros = torch.zeros_like(values), torch.zeros_like(values)
    cut = len(values) // 2
    return {
        decay: [
            Piece(
                values[part],
                torch.zeros_like(values[part]),
                tuple(each[part] for each in zeros),
                torch.zeros((), dtype=torch.float32),
                None if rounded is None else rounded[part],
            )
        ]
        for decay, part in ((0.2, slice(0, cut)), (0.0, slice(cut, None)))
    }


def drawn(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def updated(groups: dict[float, list[Piece]], seed: int, refused: bool = False) -> None:
    for pieces_of_one in groups.values():
        for piece in pieces_of_one:
            piece.gradient.copy_(drawn(len(piece.gradient), seed))
    factor = torch.tensor(FACTOR, dtype=torch.float64)
    adamw.update_in_one_pass(groups, CONFIG, RATE, factor, torch.tensor(refused))


def test_one_pass_adamw_matches_torchs_optimizer(not_compiled):
    values = drawn(40, 1)
    theirs = [values[:20].clone().requires_grad_(), values[20:].clone().requires_grad_()]
    betas = (CONFIG.beta1, CONFIG.beta2)
    optimizers = [
        torch.optim.AdamW([each], lr=RATE, betas=betas, eps=CONFIG.epsilon, weight_decay=decay)
        for each, decay in zip(theirs, (0.2, 0.0), strict=True)
    ]
    groups = pieces(values)
    for seed in range(5):
        updated(groups, seed)
        for each, optimizer in zip(theirs, optimizers, strict=True):
            each.grad = FACTOR * drawn(20, seed)
            optimizer.step()
    torch.testing.assert_close(values, torch.cat(theirs).detach(), rtol=1e-12, atol=1e-12)


def test_refused_adamw_step_changes_nothing(not_compiled):
    values = drawn(40, 1).float()
    rounded = torch.zeros(40, dtype=torch.bfloat16)
    groups = pieces(values, rounded)
    updated(groups, 1)
    everything = [t for each in groups.values() for p in each for t in (p.values, *p.moments, p.steps)]
    before, rounded_before = [each.clone() for each in everything], rounded.clone()
    factor = torch.zeros((), dtype=torch.float64)
    for each in groups.values():
        each[0].gradient.fill_(float("nan"))
    adamw.update_in_one_pass(groups, CONFIG, RATE, factor, torch.tensor(True))
    assert all(torch.equal(now, then) for now, then in zip(everything, before, strict=True))
    assert torch.equal(rounded, rounded_before) and rounded.float().abs().sum() > 0


def test_one_pass_adamw_rounds_values_to_16_bits_where_wanted(not_compiled):
    values, rounded = drawn(40, 1).float(), torch.zeros(40, dtype=torch.bfloat16)
    updated(pieces(values, rounded), 1)
    assert torch.equal(rounded, values.to(torch.bfloat16))


def test_adamw_compiles_once_for_all_lengths_and_steps():
    from torch._dynamo.testing import CompileCounterWithBackend  # seconds, for who only collects tests

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(adamw.one_pass(CONFIG.beta1, CONFIG.beta2, CONFIG.epsilon), dynamic=True, backend=counter)
    scalars = [torch.tensor(x) for x in (0.3, 0.05, 1.0, 0.99)]
    plain = adamw.one_pass(CONFIG.beta1, CONFIG.beta2, CONFIG.epsilon)
    for count in (64, 640, 1280):
        both = [[drawn(count, seed).float().abs() for seed in range(4)] for _ in range(2)]
        for run, tensors in zip((compiled, plain), both, strict=True):
            run(*tensors, None, *scalars, torch.tensor(False))
        torch.testing.assert_close(both[0], both[1])
    assert counter.frame_count == 1


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_pass_and_plain_optimizer_take_the_same_step(not_compiled, zero, replicas, precision):
    job = spec(parallel={"data": replicas, "zero": zero}, train={"precision": precision})

    def state(one_pass: bool) -> list[torch.Tensor]:
        engine = Engine(job, lone_rank(job, 0))
        optimizer = engine.optimizer = ZeroOptimizer(
            engine.flat, job.train.optimizer, engine.comm, engine.reduction, engine.optimizer.sums, zero, one_pass
        )
        engine.initialise(1)
        for step in range(3):
            engine.comm.step.begin(step)
            engine.reduction.begin(1, 8)
            engine.flat.gradients.copy_(drawn(len(engine.flat.gradients), step))
            loss = Loss(torch.tensor([64.0], dtype=torch.float64), torch.tensor(64.0, dtype=torch.float64), 1.0)
            optimizer.step(1e-2, loss, 0)
        assert optimizer.rounds_at_once == (one_pass and precision == "bf16" and (zero == 0 or replicas == 1))
        return [*engine.state(), engine.flat.parameters]

    for ours, theirs in zip(state(True), state(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
