"""Tensor and sequence parallel layers over plain local tensors (arXiv:1909.08053; arXiv:2205.05198, section 4.2).

Shapes: s sequence, b micro-batch, h hidden, t tensor-parallel size, v padded vocabulary.
With sequence parallelism, tensors outside the parallel regions are [s/t, b, h].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from manta.workers.parallel.recompute.modules import Recomputation
from manta.workers.parallel.tensor import compiled_operators
from manta.workers.parallel.tensor.adapters import AdaptedLinear, InputDropout, adaptation_of
from manta.workers.parallel.tensor.linear_autograd import (
    column_parallel,
    column_parallel_pair,
    embedding_lookup,
    gated_row_parallel,
    gelu_row_parallel,
    row_parallel,
)
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.parallel.tensor.products import APPROXIMATION, Gelu
from manta.workers.parallel.tensor.sequence_parallel import Region, leave
from manta.workers.parallel.tensor.shards import ParameterShard, ShardedModule
from manta.workers.spec.parameters import padded_rows


class ColumnParallelLinear(AdaptedLinear):
    """y = x W^T + b with W [out, in] split over its rows: [s or s/t, b, in] -> [s, b, out/t].

    With fewer `units` of rows (key-value heads) than tensor ranks, neighbouring ranks hold the same unit.
    """

    def __init__(self, inputs: int, outputs: int, region: Region, bias: bool, std: float, units: int | None = None):
        super().__init__()
        self.region = region
        size, index = region.tensor_size, region.comm.index("tensor")
        copies = max(1, size // units) if units else 1
        rows = outputs * copies // size
        start = index // copies * rows
        self.weight = self.add_parameter(
            "weight", (rows, inputs), ParameterShard((outputs, inputs), 0, start, copies=copies, std=std)
        )
        bias_shard = ParameterShard((outputs,), 0, start, copies=copies, group="bias")
        self.bias = self.add_parameter("bias", (rows,), bias_shard) if bias else None

    def forward(
        self, x: torch.Tensor, recompute_input: Recomputation | None = None, dropout: InputDropout | None = None
    ) -> torch.Tensor:
        """[s or s/t, b, in] -> [s, b, out/t]. `dropout`: that of the adapters' input."""
        if torch.compiler.is_compiling():
            return compiled_operators.column_parallel(x, self.weight, self.bias, self.region.sequence_split)
        adapted = adaptation_of(self.adapters, dropout=dropout)
        return column_parallel(x, self.weight, self.bias, self.region, recompute_input, adapted)


class WholeLinear(ColumnParallelLinear):
    """y = x W^T + b with all of W [out, in] on every tensor rank, which has its own tokens: [s or s/t, b, in] ->
    [s or s/t, b, out]."""

    def __init__(self, inputs: int, outputs: int, region: Region, bias: bool, std: float):
        AdaptedLinear.__init__(self)
        self.region = region.within_a_rank()
        # Of a single tensor rank it is like any other matrix, which ZeRO 2 and 3 divide.
        shard = ParameterShard((outputs, inputs), 0 if region.tensor_size == 1 else None, std=std)
        self.weight = self.add_parameter("weight", (outputs, inputs), shard)
        self.bias = self.add_parameter("bias", (outputs,), ParameterShard((outputs,), group="bias")) if bias else None


