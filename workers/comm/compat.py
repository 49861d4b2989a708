"""Names that differ between torch 2.11 and 2.13."""

from __future__ import annotations

import torch.distributed as dist

# 2.13 deprecates the *_tensor names in favour of *_single, which 2.11 does not have.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
