"""Cross-entropy over a split vocabulary is torch's, whatever the size of the vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cross_entropy_programs import cross_entropy, cross_entropy_with_squares
from engine_specs import layout_of

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.parallel.tensor import cross_entropy as cross_entropy_module
from manta.workers.parallel.tensor.cross_entropy import (
    BLOCK_ROWS,
    BY_BLOCKS,
    LossKernels,
    compiled_kernels,
    cross_entropy_and_log_z,
    vocabulary_parallel_cross_entropy,
)
from manta.workers.parallel.tensor.layers import vocabulary_rows

TOKENS = 12


def case(vocabulary: int, tensor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, padded v] in fp64, large ones among them and nonsense in the padding, and targets [n]."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(TOKENS, vocabulary_rows(vocabulary, tensor) * tensor, dtype=torch.float64, generator=generator)
    logits[0] += 1000.0
    logits[1] -= 1000.0
    logits[:, vocabulary:] = 5000.0
    targets = torch.randint(vocabulary, (TOKENS,), generator=generator)
    targets[2], targets[3] = vocabulary - 1, 0
    return logits, targets


@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
@pytest.mark.parametrize("vocabulary", [12, 13, 5, 9])
def test_losses_and_gradients_are_torchs(ranks, tensor, vocabulary):
    logits, targets = case(vocabulary, tensor)
    real = logits[:, :vocabulary].clone().requires_grad_()
    expected = F.cross_entropy(real, targets, reduction="none")
    expected.backward(torch.arange(1, TOKENS + 1, dtype=torch.float64))
    by_rank = ranks.run(layout_of(tensor=tensor), cross_entropy, logits, targets, vocabulary)
    gradient = torch.cat([grad for _, grad in by_rank], dim=1)
    for losses, _ in by_rank:
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient[:, :vocabulary], real.grad, rtol=1e-12, atol=1e-12)
    assert (gradient[:, vocabulary:] == 0).all(), "padding of the vocabulary learns nothing"


WHOLE = LossKernels(
    cross_entropy_module._full_sums, cross_entropy_module._full_exponentials, cross_entropy_module._full_scaled
)
KERNELS = {"by blocks": lambda: BY_BLOCKS, "whole": lambda: WHOLE, "compiled": compiled_kernels}


@pytest.mark.parametrize("rows", [257, 513])
@pytest.mark.parametrize("made", ["by blocks", "whole", pytest.param("compiled", marks=pytest.mark.soak)])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)], ids=str)
def test_every_row_of_16_bit_logits_is_processed(made, dtype, rounding, rows):
    """Rows are widened BLOCK_ROWS at a time; here the last block has one. Losses have the precision of fp32, and a
    gradient is rounded once, to 16 bits (2^-24: the smallest number of fp16)."""
    assert rows % BLOCK_ROWS == 1
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 37, generator=generator).mul_(3.0).to(dtype)
    targets = torch.randint(37, (rows,), generator=generator)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    expected.sum().backward()
    leaf = logits.clone().requires_grad_()
    alone = Comm(RankGrid(layout_of()), 0, torch.device("cpu"))
    losses = vocabulary_parallel_cross_entropy(leaf.clone(), targets, 37, alone, KERNELS[made]())
    losses.sum().backward()
    torch.testing.assert_close(losses.detach().double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1.01 * rounding, atol=2.0**-24)


@pytest.mark.parametrize("loss_scale", [2.0**-3, 1.0, 2.0**10])
def test_small_probabilities_in_fp16_lose_no_digits_before_the_loss_scale(loss_scale):
    """The smallest number with all digits is 2^-14; of a large vocabulary most probabilities are below."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, 4096, generator=generator).mul_(3.0).half()
    targets = torch.randint(4096, (8,), generator=generator)
    exact = logits.double().requires_grad_()
    (F.cross_entropy(exact, targets, reduction="sum") * loss_scale).backward()
    leaf = logits.clone().requires_grad_()
    alone = Comm(RankGrid(layout_of()), 0, torch.device("cpu"))
    (vocabulary_parallel_cross_entropy(leaf.clone(), targets, 4096, alone).sum() * loss_scale).backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2.02 * 2.0**-11, atol=2.0**-24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_logits_are_summed_over_ranks_whose_own_largest_ones_differ(ranks, dtype):
    tensor, vocabulary = 2, 12
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(TOKENS, vocabulary_rows(vocabulary, tensor) * tensor, generator=generator).to(dtype)
    logits[:, vocabulary // 2 :] += 4.0
    targets = torch.arange(TOKENS) % vocabulary
    exact = logits[:, :vocabulary].double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    expected.backward(torch.arange(1, TOKENS + 1, dtype=torch.float64))
    by_rank = ranks.run(layout_of(tensor=tensor), cross_entropy, logits, targets, vocabulary)
    for losses, _ in by_rank:
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    gradient = torch.cat([grad for _, grad in by_rank], dim=1)[:, :vocabulary]
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=2.0**-7, atol=2.0**-10)