def paired_forward(
    x: torch.Tensor,
    first: ColumnParallelLinear,
    second: ColumnParallelLinear,
    recompute_input: Recomputation | None = None,
    dropout: InputDropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two column-parallel layers of the same x, which is gathered and reduced once. `dropout`: that of the adapters'
    input."""
    region, pair = first.region, ((first.weight, first.bias), (second.weight, second.bias))
    if torch.compiler.is_compiling():
        return compiled_operators.column_parallel_pair(x, *pair[0], *pair[1], region.sequence_split)
    adapted = adaptation_of(first.adapters, second.adapters, dropout=dropout)
    return column_parallel_pair(x, *pair, region, recompute_input, adapted)


class RowParallelLinear(AdaptedLinear):
    """y = x W^T + b, W [out, in] split over columns: [s, b, in/t] -> [s or s/t, b, out]; with `gelu`, of gelu(x)."""

    def __init__(self, inputs: int, outputs: int, region: Region, bias: bool, std: float, gelu: Gelu | None = None):
        super().__init__()
        self.region, self.gelu = region, gelu
        columns = inputs // region.tensor_size
        start = region.comm.index("tensor") * columns
        self.weight = self.add_parameter(
            "weight", (outputs, columns), ParameterShard((outputs, inputs), 1, start, std=std)
        )
        self.bias = self.add_parameter("bias", (outputs,), ParameterShard((outputs,), group="bias")) if bias else None

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        recompute_gelu: bool = False,
        dropout: InputDropout | None = None,
    ) -> torch.Tensor:
        """[s, b, in/t] -> [s or s/t, b, out]. Bias and `residual` are added once, after the sum. `dropout`: that of the
        adapters' input."""
        if torch.compiler.is_compiling():
            active = F.gelu(x, approximate=APPROXIMATION[self.gelu]) if self.gelu else x
            y = compiled_operators.row_parallel(active, self.weight, self.bias, self.region.sequence_split)
            return y if residual is None else residual + y
        linear, adapted = (self.weight, self.bias, self.region, residual), adaptation_of(self.adapters, dropout=dropout)
        if self.gelu:
            return gelu_row_parallel(x, *linear, recompute_gelu, self.gelu, adapted)
        return row_parallel(x, *linear, adapted)


class GatedRowParallelLinear(RowParallelLinear):
    """y = (silu(gate) up) W^T + b (SwiGLU, arXiv:2002.05202) with W [out, in] split over its columns:
    [s, b, in/t] each -> [s or s/t, b, out]."""

    def forward(  # type: ignore[override]
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        residual: torch.Tensor | None = None,
        recompute_product: bool = False,
        dropout: InputDropout | None = None,
    ) -> torch.Tensor:
        """[s, b, in/t] each -> [s or s/t, b, out]. Bias and `residual` are added once, after the sum. `dropout`: that
        of the adapters' input."""
        if torch.compiler.is_compiling():
            return super().forward(F.silu(gate) * up, residual)
        adapted = adaptation_of(self.adapters, dropout=dropout)
        return gated_row_parallel(gate, up, self.weight, self.bias, self.region, residual, recompute_product, adapted)


class LayerNorm(ShardedModule):
    """Layer norm over h, on this rank's part of the sequence."""

    by_autograd = True

    def __init__(self, size: int, bias: bool, epsilon: float = 1e-5):
        super().__init__()
        self.epsilon = epsilon
        shard = ParameterShard((size,), group="norm", constant=1.0)
        self.weight = self.add_parameter("weight", (size,), shard)
        self.bias = self.add_parameter("bias", (size,), ParameterShard((size,), group="bias")) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h] -> [..., h]."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.epsilon)


def vocabulary_rows(vocabulary_size: int, tensor_size: int) -> int:
    """Rows of the token embedding on each tensor rank; if padded, the last ranks' extend past the vocabulary."""
    return padded_rows(vocabulary_size, tensor_size) // tensor_size


class VocabularyParallelEmbedding(ShardedModule):
    """Token embedding with W [v, h] split over the vocabulary: tokens [s, b] -> [s or s/t, b, h]."""

    def __init__(self, vocabulary_size: int, hidden_size: int, region: Region, std: float):
        super().__init__()
        self.region = region
        self.rows = vocabulary_rows(vocabulary_size, region.tensor_size)
        self.start = region.comm.index("tensor") * self.rows
        shard = ParameterShard((vocabulary_size, hidden_size), 0, self.start, group="embedding", std=std)
        self.weight = self.add_parameter("weight", (self.rows, hidden_size), shard)

    def forward(self, tokens_sb: torch.Tensor) -> torch.Tensor:
        """Each rank looks up the tokens that it holds; other rows are zero in its partial sum."""
        region = self.region
        if region.tensor_size == 1:
            return embedding_lookup(tokens_sb, self.weight, region)
        local_sb = tokens_sb - self.start
        foreign_sb = (local_sb < 0) | (local_sb >= self.rows)
        x_sbh = embedding_lookup(local_sb.masked_fill(foreign_sb, 0), self.weight, region)
        x_sbh = x_sbh.masked_fill(foreign_sb.unsqueeze(-1), 0.0)
        return leave(x_sbh, region)


class PositionEmbedding(ShardedModule):
    """Learned positions W [s, h], added to this rank's part of the sequence."""

    by_autograd = True

    def __init__(self, length: int, hidden_size: int, region: Region, std: float):
        super().__init__()
        self.region = region
        shard = ParameterShard((length, hidden_size), group="embedding", std=std)
        self.weight = self.add_parameter("weight", (length, hidden_size), shard)

    def forward(self, x: torch.Tensor, positions: Positions, batch_first: bool = False) -> torch.Tensor:
        """[s or s/t, b, h], or [b, s, h] with `batch_first`, of the s `positions`, -> the same."""
        rows = positions.outside(self.region).rows_of(self.weight)
        return x + (rows if batch_first else rows.unsqueeze(1))


class VocabularyParallelOutput(ShardedModule):
    """Logits: [s or s/t, b, h] -> [s, b, v/t]."""

    def __init__(
        self, hidden_size: int, vocabulary_size: int, region: Region, std: float, never_deferred: bool = False
    ):
        super().__init__()
        self.region, self.never_deferred = region, never_deferred
        rows = vocabulary_rows(vocabulary_size, region.tensor_size)
        shard = ParameterShard((vocabulary_size, hidden_size), 0, region.comm.index("tensor") * rows, std=std)
        self.weight = self.add_parameter("weight", (rows, hidden_size), shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s or s/t, b, h] -> [s, b, v/t]."""
        return column_parallel(x, self.weight, None, self.region)
