"""An agreement's slices do not overlap; clipping and refusal follow from what was agreed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from engine_specs import layout_of, spec
from one_layer import lone_rank

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.engine import Engine
from manta.workers.parallel.data.agreement import Agreement, Loss, StepSums
from manta.workers.parallel.data.zero import clip
from manta.workers.protocol.messages import TraceOrder
from manta.workers.protocol.requests import ASKED_LENGTH, Asked, RecordSteps, Rest, SaveAndEnd
from manta.workers.timing.recorder import HostMoments, Recorder

NO_LIMITS = (math.inf, math.inf)


def agreement(loss: float = 6.0, tokens: float = 3.0, square: float = 36.0) -> Agreement:
    """Loss 2 a token, and a gradient of length 2 for a loss scale of 1."""
    agreed = Agreement(Comm(RankGrid(layout_of()), 0, torch.device("cpu")))
    for name, value in (("loss", loss), ("tokens", tokens), ("square", square)):
        getattr(agreed, name).fill_(value)
    return agreed


def test_agreement_slices_are_separate_views_of_one_vector():
    comm = Comm(RankGrid(layout_of(tensor=2, data=3)), 4, torch.device("cpu"))
    sent = []
    comm.all_reduce = lambda axis, tensor: sent.append((axis, tensor.tolist()))  # type: ignore[method-assign]
    agreed = Agreement(comm, replica_ranks=2, micro_batches=5, z_losses=3)
    slices = [agreed.loss, agreed.z_loss, agreed.tokens, agreed.square]
    slices += [agreed.asked, agreed.memory_bytes, agreed.own_seconds]
    slices += [agreed.rank_squares, agreed.micro_batch_losses, agreed.micro_batch_z]
    assert [each.numel() for each in slices] == [1, 1, 1, 1, ASKED_LENGTH, 6, 6, 2, 5, 3]
    for number, each in enumerate(slices):
        each.fill_(number)
    agreed.sum()
    expected = [float(number) for number, each in enumerate(slices) for _ in range(each.numel())]
    assert sent == [("world", expected)], "one sum of all"


def test_each_rank_tells_of_itself_in_its_own_place(monkeypatch):
    """Rank 4 is the third replica's first: its place is none of those along the other axes."""
    comm = Comm(RankGrid(layout_of(tensor=2, data=3)), 4, torch.device("cpu"))
    monkeypatch.setattr(comm, "all_reduce", lambda axis, values: None)
    loss = Loss(torch.tensor([6.0, 2.0]), torch.tensor(3.0), 1.0)
    norm = SimpleNamespace(square=lambda parts: sum(part.sum() for part in parts) ** 2)
    for request, asked in ((SaveAndEnd(0), Asked()), (Rest(0), Asked(end=1)), (None, Asked(1, 1, 1))):
        comm.requests.saving = request is None
        agreed = StepSums(comm, norm).agree([torch.full((2,), 2.0)], loss, memory_bytes=7)
        assert agreed.memory_bytes.tolist() == [0, 0, 0, 0, 7, 0]
        assert [rank for rank, seconds in enumerate(agreed.own_seconds.tolist()) if seconds] == [4]
        assert [each.item() for each in (agreed.loss, agreed.tokens, agreed.square)] == [8.0, 3.0, 16.0]
        assert Asked.of(agreed.asked.tolist()) == asked
        comm.requests.add(request)


