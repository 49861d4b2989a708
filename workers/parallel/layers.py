"""Tensor and sequence parallel layers over plain local tensors (arXiv:1909.08053; arXiv:2205.05198, section 4.2).

Shapes: s sequence, b micro-batch, h hidden, t tensor-parallel size, v vocabulary padded to a multiple of t.
With sequence parallelism, tensors outside the parallel regions are [s/t, b, h].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from workers.comm import Comm
from workers.parallel.mappings import enter_tensor_region, leave_tensor_region
from workers.parallel.shards import ParameterShard, ShardedModule, as_shared_copy


class ColumnParallelLinear(ShardedModule):
    """y = x W^T + b with W [out, in] split over its rows: [s or s/t, b, in] -> [s, b, out/t]."""

    def __init__(self, inputs: int, outputs: int, comm: Comm, sequence_parallel: bool, bias: bool, std: float):
        super().__init__()
        self.comm, self.sequence_parallel = comm, sequence_parallel
        rows = outputs // comm.size("tensor")
        start = comm.index("tensor") * rows
        self.weight = self.add_parameter("weight", (rows, inputs), ParameterShard((outputs, inputs), 0, start, std=std))
        self.bias = (
            self.add_parameter("bias", (rows,), ParameterShard((outputs,), 0, start, decay=False)) if bias else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s or s/t, b, in] -> [s, b, out/t]."""
        return F.linear(enter_tensor_region(x, self.comm, self.sequence_parallel), self.weight, self.bias)


class RowParallelLinear(ShardedModule):
    """y = x W^T + b with W [out, in] split over its columns: [s, b, in/t] -> [s or s/t, b, out]."""

    def __init__(self, inputs: int, outputs: int, comm: Comm, sequence_parallel: bool, bias: bool, std: float):
        super().__init__()
        self.comm, self.sequence_parallel = comm, sequence_parallel
        columns = inputs // comm.size("tensor")
        start = comm.index("tensor") * columns
        self.weight = self.add_parameter(
            "weight", (outputs, columns), ParameterShard((outputs, inputs), 1, start, std=std)
        )
        self.bias = self.add_parameter("bias", (outputs,), ParameterShard((outputs,), decay=False)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, in/t] -> [s or s/t, b, out]. The bias is added once, after the sum."""
        y = leave_tensor_region(F.linear(x, self.weight), self.comm, self.sequence_parallel)
        return y if self.bias is None else y + self.bias


class LayerNorm(ShardedModule):
    """Layer norm over h, on whatever part of the sequence this rank holds."""

    def __init__(self, size: int, bias: bool, epsilon: float = 1e-5):
        super().__init__()
        self.epsilon = epsilon
        shard = ParameterShard((size,), decay=False, constant=1.0)
        self.weight = self.add_parameter("weight", (size,), shard)
        self.bias = self.add_parameter("bias", (size,), ParameterShard((size,), decay=False)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h] -> [..., h]."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.epsilon)


def vocabulary_rows(vocabulary_size: int, tensor_size: int) -> int:
    """Rows of the token embedding on each tensor rank; the last rank's reach past the vocabulary when it does not
    divide."""
    return -(-vocabulary_size // tensor_size)


class VocabularyParallelEmbedding(ShardedModule):
    """Token embedding with W [v, h] split over the vocabulary: tokens [s, b] -> [s or s/t, b, h]."""

    def __init__(self, vocabulary_size: int, hidden_size: int, comm: Comm, sequence_parallel: bool, std: float):
        super().__init__()
        self.comm, self.sequence_parallel = comm, sequence_parallel
        self.rows = vocabulary_rows(vocabulary_size, comm.size("tensor"))
        self.start = comm.index("tensor") * self.rows
        shard = ParameterShard((vocabulary_size, hidden_size), 0, self.start, std=std)
        self.weight = self.add_parameter("weight", (self.rows, hidden_size), shard)

    def forward(self, tokens_sb: torch.Tensor) -> torch.Tensor:
        """Each rank looks up the tokens it holds; the others' rows are zero in its partial sum."""
        if self.comm.size("tensor") == 1:
            return F.embedding(tokens_sb, self.weight)
        local_sb = tokens_sb - self.start
        foreign_sb = (local_sb < 0) | (local_sb >= self.rows)
        x_sbh = F.embedding(local_sb.masked_fill(foreign_sb, 0), self.weight)
        x_sbh = x_sbh.masked_fill(foreign_sb.unsqueeze(-1), 0.0)
        return leave_tensor_region(x_sbh, self.comm, self.sequence_parallel)


class PositionEmbedding(ShardedModule):
    """Learned positions W [s, h], added to this rank's part of the sequence."""

    def __init__(self, length: int, hidden_size: int, comm: Comm, sequence_parallel: bool, std: float):
        super().__init__()
        self.comm, self.sequence_parallel = comm, sequence_parallel
        shard = ParameterShard((length, hidden_size), std=std)
        self.weight = self.add_parameter("weight", (length, hidden_size), shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s or s/t, b, h] -> the same."""
        start = self.comm.index("tensor") * x.shape[0] if self.sequence_parallel else 0
        return x + self.weight[start : start + x.shape[0]].unsqueeze(1)


class VocabularyParallelOutput(ShardedModule):
    """Logits: [s or s/t, b, h] -> [s, b, v/t]. `tied` makes its weight the last stage's copy of the embedding."""

    def __init__(
        self, hidden_size: int, vocabulary_size: int, comm: Comm, sequence_parallel: bool, std: float, tied: bool
    ):
        super().__init__()
        self.comm, self.sequence_parallel = comm, sequence_parallel
        rows = vocabulary_rows(vocabulary_size, comm.size("tensor"))
        shard = ParameterShard((vocabulary_size, hidden_size), 0, comm.index("tensor") * rows, std=std)
        self.weight = self.add_parameter("weight", (rows, hidden_size), as_shared_copy(shard) if tied else shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s or s/t, b, h] -> [s, b, v/t]."""
        return F.linear(enter_tensor_region(x, self.comm, self.sequence_parallel), self.weight)
