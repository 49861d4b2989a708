"""Weight gradients are added when their pass comes, the first one in place of what a step before has left."""

from __future__ import annotations

import gc

import pytest
import torch
from engine_specs import spec
from one_layer import lone_rank
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from manta.workers.data.batches import MicroBatch
from manta.workers.engine import Engine
from manta.workers.parallel.tensor import compiled_operators
from manta.workers.parallel.tensor.products import TorchProducts
from manta.workers.parallel.tensor.weight_gradients import WeightGradients, clear_forgotten, forget
from manta.workers.schedules.schedule import Action


@pytest.fixture
def store():
    return WeightGradients(TorchProducts())


def parameter(*shape: int) -> nn.Parameter:
    """With a gradient of sevens from the step before."""
    made = nn.Parameter(torch.zeros(shape))
    made.main_grad, made.holds_gradient = torch.full(shape, 7.0), True
    return made


def test_weight_gradient_tasks_run_at_once_unless_deferred_to_a_pass(store):
    done = []
    store.submit(lambda: done.append("at once"))
    with store.deferred() as tasks:
        assert store.keeping
        store.submit(lambda: done.append("later"))
    assert (done, store.keeping, len(tasks)) == (["at once"], False, 1)
    with store.deferred() as others:
        pass
    assert others == [], "each pass has its own"


def test_a_step_that_breaks_off_keeps_and_reports_nothing_of_the_next(store):
    weight, reported = parameter(2, 3), []
    with pytest.raises(ValueError, match="broken"), store.reported(reported.append), store.deferred():
        raise ValueError("broken")
    assert not store.keeping
    store.add_product(weight, torch.ones(4, 2), torch.ones(4, 3))
    assert reported == []


ADDED = {
    "product": ((2, 3), lambda store, weight: store.add_product(weight, torch.ones(4, 2), torch.ones(4, 3)), [4.0] * 6),
    "sum": ((3,), lambda store, weight: store.add_sum(weight, torch.ones(4, 3)), [4.0] * 3),
    "rows": (
        (3, 2),
        lambda store, weight: store.add_rows(weight, torch.tensor([2, 0, 2, 2]), torch.ones(4, 2)),
        [1.0, 1.0, 0.0, 0.0, 3.0, 3.0],
    ),
}


@pytest.mark.parametrize(("shape", "add", "one"), ADDED.values(), ids=ADDED)
def test_forgotten_gradient_is_overwritten_by_the_next_and_then_accumulated(store, shape, add, one):
    weight, reported, once = parameter(*shape), [], torch.tensor(one).view(shape)
    with store.reported(reported.append):
        add(store, weight)
        assert torch.equal(weight.main_grad, 7.0 + once)
        forget([weight])
        add(store, weight)
        assert torch.equal(weight.main_grad, once)
        add(store, weight)
        assert torch.equal(weight.main_grad, 2 * once)
    assert len(reported) == 3 and all(each is weight for each in reported)


def test_forgotten_gradient_without_a_contribution_is_cleared(store):
    added, left = parameter(3), parameter(3)
    forget([added, left])
    store.add_sum(added, torch.ones(4, 3))
    clear_forgotten([added, left])
    assert (added.main_grad.tolist(), left.main_grad.tolist()) == ([4.0] * 3, [0.0] * 3)
    store.add_sum(left, torch.ones(4, 3))
    assert left.main_grad.tolist() == [4.0] * 3


def test_layers_of_a_deleted_engine_are_not_found():
    """A later engine's weights may lie at the same address."""
    job = spec(model={"layers": 1, "hidden_size": 16})
    engine = Engine(job, lone_rank(job))
    layer = engine.model.chunks[0].layers["0"].mlp.up
    address = layer.weight.data_ptr()
    compiled_operators.enter(layer)
    assert compiled_operators._LAYERS_BY_WEIGHT[address] is layer
    del engine, layer
    gc.collect()
    assert address not in compiled_operators._LAYERS_BY_WEIGHT


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_deferred_products_do_not_keep_received_activations_alive(recompute):
    layout = {"pipeline": 2, "schedule": "zb-h1", "recompute": recompute}
    job = spec(model={"layers": 2, "hidden_size": 16}, train={"global_batch_size": 3}, parallel=layout)
    engine = Engine(job, lone_rank(job, 1))
    received: list[StorageWeakRef] = []
    waiting: list[bool] = []

    def note(action: Action) -> None:
        if action.kind == "backward_input":
            waiting.append(received[action.micro_batch].expired())

    arrived = engine.pipeline._arrived
    engine.pipeline._when_done = note
    engine.pipeline._arrived = lambda *which: _noted(arrived(*which), received)
    tokens = torch.zeros(job.model.sequence_length, 1, dtype=torch.int64)
    engine.pipeline.train([MicroBatch(range(n, n + 1), tokens, tokens) for n in range(3)], 1.0)
    assert waiting == [True, True, True]


def _noted(tensor: torch.Tensor, in_: list[StorageWeakRef]) -> torch.Tensor:
    in_.append(StorageWeakRef(tensor.untyped_storage()))
    return tensor
