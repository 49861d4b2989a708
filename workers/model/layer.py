"""The common structure of the layers of all families: attention and an MLP, each preceded by a norm and added to the
residual stream.

Shapes: s sequence, b micro-batch, h hidden, t tensor-parallel size. With sequence parallelism the residual stream
between the parallel blocks is [s/t, b, h].
"""

from __future__ import annotations

import torch
from torch import nn

from manta.workers.model.attention import HeadsAttention
from manta.workers.model.shared import EMBEDDING_DROPOUT, INIT_STD, Shared, first_adapter_dropout, first_dropout
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute.modules import Recomputation, recomputation
from manta.workers.parallel.tensor.adapters import AdaptedLinear
from manta.workers.parallel.tensor.dropout import derived_keys, dropout
from manta.workers.parallel.tensor.layers import PositionEmbedding, VocabularyParallelEmbedding
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.parallel.tensor.sequence_parallel import Region
from manta.workers.spec.layer_table import layer_table_of


class Dropout:
    """Dropout of the residual stream at one place in the model."""

    def __init__(self, rate: float, place: int, region: Region):
        self.rate, self.place, self.region = rate, place, region

    def __call__(self, x: torch.Tensor, keys_b: torch.Tensor, positions: Positions) -> torch.Tensor:
        """[s or s/t, b, h], of these s positions, -> the same, for samples with these keys."""
        return dropout(x, derived_keys(keys_b, self.place), self.rate, positions.outside(self.region))


class Layer(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, shared: Shared, index: int, attention: HeadsAttention, mlp: nn.Module, norms: tuple[nn.Module, nn.Module]
    ):
        """`mlp` maps (input, ForwardPass, Recomputation or None, residual or None) to its output, as `attention`
        does."""
        super().__init__()
        rate, region = shared.spec.model.dropout, shared.region
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp
        self.attention_dropout = Dropout(rate, first_dropout(index) + 1, region)
        self.mlp_dropout = Dropout(rate, first_dropout(index) + 2, region)
        self._add_adapters(shared, index)

    def _add_adapters(self, shared: Shared, index: int) -> None:
        lora, first = shared.spec.train.lora, first_adapter_dropout(shared.spec.model, index)
        for number, products in enumerate(layer_table_of(shared.spec, index).adaptable if lora else ()):
            for weight in products.weights:
                if lora is not None and weight.adapters:
                    linear = self.get_submodule(weight.name)
                    assert isinstance(linear, AdaptedLinear)
                    linear.add_adapters(weight, lora, first + number)

    def forward(self, x: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        """[s or s/t, b, h] -> the same."""
        # Dropout comes between a block and the residual; without it the block's last product adds the residual itself.
        residual = x if run.keys_b is None else None
        y = self.attention(self.attention_norm(x), run, self._norm_recomputation(self.attention_norm, x, run), residual)
        x = y if run.keys_b is None else x + self.attention_dropout(y, run.keys_b, run.positions)
        residual = x if run.keys_b is None else None
        y = self.mlp(self.mlp_norm(x), run, self._norm_recomputation(self.mlp_norm, x, run), residual)
        return y if run.keys_b is None else x + self.mlp_dropout(y, run.keys_b, run.positions)

    @staticmethod
    def _norm_recomputation(norm: nn.Module, x: torch.Tensor, run: ForwardPass) -> Recomputation | None:
        return recomputation(norm, x) if run.recompute.norm else None


class Embedding(nn.Module):
    """Token embedding, plus a position embedding if positions are learned."""

    def __init__(self, shared: Shared, learned_positions: bool):
        super().__init__()
        spec, region = shared.spec, shared.region
        model = spec.model
        self.token = VocabularyParallelEmbedding(spec.vocabulary_size, model.hidden_size, region, INIT_STD)
        self.position: PositionEmbedding | None = None
        if learned_positions:
            self.position = PositionEmbedding(model.sequence_length, model.hidden_size, region, INIT_STD)
        self.dropout = Dropout(model.dropout, EMBEDDING_DROPOUT, region)

    def forward(self, tokens_sb: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        """Tokens [s, b] -> [s or s/t, b, h]."""
        x = self.token(tokens_sb)
        if self.position is not None:
            x = self.position(x, run.positions, run.batch_first)
        return x if run.keys_b is None else self.dropout(x, run.keys_b, run.positions)