def expected_with_squares(logits: torch.Tensor, targets: torch.Tensor, weight: float) -> tuple[torch.Tensor, ...]:
    """Losses, squares of log Z, and the gradient of their weighted sum by autograd, in fp64; negative targets have
    neither."""
    real = logits.double().requires_grad_()
    losses = F.cross_entropy(real, targets, reduction="none", ignore_index=-1)
    squares = real.logsumexp(1).square() * (targets >= 0)
    (losses + weight * squares).backward(torch.arange(1, len(targets) + 1, dtype=torch.float64))
    return losses.detach(), squares.detach(), real.grad


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("vocabulary", [12, 13, 5])
def test_squares_of_log_z_and_their_gradients_are_autograds(ranks, tensor, vocabulary):
    logits, targets = case(vocabulary, tensor)
    targets[5] = -1
    expected = expected_with_squares(logits[:, :vocabulary], targets, 0.1)
    assert expected[1][0] > 1e5, "large logits have a large Z"
    by_rank = ranks.run(layout_of(tensor=tensor), cross_entropy_with_squares, logits, targets, vocabulary, 0.1)
    for losses, squares, _ in by_rank:
        torch.testing.assert_close((losses, squares), expected[:2], rtol=1e-12, atol=1e-12)
    gradient = torch.cat([grad for _, _, grad in by_rank], dim=1)
    torch.testing.assert_close(gradient[:, :vocabulary], expected[2], rtol=1e-12, atol=1e-12)
    assert (gradient[:, vocabulary:] == 0).all(), "padding of the vocabulary learns nothing"


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)], ids=str)
def test_squares_of_16_bit_logits_have_the_precision_of_fp32(dtype, rounding):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(BLOCK_ROWS + 1, 37, generator=generator).mul_(3.0).to(dtype)
    targets = torch.randint(37, (len(logits),), generator=generator)
    losses, squares, gradient = expected_with_squares(logits, targets, 0.01)
    alone = Comm(RankGrid(layout_of()), 0, torch.device("cpu"))
    leaf = logits.clone().requires_grad_()
    actual = cross_entropy_and_log_z(leaf.clone(), targets, 37, alone)
    (actual[0] + 0.01 * actual[1]).backward(torch.arange(1.0, len(targets) + 1))
    torch.testing.assert_close(actual[0].detach().double(), losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual[1].detach().double(), squares, rtol=1e-6, atol=1e-6)
    # The factor on a row is rounded to 16 bits as well as the result.
    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=3 * rounding, atol=2.0**-14)


@pytest.mark.parametrize("positions", [300 * 4096, 960 * 8192, 1000, 1024])
def test_the_loss_scale_is_not_rounded_to_16_bits(positions):
    """Rounding to bf16 moves 1 / (300 x 4096) by 0.2%, and every gradient with it."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2048, 32, generator=generator).to(torch.bfloat16)
    targets = torch.randint(32, (2048,), generator=generator)
    exact = logits.double().requires_grad_()
    F.cross_entropy(exact, targets, reduction="sum").backward()
    given = logits.clone().requires_grad_()
    comm = Comm(RankGrid(layout_of()), 0, torch.device("cpu"))
    losses = vocabulary_parallel_cross_entropy(given * 1.0, targets, 32, comm)
    losses.sum().backward(torch.tensor(1.0 / positions))
    total = given.grad.double().abs().sum() * positions
    assert total.item() == pytest.approx(exact.grad.abs().sum().item(), rel=2e-4)
