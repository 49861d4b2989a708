"""One virtual stage of a model.

Shapes: s sequence, b micro-batch, h hidden, v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from workers.model.families import parts_of
from workers.model.initial import INIT_STD
from workers.model.shared import Shared
from workers.parallel.pipeline.forward_pass import ForwardPass
from workers.parallel.pipeline.stages import stage_layers
from workers.parallel.recompute.modules import checkpointed
from workers.parallel.tensor.layers import VocabularyParallelOutput


class Chunk(nn.Module):
    """Some consecutive layers; the embedding before the first of all, the final norm and the output behind the last."""

    def __init__(self, shared: Shared, index: int, count: int):
        """Virtual stage `index` of `count`, in model order."""
        super().__init__()
        spec, model, region = shared.spec, shared.spec.model, shared.region
        parts = parts_of(model)
        self.shared, self.region, self.index = shared, region, index
        self.is_first, self.is_last = index == 0, index == count - 1
        self.sequence_is_whole = count == 1 and region.tensor_size == 1  # so nobody else sees the order of its tokens
        self.before: Callable[[nn.Module], object] = _nothing
        """Called with each part before it computes: its parameters may still be on their way."""
        self.embedding = parts.embedding(shared) if self.is_first else None
        indices = stage_layers(model.layers, count, index)
        self.layers = nn.ModuleDict({str(i): parts.layer(shared, i) for i in indices})
        self.final_norm = parts.norm(model) if self.is_last else None
        self.output: VocabularyParallelOutput | None = None
        if self.is_last:
            self.output = VocabularyParallelOutput(model.hidden_size, spec.vocabulary_size, region, INIT_STD)

    def forward(self, x: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        """Tokens [s, b] in the first virtual stage, else [s or s/t, b, h]; logits [s, b, v/t] in the last one, perhaps
        a view of [b, s, v], else [s or s/t, b, h]."""
        if self.sequence_is_whole and run.keys_b is None:
            run = replace(run, batch_first=True)
            x = x.t().contiguous()
        if self.embedding is not None:
            self.before(self.embedding)
            x = self.embedding(x, run)
        self.shared.prepare(x)
        for name, layer in self.layers.items():
            self.before(layer)
            x = _gradient_begins(x, layer)
            whole = run.recompute.whole_layer(int(name))
            x = checkpointed(self.region.comm, layer, x, run) if whole else layer(x, run)
        if run.cache is not None:
            x = x[:, -1:]
        if self.final_norm is not None and self.output is not None:
            self.before(self.final_norm)
            self.before(self.output)
            x = self.output(_gradient_begins(self.final_norm(x), self.output))
        return x.transpose(0, 1) if run.batch_first else x


def _nothing(module: nn.Module) -> None:
    pass


def _gradient_begins(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """The module's input, which has a gradient where nothing before the module is trained and the module is: its
    products take theirs from it (workers/parallel/tensor/linear_autograd.py)."""
    if not torch.is_grad_enabled() or x.requires_grad or not any(each.requires_grad for each in module.parameters()):
        return x
    return x.detach().requires_grad_()
