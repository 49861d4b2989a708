"""The validation loss is a mean over the tokens of all validation batches of all replicas."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_specs import layout_of, spec

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.training.step_row import Validation

LOSSES = {
    "own": [([10.0, 6.0], 4.0), ([5.0, 3.0], 8.0), ([1.0, 2.0], 2.0)],
    "code": [([7.0, 9.0], 4.0)],
}
"""By held-out text, of each validation batch: the losses of this replica's two micro-batches, and their tokens."""


def validation(every: int = 0, texts: tuple[str, ...] = ("own",), **train) -> Validation:
    """Of a rank of the first of two replicas."""
    job = spec(train={"validate_every": every, "micro_batch_size": 2, **train}, parallel={"data": 2})
    comm = Comm(RankGrid(layout_of(data=2)), 0, torch.device("cpu"))

    def text(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, metric=f"loss of {name}", batches=lambda spec: len(LOSSES[name]))

    held_out = [text(name) for name in texts]
    batches = SimpleNamespace(held_out=held_out, validation=lambda text, index: LOSSES[text.name][index])

    def evaluate(batch, sequences):
        losses, tokens = batch
        return torch.tensor(losses, dtype=torch.float64), torch.tensor(tokens, dtype=torch.float64)

    engine = SimpleNamespace(spec=job, evaluate=evaluate)
    return Validation(engine, batches, comm)


def test_validation_is_due_every_given_number_of_steps_and_after_the_last_or_never():
    assert [step for step in range(1, 12) if validation(3, steps=11).due(step)] == [3, 6, 9, 11]
    assert not any(validation(0).due(step) for step in range(10))


@pytest.mark.parametrize(("deterministic", "places"), [("layout", 1), ("elastic", 4)])
def test_losses_and_tokens_of_all_batches_are_summed_over_all_ranks(monkeypatch, deterministic, places):
    """The other replica knows as much of each batch, at its own places where these are told apart."""
    evaluation = validation(3, deterministic=deterministic)

    def all_reduce(axis, sums):
        assert (axis, len(sums)) == ("world", 1 + 3 * places)
        losses = sums[1:].view(3, places)
        assert losses.sum(1).tolist() == [16.0, 8.0, 3.0]
        if places == 4:
            assert not losses[:, 2:].any(), "the places of the other replica"
        sums[0] += 14.0
        losses[:, -1] += torch.tensor([2.0, 4.0, 6.0], dtype=torch.float64)

    monkeypatch.setattr(evaluation.comm, "all_reduce", all_reduce)
    assert evaluation.losses() == {"loss of own": (16 + 8 + 3 + 12) / (14 + 14)}


@pytest.mark.parametrize("deterministic", ["layout", "elastic"])
def test_each_text_has_a_loss_of_its_own_from_one_sum_over_all_ranks(monkeypatch, deterministic):
    evaluation, sent = validation(3, ("own", "code"), deterministic=deterministic), []
    monkeypatch.setattr(evaluation.comm, "all_reduce", lambda axis, sums: sent.append(axis))
    assert evaluation.losses() == {"loss of own": 27 / 14, "loss of code": 16 / 4}
    assert sent == ["world"]
