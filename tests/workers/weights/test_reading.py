"""What a rank holds beyond the weights that it reads."""

import pytest
import torch
from torch import nn

from manta.workers.parallel.tensor.shards import NamedShard, ParameterShard
from manta.workers.weights.reading import Weights


@pytest.mark.parametrize(("start", "real"), [(0, 66), (198, 65), (264, 0)])
def test_padded_vocabulary_rows_are_filled_with_zero(start, real):
    """A number that is none would go through gradients of the others, which it is multiplied with zero for."""
    weights = object.__new__(Weights)
    weights._parts = {"embedding.token.weight": []}
    shard = ParameterShard((263, 4), 0, start, group="embedding")
    local = torch.full((66, 4), torch.nan)
    weights.fill(NamedShard("embedding.token.weight", nn.Parameter(local), shard, by_autograd=False), local)
    assert local[:real].isnan().all() and (local[real:] == 0.0).all()
