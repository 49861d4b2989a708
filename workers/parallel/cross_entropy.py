"""Cross-entropy over logits that are split along the vocabulary (arXiv:1909.08053, section 3): instead of the
logits, three numbers a token cross the tensor group.

Shapes: n tokens, v vocabulary padded to a multiple of the tensor-parallel size t.
"""

from __future__ import annotations

from typing import Any

import torch

from workers.comm import Comm


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_nv: torch.Tensor, targets_n: torch.Tensor, vocabulary_size: int, comm: Comm
    ) -> torch.Tensor:
        columns = logits_nv.shape[1]
        start = comm.index("tensor") * columns
        real = max(0, min(columns, vocabulary_size - start))
        largest_n = logits_nv[:, :real].amax(1) if real else logits_nv.new_full((len(logits_nv),), float("-inf"))
        comm.all_reduce("tensor", largest_n, largest=True)
        exponentials_nv = (logits_nv - largest_n.unsqueeze(1)).exp_()
        exponentials_nv[:, real:] = 0.0  # padding of the vocabulary has no probability

        local_n = targets_n - start
        mine_n = (local_n >= 0) & (local_n < real)
        local_n = local_n.masked_fill(~mine_n, 0)
        target_logit_n = logits_nv.gather(1, local_n.unsqueeze(1)).squeeze(1) - largest_n
        sums_2n = torch.stack([exponentials_nv.sum(1), target_logit_n.masked_fill(~mine_n, 0.0)])
        comm.all_reduce("tensor", sums_2n)
        ctx.save_for_backward(exponentials_nv.div_(sums_2n[0].unsqueeze(1)), local_n, mine_n)
        return sums_2n[0].log() - sums_2n[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities_nv, local_n, mine_n = ctx.saved_tensors
        grad_nv = probabilities_nv.clone()
        grad_nv.scatter_add_(1, local_n.unsqueeze(1), -mine_n.to(grad_nv.dtype).unsqueeze(1))
        return grad_nv.mul_(grads[0].unsqueeze(1)), None, None, None


def vocabulary_parallel_cross_entropy(
    logits_nv: torch.Tensor, targets_n: torch.Tensor, vocabulary_size: int, comm: Comm
) -> torch.Tensor:
    """Loss of each token, in nats: logits [n, v/t], targets [n] -> [n], the same on every tensor rank.

    `vocabulary_size` is the number of real token ids; columns past it are padding.
    """
    return _VocabularyParallelCrossEntropy.apply(logits_nv, targets_n, vocabulary_size, comm)
