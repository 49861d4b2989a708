"""Cross-entropy over a split vocabulary is torch's, whatever the size of the vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from engine_specs import layout_of
from rank_programs import cross_entropy

from workers.parallel.tensor.layers import vocabulary_rows

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
    found = ranks.run(layout_of(tensor=tensor), cross_entropy, logits, targets, vocabulary)
    gradient = torch.cat([grad for _, grad in found], dim=1)
    for losses, _ in found:
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient[:, :vocabulary], real.grad, rtol=1e-12, atol=1e-12)
    assert (gradient[:, vocabulary:] == 0).all(), "padding of the vocabulary learns nothing"
