"""One virtual stage of a model.

Shapes: s sequence, b micro-batch, h hidden, v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from workers.model.families import parts_of
from workers.model.initial import INIT_STD
from workers.model.shared import Shared
from workers.parallel.pipeline.forward_pass import ForwardPass
from workers.parallel.pipeline.stages import layers_of
from workers.parallel.recompute.modules import checkpointed
from workers.parallel.recompute.offload import OffloadedPass, memory_of
from workers.parallel.tensor.layers import VocabularyParallelOutput


class Chunk(nn.Module):
    """Some consecutive layers; the first chunk has the embedding too, the last one the final norm and the output."""

    def __init__(self, shared: Shared, index: int, count: int):
        """Virtual stage `index` of `count`, in model order."""
        super().__init__()
        spec, model, region = shared.spec, shared.spec.model, shared.region
        parts = parts_of(model)
        self.shared, self.region, self.index = shared, region, index
        self.is_first, self.is_last = index == 0, index == count - 1
        self.sequence_is_whole = count == 1 and region.tensor_size == 1  # so the order of tokens concerns no other rank
        self.before: Callable[[nn.Module], object] = _nothing
        """Called with each part before it computes: its parameters may not have arrived yet."""
        self._stays: frozenset[int] | None = None
        """Memory that is not an activation, once it is known."""
        self.embedding = parts.embedding(shared) if self.is_first else None
        indices = layers_of(model.layers, spec.layout, index)
        self.layers = nn.ModuleDict({str(i): parts.layer(shared, i) for i in indices})
        self.final_norm = parts.norm(model) if self.is_last else None
        self.output: VocabularyParallelOutput | None = None
        if self.is_last:
            by_parts = spec.train.head_tokens > 0
            self.output = VocabularyParallelOutput(model.hidden_size, spec.vocabulary_size, region, INIT_STD, by_parts)

    def forward(self, x: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        """Tokens [s, b] in the first virtual stage, otherwise [s or s/t, b, h]. Returns logits [s, b, v/t] in the last
        one, or the input of the output layer, perhaps as a view of [b, s, v]; otherwise [s or s/t, b, h]."""
        if self.sequence_is_whole and run.keys_b is None:
            run = replace(run, batch_first=True)
            x = x.t().contiguous()
        if self.embedding is not None:
            self.before(self.embedding)
            x = self.embedding(x, run)
        self.shared.prepare(x)
        offloading = self._offloading()
        for name, layer in self.layers.items():
            self.before(layer)
            x = _gradient_begins(x, layer)
            part = partial(self._layer, name, layer, run)
            x = part(x) if offloading is None else offloading.run(part, x)
        if offloading is not None:
            offloading.end()
        if run.cache is not None:
            x = x[:, -1:]
        if self.final_norm is not None and self.output is not None:
            self.before(self.final_norm)
            self.before(self.output)
            x = self.final_norm(x)
            if run.logits:
                x = self.output(_gradient_begins(x, self.output))
        return x.transpose(0, 1) if run.batch_first else x

    def _layer(self, name: str, layer: nn.Module, run: ForwardPass, x: torch.Tensor) -> torch.Tensor:
        whole = run.recompute.whole_layer(int(name))
        result: torch.Tensor = checkpointed(self.region.comm, layer, x, run) if whole else layer(x, run)
        return result

    def _offloading(self) -> OffloadedPass | None:
        """Offloads activations to the host, if the job asks for it."""
        count = self.shared.spec.layout.offload_layers
        if not count or not torch.is_grad_enabled():
            return None
        if self._stays is None:
            self._stays = frozenset(memory_of(each) for each in (*self.parameters(), *self.shared.all_tables()))
        return OffloadedPass(len(self.layers), count, self.shared.host_blocks, self._stays)


def _nothing(module: nn.Module) -> None:
    pass


def _gradient_begins(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """The module's input. It requires a gradient if something in the module is trained, even if nothing before it is:
    the module's products only have a gradient if their input has one (workers/parallel/tensor/linear_autograd.py)."""
    if not torch.is_grad_enabled() or x.requires_grad or not any(each.requires_grad for each in module.parameters()):
        return x
    return x.detach().requires_grad_()