@pytest.mark.parametrize(("rank", "begins"), [(0, (3, 2)), (4, (0, 0))])
def test_the_first_rank_alone_says_which_trace_begins(monkeypatch, rank, begins):
    comm = Comm(RankGrid(layout_of(tensor=2, data=3)), rank, torch.device("cpu"))
    monkeypatch.setattr(comm, "all_reduce", lambda axis, values: None)
    loss = Loss(torch.tensor([6.0, 2.0]), torch.tensor(3.0), 1.0)
    sums = StepSums(comm, SimpleNamespace(square=lambda parts: sum(part.sum() for part in parts) ** 2))
    comm.requests.add(RecordSteps(TraceOrder(3, 0, 2, first_step=6)))
    for step, expected in ((4, (0, 0)), (5, begins)):
        comm.step.begin(step)
        agreed = sums.agree([torch.ones(2)], loss, memory_bytes=7)
        asked = Asked.of(agreed.asked.tolist())
        assert (asked.trace, asked.traced_steps) == expected
    for left, expected in ((2, 0), (1, begins[0])):
        comm.step.recorder = Recorder(2, left, HostMoments())
        agreed = sums.agree([torch.ones(2)], loss, memory_bytes=7)
        assert Asked.of(agreed.asked.tolist()).trace == expected, "one after the other"


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_agreement_with_elastic_sums_counts_losses_by_micro_batch_and_the_norm_once(monkeypatch, rank):
    """Four ranks a replica; each replica has the same squared norms, and other micro-batches."""
    job = spec(
        model={"layers": 2, "hidden_size": 16},
        train={"deterministic": "elastic", "micro_batch_size": 2},
        parallel={"tensor": 2, "pipeline": 2, "data": 2},
    )
    comm, agreed_sums = lone_rank(job, rank), []
    engine = Engine(job, comm)
    engine.reduction.begin(2, 8)
    sums = engine.optimizer.sums
    monkeypatch.setattr(sums.norm, "square", lambda parts: torch.tensor(9.0))
    monkeypatch.setattr(
        Agreement, "sum", lambda agreed: agreed_sums.append((agreed.rank_squares, agreed.micro_batch_losses))
    )
    loss = Loss(torch.tensor([6.0, 2.0], dtype=torch.float64), torch.tensor(3.0), 1.0)
    agreed = sums.agree([torch.zeros(1)], loss, memory_bytes=7)
    ((squares, losses),) = agreed_sums
    assert squares.tolist() == [9.0 if each == rank else 0.0 for each in range(4)]
    assert losses.tolist() == ([6.0, 2.0, 0.0, 0.0] if rank < 4 else [0.0, 0.0, 6.0, 2.0])
    assert (agreed.loss.item(), agreed.square.item()) == (8.0, 9.0 if rank < 4 else 0.0)
    assert (agreed.tokens.item(), agreed.memory_bytes[rank].item()) == (3.0, 7.0)


@pytest.mark.parametrize(("clip_norm", "scale", "factor"), [(0.0, 1.0, 1 / 3), (4.0, 1.0, 1 / 3), (0.5, 1.0, 1 / 12)])
def test_gradients_become_the_mean_over_tokens_and_no_longer_than_the_limit(clip_norm, scale, factor):
    clipped = clip(agreement(), scale, clip_norm, NO_LIMITS)
    assert clipped.norm.item() == 2.0
    assert clipped.factor.item() == pytest.approx(factor, rel=1e-5)
    assert not clipped.refused


@pytest.mark.parametrize("clip_norm", [1e-6, 2e-6, 1e-3, 2.0])
def test_gradients_are_clipped_as_torch_does(clip_norm):
    """Down to the millionth that it adds to the norm, which tells where gradients are as small as that."""
    gradient = torch.tensor([1.2e-6, 1.6e-6], dtype=torch.float64)
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameter, clip_norm)
    clipped = clip(agreement(tokens=1.0, square=gradient.square().sum().item()), 1.0, clip_norm, NO_LIMITS)
    torch.testing.assert_close(gradient * clipped.factor, parameter.grad, rtol=1e-9, atol=0.0)


def test_a_step_in_which_no_token_has_a_target_is_a_step():
    clipped = clip(agreement(loss=0.0, tokens=0.0, square=0.0), 2.0**10, 1.0, NO_LIMITS)
    assert (clipped.norm.item(), clipped.refused.item()) == (0.0, False)
    assert math.isfinite(clipped.factor.item())


def test_the_loss_scale_is_taken_out():
    clipped = clip(agreement(square=36.0 * 2.0**20), 2.0**10, 0.0, NO_LIMITS)
    assert (clipped.norm.item(), clipped.factor.item()) == (2.0, 1 / 3 / 2**10)


@pytest.mark.parametrize(
    ("agreed", "limits"),
    [
        (agreement(loss=math.nan), NO_LIMITS),
        (agreement(square=math.inf), NO_LIMITS),
        (agreement(square=math.nan), NO_LIMITS),
        (agreement(), (1.9, math.inf)),
        (agreement(), (math.inf, 1.9)),
    ],
)
def test_bad_numbers_refuse_the_update_and_leave_no_gradient(agreed, limits):
    clipped = clip(agreed, 1.0, 1.0, limits)
    assert clipped.refused
    assert clipped.factor.item() == 0.0


def test_step_with_numbers_at_their_limits_is_not_refused():
    assert not clip(agreement(), 1.0, 1.0, (2.0, 2.0)).refused
