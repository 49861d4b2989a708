"""Core attention on one rank against the formula, softmax(q k^T / sqrt(d)) v, in fp64.

Shapes: s sequence, b micro-batch, a heads, g key-value heads, d head size.
"""

import math

import pytest
import torch

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import ParallelConfig
from manta.workers.data.batches import Documents
from manta.workers.model.core_attention import Visible, explicit_attention, fused_attention
from manta.workers.parallel.tensor.dropout import derived_keys, kept

S, B, A, D = 7, 2, 4, 6
ALL = Visible(None)


@pytest.fixture
def comm():
    return Comm(RankGrid(ParallelConfig()), 0, torch.device("cpu"))


def drawn(groups):
    """q, k, v that gradients are wanted of, and a gradient of the result."""
    torch.manual_seed(7)
    shapes = ((S, B, A, D), (S, B, groups, D), (S, B, groups, D))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes], torch.randn(
        S, B, A, D, dtype=torch.float64
    )


def formula(q_sbad, k_sbgd, v_sbgd, masks_bass=None, rate=0.0):
    heads = A // k_sbgd.shape[2]
    k_sbad, v_sbad = (x.repeat_interleave(heads, dim=2) for x in (k_sbgd, v_sbgd))
    scores = torch.einsum("sbad,tbad->bast", q_sbad, k_sbad) / math.sqrt(D)
    weights = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    if masks_bass is not None:
        weights = weights * masks_bass / (1.0 - rate)
    return torch.einsum("bast,tbad->sbad", weights, v_sbad)


def with_gradients(attend, inputs, grad):
    result = attend(*inputs)
    return [result.detach(), *torch.autograd.grad(result, inputs, grad)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_result_and_gradients_are_those_of_the_formula(comm, groups, recompute):
    inputs, grad = drawn(groups)
    expected = with_gradients(formula, inputs, grad)
    torch.testing.assert_close(
        with_gradients(
            lambda q, k, v: explicit_attention(q, k, v, ALL, None, recompute, 0.0, None, comm), inputs, grad
        ),
        expected,
    )
    torch.testing.assert_close(
        with_gradients(lambda q, k, v: fused_attention(q, k, v, ALL, None, False, recompute, comm), inputs, grad),
        expected,
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_are_dropped_by_sample_and_head(comm, recompute):
    rate, (inputs, grad) = 0.25, drawn(A)
    keys_ba = torch.arange(1, B * A + 1, dtype=torch.int32).view(B, A) * 77
    positions = torch.arange(S, dtype=torch.int32)
    masks = kept(derived_keys(keys_ba.reshape(-1, 1), positions), S, rate).view(B, A, S, S)
    assert 0 < masks.float().mean() < 1
    torch.testing.assert_close(
        with_gradients(
            lambda q, k, v: explicit_attention(q, k, v, ALL, None, recompute, rate, keys_ba, comm), inputs, grad
        ),
        with_gradients(lambda q, k, v: formula(q, k, v, masks, rate), inputs, grad),
    )


def test_batches_may_come_first(comm):
    inputs, _ = drawn(2)
    turned = [x.transpose(0, 1) for x in inputs]
    result = fused_attention(*turned, ALL, None, True, False, comm)
    torch.testing.assert_close(result.transpose(0, 1), formula(*inputs))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("groups", [2, 4])
def test_documents_that_are_apart_are_as_if_each_were_alone(comm, groups, window, recompute):
    inputs, grad = drawn(groups)
    documents, visible = Documents(((0, 3, 4), (0, 5)), S), Visible(window)
    pieces = [(0, 0, 3), (0, 3, 4), (0, 4, S), (1, 0, 5), (1, 5, S)]

    def alone(q, k, v):
        result = torch.zeros(S, B, A, D, dtype=torch.float64)
        for sample, first, end in pieces:
            part = [x[first:end, sample : sample + 1] for x in (q, k, v)]
            result[first:end, sample : sample + 1] = fused_attention(*part, visible, None, False, False, comm)
        return result

    expected = with_gradients(alone, inputs, grad)
    for attend in (
        lambda q, k, v: fused_attention(q, k, v, visible, documents, False, recompute, comm),
        lambda q, k, v: explicit_attention(q, k, v, visible, documents, recompute, 0.0, None, comm),
        lambda *turned: fused_attention(
            *(x.transpose(0, 1) for x in turned), visible, documents, True, recompute, comm
        ).transpose(0, 1),
    ):
        torch.testing.assert_close(with_gradients(attend, inputs, grad), expected)
