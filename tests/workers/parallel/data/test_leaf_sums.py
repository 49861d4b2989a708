"""Leaves are added in the tree's order whatever passes make them, and nothing of a broken step is left."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from engine_specs import spec
from rank_programs import micro_batches

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.engine import Engine
from manta.workers.errors import PeerLost
from manta.workers.parallel.data.elastic_sums import LeafSum, WaitingBuffers
from manta.workers.parallel.data.tree_sum import Node, TreeSum, buffers
from manta.workers.schedules.action_lists import training_actions

RANGES = [(0, 3), (5, 8)]


def leaf(number: int) -> torch.Tensor:
    """A micro-batch's gradient: [8]."""
    return torch.randn(8, generator=torch.Generator().manual_seed(number))


def total_of(leaves: int) -> torch.Tensor:
    """The sum of the leaves in the tree's order."""
    tree: TreeSum[torch.Tensor] = TreeSum(leaves)
    for number in range(leaves):
        tree.push(Node(0, number), leaf(number), torch.add)
    return tree.total()


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 8])
def test_the_last_leaf_ends_with_the_trees_sum_in_the_flat_buffer(leaves):
    flat = torch.zeros(8)
    waiting = WaitingBuffers(flat)
    leaf_sum = LeafSum(RANGES, 1, flat, waiting)
    for _ in range(2):
        flat.zero_()
        leaf_sum.begin(leaves, range(leaves))
        for number in range(leaves):
            assert not leaf_sum.complete
            flat += leaf(number)
            leaf_sum.finished(number)
            flat[3:5] = 0.0  # of no range
        assert leaf_sum.complete
        for start, end in RANGES:
            assert torch.equal(flat[start:end], total_of(leaves)[start:end])
    assert len(waiting) == buffers(leaves, 0, leaves)


def test_a_replica_adds_its_own_leaves_at_their_places_in_the_tree():
    """Leaves 3 to 5 of 6: 3 stands alone, and waits for who has 2; 4 and 5 are a pair."""
    flat = torch.zeros(8)
    waiting = WaitingBuffers(flat)
    leaf_sum = LeafSum([(0, 8)], 1, flat, waiting)
    leaf_sum.begin(6, range(3, 6))
    for number in range(3):
        flat += leaf(3 + number)
        leaf_sum.finished(number)
    assert leaf_sum.complete
    assert torch.equal(waiting[0], leaf(3))
    assert torch.equal(flat, leaf(4) + leaf(5))


def test_leaf_sums_refuse_a_wrong_number_of_micro_batches():
    job = spec(train={"deterministic": "elastic", "micro_batch_size": 2})
    engine = Engine(job, Comm(RankGrid(job.layout), 0, torch.device("cpu")))
    with pytest.raises(ValueError, match=r"of 4 micro-batches this replica runs range\(0, 4\), not 3"):
        engine.reduction.begin(3, 8)


def test_leaf_sum_buffers_are_freed_without_the_garbage_collector():
    flat = torch.zeros(8)
    waiting = WaitingBuffers(flat)
    leaf_sum = LeafSum(RANGES, 1, flat, waiting)
    leaf_sum.begin(4, range(4))
    for number in range(3):
        leaf_sum.finished(number)
    freed = weakref.ref(waiting)
    gc.disable()
    try:
        del leaf_sum, waiting
        assert freed() is None
    finally:
        gc.enable()


def test_halves_of_a_step_that_broke_off_are_forgotten():
    """Two passes add to the parameter; the step ends between them."""
    flat = torch.zeros(8)
    leaf_sum = LeafSum([(0, 8)], 2, flat, WaitingBuffers(flat))
    leaf_sum.begin(2, range(2))
    flat += 100.0
    leaf_sum.finished(0)
    flat.zero_()
    leaf_sum.begin(2, range(2))
    for number in (0, 1):
        flat += 0.5 * leaf(number)
        leaf_sum.finished(number)
        assert not leaf_sum.complete
    for number in (0, 1):
        flat += 0.5 * leaf(number)
        leaf_sum.finished(number)
    assert torch.equal(flat, total_of(2))


def test_step_after_one_broken_off_in_backward_has_the_same_gradients():
    """Both ends of the tied model are on this rank (zb-v), so the embedding's leaves are made in two passes."""
    parallel = {"schedule": "zb-v", "virtual_stages": 2}
    job = spec(train={"deterministic": "elastic", "micro_batch_size": 2}, parallel=parallel)
    windows = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(1))

    def gradients(engine: Engine) -> torch.Tensor:
        batch = micro_batches(job, 0, windows)
        engine.reduction.begin(len(batch), len(windows))
        engine.pipeline.train(batch, 1.0)
        return torch.cat(engine.reduction.finish())

    def engine() -> Engine:
        made = Engine(job, Comm(RankGrid(job.layout), 0, torch.device("cpu")))
        made.initialise(1)
        return made

    expected = gradients(engine())
    actions = training_actions("zb-v", 1, 2, 4)[0]
    for broken in (index for index, action in enumerate(actions) if action.kind == "backward_weight"):
        interrupted = engine()
        left = iter(range(broken))

        def leave(left=left):
            if next(left, None) is None:
                raise PeerLost("a peer is gone")

        usual, interrupted.comm.raise_if_over = interrupted.comm.raise_if_over, leave
        with pytest.raises(PeerLost):
            gradients(interrupted)
        interrupted.comm.raise_if_over = usual
        assert torch.equal(gradients(interrupted), expected), broken
